"""What do the units of a job take on every mesh? Priced once and looked up by every group of a search."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from trainplan.costmodel.job import Job
from trainplan.costmodel.rates import Rates
from trainplan.costmodel.stacks import STACKS, Stack
from trainplan.costmodel.step import table_rates
from trainplan.costmodel.strategy import StrategyTable
from trainplan.costmodel.units import (
    Computed,
    ComputedUnits,
    SharedUnits,
    Units,
    computed_units,
    joined_units,
    shared_units,
)
from trainplan.costmodel.work import Column
from trainplan.planner.space import Family, Group, Space

MESH = ("tp", "cp", "ep", "etp", "micro_batch_size")
"""Coarse knobs that computation depends on."""


@dataclass(frozen=True)
class Page:
    """Computation of every mesh in one precision, and the least of each mesh.

    ``fewest``: seconds of (a layer's forward, its backward, head and loss) on each mesh at the best of all other knobs.
    """

    rates: Rates
    computed: ComputedUnits
    least_forward: Column
    least_backward: Column
    least_head: Column


class UnitBook:
    """The units of a space on all of its meshes."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.job: Job = space.job
        self.stack: Stack = STACKS[space.backend.name]
        meshes = [np.stack([family.coarse[name] for name in MESH]) for family in space.families()]
        every = np.concatenate(meshes, axis=1) if meshes else np.ones((len(MESH), 0), dtype=np.int64)
        self._meshes = np.unique(every, axis=1)
        self._place = {tuple(mesh): i for i, mesh in enumerate(self._meshes.T.tolist())}
        self._pages: dict[int, Page] = {}
        self._shared: dict[tuple[int, int, int], SharedUnits] = {}
        for family in islice(space.families(), 1):
            for group in space.groups(family):
                self._page(group.table)

    def within(self, space: Space) -> UnitBook:
        """The book of a part of the space, with the computation that is known already."""
        part = copy(self)
        part.space, part._shared = space, {}
        return part

    def rows(self, family: Family) -> np.ndarray:
        """Where the book has each mesh of a family."""
        columns = np.stack([family.coarse[name] for name in MESH], axis=1).tolist()
        return np.array([self._place[tuple(mesh)] for mesh in columns], dtype=np.int64)

    def least_s(self, rows: np.ndarray) -> tuple[Column, Column, Column]:
        """Seconds of a mean layer's forward, its backward, and the head on some meshes, at the best of all knobs."""
        pages = self._pages.values()
        forward, backward, head = (
            np.minimum.reduce([getattr(page, name) for page in pages])[rows]
            for name in ("least_forward", "least_backward", "least_head")
        )
        return forward, backward, head

    def _page(self, table: StrategyTable) -> Page:
        """Computation in the precision of a group's grid."""
        key = int(table["precision"])
        if key not in self._pages:
            self._pages[key] = self._priced(table)
        return self._pages[key]

    def units(self, group: Group) -> Units:
        """The units of a group; columns broadcast against its grid."""
        page, rows = self._page(group.table), self.rows(group.family)

        shared = _rows_of(self._traffic(group, page.rates), group.family.place)
        return joined_units(
            self.job, self.stack, group.table, page.rates, page.computed, shared, lambda column: _rows(column, rows)
        )

    def _traffic(self, group: Group, rates: Rates) -> SharedUnits:
        """Data-parallel traffic of all meshes of a pipeline degree; groups that differ in their pipeline share it."""
        table = group.table
        key = (int(table["pp"]), int(table["grad_accum"]), int(table["sharding"]))
        if key not in self._shared:
            meshes = self.space.meshes(key[0], key[1])
            shape = (-1,) + (1,) * (len(table.shape) - 1)
            columns = {**table.columns, **{name: of.reshape(shape) for name, of in meshes.items()}}
            self._shared[key] = shared_units(self.job, self.stack, replace(table, columns=columns), rates)
        return self._shared[key]

    def _priced(self, table: StrategyTable) -> Page:
        ndim = len(table.shape)
        columns = dict(table.columns)
        for name, column in zip(MESH, self._meshes, strict=True):
            columns[name] = column.reshape((-1,) + (1,) * (ndim - 1))
        for name in ("dp_replicate", "dp_shard"):  # computation does not depend on them
            columns[name] = np.ones((), dtype=np.int64)
        grid = replace(table, columns=columns)
        rates = table_rates(self.job, self.stack, grid)
        computed = computed_units(self.job, self.stack, grid, rates)
        kinds = self.job.model.layer_kinds()
        forward = sum((kinds.count(k) * _least(of, "forward") for k, of in computed.layers.items()), start=np.zeros(()))
        backward = sum(
            (kinds.count(k) * _least(of, "backward") for k, of in computed.layers.items()), start=np.zeros(())
        )
        size = len(self._meshes.T)
        ends = _least(computed.head, "forward") + _least(computed.head, "backward")
        return Page(
            rates,
            computed,
            np.broadcast_to(forward / len(kinds), size),
            np.broadcast_to(backward / len(kinds), size),
            np.broadcast_to(ends, size),
        )


def _rows(column: Column, rows: np.ndarray) -> Column:
    """Some places of a column's first axis."""
    return column if column.ndim == 0 or column.shape[0] == 1 else column[rows]


def _rows_of(shared: SharedUnits, rows: np.ndarray) -> SharedUnits:
    def pair(of: tuple[Column, Column]) -> tuple[Column, Column]:
        return _rows(of[0], rows), _rows(of[1], rows)

    return SharedUnits(
        {kind: pair(of) for kind, of in shared.layers.items()}, pair(shared.embedding), pair(shared.head)
    )


def _least(of: Computed, phase: str) -> Column:
    """Seconds of a unit on each mesh at the best of all other knobs, without recomputation."""
    forward = sum((before for before, _ in of.inline.values()), start=of.forward)
    backward = sum((after for _, after in of.inline.values()), start=of.input_grad + of.weight_grad)
    seconds = np.asarray(forward if phase == "forward" else backward)
    return seconds if seconds.ndim == 0 else seconds.min(axis=tuple(range(1, seconds.ndim)))
