"""When does every piece of work of a step run, and how long is the step?

A node starts when its predecessors have ended, so a step takes as long as the longest path through its graph. Time is
therefore monotone in every duration, and the counts of any path's classes are a lower bound linear in the durations.

Durations are [classes] or [rows, classes] in seconds, float64, none negative: `Classes.durations` makes them. The
compiled and the NumPy engine add and compare the same numbers in the same order, so their results are equal bit by bit.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainplan.costmodel.compiled import Engine, compiled, use_numba
from trainplan.costmodel.dag import Floats, Graph, Work

COMPUTE = (Work.FORWARD, Work.BACKWARD, Work.INPUT_GRAD, Work.WEIGHT_GRAD, Work.FINISH)
_LANES = 16  # rows played side by side: two AVX-512 or four AVX2 registers of float64


class Span(NamedTuple):
    """When a piece of work ran."""

    rank: int
    stream: str
    name: str
    start_s: float
    end_s: float


def finish_times(graph: Graph, durations: ArrayLike, engine: Engine = "auto") -> Floats:
    """Seconds from the start of the step to the end of each node, [nodes], for one row of durations [classes]."""
    row = _checked(graph, durations, ndim=1)
    if use_numba(engine, len(graph)):
        ends = np.zeros(len(graph) + 1)
        compiled(_play)(graph.cls, graph.preds, row, ends)
        return ends[:-1]
    return _play_levels(graph, row[None, :])[:, 0]


def step_seconds(graph: Graph, durations: ArrayLike, engine: Engine = "auto", threads: int = 1) -> Floats:
    """Seconds of the whole step, [rows], for durations [rows, classes].

    Args:
        graph: What is played.
        durations: Seconds per class.
        engine: Which code plays it; the result is the same.
        threads: Threads that share the rows (compiled engine only).
    """
    rows = _checked(graph, durations, ndim=2)
    if not use_numba(engine, len(graph) * len(rows)):
        return np.concatenate(
            [np.empty(0), *(_play_levels(graph, part).max(axis=0) for part in _parts(rows, _rows_at_once(graph)))]
        )
    seconds = np.empty(len(rows))
    _spread(graph, rows, seconds, threads)
    return seconds


def critical_path_counts(graph: Graph, durations: ArrayLike, engine: Engine = "auto") -> NDArray[np.int32]:
    """The counts of `critical_path`."""
    return critical_path(graph, durations, engine)[1]


def critical_path(graph: Graph, durations: ArrayLike, engine: Engine = "auto") -> tuple[float, NDArray[np.int32]]:
    """Seconds of the step, and how often each class is on its longest path, [classes], for durations [classes].

    ``counts @ durations`` is the step's time up to rounding, ``counts @ other`` never more than the time with other
    durations of the same graph. ``counts`` is also the derivative of the step's time by each class's duration (one of
    them where paths tie). Of tied ends the first node wins, of tied predecessors the first column.
    """
    ends = finish_times(graph, durations, engine)
    counts = np.zeros(len(graph.classes), np.int32)
    count_back = compiled(_count_back) if use_numba(engine, len(graph)) else _count_back
    last = int(np.argmax(ends))
    count_back(graph.cls, graph.preds, ends, last, counts)
    return float(ends[last]), counts


def busy_seconds(graph: Graph, durations: ArrayLike) -> Floats:
    """Seconds that the compute stream of each rank works, [..., ranks], for durations [..., classes].

    A rank's bubble is what is left of the step.
    """
    counts = graph.node_counts.astype(float)
    for kind in set(graph.classes.kinds) - set(COMPUTE):
        counts[:, graph.classes.columns(kind)] = 0.0
    return np.asarray(np.asarray(durations, float) @ counts.T)


def spans(graph: Graph, durations: ArrayLike, engine: Engine = "auto") -> list[Span]:
    """The timeline, for one row of durations [classes]; nodes that take no time are left out.

    Names are kind, stage (or place in the chain) and micro-batch, as "forward 3 micro-batch 7".
    """
    row = _checked(graph, durations, ndim=1)
    ends = finish_times(graph, row, engine)
    starts = ends - row[graph.cls]
    timeline = []
    for node in np.flatnonzero(row[graph.cls] > 0).tolist():
        kind, _ = graph.classes.name(int(graph.cls[node]))
        name = f"{kind.name.lower().replace('_', ' ')} {graph.unit[node]}"
        if graph.micro_batch[node] >= 0:
            name += f" micro-batch {graph.micro_batch[node]}"
        timeline.append(Span(int(graph.rank[node]), graph.stream(kind), name, float(starts[node]), float(ends[node])))
    return timeline


def _checked(graph: Graph, durations: ArrayLike, ndim: int) -> Floats:
    rows = np.ascontiguousarray(durations, dtype=np.float64)
    if rows.ndim != ndim or rows.shape[-1] != len(graph.classes):
        wanted = ("rows, " if ndim == 2 else "") + str(len(graph.classes))
        raise ValueError(f"durations are {list(rows.shape)}, but this graph needs [{wanted}], one column per class")
    if not (rows >= 0).all():  # also catches what is not a number
        raise ValueError("durations must be numbers of seconds, none negative")
    return rows


def _play_levels(graph: Graph, rows: Floats) -> Floats:
    """Ends of all nodes, [nodes, rows]: all nodes of a level at once, for they wait only for earlier levels."""
    ends = np.zeros((len(graph) + 1, len(rows)))  # the last row stays 0: predecessor -1 reads it
    columns = np.ascontiguousarray(rows.T)
    bounds = graph.level_start.tolist()
    for start, stop in pairwise(bounds):
        first, second, third = graph.preds[start:stop].T
        ready = np.maximum(np.maximum(ends[first], ends[second]), ends[third])
        np.add(ready, columns[graph.cls[start:stop]], out=ends[start:stop])
    return ends[:-1]


def _rows_at_once(graph: Graph) -> int:
    """Rows whose ends fit in 64 MiB."""
    return max(1, 2**23 // len(graph))


def _parts(rows: Floats, size: int) -> list[Floats]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _play(cls: Any, preds: Any, row: Any, ends: Any) -> None:
    """Node by node; ``ends`` has one more place, 0, which predecessor -1 reads."""
    for node in range(len(cls)):
        ready = max(max(ends[preds[node, 0]], ends[preds[node, 1]]), ends[preds[node, 2]])
        ends[node] = ready + row[cls[node]]


def _count_back(cls: Any, preds: Any, ends: Any, node: Any, counts: Any) -> None:
    """Count the classes of the longest path to ``node``, from its end to its start."""
    while node >= 0:
        counts[cls[node]] += 1
        latest = preds[node, 0]
        for column in range(1, 3):
            pred = preds[node, column]
            if pred >= 0 and (latest < 0 or ends[pred] > ends[latest]):
                latest = pred
        node = latest


def _play_lanes(cls: Any, preds: Any, columns: Any, ends: Any, seconds: Any) -> None:
    """Blocks of rows side by side.

    columns: [blocks, classes, lanes]; ends: [nodes + 1, lanes], its last row 0; seconds: [blocks, lanes], all 0.
    """
    for block in range(len(columns)):
        for node in range(len(cls)):
            first, second, third = preds[node, 0], preds[node, 1], preds[node, 2]
            column = cls[node]
            for lane in range(_LANES):  # a constant, so that it is unrolled into vector registers
                ready = max(max(ends[first, lane], ends[second, lane]), ends[third, lane])
                end = ready + columns[block, column, lane]
                ends[node, lane] = end
                seconds[block, lane] = max(seconds[block, lane], end)


def _spread(graph: Graph, rows: Floats, seconds: Floats, threads: int) -> None:
    """Fill ``seconds`` of ``rows``, blocks of lanes shared out over threads."""
    blocks = -(-len(rows) // _LANES)
    padded = np.zeros((blocks * _LANES, rows.shape[1]))
    padded[: len(rows)] = rows
    columns = np.ascontiguousarray(padded.reshape(blocks, _LANES, rows.shape[1]).transpose(0, 2, 1))
    found = np.zeros((blocks, _LANES))

    play = compiled(_play_lanes)

    def run(share: slice) -> None:
        play(graph.cls, graph.preds, columns[share], np.zeros((len(graph) + 1, _LANES)), found[share])

    shares = [slice(blocks * i // threads, blocks * (i + 1) // threads) for i in range(threads)]
    if threads == 1:
        run(shares[0])
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, shares))
    seconds[:] = found.ravel()[: len(rows)]
