"""Which strategies are there? Every combination of knobs a backend and the user allow, as grids that are priced whole.

A *family* is what multiplies to the cluster and the batch: a pipeline with a number of micro-batches, and the meshes
that go with it. A *group* is a family with the knobs that decide its step's graph; all others are axes of its grid.
Only canonical strategies count: a knob without effect keeps its default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
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
    "precision",
)  # fmt: skip
"""What the strategies of a group share: it decides the shape of a step's graph, but for `recompute_layers`, and which
factors slow their products."""
COARSE = ("tp", "cp", "dp_replicate", "dp_shard", "ep", "etp", "micro_batch_size")
RECOMPUTE = ("recompute", "recompute_modules")
"""Fields of one axis: a kind, and what it names."""


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
class Family:
    """The meshes that fill the cluster under one pipeline and number of micro-batches.

    Attributes:
        pp: Pipeline degree.
        schedule: Pipeline schedule.
        vpp: Stages of a rank.
        grad_accum: Micro-batches.
        coarse: `COARSE` field -> values, one per mesh.
        place: Where each mesh is among all of this pipeline degree and number of micro-batches.
    """

    pp: int
    schedule: str
    vpp: int
    grad_accum: int
    coarse: dict[str, np.ndarray]
    place: np.ndarray

    def __len__(self) -> int:
        return len(self.coarse["tp"])

    def take(self, rows: np.ndarray) -> Family:
        """Some of its meshes."""
        coarse = {name: of[rows] for name, of in self.coarse.items()}
        return Family(self.pp, self.schedule, self.vpp, self.grad_accum, coarse, self.place[rows])


@dataclass(frozen=True)
class Group:
    """A grid of strategies that share all `SHAPE_FIELDS`: axis 0 are the family's meshes, then one axis per knob."""

    family: Family
    table: StrategyTable

    @cached_property
    def canonical(self) -> np.ndarray:
        """Which places of the grid hold a strategy; broadcasts against the table."""
        return canonical_mask(self.table)

    def take(self, meshes: np.ndarray) -> Group:
        """Some of its meshes."""
        columns = {name: of[meshes] if name in COARSE else of for name, of in self.table.columns.items()}
        return Group(self.family.take(meshes), StrategyTable(columns, self.table.vocabulary))

    @property
    def size(self) -> int:
        """Strategies."""
        return count_true(self.canonical, self.table.shape)

    def strategies(self) -> Iterator[Strategy]:
        """All of them, one by one."""
        for flat in np.flatnonzero(np.broadcast_to(self.canonical, self.table.shape)):
            yield self.table.row(int(flat))


@dataclass(frozen=True)
class Space:
    """All strategies of a job on a backend within the user's pins."""

    job: Job
    backend: Backend
    pins: Pins

    def families(self) -> Iterator[Family]:
        """Every family that has at least one mesh."""
        for pp, schedule, vpp in self._pipelines():
            for grad_accum in np.unique(self._meshes[pp]["grad_accum"]).tolist():
                coarse = self.meshes(pp, grad_accum)
                yield Family(pp, schedule, vpp, grad_accum, coarse, np.arange(len(coarse["tp"])))

    def meshes(self, pp: int, grad_accum: int) -> dict[str, np.ndarray]:
        """`COARSE` field -> values of all meshes of a pipeline degree with so many micro-batches."""
        every = self._meshes[pp]
        rows = every["grad_accum"] == grad_accum
        return {name: every[name][rows] for name in COARSE}

    def groups(self, family: Family | None = None) -> Iterator[Group]:
        """The groups of a family, or of all."""
        if family is None:
            for every in self.families():
                yield from self.groups(every)
            return
        alone = family.coarse["dp_shard"] == 1
        shared = product(self._sharding(), self._stage_layers(family), self.precisions())
        for (sharding, reshard, prefetch), layers, precision in shared:
            rows = np.flatnonzero(alone == (sharding == "none"))
            if not len(rows):
                continue
            values = (
                family.schedule, family.pp, family.vpp, layers, family.grad_accum, sharding, reshard, prefetch,
                precision,
            )  # fmt: skip
            meshes = family.take(rows)
            yield Group(meshes, self._grid(dict(zip(SHAPE_FIELDS, values, strict=True)), meshes))

    def count(self, family: Family) -> int:
        """Strategies of a family, without making them."""
        combinations = self._canonical_counts(family)
        alone = family.coarse["dp_shard"] == 1
        kinds = [sharding for sharding, _, _ in self._sharding()]
        unsharded = kinds.count("none")
        per_mesh = np.where(alone, unsharded, len(kinds) - unsharded)
        shared = len(self._stage_layers(family)) * len(self.precisions())
        return int(np.sum(per_mesh * combinations)) * shared

    def _canonical_counts(self, family: Family) -> np.ndarray:
        """Canonical combinations of the knobs of each mesh's grid."""
        c, fine = family.coarse, self.fine
        dp = c["dp_replicate"] * c["dp_shard"]

        def where(matters: np.ndarray | bool, *names: str) -> np.ndarray:
            every = int(np.prod([len(fine[name]) for name in names]))
            default = int(np.prod([fine[name].count(getattr(DEFAULT, name)) for name in names]))
            return np.where(matters, every, default)

        split = (
            where(c["tp"] > 1, "sp", "overlap_tp")
            * where(c["cp"] > 1, "cp_method")
            * where((family.pp > 1) & (dp > 1), "rank_order")
            * where(dp * c["cp"] > 1, "reduce_dtype")
        )
        others = set(fine) - {"sp", "overlap_tp", "cp_method", "rank_order", "reduce_dtype"}
        layers = self._recompute_layers(family)
        recomputes = sum(1 if kind == "none" else len(layers) for kind, _ in self.recomputations())
        return np.asarray(split * int(np.prod([len(fine[name]) for name in others])) * recomputes)

    def options(self, field: str, free: tuple[Any, ...]) -> tuple[Any, ...]:
        """Values to try for a field: what the user pinned, else what the backend takes of ``free``, or all it takes."""
        if field in self.pins.values:
            return tuple(dict.fromkeys(self.pins.values[field]))
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
                if pp == 1 and (schedule, vpp) != ("1f1b", 1):
                    continue  # one stage has one order
                if schedule in ("gpipe", "1f1b") and vpp > 1 and "vpp" not in self.pins.values:
                    continue
                if schedule not in ("gpipe", "1f1b", "zero-bubble") and vpp == 1:
                    continue  # that is another schedule
                if made not in seen:
                    seen.add(made)
                    yield made

    @cached_property
    def _meshes(self) -> _Meshes:
        return _Meshes(self)

    def _sharding(self) -> list[tuple[str, bool, int]]:
        pinned = {"reshard_after_forward", "prefetch_units"} & set(self.pins.values)
        return [
            (sharding, reshard, prefetch)
            for sharding in self.options("sharding", CHOICES["sharding"])
            for whole in (sharding == "parameters",)
            for reshard in self.options("reshard_after_forward", (False, True) if whole else (False,))
            for prefetch in self.options("prefetch_units", (1, 2) if whole else (1,))
            if whole or (not reshard and prefetch == 1) or pinned
        ]

    def _stage_layers(self, family: Family) -> tuple[Any, ...]:
        return self.options("stage_layers", splits(self.job, family.pp * family.vpp))

    def stage_sizes(self, family: Family) -> list[tuple[int, ...]]:
        """Layers per stage under each split of a family."""
        even = balanced(self.job.model, family.pp * family.vpp)
        return [even if sizes is None else sizes for sizes in self._stage_layers(family)]

    def precisions(self) -> tuple[str, ...]:
        """Arithmetic to try: the job's, and fp8 where lossy numerics are allowed."""
        precision, lossy = self.job.workload.precision, "lossy" in self.pins.allow
        return self.options("precision", (precision, *(("fp8",) if lossy and precision != "fp8" else ())))

    def recomputations(self) -> list[tuple[str, tuple[str, ...]]]:
        """Kinds of recomputation, each with the modules it names."""
        named = self.pins.values.get("recompute_modules")
        free = CHOICES["recompute"] if named is None else ("selective",) if all(named) else CHOICES["recompute"]
        kinds = ("none",) if self.pins.no_recompute else self.options("recompute", free)
        modules = named or tuple(m for m in self.backend.values.get("recompute_modules", ()) if m) or ((),)
        return [(kind, names) for kind in kinds for names in (modules if kind == "selective" else ((),))]

    def _recompute_layers(self, family: Family) -> tuple[tuple[int, ...], ...]:
        """All layers of every stage, or a quarter, half or three quarters of the shortest one's in each."""
        layers = balanced(self.job.model, family.pp * family.vpp)
        parts = dict.fromkeys((min(layers) * quarter // 4,) * len(layers) for quarter in (1, 2, 3))
        return self.options("recompute_layers", ((), *(p for p in parts if 0 < sum(p) < sum(layers))))

    @cached_property
    def fine(self) -> dict[str, tuple[Any, ...]]:
        """Knobs with an axis of their own, and their values."""
        rounding, lossy = "rounding" in self.pins.allow, "lossy" in self.pins.allow
        several_nodes = self.job.cluster.num_gpus > self.job.cluster.scale_up_domain
        free: dict[str, tuple[Any, ...]] = {
            "sp": (False, True),
            "cp_method": CHOICES["cp_method"],
            "rank_order": CHOICES["rank_order"] if several_nodes else (DEFAULT.rank_order,),
            "collective_algo": (DEFAULT.collective_algo,),
            "token_budget": (0,),
            "activation_offload": (False,),
            "optimizer_offload": (False, True),
            "loss_chunk": LOSS_CHUNKS,
            "reduce_dtype": ("fp32", *(("bf16",) if rounding else ()), *(("int8",) if lossy else ())),
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
        return {name: self.options(name, values) for name, values in free.items()}

    def _grid(self, shape: dict[str, Any], family: Family) -> StrategyTable:
        """All knobs as axes: meshes, the kinds of recomputation, how many layers, and `fine`."""
        recompute, layers = self.recomputations(), self._recompute_layers(family)
        vocabulary: dict[str, tuple[Any, ...]] = {
            "recompute_modules": tuple(dict.fromkeys(names for _, names in recompute)),
            "recompute_layers": layers,
            "stage_layers": (shape["stage_layers"],),
            "fused_kernels": self.fine["fused_kernels"],
        }
        several = [name for name, values in self.fine.items() if len(values) > 1]
        axes = 3 + len(several)

        def along(axis: int, values: Any) -> np.ndarray:
            column = np.asarray(values)
            return column.reshape((1,) * axis + (-1,) + (1,) * (axes - axis - 1))

        def code(name: str, value: Any) -> Any:
            if name in CHOICES:
                return CHOICES[name].index(value)
            return vocabulary[name].index(value) if name in TUPLES else value

        columns = {name: along(0, column) for name, column in family.coarse.items()}
        columns |= {name: along(1, [code(name, choice[i]) for choice in recompute]) for i, name in enumerate(RECOMPUTE)}
        columns["recompute_layers"] = along(2, np.arange(len(layers)))
        columns |= {name: along(3 + i, [code(name, v) for v in self.fine[name]]) for i, name in enumerate(several)}
        columns |= {
            name: np.asarray(code(name, values[0])) for name, values in self.fine.items() if name not in several
        }
        columns |= {name: np.asarray(code(name, value)) for name, value in shape.items()}
        return StrategyTable(columns, vocabulary)


class _Meshes(dict[int, dict[str, np.ndarray]]):
    """Pipeline degree -> degrees that fill the cluster and micro-batches that fill the batch, as columns."""

    def __init__(self, space: Space) -> None:
        self.space = space

    def __missing__(self, pp: int) -> dict[str, np.ndarray]:
        space = self.space
        job, n, gbs = space.job, space.job.cluster.num_gpus, space.job.workload.global_batch_size
        experts = job.model.moe.num_experts if job.model.moe else 1
        rows: list[tuple[int, ...]] = []
        most = space.pins.max_micro_batch or MAX_MICRO_BATCH
        every = tuple(divisors(n))
        splits_of: dict[int, list[tuple[int, int]]] = {}

        def batches(per_rank: int) -> list[tuple[int, int]]:
            """(micro-batch, number of them) that make a rank's sequences."""
            if per_rank not in splits_of:
                sizes = space.options("micro_batch_size", tuple(d for d in divisors(per_rank) if d <= most))
                made = [(mbs, per_rank // mbs) for mbs in sizes if per_rank % mbs == 0]
                splits_of[per_rank] = [s for s in made if s[1] in space.options("grad_accum", (s[1],))]
            return splits_of[per_rank]

        for tp, cp, rep in product(
            space.options("tp", every), space.options("cp", every), space.options("dp_replicate", every)
        ):
            if n % (tp * cp * pp * rep):
                continue
            shard = n // (tp * cp * pp * rep)
            if shard not in space.options("dp_shard", (shard,)) or gbs % (rep * shard):
                continue
            for ep in space.options("ep", tuple(d for d in divisors(experts) if d <= n)):
                for etp in space.options("etp", tuple(dict.fromkeys((1, tp))) if experts > 1 else (1,)):
                    rows += [(tp, cp, rep, shard, ep, etp, *s) for s in batches(gbs // (rep * shard))]
        columns = np.array(rows, dtype=np.int64).reshape(-1, len(COARSE) + 1)
        self[pp] = {name: columns[:, i] for i, name in enumerate((*COARSE, "grad_accum"))}
        return self[pp]


def splits(job: Job, stages: int) -> tuple[tuple[int, ...] | None, ...]:
    """Layers per stage to try: even ones, and ones whose last or both ends are a layer shorter, for what they hold.

    Where nothing of that adds up, as even as it goes with the longer stages in the middle.
    """
    n = job.model.num_layers
    if stages == 1:
        return (None,)
    found: list[tuple[int, ...] | None] = [None] if n % stages == 0 else []
    if n >= stages and (n + 1) % stages == 0:
        whole = (n + 1) // stages
        found.append((*(whole,) * (stages - 1), whole - 1))
    if n >= stages > 2 and (n + 2) % stages == 0:
        whole = (n + 2) // stages
        found.append((whole - 1, *(whole,) * (stages - 2), whole - 1))
    found = [of for of in found if of is None or min(of) > 0]
    if found or n < stages:
        return tuple(found) or (None,)
    whole, longer = divmod(n, stages)
    first = (stages - longer + 1) // 2
    return (tuple(whole + (first <= stage < first + longer) for stage in range(stages)),)


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
        & (~t.chosen("recompute", "none") | (t.mapped("recompute_layers", len) == 0))
    )


def count_true(mask: np.ndarray, shape: tuple[int, ...]) -> int:
    """How many places of ``shape`` a mask that broadcasts against it holds."""
    return int(np.count_nonzero(mask)) * (int(np.prod(shape)) // max(mask.size, 1))


def complexity(strategy: Strategy) -> int:
    """How many knobs differ from their defaults: between equals the simplest plan wins."""
    return sum(getattr(strategy, name) != getattr(DEFAULT, name) for name in FIELDS)
