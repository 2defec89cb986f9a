"""One JSON line per optimizer step, and the same curves for TensorBoard where it is installed."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one optimizer step did, summed over all ranks."""

    step: int  # the first is 1
    loss: float  # mean over loss_tokens
    learning_rate: float
    grad_norm: float  # before clipping
    step_time_s: float  # checkpoints not included
    tokens: int  # not padding
    padded_tokens: int  # padding; tokens + padded_tokens = global_batch_size * seq_len
    loss_tokens: int  # with a label
    tokens_per_s: float  # tokens / step_time_s
    data_wait_s: float  # part of step_time_s, on rank 0
    peak_memory_bytes: int  # of rank 0, since the start
    skipped: bool = False  # loss or gradient was not finite, so the weights were left alone


class MetricsLog:
    """Appends to ``<folder>/metrics.jsonl``; each line is on its way to the disk before the next step starts."""

    def __init__(self, folder: Path, *, steps_kept: int) -> None:
        """Opens the log and drops every line after step ``steps_kept``, so that a resumed curve has no duplicates."""
        self.path = folder / "metrics.jsonl"
        kept = _lines_up_to(self.path, steps_kept)
        temporary = self.path.with_name(".metrics.jsonl")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _tensorboard(folder / "tensorboard", purge_step=steps_kept + 1)

    def write(self, metrics: StepMetrics) -> None:
        """Appends one step."""
        line = {key: _jsonable(value) for key, value in asdict(metrics).items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name in ("loss", "learning_rate", "grad_norm", "tokens_per_s", "step_time_s"):
                self._board.add_scalar(f"train/{name}", getattr(metrics, name), metrics.step)

    def close(self) -> None:
        """Flushes both."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; a last line cut by a crash is left out."""
    return [json.loads(line) for line in _lines_up_to(path, None)]


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has used: allocated tensors on a GPU, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # absent on Windows, where a GPU run still works
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no NaN


def _lines_up_to(path: Path, last: int | None) -> list[str]:
    if not path.is_file():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if last is None or step <= last:
            kept.append(line + "\n")
    return kept


def _tensorboard(folder: Path, purge_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=purge_step)
