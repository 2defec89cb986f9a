"""`planner size`: the fewest GPUs for each goal, with a plan that reaches it, and none of half as many."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.plan import Plan
from trainplan.costmodel.workload import Workload
from trainplan.planner.arguments import duration_of
from trainplan.planner.search import Pins
from trainplan.planner.sizing import Sized, answers, goals, sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.planner.conftest import Done

JOB = ("--seq-len", "4096", "--global-batch-size", "64")


def tried(most: int = 64, **workload: int) -> list[Sized]:
    of = Workload(seq_len=4096, global_batch_size=64, **workload)  # type: ignore[arg-type]
    return list(sizes(load_model("Qwen/Qwen3-8B"), "H100", of, "native", Pins(), most=most, price_per_gpu_hour=2.0))


def test_sizes_double_and_state_hours_and_cost() -> None:
    """An AdamW state of 16 bytes for 8.19 billion parameters needs at least two H100; 64 sequences feed at most 64."""
    found = tried(most=128, train_tokens=10**9)
    counts = [of.num_gpus for of in found]
    assert counts[0] > 1
    assert counts == [2**i for i in range(7) if 2**i >= counts[0]]
    for of in found:
        assert of.hours is not None
        assert of.hours == pytest.approx(10**9 / of.result.estimate.tokens_per_s / 3600)
        assert of.cost == pytest.approx(of.hours * of.num_gpus * 2.0)
        assert of.result.estimate.fits
    throughput = [of.result.estimate.tokens_per_s for of in found]
    assert throughput == sorted(throughput)


def test_each_goal_has_the_fewest_gpus_that_reach_it() -> None:
    found = tried(train_tokens=10**9)
    hours = [of.hours or 0.0 for of in found]
    between = (hours[1] + hours[2]) / 2
    asked = goals(within_hours=between, budget=found[0].cost)
    reached, seen = answers(iter(found), asked)
    assert reached["fit"] is found[0]
    assert reached["deadline"] is found[2]
    assert reached["budget"] is found[0]
    assert seen == found[:3]  # nothing more is tried once all are reached


def test_the_command_writes_a_plan_for_each_answer(planner: Callable[..., Done], folder: Path) -> None:
    done = planner(
        "size",
        "Qwen/Qwen3-8B",
        "--gpu",
        "H100",
        *JOB,
        "--tokens",
        "1B",
        "--within",
        "6h",
        "-o",
        folder / "plans",
        "--json",
    )
    assert done.code == 0, done.err
    answer = done.json["H100"]["answers"]["deadline"]
    assert answer["hours"] <= 6
    plan = Plan.load(folder / "plans" / "deadline-H100.yaml")
    assert plan.cluster.num_gpus == answer["num_gpus"]
    assert plan.strategy.model_dump(mode="json") == answer["strategy"]
    text = planner("size", "Qwen/Qwen3-8B", "--gpu", "H100", *JOB, "--max-gpus", "8").out
    assert "fit: " in text


@pytest.mark.parametrize(
    ("options", "words", "code"),
    [
        (("--within", "3d"), "--tokens is missing", 2),
        (("--tokens", "1B", "--budget", "5"), "belong together", 2),
        (("--tokens", "1B", "--within", "soon"), "is not a time", 2),
        (("--max-gpus", "1"), "no number of H100 up to 1", 3),
    ],
)
def test_what_can_not_be_answered(
    planner: Callable[..., Done], options: tuple[str, ...], words: str, code: int
) -> None:
    done = planner("size", "Qwen/Qwen3-32B", "--gpu", "H100", *JOB, *options)
    assert (done.code, words in done.error) == (code, True)


def test_times() -> None:
    assert [duration_of(text, "--within") for text in ("90m", "36h", "3d", "1.5w")] == [5400, 129600, 259200, 907200]
    with pytest.raises(UsageError):
        duration_of("3 years", "--within")
