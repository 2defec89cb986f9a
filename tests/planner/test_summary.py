"""The numbers that screens show, against hand counts."""

from __future__ import annotations

from typing import Any

import pytest

from trainplan.costmodel.estimate import Estimate, Interval, StageMemory
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.plan import Plan, SearchRecord
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Workload
from trainplan.executor.measurement import Measurement
from trainplan.planner import summary
from trainplan.planner.board import Candidate

RECORD = SearchRecord(
    engine="enumerate",
    covered=100,
    illegal={"heads": 20, "layers": 5},
    infeasible=60,
    feasible=15,
    gap_frac=0,
    proven=True,
)


def spot(value: float) -> Interval:
    return Interval(low=value, mid=value, high=value)


def estimate(**changes: Any) -> Estimate:
    stages = tuple(
        StageMemory(
            stage=i, breakdown_bytes={"parameters": n}, allocated_bytes=n, reserved_bytes=spot(n), device_bytes=spot(n)
        )
        for i, n in enumerate((30.0, 50.0))
    )
    values = {
        "step_time_s": spot(2.0), "breakdown_s": {"forward": 0.5, "backward": 1.5}, "tokens_per_s": 500.0,
        "useful_token_frac": 0.8, "mfu": 0.4, "bubble_frac": 0.0, "exposed_comm_s": 0.0, "stages": stages,
        "memory_limit_bytes": 80.0, "weakest_provenance": "measured",
    }  # fmt: skip
    return Estimate(**{**values, **changes})


@pytest.fixture
def plan(small: Any) -> Plan:
    """A plan with the round numbers above."""
    return Plan(**{**small.loaded.model_dump(), "estimate": estimate().model_dump()})


def measured(plan: Plan, step_s: float, **changes: Any) -> Measurement:
    values = {
        "model": plan.model, "workload": plan.workload, "strategy": plan.strategy, "step_time_s": step_s,
        "samples_s": (step_s,) * 8, "warmup_steps": 3, "tokens_per_s": 250.0, "padding_frac": 0.2, "data_wait_s": 0.0,
        "checkpoint_s": 0.0, "peak_memory_bytes": 100, "loss_first": 3.0, "loss_last": 2.0, "steps": 11,
        "environment": {},
    }  # fmt: skip
    return Measurement(**{**values, **changes})


def test_parts_have_shares_and_come_largest_first() -> None:
    found = summary.parts({"forward": 1.0, "rounding": 1e-16, "backward": 3.0})
    assert [(part.name, part.value, part.frac) for part in found] == [("backward", 3.0, 0.75), ("forward", 1.0, 0.25)]
    assert summary.parts({}) == []
    assert summary.parts({"forward": 0.0}) == []


def test_knobs_are_the_degrees_and_what_differs() -> None:
    found = summary.knobs(Strategy(dp_shard=8, sharding="parameters", compile=True))
    assert found == {
        "tp": "1", "pp": "1", "dp_replicate": "1", "dp_shard": "8", "sharding": "parameters", "cp": "1", "ep": "1",
        "micro_batch_size": "1", "grad_accum": "1", "compile": "true",
    }  # fmt: skip


def test_changes_are_what_another_strategy_sets_otherwise() -> None:
    assert summary.changes(Strategy(tp=2, grad_accum=4), Strategy(grad_accum=4, sp=True)) == {"tp": "2", "sp": "false"}


def test_a_rival_is_slower_by_a_share() -> None:
    assert summary.slower_frac(11.0, 10.0) == pytest.approx(0.1)


def test_counts_of_a_search_add_up() -> None:
    assert summary.illegal_count(RECORD) == 25


def test_headroom_is_against_the_fullest_rank() -> None:
    assert summary.headroom_bytes(estimate(), 80.0) == 30.0
    assert summary.headroom_bytes(estimate(), 40.0) == -10.0


def test_padding_is_what_is_not_useful() -> None:
    assert summary.padding_frac(estimate()) == pytest.approx(0.2)


def test_the_whole_job_takes_its_tokens_over_the_rate() -> None:
    workload = Workload(seq_len=64, global_batch_size=4, train_tokens=1025)
    assert summary.job_seconds(workload, estimate()) == 2.05
    assert summary.steps_of(workload) == 5  # 1025 tokens in steps of 256: the fifth has one of them
    assert summary.steps_of(Workload(seq_len=64, global_batch_size=4, train_tokens=1024)) == 4
    for nothing in (summary.job_seconds, lambda w, _: summary.steps_of(w)):
        assert nothing(Workload(seq_len=64, global_batch_size=4), estimate()) is None


def test_the_share_of_embeddings() -> None:
    """Qwen3-8B: two matrices of 151,936 x 4,096 of 8,190,735,360 parameters."""
    assert summary.embedding_frac(load_model("Qwen/Qwen3-8B")) == pytest.approx(2 * 151_936 * 4_096 / 8_190_735_360)


def test_measured_is_set_beside_predicted(plan: Plan) -> None:
    step, throughput, memory = summary.compare(plan, measured(plan, 5.0))
    assert (step.predicted, step.measured, step.factor) == (2.0, 5.0, 2.5)
    assert throughput.factor == 0.5
    assert (memory.predicted, memory.measured) == (50.0, 100)


@pytest.mark.parametrize(("step_s", "close"), [(0.9, False), (1.0, True), (2.0, True), (4.0, True), (4.1, False)])
def test_close_is_within_a_factor_of_two_either_way(plan: Plan, step_s: float, close: bool) -> None:
    assert summary.is_close(summary.compare(plan, measured(plan, step_s))[0]) is close


def test_the_spread_of_steps() -> None:
    """Eleven evenly spaced samples: the deciles are the samples themselves."""
    assert summary.spread(tuple(float(n) for n in range(10, 21))) == pytest.approx(19 / 11)
    assert summary.spread((1.0,)) == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_wait_s": 2.5}, "waited for data in 50 %"),
        ({"samples_s": (1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0)}, "9.0 times as long as fast ones"),
        ({"samples_s": (5.0, 5.0)}, "only 2 steps were measured"),
        ({}, "nothing in the measurement points to a cause"),
    ],
)
def test_causes_are_read_from_the_measurement(plan: Plan, changes: dict[str, Any], words: str) -> None:
    (cause,) = summary.causes(plan, measured(plan, 5.0, **changes))
    assert words in cause


def test_rates_that_were_not_measured_are_a_cause(plan: Plan) -> None:
    unsure = Plan(**{**plan.model_dump(), "estimate": estimate(weakest_provenance="datasheet").model_dump()})
    (cause,) = summary.causes(unsure, measured(plan, 5.0))
    assert "are datasheet, not measured on this machine" in cause


def test_plans_that_say_the_same_are_shown_once() -> None:
    """A step within 0.05 % and up to two other knobs: not shown; slower, or set otherwise: shown."""
    base = Strategy(dp_shard=8, sharding="parameters", reshard_after_forward=True, grad_accum=4)
    alike = base.model_copy(update={"prefetch_units": 2})
    other = base.model_copy(update={"micro_batch_size": 2, "grad_accum": 2, "recompute": "full"})
    candidates = [Candidate(base, 10.0, 1.0), Candidate(alike, 10.004, 1.0), Candidate(other, 10.004, 1.0)]
    assert summary.differing(candidates) == [candidates[0], candidates[2]]
    slower = Candidate(alike, 10.01, 1.0)
    assert summary.differing([candidates[0], slower]) == [candidates[0], slower]
