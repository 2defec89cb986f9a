"""How a job is run: everything the search may choose, one strategy at a time or a million as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from trainplan.costmodel.hardware import Precision

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]
Sharding = Literal["none", "optimizer", "gradients", "parameters"]
Recompute = Literal["none", "selective", "full"]
NumericsClass = Literal["same", "rounding", "lossy"]


class Strategy(BaseModel):
    """Every choice that changes how a step runs but not what it computes (up to its `numerics` class).

    Degrees are 1 when off. ``sharding`` applies over ``dp_shard`` ranks: what it names, and all before it in the
    order optimizer, gradients, parameters, is split (ZeRO 1, 2, 3).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: int = Field(1, ge=1, description="Tensor parallel degree.")
    sp: bool = Field(False, description="Sequence parallel norms and dropouts over the tp group.")
    pp: int = Field(1, ge=1, description="Pipeline parallel degree.")
    vpp: int = Field(1, ge=1, description="Model chunks per pipeline rank.")
    schedule: Schedule = "1f1b"
    stage_layers: tuple[int, ...] | None = Field(None, description="Layers of each of pp * vpp stages; None = balanced.")
    dp_replicate: int = Field(1, ge=1, description="Data parallel replicas of the sharded group.")
    dp_shard: int = Field(1, ge=1, description="Data parallel ranks that sharding splits over.")
    sharding: Sharding = "none"
    reshard_after_forward: bool = Field(False, description="Gathered parameters are freed after forward (parameters only).")
    cp: int = Field(1, ge=1, description="Context parallel degree.")
    cp_method: Literal["ring", "ulysses"] = "ring"
    ep: int = Field(1, ge=1, description="Expert parallel degree, inside dp * cp.")
    etp: int = Field(1, ge=1, description="Tensor parallel degree of the experts.")
    rank_order: Literal["tp-cp-dp-pp", "tp-cp-pp-dp"] = Field("tp-cp-dp-pp", description="Fastest-varying axis first.")
    collective_algo: Literal["auto", "ring", "tree", "hierarchical"] = "auto"
    micro_batch_size: int = Field(1, ge=1, description="Sequences per micro-batch and data parallel rank.")
    token_budget: int = Field(0, ge=0, description="Tokens per dynamically filled micro-batch; 0 = micro_batch_size rules.")
    grad_accum: int = Field(1, ge=1, description="Micro-batches per optimizer step.")
    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = Field((), description="What selective recompute repeats.")
    recompute_layers: tuple[int, ...] = Field((), description="Layers recomputed in each stage (its first ones); empty = all.")
    activation_offload: bool = False
    optimizer_offload: bool = False
    loss_chunk: int = Field(0, ge=0, description="Tokens whose logits exist at a time; 0 = all of the micro-batch.")
    reduce_dtype: Literal["fp32", "bf16", "int8"] = "fp32"
    precision: Precision = "bf16"
    compile: bool = False
    attention: Literal["sdpa", "flash", "cudnn", "eager"] = "sdpa"
    fused_kernels: tuple[str, ...] = ()
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    overlap_tp: bool = False
    prefetch_units: int = Field(1, ge=0, description="Units gathered ahead of their use.")
    bucket_bytes: int = Field(0, ge=0, description="Gradient bucket; 0 = one per unit.")
    packing: bool = Field(True, description="Documents share a sequence; False = one document each, padded.")
    loader_workers: int = Field(0, ge=0)
    checkpoint_mode: Literal["sync", "async"] = "sync"

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch_size * self.grad_accum * self.dp
