"""In what order does each pipeline rank run its tasks, and how many micro-batches does it hold meanwhile?

Every order is static: it depends on the schedule, the degrees and the number of micro-batches, never on durations.
The rules are those that torch 2.13 runs (`torch.distributed.pipelining.schedules`), stage by stage the same; Megatron's
1F1B and interleaved 1F1B are the same orders wherever Megatron accepts the key (see `illegal`).

Letters: p = ``pp`` ranks, r = the rank, v = ``vpp`` stages per rank, m = micro-batches. Loop schedules give rank r the
stages r, p + r, 2 p + r, ...; the V schedules (zbv, dualpipev) give it r and 2 p - 1 - r.

Sources of the orders: GPipe, arXiv:1811.06965 sec. 2.3; 1F1B and interleaved 1F1B, arXiv:2104.04473 sec. 2.2;
zero-bubble (ZB1P, which torch extends to several stages per rank) and ZB-V, arXiv:2401.10241 sec. 2.3 and 6; DualPipe,
arXiv:2412.19437 sec. 3.2.1, and its V form in the DualPipe repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.strategy import Schedule

Ints = NDArray[np.int32]
PipelineBackend = Literal["torch", "megatron"]

V_SCHEDULES: frozenset[Schedule] = frozenset({"zbv", "dualpipev"})


class Kind(IntEnum):
    """What a task does for one stage and one micro-batch."""

    FORWARD = 0
    BACKWARD = 1  # both gradients at once
    INPUT_GRAD = 2
    WEIGHT_GRAD = 3


F, B, I, W = Kind  # noqa: E741 - the letters of the papers


def illegal(
    schedule: Schedule, pp: int, vpp: int, num_micro_batches: int, backend: PipelineBackend = "torch"
) -> str | None:
    """Why ``backend`` refuses this key, as one sentence; None if it runs it.

    Sources: the constructors of torch 2.13's schedules; Megatron-LM, megatron/core/pipeline_parallel/schedules.py,
    `forward_backward_pipelining_with_interleaving` with its default group of pp micro-batches.
    """
    m = num_micro_batches
    if min(pp, vpp, m) < 1:
        return f"pp={pp}, vpp={vpp} and {m} micro-batches must all be at least 1"
    if backend == "megatron":
        return _illegal_in_megatron(schedule, pp, vpp, m)
    if schedule == "1f1b" and m < pp:
        return f"1f1b needs at least as many micro-batches as pipeline ranks, but {m} < pp={pp}"
    return _without_order(schedule, pp, vpp, m)


def _illegal_in_megatron(schedule: Schedule, pp: int, vpp: int, m: int) -> str | None:
    if schedule not in ("1f1b", "interleaved"):
        return f"megatron runs 1f1b and interleaved pipelines, not {schedule}"
    if schedule == "1f1b":
        return _without_order(schedule, pp, vpp, m)
    if pp < 2 or vpp < 2:
        return f"megatron's interleaved schedule needs pp and vpp of at least 2, but pp={pp}, vpp={vpp}"
    if m % pp:
        return f"megatron's interleaved schedule needs micro-batches in groups of pp={pp}, but {m} is no multiple of it"
    return None


def _without_order(schedule: Schedule, pp: int, vpp: int, m: int) -> str | None:
    """Why no order exists for this key, whoever runs it."""
    if schedule in ("gpipe", "1f1b") and vpp != 1:
        return f"{schedule} runs one stage per rank, but vpp={vpp}"
    if schedule in V_SCHEDULES and vpp != 2:
        return f"{schedule} needs exactly two stages per rank, but vpp={vpp}"
    if schedule == "dualpipev" and m < 2 * pp:
        return f"dualpipev needs at least as many micro-batches as stages, but {m} < 2 pp = {2 * pp}"
    if schedule in ("interleaved", "zero-bubble") and m % _rounds(pp, m):
        return (
            f"{schedule} runs {m} micro-batches in {_rounds(pp, m)} equal rounds of about pp={pp}, "
            f"but {m} is no multiple of {_rounds(pp, m)}"
        )
    return None


def _rounds(pp: int, m: int) -> int:
    return max(1, m // pp)


def stage_ranks(schedule: Schedule, pp: int, vpp: int) -> Ints:
    """The pipeline rank of each stage, [pp * vpp]: stage % pp, or there and back for a V schedule."""
    stages = np.arange(pp * vpp, dtype=np.int32)
    if schedule in V_SCHEDULES:
        return np.minimum(stages, 2 * pp - 1 - stages)
    return stages % np.int32(pp)


def rank_stages(schedule: Schedule, pp: int, vpp: int, rank: int) -> tuple[int, ...]:
    """The stages of ``rank``, ascending."""
    return tuple(np.flatnonzero(stage_ranks(schedule, pp, vpp) == rank).tolist())


@lru_cache(maxsize=128)
def rank_orders(schedule: Schedule, pp: int, vpp: int, num_micro_batches: int) -> tuple[Ints, ...]:
    """The tasks of every pipeline rank in the order they run.

    Returns:
        One read-only array per rank, [tasks, 3]: (`Kind`, global stage, micro-batch). A forward and a backward that
        DualPipeV pairs are two tasks, one after the other, as torch runs them.

    Raises:
        UsageError: The schedule has no order for this key. A 1f1b with fewer micro-batches than ranks has one (Megatron
            runs it), though torch refuses it: ask `illegal`.
    """
    m = num_micro_batches
    reason = illegal(schedule, pp, vpp, m) if min(pp, vpp, m) < 1 else _without_order(schedule, pp, vpp, m)
    if reason:
        raise UsageError(f"No pipeline order: {reason}. Change grad_accum, pp, vpp or the schedule.")
    orders = []
    for rank in range(pp):
        if schedule == "zbv":
            order = _zbv(rank, pp, m)
        elif schedule == "dualpipev":
            order = _dualpipev(rank, pp, m)
        else:
            order = _loop(schedule, rank, pp, vpp, m)
        order.flags.writeable = False
        orders.append(order)
    return tuple(orders)


def _loop(schedule: Schedule, rank: int, pp: int, vpp: int, m: int) -> Ints:
    """Warm-up forwards, then one forward and one backward in turn, then the backwards that are left.

    The rounds take m / rounds micro-batches through each stage of the rank before the next round starts. A zero-bubble
    rank runs its weight gradients ``rank`` backwards late, so that they fill what would be its bubble.
    """
    n = m * vpp  # forwards of this rank, and backwards
    per_round = m // _rounds(pp, m)
    hops = pp - 1 - rank  # to the last rank
    if schedule == "gpipe":
        warm_up = n
    elif schedule == "1f1b":
        warm_up = min(n, hops)
    else:
        warm_up = min(n, (vpp - 1) * per_round + hops * (2 if schedule == "interleaved" else 1))

    turn = np.arange(n, dtype=np.int32)
    chunk = turn // per_round % vpp
    micro_batch = turn // (per_round * vpp) * per_round + turn % per_round
    forward = np.stack((np.full_like(turn, F), chunk * pp + rank, micro_batch), axis=1)
    backward = np.stack((np.full_like(turn, B), (vpp - 1 - chunk) * pp + rank, micro_batch), axis=1)
    splits = schedule == "zero-bubble"
    late = min(n, rank) if splits else n  # backwards that pass before the first weight gradient

    # One row of three places per backward: the forward before it, itself, the weight gradient after it.
    rows = np.empty((n, 3, 3), np.int32)
    used = np.zeros((n, 3), np.bool_)
    rows[: n - warm_up, 0], used[: n - warm_up, 0] = forward[warm_up:], True
    rows[:, 1], used[:, 1] = backward, True
    if not splits:
        return np.concatenate((forward[:warm_up], rows[used]))
    rows[:, 1, 0] = I
    weight = backward.copy()
    weight[:, 0] = W
    rows[late:, 2], used[late:, 2] = weight[: n - late], True
    return np.concatenate((forward[:warm_up], rows[used], weight[n - late :]))


_Step = tuple[Kind, int]  # (what, for the first or second stage of the rank)


def _steps(*blocks: tuple[Sequence[_Step], int]) -> tuple[Ints, Ints]:
    """Kinds and local stages of blocks of steps, each repeated so many times."""
    parts = [np.tile(np.array(steps, np.int32), (times, 1)) for steps, times in blocks]
    joined = np.concatenate(parts)
    return joined[:, 0], joined[:, 1]


def _counted(mask: NDArray[np.bool_]) -> Ints:
    """0, 1, 2, ... at the places where ``mask`` holds; 0 elsewhere."""
    return np.where(mask, np.cumsum(mask) - 1, 0).astype(np.int32)


def _v_order(rank: int, pp: int, kind: Ints, local: Ints, micro_batch: Ints) -> Ints:
    return np.stack((kind, np.where(local == 0, rank, 2 * pp - 1 - rank), micro_batch), axis=1).astype(np.int32)


def _zbv(rank: int, pp: int, m: int) -> Ints:
    """ZB-V. With m < 2 p - 1 it is the order of 2 p - 1 micro-batches with those from m on left out, as in torch."""
    n = max(2 * pp - 1, m)
    rest = pp - rank
    up, down = [(I, 0), (W, 0)], [(F, 1), (I, 1), (W, 1)]
    kind, local = _steps(
        ([(F, 0)], 2 * rest - 1),
        ([(F, 1), (F, 0)], rank),
        (down, rest),
        ([(F, 0), *up, *down], n - 2 * pp + rank + 1),
        ([*up, *down], rest - 1),
        ([(I, 0), (I, 1)], rank),
        (up, rest),
        ([(W, 1)], rank),
        ([(W, 0)], rank),
    )
    micro_batch = sum((_counted((kind == k) & (local == c)) for k in (F, I, W) for c in (0, 1)), np.zeros_like(kind))
    kept = micro_batch < m
    return _v_order(rank, pp, kind[kept], local[kept], micro_batch[kept])


def _dualpipev(rank: int, pp: int, m: int) -> Ints:
    """DualPipeV: full backwards in the middle, split ones where a weight gradient can fill a bubble.

    Weight gradients run first in, first out over both stages.
    """
    rest = pp - rank - 1
    half = (rank + 1) // 2
    if rank % 2 == 0:  # split from the second backward of this turn on
        turn_over = [([(B, 1), (I, 0)], 1), ([(I, 1), (I, 0)], rank - half)]
    else:
        turn_over = [([(I, 1), (I, 0)], rank + 1 - half)]
    kind, local = _steps(
        ([(F, 0)], 2 * rest),
        ([(F, 0), (F, 1)], rank + 1),
        ([(I, 1), (W, 1), (F, 1)], rest),
        ([(F, 0), (B, 1), (F, 1), (B, 0)], m - 2 * pp + rank + 1),
        ([(B, 1), (F, 1), (B, 0)], rest),
        ([(B, 1), (B, 0)], half),
        *turn_over,
        ([(W, 0), (I, 0)], rest),
        ([(W, 0)], rank + 1),
    )
    gradient = (kind == B) | (kind == I)
    micro_batch = np.zeros_like(kind)
    for c in (0, 1):
        micro_batch += _counted((kind == F) & (local == c)) + _counted(gradient & (local == c))
    local[kind == W] = local[kind == I]
    micro_batch[kind == W] = micro_batch[kind == I]
    return _v_order(rank, pp, kind, local, micro_batch)


def in_flight_peaks(schedule: Schedule, pp: int, vpp: int, num_micro_batches: int) -> tuple[Ints, ...]:
    """How many micro-batches each stage of a rank holds activations of, at the moments that can be its peak.

    A micro-batch is held from the start of its forward to the end of its weight gradient or full backward: an input
    gradient alone releases nothing, as the weight gradient reads the same activations.

    Returns:
        One read-only array per rank, [k, stages of the rank, ascending]. No row is at most another in every place, and
        every moment of the step is at most one of the rows; so the peak of any non-negative bytes per stage is the
        greatest of ``rows @ bytes``.
    """
    if schedule != "gpipe" and num_micro_batches >= 3 * pp:
        # From two rounds of pp on the steady state repeats and holds no more: a test walks the whole orders.
        num_micro_batches = 2 * pp + num_micro_batches % pp
    return walked_peaks(schedule, pp, vpp, num_micro_batches)


@lru_cache(maxsize=1024)
def walked_peaks(schedule: Schedule, pp: int, vpp: int, num_micro_batches: int) -> tuple[Ints, ...]:
    """`in_flight_peaks` by a walk through the whole order."""
    peaks = []
    for rank, order in enumerate(rank_orders(schedule, pp, vpp, num_micro_batches)):
        of_stage = order[:, 1][:, None] == np.array(rank_stages(schedule, pp, vpp, rank))
        is_forward = order[:, 0] == F
        releases = (order[:, 0] == B) | (order[:, 0] == W)
        held_after = np.cumsum(of_stage * (is_forward.astype(np.int32) - releases)[:, None], axis=0, dtype=np.int32)
        last_of_run = is_forward & ~np.append(is_forward[1:], False)  # what is held only grows along a run of forwards
        peaks.append(_maximal(held_after[last_of_run]))
    return tuple(peaks)


def _maximal(rows: Ints) -> Ints:
    """The rows that no other row is at least equal to in every place, each once, read-only."""
    rows = np.unique(rows, axis=0)
    at_most = (rows[:, None, :] <= rows[None, :, :]).all(axis=2)
    kept: Ints = rows[at_most.sum(axis=1) == 1]  # every row is at most itself
    kept.flags.writeable = False
    return kept


@lru_cache(maxsize=256)
def gather_windows(
    schedule: Schedule, pp: int, vpp: int, num_micro_batches: int, num_active_stages: int = 3
) -> tuple[Ints, ...]:
    """When torch's multi-stage runtime gathers the parameters of a sharded stage.

    Before each task it makes the stages of the next ``num_active_stages`` different stages of the rank's order present:
    it drops the others and gathers those that are missing. With at most that many stages per rank each is gathered once
    per step; with more, again and again.

    Returns:
        One read-only array per rank, [gathers, 3], in the order issued: (index of the task it is issued before, stage,
        index of the first task that uses it).

    Source: torch 2.13, schedules.py, `_add_unshard_reshard`, whose default is 3.
    """
    windows = []
    for rank, order in enumerate(rank_orders(schedule, pp, vpp, num_micro_batches)):
        stages = np.array(rank_stages(schedule, pp, vpp, rank), np.int32)
        tasks = len(order)
        next_use = np.where(order[:, 1][:, None] == stages, np.arange(tasks)[:, None], tasks)
        next_use = np.minimum.accumulate(next_use[::-1], axis=0)[::-1]
        place = np.argsort(np.argsort(next_use, axis=1, kind="stable"), axis=1, kind="stable")
        present = (place < num_active_stages) & (next_use < tasks)
        missing = present.copy()
        missing[1:] &= ~present[:-1]
        before, which = np.nonzero(missing)
        use = next_use[before, which]
        issue_order = np.lexsort((use, before))
        window = np.stack((before, stages[which], use), axis=1).astype(np.int32)[issue_order]
        window.flags.writeable = False
        windows.append(window)
    return tuple(windows)
