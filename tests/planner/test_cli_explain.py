"""`planner explain`: what a plan says, and what it says to one that can't be trusted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from trainplan.costmodel.plan import Plan

if TYPE_CHECKING:
    from tests.planner.conftest import Done, Small


def changed(source: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a plan file with a change that a person may have made."""
    content = yaml.safe_load(source.read_text())
    change(content)
    target.write_text(yaml.safe_dump(content, sort_keys=False))
    return target


def test_the_screen_has_knobs_parts_memory_sources_and_assumptions(planner: Callable[..., Done], small: Small) -> None:
    done = planner("explain", small.plan)
    assert (done.code, done.err) == (0, "")
    for text in (
        "model on 1x test-cpu: seq_len 64, global batch 4 sequences (256 tokens), fp32, backend native",
        "tp=1",
        "Where a step's time goes",
        "What the step waits for",
        "backward",
        "Memory per rank",
        "Numbers behind the prediction (9 measured)",
        "80.0 GFLOP/s",
        "made up for a test",
        "Assumptions",
        small.loaded.plan_hash,
    ):
        assert text in done.out
    assert "\x1b" not in done.out


def test_json_is_one_document_whose_parts_add_up(planner: Callable[..., Done], small: Small) -> None:
    found = planner("explain", small.plan, "--json").json
    estimate = small.loaded.estimate
    assert found["plan"]["plan_hash"] == small.loaded.plan_hash
    assert sum(part["frac"] for part in found["step"]) == pytest.approx(1)
    assert sum(part["value"] for part in found["critical_path"]) == pytest.approx(estimate.step_time_s.mid, rel=1e-5)
    assert sum(part["value"] for part in found["step"]) == pytest.approx(estimate.step_time_s.mid, rel=1e-5)
    assert sum(part["value"] for part in found["memory"]) == pytest.approx(estimate.peak.allocated_bytes, rel=1e-5)
    assert {quantity["provenance"] for quantity in found["quantities"]} == {"measured"}
    assert found["fits"] is True
    assert found["plan_file"] is None


@pytest.mark.parametrize(
    "edit",
    [
        lambda plan: plan["strategy"].update(recompute="full"),
        lambda plan: plan["estimate"]["step_time_s"].update(low=1e-9, mid=1e-9),
        lambda plan: plan["estimate"].update(mfu=0.99),
        lambda plan: plan["workload"].update(seq_len=32),
        lambda plan: plan["cluster"]["device"]["memory_bytes"].update(value=1e12),
        lambda plan: plan.update(plan_hash="0" * 16),
        lambda plan: plan.pop("plan_hash"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_an_edited_plan_is_refused_and_the_way_out_named(
    planner: Callable[..., Done],
    small: Small,
    folder: Path,
    edit: Callable[[dict[str, Any]], object],
    options: tuple[str, ...],
) -> None:
    done = planner("explain", changed(small.plan, folder / "edited.yaml", edit), *options)
    assert done.code == 2
    assert "edited after it was priced" in done.error
    assert "--reprice" in done.error


def test_a_wrong_estimate_is_mended_by_pricing_anew(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    edited = changed(small.plan, folder / "edited.yaml", lambda plan: plan["estimate"].update(mfu=0.99))
    assert planner("explain", edited, "--reprice").code == 0
    assert Plan.load(edited).estimate == small.loaded.estimate
    assert Plan.load(edited).plan_hash == small.loaded.plan_hash


def test_what_no_longer_fits_is_said(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    """A device of 1 MB, less than the 6 MB of the model's weights: 2 x 1024 x 128 of embeddings are 1 MiB alone."""
    tiny = changed(
        small.plan, folder / "tiny.yaml", lambda plan: plan["estimate"].update(memory_limit_bytes=float(10**6))
    )
    done = planner("explain", tiny, "--reprice", "--json")
    assert (done.code, done.json["fits"]) == (0, False)
    assert done.json["headroom_bytes"] < 0
    assert "too much at the 95 % point" in planner("explain", tiny).out


def test_an_edited_plan_is_priced_anew(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    edited = changed(small.plan, folder / "edited.yaml", lambda plan: plan["strategy"].update(recompute="full"))
    kept = edited.read_text()
    done = planner("explain", edited, "--reprice", "-o", "new.yaml")
    assert done.code == 0, done.err
    assert "written to new.yaml" in done.out
    assert edited.read_text() == kept
    new = Plan.load(folder / "new.yaml")
    assert new.strategy.recompute == "full"
    assert new.estimate.breakdown_s["recompute"] > 0
    assert new.estimate.step_time_s.mid > small.loaded.estimate.step_time_s.mid
    assert new.provenance.command == f"planner explain {edited} --reprice -o new.yaml"


def test_without_a_target_the_plan_itself_is_priced_anew(
    planner: Callable[..., Done], small: Small, folder: Path
) -> None:
    edited = changed(small.plan, folder / "edited.yaml", lambda plan: plan["strategy"].update(recompute="full"))
    done = planner("explain", edited, "--reprice", "--json")
    assert (done.code, done.json["plan_file"]) == (0, str(edited))
    assert Plan.load(edited).strategy.recompute == "full"


def test_a_target_without_reprice_is_refused(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    done = planner("explain", small.plan, "-o", "new.yaml")
    assert (done.code, "--reprice is missing" in done.error) == (2, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: plan.update(speed=1), ("speed", "unknown key")),
        (lambda plan: plan["strategy"].update(tpp=2), ("strategy.tpp", "unknown key")),
        (lambda plan: plan.update(schema_version="2.0"), ("schema_version 2.0", "reads 1.")),
        (lambda plan: plan.pop("schema_version"), ("schema_version", "no plan file")),
        (lambda plan: plan.pop("model"), ("model", "required")),
        (lambda plan: plan["strategy"].update(grad_accum=7), ("contradicts itself", "global_batch_size=4")),
        (lambda plan: plan.update(backend="natve"), ("natve", "native")),
    ],
)
@pytest.mark.parametrize("options", [(), ("--reprice",)])
def test_a_plan_that_is_none_is_refused_even_to_reprice(
    planner: Callable[..., Done],
    small: Small,
    folder: Path,
    change: Callable[[dict[str, Any]], object],
    words: tuple[str, ...],
    options: tuple[str, ...],
) -> None:
    done = planner("explain", changed(small.plan, folder / "edited.yaml", change), *options)
    assert done.code == 2
    for word in words:
        assert word in done.error


@pytest.mark.parametrize("content", [None, "", "- a list", "a: [", "a: 1\na: 2", "x: &a 1\ny: *a"])
def test_what_is_no_plan_file_is_named(planner: Callable[..., Done], folder: Path, content: str | None) -> None:
    if content is not None:
        (folder / "bad.yaml").write_text(content)
    done = planner("explain", "bad.yaml")
    assert done.code == 2
    assert done.error.startswith("bad.yaml: ")
