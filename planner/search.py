"""Which strategy is best? Prices every legal one, simulates those that may win, and says how sure the answer is."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from trainplan.costmodel.backends import backend
from trainplan.costmodel.errors import NoPlanError, UsageError
from trainplan.costmodel.estimate import Estimate
from trainplan.costmodel.job import Job
from trainplan.costmodel.plan import SearchRecord
from trainplan.costmodel.step import estimate, memory_limit, price
from trainplan.costmodel.strategy import Strategy, StrategyTable
from trainplan.planner.space import Group, Pins, Space, complexity

__all__ = ["Candidate", "Pins", "Progress", "Result", "tune"]

Engine = Literal["enumerate", "optuna"]
BATCH = 512
"""Strategies simulated at a time inside a group, in the order of their lower bounds."""


@dataclass(frozen=True)
class Candidate:
    """A feasible strategy with its simulated step time and the device memory of its fullest rank (95 % point)."""

    strategy: Strategy
    step_s: float
    device_bytes: float


@dataclass(frozen=True)
class Progress:
    """Where a search is: ``total`` is 0 while it is unknown."""

    phase: str
    priced: int
    total: int
    best_step_s: float | None


@dataclass(frozen=True)
class Result:
    """The best strategies, best first, what was looked at, and the full estimate of the winner."""

    candidates: list[Candidate]
    record: SearchRecord
    estimate: Estimate


@dataclass
class Counts:
    """What became of the strategies a search met."""

    covered: int = 0
    illegal: Counter[str] = field(default_factory=Counter)
    infeasible: int = 0
    feasible: int = 0
    nearest: Candidate | None = None
    refused: Strategy | None = None
    """One strategy that was refused, to explain the rule by."""

    def record(self, engine: str, proven: bool) -> SearchRecord:
        return SearchRecord(
            engine=engine, covered=self.covered, illegal=dict(self.illegal), infeasible=self.infeasible,
            feasible=self.feasible, gap_frac=0.0, proven=proven,
        )  # fmt: skip


class Board:
    """The best ``top`` candidates; ties go to the simpler strategy, then to the smaller text of it."""

    def __init__(self, top: int) -> None:
        self.top, self.candidates = top, list[Candidate]()

    @property
    def threshold_s(self) -> float:
        """Step time that a candidate must not exceed to be of interest."""
        return self.candidates[-1].step_s if len(self.candidates) >= self.top else np.inf

    @property
    def best_s(self) -> float | None:
        return self.candidates[0].step_s if self.candidates else None

    def add(self, candidate: Candidate) -> None:
        self.candidates.append(candidate)
        self.candidates.sort(key=_rank)
        del self.candidates[self.top :]


def _rank(c: Candidate) -> tuple[float, int, str]:
    return (float(f"{c.step_s:.9g}"), complexity(c.strategy), c.strategy.model_dump_json())


@dataclass(frozen=True)
class Filtered:
    """The feasible rows of a group with their lower bounds."""

    table: StrategyTable
    bound_s: np.ndarray
    device_bytes: np.ndarray


def tune(
    job: Job,
    backend_name: str,
    pins: Pins,
    *,
    engine: Engine = "enumerate",
    trials: int = 200,
    seed: int = 0,
    study_path: Path | None = None,
    top: int = 20,
    on_progress: Callable[[Progress], None] | None = None,
) -> Result:
    """The best strategies of a job on a backend.

    Args:
        job: Model, cluster and workload.
        backend_name: native, megatron, torchtitan, deepspeed or accelerate.
        pins: What the user fixed.
        engine: ``enumerate`` prices everything and proves its answer; ``optuna`` samples coarse knobs.
        trials: Trials of the optuna engine.
        seed: Of the optuna engine; the other has no randomness.
        study_path: Journal file that keeps an Optuna study of the search; an existing one of the same job is resumed.
        top: How many strategies to return.
        on_progress: Called now and then.

    Raises:
        UsageError: The pins contradict each other, or rule out every strategy.
        NoPlanError: Legal strategies exist, but none fits in memory.
    """
    pins.check()
    space = Space(job, backend(backend_name), pins)
    for _, reason in space.backend.refusals(job):
        raise UsageError(reason)
    report = on_progress or (lambda progress: None)
    counts, board = Counts(), Board(top)
    if engine == "optuna":
        from trainplan.planner.study import sample  # optuna takes half a second to import

        sample(space, board, counts, trials=trials, seed=seed, path=study_path, report=report)
    else:
        enumerate_space(space, board, counts, report)
        if study_path is not None:
            from trainplan.planner.study import save_candidates

            save_candidates(space, board.candidates, study_path)
    if not board.candidates:
        raise _nothing(space, counts)
    best = estimate(job, backend_name, board.candidates[0].strategy, pins.memory_limit_bytes)
    return Result(board.candidates, counts.record(engine, engine == "enumerate"), best)


def enumerate_space(space: Space, board: Board, counts: Counts, report: Callable[[Progress], None]) -> None:
    """Fill the board with the best of the whole space: bounds first, then simulation in the order of the bounds."""
    heap: list[tuple[float, int, Filtered]] = []
    for group in space.groups():
        rows = feasible_rows(space, group, counts)
        if rows is not None:
            heapq.heappush(heap, (float(rows.bound_s.min()), len(heap), rows))
        report(Progress("pricing", counts.covered, 0, None))
    simulated = 0
    while heap:
        bound, _, rows = heapq.heappop(heap)
        if bound > board.threshold_s:
            break
        simulated += simulate_rows(space, rows, board)
        report(Progress("simulating", simulated, counts.feasible, board.best_s))


def feasible_rows(space: Space, group: Group, counts: Counts) -> Filtered | None:
    """The legal rows of a group that fit in memory, with lower bounds; None if there is none. Counts what it drops."""
    counts.covered += group.size
    mask, refused = space.backend.legal_mask(space.job, group.table)
    counts.illegal.update(refused)
    table = group.table.take(np.flatnonzero(mask))
    if not table.size:
        counts.refused = counts.refused or group.table.row(0)
        return None
    priced = price(space.job, space.backend.name, table)
    device = np.broadcast_to(priced.device_bytes, table.shape)
    fits = device <= (space.pins.memory_limit_bytes or memory_limit(space.job))
    counts.infeasible += int(np.count_nonzero(~fits))
    counts.feasible += int(np.count_nonzero(fits))
    if not fits.any():
        _remember_nearest(table, device, counts)
        return None
    kept = np.flatnonzero(fits)
    return Filtered(table.take(kept), np.broadcast_to(priced.bound_s, table.shape)[kept], device[kept])


def simulate_rows(space: Space, rows: Filtered, board: Board) -> int:
    """Simulate the rows of a group that may still enter the board; returns how many."""
    order, done = np.argsort(rows.bound_s, kind="stable"), 0
    while done < len(order) and rows.bound_s[order[done]] <= board.threshold_s:
        batch = order[done : done + BATCH]
        table = rows.table.take(batch)
        step_s = np.broadcast_to(price(space.job, space.backend.name, table).step_s(), table.shape)
        for i in np.flatnonzero(step_s <= board.threshold_s):
            if step_s[i] <= board.threshold_s:
                board.add(Candidate(table.row(int(i)), float(step_s[i]), float(rows.device_bytes[batch[i]])))
        done += len(batch)
    return done


def _remember_nearest(table: StrategyTable, device: np.ndarray, counts: Counts) -> None:
    least = int(np.argmin(device))
    if counts.nearest is None or device[least] < counts.nearest.device_bytes:
        counts.nearest = Candidate(table.row(least), np.inf, float(device[least]))


def _nothing(space: Space, counts: Counts) -> Exception:
    """The error that says why no strategy is left."""
    if counts.nearest is not None:
        limit = space.pins.memory_limit_bytes or memory_limit(space.job)
        s = counts.nearest.strategy
        return NoPlanError(
            f"none of {counts.infeasible} legal strategies fits: the smallest (tp={s.tp} pp={s.pp} dp={s.dp} sharding "
            f"{s.sharding} recompute {s.recompute} micro_batch_size={s.micro_batch_size}) needs "
            f"{counts.nearest.device_bytes / 2**30:.1f} of {limit / 2**30:.1f} GiB. Use more devices, a shorter "
            "--seq-len, or fewer pins."
        )
    if counts.covered:
        rules = ", ".join(f"{name} {n}" for name, n in counts.illegal.most_common(4))
        broken = space.backend.legal(space.job, counts.refused) if counts.refused else ()
        return NoPlanError(
            f"none of {counts.covered} strategies is legal on {space.backend.name} ({rules}). "
            f"{broken[0].reason if broken else 'Loosen the pins or change the cluster.'}"
        )
    return UsageError(_contradiction(space))


def _contradiction(space: Space) -> str:
    """Why the pins leave no strategy at all: no degrees that fill the cluster, or no batch split."""
    job, values = space.job, space.pins.values
    degrees = {
        name: values[name]
        for name in ("tp", "pp", "cp", "dp_replicate", "dp_shard", "micro_batch_size", "grad_accum")
        if name in values
    }
    stated = ", ".join(f"{name} in {list(v)}" for name, v in degrees.items()) or "the space"
    batch = job.workload.global_batch_size
    dp = job.cluster.num_gpus
    if not degrees and batch % dp:  # only a backend without tp, pp and cp leaves nothing then
        near = sorted({max(dp, batch // dp * dp), (batch // dp + 1) * dp})
        return (
            f"global_batch_size={batch} is not divisible by the {dp} data parallel ranks that {space.backend.name} "
            f"makes of {job.cluster.name}: ranks would train different batches. Use {' or '.join(map(str, near))}."
        )
    return (
        f"{stated} leaves no strategy: tp*pp*cp*dp must be {job.cluster.num_gpus} ({job.cluster.name}) and "
        f"micro_batch_size*grad_accum*dp must be global_batch_size={job.workload.global_batch_size}. "
        "Change a pin or the batch."
    )
