"""Which numbers does a screen show beside those of an estimate? Each is a function here, so that each has a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

from trainplan.costmodel.estimate import Estimate
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.plan import Plan, SearchRecord
from trainplan.costmodel.strategy import DEFAULT, FIELDS, Strategy
from trainplan.costmodel.workload import Workload
from trainplan.planner.arguments import shown

if TYPE_CHECKING:
    from trainplan.executor.measurement import Measurement
    from trainplan.planner.board import Candidate

DEGREES = ("tp", "pp", "cp", "ep", "dp_replicate", "dp_shard", "micro_batch_size", "grad_accum")
"""Always shown: they say how the cluster and the batch are divided."""
CLOSE_FACTOR = 2.0
"""A prediction within this factor of the measurement needs no explanation."""
BUSY_SPREAD = 1.5
"""Slow steps (90 %) over fast ones (10 %); a machine to itself stays below 1.1."""
WAITING_FRAC = 0.1
FEW_STEPS = 5
NEGLIGIBLE_FRAC = 1e-6
"""Of a sum; a smaller part is what is left of a difference of two equal floats."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a sum, and its share of it."""

    name: str
    value: float
    frac: float


def parts(breakdown: Mapping[str, float]) -> list[Part]:
    """The parts of a breakdown with their shares, largest first, negligible ones left out."""
    total = sum(breakdown.values())
    found = [Part(name, value, value / total) for name, value in breakdown.items() if value > NEGLIGIBLE_FRAC * total]
    return sorted(found, key=lambda part: -part.value)


def knobs(strategy: Strategy) -> dict[str, str]:
    """The degrees, and every knob that is not at its default, in the order of the fields."""
    return {
        name: shown(getattr(strategy, name))
        for name in FIELDS
        if name in DEGREES or getattr(strategy, name) != getattr(DEFAULT, name)
    }


def changes(strategy: Strategy, base: Strategy) -> dict[str, str]:
    """The knobs of ``strategy`` that ``base`` sets otherwise."""
    return {name: shown(getattr(strategy, name)) for name in FIELDS if getattr(strategy, name) != getattr(base, name)}


ALIKE_FRAC = 0.0005
"""Step times that differ by less are one on a screen."""
ALIKE_KNOBS = 2
"""Plans that are as fast and differ in no more knobs are shown once."""


def differing(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates without those that are as fast as a better one and set alike but for a knob or two."""
    kept: list[Candidate] = []
    for of in candidates:
        same = (
            abs(of.step_s / other.step_s - 1) < ALIKE_FRAC and len(changes(of.strategy, other.strategy)) <= ALIKE_KNOBS
            for other in kept
        )
        if not any(same):
            kept.append(of)
    return kept


def slower_frac(step_s: float, best_step_s: float) -> float:
    """How much longer a step takes than the best one: 0.1 = 10 % longer."""
    return step_s / best_step_s - 1


def illegal_count(record: SearchRecord) -> int:
    """Strategies that some rule refused."""
    return sum(record.illegal.values())


def headroom_bytes(estimate: Estimate, limit_bytes: float) -> float:
    """What the fullest rank leaves free at its 95 % point; negative where it does not fit."""
    return limit_bytes - estimate.peak.device_bytes.high


def padding_frac(estimate: Estimate) -> float:
    """Share of a batch's tokens that are padding."""
    return 1 - estimate.useful_token_frac


def job_seconds(workload: Workload, estimate: Estimate) -> float | None:
    """Time to train all of ``train_tokens``, None where the workload does not say how many."""
    return None if workload.train_tokens is None else workload.train_tokens / estimate.tokens_per_s


def steps_of(workload: Workload) -> int | None:
    """Optimizer steps that train all of ``train_tokens``, None where the workload does not say how many."""
    return None if workload.train_tokens is None else -(-workload.train_tokens // workload.tokens_per_step)


def embedding_frac(model: ModelSpec) -> float:
    """Share of the parameters that are embeddings, the output head included."""
    return model.embedding_parameters() / model.parameters()


@dataclass(frozen=True, slots=True)
class Compared:
    """A predicted number beside the measured one; ``factor`` is measured over predicted."""

    name: str
    label: str
    predicted: float
    measured: float

    @property
    def factor(self) -> float:
        return self.measured / self.predicted


def compare(plan: Plan, measured: Measurement) -> list[Compared]:
    """What a run was predicted to do and what it did: step time, throughput, memory of the fullest rank.

    On a GPU the memory compared is that of live tensors, on a CPU that of the whole process.
    """
    estimate, gpu = plan.estimate, plan.cluster.device.kind == "gpu"
    memory = estimate.peak.allocated_bytes if gpu else estimate.peak.device_bytes.mid
    return [
        Compared("step_time_s", "step time", estimate.step_time_s.mid, measured.step_time_s),
        Compared("tokens_per_s", "throughput", estimate.tokens_per_s, measured.tokens_per_s),
        Compared(
            "memory_bytes",
            "tensors of the fullest rank" if gpu else "memory of the fullest rank",
            memory,
            measured.peak_memory_bytes,
        ),
    ]


def is_close(compared: Compared) -> bool:
    """Whether the prediction is within a factor of `CLOSE_FACTOR` of the measurement, either way."""
    return 1 / CLOSE_FACTOR <= compared.factor <= CLOSE_FACTOR


def spread(samples_s: tuple[float, ...]) -> float:
    """The 90 % point of the samples over their 10 % point; 1 for a single sample."""
    if len(samples_s) < 2:
        return 1.0
    cuts = quantiles(samples_s, n=10, method="inclusive")
    return cuts[-1] / cuts[0]


def causes(plan: Plan, measured: Measurement) -> list[str]:
    """What may explain a step time far from the prediction, each with the number that points to it."""
    found = []
    if measured.data_wait_s > WAITING_FRAC * measured.step_time_s:
        share = 100 * measured.data_wait_s / measured.step_time_s
        found.append(f"ranks waited for data in {share:.0f} % of the step")
    if (ratio := spread(measured.samples_s)) > BUSY_SPREAD:
        found.append(f"slow steps took {ratio:.1f} times as long as fast ones: other programs share the machine")
    if len(measured.samples_s) < FEW_STEPS:
        found.append(f"only {len(measured.samples_s)} steps were measured after warm-up: run more")
    if plan.estimate.weakest_provenance != "measured":
        found.append(
            f"rates of {plan.cluster.name} are {plan.estimate.weakest_provenance}, not measured on this machine: run "
            "`planner profile` and tune with --cluster local"
        )
    if not found:
        found.append("nothing in the measurement points to a cause: measure again with `planner profile`")
    return found
