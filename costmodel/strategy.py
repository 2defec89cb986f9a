"""How a job is run: everything the search may choose, one strategy at a time or a million as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    stage_layers: tuple[int, ...] | None = Field(
        None, description="Layers of each of pp * vpp stages; None = balanced."
    )
    dp_replicate: int = Field(1, ge=1, description="Data parallel replicas of the sharded group.")
    dp_shard: int = Field(1, ge=1, description="Data parallel ranks that sharding splits over.")
    sharding: Sharding = "none"
    reshard_after_forward: bool = Field(
        False, description="Gathered parameters are freed after forward (parameters only)."
    )
    cp: int = Field(1, ge=1, description="Context parallel degree.")
    cp_method: Literal["ring", "ulysses"] = "ring"
    ep: int = Field(1, ge=1, description="Expert parallel degree, inside dp * cp.")
    etp: int = Field(1, ge=1, description="Tensor parallel degree of the experts.")
    rank_order: Literal["tp-cp-dp-pp", "tp-cp-pp-dp"] = Field("tp-cp-dp-pp", description="Fastest-varying axis first.")
    collective_algo: Literal["auto", "ring", "tree", "hierarchical"] = "auto"
    micro_batch_size: int = Field(1, ge=1, description="Sequences per micro-batch and data parallel rank.")
    token_budget: int = Field(
        0, ge=0, description="Tokens per dynamically filled micro-batch; 0 = micro_batch_size rules."
    )
    grad_accum: int = Field(1, ge=1, description="Micro-batches per optimizer step.")
    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = Field((), description="What selective recompute repeats.")
    recompute_layers: tuple[int, ...] = Field(
        (), description="Layers recomputed in each stage (its first ones); empty = all."
    )
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


FIELDS: tuple[str, ...] = tuple(Strategy.model_fields)
DEFAULT = Strategy()
CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(field.annotation)
    for name, field in Strategy.model_fields.items()
    if get_args(field.annotation) and all(isinstance(value, str) for value in get_args(field.annotation))
}
"""Fields that name one of a few choices, in the order of their codes in a `StrategyTable`."""
TUPLES: tuple[str, ...] = ("stage_layers", "recompute_modules", "recompute_layers", "fused_kernels")
"""Fields that hold a tuple (or None); a table keeps them as codes into its own vocabulary."""


def numerics(strategy: Strategy, precision: Precision) -> NumericsClass:
    """How far the result of a step may differ from the plain one at the workload's ``precision``.

    ``same``: up to the order of summation. ``rounding``: gradients are reduced in bf16 (never below fp32 when the
    job itself is bf16 with fp32 reduction). ``lossy``: int8 gradient reduction, or arithmetic below ``precision``.
    """
    order: tuple[Precision, ...] = get_args(Precision)
    if strategy.reduce_dtype == "int8" or order.index(strategy.precision) > order.index(precision):
        return "lossy"
    return "rounding" if strategy.reduce_dtype == "bf16" else "same"


def canonical(strategy: Strategy) -> Strategy:
    """The one strategy that stands for all that run the same: knobs without effect take their defaults."""
    s = strategy.model_dump()
    if s["sharding"] == "none":
        s.update(dp_replicate=s["dp_replicate"] * s["dp_shard"], dp_shard=1)
    if s["dp_shard"] == 1:
        s["sharding"] = "none"
    if s["tp"] == 1:
        s.update(sp=False, overlap_tp=False)
    if s["schedule"] == "interleaved" and s["vpp"] == 1:
        s["schedule"] = "1f1b"
    if s["pp"] == 1:
        s.update(schedule="1f1b", vpp=1, stage_layers=None)
    if s["cp"] == 1:
        s["cp_method"] = DEFAULT.cp_method
    if s["recompute"] != "selective":
        s["recompute_modules"] = ()
    if s["recompute_layers"] and not any(s["recompute_layers"]):
        s.update(recompute="none", recompute_modules=())
    if s["recompute"] == "none":
        s["recompute_layers"] = ()
    if s["sharding"] != "parameters":
        s.update(reshard_after_forward=False, prefetch_units=DEFAULT.prefetch_units)
    if s["sharding"] == "none":
        s["overlap_param_gather"] = DEFAULT.overlap_param_gather
    if s["dp_replicate"] * s["dp_shard"] * s["cp"] == 1:
        s.update(overlap_grad_reduce=DEFAULT.overlap_grad_reduce, bucket_bytes=0, reduce_dtype=DEFAULT.reduce_dtype)
    if s["pp"] == 1 or s["dp_replicate"] * s["dp_shard"] == 1:
        s["rank_order"] = DEFAULT.rank_order
    if s["tp"] * s["pp"] * s["cp"] * s["dp_replicate"] * s["dp_shard"] == 1:
        s["collective_algo"] = DEFAULT.collective_algo
    for name in ("recompute_modules", "fused_kernels"):
        s[name] = tuple(sorted(set(s[name])))
    return Strategy(**s)


@dataclass(frozen=True)
class StrategyTable:
    """Many strategies as NumPy columns that broadcast against each other; a missing column holds the default.

    Choices are integer codes (`CHOICES`), tuples are codes into ``vocabulary[field]``. One strategy is a table of
    shape ``()``; a grid over several knobs has one axis per knob and stores each column once.
    """

    columns: Mapping[str, np.ndarray]
    vocabulary: Mapping[str, tuple[Any, ...]]

    @classmethod
    def of(cls, **values: Any) -> StrategyTable:
        """A table from columns: numbers, arrays of codes, or plain values; choices and tuples also by value."""
        columns: dict[str, np.ndarray] = {}
        vocabulary: dict[str, tuple[Any, ...]] = {}
        for name, value in values.items():
            if name in CHOICES and isinstance(value, str):
                value = CHOICES[name].index(value)
            if name in TUPLES:
                vocabulary[name], value = (value,), 0
            columns[name] = np.asarray(value)
        return cls(columns, vocabulary)

    @classmethod
    def from_strategies(cls, strategies: Sequence[Strategy]) -> StrategyTable:
        """One row per strategy."""
        columns: dict[str, np.ndarray] = {}
        vocabulary: dict[str, tuple[Any, ...]] = {}
        for name in FIELDS:
            values = [getattr(strategy, name) for strategy in strategies]
            if name in TUPLES:
                vocabulary[name] = tuple(dict.fromkeys(values))
                values = [vocabulary[name].index(value) for value in values]
            elif name in CHOICES:
                values = [CHOICES[name].index(value) for value in values]
            columns[name] = np.asarray(values)
        return cls(columns, vocabulary)

    def __getitem__(self, name: str) -> np.ndarray:
        """The column of a field: integers, booleans or codes."""
        if name in self.columns:
            return self.columns[name]
        default = getattr(DEFAULT, name)
        return np.asarray(CHOICES[name].index(default) if name in CHOICES else 0 if name in TUPLES else default)

    def chosen(self, name: str, *values: str) -> np.ndarray:
        """Where the choice ``name`` is one of ``values`` (bool, broadcastable)."""
        column = self[name]
        result = column == CHOICES[name].index(values[0])
        for value in values[1:]:
            result = result | (column == CHOICES[name].index(value))
        return np.asarray(result)

    def at_least(self, name: str, value: str) -> np.ndarray:
        """Where an ordered choice (sharding) has reached ``value`` (bool, broadcastable)."""
        return self[name] >= CHOICES[name].index(value)

    def mapped(self, name: str, function: Any) -> np.ndarray:
        """``function`` of each row's value of a tuple field; evaluated once per distinct value."""
        words = self.vocabulary.get(name, (getattr(DEFAULT, name),))
        values = np.asarray([function(word) for word in words])
        return np.asarray(values[0] if len(words) == 1 else values[self[name]])

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(column.shape for column in self.columns.values()))

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def dp(self) -> np.ndarray:
        return np.asarray(self["dp_replicate"] * self["dp_shard"])

    def row(self, index: int) -> Strategy:
        """The strategy at a flat index of the broadcast table."""
        where = np.unravel_index(index, self.shape)
        values: dict[str, Any] = {}
        for name, column in self.columns.items():
            value = (column if not column.ndim else np.broadcast_to(column, self.shape)[where]).item()
            if name in CHOICES:
                value = CHOICES[name][value]
            elif name in TUPLES:
                value = self.vocabulary[name][value]
            values[name] = value
        defaults = {name: getattr(DEFAULT, name) for name in FIELDS if name not in values}
        return Strategy.model_construct(**defaults, **values)  # columns hold only what a strategy may

    def take(self, indices: np.ndarray) -> StrategyTable:
        """The rows at flat ``indices``, as columns of that length."""
        where = np.unravel_index(indices, self.shape)
        rows = {
            name: np.broadcast_to(column, self.shape)[where] if column.ndim else column
            for name, column in self.columns.items()
        }
        if len(indices) != self.size or not self.shape:  # a column that gives the table its length
            rows["tp"] = np.broadcast_to(self["tp"], self.shape)[where]
        return StrategyTable(rows, self.vocabulary)
