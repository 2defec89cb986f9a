"""Everything about a run that can be refused before a process is started. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from trainplan.costmodel.backends.native import BACKEND as NATIVE
from trainplan.costmodel.errors import MachineMismatchError, UsageError
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.plan import Plan
from trainplan.executor.options import RunOptions


def check_run(plan: Plan, options: RunOptions) -> None:
    """Returns if ``plan`` can be started with ``options``, as far as files and numbers tell.

    Raises:
        UsageError: A path is missing or unusable, or the plan is for another backend.
        MachineMismatchError: The model directory holds another model than the plan's.
    """
    if plan.backend != NATIVE.name:
        raise UsageError(
            f"the plan is for the backend {plan.backend!r}; planner run starts native plans only. "
            f"Tune with --backend native."
        )
    check_paths(options)
    check_model(plan.model, options.model_dir)


def check_paths(options: RunOptions) -> None:
    """Returns if the inputs exist, and the output folder is free for this run.

    Raises:
        UsageError: One does not, or the folder holds another run and ``resume`` is off.
    """
    if not (options.model_dir / "config.json").is_file():
        raise UsageError(
            f"the model directory {options.model_dir} has no config.json. Give a Hugging Face model directory: "
            f"config.json, a tokenizer, safetensors weights."
        )
    if options.init == "pretrained" and not any(options.model_dir.glob("*.safetensors*")):
        raise UsageError(
            f"{options.model_dir} holds no safetensors weights (model.safetensors or model.safetensors.index.json). "
            f"Download the weights, or start from random ones with --init random."
        )
    if not options.data.is_file() or options.data.stat().st_size == 0:
        what = "is empty" if options.data.is_file() else "is not a file"
        raise UsageError(
            f'the data {options.data} {what}. Give a JSONL file, one document per line: {{"text": "..."}}.'
        )
    used = _first_trace(options.output_dir)
    if used and not options.resume:
        raise UsageError(
            f"{options.output_dir} already holds a run ({used}). Pass --resume to continue it, or give another folder."
        )


def _first_trace(output_dir: Path) -> str | None:
    if output_dir.exists() and not output_dir.is_dir():
        raise UsageError(f"the output folder {output_dir} is a file. Give a folder.")
    for name in ("metrics.jsonl", "checkpoints/latest", "model/config.json"):
        path = output_dir / name
        if path.is_file() and path.stat().st_size:
            return name
    return None


def check_model(planned: ModelSpec, model_dir: Path) -> None:
    """Returns if the config.json in ``model_dir`` describes the model that was planned for.

    Raises:
        MachineMismatchError: It does not; the message names the fields.
    """
    found = load_model(str(model_dir))
    different = [
        f"{field} is {getattr(found, field)!r}, not {getattr(planned, field)!r}"
        for field in ModelSpec.model_fields
        if field != "name" and getattr(found, field) != getattr(planned, field)
    ]
    if different:
        more = f" and {len(different) - 5} more" if len(different) > 5 else ""
        raise MachineMismatchError(
            f"{model_dir} holds another model than the plan's {planned.name}: {'; '.join(different[:5])}{more}. "
            f"Give the model that was planned for, or tune a plan for this one."
        )
