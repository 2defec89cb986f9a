"""What does a plan say? Its knobs, its price in parts, its memory, its rivals, and what the search went through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from trainplan.costmodel.estimate import Estimate
from trainplan.costmodel.plan import Plan, SearchRecord
from trainplan.costmodel.strategy import Strategy
from trainplan.planner.arguments import shown
from trainplan.planner.ladder import totals
from trainplan.planner.render.console import heading, line, table
from trainplan.planner.render.format import interval, money, percent, seconds, size, tokens_per_s, whole, words
from trainplan.planner.summary import (
    changes,
    headroom_bytes,
    illegal_count,
    job_seconds,
    knobs,
    padding_frac,
    parts,
    slower_frac,
)

if TYPE_CHECKING:
    from trainplan.planner.alternatives import Alternative, Outcome
    from trainplan.planner.baselines import Baseline
    from trainplan.planner.ladder import Rung
    from trainplan.planner.search import Candidate

MOST_STAGES = 16  # shown one by one; of a deeper pipeline only those that need most


def print_job(to: Console, plan: Plan) -> None:
    """What is trained, where, and by which backend."""
    workload = plan.workload
    line(
        to,
        f"{plan.model.name} on {plan.cluster.name}: seq_len {whole(workload.seq_len)}, global batch "
        f"{whole(workload.global_batch_size)} sequences ({whole(workload.tokens_per_step)} tokens), "
        f"{workload.precision}, backend {plan.backend}",
    )


def print_strategy(to: Console, strategy: Strategy) -> None:
    """The degrees and every knob that is not at its default."""
    heading(to, "Strategy (degrees, and knobs that differ from their defaults)")
    to.print(assignments(knobs(strategy)))


def assignments(values: Mapping[str, str]) -> str:
    """``tp=1 pp=2``."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def print_estimate(to: Console, plan: Plan, limit_bytes: float) -> None:
    """Step time, throughput, MFU, memory of the fullest rank against the limit."""
    estimate = plan.estimate
    rows = [
        ("step time", interval(estimate.step_time_s, seconds)),
        ("throughput", tokens_per_s(estimate.tokens_per_s)),
        ("padding", f"{percent(padding_frac(estimate))} of a batch, not counted in the throughput"),
        ("MFU", percent(estimate.mfu)),
        ("pipeline bubble", percent(estimate.bubble_frac)),
        ("exposed communication", seconds(estimate.exposed_comm_s)),
        (
            "fullest rank",
            f"{interval(estimate.peak.device_bytes, size)}; the limit is {size(limit_bytes)}",
        ),
        ("based on", _based_on(estimate)),
    ]
    if estimate.price_per_1b_tokens is not None:
        rows.append(("price", f"{money(estimate.price_per_1b_tokens)} per 1B tokens"))
    if (job_s := job_seconds(plan.workload, estimate)) is not None:
        rows.append(("whole job", seconds(job_s)))
    heading(to, "Prediction (middle, 5 % to 95 %)")
    table(to, rows)


def _based_on(estimate: Estimate) -> str:
    weakest = estimate.weakest_provenance
    if weakest == "datasheet":
        return "datasheet only: no kernel of this GPU was measured"
    return "measured rates" if weakest == "measured" else f"{weakest} rates, or better"


def print_breakdown(to: Console, estimate: Estimate) -> None:
    """The parts of a step on the busiest rank."""
    heading(to, "Where a step's time goes (busiest rank)")
    table(
        to,
        [(words(part.name), seconds(part.value), percent(part.frac)) for part in parts(estimate.breakdown_s)],
        right=(1, 2),
    )


def print_critical(to: Console, seconds_of: Mapping[str, float]) -> None:
    """What the longest path of a step is made of."""
    heading(to, "What the step waits for (its longest path; anything else could be slower for free)")
    rows = [(words(part.name), seconds(part.value), percent(part.frac)) for part in parts(seconds_of)]
    table(to, rows, right=(1, 2))


def print_memory(to: Console, estimate: Estimate, limit_bytes: float) -> None:
    """Memory per pipeline stage against the limit, and what the fullest one is made of."""
    stages = sorted(estimate.stages, key=lambda stage: -stage.device_bytes.high)[:MOST_STAGES]
    stages.sort(key=lambda stage: stage.stage)
    heading(to, f"Memory per rank, limit {size(limit_bytes)}")
    table(
        to,
        [
            (
                str(s.stage),
                size(s.allocated_bytes),
                size(s.reserved_bytes.mid),
                size(s.device_bytes.mid),
                size(s.device_bytes.high),
            )
            for s in stages
        ],
        headers=("stage", "tensors", "reserved", "device", "device, 95 %"),
        right=range(5),
    )
    if len(stages) < len(estimate.stages):
        line(to, f"The {len(stages)} fullest of {len(estimate.stages)} stages.")
    heading(to, f"Tensors of stage {estimate.peak.stage} at its peak")
    table(
        to,
        [(words(part.name), size(part.value), percent(part.frac)) for part in parts(estimate.peak.breakdown_bytes)],
        right=(1, 2),
    )
    free = headroom_bytes(estimate, limit_bytes)
    line(
        to, f"{size(free)} stay free at the 95 % point." if free >= 0 else f"{size(-free)} too much at the 95 % point."
    )


def print_rivals(to: Console, candidates: Sequence[Candidate]) -> None:
    """The next best plans: how much slower, how full, and what they set otherwise than the winner."""
    if len(candidates) < 2:
        return
    best = candidates[0]
    heading(to, "Next best plans")
    table(
        to,
        [
            (
                str(place),
                seconds(c.step_s),
                f"+{percent(slower_frac(c.step_s, best.step_s))}",
                size(c.device_bytes),
                assignments(changes(c.strategy, best.strategy)),
            )
            for place, c in enumerate(candidates[1:], 2)
        ],
        headers=("", "step", "slower", "memory, 95 %", "instead of the winner's"),
        right=(0, 1, 2, 3),
    )


def print_front(to: Console, front: Sequence[Candidate]) -> None:
    """Plans that trade speed for memory, the fastest first."""
    heading(to, "Less memory, longer steps (nothing is both faster and smaller)")
    rows = [
        (seconds(c.step_s), f"+{percent(slower_frac(c.step_s, front[0].step_s))}", size(c.device_bytes),
         assignments(knobs(c.strategy)))
        for c in front
    ]  # fmt: skip
    table(to, rows, headers=("step", "slower", "memory, 95 %", "plan"), right=(0, 1, 2))


def print_alternatives(to: Console, plan: Plan, found: Sequence[Alternative]) -> None:
    """What each knob set otherwise would change, and what can't run."""
    runs = [of for of in found if of.outcome.step_s is not None]
    heading(to, "If one knob were set otherwise")
    table(
        to,
        [
            (
                f"{of.knob}={_set(of)}",
                *_change(of.outcome.step_s or 0.0, plan.estimate.step_time_s.mid),
                size(of.outcome.device_bytes or 0.0),
                *_verdict(of.outcome),
            )
            for of in runs
        ],
        headers=("knob", "step", "", "memory, 95 %", ""),
        right=(1, 2, 3),
    )
    for of in found:
        if of.outcome.step_s is None:
            to.print(f"- {of.outcome.broken}", soft_wrap=True)


def _set(of: Alternative) -> str:
    if of.knob == "recompute":
        kind, names = of.value
        return f"{kind} {shown(names)}" if names else str(kind)
    if of.knob == "recompute_layers" and of.value == ():
        return "all"
    return shown(of.value)


def _change(step_s: float, base_s: float) -> tuple[str, str]:
    return seconds(step_s), f"{'+' if step_s >= base_s else '-'}{percent(abs(step_s / base_s - 1))}"


def _verdict(of: Outcome) -> tuple[str]:
    words = ["does not fit"] if not of.fits else []
    return (", ".join([*words, *([of.numerics] if of.numerics != "same" else [])]),)


def print_ladder(to: Console, start: Baseline, rungs: Sequence[Rung], limit_bytes: float) -> None:
    """The way from a baseline to the plan, each change with its predicted factor; lossless and lossy ones apart."""
    heading(to, f"From {start.name} to this plan, predicted")
    line(to, f"{start.name}: {start.why}, on {start.backend}.")
    if not rungs:
        line(to, "It can't be priced: it breaks a rule of its backend.")
        return
    table(
        to,
        [
            (
                seconds(rung.outcome.step_s or 0.0),
                f"{rung.factor:.2f}x",
                f"{rung.total:.2f}x",
                size(rung.outcome.device_bytes or 0.0),
                *_verdict(rung.outcome),
                rung.change,
            )
            for rung in rungs
        ],
        headers=("step", "factor", "in all", "memory, 95 %", "", "change"),
        right=range(4),
    )
    apart = ", ".join(f"{of} {factor:.2f}x" for of, factor in totals(list(rungs)).items())
    line(to, f"By what it does to the result: {apart or 'nothing was changed'}.")
    if not rungs[0].outcome.fits:
        line(to, f"The baseline needs more than the {size(limit_bytes)} there are: its time is what it would be.")


def print_search(to: Console, record: SearchRecord) -> None:
    """How many strategies were covered and what became of them."""
    heading(to, f"Search ({record.engine})")
    rows = [
        ("covered", whole(record.covered), ""),
        ("left out", whole(record.dropped), "a bound shows that they are slower"),
        ("illegal", whole(illegal_count(record)), _by_rule(record)),
        ("too large", whole(record.infeasible), "more memory than the limit"),
        ("feasible", whole(record.feasible), _claim(record)),
        ("simulated", whole(record.simulated), ""),
    ]
    table(to, rows, right=(1,))


def _by_rule(record: SearchRecord) -> str:
    most = sorted(record.illegal.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{rule} {whole(n)}" for rule, n in most)


def _claim(record: SearchRecord) -> str:
    if not record.proven:
        return "sampled: a better one may exist"
    if record.gap_frac == 0:
        return "the winner is the fastest of them"
    return f"none is faster than the winner by more than {percent(record.gap_frac)}"
