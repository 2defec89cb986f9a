"""`planner size`: the fewest GPUs that fit a job, meet a deadline or stay within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainplan.planner.sizing import Goal, Sized

EXAMPLES = (
    "planner size Qwen/Qwen3-32B --gpu H100 --seq-len 4096 --global-batch-size 512 --backend megatron",
    "planner size Qwen/Qwen3-8B --gpu H100 --seq-len 4096 --global-batch-size 256 --tokens 10B --within 3d",
    "planner size Qwen/Qwen3-8B --gpu A100,H100 --seq-len 4096 --global-batch-size 256 --tokens 10B --budget 5000 "
    "--price-per-gpu-hour 2.5",
)


def size(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="config.json, a folder that holds one, or a known name.")],
    gpu: Annotated[str, typer.Option(help="Kind of GPU; several: H100,A100.")],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")],
    global_batch_size: Annotated[int, typer.Option(min=1, help="Sequences per optimizer step.")],
    backend: Annotated[str, typer.Option(help="Who runs it.")] = "native",
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, as in 20B.")] = None,
    within: Annotated[str | None, typer.Option(help="Deadline for all tokens, as in 3d, 36h or 90m.")] = None,
    budget: Annotated[float | None, typer.Option(min=0, help="Money for all tokens; needs a price.")] = None,
    price_per_gpu_hour: Annotated[float | None, typer.Option(min=0, help="In the same currency.")] = None,
    max_gpus: Annotated[int, typer.Option(min=1, max=65536, help="Largest cluster to try.")] = 1024,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for a plan file per answer, as fit-H100.yaml.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Find the fewest GPUs for a job, a deadline or a budget.

    Tries 1, 2, 4, ... GPUs, each with its proven best plan.
    """
    from trainplan.costmodel.errors import NoPlanError, UsageError
    from trainplan.costmodel.model_config import load_model
    from trainplan.costmodel.workload import Workload
    from trainplan.planner.arguments import count_of, duration_of, validated
    from trainplan.planner.search import Pins
    from trainplan.planner.sizing import answers, goals, sizes

    if within is not None and tokens is None:
        raise UsageError("--within says when all tokens must be trained, but --tokens is missing. Give it.")
    if (budget is None) != (price_per_gpu_hour is None) or (budget is not None and tokens is None):
        raise UsageError("--budget, --price-per-gpu-hour and --tokens belong together. Give all three, or no budget.")
    asked = goals(None if within is None else duration_of(within, "--within") / 3600, budget)
    spec = load_model(model)
    workload = validated(
        Workload,
        {
            "seq_len": seq_len,
            "global_batch_size": global_batch_size,
            "train_tokens": None if tokens is None else count_of(tokens, "--tokens"),
        },
    )
    found: dict[str, tuple[Mapping[str, Sized], Sequence[Sized]]] = {}
    for name in dict.fromkeys(word.strip() for word in gpu.split(",")):
        tried = sizes(spec, name, workload, backend, Pins(), most=max_gpus, price_per_gpu_hour=price_per_gpu_hour)
        found[name] = answers(tried, asked)
    if not any(reached for reached, _ in found.values()):
        raise NoPlanError(
            f"no number of {', '.join(found)} up to {max_gpus} reaches any goal. Raise --max-gpus, or see what "
            "`planner tune` says of the largest."
        )
    written = _write(found, output, backend, context)
    if as_json:
        _print_json(found, asked, written)
    else:
        _print(found, asked, written)


def _write(
    found: Mapping[str, tuple[Mapping[str, Sized], Sequence[Sized]]],
    folder: Path | None,
    backend: str,
    context: typer.Context,
) -> dict[tuple[str, str], str]:
    """(GPU, goal) -> the plan file written for it."""
    from trainplan.costmodel.plan import Plan
    from trainplan.planner.commands.output import check_plan_target, provenance

    written: dict[tuple[str, str], str] = {}
    if folder is None:
        return written
    folder.mkdir(parents=True, exist_ok=True)
    for gpu, (reached, _) in found.items():
        for goal, of in reached.items():
            target = folder / f"{goal}-{gpu}.yaml"
            check_plan_target(target)
            plan = Plan(
                model=of.job.model, cluster=of.job.cluster, workload=of.job.workload, backend=backend,
                strategy=of.result.candidates[0].strategy, estimate=of.result.estimate,
                provenance=provenance(context, of.result.record),
            )  # fmt: skip
            plan.save(target)
            written[gpu, goal] = str(target)
    return written


def _print_json(
    found: Mapping[str, tuple[Mapping[str, Sized], Sequence[Sized]]],
    asked: Sequence[Goal],
    written: Mapping[tuple[str, str], str],
) -> None:
    from trainplan.planner.commands.output import print_json

    def row(of: Sized) -> dict[str, object]:
        return {
            "num_gpus": of.num_gpus, "step_s": of.result.estimate.step_time_s.mid,
            "tokens_per_s": of.result.estimate.tokens_per_s, "hours": of.hours, "cost": of.cost,
            "strategy": of.result.candidates[0].strategy.model_dump(mode="json"),
        }  # fmt: skip

    print_json(
        {
            gpu: {
                "answers": {
                    goal.name: {**row(reached[goal.name]), "plan_file": written.get((gpu, goal.name))}
                    if goal.name in reached
                    else None
                    for goal in asked
                },
                "tried": [row(of) for of in seen],
            }
            for gpu, (reached, seen) in found.items()
        }
    )


def _print(
    found: Mapping[str, tuple[Mapping[str, Sized], Sequence[Sized]]],
    asked: Sequence[Goal],
    written: Mapping[tuple[str, str], str],
) -> None:
    from trainplan.planner.render.console import console, heading, line, table
    from trainplan.planner.render.format import money, seconds, tokens_per_s
    from trainplan.planner.render.plan import assignments
    from trainplan.planner.summary import knobs

    to = console()
    for gpu, (reached, seen) in found.items():
        heading(to, f"Plans on {gpu}")
        rows = [
            (
                str(of.num_gpus),
                seconds(of.result.estimate.step_time_s.mid),
                tokens_per_s(of.result.estimate.tokens_per_s),
                "-" if of.hours is None else seconds(3600 * of.hours),
                "-" if of.cost is None else money(of.cost),
                ", ".join(goal for goal, best in reached.items() if best is of),
            )
            for of in seen
        ]
        headers = ("GPUs", "step", "throughput", "all tokens", "cost", "fewest for")
        table(to, rows, headers=headers, right=range(5))
        for goal in asked:
            if goal.name not in reached:
                line(to, f"{goal.name}: not reached.")
                continue
            of = reached[goal.name]
            file = written.get((gpu, goal.name))
            line(to, f"{goal.name}: {of.num_gpus} GPUs: {assignments(knobs(of.result.candidates[0].strategy))}")
            if file is not None:
                line(to, f"plan written to {file}")
