"""Which strategies are there? Every combination of knobs a backend and the user allow, in groups priced together.

Coarse knobs (degrees, micro-batch, schedule) are enumerated together because they must multiply to the cluster and
the batch; fine knobs are a product. Only canonical strategies are made: a knob without effect keeps its default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from trainplan.costmodel.backends import Backend
from trainplan.costmodel.backends.rules import divisors
from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.job import Job
from trainplan.costmodel.layout import balanced
from trainplan.costmodel.strategy import CHOICES, DEFAULT, FIELDS, TUPLES, Strategy, StrategyTable

MAX_MICRO_BATCH = 16
"""Larger micro-batches gain nothing that the kernels' rates would show, and cost memory."""
VIRTUAL = (1, 2, 3, 4, 6, 8)
LOSS_CHUNKS = (0, 2048)
SHAPE_FIELDS = (
    "schedule", "pp", "vpp", "stage_layers", "grad_accum", "sharding", "reshard_after_forward", "prefetch_units",
    "recompute", "recompute_layers",
)  # fmt: skip
"""What strategies share when they are priced together: it decides the shape of a step's graph."""
COARSE = ("tp", "cp", "dp_replicate", "dp_shard", "ep", "etp", "micro_batch_size")


class Pins(BaseModel):
    """What the user fixed: values per field, and how far numerics may go."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    values: dict[str, tuple[Any, ...]] = Field(default_factory=dict, description="Field -> the values to consider.")
    max_micro_batch: int | None = Field(None, ge=1)
    allow: frozenset[str] = Field(frozenset(), description="Numerics classes beyond same: rounding, lossy.")
    memory_limit_bytes: float | None = Field(None, gt=0, description="Per device; None = all of its memory.")
    no_recompute: bool = False

    def check(self) -> None:
        """UsageError for an unknown field, class or empty list of values."""
        for name, values in self.values.items():
            if name not in FIELDS:
                raise UsageError(f"unknown knob {name!r}. Knobs are {', '.join(FIELDS)}.")
            if not values:
                raise UsageError(f"{name}: no value to consider. Give at least one, or leave it out.")
            for value in values:
                if name in CHOICES and value not in CHOICES[name]:
                    raise UsageError(f"{name}={value!r} is not one of {', '.join(CHOICES[name])}.")
        for name in sorted(self.allow - {"rounding", "lossy"}):
            raise UsageError(f"unknown numerics class {name!r}. Use rounding, lossy or both.")
        if self.no_recompute and set(self.values.get("recompute", ("none",))) - {"none"}:
            raise UsageError("--no-recompute contradicts --recompute: leave one of them out.")


@dataclass(frozen=True)
class Group:
    """Strategies that share all `SHAPE_FIELDS`; ``table`` has those as single values and the rest as rows."""

    table: StrategyTable

    @property
    def size(self) -> int:
        return self.table.size


@dataclass(frozen=True)
class Space:
    """All strategies of a job on a backend within the user's pins."""

    job: Job
    backend: Backend
    pins: Pins

    def groups(self) -> Iterator[Group]:
        """Every group that has at least one strategy."""
        for pp, schedule, vpp in self._pipelines():
            coarse = self._meshes(pp)
            for grad_accum in np.unique(coarse["grad_accum"]):
                rows = {name: column[coarse["grad_accum"] == grad_accum] for name, column in coarse.items()}
                yield from self._shapes(pp, schedule, vpp, int(grad_accum), rows)

    def options(self, field: str, free: tuple[Any, ...]) -> tuple[Any, ...]:
        """Values to try for a field: what the user pinned, else what the backend takes of ``free``, or all it takes."""
        if field in self.pins.values:
            return self.pins.values[field]
        allowed = self.backend.values.get(field)
        if allowed is None:
            return free
        kept = tuple(value for value in free if value in allowed)
        return kept or tuple(sorted(allowed, key=repr))

    def _pipelines(self) -> Iterator[tuple[int, str, int]]:
        n, seen = self.job.cluster.num_gpus, set()
        for pp in self.options("pp", tuple(d for d in divisors(n) if d <= self.job.model.num_layers)):
            for schedule, vpp in product(self.options("schedule", CHOICES["schedule"]), self.options("vpp", VIRTUAL)):
                made = (pp, schedule, vpp)
                if pp == 1 and (schedule, vpp) != ("1f1b", 1) and not {"schedule", "vpp"} & set(self.pins.values):
                    continue
                if schedule in ("gpipe", "1f1b") and vpp > 1 and "vpp" not in self.pins.values:
                    continue
                if made not in seen:
                    seen.add(made)
                    yield made

    def _meshes(self, pp: int) -> dict[str, np.ndarray]:
        """Degrees that fill the cluster and micro-batches that fill the batch, as columns."""
        job, n, gbs = self.job, self.job.cluster.num_gpus, self.job.workload.global_batch_size
        experts = job.model.moe.num_experts if job.model.moe else 1
        rows: list[tuple[int, ...]] = []
        most = self.pins.max_micro_batch or MAX_MICRO_BATCH
        every = divisors(n)
        for tp, cp, rep, ep in product(
            self.options("tp", tuple(every)),
            self.options("cp", tuple(every)),
            self.options("dp_replicate", tuple(every)),
            self.options("ep", tuple(d for d in divisors(experts) if d <= n)),
        ):
            if n % (tp * cp * pp * rep):
                continue
            shard = n // (tp * cp * pp * rep)
            if shard not in self.options("dp_shard", (shard,)) or gbs % (rep * shard):
                continue
            per_rank = gbs // (rep * shard)
            for etp in self.options("etp", tuple(dict.fromkeys((1, tp))) if experts > 1 else (1,)):
                sizes = self.options("micro_batch_size", tuple(d for d in divisors(per_rank) if d <= most))
                splits = [(mbs, per_rank // mbs) for mbs in sizes if per_rank % mbs == 0]
                rows += [
                    (tp, cp, rep, shard, ep, etp, *s) for s in splits if s[1] in self.options("grad_accum", (s[1],))
                ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, len(COARSE) + 1)
        return {name: columns[:, i] for i, name in enumerate((*COARSE, "grad_accum"))}

    def _shapes(
        self, pp: int, schedule: str, vpp: int, grad_accum: int, coarse: dict[str, np.ndarray]
    ) -> Iterator[Group]:
        for stage_layers in self.options("stage_layers", (None,)):
            for sharding, reshard, prefetch in self._sharding():
                for recompute, layers in self._recompute(pp * vpp):
                    shape = dict(
                        zip(
                            SHAPE_FIELDS,
                            (
                                schedule,
                                pp,
                                vpp,
                                stage_layers,
                                grad_accum,
                                sharding,
                                reshard,
                                prefetch,
                                recompute,
                                layers,
                            ),
                            strict=True,
                        )
                    )
                    table = self._rows(shape, coarse)
                    if table.size:
                        yield Group(table)

    def _sharding(self) -> Iterator[tuple[str, bool, int]]:
        for sharding in self.options("sharding", CHOICES["sharding"]):
            whole = sharding == "parameters"
            for reshard in self.options("reshard_after_forward", (False, True) if whole else (False,)):
                for prefetch in self.options("prefetch_units", (1, 2) if whole else (1,)):
                    if (
                        whole
                        or (not reshard and prefetch == 1)
                        or {"reshard_after_forward", "prefetch_units"} & set(self.pins.values)
                    ):
                        yield sharding, reshard, prefetch

    def _recompute(self, stages: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Kinds, each on all layers or on a quarter, half or three quarters of every stage."""
        kinds = ("none",) if self.pins.no_recompute else self.options("recompute", CHOICES["recompute"])
        layers = balanced(self.job.model, stages)
        parts = [(), *dict.fromkeys(tuple(n * quarter // 4 for n in layers) for quarter in (1, 2, 3))]
        for kind in kinds:
            for counts in self.options("recompute_layers", tuple(parts) if kind != "none" else ((),)):
                if kind == "none" or counts == () or 0 < sum(counts) < sum(layers):
                    yield kind, counts

    def _rows(self, shape: dict[str, Any], coarse: dict[str, np.ndarray]) -> StrategyTable:
        """The coarse rows times every fine knob, canonical ones only."""
        fine = {name: self.options(name, free) for name, free in self._fine(shape).items()}
        vocabulary = {name: tuple(values) for name, values in fine.items() if name in TUPLES}
        vocabulary |= {name: (shape[name],) for name in SHAPE_FIELDS if name in TUPLES}
        axes = [np.arange(len(coarse["tp"]))]
        axes += [np.array([_code(name, value, vocabulary) for value in values]) for name, values in fine.items()]
        grid = np.meshgrid(*axes, indexing="ij")
        columns = {name: coarse[name][grid[0].ravel()] for name in COARSE}
        columns |= {name: axis.ravel() for name, axis in zip(fine, grid[1:], strict=True)}
        columns |= {name: np.asarray(_code(name, value, vocabulary)) for name, value in shape.items()}
        table = StrategyTable(columns, vocabulary)
        return table.take(np.flatnonzero(np.broadcast_to(canonical_mask(table), table.shape)))

    def _fine(self, shape: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
        precision = self.job.workload.precision
        rounding, lossy = "rounding" in self.pins.allow, "lossy" in self.pins.allow
        moved = shape["recompute"] == "selective"
        modules = tuple(m for m in self.backend.values.get("recompute_modules", ()) if m)
        several_nodes = self.job.cluster.num_gpus > self.job.cluster.scale_up_domain
        return {
            "sp": (False, True),
            "cp_method": CHOICES["cp_method"],
            "rank_order": CHOICES["rank_order"] if several_nodes else (DEFAULT.rank_order,),
            "collective_algo": (DEFAULT.collective_algo,),
            "token_budget": (0,),
            "recompute_modules": modules if moved and modules else ((),),
            "activation_offload": (False,),
            "optimizer_offload": (False, True),
            "loss_chunk": LOSS_CHUNKS,
            "reduce_dtype": ("fp32", *(("bf16",) if rounding else ()), *(("int8",) if lossy else ())),
            "precision": (precision, *(("fp8",) if lossy and precision != "fp8" else ())),
            "compile": (False, True),
            "attention": CHOICES["attention"],
            "fused_kernels": ((),),
            "overlap_grad_reduce": (True,),
            "overlap_param_gather": (True,),
            "overlap_tp": (False, True),
            "bucket_bytes": (0,),
            "packing": (True,),
            "loader_workers": (DEFAULT.loader_workers,),
            "checkpoint_mode": (DEFAULT.checkpoint_mode,),
        }


def _code(name: str, value: Any, vocabulary: dict[str, tuple[Any, ...]]) -> Any:
    if name in CHOICES:
        return CHOICES[name].index(value)
    return vocabulary[name].index(value) if name in TUPLES else value


def canonical_mask(t: StrategyTable) -> np.ndarray:
    """Rows that `trainplan.costmodel.strategy.canonical` leaves as they are."""
    alone = t["dp_replicate"] * t["dp_shard"] * t["cp"] == 1
    several_in_line = (t["pp"] > 1) & (t.dp > 1)
    return np.asarray(
        ((t["tp"] > 1) | ~(t["sp"] | t["overlap_tp"]))
        & ((t["cp"] > 1) | t.chosen("cp_method", DEFAULT.cp_method))
        & (several_in_line | t.chosen("rank_order", DEFAULT.rank_order))
        & (t.chosen("sharding", "none") == (t["dp_shard"] == 1))
        & (~alone | t.chosen("reduce_dtype", DEFAULT.reduce_dtype))
        & (t.chosen("schedule", "1f1b", "gpipe") | (t["vpp"] > 1) | t.chosen("schedule", "zero-bubble"))
    )


def complexity(strategy: Strategy) -> int:
    """How many knobs differ from their defaults: between equals the simplest plan wins."""
    return sum(getattr(strategy, name) != getattr(DEFAULT, name) for name in FIELDS)
