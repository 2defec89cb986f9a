"""The certificate: no strategy beats the winner, cuts are bounds, and what is known already changes nothing."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from trainplan.costmodel.backends import backend
from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.durations import durations
from trainplan.costmodel.graph import Graph, Key, build
from trainplan.costmodel.job import Job
from trainplan.costmodel.memory import own_parameters, peak_device_bytes
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.simulate import critical_path, step_seconds
from trainplan.costmodel.step import memory_limit
from trainplan.costmodel.work import Shapes
from trainplan.costmodel.workload import Workload
from trainplan.planner.board import Board, Counts
from trainplan.planner.certify import Cuts, Rows, rows_of
from trainplan.planner.rounds import Rounds
from trainplan.planner.search import tune
from trainplan.planner.space import Pins, Space
from trainplan.planner.unit_book import UnitBook
from trainplan.planner.workers import Here

SPEED = Path(__file__).parents[2] / "benchmarks" / "search_speed.py"


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    spec = importlib.util.spec_from_file_location("search_speed", SPEED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job(model: str = "Qwen/Qwen3-1.7B", cluster: str = "8xH100", gbs: int = 32) -> Job:
    return Job(load_model(model), load_cluster(cluster), Workload(seq_len=4096, global_batch_size=gbs))


def simulated(of: Job, book: UnitBook, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """(seconds of every row, whether it fits)."""
    first, stack = rows.table.row(0), book.stack
    own = [own_parameters(Shapes(of, rows.table, stack), rows.place, [s]) for s in range(rows.place.num_stages)]
    work = durations(first, stack, rows.place, rows.units, own)
    columns = work.graph.classes.durations(work.seconds)
    columns = np.broadcast_to(columns, (rows.table.size, columns.shape[-1]))
    device = peak_device_bytes(of, stack, rows.table, rows.place, first.grad_accum, first.schedule)
    return step_seconds(work.graph, columns), np.broadcast_to(device, rows.table.shape) <= memory_limit(of)


def random_rows(of: Job, name: str, seed: int, at_most: int) -> Iterator[tuple[UnitBook, Rows]]:
    """Legal strategies of random groups, with their bounds."""
    space, generator = Space(of, backend(name), Pins()), np.random.default_rng(seed)
    book, families = UnitBook(space), list(space.families())
    while True:
        groups = list(space.groups(families[generator.integers(len(families))]))
        group = groups[generator.integers(len(groups))]
        legal, _ = space.backend.legal_mask(of, group.table, group.canonical)
        flat = np.flatnonzero(np.broadcast_to(legal, group.table.shape))
        if len(flat):
            chosen = np.unique(generator.choice(flat, min(at_most, len(flat))))
            for rows in rows_of(of, book, group, chosen):
                yield book, rows


@pytest.mark.parametrize("name", ["megatron", "native", "torchtitan", "deepspeed"])
def test_no_random_strategy_beats_the_winner_or_its_bound(name: str) -> None:
    of = job()
    best = tune(of, name, Pins()).candidates[0].step_s
    seen = 0
    for book, rows in random_rows(of, name, seed=0, at_most=40):
        step_s, fits = simulated(of, book, rows)
        assert (rows.bound_s <= step_s * (1 + 1e-9)).all()
        assert (step_s[fits] >= best * (1 - 1e-9)).all()
        seen += int(fits.sum())
        if seen > 400:
            break


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-32b", "gpt3-175b", "qwen3-235b-a22b"])
def test_no_random_strategy_of_the_named_problems_beats_the_winner(speed: ModuleType, name: str) -> None:
    """100,000 feasible strategies, drawn at random."""
    of = speed.problem(name)
    best = tune(of, "megatron", Pins()).candidates[0].step_s
    seen = 0
    for book, rows in random_rows(of, "megatron", seed=1, at_most=2000):
        step_s, fits = simulated(of, book, rows)
        assert (rows.bound_s <= step_s * (1 + 1e-9)).all()
        assert (step_s[fits] >= best * (1 - 1e-9)).all()
        seen += int(fits.sum())
        if seen >= 100_000:
            break


def test_a_gap_bounds_what_is_missed() -> None:
    of = job("Qwen/Qwen3-8B")
    exact = tune(of, "megatron", Pins())
    for gap_frac in (0.005, 0.05):
        near = tune(of, "megatron", Pins(), gap_frac=gap_frac)
        assert exact.candidates[0].step_s <= near.candidates[0].step_s <= exact.candidates[0].step_s / (1 - gap_frac)
        assert near.record.simulated <= exact.record.simulated
        assert near.record.gap_frac == gap_frac


def test_paths_that_are_known_already_change_nothing_but_the_work() -> None:
    of = job("Qwen/Qwen3-8B")
    space = Space(of, backend("megatron"), Pins())
    book, cuts, boards, counts = UnitBook(space), Cuts(), [Board(20), Board(20)], [Counts(), Counts()]
    for board, count in zip(boards, counts, strict=True):
        Rounds(Here(space, book, cuts), board, count).run()
    assert boards[0].candidates == boards[1].candidates
    assert counts[1].simulated <= counts[0].simulated


KEYS = (
    ("1f1b", 8, 1, 64, "none"), ("1f1b", 4, 1, 2, "step"), ("1f1b", 4, 1, 16, "micro_batch"),
    ("gpipe", 4, 1, 8, "step"), ("interleaved", 8, 2, 32, "none"), ("interleaved", 4, 4, 2, "step"),
    ("zero-bubble", 8, 2, 32, "none"), ("zbv", 8, 2, 32, "none"), ("zbv", 4, 2, 2, "none"),
    ("dualpipev", 4, 2, 16, "none"),
)  # fmt: skip


def drawn(graph: Graph, generator: np.random.Generator, rows: int) -> np.ndarray:
    """Durations of equal stages with a heavy last one, [rows, classes]: layers, head, and traffic differ by row."""
    columns = np.zeros((rows, len(graph.classes)))
    layer = {"FORWARD": 1.0, "INPUT_GRAD": 1.0, "WEIGHT_GRAD": 1.0, "BACKWARD": 2.0}
    head = generator.uniform(0.0, 0.8, (rows, 1))
    for kind in graph.classes.kinds:
        of = columns[:, graph.classes.columns(kind)]
        if kind.name in layer:
            of += layer[kind.name] * generator.uniform(0.5, 2.0, (rows, 1))
            of[:, -1:] += layer[kind.name] * head
        else:
            of += generator.uniform(0.0, 0.4, (rows, 1))
    return columns


@pytest.mark.parametrize(("schedule", "pp", "vpp", "m", "gather"), KEYS)
def test_cuts_are_tight_after_64_simulations(schedule: str, pp: int, vpp: int, m: int, gather: str) -> None:
    """Simulated time over the longest known path, on strategies that no path is from."""
    generator = np.random.default_rng(3)
    reduce = "micro_batch" if gather == "micro_batch" else "step"
    graph = build(Key(schedule, pp, vpp, m, gather, reduce, "async"))  # type: ignore[arg-type]
    cuts = Cuts()
    for row in drawn(graph, generator, 64):
        cuts.add(graph, critical_path(graph, row)[1])
    fresh = drawn(graph, generator, 300)
    loose = step_seconds(graph, fresh) / cuts.bound_s(graph, fresh) - 1
    assert loose.min() > -1e-9
    assert np.median(loose) < 0.001
    assert np.quantile(loose, 0.99) < 0.01
