"""Which layers sit where: the stages of a pipeline, the rank of each, and what every stage holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from trainplan.costmodel.job import Job
from trainplan.costmodel.model import AttentionKind, MlpKind, ModelSpec
from trainplan.costmodel.orders import stage_ranks
from trainplan.costmodel.strategy import Schedule, Strategy

LayerKind = tuple[AttentionKind, MlpKind]


@dataclass(frozen=True)
class Layout:
    """The stages of one pipeline shape.

    Attributes:
        kinds: Per stage, its layers in order.
        recomputed: Per stage, how many of its first layers are computed twice.
        ranks: Per stage, its pipeline rank.
    """

    kinds: tuple[tuple[LayerKind, ...], ...]
    recomputed: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.kinds)

    def rank_stages(self, rank: int) -> list[int]:
        """The stages of a pipeline rank, ascending."""
        return [stage for stage, of in enumerate(self.ranks) if of == rank]

    def counts(self, stage: int) -> Counter[tuple[LayerKind, bool]]:
        """How many layers of each kind a stage has, recomputed ones apart."""
        n = self.recomputed[stage]
        return Counter((kind, i < n) for i, kind in enumerate(self.kinds[stage]))


def computed_twice(place: Layout, stage: int, kind: LayerKind) -> Callable[[tuple[int, ...]], int]:
    """From a choice of `recompute_layers` (empty = all) to how many layers of a kind a stage computes twice."""
    kinds = place.kinds[stage]
    return lambda layers: kinds[: layers[stage]].count(kind) if layers else kinds.count(kind)


def layout(job: Job, strategy: Strategy) -> Layout:
    """The stages of ``strategy``, which must be legal for ``job``."""
    return make_layout(
        job.model, strategy.schedule, strategy.pp, strategy.vpp, strategy.stage_layers, recompute_counts(job, strategy)
    )


def recompute_counts(job: Job, strategy: Strategy) -> tuple[int, ...]:
    """Layers that each of the pp * vpp stages computes twice."""
    layers = balanced(job.model, strategy.pp * strategy.vpp) if strategy.stage_layers is None else strategy.stage_layers
    if strategy.recompute == "none":
        return (0,) * len(layers)
    return strategy.recompute_layers or layers


def balanced(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """The default split: as equal as it goes, longer stages first."""
    whole, rest = divmod(model.num_layers, stages)
    return tuple(whole + (stage < rest) for stage in range(stages))


def make_layout(
    model: ModelSpec,
    schedule: Schedule,
    pp: int,
    vpp: int,
    stage_layers: tuple[int, ...] | None,
    recomputed: tuple[int, ...],
) -> Layout:
    """Cut the model's layers into pp * vpp stages."""
    sizes = stage_layers or balanced(model, pp * vpp)
    kinds, start, all_kinds = [], 0, model.layer_kinds()
    for size in sizes:
        kinds.append(all_kinds[start : start + size])
        start += size
    return Layout(tuple(kinds), recomputed, tuple(int(rank) for rank in stage_ranks(schedule, pp, vpp)))
