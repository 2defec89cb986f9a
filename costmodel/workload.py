"""What is to be trained: sequence lengths, batch, precision, optimizer and how much of it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainplan.costmodel.hardware import Precision


class Lora(BaseModel):
    """Low-rank adapters on the named projections; everything else is frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    rank: int = Field(gt=0)
    alpha: float = Field(gt=0)
    base_dtype: Literal["bf16", "int4"] = Field(
        "bf16", description="How the frozen weights are stored; int4 (GPTQ) is turned into bf16 before every product."
    )
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Workload(BaseModel):
    """The job, independent of how it is run.

    ``length_histogram`` holds (document length in tokens, share of documents) pairs; empty means that every sequence
    is full. A document longer than ``seq_len`` is cut into pieces.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    seq_len: int = Field(gt=0)
    global_batch_size: int = Field(gt=0, description="Sequences of seq_len tokens per optimizer step.")
    length_histogram: tuple[tuple[int, float], ...] = ()
    precision: Precision = Field("bf16", description="Arithmetic of matrix products; master weights are fp32.")
    optimizer: Literal["adamw"] = "adamw"
    lora: Lora | None = Field(None, description="None = full fine-tuning or pre-training.")
    routing_imbalance: float = Field(
        1.0, ge=1, description="Tokens of the busiest expert over the mean; 1 = balanced, as forced in benchmarks."
    )
    train_tokens: int | None = Field(None, gt=0, description="Tokens of the whole job, where known.")

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.global_batch_size

    @model_validator(mode="after")
    def _histogram(self) -> Workload:
        if any(length <= 0 or share < 0 for length, share in self.length_histogram):
            raise ValueError("length_histogram: every length must be positive and every share at least 0.")
        if self.length_histogram and not sum(share for _, share in self.length_histogram) > 0:
            raise ValueError("length_histogram: all shares are 0. Give the share of documents of each length.")
        return self
