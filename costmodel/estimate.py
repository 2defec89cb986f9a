"""What a strategy is predicted to cost: step time with its interval and parts, throughput, and memory per stage."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainplan.costmodel.hardware import Provenance

MFU_DEFINITION = (
    "6 N FLOP per token (N without input embedding) plus causal attention, no recompute, over the dense peak"
)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Interval(_Frozen):
    """The 5 %, 50 % and 95 % points of a prediction."""

    low: float = Field(ge=0)
    mid: float = Field(ge=0)
    high: float = Field(ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Interval:
        if not self.low <= self.mid <= self.high:
            raise ValueError(f"interval {self.low}, {self.mid}, {self.high} is not in increasing order.")
        return self


class StageMemory(_Frozen):
    """Memory of one rank of a pipeline stage at its peak [bytes].

    ``allocated_bytes`` are live tensors, the sum of ``breakdown_bytes``; ``reserved_bytes`` adds what the allocator
    holds besides; ``device_bytes`` adds the context and libraries.
    """

    stage: int = Field(ge=0, description="Pipeline rank.")
    breakdown_bytes: dict[str, float]
    allocated_bytes: float = Field(ge=0)
    reserved_bytes: Interval
    device_bytes: Interval


class Estimate(_Frozen):
    """The predicted cost of one optimizer step."""

    step_time_s: Interval
    breakdown_s: dict[str, float] = Field(
        description="Parts of step_time_s.mid on the busiest rank; they add up to it."
    )
    tokens_per_s: float = Field(gt=0, description="Useful tokens of the whole cluster; padding does not count.")
    useful_token_frac: float = Field(gt=0, le=1, description="Tokens that are not padding.")
    mfu: float = Field(ge=0, description=MFU_DEFINITION)
    bubble_frac: float = Field(ge=0, description="Share of the step in which pipeline ranks wait, averaged over ranks.")
    exposed_comm_s: float = Field(ge=0, description="Communication that no computation hides.")
    stages: tuple[StageMemory, ...] = Field(min_length=1)
    memory_limit_bytes: float = Field(gt=0)
    price_per_1b_tokens: float | None = Field(None, ge=0)
    weakest_provenance: Provenance = Field(description="The least certain kind of number behind the step time.")

    @property
    def peak(self) -> StageMemory:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.device_bytes.high)

    @property
    def fits(self) -> bool:
        """Whether the 95 % point of device memory of every stage is inside the limit."""
        return self.peak.device_bytes.high <= self.memory_limit_bytes
