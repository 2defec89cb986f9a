"""How far are predictions from measurements? A line per block and metric, and why rows were left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trainplan.planner.render.console import heading, table
from trainplan.planner.render.format import percent, whole

if TYPE_CHECKING:
    from trainplan.planner.validate import Report

MOST_REASONS = 10


def print_report(to: Console, report: Report) -> None:
    """The summary of a report, then the most frequent reasons why rows were skipped."""
    heading(to, "Error of predictions: mean absolute, median absolute, 90 %, and mean signed (bias)")
    table(
        to,
        [_row(line) for line in report.summary],
        headers=("block", "metric", "rows", "skipped", "mean", "median", "90 %", "bias"),
        right=range(2, 8),
    )
    if ranked := [_scores(line) for line in report.summary if line.get("coverage") is not None]:
        heading(
            to, "Ranking (tau within a workload, regret of the first and of the best of three), 90 % intervals, control"
        )
        table(
            to,
            ranked,
            headers=("block", "metric", "tau", "regret", "top 3", "inside", "half width", "constant MFU"),
            right=range(2, 8),
        )
    if reasons := skipped(report.rows)[:MOST_REASONS]:
        heading(to, "Skipped")
        table(to, [(whole(n), reason) for reason, n in reasons], right=(0,))


def _scores(line: Mapping[str, Any]) -> tuple[str, ...]:
    tau = line.get("tau_within")
    shares = ("regret_mean", "regret_top3_mean", "coverage", "half_width", "control_mape")
    return (
        str(line["block"]),
        str(line["metric"]),
        "" if tau is None else f"{tau:.2f}",
        *("" if line.get(key) is None else percent(line[key]) for key in shares),
    )


def skipped(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """(reason, rows) of what was left out, the most frequent first."""
    counts = Counter(str(row["skipped"]) for row in rows if row.get("skipped"))
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _row(line: Mapping[str, Any]) -> tuple[str, ...]:
    errors = (line["mape"], line["median"], line["p90"], line["bias"])
    return (
        str(line["block"]),
        str(line["metric"]),
        whole(line["rows"]),
        whole(line["skipped"]),
        *("" if error is None else percent(error) for error in errors),
    )
