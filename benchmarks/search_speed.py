"""How fast is the search? Strategies priced per second, and seconds to prove the winner of four named problems.

    python benchmarks/search_speed.py [--backend megatron] [--only qwen3-8b ...]

Each problem runs in a process of its own, so that imports, tables and compiled code are counted (cold) and its memory
is its own. Pricing covers every strategy of a problem: legality, the bound of its step's time and that of its memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROBLEMS = {
    "qwen3-8b": ("Qwen/Qwen3-8B", "8xH100", 4096, 128),
    "qwen3-32b": ("Qwen/Qwen3-32B", "64xH100", 4096, 512),
    "gpt3-175b": ("GPT-3 175B", "64x8xA100", 2048, 1536),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B", "256xH100", 4096, 2048),
}
"""Name -> model, cluster, tokens of a sequence and sequences of a batch."""


def problem(name: str):  # type: ignore[no-untyped-def]  # its type is imported inside, where imports are timed
    """The job of a named problem."""
    from trainplan.costmodel.cluster_config import load_cluster
    from trainplan.costmodel.job import Job
    from trainplan.costmodel.model import ModelSpec
    from trainplan.costmodel.model_config import load_model
    from trainplan.costmodel.workload import Workload

    model, cluster, seq_len, batch = PROBLEMS[name]
    gpt3 = ModelSpec(
        name="GPT-3 175B", family="gpt", num_layers=96, hidden_size=12288, ffn_hidden_size=49152, num_heads=96,
        num_kv_heads=96, head_dim=128, vocab_size=51200, max_position_embeddings=2048, tie_word_embeddings=False,
        gated_mlp=False, norm="layer", position="learned",
    )  # fmt: skip
    spec = gpt3 if model == gpt3.name else load_model(model)
    return Job(spec, load_cluster(cluster), Workload(seq_len=seq_len, global_batch_size=batch))


def certify(name: str, backend_name: str, gap_frac: float) -> dict[str, float | int]:
    """Prove the winner of a problem."""
    from trainplan.planner.search import Pins, tune

    result = tune(problem(name), backend_name, Pins(), gap_frac=gap_frac)
    record = result.record
    return {
        "covered": record.covered, "left out": record.dropped, "illegal": sum(record.illegal.values()),
        "too large": record.infeasible, "feasible": record.feasible, "simulated": record.simulated,
        "step_s": result.candidates[0].step_s,
    }  # fmt: skip


def price_all(name: str, backend_name: str) -> dict[str, float | int]:
    """Legality, bounds of time and memory of every strategy of a problem."""
    from trainplan.costmodel.backends import backend
    from trainplan.costmodel.bounds import lower_bound_s
    from trainplan.costmodel.layout import layout
    from trainplan.costmodel.memory import least_device_bytes
    from trainplan.planner.space import Pins, Space
    from trainplan.planner.unit_book import UnitBook

    job = problem(name)
    space = Space(job, backend(backend_name), Pins())
    book = UnitBook(space)
    covered, priced = sum(space.count(family) for family in space.families()), 0
    for group in space.groups():
        legal, _ = space.backend.legal_mask(job, group.table, group.canonical)
        if not legal.any():
            continue
        meshes = legal.any(axis=tuple(range(1, legal.ndim)))
        if meshes.size > 1:
            group = group.take(meshes.nonzero()[0])
        first = group.table.row(0)
        lower_bound_s(job, book.stack, group.table, book.units(group))
        least_device_bytes(
            job, book.stack, group.table, layout(job, first), first.grad_accum, first.schedule
        )  # fmt: skip
        priced += group.size
    return {"covered": covered, "priced": priced}


def child(what: str, name: str, backend_name: str, gap_frac: float) -> None:
    """Run one measurement and print it as JSON, with its seconds and memory."""
    start, cpu = time.perf_counter(), time.process_time()
    run: dict[str, Callable[[], dict[str, float | int]]] = {
        "certify": lambda: certify(name, backend_name, gap_frac),
        "price": lambda: price_all(name, backend_name),
    }
    found = run[what]()
    seconds = {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
    print(json.dumps({**found, **seconds, "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def measured(what: str, name: str, backend_name: str, gap_frac: float = 0.0) -> dict[str, float]:
    """One measurement in a process of its own; ``cold_s`` counts the interpreter's start."""
    command = [sys.executable, "-P", __file__, "--child", what, name, "--backend", backend_name, "--gap", str(gap_frac)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return {**found, "cold_s": time.perf_counter() - start}


def commit() -> str:
    """Commit of the code, and whether there is more than that."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    return head.strip() + (" + uncommitted" if changed else "")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="megatron")
    parser.add_argument("--only", nargs="*", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "PROBLEM"), help=argparse.SUPPRESS)
    parser.add_argument("--gap", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*given.child, given.backend, given.gap)
        return
    print(f"commit {commit()}, {platform.processor() or platform.machine()}, backend {given.backend}")
    print(f"{'problem':16} {'gap':>5} {'cold s':>7} {'cpu s':>6} {'MB':>5} {'covered':>12} {'left out':>12}"
          f" {'illegal':>11} {'too large':>10} {'feasible':>9} {'simulated':>9} {'step s':>8}")  # fmt: skip
    for name in given.only:
        for gap in (0.005, 0.0):
            of = measured("certify", name, given.backend, gap)
            print(f"{name:16} {gap:5.1%} {of['cold_s']:7.2f} {of['cpu_s']:6.2f} {of['rss_mb']:5.0f} {of['covered']:12,}"
                  f" {of['left out']:12,} {of['illegal']:11,} {of['too large']:10,} {of['feasible']:9,}"
                  f" {of['simulated']:9,} {of['step_s']:8.3f}", flush=True)  # fmt: skip
    for name in given.only[:2]:
        of = measured("price", name, given.backend)
        covered, priced = (of[what] / of["seconds"] for what in ("covered", "priced"))
        print(f"{name}: {of['covered']:,} strategies in {of['seconds']:.2f} s, of which {of['priced']:,} were priced: "
              f"{covered:,.0f} covered and {priced:,.0f} priced per second")  # fmt: skip


if __name__ == "__main__":
    main()
