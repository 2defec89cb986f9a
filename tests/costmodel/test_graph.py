"""Graphs against timelines worked out by hand and against an event-by-event replay of torch's runtime."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainplan.costmodel import graph as graph_module
from trainplan.costmodel.dag import Classes, Draft, Graph
from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.graph import ChainKey, Key, Work, build, build_chain
from trainplan.costmodel.orders import gather_windows, illegal
from trainplan.costmodel.simulate import finish_times, spans, step_seconds
from trainplan.costmodel.strategy import Schedule

NOTHING = dict.fromkeys(Work, 0.0)


def seconds(graph: Graph, **kinds: Any) -> float:
    """Step time with these durations per kind of work, the same for all units; 0 for the rest."""
    durations = graph.classes.durations(NOTHING | {Work[name.upper()]: value for name, value in kinds.items()})
    return float(step_seconds(graph, durations[None])[0])


# Point to point. Worked out by hand for pp 2, m 2, forward 1, backward 2, each transfer 0.5.
#
# async 1f1b:       rank 0  F0 0-1  F1 1-2                      B0 5-7    B1 8-10
#                   rank 1    F0 1.5-2.5  B0 2.5-4.5  F1 4.5-5.5  B1 5.5-7.5
# rendezvous 1f1b:  rank 0  F0 0-1  F1 1-2                      B0 5-7    B1 8.5-10.5
#                   rank 1    F0 1.5-2.5  B0 2.5-4.5  (send B0, receive F1 4.5-5)  F1 5-6  B1 6-8
# async gpipe:      rank 1    F0 1.5-2.5  F1 2.5-3.5  B0 3.5-5.5  B1 5.5-7.5;  rank 0  B0 6-8  B1 8-10
# rendezvous gpipe: rank 1    F0 1.5-2.5  (receive F1 2.5-3)  F1 3-4  B0 4-6  B1 6-8
#                   rank 0    B0 6.5-8.5  (receive B1 8.5-9)  B1 9-11


@pytest.mark.parametrize(
    ("schedule", "p2p", "expected"),
    [("1f1b", "async", 10), ("1f1b", "rendezvous", 10.5), ("gpipe", "async", 10), ("gpipe", "rendezvous", 11)],
)
def test_transfers_by_hand(schedule: Schedule, p2p: graph_module.P2P, expected: float) -> None:
    graph = build(Key(schedule, 2, 1, 2, p2p=p2p))
    assert seconds(graph, forward=1, backward=2, send_forward=0.5, send_backward=0.5) == expected


def torch_program(schedule: str, s: int, S: int, m: int) -> list[Any]:
    """What rank s does in `_step_microbatches`: ("run", "F" or "B", i), ("issue", transfers) and ("wait", transfers).

    A transfer is (stage that receives, "F" or "B", micro-batch).
    """

    def receive(kind: str, i: int) -> list[Any]:
        return [(s, kind, i)] if (s > 0 if kind == "F" else s < S - 1) else []

    def send(kind: str, i: int) -> list[Any]:
        reader = s + 1 if kind == "F" else s - 1
        return [(reader, kind, i)] if 0 <= reader < S else []

    def fetch(transfers: list[Any]) -> list[Any]:
        return [("issue", transfers), ("wait", transfers)]

    program: list[Any] = []
    if schedule == "gpipe":
        for kind in "FB":
            for i in range(m):
                program += [*fetch(receive(kind, i)), ("run", kind, i), ("issue", send(kind, i))]
            program += [("wait", send(kind, i)) for i in range(m)]
        return program
    warm_up = min(m, S - s)
    sent: list[Any] = []
    for i in range(warm_up):
        program += [*fetch(receive("F", i)), ("run", "F", i), ("wait", sent)]
        sent = send("F", i)
        if i < warm_up - 1:
            program.append(("issue", sent))
    forward = warm_up
    for i in range(m - warm_up + 1):
        program += [*fetch(send("F", forward - 1) + receive("B", i)), ("run", "B", i)]
        if forward < m:
            program += [*fetch(send("B", i) + receive("F", forward)), ("run", "F", forward)]
            forward += 1
    sent = send("B", m - warm_up)
    program.append(("issue", sent))
    for i in range(m - warm_up + 1, m):
        program += [*fetch(receive("B", i)), ("run", "B", i), ("wait", sent)]
        sent = send("B", i)
        program.append(("issue", sent))
    return [*program, ("wait", sent)]


def replayed(schedule: str, S: int, m: int, durations: dict[tuple[str, int], float]) -> float:
    """Seconds of a step: two streams per rank, one computes and obeys waits, one plays issued batches in turn."""
    programs = [torch_program(schedule, s, S, m) for s in range(S)]

    @cache
    def ready(s: int, place: int) -> float:
        """When the compute stream of rank s gets past the items before ``place``."""
        if place == 0:
            return 0.0
        action, *what = programs[s][place - 1]
        before = ready(s, place - 1)
        if action == "run":
            return before + durations[what[0], s]
        if action == "wait":
            return max([before, *(transferred(transfer) for transfer in what[0])])
        return before

    @cache
    def issued(s: int, place: int) -> float:
        """When the batch at ``place`` of rank s starts: its compute and its last batch are done."""
        earlier = [p for p in range(place) if programs[s][p][0] == "issue" and programs[s][p][1]]
        last_batch = programs[s][earlier[-1]][1] if earlier else []
        return max([ready(s, place), *(transferred(transfer) for transfer in last_batch)])

    @cache
    def transferred(transfer: Any) -> float:
        reader, kind, _ = transfer
        writer = reader - 1 if kind == "F" else reader + 1
        start = max(
            issued(s, place)
            for s in (reader, writer)
            for place, (action, *what) in enumerate(programs[s])
            if action == "issue" and transfer in what[0]
        )
        return start + durations["send " + kind, writer]

    return max(ready(s, len(programs[s])) for s in range(S))


@settings(deadline=None)
@given(st.data())
def test_rendezvous_equals_a_replay_of_torchs_runtime(data: st.DataObject) -> None:
    schedule: Schedule = data.draw(st.sampled_from(("gpipe", "1f1b")))
    S, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    kinds = {"F": Work.FORWARD, "B": Work.BACKWARD, "send F": Work.SEND_FORWARD, "send B": Work.SEND_BACKWARD}
    drawn = {name: data.draw(st.lists(st.integers(0, 9), min_size=S, max_size=S), label=name) for name in kinds}
    graph = build(Key(schedule, S, 1, m, p2p="rendezvous"))
    by_name = {(name, s): float(drawn[name][s]) for name in kinds for s in range(S)}
    by_kind = {kinds[name].name: drawn[name] for name in kinds}
    assert seconds(graph, **by_kind) == replayed(schedule, S, m, by_name)


def test_rendezvous_is_refused_where_ranks_do_not_meet() -> None:
    with pytest.raises(UsageError, match="p2p=async"):
        build(Key("zbv", 2, 2, 4, p2p="rendezvous"))


def test_a_v_schedule_sends_nothing_where_it_turns() -> None:
    """With pp 3, stages 2 and 3 are both on rank 2."""
    graph = build(Key("zbv", 3, 2, 5))
    per_step = graph.node_counts.sum(axis=0)
    assert per_step[graph.classes.columns(Work.SEND_FORWARD)].tolist() == [5, 5, 0, 5, 5, 0]
    assert per_step[graph.classes.columns(Work.SEND_BACKWARD)].tolist() == [0, 5, 5, 0, 5, 5]


# Gathers and reduces of a pipeline of one rank with several stages, where only streams matter.


def test_gathers_of_a_step_run_back_to_back() -> None:
    """One rank, vpp 2, m 1: F0 F1 B1 B0. Gathers 0-2, 2-4: F0 2-3, F1 4-5, B1 5-6, B0 6-7."""
    assert seconds(build(Key("interleaved", 1, 2, 1, gather="step")), gather=2, forward=1, backward=1) == 7


def test_gathers_of_the_multi_stage_runtime_come_and_go() -> None:
    """One rank, vpp 4, m 1: F0 F1 F2 F3 B3 B2 B1 B0, at most three stages present.

    Stages 0, 1, 2 are gathered 0-2, 2-4, 4-6; stage 3, issued after F0 (2-3), 6-8; F1 4-5, F2 6-7, F3 8-9, B3 9-10;
    stage 0 again, issued after B3, 10-12; B2 10-11, B1 11-12, B0 12-13.
    """
    graph = build(Key("interleaved", 1, 4, 1, gather="window"))
    assert seconds(graph, gather=2, forward=1, backward=1) == 13
    assert graph.node_counts[0, graph.classes.columns(Work.GATHER)].tolist() == [2, 1, 1, 1]


@pytest.mark.parametrize(("gather_s", "expected"), [(2, 14), (4, 19)])
def test_gathers_per_micro_batch_use_two_buffers(gather_s: float, expected: float) -> None:
    """One rank, m 2, tasks of 3 s: F0 B0 F1 B1, each with a gather that may start when the task two before has ended.

    2 s: gathers 0-2, 2-4, 5-7, 8-10; tasks 2-5, 5-8, 8-11, 11-14. 4 s: gathers 0-4, ..., 12-16; the last task 16-19.
    """
    graph = build(Key("1f1b", 1, 1, 2, gather="micro_batch"))
    assert seconds(graph, gather_forward=gather_s, gather_backward=gather_s, forward=3, backward=3) == expected


def test_a_reduce_runs_beside_what_follows_or_before_it() -> None:
    """One rank, vpp 2, m 1, reduce 5: F0 0-1, F1 1-2, B1 2-3, then B0 3-4 beside the reduce of stage 1.

    beside: reduces 3-8, 8-13. before: reduce 3-8, B0 8-9, reduce 9-14. Then 1 s of finishing for each of the 2 stages.
    """
    work = {"forward": 1, "backward": 1, "reduce": 5, "finish": 1}
    # beside: stage 0 finishes at 13-14, stage 1 (reduced long ago) after it.
    assert seconds(build(Key("interleaved", 1, 2, 1)), **work) == 15
    assert seconds(build(Key("interleaved", 1, 2, 1, reduce="step_wait")), **work) == 16


def test_reduces_per_micro_batch_queue() -> None:
    """One rank, m 2: F0 B0 F1 B1 of 1 s each; reduces of 3 s: 2-5, 5-8."""
    assert seconds(build(Key("1f1b", 1, 1, 2, reduce="micro_batch")), forward=1, backward=1, reduce=3) == 8


def test_a_split_backward_reduces_after_its_weight_gradient() -> None:
    """One rank, zero-bubble, m 1: F 0-1, I 1-3, W 3-7, reduce 7-8."""
    graph = build(Key("zero-bubble", 1, 1, 1))
    assert seconds(graph, forward=1, input_grad=2, weight_grad=4, reduce=1) == 8


def test_node_counts_of_a_large_key() -> None:
    """interleaved, 64 stages, 128 micro-batches: by multiplication."""
    stages, m = 64, 128
    graph = build(Key("interleaved", 16, 4, m, gather="micro_batch", reduce="micro_batch"))
    counts = {kind: int(graph.node_counts[:, graph.classes.columns(kind)].sum()) for kind in graph.classes.kinds}
    tasks, hops = stages * m, (stages - 1) * m
    assert counts == {
        Work.FORWARD: tasks,
        Work.BACKWARD: tasks,
        Work.SEND_FORWARD: hops,
        Work.SEND_BACKWARD: hops,
        Work.GATHER_FORWARD: tasks,
        Work.GATHER_BACKWARD: tasks,
        Work.REDUCE: tasks,
        Work.FINISH: stages,
    }
    assert len(graph) == sum(counts.values())


# What holds for every graph.


def pipeline_keys() -> st.SearchStrategy[Key]:
    return st.builds(
        Key,
        st.sampled_from(get_args(Schedule)),
        st.integers(1, 5),
        st.integers(1, 5),
        st.integers(1, 12),
        st.sampled_from(get_args(graph_module.Gather)),
        st.sampled_from(get_args(graph_module.Reduce)),
        st.sampled_from(get_args(graph_module.P2P)),
    ).filter(
        lambda key: (
            illegal(key.schedule, key.pp, key.vpp, key.num_micro_batches) is None
            and (key.p2p == "async" or key.schedule in ("gpipe", "1f1b"))
        )
    )


def chain_keys() -> st.SearchStrategy[ChainKey]:
    return st.builds(
        ChainKey,
        st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple),
        st.integers(1, 4),
        st.sampled_from(("none", "step", "forward", "micro_batch")),
        st.sampled_from(("step", "micro_batch")),
        st.integers(0, 3),
        st.booleans(),
        st.integers(0, 2),
    )


@settings(deadline=None)
@given(st.one_of(pipeline_keys(), chain_keys()))
def test_graphs_are_sorted_and_the_same_with_and_without_numba(key: Key | ChainKey) -> None:
    plain, machine = (build(key, e) if isinstance(key, Key) else build_chain(key, e) for e in ("numpy", "numba"))
    assert (plain.cls == machine.cls).all()
    assert (plain.preds == machine.preds).all()
    assert plain.digest == machine.digest
    level = np.repeat(np.arange(len(plain.level_start) - 1), np.diff(plain.level_start))
    assert len(level) == len(plain)
    for column in plain.preds.T:
        assert (level[column[column >= 0]] < level[column >= 0]).all()
    assert (plain.preds[plain.level_start[1] :].max(axis=1) >= 0).all()  # only the first level waits for nothing
    assert plain.node_counts.sum() == len(plain)


@settings(deadline=None)
@given(st.one_of(pipeline_keys(), chain_keys()), st.integers(0, 2**32 - 1))
def test_no_two_pieces_of_work_share_a_stream_at_a_time(key: Key | ChainKey, seed: int) -> None:
    graph = build(key) if isinstance(key, Key) else build_chain(key)
    durations = np.random.default_rng(seed).integers(1, 10, len(graph.classes)).astype(float)
    last_end: dict[tuple[int, str], float] = {}
    for span in sorted(spans(graph, durations), key=lambda span: span.start_s):
        if isinstance(key, Key) and key.p2p == "rendezvous" and span.stream.startswith("send"):
            continue  # a rank's transfers take turns in batches, whatever their direction: see the replay
        stream = span.rank, span.stream
        assert span.start_s >= last_end.get(stream, 0.0)
        last_end[stream] = span.end_s


@settings(deadline=None)
@given(pipeline_keys())
def test_waiting_for_more_is_never_faster(key: Key) -> None:
    durations = {kind: 1.0 + kind for kind in Work}
    steps = [
        finish_times(graph, graph.classes.durations(durations)).max()
        for reduce in ("step", "step_wait")
        for graph in [build(Key(key.schedule, key.pp, key.vpp, key.num_micro_batches, key.gather, reduce, key.p2p))]
    ]
    assert steps[0] <= steps[1]


def test_windows_are_what_the_graph_gathers() -> None:
    graph = build(Key("interleaved", 4, 4, 16, gather="window"))
    gathers = graph.node_counts[:, graph.classes.columns(Work.GATHER)].sum(axis=1)
    assert gathers.tolist() == [len(rank) for rank in gather_windows("interleaved", 4, 4, 16)]


def test_graphs_differ_in_their_digest() -> None:
    keys = [Key("1f1b", 4, 1, 8), Key("1f1b", 4, 1, 8, p2p="rendezvous"), Key("1f1b", 4, 1, 8, reduce="micro_batch")]
    assert len({build(key).digest for key in keys}) == 3


def test_a_cycle_is_refused() -> None:
    draft = Draft()
    nodes = draft.add(Work.FORWARD, 0, np.zeros(2, np.int32), 0, 0)
    draft.start_edges()[nodes, 0] = nodes[::-1]
    for engine in ("numpy", "numba"):
        with pytest.raises(ValueError, match="wait for each other"):
            draft.graph("two nodes", 1, engine)


def test_classes_name_their_columns() -> None:
    graph = build(Key("zero-bubble", 2, 2, 4))
    assert graph.classes.kinds == (
        Work.FORWARD,
        Work.INPUT_GRAD,
        Work.WEIGHT_GRAD,
        Work.SEND_FORWARD,
        Work.SEND_BACKWARD,
        Work.REDUCE,
        Work.FINISH,
    )
    assert len(graph.classes) == 7 * 4
    assert graph.classes.column(Work.WEIGHT_GRAD, 3) == 11
    assert graph.classes.name(11) == (Work.WEIGHT_GRAD, 3)
    assert graph.class_index[Work.WEIGHT_GRAD, 3] == 11
    assert graph.classes.columns(Work.BACKWARD) == slice(0, 0)
    with pytest.raises(IndexError, match="unit 4 of 4"):
        graph.classes.column(Work.FORWARD, 4)


def test_durations_are_put_in_their_columns() -> None:
    classes = Classes((Work.FORWARD, Work.BACKWARD, Work.FINISH), 2)
    filled = classes.durations(
        {Work.FORWARD: [[1, 2], [3, 4]], Work.BACKWARD: [[5], [6]], Work.FINISH: 7, Work.REDUCE: 8}
    )
    assert filled.tolist() == [[1, 2, 5, 5, 7, 7], [3, 4, 6, 6, 7, 7]]
    with pytest.raises(KeyError, match="FINISH"):
        classes.durations({Work.FORWARD: 1, Work.BACKWARD: 1})


def test_streams_have_names() -> None:
    pipeline, chain = build(Key("1f1b", 2, 1, 2)), build_chain(ChainKey((0,), 1, "step"))
    assert [pipeline.stream(kind) for kind in (Work.FINISH, Work.SEND_FORWARD, Work.REDUCE)] == [
        "compute",
        "send forward",
        "reduce",
    ]
    assert chain.stream(Work.GATHER) == chain.stream(Work.REDUCE) == "communication"
