"""`planner tune`: its two outputs, what it writes, and what it says to bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml

from trainplan.costmodel.cluster_config import load_cluster, save_cluster
from trainplan.costmodel.hardware import Cluster
from trainplan.costmodel.plan import Plan
from trainplan.costmodel.strategy import CHOICES, FIELDS
from trainplan.planner.enumeration import Stopped

if TYPE_CHECKING:
    from tests.planner.conftest import Done, Small

H100 = ("--cluster", "8xH100", "--seq-len", "4096", "--global-batch-size", "256")
FEW = ("--sharding", "parameters", "--recompute", "full", "--micro-batch-size", "1", "--compile", "true")
"""Knobs that leave a handful of strategies, so that a test is quick."""


def test_json_is_one_document_and_the_only_output(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    done = planner(*small.job, "--top", "3", "--json")
    assert done.code == 0
    found = done.json
    assert list(found) == ["plan", "candidates", "pareto", "search", "plan_file"]
    assert found["plan_file"] == "plan.yaml"
    plan = Plan.load(folder / "plan.yaml")
    assert found["plan"] == {**plan.model_dump(mode="json"), "plan_hash": plan.plan_hash}
    assert 1 <= len(found["candidates"]) <= 3
    steps = [candidate["predicted_step_s"] for candidate in found["candidates"]]
    assert steps == sorted(steps)
    assert found["candidates"][0]["strategy"] == found["plan"]["strategy"]
    search = found["search"]
    seen = sum(search["illegal"].values()) + search["infeasible"] + search["feasible"] + search["dropped"]
    assert search["covered"] == seen
    assert 1 <= search["simulated"] <= search["feasible"]
    assert search["gap_frac"] == 0.005


def test_the_plan_is_what_the_published_schema_describes(
    planner: Callable[..., Done], small: Small, folder: Path
) -> None:
    """Both the document on standard output and the file, as any YAML reader sees it."""
    schema = json.loads((Path(__file__).parents[2] / "docs" / "plan.schema.json").read_text())
    for job in (small.job, ("tune", "Qwen/Qwen3-8B", *H100, *FEW)):
        done = planner(*job, "--json")
        assert done.code == 0, done.err
        jsonschema.validate(done.json["plan"], schema)
        assert yaml.safe_load((folder / "plan.yaml").read_text()) == done.json["plan"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**done.json["plan"], "schema_version": "2.0"}, schema)


def test_a_saved_plan_is_the_same_plan(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    assert planner(*small.job, "--json").code == 0
    plan = Plan.load(folder / "plan.yaml")
    plan.save(folder / "again.yaml")
    assert (folder / "again.yaml").read_bytes() == (folder / "plan.yaml").read_bytes()
    assert Plan.load(folder / "again.yaml") == plan


def test_progress_is_lines_on_standard_error(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    done = planner(*small.job, "--json")
    lines = done.err.splitlines()
    assert lines
    assert all(line.startswith(("searching ",)) for line in lines)


def test_the_screen_shows_the_plan_its_price_and_what_to_do_next(planner: Callable[..., Done], folder: Path) -> None:
    done = planner("tune", "Qwen/Qwen3-8B", *H100, *FEW)
    assert done.code == 0
    plan = Plan.load(folder / "plan.yaml")
    for text in (
        "Qwen/Qwen3-8B on 8xH100-SXM5-80GB: seq_len 4,096, global batch 256 sequences (1,048,576 tokens), bf16",
        f"dp_shard={plan.strategy.dp_shard} sharding={plan.strategy.sharding}",
        f"micro_batch_size={plan.strategy.micro_batch_size} grad_accum={plan.strategy.grad_accum}",
        "step time",
        "tokens/s",
        "MFU",
        "the limit is 79.1 GiB",
        "backward",
        "activations",
        "Search (enumerate)",
        f"Plan {plan.plan_hash} written to plan.yaml",
        "planner run plan.yaml --model-dir DIR",
        "planner explain plan.yaml",
    ):
        assert text in done.out
    assert plan.provenance.command == " ".join(("planner", "tune", "Qwen/Qwen3-8B", *H100, *FEW))


def test_no_line_of_a_table_is_wider_than_80_columns(planner: Callable[..., Done], folder: Path) -> None:
    done = planner("tune", "Qwen/Qwen3-8B", *H100, *FEW)
    tables = done.out[done.out.index("Prediction") : done.out.index("\nPlan ")]
    assert max(map(len, tables.splitlines())) <= 80
    assert done.out.isascii()
    assert "\x1b" not in done.out


def test_what_the_job_says_reaches_the_plan(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    lengths = folder / "lengths.json"
    lengths.write_text(json.dumps([[16, 0.5], [64, 0.5]]))
    options = ("--lengths", lengths, "--no-packing", "--train-tokens", "1M", "--top", "1")
    done = planner(*small.job, *options, "-o", "other.yaml", "--json")
    assert done.code == 0, done.err
    plan = Plan.load(folder / "other.yaml")
    assert plan.workload.length_histogram == ((16, 0.5), (64, 0.5))
    assert plan.workload.train_tokens == 1_000_000
    assert plan.strategy.packing is False
    assert plan.estimate.useful_token_frac == pytest.approx((16 + 64) / 2 / 64)  # one document in each padded row
    assert len(done.json["candidates"]) == 1


def test_every_knob_with_a_text_of_its_own_can_be_pinned(planner: Callable[..., Done]) -> None:
    """Fields without an option go through --set, so none is out of reach."""
    text = planner("tune", "--help").out
    own = [name for name in FIELDS if f"--{name.replace('_', '-')} " in text]
    assert {"tp", "pp", "vpp", "sp", "cp", "ep", "etp", "dp_replicate", "dp_shard", "sharding", "recompute"} <= set(own)
    assert {"micro_batch_size", "grad_accum", "loss_chunk", "reduce_dtype", "compile", "attention"} <= set(own)
    assert "--set" in text
    assert all(choice in text for choice in CHOICES["sharding"])


def test_a_knob_set_by_name_is_honoured(planner: Callable[..., Done], folder: Path) -> None:
    done = planner("tune", "Qwen/Qwen3-8B", *H100, *FEW, "--set", "prefetch-units=2", "--json")
    assert {c["strategy"]["prefetch_units"] for c in done.json["candidates"]} == {2}


def test_an_older_plan_is_replaced(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    (folder / "plan.yaml").write_bytes(small.plan.read_bytes())
    assert planner(*small.job, "--set", "loss_chunk=0", "--json").code == 0


@pytest.mark.parametrize("content", ["notes: do not lose\n", "- a\n", "not: [yaml", "schema_version: '1.0'\n", ""])
def test_another_file_is_left_alone(planner: Callable[..., Done], small: Small, folder: Path, content: str) -> None:
    kept = folder / "notes.yaml"
    kept.write_text(content)
    done = planner(*small.job, "-o", kept)
    assert (done.code, kept.read_text()) == (2, content)
    assert "notes.yaml exists and is no plan file" in done.error


def test_a_folder_is_no_file_to_write(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    assert "is a folder" in planner(*small.job, "-o", folder).error
    assert "does not exist" in planner(*small.job, "-o", folder / "none" / "plan.yaml").error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Qwen/Qwen3-8X", *H100), ("Qwen/Qwen3-8X", "Did you mean Qwen/Qwen3-8B")),
        (("Qwen/Qwen3-8B", "--cluster", "8xH10O", *H100[2:]), ("H10O", "Did you mean")),
        (("Qwen/Qwen3-8B", *H100, "--backend", "natve"), ("natve", "native, megatron, torchtitan")),
        (("Qwen/Qwen3-8B", *H100, "--precision", "fp16"), ("--precision 'fp16'", "bf16")),
        (("Qwen/Qwen3-8B", *H100, "--engine", "random"), ("--engine 'random'", "enumerate, optuna")),
        (("Qwen/Qwen3-8B", *H100, "--allow", "lossless"), ("--allow 'lossless'", "rounding, lossy")),
        (("Qwen/Qwen3-8B", *H100, "--memory-limit", "70"), ("--memory-limit '70'", "70GiB")),
        (("Qwen/Qwen3-8B", *H100, "--lengths", "512"), ("--lengths '512'", "512:0.5")),
        (("Qwen/Qwen3-8B", *H100, "--lora-alpha", "16"), ("--lora-rank is missing",)),
        (("Qwen/Qwen3-8B", *H100, "--lora-rank", "16"), ("native does not train LoRA",)),
        (("Qwen/Qwen3-8B", *H100, "--set", "tpp=2"), ("unknown knob 'tpp'",)),
        (("google/gemma-3-27b", *H100), ("gemma",)),
        (("Qwen/Qwen3-8B", *H100[:4], "--global-batch-size", "7"), ("global_batch_size=7", "Use 8.")),
        (("Qwen/Qwen3-8B", *H100, "--micro-batch-size", "3"), ("micro_batch_size", "256")),
        (("Qwen/Qwen3-8B", *H100, "--micro-batch-size", "2", "--grad-accum", "4"), ("global_batch_size=256",)),
        (("Qwen/Qwen3-8B", *H100, "--max-micro-batch", "2", "--micro-batch-size", "4"), ("--max-micro-batch 2",)),
        (("Qwen/Qwen3-8B", *H100, "--tp", "2"), ("--tp 2", "native backend runs tp in {1}", "--backend")),
        (("Qwen/Qwen3-8B", *H100, "--backend", "megatron", "--tp", "3"), ("tp in [3]", "must be 8")),
        (("Qwen/Qwen3-8B", *H100, "--memory-limit", "100GiB"), ("--memory-limit is 100 GiB", "H100")),
        (("Qwen/Qwen3-8B", *H100, "--attention", "cudnn"), ("--attention cudnn", "native", "{sdpa}")),
        (("Qwen/Qwen3-8B", *H100, "--backend", "accelerate", "--ep", "1,2"), ("--ep 2", "accelerate", "{1}")),
        (("Qwen/Qwen3-8B", *H100, "--recompute", "full", "--no-recompute"), ("--no-recompute", "--recompute")),
    ],
)
def test_bad_input_is_one_line_and_exits_2(
    planner: Callable[..., Done], folder: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = planner("tune", *arguments)
    assert done.code == 2
    for word in words:
        assert word in done.error
    assert not (folder / "plan.yaml").exists()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b'{"model_type": "qwen3", "hidden_size": 10', "truncated"),
        (b"{" + b" " * 6_000_000 + b"}", "larger than 5 MB"),
        (b"hidden_size = 128", "not valid JSON"),
        (b"[1, 2]", "holds a list"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b'{"model_type": "bert"}', "bert"),
        (b"{}", "model_type"),
    ],
)
def test_a_bad_config_is_named_with_what_is_wrong(
    planner: Callable[..., Done], folder: Path, content: bytes, word: str
) -> None:
    (folder / "config.json").write_bytes(content)
    done = planner("tune", folder / "config.json", *H100)
    assert done.code == 2
    assert "config.json" in done.error
    assert word in done.error


def test_nothing_that_fits_exits_3_with_the_nearest(planner: Callable[..., Done], folder: Path) -> None:
    done = planner("tune", "Qwen/Qwen3-8B", *H100, *FEW, "--memory-limit", "4GiB")
    assert done.code == 3
    assert "4.0 GiB" in done.err.splitlines()[-1]
    assert not (folder / "plan.yaml").exists()


def test_a_degree_that_splits_a_head_exits_3_with_the_rule_and_what_would_do(
    planner: Callable[..., Done], folder: Path
) -> None:
    """Qwen2-0.5B has 14 heads."""
    done = planner("tune", "Qwen/Qwen2-0.5B", *H100, "--backend", "megatron", "--tp", "8", "--pp", "1")
    assert done.code == 3
    assert "tp=8 does not divide num_heads=14" in done.err.splitlines()[-1]
    assert "Use tp in [1, 2, 7, 14]" in done.err.splitlines()[-1]


def test_an_unmeasured_machine_exits_4(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    done = planner("tune", small.model, "--cluster", "local", "--seq-len", "64", "--global-batch-size", "4")
    assert done.code == 4
    assert "planner profile" in done.error


def test_a_stale_profile_exits_4(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    measured = load_cluster(small.cluster)
    (folder / "cache").mkdir()
    save_cluster(
        Cluster(**{**measured.model_dump(), "software": {"processor": "Intel 8086"}}), folder / "cache" / "local.yaml"
    )
    done = planner("tune", small.model, "--cluster", "local", "--seq-len", "64", "--global-batch-size", "4")
    assert done.code == 4
    assert "processor was Intel 8086" in done.error


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (None, "no plan was written"),
        (Path("plan.study"), "the search so far is in plan.study. Give the same command with --resume to go on."),
    ],
)
def test_an_interrupted_search_says_what_was_kept(
    planner: Callable[..., Done],
    small: Small,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: Path | None,
    words: str,
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise Stopped(kept)

    monkeypatch.setattr("trainplan.planner.search.tune", interrupted)
    done = planner(*small.job)
    assert done.code == 130
    assert words in done.error


def test_a_sequence_beyond_the_model_is_noted(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    job = [argument if argument != "64" else "1024" for argument in small.job]
    done = planner(*job, "--json")
    assert done.code == 0
    assert "note: seq_len 1024 is more than the 512 positions that model was made for" in done.err


def test_plans_that_trade_speed_for_memory(planner: Callable[..., Done], folder: Path) -> None:
    job = ("tune", "Qwen/Qwen3-8B", "--cluster", "8xH100", "--seq-len", "4096", "--global-batch-size", "64")
    found = planner(*job, "--pareto", "3", "--json").json["pareto"]
    assert [point["predicted_step_s"] for point in found] == sorted(point["predicted_step_s"] for point in found)
    assert len(found) == 3
    assert "nothing is both faster and smaller" in planner(*job, "--pareto", "2").out
