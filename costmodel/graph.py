"""What waits for what in a training step?

The graph depends on its key alone, so it is built once and played with any durations. `build` has the pipelines,
`build_chain` a single rank whose layers are sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainplan.costmodel.compiled import Engine
from trainplan.costmodel.dag import Classes, Draft, Graph, Work, chained
from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.orders import Ints, Kind, gather_windows, rank_orders, stage_ranks
from trainplan.costmodel.strategy import Schedule

__all__ = ["ChainKey", "Classes", "Graph", "Key", "Work", "build", "build_chain"]

Gather = Literal["none", "step", "window", "micro_batch"]
Reduce = Literal["step", "step_wait", "micro_batch"]
P2P = Literal["rendezvous", "async"]


@dataclass(frozen=True, slots=True)
class Key:
    """All that the graph of a pipeline depends on.

    gather: When a rank gathers the parameters of its stages, one gather after the other, in the order of use.
        "none": never. "step": each stage once, back to back from the start of the step.
        "window": as torch's multi-stage runtime, `trainplan.costmodel.orders.gather_windows`: a gather starts when the
        task has ended after which it is issued; up to three stages per rank that is once per stage and step.
        "micro_batch": for every forward and backward (weight gradients need none). The gather for a task starts when
        the task two before it has ended: at most two stages are present, one in use and one coming.
    reduce: When gradients are reduced, one stage of a rank after the other. "step": after the stage's last weight
        gradient, beside what follows. "step_wait": the same, but the rank's next task waits for it, as in torch's
        pipelines over FSDP2 (stage.py, `perform_reduce_grad`, ends in a wait of the compute stream).
        "micro_batch": after every weight gradient.
    p2p: "async": a send starts when its data is there and the rank's previous send in that direction has ended; the
        receiver only waits for the data. It errs to the fast side where sends and receives share one communicator.
        "rendezvous", for gpipe and 1f1b: torch's single-stage runtime, where a transfer waits for both ranks to issue
        it, and a rank for all transfers it issued together (see `_rendezvous`).
    """

    schedule: Schedule
    pp: int
    vpp: int
    num_micro_batches: int
    gather: Gather = "none"
    reduce: Reduce = "step"
    p2p: P2P = "async"

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp


@lru_cache(maxsize=64)
def build(key: Key, engine: Engine = "auto") -> Graph:
    """The graph of a pipeline's step.

    Per rank it has a compute stream, a send stream per direction, a gather and a reduce stream. ``engine`` changes only
    the time it takes.

    Raises:
        UsageError: The schedule has no order for this key, or no rendezvous.
    """
    if key.p2p == "rendezvous" and key.schedule not in ("gpipe", "1f1b"):
        raise UsageError(
            f"A rendezvous of neighbours is the way of one stage per rank (gpipe, 1f1b), but the schedule is "
            f"{key.schedule}, whose ranks send without waiting. Use p2p=async."
        )
    tasks = _Tasks(key)
    draft = Draft()
    draft.add(tasks.kind, tasks.stage, tasks.stage, tasks.micro_batch, tasks.rank)
    forward_sends, backward_sends = tasks.crossing()
    sends = [
        draft.add(work, tasks.stage[s], tasks.stage[s], tasks.micro_batch[s], tasks.rank[s])
        for work, s in ((Work.SEND_FORWARD, forward_sends), (Work.SEND_BACKWARD, backward_sends))
    ]
    gathers = _gathers(tasks)
    gather_nodes = draft.add(gathers.work, gathers.stage, gathers.stage, gathers.micro_batch, tasks.rank[gathers.use])
    reduced = tasks.reduced()
    reduce_nodes = draft.add(
        Work.REDUCE,
        tasks.stage[reduced],
        tasks.stage[reduced],
        tasks.micro_batch[reduced] if key.reduce == "micro_batch" else -1,
        tasks.rank[reduced],
    )
    finished = np.argsort(tasks.ranks, kind="stable").astype(np.int32)  # stages, by rank
    finish_nodes = draft.add(Work.FINISH, finished, finished, -1, tasks.ranks[finished])

    preds = draft.start_edges()
    preds[: tasks.size, 0] = chained(np.arange(tasks.size, dtype=np.int32), tasks.rank)
    if key.p2p == "rendezvous":
        _rendezvous(tasks, preds, *sends)
    else:
        _async(tasks, preds, (forward_sends, backward_sends), sends)
    preds[gather_nodes, 0] = chained(gather_nodes, tasks.rank[gathers.use])
    preds[gather_nodes, 1] = gathers.after
    preds[gathers.use, 2] = gather_nodes
    preds[reduce_nodes, 0] = reduced
    preds[reduce_nodes, 1] = chained(reduce_nodes, tasks.rank[reduced])
    if key.reduce == "step_wait":
        follows = ~tasks.is_last[reduced]
        preds[reduced[follows] + 1, 0] = reduce_nodes[follows]
    before = chained(finish_nodes, tasks.ranks[finished])
    preds[finish_nodes, 0] = np.where(before < 0, np.flatnonzero(tasks.is_last)[tasks.ranks[finished]], before)
    last_reduce = np.zeros(key.num_stages, np.int32)
    last_reduce[tasks.stage[reduced]] = reduce_nodes  # in the order of the streams, so the last one stays
    preds[finish_nodes, 1] = last_reduce[finished]
    return draft.graph(key, key.num_stages, engine)


class _Tasks:
    """All ranks' tasks, one rank after the other; a task's number is its place here."""

    def __init__(self, key: Key) -> None:
        self.key = key
        orders = rank_orders(key.schedule, key.pp, key.vpp, key.num_micro_batches)
        joined = np.concatenate(orders)
        self.size = len(joined)
        self.kind, self.stage, self.micro_batch = joined[:, 0], joined[:, 1], joined[:, 2]
        self.ranks = stage_ranks(key.schedule, key.pp, key.vpp)
        self.rank = self.ranks[self.stage]
        lengths = [len(order) for order in orders]
        self.first = np.cumsum([0, *lengths[:-1]])  # of each rank
        self.is_last = np.zeros(self.size, np.bool_)
        self.is_last[np.cumsum(lengths) - 1] = True
        self.is_forward = self.kind == Kind.FORWARD
        self.is_backward = (self.kind == Kind.BACKWARD) | (self.kind == Kind.INPUT_GRAD)
        self.forward = self._table(self.is_forward)
        self.backward = self._table(self.is_backward)

    def _table(self, mask: NDArray[np.bool_]) -> Ints:
        """The number of each (stage, micro-batch)'s task among those of ``mask``."""
        table = np.empty((self.key.num_stages, self.key.num_micro_batches), np.int32)
        table[self.stage[mask], self.micro_batch[mask]] = np.flatnonzero(mask)
        return table

    def crossing(self) -> tuple[Ints, Ints]:
        """Tasks whose output another rank needs: of the forwards, of the backwards."""
        padded = np.append(self.ranks, -1)  # stage -1 and the one after the last: on no rank
        to_next = self.is_forward & (self.stage < self.key.num_stages - 1) & (padded[self.stage + 1] != self.rank)
        to_last = self.is_backward & (self.stage > 0) & (padded[self.stage - 1] != self.rank)
        return np.flatnonzero(to_next).astype(np.int32), np.flatnonzero(to_last).astype(np.int32)

    def reduced(self) -> Ints:
        """Tasks after which gradients are reduced, in the order of the reduce streams."""
        done = np.flatnonzero((self.kind == Kind.BACKWARD) | (self.kind == Kind.WEIGHT_GRAD)).astype(np.int32)
        if self.key.reduce == "micro_batch":
            return done
        last = np.zeros(self.key.num_stages, np.int32)
        last[self.stage[done]] = done  # ascending, so the last one stays
        return np.sort(last)


@dataclass(frozen=True, slots=True)
class _Gathers:
    """Gathers in the order of their streams: which stage, after which task they start, which task waits for them."""

    work: Ints | int
    stage: Ints
    micro_batch: Ints | int
    after: Ints | int
    use: Ints


def _gathers(tasks: _Tasks) -> _Gathers:
    key = tasks.key
    if key.gather == "micro_batch":
        use = np.flatnonzero(tasks.is_forward | tasks.is_backward).astype(np.int32)
        after = np.where(use - 2 >= tasks.first[tasks.rank[use]], use - 2, -1)
        work = np.where(tasks.is_forward[use], Work.GATHER_FORWARD, Work.GATHER_BACKWARD)
        return _Gathers(work, tasks.stage[use], tasks.micro_batch[use], after, use)
    if key.gather == "step":
        use = np.sort(np.unique(tasks.stage, return_index=True)[1]).astype(np.int32)
        return _Gathers(Work.GATHER, tasks.stage[use], -1, -1, use)
    if key.gather == "window":
        windows = gather_windows(key.schedule, key.pp, key.vpp, key.num_micro_batches)
        first = np.repeat(tasks.first, [len(window) for window in windows])
        before, stage, use = np.concatenate(windows).T
        after = np.where(before > 0, before - 1 + first, -1)
        return _Gathers(Work.GATHER, stage, -1, after, (use + first).astype(np.int32))
    none = np.empty(0, np.int32)
    return _Gathers(Work.GATHER, none, none, none, none)


def _async(tasks: _Tasks, preds: Ints, senders: tuple[Ints, Ints], sends: list[Ints]) -> None:
    """Edges of sends that nobody waits for but the task that needs the data."""
    delivers = np.arange(tasks.size, dtype=np.int32)  # the node that brings a task's output to its reader
    for tasks_sending, nodes in zip(senders, sends, strict=True):
        delivers[tasks_sending] = nodes
        preds[nodes, 0] = tasks_sending
        preds[nodes, 1] = chained(nodes, tasks.rank[tasks_sending])
    preds[tasks.forward[1:], 1] = delivers[tasks.forward[:-1]]
    preds[tasks.backward[:-1], 1] = delivers[tasks.backward[1:]]


def _rendezvous(tasks: _Tasks, preds: Ints, forward_sends: Ints, backward_sends: Ints) -> None:
    """Edges of torch's single-stage runtime, whose ranks issue batches of transfers on one stream, in turn.

    A transfer starts when both ranks have issued it, and a rank issues a batch when its task before and its batch
    before have ended. A warm-up forward receives, computes and sends in batches of their own; its last send is issued
    with the first gradient's receive. From then on a rank sends what it computed and receives what it needs next in one
    batch, and waits for both. Cool-down backwards again receive, compute and send apart. gpipe is a warm-up and a
    cool-down.

    Letters as in the source: w = warm-up forwards of stage s, i and j = micro-batches, forward and backward.

    Source: torch 2.13, schedules.py, `Schedule1F1B._step_microbatches` and `ScheduleGPipe._step_microbatches`.
    """
    S, m = tasks.forward.shape
    forward, backward = tasks.forward, tasks.backward
    into_forward = np.full((S, m), -1, np.int32)  # the transfer that brings a forward its input
    into_forward[1:] = forward_sends.reshape(S - 1, m)  # a rank sends micro-batches in order
    into_backward = np.full((S, m), -1, np.int32)
    into_backward[:-1] = backward_sends.reshape(S - 1, m)
    for s in range(S):
        w = m if tasks.key.schedule == "gpipe" else min(m, S - s)
        if s > 0:  # receives of inputs
            preds[into_forward[s], 0] = forward[s - 1]
            preds[into_forward[s, 1:w], 1] = into_forward[s + 1, : w - 1] if s < S - 1 else forward[s, : w - 1]
            preds[into_forward[s, w:], 1] = backward[s, : m - w]
            preds[forward[s], 1] = into_forward[s]
            preds[forward[s, w:], 0] = into_backward[s - 1, : m - w]  # its own send of that gradient
        elif tasks.key.schedule == "1f1b" and S > 1:
            preds[forward[0, 2:w], 1] = into_forward[1, : max(0, w - 2)]  # waits for the send before the last
        if s < S - 1:  # receives of gradients
            together = m - w + 1  # backwards whose gradient comes while the rank sends a forward's output
            preds[into_backward[s], 0] = backward[s + 1]
            preds[into_backward[s, :together], 1] = forward[s, w - 1 :]
            preds[into_backward[s, together:], 1] = (into_backward[s - 1] if s > 0 else backward[s])[together - 1 : -1]
            preds[backward[s], 1] = into_backward[s]
            preds[backward[s, :together], 0] = into_forward[s + 1, w - 1 :]


@dataclass(frozen=True, slots=True)
class ChainKey:
    """All that the graph of a single rank depends on: per micro-batch, its units forward, then backward.

    unit_kinds: The kind of each unit in forward order, small integers from 0. Units of one kind take the same time; the
        classes are one column per kind.
    gather: "none": never. "step": each unit once, before the first forward. "forward": before every forward, kept for
        the backward. "micro_batch": before every forward and every backward.
    reduce: "step": after a unit's last backward. "micro_batch": after every backward; the next micro-batch then waits
        until all are reduced.
    prefetch_units: Units that a unit's gather is issued ahead of it, as FSDP2's explicit prefetch (see `_leads`). FSDP2
        with none set runs as with 1. 0 gathers a unit only when the one before it has ended.
    shared_stream: Gathers and reduces take turns on one stream in the order they are issued, as with one NCCL
        communicator; else each has a stream of its own.
    reduce_buffers: Reduces under way before the next backward must wait for the oldest one; FSDP2's default is 1. 0 is
        no limit.

    Source: torch 2.13, `_fsdp_param_group.py` and `_fsdp_state.py`.
    """

    unit_kinds: tuple[int, ...]
    num_micro_batches: int
    gather: Literal["none", "step", "forward", "micro_batch"] = "none"
    reduce: Literal["step", "micro_batch"] = "step"
    prefetch_units: int = 1
    shared_stream: bool = True
    reduce_buffers: int = 1

    def __post_init__(self) -> None:
        if not self.unit_kinds or min(self.unit_kinds) < 0:
            raise ValueError(f"unit_kinds={self.unit_kinds} must name at least one unit, by integers from 0")
        if self.num_micro_batches < 1 or self.prefetch_units < 0 or self.reduce_buffers < 0:
            raise ValueError(f"{self} needs a micro-batch, and no negative prefetch_units or reduce_buffers")

    @property
    def num_units(self) -> int:
        return len(self.unit_kinds)


@lru_cache(maxsize=64)
def build_chain(key: ChainKey, engine: Engine = "auto") -> Graph:
    """The graph of a single rank's step. ``engine`` changes only the time it takes."""
    units = key.num_units
    task = np.arange(2 * units * key.num_micro_batches, dtype=np.int32)
    place = task % (2 * units)  # within the micro-batch
    micro_batch = task // (2 * units)
    unit = np.minimum(place, 2 * units - 1 - place)
    is_forward = place < units
    kinds = np.array(key.unit_kinds, np.int32)
    is_last = micro_batch == key.num_micro_batches - 1

    gathered = {
        "none": np.zeros_like(is_forward),
        "step": is_forward & (micro_batch == 0),
        "forward": is_forward,
        "micro_batch": np.ones_like(is_forward),
    }[key.gather]
    use = task[gathered]
    reduced = task[~is_forward & (is_last if key.reduce == "step" else True)]

    draft = Draft()
    work = np.where(is_forward, Work.FORWARD, Work.BACKWARD)
    draft.add(work, kinds[unit], unit, micro_batch, 0)
    once = key.gather == "step"
    gather_work = Work.GATHER if once else np.where(is_forward[use], Work.GATHER_FORWARD, Work.GATHER_BACKWARD)
    gathers = draft.add(gather_work, kinds[unit[use]], unit[use], -1 if once else micro_batch[use], 0)
    reduces = draft.add(
        Work.REDUCE, kinds[unit[reduced]], unit[reduced], -1 if key.reduce == "step" else micro_batch[reduced], 0
    )
    finishes = draft.add(Work.FINISH, kinds, np.arange(units, dtype=np.int32), -1, 0)

    preds = draft.start_edges()
    preds[task, 0] = task - 1
    preds[use, 2] = gathers
    ahead, lead = _leads(place[use], units, key.prefetch_units)
    nodes = np.concatenate((gathers, reduces))
    issued = np.lexsort((np.concatenate((use, reduced)), np.concatenate((2 * (use - ahead), 2 * reduced + 1))))
    stream = np.repeat([0, 0 if key.shared_stream else 1], (len(gathers), len(reduces)))
    issued = issued[np.argsort(stream[issued], kind="stable")]
    preds[nodes[issued], 0] = chained(nodes[issued], stream[issued])
    preds[gathers, 1] = np.maximum(use - 1 - lead, -1)
    preds[reduces, 1] = reduced
    reduce_of = np.full(len(task), -1, np.int32)
    reduce_of[reduced] = reduces
    if key.reduce_buffers:
        waits = task[place - units > key.reduce_buffers]
        preds[waits, 1] = reduce_of[waits - 1 - key.reduce_buffers]
    if key.reduce == "micro_batch":
        starts = task[(place == 0) & (task > 0)]
        preds[starts, 1] = reduce_of[starts - 1]
    if key.prefetch_units:  # the task that a gather starts with may itself have to wait for a reduce
        preds[gathers, 2] = np.where(use >= lead, preds[use - lead, 1], -1)
    preds[finishes, 0] = np.concatenate((task[-1:], finishes[:-1]))
    preds[finishes, 1] = reduce_of[len(task) - 1 - np.arange(units)]
    return draft.graph(key, int(kinds.max()) + 1, engine, key.shared_stream)


def _leads(place: Ints, units: int, prefetch_units: int) -> tuple[Ints, Ints]:
    """How far ahead of a unit's task its gather is issued by the host, and may start on the device, in tasks.

    Under FSDP2 the host runs ahead, and a gather waits for the copy-out (the start of the task) that its stream was
    last told to wait for. In forward that is the one *before* the task it is issued at, in backward that very one; so
    with n units of prefetch the gather may start with the task n + 1 places before its own in forward, n places in
    backward. A phase's first gathers have fewer tasks before them: the first forward's starts with the task before it,
    the first backward's with the last forward but one, the last copy-out that forward made the stream wait for.

    Source: torch 2.13, `FSDPParamGroup.wait_for_unshard`, `pre_forward`, `pre_backward`, `_backward_prefetch`.
    """
    nth = np.where(place < units, place, place - units)  # of its phase
    ahead = np.where(place < units, 0, np.minimum(nth, prefetch_units)).astype(np.int32)
    if prefetch_units == 0:
        return ahead, np.zeros_like(ahead)
    forward = np.minimum(nth, prefetch_units) + 1
    backward = np.where(nth == 0, 2, np.minimum(nth, prefetch_units))
    return ahead, np.where(place < units, forward, backward).astype(np.int32)
