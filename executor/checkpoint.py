"""Checkpoints: whole or absent, and readable by any number of ranks.

``<output>/checkpoints/step-N`` holds model, optimizer and random state after N optimizer steps, written by torch's
distributed checkpoint, and ``trainer.json``. A folder gets that name only when all its files are on the disk; until
then it is ``.tmp-step-N``. ``latest`` names the newest. A checkpoint is trusted like a program: torch reads its
metadata with pickle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from trainplan.costmodel.errors import MachineMismatchError, TrainplanError, UsageError
from trainplan.executor.files import publish, sync_folder, write_json

FOLDER = "checkpoints"
LATEST = "latest"
_INFO = "trainer.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    job: Mapping[str, Any]  # what a resumed run must have in common with it


def newest(output_dir: Path) -> Checkpoint | None:
    """The complete checkpoint with most steps under ``output_dir``; None where there is none.

    A folder whose files are not all there with their full sizes is passed over.
    """
    found = sorted(
        (int(match[1]), path) for path in (output_dir / FOLDER).glob("step-*") if (match := _NAME.fullmatch(path.name))
    )
    for step, path in reversed(found):
        try:
            info = json.loads((path / _INFO).read_text(encoding="utf-8"))
            whole = info["format"] == _FORMAT and all(
                (path / name).stat().st_size == size for name, size in info["files"].items()
            )
            if whole and info["step"] == step:
                return Checkpoint(path, step, info["job"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def check_same_job(checkpoint: Checkpoint, job: Mapping[str, Any]) -> None:
    """Returns if ``job`` continues what the checkpoint began.

    Raises:
        MachineMismatchError: They differ; the message names in what.
    """
    different = [
        f"{key} was {checkpoint.job.get(key)!r}, is {value!r}"
        for key, value in job.items()
        if checkpoint.job.get(key) != value
    ]
    if different:
        raise MachineMismatchError(
            f"{checkpoint.path} is of another job ({'; '.join(different)}). "
            f"Resume with the same values, or start a new run in another output folder."
        )


def clean(output_dir: Path) -> None:
    """Removes what an interrupted save or deletion left behind; for one rank, before training."""
    for path in (output_dir / FOLDER).glob(".*-step-*"):
        shutil.rmtree(path, ignore_errors=True)


class _State:
    """Everything that goes into a checkpoint, by name."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.rank = dist.get_rank()

    def _random(self) -> dict[str, torch.Tensor]:
        random = {f"cpu-{self.rank}": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            random[f"cuda-{self.rank}"] = torch.cuda.get_rng_state()
        return random

    def collect(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "random": self._random()}

    def restore(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        random = state["random"]
        if f"cpu-{self.rank}" in random:
            torch.set_rng_state(random[f"cpu-{self.rank}"])
        if f"cuda-{self.rank}" in random:
            torch.cuda.set_rng_state(random[f"cuda-{self.rank}"])


def save(
    output_dir: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    job: Mapping[str, Any],
    keep: int,
) -> None:
    """Writes ``step-<step>`` and points ``latest`` to it; every rank must call it. Keeps the newest ``keep``.

    Raises:
        TrainplanError: It could not be written, for example because the disk is full. Older checkpoints stay.
    """
    folder = output_dir / FOLDER
    final, temporary = folder / f"step-{step}", folder / f".tmp-step-{step}"
    writes = dist.get_rank() == 0
    state = _State(model, optimizer).collect()
    problem: str | None = None
    try:
        if writes:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(temporary, sync_files=True))
    except (dcp.CheckpointException, OSError, RuntimeError) as error:
        problem = _reason(error)
    if writes and problem is None:
        try:
            files = {path.name: path.stat().st_size for path in temporary.iterdir()}
            info = {
                "format": _FORMAT,
                "step": step,
                "world_size": dist.get_world_size(),
                "job": dict(job),
                "files": files,
            }
            write_json(temporary / _INFO, info)
            publish(temporary, final)
            _point(folder, final.name)
            _forget_old(folder, keep)
        except OSError as error:
            problem = _reason(error)
    problem = _first_problem(problem)
    if problem is not None:
        if writes:
            shutil.rmtree(temporary, ignore_errors=True)
        last = newest(output_dir)
        kept = f"The checkpoint of step {last.step} is whole" if last else "There is no earlier checkpoint"
        raise TrainplanError(
            f"the checkpoint of step {step} could not be written to {folder} ({problem}). {kept}. "
            f"Free space or mend the folder, then continue with --resume."
        )


def _reason(error: BaseException) -> str:
    if isinstance(error, dcp.CheckpointException):
        first = next(iter(error.failures.values()), None)
        error = first[0] if first else error
    return " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())[:200]


def _first_problem(problem: str | None) -> str | None:
    """The same answer on every rank: what went wrong on any of them."""
    gathered: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, problem)
    return next((p for p in gathered if p is not None), None)


def _point(folder: Path, name: str) -> None:
    temporary = folder / f".{LATEST}"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / LATEST)
    sync_folder(folder)


def _forget_old(folder: Path, keep: int) -> None:
    steps = sorted(int(match[1]) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name)))
    for step in steps[:-keep]:
        doomed = folder / f".old-step-{step}"  # half deleted it must not look complete
        (folder / f"step-{step}").rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def load(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fills model and optimizer from ``checkpoint``, whatever number of ranks wrote it; every rank must call it.

    Raises:
        UsageError: Its files can't be read.
    """
    target = _State(model, optimizer)
    state = target.collect()
    try:
        reader = dcp.FileSystemReader(checkpoint.path)
        known = reader.read_metadata().state_dict_metadata
        # Another number of ranks has other random states; the missing ones keep what the seed gave them.
        state["random"] = {name: value for name, value in state["random"].items() if f"random.{name}" in known}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, storage_reader=reader)
    # CheckpointException is no Exception, and what a damaged pickle raises has no narrower base.
    except (dcp.CheckpointException, Exception) as error:
        raise UsageError(
            f"the checkpoint {checkpoint.path} cannot be read ({_reason(error)}). "
            f"Remove this folder; --resume then takes the one before it."
        ) from None
    target.restore(state)
