"""`planner run`: train a plan on this machine, then set predicted beside measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainplan.planner.commands.output import asked

if TYPE_CHECKING:
    from trainplan.costmodel.plan import Plan

EXAMPLES = (
    "planner run plan.yaml --model-dir Qwen3-8B --data train.jsonl --output out --steps 1000",
    "planner run plan.yaml --model-dir Qwen3-8B --data train.jsonl --output out --steps 1000 --resume",
)


def run(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(help="Plan file for the native backend.")],
    model_dir: Annotated[Path, typer.Option(help="Hugging Face folder: config.json, tokenizer, safetensors.")],
    data: Annotated[Path, typer.Option(help="JSONL, one document per line with a text or input_ids field.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for metrics, checkpoints and the model.")],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps in all; the plan's train_tokens if left out.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")] = False,
    learning_rate: Annotated[float, typer.Option(help="Peak, reached after warm-up.")] = 1e-4,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Steps until the peak.")] = 0,
    lr_schedule: Annotated[str, typer.Option(help="cosine, linear or constant.")] = "cosine",
    min_lr_frac: Annotated[float, typer.Option(min=0, max=1, help="Last learning rate as a share of the peak.")] = 0.1,
    weight_decay: Annotated[float, typer.Option(min=0, help="Of matrices; norms and biases have none.")] = 0.1,
    beta1: Annotated[float, typer.Option(min=0, max=1, help="AdamW's decay of the first moment.")] = 0.9,
    beta2: Annotated[float, typer.Option(min=0, max=1, help="AdamW's decay of the second moment.")] = 0.95,
    max_grad_norm: Annotated[float, typer.Option(min=0, help="Gradients are clipped to it; 0 = never.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Order of the data and random weights.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0 = one at the end.")] = 0,
    keep_checkpoints: Annotated[int, typer.Option(min=1, help="Newest checkpoints that are kept.")] = 2,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Count malformed lines of the data instead of stopping.")
    ] = False,
    text_field: Annotated[str, typer.Option(help="Field of a line that holds its text.")] = "text",
    log_every: Annotated[int, typer.Option(min=1, help="Steps between lines where there is no terminal.")] = 1,
    init: Annotated[str, typer.Option(help="Weights to start from: pretrained or random.")] = "pretrained",
) -> None:
    """Train a plan on this machine, and compare with the prediction.

    The machine is checked against the plan first. Ctrl-C ends the step, saves, and stops; a second one stops at once.
    """
    from trainplan.costmodel.plan import Plan
    from trainplan.executor.launch import run_plan
    from trainplan.executor.options import RunOptions
    from trainplan.executor.preflight import check_run
    from trainplan.planner.arguments import validated
    from trainplan.planner.machine import check_machine, this_machine

    loaded = Plan.load(plan)
    options = validated(
        RunOptions,
        {
            "model_dir": model_dir, "data": data, "output_dir": output, "resume": resume,
            "steps": _steps(loaded) if steps is None else steps,
            "learning_rate": learning_rate, "warmup_steps": warmup_steps, "lr_schedule": lr_schedule,
            "min_lr_frac": min_lr_frac, "weight_decay": weight_decay, "betas": (beta1, beta2),
            "max_grad_norm": max_grad_norm, "seed": seed, "checkpoint_every": checkpoint_every,
            "keep_checkpoints": keep_checkpoints, "skip_bad_lines": skip_bad_lines, "text_field": text_field,
            "log_every": log_every, "init": init,
        },
    )  # fmt: skip
    check_run(loaded, options)
    check_machine(loaded, plan, this_machine())
    _check_packages()
    code = run_plan(plan, options, debug=asked(context).debug)
    if code == 0:
        _compare(loaded, output)
    raise typer.Exit(code)


def _steps(plan: Plan) -> int:
    from trainplan.costmodel.errors import UsageError
    from trainplan.planner.summary import steps_of

    steps = steps_of(plan.workload)
    if steps is None:
        raise UsageError("--steps is missing, and the plan has no train_tokens to derive it from. Give --steps.")
    return steps


def _check_packages() -> None:
    """Returns if training can be imported here.

    Raises:
        UsageError: A package is missing.
    """
    from trainplan.costmodel.errors import UsageError
    from trainplan.planner.checkup import missing_packages

    if missing := missing_packages():
        names = ", ".join(missing)
        raise UsageError(f"training needs {names}, not installed here. Run: pip install 'trainplan[train]'")


def _compare(plan: Plan, output: Path) -> None:
    from trainplan.executor.measurement import FILE, Measurement
    from trainplan.planner.render.console import console
    from trainplan.planner.render.run import print_comparison

    if (output / FILE).is_file():  # a run that was complete when it was resumed measures nothing
        print_comparison(console(), plan, Measurement.load(output / FILE))
