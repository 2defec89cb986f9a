"""How fast can a step be at best? A lower bound of its simulated time, for a grid of strategies at once.

Every term is the length of a path through the step's graph: what leads to a rank's first task, all of its computation,
and what follows its last one. Durations come from the same functions that the simulation plays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from trainplan.costmodel.durations import exposed_s, slowed_work, stage_work, step_key, unit_work
from trainplan.costmodel.graph import ChainKey, Key, Work
from trainplan.costmodel.job import Job
from trainplan.costmodel.layout import Layout, computed_twice, layout
from trainplan.costmodel.memory import own_parameters
from trainplan.costmodel.stacks import Stack
from trainplan.costmodel.strategy import StrategyTable
from trainplan.costmodel.units import Unit, Units
from trainplan.costmodel.work import Column, Shapes

FUSED_BACKWARD = ("gpipe", "1f1b", "interleaved")
"""Schedules whose last task on a rank is a backward that the ranks before it wait for."""
BOUNDED = (Work.FORWARD, Work.BACKWARD, Work.GATHER, Work.REDUCE)
Pieces = list[tuple[Unit, bool, Column | int]]


@dataclass(frozen=True)
class StageBound:
    """Seconds of one stage: a forward, a backward, its gather and reduction, and its work after them."""

    forward: Column
    backward: Column
    gather: Column
    reduce: Column
    finish: Column


def lower_bound_s(job: Job, stack: Stack, table: StrategyTable, units: Units) -> Column:
    """Seconds that no step of the table's strategies can beat; broadcasts against ``table``.

    Args:
        job: Model, cluster and workload.
        stack: The software.
        table: Strategies that share the shape of the graph but for `recompute_layers`.
        units: Their units.
    """
    first = table.row(0)
    place = layout(job, first)
    key = step_key(first, stack, place)
    shapes = Shapes(job, table, stack)
    if isinstance(key, ChainKey):
        return _chain(key, _pieces(place, 0, table, units), units, own_parameters(shapes, place, [0]))
    return _pipeline(key, place, shapes, units)


def _pieces(place: Layout, stage: int, table: StrategyTable, units: Units) -> Pieces:
    """The units of a stage; how many layers are computed twice follows each row's `recompute_layers`."""
    kinds = place.kinds[stage]
    pieces: Pieces = []
    for kind in dict.fromkeys(kinds):
        again = table.mapped("recompute_layers", computed_twice(place, stage, kind))
        pieces += [(units.layers[kind], False, kinds.count(kind) - again), (units.layers[kind], True, again)]
    pieces += [(units.embedding, False, 1)] if stage == 0 else []
    pieces += [(units.head, False, 1)] if stage == place.num_stages - 1 else []
    return pieces


def _chain(key: ChainKey, pieces: Pieces, units: Units, own: Column) -> Column:
    """One rank: its tasks in turn, or its communication stream; both end in the optimizer.

    The first gather stands before the first task, the root's reduction behind the last one, and behind every
    micro-batch where gradients are reduced in each.
    """
    m = key.num_micro_batches
    works = [(unit_work(unit, again), count) for unit, again, count in pieces]
    embedding, head = works[-2][0], works[-1][0]
    for work in (Work.GATHER, Work.REDUCE):  # the root unit holds the embedding and the head
        embedding[work] = embedding[work] + head[work]
        head[work] = np.zeros(())
    gathers, reduces = (_sum(count * of[work] for of, count in works) for work in (Work.GATHER, Work.REDUCE))
    finish = own * units.optimizer_per_parameter + exposed_s(units, gathers, reduces) + units.step_host_s
    slowed = [(slowed_work(of, units, key), count) for of, count in works]
    compute = _sum(count * (of[Work.FORWARD] + of[Work.BACKWARD]) for of, count in slowed)
    root_gather, root_reduce = slowed[-2][0][Work.GATHER], slowed[-2][0][Work.REDUCE]
    gathers, reduces = (_sum(count * of[work] for of, count in slowed) for work in (Work.GATHER, Work.REDUCE))
    waits = root_reduce * (m if key.reduce == "micro_batch" else 1)
    gathered = {"none": 0.0 * gathers, "step": gathers, "forward": m * gathers}.get(
        key.gather, m * (2 * gathers - root_gather)
    )
    before = np.zeros(()) if key.gather == "none" else root_gather
    network = gathered + reduces * (m if key.reduce == "micro_batch" else 1)
    return np.asarray(np.maximum(before + m * compute + waits, network) + finish)


def _pipeline(key: Key, place: Layout, shapes: Shapes, units: Units) -> Column:
    """The greatest bound of a rank. Of ranks that do the same, the last waits longest for its first task."""
    stages = _stages(key, place, shapes, units)
    ranks: dict[tuple[int, ...], int] = {}
    for rank in range(key.pp):
        ranks[tuple(id(stages[stage]) for stage in place.rank_stages(rank))] = rank
    return np.asarray(reduce(np.maximum, (_rank(key, place, stages, units, rank) for rank in ranks.values())))


def _stages(key: Key, place: Layout, shapes: Shapes, units: Units) -> list[StageBound]:
    """Of every stage; equal ones are one object."""
    per_rank = place.num_stages // key.pp
    known: dict[tuple[object, ...], StageBound] = {}
    stages = []
    for stage in range(place.num_stages):
        split = tuple(v[stage] if v else -1 for v in shapes.table.vocabulary.get("recompute_layers", ((),)))
        same = (place.kinds[stage], split, stage == 0, stage == place.num_stages - 1)
        if same not in known:
            work = stage_work(_pieces(place, stage, shapes.table, units), BOUNDED)
            own = own_parameters(shapes, place, [stage])
            finish = (
                own * units.optimizer_per_parameter
                + exposed_s(units, work[Work.GATHER], work[Work.REDUCE])
                + units.step_host_s / per_rank
            )
            work = slowed_work(work, units, key)
            known[same] = StageBound(
                work[Work.FORWARD], work[Work.BACKWARD], work[Work.GATHER], work[Work.REDUCE], np.asarray(finish)
            )
        stages.append(known[same])
    return stages


def _rank(key: Key, place: Layout, stages: Sequence[StageBound], units: Units, rank: int) -> Column:
    """The longest of some paths through a rank's work.

    Before its first task the stages before it have run one forward, after a gather. After its last task come its own
    optimizer and, where backwards are whole, one backward of each stage before it and the first rank's optimizer.
    """
    mine = [stages[stage] for stage in place.rank_stages(rank)]
    earlier = stages[:rank]
    m, none = key.num_micro_batches, np.zeros(())
    before = (none if key.gather == "none" else stages[0].gather) + _sum_of(earlier, "forward") + rank * units.send
    end = before + m * (_sum_of(mine, "forward") + _sum_of(mine, "backward"))
    if key.reduce == "step_wait":  # each reduction but a last one stands between two tasks
        end = end + _sum_of(mine, "reduce") - reduce(np.maximum, (of.reduce for of in mine))
    fused = key.schedule in FUSED_BACKWARD
    last = mine[:1] if fused else mine
    after = [_sum_of(mine, "finish"), reduce(np.minimum, (of.reduce + of.finish for of in last))]
    if fused:
        first = stages[0]
        after.append(_sum_of(earlier, "backward") + rank * units.send + first.reduce + first.finish)
    reduces = _sum_of(mine, "reduce") * (m if key.reduce == "micro_batch" else 1)
    return np.asarray(
        np.maximum(end + reduce(np.maximum, after), reduces + reduce(np.minimum, (of.finish for of in mine)))
    )


def _sum_of(stages: Sequence[StageBound], name: str) -> Column:
    """The sum over stages of one of their durations; equal stages are multiplied."""
    counts: dict[int, tuple[StageBound, int]] = {}
    for of in stages:
        counts[id(of)] = of, counts.get(id(of), (of, 0))[1] + 1
    return _sum(count * getattr(of, name) for of, count in counts.values())


def _sum(columns: Iterable[Column]) -> Column:
    return np.asarray(sum(columns, start=np.zeros(())))
