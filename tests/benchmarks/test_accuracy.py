"""The generator of docs/accuracy.md: its sections on a small file, and the arithmetic of its targets by hand."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainplan.planner.comparisons import compare
from trainplan.planner.fitting import as_factors, fit_all
from trainplan.planner.rows import Row


@pytest.fixture(scope="module")
def accuracy() -> SimpleNamespace:
    """The scripts in benchmarks/ that make docs/accuracy.md, which are no modules of the package."""
    folder = Path(__file__).parents[2] / "benchmarks"
    found: dict[str, Any] = {}
    for name in ("accuracy_figures", "accuracy_page"):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        found |= vars(module)
    return SimpleNamespace(**found)


def gpt3(block: str, gbs: int, seconds: float, **changed: Any) -> dict[str, Any]:
    """GPT-3 175B on 64 A100: Korthikanti et al. 2022, arXiv:2205.05198, table 5, with another batch."""
    model = {
        "name": "GPT-3 175B", "layers": 96, "hidden": 12288, "heads": 96, "kv_heads": 96, "head_dim": 128, "ffn": 49152,
        "vocab": 51200, "gated_mlp": False, "moe": None,
    }  # fmt: skip
    return {
        "id": f"{block}-{gbs}", "block": block, "model": model, "gpu": "A100-80GB", "n_gpus": 64, "gpus_per_node": 8,
        "seq": 2048, "gbs": gbs, "mbs": 1, "tp": 8, "sp": True, "pp": 8, "vpp": 3, "dp": 1, "cp": 1,
        "zero_or_fsdp": "none (dp=1)", "recompute": "selective attention + sequence parallel", "precision": "fp16",
        "framework": "Megatron-LM", "task": "pretrain", "measured": {"step_time_s": seconds}, **changed,
    }  # fmt: skip


def block(name: str, micro_batch_s: float) -> list[dict[str, Any]]:
    """Steps of 8 to 128 sequences whose micro-batches all take the same time."""
    return [gpt3(name, gbs, micro_batch_s * (gbs + 7 / 3)) for gbs in (8, 16, 32, 64, 128)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks, one row that is not complete, and the published row itself."""
    found = [*block("korthikanti", 13.75 / 66.3), *block("bloom_a100", 0.23), gpt3("bloom_a100", 256, 60.0, mbs=None)]
    found[3] = gpt3("korthikanti", 64, 13.75)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


@pytest.fixture(scope="module")
def found(accuracy: SimpleNamespace, rows: Path) -> dict[str, Any]:
    figures: dict[str, Any] = accuracy.figures(rows, draws=2)
    return figures


def test_the_document_has_its_sections_in_ascii(accuracy: SimpleNamespace, found: dict[str, Any], rows: Path) -> None:
    kernel = {"device": "all", "n": 4, "median": 0.0321, "p90": 0.1, "worst": 0.3, "bias": -0.01}
    reports = {
        "gemm": [kernel | {"dtype": "bf16", "left_out": "one k"}],
        "kernels": [{"of": "imbalance", "device": "all", "what": "1024 tokens, ep 8: skewed", "n": 1, "median": 1.34}],
    }
    text = accuracy.document(found, reports)
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert [title.split(".")[0] for title in titles] == [f"## {i}" for i in range(1, 9)]
    assert "| all | bf16 | one k | 4 | 3.2 | 10.0 | 30.0 | -1.0 |" in text
    assert "| 1024 | 1.34 |" in text
    assert "mbs is not published: bloom_a100 (step time) 1." in text
    assert text.isascii()
    assert str(rows.parent) not in text
    json.dumps(found, allow_nan=False)


def test_a_table_has_as_many_cells_as_headers(accuracy: SimpleNamespace, found: dict[str, Any]) -> None:
    widths: set[int] = set()
    for line in accuracy.document(found, {}).splitlines():
        if line.startswith("|"):
            widths.add(line.count("|"))
        else:
            assert len(widths) < 2, line
            widths = set()


def test_the_published_step_of_gpt3_is_a_target(found: dict[str, Any]) -> None:
    (line,) = (line for line in found["targets"] if "13.75 s" in line["what"])
    (row,) = (row for row in found["zero_shot"] if row["block"] == "korthikanti")
    assert line["zero_target"] == 0.05
    assert line["zero_met"] is (line["zero"] <= 0.05)
    assert row["rows"] == 5


def test_a_stack_that_one_block_exercises_marks_it(accuracy: SimpleNamespace) -> None:
    factors = [
        {"name": "matmul/internevo", "blocks": ["a"]},
        {"name": "matmul/A100", "blocks": ["b"]},
        {"name": "matmul", "blocks": ["a", "b"]},
    ]
    constants = [{"constant": "host_launch_s", "stack": "hf-peft", "blocks": ["c"]}]
    found = accuracy.alone(factors, constants)
    assert {name: of["fitted"] for name, of in found.items()} == {"a": True, "b": False, "c": True}
    assert found["c"]["constants"] == ["host_launch_s of hf-peft"]


def test_the_newest_container_of_a_recipe(accuracy: SimpleNamespace) -> None:
    """26.10 is newer than 26.9; another precision recipe or number of GPUs is another group, its spelling is not."""

    def row(name: str, container: str | None, precision: str, gpus: int = 64) -> Row:
        extra = {"container": container} if container else None
        return Row(**gpt3("mbridge", 1, 1.0) | {"id": name, "extra": extra, "precision": precision, "n_gpus": gpus})

    found = [
        row("a", "25.11", "FP8-CS"),
        row("b", "26.9", "FP8 (per-tensor current scaling)"),
        row("c", "26.10", "FP8 per-tensor (CS)"),
        row("d", "26.10", "FP8 per-tensor (CS)"),
        row("e", "25.09", "FP8-MX"),
        row("f", "25.11", "MXFP8"),
        row("g", "25.09", "FP8-CS", gpus=128),
        row("h", None, "FP8-CS"),
    ]
    assert accuracy.older(found) == {"a", "b", "e"}
    assert accuracy.parts(found)["a"] == "mbridge: dense, older container"
    assert accuracy.parts(found)["c"] == "mbridge: dense"


def predictions(accuracy: SimpleNamespace, **given: Any) -> Any:
    """Results as `accuracy.predict` makes them."""
    empty: dict[str, Any] = {
        "rows": [], "comparisons": [], "fitted": None, "zero": [], "drawn": [], "drawn_parts": [], "left_out": {},
        "part_of": {},
    }  # fmt: skip
    return accuracy.Predictions(**empty | given)


def result(name: str, block: str, error: float) -> dict[str, Any]:
    return {"id": name, "block": block, "metric": "step_time_s", "measured": 1.0, "error_frac": error}


def test_a_pooled_error_counts_rows_and_lost_ones(accuracy: SimpleNamespace) -> None:
    """Zero-shot (10 + 20 + 30 + 100) / 4 = 40 %; draws (2 * 5 + 10 + 100) / 4 = 30 % and (20 + 100) / 2 = 60 %."""
    target = accuracy.Target("both", ("a: dense", "b: dense"), 0.40, 0.44)
    zero = [
        result("1", "a", 0.1),
        result("2", "a", -0.2),
        result("3", "b", 0.3),
        {"id": "4", "block": "b", "metric": "step_time_s", "skipped": "not priced", "complete": True},
        {"id": "5", "block": "b", "metric": "step_time_s", "skipped": "open", "complete": False},
        result("6", "c", 9.0),
        result("7", "a", 9.0) | {"metric": "peak_mem_gib"},
    ]
    line = {"metric": "step_time_s", "control_mape": None}
    draws = [
        [line | {"block": "a: dense", "rows": 2, "mape": 0.05}, line | {"block": "b: dense", "rows": 1, "mape": 0.1}],
        [line | {"block": "a: dense", "rows": 1, "mape": 0.2}, line | {"block": "b: dense", "rows": 0, "mape": None}],
    ]
    part_of = {r["id"]: f"{r['block']}: dense" for r in zero}
    found = accuracy.target_line(target, predictions(accuracy, zero=zero, drawn_parts=draws, part_of=part_of))
    assert (found["rows"], found["lost"]) == (3, 1)
    assert found["zero"] == pytest.approx(0.40)
    assert found["zero_met"] == (found["zero"] <= 0.40)
    assert found["calibrated"] == pytest.approx(0.45)
    assert found["worst"] == pytest.approx(0.60)
    assert found["calibrated_met"] is False


def test_rows_left_out_one_at_a_time_replace_the_draws_of_their_part(accuracy: SimpleNamespace) -> None:
    """(4 % + 8 %) / 2, not the 50 % of the draw; rows of other parts don't count."""
    target = accuracy.Target("small", ("torchtitan: dense",), 0.13, 0.09)
    zero = [result("1", "torchtitan", 0.1), result("2", "torchtitan", 0.1), result("3", "other", 0.1)]
    draws = [[{"block": "torchtitan: dense", "metric": "step_time_s", "rows": 1, "mape": 0.5, "control_mape": None}]]
    made = predictions(
        accuracy,
        zero=zero,
        drawn_parts=draws,
        left_out={"1": 0.04, "2": 0.08, "3": 0.9},
        part_of={r["id"]: f"{r['block']}: dense" for r in zero},
    )
    assert accuracy.target_line(target, made)["calibrated"] == pytest.approx(0.06)


def test_leaving_one_out_uses_no_row_of_itself(accuracy: SimpleNamespace) -> None:
    """Its own time set aside: predicted / measured - 1 changes only by the measured one. Others follow it."""

    def errors(seconds: float) -> dict[str, float]:
        rows = [*block("a", 13.75 / 66.3), *block("b", 0.23)[:3]]
        rows[-1] = gpt3("b", 32, seconds)
        comparisons, _ = compare(Row(**row) for row in rows)
        fitted = fit_all([c.timed() for c in comparisons], rounds=0)
        factors = as_factors(fitted.without_block("b"), fitted.names)
        found: dict[str, float] = accuracy.leave_one_out([c for c in comparisons if c.row.block == "b"], factors)
        return found

    first, second = errors(8.0), errors(9.0)
    assert sorted(first) == ["b-16", "b-32", "b-8"]
    # Both times are above what the others say, so predicted = measured * (1 - error).
    assert 8.0 * (1 - first["b-32"]) == pytest.approx(9.0 * (1 - second["b-32"]))
    assert first["b-8"] != pytest.approx(second["b-8"], rel=1e-3)


def test_a_row_that_is_alone_is_predicted_zero_shot(accuracy: SimpleNamespace) -> None:
    comparisons, _ = compare(Row(**row) for row in [*block("a", 13.75 / 66.3), gpt3("b", 32, 8.0)])
    fitted = fit_all([c.timed() for c in comparisons], rounds=0)
    factors = as_factors(fitted.without_block("b"), fitted.names)
    mine = [c for c in comparisons if c.row.block == "b"]
    (expected,) = accuracy.zero_shot(mine, factors)
    assert accuracy.leave_one_out(mine, factors) == {"b-32": pytest.approx(abs(expected["error_frac"]))}


def test_parts_are_calibrated_with_their_whole_block(accuracy: SimpleNamespace) -> None:
    """Five rows in two parts, 3 calibrate: 2 are scored, wherever they are."""
    comparisons, _ = compare(Row(**row) for row in block("a", 0.2))
    fitted = fit_all([c.timed() for c in comparisons], rounds=0)
    factors = as_factors(fitted.without_block("a"), fitted.names)
    named = {c.row.id: f"a: {'small' if (c.row.gbs or 0) < 32 else 'large'}" for c in comparisons}
    whole = accuracy.calibrated(comparisons, factors, 3, 4)
    parts = accuracy.calibrated(accuracy.by_part(comparisons, named), factors, 3, 4)
    for (line,), lines in zip(whole, parts, strict=True):
        assert sum(of["rows"] for of in lines) == line["rows"] == 2
        total = sum(of["rows"] * of["mape"] for of in lines if of["rows"])
        assert total == pytest.approx(line["rows"] * line["mape"])


def test_targets_of_intervals_are_of_blocks_with_enough_rows(accuracy: SimpleNamespace) -> None:
    line = {
        "metric": "step_time_s", "coverage": 0.9, "half_width": 0.13, "interval_score": 0.3,
        "constant_interval_score": 0.3, "mape": 0.05, "control_mape": 0.09,
    }  # fmt: skip
    zero = [line | {"block": "large", "rows": 20}, line | {"block": "small", "rows": 19}]
    before, after = accuracy.block_targets(zero, zero)
    assert (before["half_width_met"], after["half_width_met"]) == (None, False)
    assert (before["coverage_met"], after["score_met"], after["control_met"]) == (True, True, False)


def test_shares_count_complete_rows(accuracy: SimpleNamespace) -> None:
    """19 of 20 are the 95 % that are wanted; 18 of 20 are not."""
    zero = [
        {"block": "a", "metric": "step_time_s", "rows": 19, "complete_skipped": 1},
        {"block": "b", "metric": "step_time_s", "rows": 18, "complete_skipped": 2},
        {"block": "c", "metric": "step_time_s", "rows": 0, "complete_skipped": 0},
    ]
    assert [(of["block"], of["met"]) for of in accuracy.shares(zero)] == [("a", True), ("b", False)]
