"""The screen of `planner validate`: errors as percentages, and why rows were left out."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

from trainplan.planner.render.console import console
from trainplan.planner.render.validation import print_report, skipped


@dataclass
class Report:
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: list[dict[str, Any]] = field(default_factory=list)


def line(**changes: Any) -> dict[str, Any]:
    values = {"block": "mbridge", "metric": "step_time_s", "rows": 1200, "skipped": 3, "mape": 0.153, "median": 0.1}
    return {**values, "p90": 0.305, "bias": -0.021, **changes}


def written(report: Report) -> str:
    stream = io.StringIO()
    print_report(console(stream), report)  # type: ignore[arg-type]  # has its fields
    return stream.getvalue()


def test_errors_are_percentages() -> None:
    (row,) = [text for text in written(Report(summary=[line()])).splitlines() if text.startswith("mbridge")]
    assert row.split() == ["mbridge", "step_time_s", "1,200", "3", "15.3", "%", "10.0", "%", "30.5", "%", "-2.1", "%"]


def test_a_block_without_a_scored_row_shows_no_error() -> None:
    empty = line(rows=0, mape=None, median=None, p90=None, bias=None)
    (row,) = [text for text in written(Report(summary=[empty])).splitlines() if text.startswith("mbridge")]
    assert row.split() == ["mbridge", "step_time_s", "0", "3"]


def test_reasons_are_counted_the_most_frequent_first() -> None:
    reasons = ["no layout", "no shape", "no shape", None]
    rows = [{"id": str(i), "block": "b", "metric": "m", "skipped": reason} for i, reason in enumerate(reasons)]
    assert skipped(rows) == [("no shape", 2), ("no layout", 1)]
    text = written(Report(rows=rows, summary=[line()]))
    assert text.index("2  no shape") < text.index("1  no layout")


def test_without_skipped_rows_nothing_is_said_of_them() -> None:
    assert "Skipped" not in written(Report(summary=[line(skipped=0)]))


def test_scores_follow_where_there_are_some() -> None:
    scored = line(tau_within=0.853, regret_mean=0.042, regret_top3_mean=0.0, coverage=0.91, half_width=0.15)
    text = written(Report(summary=[scored, line(block="bare")]))
    (row,) = [of for of in text[text.index("Ranking") :].splitlines() if of.startswith(("mbridge", "bare"))]
    assert row.split() == ["mbridge", "step_time_s", "0.85", "4.2", "%", "0.0", "%", "91.0", "%", "15.0", "%"]
