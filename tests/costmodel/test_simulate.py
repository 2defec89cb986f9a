"""Simulated steps against closed forms of the papers, the longest path's laws, and one engine against the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainplan.costmodel.dag import Floats, Graph
from trainplan.costmodel.graph import P2P, ChainKey, Gather, Key, Reduce, Work, build, build_chain
from trainplan.costmodel.orders import illegal
from trainplan.costmodel.simulate import busy_seconds, critical_path_counts, finish_times, spans, step_seconds
from trainplan.costmodel.strategy import Schedule

PIPELINES = [(2, 4), (2, 10), (4, 8), (4, 16), (8, 16), (8, 40)]  # (pp, m), m a multiple of pp


def compute_only(key: Key, forward: float, input_grad: float, weight_grad: float) -> Floats:
    """Durations of uniform stages that communicate in no time."""
    graph = build(key)
    return graph.classes.durations(
        dict.fromkeys(Work, 0.0)
        | {
            Work.FORWARD: forward,
            Work.INPUT_GRAD: input_grad,
            Work.WEIGHT_GRAD: weight_grad,
            Work.BACKWARD: input_grad + weight_grad,
        }
    )


def step(key: Key, forward: float, input_grad: float, weight_grad: float) -> float:
    durations = compute_only(key, forward, input_grad, weight_grad)
    return float(step_seconds(build(key), durations[None])[0])


@pytest.mark.parametrize(("pp", "m"), PIPELINES)
@pytest.mark.parametrize(("schedule", "vpp"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
def test_bubble_of_whole_backwards(schedule: Schedule, vpp: int, pp: int, m: int) -> None:
    """(p - 1) / (v m) of the work, so v m + p - 1 turns: arXiv:2104.04473 sec. 2.2.1 and 2.2.2."""
    key = Key(schedule, pp, vpp, m)
    assert step(key, 1, 1.5, 0.5) == 3 * (vpp * m + pp - 1)
    busy = busy_seconds(build(key), compute_only(key, 1, 1.5, 0.5))
    assert busy.tolist() == [3 * vpp * m] * pp


@pytest.mark.parametrize(("pp", "m"), PIPELINES)
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (1, 1.5, 1)])
def test_bubble_of_zb1p(pp: int, m: int, times: tuple[float, float, float]) -> None:
    """(p - 1) (F + I - W): ZB-H1 of arXiv:2401.10241, table 1 (its B is our input gradient)."""
    forward, input_grad, weight_grad = times
    bubble = (pp - 1) * (forward + input_grad - weight_grad)
    assert step(Key("zero-bubble", pp, 1, m), *times) == m * sum(times) + bubble


@pytest.mark.parametrize(("pp", "m"), PIPELINES)
@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv", "dualpipev"])
def test_zero_bubble_with_two_stages_only_fills(schedule: Schedule, pp: int, m: int) -> None:
    """With F = I = W the last rank starts p - 1 tasks late and nothing else is lost: 6 m + p - 1."""
    assert step(Key(schedule, pp, 2, m), 1, 1, 1) == 6 * m + pp - 1


def test_a_short_zbv_pays_for_the_order_of_a_long_one() -> None:
    """Pp 8, m 8 runs the order of 15 micro-batches with 7 left out: 14 units of bubble instead of 7."""
    assert step(Key("zbv", 8, 2, 8), 1, 1, 1) == 6 * 8 + 14


def test_transfers_on_the_way_to_the_last_rank() -> None:
    """GPipe, pp 3, m 1, sends 0.25: F F F B B B with four transfers between."""
    graph = build(Key("gpipe", 3, 1, 1))
    durations = graph.classes.durations(
        dict.fromkeys(Work, 0.0)
        | {Work.FORWARD: 1, Work.BACKWARD: 2, Work.SEND_FORWARD: 0.25, Work.SEND_BACKWARD: 0.25}
    )
    assert finish_times(graph, durations).max() == 3 * 3 + 4 * 0.25


def keys() -> st.SearchStrategy[Key | ChainKey]:
    pipelines = st.builds(
        Key,
        st.sampled_from(get_args(Schedule)),
        st.integers(1, 5),
        st.integers(1, 4),
        st.integers(1, 12),
        st.sampled_from(get_args(Gather)),
        st.sampled_from(get_args(Reduce)),
        st.sampled_from(get_args(P2P)),
    ).filter(
        lambda key: (
            illegal(key.schedule, key.pp, key.vpp, key.num_micro_batches) is None
            and (key.p2p == "async" or key.schedule in ("gpipe", "1f1b"))
        )
    )
    chains = st.builds(
        ChainKey,
        st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple),
        st.integers(1, 4),
        st.sampled_from(("none", "step", "forward", "micro_batch")),
        st.sampled_from(("step", "micro_batch")),
        st.integers(0, 2),
        st.booleans(),
    )
    return st.one_of(pipelines, chains)


def graph_of(key: Key | ChainKey) -> Graph:
    return build(key) if isinstance(key, Key) else build_chain(key)


def uneven(graph: Graph, rows: int, seed: int) -> Floats:
    """Durations with no two stages alike and a heavy last one, where a bound off by one stage shows."""
    random = np.random.default_rng(seed)
    durations = random.uniform(0.0, 2.0, (rows, len(graph.classes)))
    for kind in graph.classes.kinds:
        durations[:, graph.classes.columns(kind)][:, -1] *= random.choice([1.0, 3.0])
    return durations


examples = given(keys(), st.integers(0, 2**32 - 1))


@settings(deadline=None)
@examples
def test_more_time_for_anything_is_never_faster(key: Key | ChainKey, seed: int) -> None:
    graph = graph_of(key)
    durations = uneven(graph, 1, seed)
    random = np.random.default_rng(seed)
    slower = np.repeat(durations, 8, axis=0)
    slower[np.arange(8), random.integers(0, len(graph.classes), 8)] += random.uniform(0, 2, 8)
    assert (step_seconds(graph, slower) >= step_seconds(graph, durations)).all()


@settings(deadline=None)
@examples
def test_the_critical_path_is_the_step_here_and_a_lower_bound_elsewhere(key: Key | ChainKey, seed: int) -> None:
    graph = graph_of(key)
    durations = uneven(graph, 6, seed)
    steps = step_seconds(graph, durations)
    paths = np.array([critical_path_counts(graph, row) for row in durations])
    rounding = 1e-12 * steps  # sums of at most some hundred terms in another order
    assert (abs((paths * durations).sum(axis=1) - steps) <= rounding).all()
    assert (durations @ paths.T <= (steps + rounding)[:, None]).all()


@settings(deadline=None)
@examples
def test_path_counts_are_the_derivative_of_the_step(key: Key | ChainKey, seed: int) -> None:
    """Away from ties a small change of one class moves the step by its count."""
    graph = graph_of(key)
    durations = uneven(graph, 1, seed)[0]
    counts = critical_path_counts(graph, durations)
    for column in np.random.default_rng(seed).integers(0, len(graph.classes), 3):
        moved = np.repeat(durations[None], 2, axis=0)
        moved[1, column] += 1e-9
        before, after = step_seconds(graph, moved)
        assert (after - before) / 1e-9 == pytest.approx(counts[column], abs=1e-3)


@settings(deadline=None)
@examples
def test_a_step_is_at_least_what_its_busiest_rank_works(key: Key | ChainKey, seed: int) -> None:
    graph = graph_of(key)
    durations = uneven(graph, 3, seed)
    busy = busy_seconds(graph, durations)
    assert busy.shape == (3, graph.num_ranks)
    assert (busy.max(axis=1) <= step_seconds(graph, durations) * (1 + 1e-12)).all()
    on_compute = [0.0] * graph.num_ranks
    for span in spans(graph, durations[0]):
        if span.stream == "compute":
            on_compute[span.rank] += span.end_s - span.start_s
    assert busy[0] == pytest.approx(on_compute)


@settings(deadline=None)
@given(keys(), st.integers(0, 2**32 - 1), st.sampled_from((1, 15, 16, 17, 40)))
def test_engines_agree_bit_by_bit(key: Key | ChainKey, seed: int, rows: int) -> None:
    graph = graph_of(key)
    durations = uneven(graph, rows, seed)
    plain = step_seconds(graph, durations, "numpy")
    for threads in (1, 3):
        assert (step_seconds(graph, durations, "numba", threads) == plain).all()
    ends = finish_times(graph, durations[0], "numpy")
    assert (finish_times(graph, durations[0], "numba") == ends).all()
    assert ends.max() == plain[0]
    assert (
        critical_path_counts(graph, durations[0], "numba") == critical_path_counts(graph, durations[0], "numpy")
    ).all()


def test_no_rows_take_no_time() -> None:
    graph = build(Key("1f1b", 2, 1, 2))
    for engine in ("numpy", "numba"):
        assert step_seconds(graph, np.empty((0, len(graph.classes))), engine).shape == (0,)


def test_spans_tell_what_ran_where() -> None:
    """One rank, m 1, gather 1, forward 2, backward 3, reduce 4, nothing to finish."""
    graph = build(Key("1f1b", 1, 1, 1, gather="step"))
    durations = graph.classes.durations(
        {Work.GATHER: 1, Work.FORWARD: 2, Work.BACKWARD: 3, Work.REDUCE: 4, Work.FINISH: 0}
    )
    assert sorted(spans(graph, durations), key=lambda span: span.start_s) == [
        (0, "gather", "gather 0", 0, 1),
        (0, "compute", "forward 0 micro-batch 0", 1, 3),
        (0, "compute", "backward 0 micro-batch 0", 3, 6),
        (0, "reduce", "reduce 0", 6, 10),
    ]


def test_wrong_durations_are_refused() -> None:
    graph = build(Key("1f1b", 2, 1, 2))
    good = np.ones((1, len(graph.classes)))
    with pytest.raises(ValueError, match="one column per class"):
        step_seconds(graph, good[:, 1:])
    with pytest.raises(ValueError, match="one column per class"):
        step_seconds(graph, good[0])
    for bad in (-1.0, np.nan):
        with pytest.raises(ValueError, match="none negative"):
            step_seconds(graph, good * bad)


def test_compiled_code_stays_inside_its_arrays(tmp_path: Path) -> None:
    """The same calls once more with numba's bounds checks, compiled afresh."""
    script = """
import numpy as np
from trainplan.costmodel.graph import ChainKey, Key, build, build_chain
from trainplan.costmodel.simulate import critical_path_counts, step_seconds
for graph in (
    build(Key("zero-bubble", 4, 3, 8, "window", "step_wait"), "numba"),
    build(Key("dualpipev", 3, 2, 7, "micro_batch", "micro_batch"), "numba"),
    build(Key("1f1b", 4, 1, 8, "step", "step", "rendezvous"), "numba"),
    build_chain(ChainKey((0, 1, 1, 2), 3, "micro_batch", "micro_batch"), "numba"),
):
    rows = np.random.default_rng(0).random((33, len(graph.classes)))
    plain = step_seconds(graph, rows, "numpy")
    assert (step_seconds(graph, rows, "numba", threads=2) == plain).all()
    assert abs(critical_path_counts(graph, rows[0], "numba") @ rows[0] - plain[0]) < 1e-9
print("inside")
"""
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.stdout.strip(), done.returncode) == ("inside", 0), done.stderr
