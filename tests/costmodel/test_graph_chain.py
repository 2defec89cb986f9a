"""The graph of a single rank against timelines worked out by hand and a replay of what FSDP2 issues."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainplan.costmodel.dag import Graph
from trainplan.costmodel.graph import ChainKey, Work, build_chain
from trainplan.costmodel.simulate import spans, step_seconds

NOTHING = dict.fromkeys(Work, 0.0)


def seconds(graph: Graph, **kinds: Any) -> float:
    """Step time with these durations per kind of work, the same for all units; 0 for the rest."""
    durations = graph.classes.durations(NOTHING | {Work[name.upper()]: value for name, value in kinds.items()})
    return float(step_seconds(graph, durations[None])[0])


def end_of(graph: Graph, name: str, **kinds: Any) -> float:
    durations = graph.classes.durations(NOTHING | {Work[kind.upper()]: value for kind, value in kinds.items()})
    return next(span.end_s for span in spans(graph, durations) if span.name == name)


def test_a_chain_without_communication_is_a_sum() -> None:
    """2 micro-batches of units A B B: 2 (1 + 2 + 2) forward, 2 (3 + 4 + 4) backward, 5 + 6 + 6 of finishing."""
    graph = build_chain(ChainKey((0, 1, 1), 2))
    assert seconds(graph, forward=[1, 2], backward=[3, 4], finish=[5, 6]) == 2 * 5 + 2 * 11 + 17


def test_gathers_of_a_chain_overlap_the_units_before() -> None:
    """4 units, gathers of 1 s before the first forward: 0-1, 1-2, 2-3, and the fourth when unit 1 starts, 4-5.

    Without prefetch every gather waits for the unit before it.
    """
    work = {"gather": 1, "forward": 3, "backward": 3}
    ahead = build_chain(ChainKey((0,) * 4, 1, gather="step"))
    assert seconds(ahead, **work) == 1 + 4 * 3 + 4 * 3
    assert [end_of(ahead, f"gather {unit}", **work) for unit in range(4)] == [1, 2, 3, 5]
    behind = build_chain(ChainKey((0,) * 4, 1, gather="step", prefetch_units=0))
    assert seconds(behind, **work) == 4 * (1 + 3) + 4 * 3


def test_slow_gathers_set_the_pace_of_a_chain() -> None:
    """4 units, gathers of 4 s, forwards of 1 s: the last gather ends at 16."""
    assert seconds(build_chain(ChainKey((0,) * 4, 1, gather="step")), gather=4, forward=1) == 17


@pytest.mark.parametrize(
    ("shared_stream", "reduce_buffers", "reduce_s", "expected"),
    [(True, 1, 1, 21), (True, 1, 4, 28), (False, 1, 4, 26), (False, 0, 4, 26)],
)
def test_backward_of_a_sharded_chain_by_hand(
    shared_stream: bool, reduce_buffers: int, reduce_s: int, expected: float
) -> None:
    """3 units, everything gathered twice, gathers 2 s, tasks 3 s, one micro-batch: F0 2-5, F1 5-8, F2 8-11.

    Backward gathers: unit 2 when F1 starts and the stream is free, 6-8; unit 1 when B2 starts, 11-13; unit 0 when B1
    starts. B2 11-14. On one stream unit 0's gather comes after unit 2's reduce:
    reduce 1 s: 14-15, gather 15-17, B1 14-17, B0 17-20, reduces 17-18 and 20-21.
    reduce 4 s: 14-18, gather 18-20, B1 14-17, B0 20-23, reduces 20-24 and 24-28.
    On two: gather 14-16, B0 waits for unit 2's reduce (14-18) unless two may be under way: 18-21 or 17-20; reduces
    14-18, 18-22, 22-26 either way.
    """
    key = ChainKey((0,) * 3, 1, "micro_batch", shared_stream=shared_stream, reduce_buffers=reduce_buffers)
    graph = build_chain(key)
    work = {"gather_forward": 2, "gather_backward": 2, "forward": 3, "backward": 3, "reduce": reduce_s}
    assert seconds(graph, **work) == expected
    end_of_last_backward = {(True, 1): 20, (True, 4): 23, (False, 4): 21 if reduce_buffers else 20}
    assert end_of(graph, "backward 0 micro-batch 0", **work) == end_of_last_backward[shared_stream, reduce_s]


def test_parameters_kept_for_the_backward_are_gathered_once_per_micro_batch() -> None:
    """2 units, 2 micro-batches, gathers 1 s, tasks 3 s: hidden but for the first."""
    graph = build_chain(ChainKey((0, 0), 2, gather="forward"))
    assert graph.node_counts[0, graph.classes.columns(Work.GATHER_FORWARD)].tolist() == [4]
    assert seconds(graph, gather_forward=1, forward=3, backward=3) == 1 + 4 * 6


def test_a_micro_batch_waits_for_the_reduces_of_the_one_before() -> None:
    """1 unit, 2 micro-batches, tasks 1 s, reduces 4 s: F B 0-2, reduce 2-6, F B 6-8, reduce 8-12. Once only: 4-8."""
    work = {"forward": 1, "backward": 1, "reduce": 4}
    assert seconds(build_chain(ChainKey((0,), 2, reduce="micro_batch")), **work) == 12
    assert seconds(build_chain(ChainKey((0,), 2)), **work) == 8


def test_deeper_prefetch_hides_a_slow_gather() -> None:
    """Units of 1 1 1 10 s forward, whose gathers take 0 0 0 9: it may start 2 units ahead, or 3 with prefetch of 2.

    1: starts with unit 1 (at 1), ends at 10, unit 3 ends at 20. 2: starts with unit 0, ends at 9, unit 3 ends at 19.
    """
    work = {"gather": [0, 9], "forward": [1, 10]}
    assert seconds(build_chain(ChainKey((0, 0, 0, 1), 1, gather="step")), **work) == 20
    assert seconds(build_chain(ChainKey((0, 0, 0, 1), 1, gather="step", prefetch_units=2)), **work) == 19


def test_a_malformed_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one unit"):
        ChainKey((), 1)
    with pytest.raises(ValueError, match="from 0"):
        ChainKey((-1,), 1)
    with pytest.raises(ValueError, match="needs a micro-batch"):
        ChainKey((0,), 0)


class Fsdp2:
    """What FSDP2 issues in a step, on a clock per stream: the host runs ahead, so only streams and events matter.

    Gathers share a stream, and one communicator with the reduces unless ``shared`` is off. ``prefetch`` None is the
    default: no explicit prefetch in forward, the next unit in backward.
    """

    def __init__(self, key: ChainKey, prefetch: int | None, durations: dict[Work, list[int]]) -> None:
        self.key, self.prefetch, self.durations = key, prefetch, durations
        self.compute = self.gather = self.reduce = self.link = 0.0  # when each is free
        self.gathered: dict[int, float] = {}  # unit -> when its pending gather ends
        self.present: set[int] = set()
        self.last_copy_out = 0.0  # of the last unit in forward
        self.reduces: list[float] = []

    def seconds(self, kind: Work, unit: int) -> int:
        return self.durations[kind][self.key.unit_kinds[unit]]

    def unshard(self, unit: int, kind: Work) -> None:
        if unit in self.present or unit in self.gathered:
            return
        self.gather = max(self.gather, self.link if self.key.shared_stream else 0.0) + self.seconds(kind, unit)
        self.link = self.gather
        self.gathered[unit] = self.gather

    def wait_for_unshard(self, unit: int, forward: bool) -> None:
        if unit not in self.gathered:
            return
        if forward:  # gathers wait for the copy-out before this one
            self.gather = max(self.gather, self.last_copy_out)
        self.compute = max(self.compute, self.gathered.pop(unit))
        self.present.add(unit)
        if forward:
            self.last_copy_out = self.compute
        else:
            self.gather = max(self.gather, self.compute)

    def run_forward(self, unit: int, gather: Work) -> None:
        self.unshard(unit, gather)
        self.wait_for_unshard(unit, forward=True)
        for ahead in range(unit + 1, min(unit + 1 + (self.prefetch or 0), self.key.num_units)):
            self.unshard(ahead, gather)
        self.compute += self.seconds(Work.FORWARD, unit)
        if self.key.gather == "micro_batch":
            self.present.discard(unit)

    def run_backward(self, unit: int, reduces: bool) -> None:
        self.unshard(unit, Work.GATHER_BACKWARD)
        self.wait_for_unshard(unit, forward=False)
        for ahead in range(unit - 1, max(unit - 1 - (self.prefetch or 1), -1), -1):
            self.unshard(ahead, Work.GATHER_BACKWARD)
        self.compute += self.seconds(Work.BACKWARD, unit)
        if self.key.gather == "micro_batch":
            self.present.discard(unit)
        if reduces:
            while len(self.reduces) >= self.key.reduce_buffers:
                self.compute = max(self.compute, self.reduces.pop(0))
            free = max(self.reduce, self.link if self.key.shared_stream else 0.0)
            self.reduce = max(free, self.compute) + self.seconds(Work.REDUCE, unit)
            self.link = max(self.link, self.reduce)
            self.reduces.append(self.reduce)

    def step(self) -> float:
        m = self.key.num_micro_batches
        for i in range(m):
            for unit in range(self.key.num_units):
                self.run_forward(unit, Work.GATHER if self.key.gather == "step" else Work.GATHER_FORWARD)
            reduces = self.key.reduce == "micro_batch" or i == m - 1
            for unit in reversed(range(self.key.num_units)):
                self.run_backward(unit, reduces)
            if reduces:  # the end of a backward that reduced waits for all of it
                self.compute = max(self.compute, self.reduce)
                self.reduces.clear()
        return self.compute


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(("step", "micro_batch")), st.sampled_from(("step", "micro_batch")))
def test_chains_equal_a_replay_of_fsdp2(data: st.DataObject, gather: Any, reduce: Any) -> None:
    prefetch = data.draw(st.sampled_from((None, 1, 2, 3)))
    key = ChainKey(
        tuple(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=7))),
        data.draw(st.integers(1, 3)),
        gather,
        reduce,
        prefetch_units=prefetch or 1,
        shared_stream=data.draw(st.booleans()),
        reduce_buffers=data.draw(st.integers(1, 2)),
    )
    durations = {kind: data.draw(st.lists(st.integers(0, 9), min_size=3, max_size=3)) for kind in Work}
    graph = build_chain(key)
    by_kind = {kind.name: drawn[: max(key.unit_kinds) + 1] for kind, drawn in durations.items()}
    assert seconds(graph, **by_kind | {"FINISH": 0}) == Fsdp2(key, prefetch, durations).step()
