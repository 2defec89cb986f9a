"""How far are predictions from measurements? Predicts every row of a file that says enough, and scores the errors.

Three ways to know the physical factors: as shipped; from all blocks but the row's own (``leave_one_block_out``, the
zero-shot figure); or from the other blocks and a few rows per hardware and stack (``calibrate``), which are not scored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainplan.costmodel.estimate import Interval
from trainplan.costmodel.factors import SECONDS_OF_KIND, FittedFactors, factor, shipped
from trainplan.planner.comparisons import METRICS, NORMAL_95, Comparison, compare, control_s, memory_interval
from trainplan.planner.fitting import Linear, as_factors, fit_all, linearise, log_seconds
from trainplan.planner.rows import read_rows
from trainplan.planner.scores import choose_calibration, over_draws, summarise

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Report:
    """Every row and metric, predicted or skipped with a reason, a line per block and metric, and the factors used."""

    rows: list[dict[str, Any]]
    summary: list[dict[str, Any]]
    factors: list[dict[str, Any]] = field(default_factory=list)


def validate_rows(
    path: Path,
    leave_one_block_out: bool = False,
    calibrate: int = 0,
    draws: int = 10,
    on_progress: OnProgress | None = None,
) -> Report:
    """Predict the rows of a file and score the predictions.

    Args:
        path: JSONL, one measured configuration per line.
        leave_one_block_out: Predict each block with factors fitted to the other blocks of the file.
        calibrate: Rows per hardware and stack that refine those factors and are not scored; 0 = none.
        draws: How many random choices of these rows; figures are means over them.
        on_progress: Called with (done, of).

    Raises:
        UsageError: The file is missing, empty or malformed.
    """
    comparisons, skipped = compare(read_rows(path))
    times = [c for c in comparisons if c.as_step_s is not None]
    memory = [c.result(memory_interval(c)) for c in comparisons if c.as_step_s is None]
    if not (leave_one_block_out or calibrate):
        found = [_timed_result(c, shipped()) for c in times]
        results = _ordered([*found, *memory, *skipped], path)
        return Report(results, summarise(results))
    fitted = fit_all([c.timed() for c in times], progress=on_progress)
    by_block: dict[str, list[Comparison]] = defaultdict(list)
    for c in times:
        by_block[c.row.block].append(c)
    found, summaries = [], list[list[dict[str, Any]]]()
    for block, mine in by_block.items():
        others = as_factors(fitted.without_block(block), fitted.names)
        found += zero_shot(mine, others)
        if calibrate:
            summaries += calibrated(mine, others, calibrate, draws)
    results = _ordered([*found, *memory, *skipped], path)
    everything = fitted.without_block(None)
    factors = [
        {
            "name": f.factor.name, "value": f.value, "log_sd": f.log_sd, "unit": f.factor.unit,
            "learned": f.learned, "at_limit": f.at_limit, "meaning": f.factor.meaning,
            "blocks": sorted({t.block for t in fitted.runs if f.factor.name in t.flat_names}),
        }
        for f in everything.factors
    ]  # fmt: skip
    summary = over_draws(summaries) if calibrate else summarise(results)
    return Report(results, summary, factors)


def _interval(c: Comparison, log_step: float, log_sd: float, points: float) -> Interval:
    """The metric's prediction from a log step time, its standard deviation, and how many of them the 95 % point is."""
    step = [float(np.exp(log_step + sign * points * log_sd)) for sign in (-1, 0, 1)]
    if c.metric == "step_time_s":
        return Interval(low=step[0], mid=step[1], high=step[2])
    work = c.run.job.workload.tokens_per_step / c.run.job.cluster.num_gpus
    return Interval(low=work / step[2], mid=work / step[1], high=work / step[0])


def _known(c: Comparison, factors: FittedFactors) -> FittedFactors:
    """The factors with a column, at its prior, for each that the run needs and nothing was fitted for."""
    extra = [name for name in c.timed().flat_names if name not in factors.index]
    if not extra:
        return factors
    size = len(factors.names)
    cov = np.zeros((size + len(extra),) * 2)
    cov[:size, :size] = factors.cov
    for i, name in enumerate(extra, start=size):
        cov[i, i] = factor(name).prior_log_sd ** 2
    theta = np.concatenate([factors.theta, np.zeros(len(extra))])
    return FittedFactors((*factors.names, *extra), theta, cov, factors.residual_log_sd)


def _timed_result(c: Comparison, factors: FittedFactors) -> dict[str, Any]:
    known = _known(c, factors)
    linear = linearise([c.timed()], known.names, known.theta)
    return _record(c, linear.log_seconds[0], linear.slopes[0], known)


MOE_LOG_SD = 0.15
"""What routing, permutation and grouped kernels add to the residual of a model with experts, before any was measured:
the measured time of one expert layer differs by more than this between balanced and skewed tokens."""


def _record(
    c: Comparison, log_step: float, slopes: np.ndarray, factors: FittedFactors, points: float = NORMAL_95
) -> dict[str, Any]:
    variance = float(slopes @ factors.cov @ slopes) + factors.residual_log_sd**2
    variance += MOE_LOG_SD**2 if c.run.job.model.moe else 0.0
    work = c.run.job.workload.tokens_per_step / c.run.job.cluster.num_gpus
    control = control_s(c.run)
    return {
        **c.result(_interval(c, log_step, float(np.sqrt(variance)), points)),
        "control": control if c.metric == "step_time_s" else work / control,
    }


def zero_shot(mine: Sequence[Comparison], factors: FittedFactors) -> list[dict[str, Any]]:
    """Results of a block under factors that have not seen it."""
    return [_timed_result(c, factors) for c in mine]


MACHINE = 1.5
"""Prior width of what sets one machine apart from others of its kind, in widths of a scope."""
REPEAT_LOG_SD = 0.04
"""What two configurations on one machine and stack differ by when their factors are known."""
HUBER_FROM, HUBER_ROUNDS = 2.0, 4
"""A row that the others' factors miss by more standard deviations than this counts less, as in Huber 1964."""
RESIDUAL_WEIGHT = 4
"""Rows that the prior residual counts for."""
RESIDUAL_LOG_SD = 0.05
"""What the formulas are thought to leave on a machine whose factors are known, before its rows say more."""
STUDENT_95 = 1.86
"""95 % point of Student's t with 8 degrees of freedom: the residual is known from a handful of rows."""


def calibrated(mine: Sequence[Comparison], factors: FittedFactors, k: int, draws: int) -> list[list[dict[str, Any]]]:
    """A summary per draw: k rows of each hardware and stack refine the factors, the others are scored."""
    groups: dict[tuple[str, str, str], list[Comparison]] = defaultdict(list)
    for c in mine:
        groups[c.group].append(c)
    known = factors
    for c in mine:
        known = _known(c, known)
    known = _of_one_machine(known, mine)
    linear = {c.row.id: linearise([c.timed()], known.names, known.theta) for c in mine}
    results: list[list[dict[str, Any]]] = [[] for _ in range(draws)]
    chosen: list[set[str]] = [set() for _ in range(draws)]
    for group in groups.values():
        posteriors = []
        for draw in range(draws):
            ids = set(choose_calibration((c.row.id for c in group), k, draw))
            chosen[draw] |= ids
            seen = [c for c in group if c.row.id in ids]
            posteriors.append(update(known, seen, [linear[c.row.id] for c in seen]))
        index = {name: i for i, name in enumerate(known.names)}
        thetas = np.stack([posterior.theta for posterior in posteriors])
        for c in group:
            steps = log_seconds(c.timed(), index, thetas)
            for draw, posterior in enumerate(posteriors):
                record = _record(c, float(steps[draw]), linear[c.row.id].slopes[0], posterior, STUDENT_95)
                results[draw].append(record)
    return [summarise(found, ids) for found, ids in zip(results, chosen, strict=True)]


def _of_one_machine(factors: FittedFactors, mine: Sequence[Comparison]) -> FittedFactors:
    """The factors with the spread of single machines: added to the widest scope of each kind."""
    widest = {of[0] for c in mine for of in c.timed().names.values()}
    cov = factors.cov.copy()
    for i, name in enumerate(factors.names):
        if name in widest:
            cov[i, i] += (MACHINE * SECONDS_OF_KIND[name.split("/")[0]][0]) ** 2
    return replace(factors, cov=cov)


def update(
    factors: FittedFactors, seen: Sequence[Comparison], linear: Sequence[Linear], rounds: int = 3
) -> FittedFactors:
    """Factors after some rows were measured: Gauss-Newton steps of the Gaussian posterior.

    theta' = theta0 + S J' (J S J' + s^2 I)^-1 (y - f(theta) + J (theta - theta0)), with S the covariance before. The
    residual that is left for other rows is read from what each row would be missed by without it.
    """
    theta0, cov = factors.theta, factors.cov
    measured = np.log([c.timed().seconds for c in seen])
    theta, values = theta0, np.array([of.log_seconds[0] for of in linear])
    slopes = np.array([of.slopes[0] for of in linear])
    noise = np.full(len(seen), REPEAT_LOG_SD**2)
    for at in range(rounds):
        if at:
            again = linearise([c.timed() for c in seen], factors.names, theta)
            values, slopes = again.log_seconds, again.slopes
        wanted = measured - values + slopes @ (theta - theta0)
        for _ in range(HUBER_ROUNDS):
            gain = cov @ slopes.T @ np.linalg.inv(slopes @ cov @ slopes.T + np.diag(noise))
            off = np.abs(wanted - slopes @ (gain @ wanted)) / REPEAT_LOG_SD
            noise = REPEAT_LOG_SD**2 * np.maximum(off / HUBER_FROM, 1.0)
        theta = theta0 + gain @ wanted
    after = cov - gain @ slopes @ cov
    left = (wanted - slopes @ (theta - theta0)) / np.clip(1 - np.diag(slopes @ gain), 0.3, 1.0)
    before = RESIDUAL_WEIGHT * RESIDUAL_LOG_SD**2
    residual = np.sqrt((before + float(left @ left)) / (RESIDUAL_WEIGHT + len(seen)))
    return FittedFactors(factors.names, theta, (after + after.T) / 2, float(residual))


def _ordered(results: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Results in the order of the file, then of the metrics."""
    order = {row.id: i for i, row in enumerate(read_rows(path))}
    return sorted(results, key=lambda r: (order[r["id"]], METRICS.index(r["metric"])))
