"""Will it fit? Bytes per pipeline rank at its peak: state, activations in flight, logits, buffers and slack.

Three numbers, never mixed: live tensors (allocated), what the allocator holds (reserved), and what the device shows
(reserved plus context and communication buffers).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainplan.costmodel.activations import edge_bytes, kept_bytes, loss_bytes, saved_bytes
from trainplan.costmodel.estimate import Interval, StageMemory
from trainplan.costmodel.job import Job
from trainplan.costmodel.layout import Layout
from trainplan.costmodel.orders import in_flight_peaks
from trainplan.costmodel.stacks import Stack
from trainplan.costmodel.strategy import Schedule, StrategyTable
from trainplan.costmodel.work import Column, Shapes

RESERVED_OVER_ALLOCATED = (1.0, 1.03, 1.10)
"""5, 50 and 95 % points of reserved over allocated: rounding to 2 MiB blocks and fragmentation of the caching
allocator. A prior, not a measurement; the CPU allocator keeps no such cache and is given the low value."""
FIXED_SPREAD = (0.7, 1.0, 1.4)
"""5, 50 and 95 % points of context and communication buffers over their stated values."""


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one pipeline rank, each a column; ``parts`` add up to the peak of live tensors."""

    rank: int
    parts: dict[str, Column]
    fixed: Column

    @property
    def allocated(self) -> Column:
        return np.asarray(sum(self.parts.values(), start=np.zeros(())))

    def reserved(self, point: int, gpu: bool) -> Column:
        """Reserved bytes at the 5 % (0), 50 % (1) or 95 % (2) point."""
        return self.allocated * RESERVED_OVER_ALLOCATED[point if gpu else 0]

    def device(self, point: int, gpu: bool) -> Column:
        """Device bytes at that point."""
        return self.reserved(point, gpu) + self.fixed * FIXED_SPREAD[point]


def rank_bytes(
    job: Job, stack: Stack, table: StrategyTable, place: Layout, num_micro_batches: int, schedule: Schedule
) -> list[RankBytes]:
    """Peak bytes of every pipeline rank.

    Args:
        job: Model, cluster and workload.
        stack: The software.
        table: Strategies that share the layout and schedule.
        place: Their stages.
        num_micro_batches: Micro-batches per step.
        schedule: Their pipeline schedule.
    """
    shapes = Shapes(job, table, stack)
    pp = max(place.ranks) + 1
    peaks = (
        in_flight_peaks(schedule, pp, place.num_stages // pp, num_micro_batches)
        if pp > 1
        else (np.ones((1, 1), dtype=np.int32),)
    )
    activations = [_stage_activations(shapes, place, stage) for stage in range(place.num_stages)]
    several = np.where(table["tp"] * table["pp"] * table["cp"] * table.dp > 1, stack.comm_buffer_bytes, 0.0)
    gpu = job.cluster.device.kind == "gpu"
    fixed = stack.context_bytes + several if gpu else np.asarray(CPU_PROCESS_BYTES)
    result = []
    for rank in range(pp):
        stages = place.rank_stages(rank)
        held = np.max(np.stack([_weighted(peak, [activations[s] for s in stages]) for peak in peaks[rank]]), axis=0)
        state = _state(shapes, stack, place, stages)
        transient = _transient(shapes, place, stages)
        if num_micro_batches == 1 and stack.fsdp2:
            # No gradient exists before the only backward; they grow as activations go, so the larger of both counts.
            state["gradients"] = np.maximum(state["gradients"] - held - transient, 0)
        parts = {**state, "activations": held, "logits_and_workspace": transient}
        result.append(RankBytes(rank, parts, np.asarray(fixed)))
    return result


CPU_PROCESS_BYTES = 0.6e9
"""Resident size of a Python process with torch and transformers imported, before it allocates a tensor."""


def _weighted(peak: np.ndarray, sizes: list[Column]) -> Column:
    return np.asarray(sum((int(count) * size for count, size in zip(peak, sizes, strict=True)), start=np.zeros(())))


def _stage_activations(s: Shapes, place: Layout, stage: int) -> Column:
    total = np.zeros(())
    for (kind, recomputed), count in place.counts(stage).items():
        total = total + count * (kept_bytes(s, kind) if recomputed else saved_bytes(s, kind))
    return total + edge_bytes(s) if stage == place.num_stages - 1 else total


def _transient(s: Shapes, place: Layout, stages: list[int]) -> Column:
    """The worst moment of a backward: the loss on the last stage, or one recomputed layer brought back to life."""
    worst = np.zeros(())
    for stage in stages:
        for kind, recomputed in place.counts(stage):
            if recomputed:
                worst = np.maximum(worst, saved_bytes(s, kind) - kept_bytes(s, kind))
    return np.maximum(worst, loss_bytes(s)) if place.num_stages - 1 in stages else worst


def stage_parameters(s: Shapes, place: Layout, stages: list[int]) -> tuple[Column, Column, Column, Column]:
    """(layers, embedding and head, largest layer, routed experts) parameters of a rank, split by tp, ep and etp."""
    model, t = s.job.model, s.table
    dense = routed = 0
    largest = 0
    for stage in stages:
        for (kind, _), count in place.counts(stage).items():
            experts = model.expert_parameters() * model.moe.num_experts if model.moe and kind[1] == "moe" else 0
            rest = model.layer_parameters(*kind) - experts
            dense, routed = dense + count * rest, routed + count * experts
            largest = max(largest, rest)
    edge, table_size = 0, model.vocab_size * model.hidden_size
    first, last = 0 in stages, place.num_stages - 1 in stages
    positions = model.embedding_parameters() - table_size * (1 if model.tie_word_embeddings else 2)
    if first:
        edge += table_size + positions
    if last:
        edge += model.final_norm_parameters() + (0 if model.tie_word_embeddings and first else table_size)
    return dense / t["tp"], edge / t["tp"], np.asarray(largest / t["tp"]), routed / (t["ep"] * t["etp"])


def own_parameters(s: Shapes, place: Layout, stages: list[int]) -> Column:
    """Parameters that a rank's optimizer updates: its share where the optimizer state is sharded."""
    t = s.table
    layers, edge, _, routed = stage_parameters(s, place, stages)
    dense_shard, expert_shard = _shards(t)
    return np.asarray((layers + edge) / dense_shard + routed / expert_shard)


def _shards(t: StrategyTable) -> tuple[Column, Column]:
    """Ranks that sharding splits dense and routed parameters over; 1 without sharding."""
    dense = t["dp_shard"] * t["cp"]
    alone = t.chosen("sharding", "none")
    return np.where(alone, 1, dense), np.where(alone, 1, np.maximum(dense * t["tp"] // (t["ep"] * t["etp"]), 1))


def _state(s: Shapes, stack: Stack, place: Layout, stages: list[int]) -> dict[str, Column]:
    """Parameters, gradients, optimizer state and gathered copies of a rank, each by its own sharding."""
    t = s.table
    layers, edge, largest, routed = stage_parameters(s, place, stages)
    shard, expert_shard = _shards(t)

    def split(level: str) -> Column:
        """Parameters a rank keeps of what sharding splits from ``level`` on."""
        at = t.at_least("sharding", level)
        return np.asarray((layers + edge) / np.where(at, shard, 1) + routed / np.where(at, expert_shard, 1))

    every = layers + edge + routed
    on_host = t["optimizer_offload"]
    if not stack.fsdp2:
        zero = np.zeros(())
        moved = np.where(t.at_least("sharding", "parameters"), 2 * 2 * (largest + edge), zero)
        return {
            "parameters": 2 * split("parameters") + zero,
            "gradients": 4 * split("gradients") + zero,
            "optimizer": np.where(on_host, 0, 12 * split("optimizer")),
            "gathered": moved,
        }
    return _fsdp2_state(s, every, split("optimizer"), edge, largest)


def _fsdp2_state(s: Shapes, every: Column, own: Column, edge: Column, largest: Column) -> dict[str, Column]:
    """FSDP2 keeps its own fp32 shard of parameters, gradients and two moments at every level, and gathers beside it.

    Levels below ``parameters`` keep all gathered during the step; ``none`` and ``optimizer`` accumulate unsharded
    gradients in the reduction's type while there are several micro-batches. Alone and in fp32 nothing is gathered.
    """
    t, e = s.table, s.element_bytes
    alone = (t["dp_shard"] * t["dp_replicate"] * t["cp"] == 1) & t.chosen("precision", "fp32")
    width = np.where(t.chosen("reduce_dtype", "fp32"), 4, 2)
    # FSDP2 starts a unit's gather n + 1 units ahead of it: one in use, n + 1 coming, and the root's unit.
    flowing = e * ((2 + t["prefetch_units"]) * largest + edge)
    kept = np.where(t.chosen("sharding", "parameters") & t["reshard_after_forward"], flowing, e * every)
    unreduced = (
        e + width
    ) * largest + e * edge  # a unit's gradients before and in its reduction; the root's wait for the end
    accumulates = ~t.at_least("sharding", "gradients") & (t["grad_accum"] > 1)
    unsharded = np.where(accumulates, width * every, unreduced)
    return {
        "parameters": np.asarray(4 * own),
        "gradients": np.asarray(4 * own),
        "optimizer": np.asarray(8 * own),
        "gathered": np.where(alone, 0, kept + unsharded),
    }


def stage_memory(of: RankBytes, gpu: bool) -> StageMemory:
    """The memory of one strategy's rank as a record; its columns must hold one value."""
    values = {name: float(np.squeeze(column)) for name, column in of.parts.items()}
    reserved, device = ([float(np.squeeze(f(point, gpu))) for point in range(3)] for f in (of.reserved, of.device))
    return StageMemory(
        stage=of.rank,
        breakdown_bytes=values,
        allocated_bytes=sum(values.values()),
        reserved_bytes=Interval(low=reserved[0], mid=reserved[1], high=reserved[2]),
        device_bytes=Interval(low=device[0], mid=device[1], high=device[2]),
    )
