"""What a run measured, with all that is needed to repeat it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.files import explain, read_text
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Workload
from trainplan.executor.files import write_json

if TYPE_CHECKING:
    from trainplan.executor.metrics import StepMetrics  # imports torch

FILE = "measurement.json"
WARMUP_STEPS = 3  # allocators, caches and communicators settle; compilation falls in the first


class Measurement(BaseModel):
    """The steady state of one run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan_hash: str | None = Field(None, description="Of the plan that ran; None for a run without a plan file.")
    model: ModelSpec
    workload: Workload
    strategy: Strategy
    step_time_s: float = Field(gt=0, description="Median of samples_s.")
    samples_s: tuple[float, ...] = Field(
        min_length=1, description="The last steps after warm-up, at most 1000, checkpoints not included."
    )
    warmup_steps: int = Field(ge=0, description="Steps before samples_s, which are left out.")
    tokens_per_s: float = Field(ge=0, description="Tokens that are not padding, over the time of the same steps.")
    padding_frac: float = Field(ge=0, le=1, description="Share of padding in the same steps.")
    data_wait_s: float = Field(ge=0, description="Median per step, on rank 0; part of step_time_s.")
    checkpoint_s: float = Field(ge=0, description="Mean time of one checkpoint, not part of step_time_s; 0 = none.")
    peak_memory_bytes: int = Field(gt=0, description="Largest of all ranks: tensors on a GPU, else resident memory.")
    loss_first: float | None
    loss_last: float | None
    steps: int = Field(ge=1, description="Optimizer steps done in this process.")
    environment: dict[str, str] = Field(description="Versions, device, host, date and command.")

    def save(self, folder: Path) -> Path:
        """Writes ``measurement.json`` into ``folder``; returns its path."""
        write_json(folder / FILE, self.model_dump(mode="json"))
        return folder / FILE

    @classmethod
    def load(cls, path: Path) -> Measurement:
        """Reads a file that `save` wrote.

        Raises:
            UsageError: It is missing or malformed.
        """
        try:
            return cls.model_validate_json(read_text(path))
        except ValidationError as error:
            raise UsageError(f"{path} is not a measurement: {explain(error)} Give a file that a run wrote.") from None


def steady_state(steps: Sequence[StepMetrics], done: int) -> dict[str, Any]:
    """Step time, throughput, padding and data wait of the steps after warm-up.

    Args:
        steps: The last steps of one process, in order; at least one.
        done: How many steps the process did.
    """
    left_out = min(max(0, WARMUP_STEPS - (done - len(steps))), len(steps) - 1)
    kept = steps[left_out:]
    tokens, padding = sum(step.tokens for step in kept), sum(step.padded_tokens for step in kept)
    return {
        "step_time_s": median(step.step_time_s for step in kept),
        "samples_s": tuple(step.step_time_s for step in kept),
        "warmup_steps": done - len(kept),
        "tokens_per_s": tokens / sum(step.step_time_s for step in kept),
        "padding_frac": padding / (tokens + padding),
        "data_wait_s": median(step.data_wait_s for step in kept),
    }
