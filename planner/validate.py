"""How far are predictions from measurements? Predicts every row of a file that says enough, and scores the errors.

Three ways to know the physical factors: as shipped; from all blocks but the row's own (``leave_one_block_out``, the
zero-shot figure); or from the other blocks and a few rows per hardware and stack (``calibrate``), which are not scored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainplan.costmodel.errors import TrainplanError
from trainplan.costmodel.estimate import Interval
from trainplan.costmodel.factors import FittedFactors, factor, shipped
from trainplan.costmodel.layout import layout
from trainplan.costmodel.memory import rank_bytes, stage_memory
from trainplan.costmodel.stacks import STACKS
from trainplan.costmodel.step import model_flops_per_token
from trainplan.costmodel.strategy import StrategyTable
from trainplan.planner.fitting import Timed, as_factors, fit_all, linearise, log_seconds
from trainplan.planner.rows import Row, Run, Skip, interpret, read_rows
from trainplan.planner.scores import choose_calibration, over_draws, summarise

METRICS = ("step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib")
MEMORY = (
    ("max over ranks of torch max_memory_allocated", "allocated"),
    ("torchtitan logged peak active/reserved memory", "reserved"),
    ("nvidia-smi", "device"),
    ("GiB per GPU as written by the source (rounded, nvidia-smi style)", "device"),
)
"""Start of ``peak_mem_definition`` -> which of our three numbers it is."""
NORMAL_95 = 1.6449
"""Standard deviations from the mean to the 5 and 95 % points of a normal distribution."""
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Report:
    """Every row and metric, predicted or skipped with a reason, a line per block and metric, and the factors used."""

    rows: list[dict[str, Any]]
    summary: list[dict[str, Any]]
    factors: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """A measured metric of a run. ``as_step_s`` is the step time it implies; None for memory."""

    row: Row
    run: Run
    metric: str
    measured: float
    as_step_s: float | None

    @property
    def group(self) -> tuple[str, str, str]:
        """Block, hardware and stack: what a calibration is of."""
        return self.row.block, self.run.job.cluster.device.name, self.run.stack

    def result(self, predicted: Interval) -> dict[str, Any]:
        """The record of a prediction in the metric's own unit."""
        return {
            "id": self.row.id,
            "block": self.row.block,
            "metric": self.metric,
            "measured": self.measured,
            "predicted": predicted.mid,
            "low": predicted.low,
            "high": predicted.high,
            "error_frac": predicted.mid / self.measured - 1,
            "workload": workload_key(self.row),
        }

    def timed(self) -> Timed:
        """As an observation of a step time."""
        assert self.as_step_s is not None  # the caller looked
        return Timed(self.row.id, self.row.block, self.run, self.as_step_s)


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


def compare(rows: Any) -> tuple[list[Comparison], list[dict[str, Any]]]:
    """(what can be predicted, skipped results): twins of one configuration are compared once, the newest container."""
    comparisons: list[Comparison] = []
    skipped: list[dict[str, Any]] = []
    for row in rows:
        found, reasons = _comparisons(row)
        comparisons += found
        skipped += reasons
    best: dict[str, Comparison] = {}
    for c in sorted(comparisons, key=lambda c: str((c.row.extra or {}).get("container", "")), reverse=True):
        kept = best.setdefault(_identity(c), c)
        if kept is not c:
            skipped.append(_skipped(c.row, c.metric, f"same configuration as {kept.row.id}", complete=False))
    kept_ids = {id(c) for c in best.values()}
    return [c for c in comparisons if id(c) in kept_ids], skipped


def _identity(c: Comparison) -> str:
    """Equal for rows that ran the same; memory does not depend on how many micro-batches a step has."""
    s, workload = c.run.strategy, c.run.job.workload
    timed = c.as_step_s is not None
    extra = c.row.extra or {}
    parts = (
        c.row.block, c.metric, c.run.stack, c.run.job.model.model_dump_json(), c.run.job.cluster.name,
        workload.seq_len, workload.global_batch_size if timed else "", c.row.precision, c.row.task,
        (s if timed else s.model_copy(update={"grad_accum": 1})).model_dump_json(), extra.get("attention_backend"),
    )  # fmt: skip
    return "|".join(str(part) for part in parts)


def _comparisons(row: Row) -> tuple[list[Comparison], list[dict[str, Any]]]:
    measured = {name: row.measured.get(name) for name in METRICS}
    if measured["step_time_s"] is not None:
        measured["tokens_per_s_per_gpu"] = None  # the same fact twice
    wanted = {name: float(value) for name, value in measured.items() if value is not None}
    if not wanted:
        reason = "no step time, throughput or memory is published"
        return [], [_skipped(row, "step_time_s", reason, complete=False)]
    try:
        run = interpret(row)
    except (Skip, TrainplanError) as reason_:
        lost = complete(row) and "duplicate" not in str(reason_) and "excluded" not in str(reason_)
        return [], [_skipped(row, name, str(reason_), lost) for name in wanted]
    found, skipped = [], []
    for name, value in wanted.items():
        if name == "peak_mem_gib":
            if memory_kind(row) is None:
                reason = (
                    f"peak_mem_definition {row.measured.get('peak_mem_definition')!r} is none of allocated, reserved, "
                    "device"
                )
                skipped.append(_skipped(row, name, reason, complete=False))
                continue
            found.append(Comparison(row, run, name, value, None))
        else:
            work = run.job.workload.tokens_per_step / run.job.cluster.num_gpus
            found.append(Comparison(row, run, name, value, value if name == "step_time_s" else work / value))
    return found, skipped


def complete(row: Row) -> bool:
    """Whether a row states its whole layout and model shape."""
    m = row.model
    layout_known = all(getattr(row, name) for name in ("seq", "gbs", "mbs", "tp", "pp", "dp"))
    return layout_known and all(getattr(m, name) for name in ("layers", "hidden", "heads", "ffn"))


def workload_key(row: Row) -> str:
    """Equal for layouts of the same work on the same GPUs."""
    m = row.model
    parts = (m.name, m.layers, m.hidden, row.gpu, row.n_gpus, row.seq, row.gbs, row.precision, row.task)
    return "|".join(str(part) for part in parts)


def _skipped(row: Row, metric: str, reason: str, complete: bool) -> dict[str, Any]:
    return {"id": row.id, "block": row.block, "metric": metric, "skipped": reason, "complete": complete}


def control_s(run: Run) -> float:
    """The step time of constant MFU, up to a factor: model FLOPs, recomputation and the pipeline's bubble."""
    s, job = run.strategy, run.job
    passes = {"full": 4 / 3, "selective": 1.0, "none": 1.0}[s.recompute]
    bubble = 1 + (s.pp - 1) / (s.grad_accum * s.vpp)
    peaks = job.cluster.device.peak_flops_per_s
    peak = (peaks.get(s.precision) or peaks[job.workload.precision]).value
    work = model_flops_per_token(job) * job.workload.tokens_per_step * passes * bubble
    return work / (job.cluster.num_gpus * peak)


def memory_kind(row: Row) -> str | None:
    """Which of allocated, reserved and device a row's memory is; None if its definition is none of them."""
    definition = str(row.measured.get("peak_mem_definition"))
    return next((kind for start, kind in MEMORY if definition.startswith(start)), None)


def memory_interval(c: Comparison) -> Interval:
    """The fullest rank's memory of the row's kind [GiB]."""
    job, s = c.run.job, c.run.strategy
    table = StrategyTable.from_strategies([s])
    gpu = job.cluster.device.kind == "gpu"
    ranks = rank_bytes(job, STACKS[c.run.stack], table, layout(job, s), s.grad_accum, s.schedule)
    stages = [stage_memory(rank, gpu) for rank in ranks]
    gib = 2**30
    kind = memory_kind(c.row)
    if kind == "allocated":
        value = max(stage.allocated_bytes for stage in stages) / gib
        spread = ALLOCATED_LOG_SD * NORMAL_95
        return Interval(low=value * np.exp(-spread), mid=value, high=value * np.exp(spread))
    peak = max(stages, key=lambda stage: stage.device_bytes.high)
    of = peak.reserved_bytes if kind == "reserved" else peak.device_bytes
    return Interval(low=of.low / gib, mid=of.mid / gib, high=of.high / gib)


ALLOCATED_LOG_SD = 0.02
"""What the count of live tensors leaves out: workspaces and temporaries of kernels."""


def _interval(c: Comparison, log_step: float, log_sd: float) -> Interval:
    """The metric's prediction from a log step time and its standard deviation."""
    step = [float(np.exp(log_step + sign * NORMAL_95 * log_sd)) for sign in (-1, 0, 1)]
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


def _record(c: Comparison, log_step: float, slopes: np.ndarray, factors: FittedFactors) -> dict[str, Any]:
    variance = float(slopes @ factors.cov @ slopes) + factors.residual_log_sd**2
    work = c.run.job.workload.tokens_per_step / c.run.job.cluster.num_gpus
    control = control_s(c.run)
    return {
        **c.result(_interval(c, log_step, float(np.sqrt(variance)))),
        "control": control if c.metric == "step_time_s" else work / control,
    }


def zero_shot(mine: Sequence[Comparison], factors: FittedFactors) -> list[dict[str, Any]]:
    """Results of a block under factors that have not seen it."""
    return [_timed_result(c, factors) for c in mine]


def calibrated(mine: Sequence[Comparison], factors: FittedFactors, k: int, draws: int) -> list[list[dict[str, Any]]]:
    """A summary per draw: k rows of each hardware and stack refine the factors, the others are scored."""
    groups: dict[tuple[str, str, str], list[Comparison]] = defaultdict(list)
    for c in mine:
        groups[c.group].append(c)
    known = factors
    for c in mine:
        known = _known(c, known)
    linear = {c.row.id: linearise([c.timed()], known.names, known.theta) for c in mine}
    summaries = []
    for draw in range(draws):
        results: list[dict[str, Any]] = []
        chosen: set[str] = set()
        for group in groups.values():
            ids = set(choose_calibration((c.row.id for c in group), k, draw))
            chosen |= ids
            seen = [c for c in group if c.row.id in ids]
            posterior = update(known, seen, [linear[c.row.id] for c in seen])
            index = {name: i for i, name in enumerate(known.names)}
            for c in group:
                log_step = log_seconds(c.timed(), index, posterior.theta[None])[0]
                results.append(_record(c, float(log_step), linear[c.row.id].slopes[0], posterior))
        summaries.append(summarise(results, chosen))
    return summaries


def update(factors: FittedFactors, seen: Sequence[Comparison], linear: Sequence[Any], rounds: int = 3) -> FittedFactors:
    """Factors after some rows were measured: Gauss-Newton steps of the Gaussian posterior.

    theta' = theta0 + S J' (J S J' + s^2 I)^-1 (y - f(theta) + J (theta - theta0)), with S the covariance before.
    """
    theta0, cov = factors.theta, factors.cov
    measured = np.log([c.timed().seconds for c in seen])
    noise = factors.residual_log_sd**2 * np.eye(len(seen))
    theta, values = theta0, np.array([of.log_seconds[0] for of in linear])
    slopes = np.array([of.slopes[0] for of in linear])
    for at in range(rounds):
        if at:
            again = linearise([c.timed() for c in seen], factors.names, theta)
            values, slopes = again.log_seconds, again.slopes
        gain = cov @ slopes.T @ np.linalg.inv(slopes @ cov @ slopes.T + noise)
        theta = theta0 + gain @ (measured - values + slopes @ (theta - theta0))
    after = cov - gain @ slopes @ cov
    return FittedFactors(factors.names, theta, (after + after.T) / 2, factors.residual_log_sd)


def _ordered(results: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """Results in the order of the file, then of the metrics."""
    order = {row.id: i for i, row in enumerate(read_rows(path))}
    return sorted(results, key=lambda r: (order[r["id"]], METRICS.index(r["metric"])))
