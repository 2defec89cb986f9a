"""Will it fit? Bytes per pipeline rank at its peak: state, activations in flight, logits, buffers and slack.

Three numbers, never mixed: live tensors (allocated), what the allocator holds (reserved), and what the device shows
(reserved plus context and communication buffers).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from trainplan.costmodel.activations import edge_bytes, kept_bytes, saved_bytes
from trainplan.costmodel.estimate import Interval, StageMemory
from trainplan.costmodel.job import Job
from trainplan.costmodel.layout import Layout, computed_twice
from trainplan.costmodel.lora import adapter_parameters
from trainplan.costmodel.moments import Held, Moment, fsdp2_moments, fullest, whole_moments
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
    """Bytes of one pipeline rank, each a column.

    Attributes:
        rank: Of the pipeline.
        parameters: Weights that it keeps.
        optimizer: Optimizer state that it keeps on the device.
        moments: What else is alive when it may be fullest.
        fixed: Device context and communication buffers.
    """

    rank: int
    parameters: Column
    optimizer: Column
    moments: tuple[Moment, ...]
    fixed: Column

    @property
    def parts(self) -> dict[str, Column]:
        """Bytes at its fullest moment, by what they are for."""
        peak = fullest(self.moments)
        return {
            "parameters": self.parameters,
            "gradients": peak.gradients,
            "optimizer": self.optimizer,
            "gathered": peak.gathered,
            "activations": peak.activations,
            "logits_and_workspace": peak.workspace,
        }

    @cached_property
    def allocated(self) -> Column:
        """Bytes of live tensors at their peak."""
        return np.asarray(self.parameters + self.optimizer + reduce(np.maximum, (m.total for m in self.moments)))

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
    peaks = _in_flight(place, num_micro_batches, schedule)
    return _rank_bytes(job, stack, table, place, num_micro_batches, peaks, range(len(peaks)))


def peak_device_bytes(
    job: Job, stack: Stack, table: StrategyTable, place: Layout, num_micro_batches: int, schedule: Schedule
) -> Column:
    """95 % point of device memory of the fullest rank, as `rank_bytes` has it.

    A rank whose stages hold the same as another's, and of which fewer micro-batches are in flight, is left out.
    """
    peaks = _in_flight(place, num_micro_batches, schedule)
    ranks = _fullest_ranks(
        place,
        peaks,
        [
            (place.kinds[stage], place.recomputed[stage], stage == 0, stage == place.num_stages - 1)
            for stage in range(place.num_stages)
        ],
    )
    gpu = job.cluster.device.kind == "gpu"
    found = _rank_bytes(job, stack, table, place, num_micro_batches, peaks, ranks)
    return np.asarray(reduce(np.maximum, (rank.device(2, gpu) for rank in found)))


def least_device_bytes(
    job: Job, stack: Stack, table: StrategyTable, place: Layout, num_micro_batches: int, schedule: Schedule
) -> Column:
    """95 % point of what the fullest rank needs beside workspace; never above `peak_device_bytes`.

    How many layers are computed twice follows each row's `recompute_layers`, not ``place``.
    """
    shapes, gpu = Shapes(job, table, stack), job.cluster.device.kind == "gpu"
    peaks = _in_flight(place, num_micro_batches, schedule)
    same: dict[int, tuple[object, ...]] = {
        stage: (place.kinds[stage], _split(table, stage), stage == 0, stage == place.num_stages - 1)
        for stage in range(place.num_stages)
    }
    activations: dict[tuple[object, ...], Column] = {}
    for stage, what in same.items():
        if what not in activations:
            activations[what] = _any_stage_activations(shapes, place, stage)
    found = []
    for rank in _fullest_ranks(place, peaks, [same[stage] for stage in range(place.num_stages)]):
        stages = place.rank_stages(rank)
        own = [activations[same[stage]] for stage in stages]
        in_flight = reduce(np.maximum, (_weighted(peak, own) for peak in peaks[rank]))
        found.append(sum(_state(shapes, stack, place, stages), start=in_flight))
    reserved = reduce(np.maximum, found) * RESERVED_OVER_ALLOCATED[2 if gpu else 0]
    return np.asarray(reserved + _fixed_bytes(shapes, stack) * FIXED_SPREAD[2])


def _split(table: StrategyTable, stage: int) -> tuple[int, ...]:
    """Layers of a stage that each choice of `recompute_layers` computes twice; -1 = all."""
    return tuple(layers[stage] if layers else -1 for layers in table.vocabulary.get("recompute_layers", ((),)))


def _any_stage_activations(s: Shapes, place: Layout, stage: int) -> Column:
    """Bytes that one micro-batch keeps of a stage under each row's recomputation."""
    kinds, total = place.kinds[stage], np.zeros(())
    some = ~s.table.chosen("recompute", "none")
    for kind in dict.fromkeys(kinds):
        again = s.table.mapped("recompute_layers", computed_twice(place, stage, kind)) * some
        total = total + (kinds.count(kind) - again) * saved_bytes(s, kind) + again * kept_bytes(s, kind)
    return total + edge_bytes(s) if stage == place.num_stages - 1 else total


def _fullest_ranks(place: Layout, peaks: Sequence[np.ndarray], stages: Sequence[object]) -> list[int]:
    """Ranks without those whose stages hold the same as another's, of which more micro-batches are in flight."""
    ranks: dict[tuple[object, ...], list[int]] = {}
    for rank in range(len(peaks)):
        same = ranks.setdefault(tuple(stages[stage] for stage in place.rank_stages(rank)), [])
        if not any(_covers(peaks[other], peaks[rank]) for other in same):
            same[:] = [*(other for other in same if not _covers(peaks[rank], peaks[other])), rank]
    return sorted(rank for same in ranks.values() for rank in same)


def _fixed_bytes(s: Shapes, stack: Stack) -> Column:
    """Bytes of a process beside tensors: context and communication buffers."""
    if s.job.cluster.device.kind != "gpu":
        return np.asarray(CPU_PROCESS_BYTES)
    t = s.table
    return stack.context_bytes + np.where(t["tp"] * t["pp"] * t["cp"] * t.dp > 1, stack.comm_buffer_bytes, 0.0)


def _covers(more: np.ndarray, less: np.ndarray) -> bool:
    """Whether some peak of one rank [peaks, stages] is at least each peak of another."""
    return all(bool((more >= peak).all(axis=1).any()) for peak in less)


def _in_flight(place: Layout, num_micro_batches: int, schedule: Schedule) -> Sequence[np.ndarray]:
    """Peaks of micro-batches in flight of every rank, each [peaks, stages of the rank]."""
    pp = max(place.ranks) + 1
    if pp == 1:
        return (np.ones((1, 1), dtype=np.int32),)
    return in_flight_peaks(schedule, pp, place.num_stages // pp, num_micro_batches)


def _rank_bytes(
    job: Job, stack: Stack, table: StrategyTable, place: Layout, num_micro_batches: int, peaks: Sequence[np.ndarray],
    ranks: Iterable[int],
) -> list[RankBytes]:  # fmt: skip
    shapes = Shapes(job, table, stack)
    activations = [_stage_activations(shapes, place, stage) for stage in range(place.num_stages)]
    fixed = _fixed_bytes(shapes, stack)
    result = []
    for rank in ranks:
        stages = place.rank_stages(rank)
        own = [activations[stage] for stage in stages]
        in_flight = np.max(np.stack([_weighted(peak, own) for peak in peaks[rank]]), axis=0)
        held = _held(shapes, place, stages, in_flight, num_micro_batches)
        result.append(_rank(rank, shapes, stack, place, held, fixed))
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


def adapters(s: Shapes, place: Layout, stages: list[int]) -> Column:
    """Parameters of the adapters of a rank's stages, split by tp; 0 where all weights learn."""
    lora, total = s.job.workload.lora, 0
    if lora is None:
        return np.zeros(())
    for stage in stages:
        for (kind, _), count in place.counts(stage).items():
            total += count * adapter_parameters(s.job.model, lora, *kind)
    return np.asarray(total / s.table["tp"])


def own_parameters(s: Shapes, place: Layout, stages: list[int]) -> Column:
    """Parameters that a rank's optimizer updates: its share where the optimizer state is sharded."""
    t = s.table
    if s.job.workload.lora is not None:
        return np.asarray(adapters(s, place, stages) / _shards(t)[0])
    layers, edge, _, routed = stage_parameters(s, place, stages)
    dense_shard, expert_shard = _shards(t)
    return np.asarray((layers + edge) / dense_shard + routed / expert_shard)


def _shards(t: StrategyTable) -> tuple[Column, Column]:
    """Ranks that sharding splits dense and routed parameters over; 1 without sharding."""
    dense = t["dp_shard"] * t["cp"]
    alone = t.chosen("sharding", "none")
    return np.where(alone, 1, dense), np.where(alone, 1, np.maximum(dense * t["tp"] // (t["ep"] * t["etp"]), 1))


def _held(s: Shapes, place: Layout, stages: list[int], in_flight: Column, num_micro_batches: int) -> Held:
    layers, edge, _, routed = stage_parameters(s, place, stages)
    model, t = s.job.model, s.table
    shard, expert_shard = _shards(t)
    kinds = dict.fromkeys(kind for stage in stages for kind in place.kinds[stage])
    experts = model.expert_parameters() * model.moe.num_experts if model.moe else 0
    sizes = {
        kind: np.asarray(
            (model.layer_parameters(*kind) - (experts if kind[1] == "moe" else 0)) / t["tp"]
            + (experts / (t["ep"] * t["etp"]) if kind[1] == "moe" else 0)
        )
        for kind in kinds
    }
    head = model.vocab_size * model.hidden_size if place.num_stages - 1 in stages else 0
    return Held(
        stages=stages,
        activations=np.asarray(in_flight),
        m=num_micro_batches,
        layer=sizes,
        head=np.asarray(head / t["tp"]),
        table=np.asarray((model.vocab_size * model.hidden_size if 0 in stages else 0) / t["tp"]),
        own=np.asarray((layers + edge) / shard + routed / expert_shard),
        every=np.asarray(layers + edge + routed),
        edge=np.asarray(edge),
        shard=np.asarray(shard),
    )


def _state(s: Shapes, stack: Stack, place: Layout, stages: list[int]) -> tuple[Column, Column, Column]:
    """Bytes of a rank's weights, optimizer state, and gradients that stay for the whole step.

    FSDP2 keeps fp32 weights and moments of its own shard at every level; others shard each kind of state apart.
    """
    t = s.table
    if s.job.workload.lora is not None:
        return _frozen_state(s, stack, place, stages)
    if stack.fsdp2:
        own = own_parameters(s, place, stages)
        return 4 * own, 8 * own, np.zeros(())
    layers, edge, _, routed = stage_parameters(s, place, stages)
    shard, expert_shard = _shards(t)

    def split(level: str) -> Column:
        """Parameters a rank keeps of what sharding splits from ``level`` on."""
        at = t.at_least("sharding", level)
        return np.asarray((layers + edge) / np.where(at, shard, 1) + routed / np.where(at, expert_shard, 1))

    optimizer = np.where(t["optimizer_offload"], 0, stack.optimizer_state_bytes * split("optimizer"))
    gradients = 4 * split("gradients") + stack.gradient_copy_bytes * (layers + edge + routed)
    return 2 * split("parameters"), optimizer, gradients


BASE_BYTES = {"bf16": 2.0, "int4": 0.5 + (2 + 0.5) / 128}
"""Per frozen weight of a layer; int4 has an fp16 scale and a 4-bit zero point for 128 weights, as GPTQ stores them."""


def _frozen_state(s: Shapes, stack: Stack, place: Layout, stages: list[int]) -> tuple[Column, Column, Column]:
    """`_state` of adapters on a frozen base: fp32 adapters, their gradients and moments, and the base as it is stored.

    Embedding and head stay in bf16. FSDP2 shards the base at every level, others where parameters are sharded.
    """
    lora, t = s.job.workload.lora, s.table
    assert lora is not None  # the caller has looked
    layers, edge, _, routed = stage_parameters(s, place, stages)
    shard, expert_shard = _shards(t)
    trained, base = adapters(s, place, stages), BASE_BYTES[lora.base_dtype]

    def at(level: str, ranks: Column) -> Column:
        """Ranks that share what sharding splits from ``level`` on."""
        return np.where(t.at_least("sharding", "optimizer" if stack.fsdp2 else level), ranks, 1)

    frozen = (base * layers + 2 * edge) / at("parameters", shard) + base * routed / at("parameters", expert_shard)
    parameters = frozen + 4 * trained / at("parameters", shard)
    return (
        np.asarray(parameters),
        np.asarray(8 * trained / at("optimizer", shard)),
        np.asarray(4 * trained / at("gradients", shard)),
    )


def _gathered_base(s: Shapes, stack: Stack, place: Layout, stages: list[int]) -> Column:
    """Bytes of gathered frozen weights: all of them, or two layers and what lies outside layers."""
    t, base = s.table, s.job.workload.lora
    assert base is not None  # the caller has looked
    layers, edge, largest, routed = stage_parameters(s, place, stages)
    whole = t.chosen("sharding", "parameters")
    frees = whole & t["reshard_after_forward"] if stack.fsdp2 else whole
    kept = layers + routed if stack.fsdp2 else np.zeros(())  # others keep their copy, which is counted already
    width = BASE_BYTES[base.base_dtype]
    alone = t.chosen("sharding", "none")
    return np.asarray(
        np.where(alone, 0, np.where(frees, 2 * width * largest + 2 * edge, width * kept + 2 * edge * whole))
    )


def _rank(rank: int, s: Shapes, stack: Stack, place: Layout, held: Held, fixed: Column) -> RankBytes:
    parameters, optimizer, gradients = _state(s, stack, place, held.stages)
    moments: list[Moment]
    if s.job.workload.lora is not None:
        moments = [*whole_moments(s, place, held, gradients, _gathered_base(s, stack, place, held.stages))]
    elif stack.fsdp2:
        moments = [*fsdp2_moments(s, place, held)]
        if s.job.cluster.device.kind == "cpu":  # AdamW over lists of tensors: the roots of all second moments at once
            moments.append(Moment(4 * held.own, np.zeros(()), np.zeros(()), 4 * held.own))
    else:
        _, edge, largest, _ = stage_parameters(s, place, held.stages)
        moved = np.where(s.table.at_least("sharding", "parameters"), 2 * 2 * (largest + edge), 0)
        moments = [*whole_moments(s, place, held, gradients, moved)]
    return RankBytes(rank, np.asarray(parameters), np.asarray(optimizer), tuple(moments), fixed)


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
