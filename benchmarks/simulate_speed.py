"""How fast are graphs of a step built and played? Prints one table; run it as ``python benchmarks/simulate_speed.py``.

Build times include the task orders. All are the best of some repetitions with numba's code already compiled; the first
line says what a fresh process pays before.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from trainplan.costmodel import orders
from trainplan.costmodel.compiled import Engine, load
from trainplan.costmodel.graph import ChainKey, Graph, Key, build, build_chain
from trainplan.costmodel.simulate import critical_path_counts, finish_times, step_seconds

KEYS: tuple[Key | ChainKey, ...] = (
    Key("interleaved", 16, 4, 128),
    Key("interleaved", 16, 4, 128, "window", "step_wait"),
    Key("interleaved", 16, 4, 128, "micro_batch", "micro_batch"),
    Key("zero-bubble", 16, 4, 128, "micro_batch", "micro_batch"),
    Key("1f1b", 8, 1, 64),
    Key("1f1b", 8, 1, 64, p2p="rendezvous"),
    Key("zbv", 8, 2, 64),
    Key("dualpipev", 8, 2, 64),
    Key("interleaved", 4, 2, 32),
    Key("1f1b", 4, 1, 32),
    ChainKey((0, *(1,) * 36, 2), 16, "micro_batch", "micro_batch"),
)


def fresh(key: Key | ChainKey, engine: Engine) -> Graph:
    """The graph of ``key``, nothing of it cached."""
    for cached in (orders.rank_orders, orders.gather_windows, build, build_chain):
        cached.cache_clear()
    return build(key, engine) if isinstance(key, Key) else build_chain(key, engine)


def best_ms(run: Callable[[], object], budget_s: float) -> float:
    """Least milliseconds of one call, over at least three calls and ``budget_s``."""
    times: list[float] = []
    until = time.perf_counter() + budget_s
    while len(times) < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def label(key: Key | ChainKey) -> str:
    """Short name of a key."""
    if isinstance(key, ChainKey):
        return f"chain {key.num_units} units,{key.num_micro_batches} {key.gather}/{key.reduce}"
    return f"{key.schedule} {key.pp},{key.vpp},{key.num_micro_batches} {key.gather}/{key.reduce} {key.p2p}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="time per figure [s]")
    parser.add_argument("--rows", type=int, default=1024, help="rows of a batch")
    parser.add_argument("--threads", type=int, default=2, help="threads of the last column")
    given = parser.parse_args()

    start = time.perf_counter()
    load()
    imported = time.perf_counter()
    small = fresh(Key("1f1b", 2, 1, 4), "numba")
    row = np.ones((1, len(small.classes)))
    step_seconds(small, row, "numba")
    critical_path_counts(small, row[0], "numba")
    first = time.perf_counter()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    print(
        f"import numba {imported - start:.2f} s, first use {first - imported:.2f} s (compiles, or loads what is kept)"
    )

    columns = ("nodes", "build", "build plain", "play", "play plain", "path", "rows/ms", f"x{given.threads} threads")
    print(f"{'schedule pp,vpp,m gather/reduce p2p':56}" + "".join(f"{name:>13}" for name in columns) + "   [ms]")
    for key in KEYS:
        graph = fresh(key, "numba")
        rows = np.random.default_rng(0).random((given.rows, len(graph.classes)))

        runs = (
            partial(fresh, key, "numba"),
            partial(fresh, key, "numpy"),
            partial(finish_times, graph, rows[0], "numba"),
            partial(finish_times, graph, rows[0], "numpy"),
            partial(critical_path_counts, graph, rows[0], "numba"),
            partial(step_seconds, graph, rows, "numba"),
            partial(step_seconds, graph, rows, "numba", given.threads),
        )
        *single, one_thread, many_threads = (best_ms(run, given.seconds) for run in runs)
        figures = (*single, given.rows / one_thread, given.rows / many_threads)
        print(f"{label(key):56}{len(graph):13,}" + "".join(f"{figure:13.4g}" for figure in figures))


if __name__ == "__main__":
    main()
