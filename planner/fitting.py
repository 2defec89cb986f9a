"""How do factors explain measured steps? Predictions of many runs, their derivatives, and fits with some runs left out.

A prediction depends on about fifteen factors of its device, fabric and stack. One pricing with an axis of factor
vectors gives a prediction and all its derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trainplan.costmodel.calibrate import Observation, Posterior, fit
from trainplan.costmodel.factors import FittedFactors, factor, multipliers, scopes
from trainplan.costmodel.rates import rates
from trainplan.costmodel.stacks import STACKS
from trainplan.costmodel.step import price
from trainplan.costmodel.strategy import StrategyTable
from trainplan.planner.rows import Run

STEP = 0.02
"""Of a log factor, for derivatives: wide enough to see past a kink of a maximum, narrow enough to be one."""


@dataclass(frozen=True)
class Timed:
    """A run and the step time that was measured [s]."""

    id: str
    block: str
    run: Run
    seconds: float

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Kind -> factors that apply."""
        return scopes(self.run.job.cluster, STACKS[self.run.stack], self.run.strategy)

    @property
    def flat_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for of in self.names.values() for name in of))


def log_seconds(timed: Timed, index: dict[str, int], theta: np.ndarray) -> np.ndarray:
    """Log predicted step time [D] for factor vectors ``theta`` [D, P] whose columns are named by ``index``."""
    run = timed.run
    stated = rates(run.job.cluster, run.job.workload.precision)
    of = stated.slowed(multipliers(timed.names, index, theta))
    priced = price(run.job, run.stack, StrategyTable.from_strategies([run.strategy]), of)
    return np.asarray(np.log(np.broadcast_to(priced.step_s()[..., 0], (len(theta),))))


@dataclass(frozen=True)
class Linear:
    """Predictions of N runs around a factor vector: log seconds [N] and derivatives [N, P]."""

    log_seconds: np.ndarray
    slopes: np.ndarray


def linearise(
    runs: Sequence[Timed], names: Sequence[str], theta: np.ndarray, progress: Callable[[int], None] | None = None
) -> Linear:
    """Predictions and derivatives at ``theta`` [P]."""
    index = {name: i for i, name in enumerate(names)}
    values, slopes = np.empty(len(runs)), np.zeros((len(runs), len(names)))
    for i, timed in enumerate(runs):
        columns = [index[name] for name in timed.flat_names if name in index]
        points = np.tile(theta, (len(columns) + 1, 1))
        for row, column in enumerate(columns, start=1):
            points[row, column] += STEP
        found = log_seconds(timed, index, points)
        values[i] = found[0]
        slopes[i, columns] = (found[1:] - found[0]) / STEP
        if progress is not None:
            progress(i + 1)
    return Linear(values, slopes)


@dataclass(frozen=True)
class Fit:
    """Runs linearised around one factor vector, to be fitted with any of them left out."""

    runs: tuple[Timed, ...]
    names: tuple[str, ...]
    theta: np.ndarray
    linear: Linear

    def without_block(self, block: str | None) -> Posterior:
        """The factors that the runs of all other blocks give."""
        return self.given([i for i, timed in enumerate(self.runs) if timed.block != block])

    def given(self, kept: Sequence[int]) -> Posterior:
        """The factors that these runs give, each block weighing at most `BLOCK_WEIGHT` runs."""
        sizes: dict[str, int] = {}
        for i in kept:
            sizes[self.runs[i].block] = sizes.get(self.runs[i].block, 0) + 1
        observations = [
            Observation(
                self.runs[i].id,
                self.runs[i].seconds,
                log_sd=NOISE_LOG_SD * max(1.0, sizes[self.runs[i].block] / BLOCK_WEIGHT) ** 0.5,
            )
            for i in kept
        ]
        values, slopes = self.linear.log_seconds[list(kept)], self.linear.slopes[list(kept)]

        def log_predict(theta: np.ndarray) -> np.ndarray:
            return np.asarray(values + (theta - self.theta) @ slopes.T)

        return fit([factor(name) for name in self.names], observations, log_predict)


NOISE_LOG_SD = 0.06
"""What a run's time may differ from the right factors' prediction, before data says otherwise."""
BLOCK_WEIGHT = 20.0
"""Runs that a publication counts for at most: its rows share whatever the formulas get wrong about it."""


def fit_all(runs: Sequence[Timed], rounds: int = 2, progress: Callable[[int, int], None] | None = None) -> Fit:
    """Linearise around the factors that all runs give; ``rounds`` linearisations, each around the last optimum."""
    names = tuple(sorted({name for timed in runs for name in timed.flat_names}))
    theta = np.zeros(len(names))
    for at in range(rounds + 1):
        report = _part(progress, at, rounds + 1, len(runs))
        found = Fit(tuple(runs), names, theta, linearise(runs, names, theta, report))
        if at < rounds:
            theta = np.log(found.without_block(None).values)
    return found


def _part(progress: Callable[[int, int], None] | None, at: int, of: int, size: int) -> Callable[[int], None] | None:
    """Progress of one of several equal passes."""
    if progress is None:
        return None
    return lambda done: progress(at * size + done, of * size)


def as_factors(posterior: Posterior, names: Sequence[str]) -> FittedFactors:
    """A posterior as the factors that pricing takes."""
    return FittedFactors(tuple(names), np.log(posterior.values), posterior.cov, posterior.residual_log_sd)
