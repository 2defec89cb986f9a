"""`planner explain`: why a plan costs what it does, and where the numbers come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from trainplan.costmodel.plan import Plan

EXAMPLES = (
    "planner explain plan.yaml",
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Show the knobs, step time, memory and sources of a plan.

    With --reprice the strategy or job may have been edited by hand: it is checked, priced anew and written.
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
    if as_json:
        _print_json(loaded, written)
    else:
        _print(loaded, written)


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


def _print_json(plan: Plan, written: Path | None) -> None:
    from dataclasses import asdict

    from trainplan.planner.commands.output import plan_document, print_json
    from trainplan.planner.provenance import assumptions, quantities
    from trainplan.planner.summary import headroom_bytes, parts

    estimate = plan.estimate
    print_json(
        {
            "plan": plan_document(plan),
            "step": [asdict(part) for part in parts(estimate.breakdown_s)],
            "memory": [asdict(part) for part in parts(estimate.peak.breakdown_bytes)],
            "headroom_bytes": headroom_bytes(estimate, estimate.memory_limit_bytes),
            "fits": estimate.fits,
            "quantities": [asdict(found) for found in quantities(plan.cluster)],
            "assumptions": assumptions(plan),
            "plan_file": None if written is None else str(written),
        }
    )


def _print(plan: Plan, written: Path | None) -> None:
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
    screen.print_memory(to, estimate, limit_bytes)
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
