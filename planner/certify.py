"""Which strategies of a family may be among the best, and how sure is that? Bounds, simulation and cuts.

A family's groups are bounded as grids; what may still win is priced strategy by strategy, in the order of the bounds:
does it fit, and what does the simulation say? The critical path of a simulated strategy is a *cut*: as a sum of
durations it bounds every strategy of the same graph, so few are ever simulated. Nothing is left out but what a bound
excludes. `trainplan.planner.rounds` takes the families in the order of a bound that knows only their meshes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from trainplan.costmodel.bounds import lower_bound_s
from trainplan.costmodel.compiled import load
from trainplan.costmodel.durations import durations
from trainplan.costmodel.graph import Graph
from trainplan.costmodel.job import Job
from trainplan.costmodel.layout import Layout, layout
from trainplan.costmodel.memory import least_device_bytes, own_parameters, peak_device_bytes
from trainplan.costmodel.simulate import critical_path
from trainplan.costmodel.step import memory_limit
from trainplan.costmodel.strategy import StrategyTable
from trainplan.costmodel.units import Units
from trainplan.costmodel.work import Shapes
from trainplan.planner.board import NEAREST, Board, Candidate, Counts
from trainplan.planner.space import Family, Group, Space, count_true
from trainplan.planner.unit_book import UnitBook

CHUNK = 128
"""Strategies of a group that are first looked at one by one, in the order of their bounds; then twice as many, ..."""
COMPILE_FROM = 250_000
"""Levels of graphs, played one strategy at a time, that take NumPy as long as loading compiled code does: a second."""
ROUNDING = 1e-9
"""Share of a step by which sums in another order may differ."""


class Cuts:
    """Critical paths of every graph, as counts of its classes."""

    def __init__(self) -> None:
        self._of: dict[object, np.ndarray] = {}

    def bound_s(self, graph: Graph, columns: np.ndarray) -> np.ndarray:
        """The longest known path for each row of durations [rows, classes]; 0 without any."""
        known = self._of.get(graph.key)
        return np.zeros(len(columns)) if known is None else np.asarray((columns @ known.T).max(axis=1))

    def add(self, graph: Graph, counts: np.ndarray) -> None:
        """Remember a path."""
        known = self._of.get(graph.key)
        row = counts[None].astype(float)
        self._of[graph.key] = row if known is None else np.concatenate([known, row])


@dataclass(frozen=True)
class Rows:
    """Strategies of one group that recompute the same layers, their units, and a bound of each."""

    table: StrategyTable
    units: Units
    bound_s: np.ndarray
    place: Layout


@dataclass
class Certifier:
    """A search of families.

    Attributes:
        space: All strategies.
        book: The units of its meshes.
        board: Where the best are put.
        counts: What became of the strategies.
        gap_frac: Nothing is looked for that is better than the last of the board by no more than this share.
        cuts: Paths that are known already.
        log: The best of what was simulated, whether or not it came on the board.
    """

    space: Space
    book: UnitBook
    board: Board
    counts: Counts
    gap_frac: float = 0.0
    cuts: Cuts = field(default_factory=Cuts)
    log: Board = field(default_factory=lambda: Board(0))
    _levels: int = 0
    """Levels of graphs that were simulated."""

    @property
    def job(self) -> Job:
        """Model, cluster and workload."""
        return self.space.job

    def search(self, family: Family, mesh_bound_s: np.ndarray) -> None:
        """Put the best of a family on the board; ``mesh_bound_s`` is a bound of each of its meshes."""
        meshes = family.take(np.flatnonzero(mesh_bound_s < self.limit_s))
        for group in self.space.groups(meshes):
            self._search(group)

    @property
    def limit_s(self) -> float:
        """A bound from which on a strategy is of no interest."""
        return limit_s(self.board, self.gap_frac)

    @property
    def _memory_limit(self) -> float:
        return self.space.pins.memory_limit_bytes or memory_limit(self.job)

    def _too_large(self, group: Group, rows: np.ndarray, device: np.ndarray) -> None:
        """Count strategies that do not fit whatever their workspace."""
        if not rows.any():
            return
        self.counts.infeasible += count_true(rows, group.table.shape)
        at = np.where(rows, device, np.inf)
        self._remember_nearest(group.table, np.broadcast_to(at, group.table.shape).ravel())

    def _search(self, group: Group) -> None:
        """Simulate the strategies of a group that may enter the board."""
        legal, refused = self.space.backend.legal_mask(self.job, group.table, group.canonical)
        self.counts.illegal.update(refused)
        if not legal.any():
            self.counts.refused = self.counts.refused or next(group.strategies(), None)
            return
        group, legal = _meshes_with(group, legal)
        first = group.table.row(0)
        place = layout(self.job, first)
        least = least_device_bytes(
            self.job, self.book.stack, group.table, place, first.grad_accum, first.schedule
        )  # fmt: skip
        room = legal & (least <= self._memory_limit)
        self._too_large(group, legal & ~room, least)
        if not room.any():
            return
        group, room = _meshes_with(group, room)
        units, shape = self.book.units(group), group.table.shape
        bound_s = np.where(room, lower_bound_s(self.job, self.book.stack, group.table, units), np.inf)
        bound_s = np.broadcast_to(bound_s, shape).ravel()
        order = np.flatnonzero(bound_s < self.limit_s)
        order = order[np.argsort(bound_s[order], kind="stable")]
        start, size = 0, CHUNK
        while start < len(order) and bound_s[order[start]] < self.limit_s:
            for rows in _by_layers(self.job, group, units, bound_s, order[start : start + size]):
                self._simulate(rows)
            start, size = start + size, 2 * size

    def _simulate(self, rows: Rows) -> None:
        """Those that fit, the least bound first, until no bound is of interest."""
        first = rows.table.row(0)
        device = np.broadcast_to(
            peak_device_bytes(
                self.job, self.book.stack, rows.table, rows.place, first.grad_accum, first.schedule
            ),
            rows.table.shape,
        )  # fmt: skip
        fits = device <= self._memory_limit
        self.counts.infeasible += int(np.count_nonzero(~fits))
        self.counts.feasible += int(np.count_nonzero(fits))
        if not fits.all():
            self._remember_nearest(rows.table, device)
        if not fits.any():
            return
        shapes = Shapes(self.job, rows.table, self.book.stack)
        own = [own_parameters(shapes, rows.place, [stage]) for stage in range(rows.place.num_stages)]
        work = durations(first, self.book.stack, rows.place, rows.units, own)
        graph = work.graph
        columns = graph.classes.durations(work.seconds)
        columns = np.broadcast_to(columns, (len(fits), columns.shape[-1]))
        bound = np.where(fits, np.maximum(rows.bound_s, self.cuts.bound_s(graph, columns)), np.inf)
        while True:
            best = int(np.argmin(bound))
            if bound[best] >= self.limit_s:
                return
            step_s, path = self._play(graph, columns[best])
            self.cuts.add(graph, path)
            if step_s < self.log.threshold_s:
                self.log.add(Candidate(rows.table.row(best), step_s, float(device[best])))
            for row in np.flatnonzero((columns == columns[best]).all(axis=1) & (bound < np.inf)):
                if step_s <= self.board.threshold_s * (1 + ROUNDING):
                    self.board.add(Candidate(rows.table.row(int(row)), step_s, float(device[row])))
                bound[row] = np.inf
            bound = np.maximum(bound, columns @ path.astype(float))

    def _play(self, graph: Graph, durations: np.ndarray) -> tuple[float, np.ndarray]:
        """Seconds and critical path of one strategy; compiled once that pays."""
        self.counts.simulated += 1
        self._levels += len(graph.level_start)
        if self._levels >= COMPILE_FROM:
            load()
        return critical_path(graph, durations)

    def _remember_nearest(self, table: StrategyTable, device: np.ndarray) -> None:
        least = int(np.argmin(device))
        if len(self.counts.nearest) < NEAREST or device[least] < self.counts.nearest[-1].device_bytes:
            self.counts.too_large(Candidate(table.row(least), np.inf, float(device[least])))


def limit_s(board: Board, gap_frac: float) -> float:
    """A bound from which on a strategy is of no interest to a board."""
    return board.threshold_s * (1 + ROUNDING - gap_frac)


def rows_of(job: Job, book: UnitBook, group: Group, flat: np.ndarray) -> Iterator[Rows]:
    """The strategies at flat indices of a group's grid."""
    units = book.units(group)
    bound_s = np.broadcast_to(lower_bound_s(job, book.stack, group.table, units), group.table.shape).ravel()
    yield from _by_layers(job, group, units, bound_s, flat)


def _by_layers(job: Job, group: Group, units: Units, bound_s: np.ndarray, flat: np.ndarray) -> Iterator[Rows]:
    """The strategies at flat indices, by the layers that they recompute."""
    table, shape = group.table, group.table.shape
    where = np.unravel_index(flat, shape)
    layers, recompute = (np.broadcast_to(table[n], shape)[where] for n in ("recompute_layers", "recompute"))
    split = layers * 2 + (recompute > 0)
    for value in np.unique(split):
        some = flat[split == value]
        rows = table.take(some)
        yield Rows(rows, units.take(shape, some), bound_s[some], layout(job, rows.row(0)))


def _meshes_with(group: Group, rows: np.ndarray) -> tuple[Group, np.ndarray]:
    """The meshes of a group that have some of ``rows``, and those rows."""
    some = np.asarray(rows.any(axis=tuple(range(1, rows.ndim))))
    if some.size == 1 or some.all():  # one mesh, or rows that do not depend on it
        return group, rows
    meshes = np.flatnonzero(some)
    return group.take(meshes), rows[meshes]
