"""Which of Optuna's samplers finds the proven optimum soonest? Trials and seconds to within 1 %, unseeded.

    python benchmarks/sampler_speed.py [--seeds 10] [--trials 300] [--seconds 10] [--only qwen3-32b ...]

The optimum is proven first. A study starts from nothing: no usual starting points, no cuts of earlier studies. The
first problem was looked at while the parametrisation was made, the second never.
"""

from __future__ import annotations

import argparse
import logging
import platform
import time
import warnings
from contextlib import suppress
from statistics import median

import optuna
from search_speed import commit

from trainplan.costmodel.backends import backend
from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.job import Job
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.workload import Workload
from trainplan.planner.board import Board, Counts, Progress
from trainplan.planner.sampling import SamplerName, sample
from trainplan.planner.search import Pins, tune
from trainplan.planner.space import Space

PROBLEMS = {
    "qwen3-32b": ("Qwen/Qwen3-32B", "64xH100", 4096, 512),
    "llama3-70b": ("meta-llama/Llama-3.1-70B", "16x8xA100", 8192, 256),
}
NEAR = 1.01
SAMPLERS: tuple[SamplerName, ...] = ("tpe", "gp", "nsga2", "random")


class Over(Exception):
    """The optimum was met, or time is up."""


def run(space: Space, best_s: float, sampler: SamplerName, seed: int, trials: int, seconds: float) -> tuple[int, float]:
    """(trials, seconds of this process) until within 1 % of the optimum; (0, 0) if that did not happen."""
    start, hit = time.process_time(), (0, 0.0)

    def watch(progress: Progress) -> None:
        nonlocal hit
        spent = time.process_time() - start
        if progress.best_step_s is not None and progress.best_step_s <= best_s * NEAR:
            hit = progress.priced, spent
        if hit[0] or spent > seconds:
            raise Over

    board, counts = Board(20), Counts()
    with suppress(Over):
        sample(space, board, counts, trials=trials, seed=seed, path=None, report=watch, sampler=sampler, seeded=False)
    return hit


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", nargs="*", choices=PROBLEMS, default=list(PROBLEMS))
    given = parser.parse_args()
    logging.disable(logging.ERROR)  # a study that is stopped is no news
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    print(f"commit {commit()}, {platform.processor() or platform.machine()}, at most {given.trials} trials and "
          f"{given.seconds:g} s each")  # fmt: skip
    print("problem     sampler  within 1 %  trials: median (most)  seconds: median (most)")
    for name in given.only:
        model, cluster, seq_len, batch = PROBLEMS[name]
        job = Job(load_model(model), load_cluster(cluster), Workload(seq_len=seq_len, global_batch_size=batch))
        best_s = tune(job, "megatron", Pins(), top=1).candidates[0].step_s
        space = Space(job, backend("megatron"), Pins())
        for sampler in SAMPLERS:
            found = [run(space, best_s, sampler, seed, given.trials, given.seconds) for seed in range(given.seeds)]
            hits = [one for one in found if one[0]]
            line = f"{name:11} {sampler:8} {len(hits):4} of {len(found):2}"
            if hits:
                trials, seconds = [t for t, _ in hits], [s for _, s in hits]
                line += f"  {median(trials):14.0f} ({max(trials)})  {median(seconds):15.1f} ({max(seconds):.1f})"
            print(line, flush=True)


if __name__ == "__main__":
    main()
