"""How long is each piece of a step's graph? Seconds per class for many strategies, and what those seconds consist of.

One rank runs a chain of FSDP units (embedding, layers, head); a pipeline runs stages. Both have a graph with classes
per unit; this module chooses the graph (`step_key`) and fills its classes, so the two can't disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainplan.costmodel.graph import ChainKey, Gather, Graph, Key, Reduce, Work, build, build_chain
from trainplan.costmodel.layout import LayerKind, Layout
from trainplan.costmodel.stacks import Stack
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.units import Unit, Units
from trainplan.costmodel.work import Column

COMPUTE_PARTS = ("forward", "backward", "recompute", "contention")
INLINE_PARTS = ("tensor_parallel", "context_parallel", "expert_parallel")
EMBEDDING, FIRST_LAYER = 0, 1


@dataclass(frozen=True)
class Durations:
    """A step's graph and the seconds of its classes.

    Attributes:
        graph: What waits for what.
        seconds: Work -> [..., rows, units].
        parts: Part of a micro-batch's computation or inline communication -> [..., rows, stages].
        ranks: Pipeline rank of each stage, for ``parts``.
    """

    graph: Graph
    seconds: Mapping[Work, Column]
    parts: Mapping[str, Column]
    ranks: tuple[int, ...]


def step_key(strategy: Strategy, stack: Stack, place: Layout) -> Key | ChainKey:
    """The graph that a strategy's step plays."""
    sharding, m = strategy.sharding, strategy.grad_accum
    every = sharding in ("gradients", "parameters")
    if strategy.pp == 1:
        gather: str = {"none": "none", "optimizer": "step", "gradients": "step"}.get(
            sharding, "micro_batch" if strategy.reshard_after_forward else "forward"
        )
        return ChainKey(
            unit_kinds=_chain_kinds(place)[0],
            num_micro_batches=m,
            gather=gather,  # type: ignore[arg-type]
            reduce="micro_batch" if every else "step",
            prefetch_units=strategy.prefetch_units,
        )
    whole, multi_stage = sharding == "parameters", strategy.schedule not in ("gpipe", "1f1b")
    kept: Gather = "window" if stack.fsdp2 and multi_stage else "step"
    mode: Gather = (
        "none"
        if sharding == "none"
        else "micro_batch"
        if whole and strategy.reshard_after_forward and not multi_stage
        else kept
    )
    reduce: Reduce = "step_wait" if stack.fsdp2 else "micro_batch" if every else "step"
    p2p = "rendezvous" if stack.rendezvous_p2p and not multi_stage else "async"
    return Key(strategy.schedule, strategy.pp, strategy.vpp, m, mode, reduce, p2p)  # type: ignore[arg-type]


def _chain_kinds(place: Layout) -> tuple[tuple[int, ...], list[tuple[LayerKind, bool]]]:
    """(kinds of the chain's units, what each layer kind is): 0 the embedding, 1.. kinds of layers, last the head."""
    layers = [(kind, i < place.recomputed[0]) for i, kind in enumerate(place.kinds[0])]
    distinct = list(dict.fromkeys(layers))
    order = tuple(FIRST_LAYER + distinct.index(layer) for layer in layers)
    return (EMBEDDING, *order, FIRST_LAYER + len(distinct)), distinct


def durations(strategy: Strategy, stack: Stack, place: Layout, units: Units, own: list[Column]) -> Durations:
    """Fill the classes of the graph of ``strategy``'s shape.

    Args:
        strategy: Any one of the table's: they share the shape.
        stack: The software.
        place: The stages.
        units: Priced units, columns [..., rows].
        own: Parameters each stage's rank updates, per stage [..., rows].
    """
    key = step_key(strategy, stack, place)
    if isinstance(key, ChainKey):
        return _chain(key, place, units, own[0])
    return _pipeline(key, place, units, own)


def _stack_last(columns: list[Column]) -> Column:
    """[..., rows] columns side by side: [..., rows, units]."""
    return np.stack(np.broadcast_arrays(*columns), axis=-1)


def _unit_parts(unit: Unit, recomputed: bool) -> dict[str, Column]:
    zero = np.zeros(())
    parts = {
        "forward": unit.forward,
        "backward": unit.input_grad + unit.weight_grad,
        "recompute": unit.recompute if recomputed else zero,
    }
    return parts | {name: sum(unit.inline.get(name, (zero, zero)), start=zero) for name in INLINE_PARTS}


def unit_work(unit: Unit, recomputed: bool) -> dict[Work, Column]:
    """Seconds of one unit by kind of work, communication between its operations included."""
    again = unit.recompute if recomputed else np.zeros(())
    input_grad = unit.input_grad + again + unit.inline_backward
    return {
        Work.FORWARD: unit.forward + unit.inline_forward,
        Work.INPUT_GRAD: input_grad,
        Work.WEIGHT_GRAD: unit.weight_grad,
        Work.BACKWARD: input_grad + unit.weight_grad,
        Work.GATHER: unit.gather,
        Work.REDUCE: unit.reduce,
    }


def stage_work(
    pieces: Sequence[tuple[Unit, bool, Column | int]], kinds: Sequence[Work] | None = None
) -> dict[Work, Column]:
    """Seconds of a stage by kind of work (all, or ``kinds``), from (unit, whether it is computed twice, how many)."""
    works = [(unit_work(unit, again), count) for unit, again, count in pieces]
    return {
        work: np.asarray(sum((count * of[work] for of, count in works), start=np.zeros(())))
        for work in kinds or works[0][0]
    }


def exposed_s(units: Units, gathers: Column, reduces: Column) -> Column:
    """Seconds after the last backward of data-parallel communication that is not overlapped: gradients, parameters."""
    return np.where(units.overlaps_reduce, 0.0, reduces) + np.where(units.overlaps_gather, 0.0, gathers)


def slowed_work(work: dict[Work, Column], units: Units, key: Key | ChainKey) -> dict[Work, Column]:
    """A unit's work with its computation stretched while communication runs beside it.

    Communication takes memory bandwidth and processors from the kernels it overlaps: each second of it that a
    computation can hide costs that computation `Units.contention` of a second. What runs once per step is spread over
    the micro-batches. Applied to durations before they are played, so a step stays monotone in each.
    """
    gather = np.where(units.overlaps_gather, work[Work.GATHER], 0.0)
    reduce = np.where(units.overlaps_reduce, work[Work.REDUCE], 0.0)
    beside_forward = gather if key.gather in ("micro_batch", "forward") else gather / key.num_micro_batches
    beside_backward = (gather if key.gather == "micro_batch" else 0.0) + (
        reduce if key.reduce == "micro_batch" else reduce / key.num_micro_batches
    )
    slower_forward = units.contention * np.minimum(work[Work.FORWARD], beside_forward)
    slower_backward = units.contention * np.minimum(work[Work.BACKWARD], beside_backward)
    slower = {Work.FORWARD: slower_forward, Work.WEIGHT_GRAD: slower_backward, Work.BACKWARD: slower_backward}
    stretched = {kind: work[kind] + by for kind, by in slower.items() if kind in work}
    return work | stretched | {Work.GATHER: gather, Work.REDUCE: reduce}


def _lost(before: dict[Work, Column], after: dict[Work, Column]) -> Column:
    """Seconds of a micro-batch that computation lost to communication beside it."""
    return np.asarray(sum((after[of] - before[of] for of in (Work.FORWARD, Work.BACKWARD)), start=np.zeros(())))


def _chain(key: ChainKey, place: Layout, units: Units, own: Column) -> Durations:
    """FSDP's root unit holds the embedding and the head: their traffic runs where the embedding is."""
    kinds, layers = _chain_kinds(place)
    pieces = [
        unit_work(units.embedding, False),
        *(unit_work(units.layers[kind], again) for kind, again in layers),
        unit_work(units.head, False),
    ]
    for work in (Work.GATHER, Work.REDUCE):
        pieces[0][work] = pieces[0][work] + pieces[-1][work]
        pieces[-1][work] = np.zeros(())
    counts = [1, *(kinds.count(FIRST_LAYER + i) for i in range(len(layers))), 1]
    gathers, reduces = (
        np.asarray(sum((n * piece[work] for n, piece in zip(counts, pieces, strict=True)), start=np.zeros(())))
        for work in (Work.GATHER, Work.REDUCE)
    )
    slowed = [slowed_work(piece, units, key) for piece in pieces]
    contention = sum((n * _lost(a, b) for n, a, b in zip(counts, pieces, slowed, strict=True)), start=np.zeros(()))
    pieces = slowed
    seconds = {work: _stack_last([piece[work] for piece in pieces]) for work in pieces[0]}
    seconds[Work.GATHER_FORWARD] = seconds[Work.GATHER]
    # The root stays gathered between forward and backward.
    again = seconds[Work.GATHER].copy()
    again[..., EMBEDDING] = 0
    seconds[Work.GATHER_BACKWARD] = again
    share = np.zeros(len(pieces))
    share[EMBEDDING] = 1.0  # one optimizer step for all, at the end
    finish = own * units.optimizer_per_parameter + exposed_s(units, gathers, reduces) + units.step_host_s
    seconds[Work.FINISH] = np.asarray(finish)[..., None] * share
    parts = _sum_parts(
        [
            (_unit_parts(units.embedding, False), 1),
            *(
                (_unit_parts(units.layers[kind], again), kinds.count(FIRST_LAYER + i))
                for i, (kind, again) in enumerate(layers)
            ),
            (_unit_parts(units.head, False), 1),
        ]
    )
    parts["contention"] = np.asarray(contention)
    return Durations(build_chain(key), seconds, {name: column[..., None] for name, column in parts.items()}, (0,))


def _sum_parts(pieces: list[tuple[dict[str, Column], int]]) -> dict[str, Column]:
    names = pieces[0][0]
    return {
        name: np.asarray(sum((count * piece[name] for piece, count in pieces), start=np.zeros(()))) for name in names
    }


def _pipeline(key: Key, place: Layout, units: Units, own: list[Column]) -> Durations:
    stages: list[dict[Work, Column]] = []
    parts: list[dict[str, Column]] = []
    for stage in range(place.num_stages):
        pieces = [(units.layers[kind], again, count) for (kind, again), count in place.counts(stage).items()]
        pieces += [(units.embedding, False, 1)] if stage == 0 else []
        pieces += [(units.head, False, 1)] if stage == place.num_stages - 1 else []
        stages.append(stage_work(pieces))
        parts.append(_sum_parts([(_unit_parts(unit, again), count) for unit, again, count in pieces]))
    last = place.num_stages // key.pp  # stages of a rank; what a rank does once is shared among them
    finish = [
        count * units.optimizer_per_parameter
        + exposed_s(units, stage[Work.GATHER], stage[Work.REDUCE])
        + units.step_host_s / last
        for count, stage in zip(own, stages, strict=True)
    ]
    slowed = [slowed_work(stage, units, key) for stage in stages]
    for part, before, after in zip(parts, stages, slowed, strict=True):
        part["contention"] = _lost(before, after)
    stages = slowed
    seconds = {work: _stack_last([stage[work] for stage in stages]) for work in stages[0]}
    seconds[Work.GATHER_FORWARD] = seconds[Work.GATHER_BACKWARD] = seconds[Work.GATHER]
    seconds[Work.SEND_FORWARD] = seconds[Work.SEND_BACKWARD] = np.asarray(units.send)[..., None]
    seconds[Work.FINISH] = _stack_last(finish)
    side_by_side = {name: _stack_last([stage[name] for stage in parts]) for name in parts[0]}
    return Durations(build(key), seconds, side_by_side, place.ranks)
