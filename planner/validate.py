"""How far are predictions from measurements? Predicts every row of a file that says enough, and sums up the errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from trainplan.costmodel.errors import TrainplanError
from trainplan.costmodel.estimate import Estimate, Interval
from trainplan.costmodel.step import estimate
from trainplan.planner.rows import Row, Run, Skip, interpret, read_rows

METRICS = ("step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib")
MEMORY = (
    ("max over ranks of torch max_memory_allocated", "allocated"),
    ("torchtitan logged peak active/reserved memory", "reserved"),
    ("nvidia-smi", "device"),
)
"""Start of ``peak_mem_definition`` -> which of our three numbers it is."""


@dataclass(frozen=True)
class Report:
    """Every row and metric, predicted or skipped with a reason, and a line per block and metric."""

    rows: list[dict[str, Any]]
    summary: list[dict[str, Any]]


def validate_rows(path: Path, on_progress: Callable[[int, int], None] | None = None) -> Report:
    """Predict the rows of a file.

    Raises:
        UsageError: The file is missing, empty or malformed.
    """
    rows = list(read_rows(path))
    results: list[dict[str, Any]] = []
    for done, row in enumerate(rows, start=1):
        results += predict(row)
        if on_progress is not None:
            on_progress(done, len(rows))
    return Report(results, summarise(results))


def predict(row: Row) -> list[dict[str, Any]]:
    """One result per metric that the row has a measurement of; one without a metric's value if it has none at all."""
    measured = {name: row.measured.get(name) for name in METRICS}
    if measured["step_time_s"] is not None:
        measured["tokens_per_s_per_gpu"] = None  # the same fact twice
    wanted = {name: float(value) for name, value in measured.items() if value is not None}
    if not wanted:
        return [_skipped(row, "step_time_s", "no step time, throughput or memory is published")]
    try:
        run = interpret(row)
        found = estimate(run.job, run.stack, run.strategy)
    except (Skip, TrainplanError) as reason:
        return [_skipped(row, name, str(reason)) for name in wanted]
    return [_compared(row, name, value, run, found) for name, value in wanted.items()]


def _skipped(row: Row, metric: str, reason: str) -> dict[str, Any]:
    return {"id": row.id, "block": row.block, "metric": metric, "skipped": reason}


def _compared(row: Row, metric: str, measured: float, run: Run, found: Estimate) -> dict[str, Any]:
    if metric == "peak_mem_gib":
        definition = str(row.measured.get("peak_mem_definition"))
        kind = next((kind for start, kind in MEMORY if definition.startswith(start)), None)
        if kind is None:
            return _skipped(row, metric, f"peak_mem_definition {definition!r} is none of allocated, reserved, device")
        predicted = _memory(found, kind)
    else:
        predicted = found.step_time_s
        if metric == "tokens_per_s_per_gpu":
            work = run.job.workload.tokens_per_step / run.job.cluster.num_gpus
            predicted = Interval(low=work / predicted.high, mid=work / predicted.mid, high=work / predicted.low)
    return {
        "id": row.id,
        "block": row.block,
        "metric": metric,
        "measured": measured,
        "predicted": predicted.mid,
        "low": predicted.low,
        "high": predicted.high,
        "error_frac": predicted.mid / measured - 1,
    }


def _memory(found: Estimate, kind: str) -> Interval:
    """The fullest rank's memory of one kind [GiB]."""
    peak, gib = found.peak, 2**30
    if kind == "allocated":
        value = max(stage.allocated_bytes for stage in found.stages) / gib
        return Interval(low=value, mid=value, high=value)
    of = peak.reserved_bytes if kind == "reserved" else peak.device_bytes
    return Interval(low=of.low / gib, mid=of.mid / gib, high=of.high / gib)


def summarise(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line per block and metric: rows, skipped, errors as fractions, and the share inside the stated interval."""
    lines = []
    for block, metric in dict.fromkeys((r["block"], r["metric"]) for r in results):
        mine = [r for r in results if (r["block"], r["metric"]) == (block, metric)]
        predicted = [r for r in mine if "skipped" not in r]
        errors = [r["error_frac"] for r in predicted]
        inside = [r["low"] <= r["measured"] <= r["high"] for r in predicted]
        lines.append(
            {
                "block": block,
                "metric": metric,
                "rows": len(predicted),
                "skipped": len(mine) - len(predicted),
                **error_figures(errors),
                "coverage": fmean(inside) if inside else None,
            }
        )
    return lines


def error_figures(errors: Sequence[float]) -> dict[str, float | None]:
    """Mean, median and 90 % point of absolute errors, and the mean signed one; None without any."""
    if not errors:
        return {"mape": None, "median": None, "p90": None, "bias": None}
    absolute = sorted(abs(error) for error in errors)
    p90 = absolute[min(len(absolute) - 1, int(0.9 * len(absolute)))]
    return {"mape": fmean(absolute), "median": median(absolute), "p90": p90, "bias": fmean(errors)}
