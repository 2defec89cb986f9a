"""`planner explain`: why a plan costs what it does, and where the numbers come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trainplan.costmodel.plan import Plan
    from trainplan.planner.alternatives import Outcome
    from trainplan.planner.baselines import Baseline

EXAMPLES = (
    "planner explain plan.yaml",
    "planner explain plan.yaml --baseline fsdp-default",
    "planner explain plan.yaml --json",
    "planner explain edited.yaml --reprice -o new.yaml",
)


def explain(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(help="Plan file that `planner tune` wrote.")],
    reprice: Annotated[
        bool, typer.Option("--reprice", help="Price a plan that was edited by hand anew, and write it.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Where --reprice writes; the plan itself if left out.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="What to set the plan against: hf-default, fsdp-default, megatron-recipe or a plan file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Show the knobs, step time, memory and sources of a plan.

    Also what each knob set otherwise would change, and with --baseline the way from what people run without a search
    to the plan, one change at a time. With --reprice the strategy or job may have been edited by hand: it is checked,
    priced anew and written.
    """
    from trainplan.costmodel.errors import UsageError
    from trainplan.costmodel.plan import Plan

    if output is not None and not reprice:
        raise UsageError("-o says where --reprice writes, but --reprice is missing. Give both or neither.")
    loaded = Plan.load(plan, edited=reprice)
    written = None
    if reprice:
        written = output or plan
        loaded = _repriced(loaded, context, written)
    start = None if baseline is None else _baseline(baseline, loaded)
    if as_json:
        _print_json(loaded, written, start)
    else:
        _print(loaded, written, start)


def _baseline(name: str, plan: Plan) -> Baseline:
    """The baseline of a name, or that of a plan file for the same job.

    Raises:
        UsageError: There is none, or the file is for another job.
    """
    from trainplan.costmodel.errors import UsageError
    from trainplan.costmodel.plan import Plan as PlanFile
    from trainplan.planner.baselines import NAMES, Baseline, baseline

    if name in NAMES or not Path(name).exists():
        return baseline(name, plan.job)
    other = PlanFile.load(Path(name))
    if other.job != plan.job:
        raise UsageError(
            f"--baseline {name} is a plan for another model, cluster or workload. Give one of the same job."
        )
    return Baseline(name, other.backend, other.strategy, f"plan {other.plan_hash}")


def _repriced(plan: Plan, context: typer.Context, target: Path) -> Plan:
    """The plan with a new estimate, saved to ``target``."""
    from trainplan.costmodel.plan import Plan
    from trainplan.costmodel.step import estimate
    from trainplan.planner.commands.output import check_plan_target, provenance

    check_plan_target(target)
    priced = Plan(
        model=plan.model,
        cluster=plan.cluster,
        workload=plan.workload,
        backend=plan.backend,
        strategy=plan.strategy,
        estimate=estimate(plan.job, plan.backend, plan.strategy, plan.estimate.memory_limit_bytes),
        provenance=provenance(context, None),
    )
    priced.save(target)
    return priced


def _print_json(plan: Plan, written: Path | None, start: Baseline | None) -> None:
    from dataclasses import asdict

    from trainplan.costmodel.step import critical_seconds
    from trainplan.planner.alternatives import alternatives
    from trainplan.planner.commands.output import plan_document, print_json
    from trainplan.planner.ladder import ladder, totals
    from trainplan.planner.provenance import assumptions, quantities
    from trainplan.planner.summary import headroom_bytes, parts

    estimate = plan.estimate
    limit = estimate.memory_limit_bytes
    rungs = [] if start is None else ladder(plan.job, start, plan.backend, plan.strategy, limit)
    print_json(
        {
            "plan": plan_document(plan),
            "step": [asdict(part) for part in parts(estimate.breakdown_s)],
            "memory": [asdict(part) for part in parts(estimate.peak.breakdown_bytes)],
            "headroom_bytes": headroom_bytes(estimate, estimate.memory_limit_bytes),
            "fits": estimate.fits,
            "quantities": [asdict(found) for found in quantities(plan.cluster)],
            "assumptions": assumptions(plan),
            "critical_path": [asdict(p) for p in parts(critical_seconds(plan.job, plan.backend, plan.strategy))],
            "alternatives": [
                {"knob": of.knob, "value": of.value, **_outcome(of.outcome)}
                for of in alternatives(plan.job, plan.backend, plan.strategy, limit)
            ],
            "baseline": None if start is None else {"name": start.name, "backend": start.backend, "why": start.why},
            "ladder": [
                {"change": rung.change, "factor": rung.factor, "total_factor": rung.total, **_outcome(rung.outcome)}
                for rung in rungs
            ],
            "ladder_totals": totals(rungs),
            "plan_file": None if written is None else str(written),
        }
    )


def _outcome(of: Outcome) -> dict[str, Any]:
    return {
        "step_s": of.step_s, "device_bytes": of.device_bytes, "fits": of.fits, "numerics": of.numerics,
        "broken": of.broken or None, "strategy": of.strategy.model_dump(mode="json"),
    }  # fmt: skip


def _print(plan: Plan, written: Path | None, start: Baseline | None) -> None:
    from trainplan.costmodel.step import critical_seconds
    from trainplan.planner.alternatives import alternatives
    from trainplan.planner.ladder import ladder
    from trainplan.planner.provenance import assumptions
    from trainplan.planner.render import plan as screen
    from trainplan.planner.render.cluster import print_quantities
    from trainplan.planner.render.console import console, heading, line

    to, estimate = console(), plan.estimate
    limit_bytes = estimate.memory_limit_bytes
    screen.print_job(to, plan)
    screen.print_strategy(to, plan.strategy)
    screen.print_estimate(to, plan, limit_bytes)
    screen.print_breakdown(to, estimate)
    screen.print_critical(to, critical_seconds(plan.job, plan.backend, plan.strategy))
    screen.print_memory(to, estimate, limit_bytes)
    screen.print_alternatives(to, plan, list(alternatives(plan.job, plan.backend, plan.strategy, limit_bytes)))
    if start is not None:
        rungs = ladder(plan.job, start, plan.backend, plan.strategy, limit_bytes)
        screen.print_ladder(to, start, rungs, limit_bytes)
    if plan.provenance.search is not None:
        screen.print_search(to, plan.provenance.search)
    print_quantities(to, plan.cluster)
    heading(to, "Assumptions")
    for sentence in assumptions(plan):
        to.print(f"- {sentence}")
    heading(to, "Plan")
    line(to, f"{plan.plan_hash}, made {plan.provenance.created} by trainplan {plan.provenance.trainplan_version}:")
    line(to, plan.provenance.command)
    if written is not None:
        line(to, f"Priced anew and written to {written}")
