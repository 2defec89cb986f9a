"""What is the graph of a step made of?

A step is a fixed graph. Each node is a piece of work on one stream of one rank; it starts when its at most three
predecessors have ended. Durations belong to *classes*: a kind of work of one unit (a stage of a pipeline, a kind of
layer of a chain), whatever the micro-batch. `trainplan.costmodel.graph` builds graphs, `trainplan.costmodel.simulate`
plays them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainplan.costmodel.compiled import Engine, compiled, use_numba
from trainplan.costmodel.orders import Ints

Floats = NDArray[np.float64]


class Work(IntEnum):
    """Kinds of work. The first four are `trainplan.costmodel.orders.Kind`."""

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRAD = 2
    WEIGHT_GRAD = 3
    SEND_FORWARD = 4  # the stage's output, to the next stage
    SEND_BACKWARD = 5  # the gradient of the stage's input, to the stage before
    GATHER = 6  # parameters, kept for the step or for a while
    GATHER_FORWARD = 7  # parameters for one forward
    GATHER_BACKWARD = 8  # parameters for one backward
    REDUCE = 9  # gradients
    FINISH = 10  # work on the compute stream that needs the reduced gradients, as the optimizer's


_STREAMS = {
    Work.SEND_FORWARD: "send forward",
    Work.SEND_BACKWARD: "send backward",
    Work.GATHER: "gather",
    Work.GATHER_FORWARD: "gather",
    Work.GATHER_BACKWARD: "gather",
    Work.REDUCE: "reduce",
}  # all else is on the compute stream


@dataclass(frozen=True, slots=True)
class Classes:
    """Names of the duration classes: for each kind of work in the graph, one column per unit.

    A send belongs to the stage that sends. Columns
    of a kind lie side by side, units ascending; some may have no node, as the last stage's SEND_FORWARD.
    """

    kinds: tuple[Work, ...]
    num_units: int

    def __len__(self) -> int:
        return len(self.kinds) * self.num_units

    def column(self, kind: Work, unit: int) -> int:
        """The column of a kind of work of one unit."""
        if not 0 <= unit < self.num_units:
            raise IndexError(f"unit {unit} of {self.num_units}")
        return self.kinds.index(kind) * self.num_units + unit

    def columns(self, kind: Work) -> slice:
        """The columns of a kind of work, [num_units]; empty if the graph has none of it."""
        if kind not in self.kinds:
            return slice(0, 0)
        start = self.kinds.index(kind) * self.num_units
        return slice(start, start + self.num_units)

    def name(self, column: int) -> tuple[Work, int]:
        """The kind and unit of a column."""
        place, unit = divmod(column, self.num_units)
        return self.kinds[place], unit

    def durations(self, seconds: Mapping[Work, ArrayLike]) -> Floats:
        """Seconds by kind put in the graph's columns.

        Args:
            seconds: For each kind, an array that broadcasts to [..., num_units]: a scalar is the same everywhere,
                [rows, num_units] prices many strategies, [rows, 1] makes units alike. It may hold kinds that the graph
                has not; they are left out.

        Returns:
            [..., classes], float64.

        Raises:
            KeyError: A kind of the graph is missing.
        """
        missing = [kind.name for kind in self.kinds if kind not in seconds]
        if missing:
            raise KeyError(f"no seconds for {', '.join(missing)}, which this graph has")
        blocks = np.broadcast_arrays(np.empty(self.num_units), *(np.asarray(seconds[k], float) for k in self.kinds))
        return np.concatenate(blocks[1:], axis=-1)


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in an order in which every node comes after its predecessors, level by level.

    Attributes:
        key: What it was built from, a key of `trainplan.costmodel.graph`.
        classes: Names of the duration classes.
        cls: [nodes], the class of each node.
        preds: [nodes, 3], nodes that it waits for, -1 for none.
        level_start: [levels + 1]; nodes of a level wait only for nodes of earlier ones.
        unit: [nodes], the stage (or place in the chain).
        micro_batch: [nodes], -1 where it is once per step.
        rank: [nodes], the pipeline rank.
        shared_stream: Gathers and reduces of a rank take turns on one stream.
    """

    key: Hashable
    classes: Classes
    cls: Ints
    preds: Ints
    level_start: Ints
    unit: NDArray[np.int16]
    micro_batch: Ints
    rank: NDArray[np.int16]
    shared_stream: bool

    def __len__(self) -> int:
        return len(self.cls)

    @property
    def num_ranks(self) -> int:
        return int(self.rank.max()) + 1

    def stream(self, kind: Work) -> str:
        """The stream of a rank that runs this kind of work."""
        stream = _STREAMS.get(kind, "compute")
        return "communication" if self.shared_stream and stream in ("gather", "reduce") else stream

    @cached_property
    def class_index(self) -> dict[tuple[Work, int], int]:
        """The column of each (kind, unit)."""
        return {self.classes.name(column): column for column in range(len(self.classes))}

    @cached_property
    def node_counts(self) -> Ints:
        """How many nodes of each class a rank runs per step, [ranks, classes]."""
        flat = np.bincount(
            self.rank * np.int64(len(self.classes)) + self.cls, minlength=self.num_ranks * len(self.classes)
        )
        return flat.reshape(self.num_ranks, -1).astype(np.int32)

    @cached_property
    def digest(self) -> str:
        """Changes whenever the classes or edges do: what is kept for a graph is valid only with the same digest."""
        head = repr((self.classes.kinds, self.classes.num_units, len(self))).encode()
        return hashlib.sha256(head + self.cls.tobytes() + self.preds.tobytes()).hexdigest()


class Draft:
    """A graph being drawn: first all nodes are added, then edges set, then it is sorted."""

    def __init__(self) -> None:
        self._blocks: list[tuple[NDArray[Any], ...]] = []
        self._size = 0
        self.preds: Ints = np.empty((0, 3), np.int32)

    def add(
        self,
        work: Ints | int,
        column_unit: Ints | int,
        unit: Ints,
        micro_batch: Ints | int,
        rank: NDArray[np.integer[Any]] | int,
    ) -> Ints:
        """New nodes, one per ``unit``; returns their numbers. ``column_unit`` names the class, ``unit`` the node."""
        like = np.zeros(len(unit), np.int32)
        self._blocks.append((like + work, like + column_unit, unit, like + micro_batch, like + rank))
        first, self._size = self._size, self._size + len(unit)
        return np.arange(first, self._size, dtype=np.int32)

    def start_edges(self) -> Ints:
        """All nodes are there: the predecessors, [nodes, 3], to be filled."""
        self.preds = np.full((self._size, 3), -1, np.int32)
        return self.preds

    def graph(self, key: Hashable, num_units: int, engine: Engine, shared_stream: bool = False) -> Graph:
        """The sorted graph.

        Raises:
            ValueError: Some nodes wait for each other.
        """
        work, column_unit, unit, micro_batch, rank = (
            np.concatenate(parts) for parts in zip(*self._blocks, strict=True)
        )
        classes = Classes(tuple(Work(kind) for kind in np.flatnonzero(np.bincount(work)).tolist()), num_units)
        place = np.zeros(len(Work), np.int32)
        place[list(classes.kinds)] = np.arange(len(classes.kinds))
        depth = _depths_of(self.preds, engine)
        if depth is None:
            raise ValueError(f"the tasks of {key} wait for each other")
        levels = int(depth.max())
        narrow = np.int16 if levels < 2**15 else np.int32  # numpy sorts 16 bits by radix, four times as fast
        order = np.argsort(depth.astype(narrow), kind="stable").astype(np.int32)
        position = np.full(self._size + 1, -1, np.int32)  # the last stays -1, where a predecessor of -1 looks
        position[order] = np.arange(self._size, dtype=np.int32)
        arrays = {
            "cls": (place.take(work) * np.int32(num_units) + column_unit).take(order),
            "preds": position.take(self.preds.take(order, axis=0), mode="wrap"),
            "level_start": np.cumsum(np.bincount(depth, minlength=levels + 1)).astype(np.int32),
            "unit": unit.astype(np.int16).take(order),
            "micro_batch": micro_batch.take(order),
            "rank": rank.astype(np.int16).take(order),
        }
        for array in arrays.values():
            array.flags.writeable = False  # graphs are cached and shared
        return Graph(key=key, classes=classes, shared_stream=shared_stream, **arrays)


def _depths_of(preds: Ints, engine: Engine) -> NDArray[np.int32] | None:
    """1 + the depth of the deepest predecessor, [nodes]; None if some wait for each other."""
    size = len(preds)
    if use_numba(engine, size):
        depth, stack = np.zeros(size, np.int32), np.empty(size, np.int32)
        return depth if compiled(_depths)(preds.ravel(), depth, stack) else None
    depths = [0] * size  # lists: Python reads them three times as fast as arrays
    return np.array(depths, np.int32) if _depths(preds.ravel().tolist(), depths, [0] * size) else None


def _depths(preds: Any, depth: Any, stack: Any) -> bool:
    """Fill ``depth`` (all 0) by a walk to the predecessors; False on a cycle. Plain indexing: numba compiles it."""
    for root in range(len(depth)):
        if depth[root] > 0:
            continue
        top = 0
        stack[0] = root
        while top >= 0:
            node = stack[top]
            deepest = 0
            unknown = -1
            for edge in range(3 * node, 3 * node + 3):
                pred = preds[edge]
                if pred >= 0:
                    if depth[pred] <= 0:
                        unknown = pred
                        break
                    if depth[pred] > deepest:
                        deepest = depth[pred]
            if unknown < 0:
                depth[node] = deepest + 1
                top -= 1
            elif depth[unknown] < 0:
                return False
            else:
                depth[node] = -1  # on the stack: to come back here means a cycle
                top += 1
                stack[top] = unknown
    return True


def chained(nodes: Ints, rank: NDArray[Any]) -> Ints:
    """For nodes in the order of their streams, the one before on the same rank's stream; -1 for the first."""
    before = np.concatenate(([-1], nodes[:-1])).astype(np.int32)
    before[1:][rank[1:] != rank[:-1]] = -1
    return before
