"""How many GPUs does a job need? The fewest that fit, that meet a deadline, or that stay within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.errors import NoPlanError, TrainplanError, UsageError
from trainplan.costmodel.job import Job
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.workload import Workload
from trainplan.planner.search import Pins, Result, tune

GAP_FRAC = 0.005


@dataclass(frozen=True)
class Sized:
    """The best plan on some number of GPUs.

    Attributes:
        job: With its cluster.
        result: Of the search.
        hours: To train all tokens; None where the workload does not say how many.
        cost: Of these hours, in the currency of the price; None without a price.
    """

    job: Job
    result: Result
    hours: float | None
    cost: float | None

    @property
    def num_gpus(self) -> int:
        """GPUs of the cluster."""
        return self.job.cluster.num_gpus


@dataclass(frozen=True)
class Goal:
    """What a size must reach: its name, and whether a plan does."""

    name: str
    holds: Callable[[Sized], bool]


def goals(within_hours: float | None, budget: float | None) -> list[Goal]:
    """To fit; and a deadline and a budget where they are given."""
    found = [Goal("fit", lambda _: True)]
    if within_hours is not None:
        found.append(Goal("deadline", lambda of: of.hours is not None and of.hours <= within_hours))
    if budget is not None:
        found.append(Goal("budget", lambda of: of.cost is not None and of.cost <= budget))
    return found


def sizes(
    model: ModelSpec,
    gpu: str,
    workload: Workload,
    backend_name: str,
    pins: Pins,
    *,
    most: int,
    price_per_gpu_hour: float | None = None,
) -> Iterator[Sized]:
    """The best plan on 1, 2, 4, ... up to ``most`` GPUs of one kind; counts where none is legal or fits are left out.

    Raises:
        UsageError: There is no such GPU in the presets.
    """
    load_cluster(f"1x{gpu}")  # raises with the known names
    n = 1
    while n <= most:
        try:
            job = Job(model, load_cluster(f"{n}x{gpu}"), workload)
            result = tune(job, backend_name, pins, top=1, gap_frac=GAP_FRAC)
        except (NoPlanError, UsageError):
            result = None
        except TrainplanError:  # no network is known between nodes of this GPU
            return
        if result is not None:
            hours = None
            if workload.train_tokens is not None:
                hours = workload.train_tokens / result.estimate.tokens_per_s / 3600
            cost = None if hours is None or price_per_gpu_hour is None else hours * n * price_per_gpu_hour
            yield Sized(job, result, hours, cost)
        n *= 2


def answers(found: Iterator[Sized], asked: list[Goal]) -> tuple[dict[str, Sized], list[Sized]]:
    """(goal -> the fewest GPUs that reach it, every size that was looked at); ends when all goals are reached."""
    reached: dict[str, Sized] = {}
    seen = []
    for of in found:
        seen.append(of)
        for goal in asked:
            if goal.name not in reached and goal.holds(of):
                reached[goal.name] = of
        if len(reached) == len(asked):
            break
    return reached, seen
