"""How good are predictions? Errors, ranking, regret and intervals of results that set predicted beside measured.

A result is a mapping with ``id, block, metric`` and either ``skipped`` (a reason) or ``measured, predicted, low, high,
error_frac``. It may add ``workload`` (equal for layouts of the same work on the same GPUs), ``control`` (what constant
MFU predicts, up to one factor, in the metric's own unit) and, on skipped ones, ``complete`` (the row says enough, we do
not price it). Every figure is of results of one metric, and None where there is nothing to compute.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Any

Result = Mapping[str, Any]
Figures = dict[str, float | None]

MORE_IS_BETTER = ("tokens_per_s_per_gpu",)
NOT_A_CHOICE = ("peak_mem_gib",)  # nobody picks a layout by its memory, so it has no regret
FEWEST_LAYOUTS = 3  # a workload with fewer says next to nothing about ranking
ALPHA = 0.10  # intervals are 90 % intervals
COUNTED = ("rows", "skipped", "complete_skipped", "workloads")
WORST = {"mape": max, "mape_with_skipped": max, "regret_mean": max, "regret_top3_mean": max, "tau_within": min}


def summarise(results: Sequence[Result], calibration: Collection[str] = ()) -> list[dict[str, Any]]:
    """A line of figures per block and metric, in order of appearance.

    ``mape_with_skipped`` counts a skipped result whose row is complete as an error of 100 %. Results whose id is in
    ``calibration`` are not scored; they set the control's factor, as they set ours.
    """
    lines = []
    for block, metric in dict.fromkeys((r["block"], r["metric"]) for r in results):
        everything = [r for r in results if (r["block"], r["metric"]) == (block, metric)]
        mine = [r for r in everything if r["id"] not in calibration]
        found = predicted(mine)
        skipped = [r for r in mine if "skipped" in r]
        errors = [float(r["error_frac"]) for r in found]
        lost = sum(bool(r.get("complete")) for r in skipped)
        ranking, ours, top3 = kendall_tau_within(found), regret(found), regret(found, top=3)
        control = [r for r in found if r.get("control") is not None]
        control_ranking = kendall_tau_within(control, by="control")
        lines.append(
            {
                "block": block,
                "metric": metric,
                "rows": len(found),
                "skipped": len(skipped),
                "skipped_ids": [r["id"] for r in skipped],
                "complete_skipped": lost,
                **error_figures(errors),
                "mape_with_skipped": error_figures([*errors, *[1.0] * lost])["mape"],
                **ranking,
                "workloads": len(workloads(found)),
                "regret_mean": ours["mean"],
                "regret_max": ours["max"],
                "regret_top3_mean": top3["mean"],
                "coverage": coverage(found),
                "interval_score": interval_score(found),
                "constant_interval_score": best_constant_width(found),
                "half_width": half_width(found),
                "control_mape": error_figures(constant_mfu_errors(everything, calibration))["mape"],
                "control_tau_within": control_ranking["tau_within"],
                "control_tau": control_ranking["tau"],
                "control_regret_mean": regret(control, by="control")["mean"],
            }
        )
    return lines


def predicted(results: Iterable[Result]) -> list[Result]:
    """The results that are not skipped."""
    return [r for r in results if "skipped" not in r]


def error_figures(errors: Sequence[float]) -> Figures:
    """Mean, median and 90 % point of absolute errors, and the mean signed one; None without any."""
    if not errors:
        return {"mape": None, "median": None, "p90": None, "bias": None}
    absolute = sorted(abs(error) for error in errors)
    p90 = absolute[min(len(absolute) - 1, int(0.9 * len(absolute)))]
    return {"mape": fmean(absolute), "median": median(absolute), "p90": p90, "bias": fmean(errors)}


def workloads(results: Iterable[Result]) -> list[list[Result]]:
    """Predicted results of the same work, for workloads with at least three layouts; ordered by workload, then id."""
    named = sorted((r for r in predicted(results) if r.get("workload")), key=lambda r: (r["workload"], r["id"]))
    groups = [list(group) for _, group in groupby(named, key=lambda r: r["workload"])]
    return [group for group in groups if len(group) >= FEWEST_LAYOUTS]


def kendall_tau_within(results: Sequence[Result], by: str = "predicted") -> Figures:
    """``tau_within``, the mean over workloads of Kendall's tau-b of predicted and measured, and ``tau`` over all.

    1 is the same order, 0 none. A prediction that tells no two layouts apart ranks nothing: 0. A workload whose
    measurements are all equal has no order and is left out.
    """
    within = [tau for group in workloads(results) if (tau := _tau(group, by)) is not None]
    return {"tau_within": fmean(within) if within else None, "tau": _tau(predicted(results), by)}


def _tau(results: Sequence[Result], by: str) -> float | None:
    from scipy.stats import kendalltau  # takes half a second to import

    measured, told = [r["measured"] for r in results], [r[by] for r in results]
    if len(set(measured)) < 2:
        return None
    return float(kendalltau(told, measured).statistic) if len(set(told)) > 1 else 0.0


def regret(results: Sequence[Result], top: int = 1, by: str = "predicted") -> Figures:
    """What trusting the prediction costs, per workload: ``mean`` and ``max`` of measured time over the least, minus 1.

    The time is that of the layout we would pick: the best predicted, or, with ``top=3``, the best measured of the three
    best predicted. Equal predictions are taken in the order of their ids.
    """
    lost = []
    for group in workloads(r for r in results if r["metric"] not in NOT_A_CHOICE):
        picked = sorted(group, key=lambda r: _cost(r, by))[:top]
        lost.append(min(_cost(r, "measured") for r in picked) / min(_cost(r, "measured") for r in group) - 1)
    return {"mean": fmean(lost), "max": max(lost)} if lost else {"mean": None, "max": None}


def _cost(result: Result, key: str) -> float:
    """What to minimise: time, or time per token."""
    value = float(result[key])
    return 1 / value if result["metric"] in MORE_IS_BETTER else value


def coverage(results: Sequence[Result]) -> float | None:
    """Share of measured values inside their interval."""
    inside = [r["low"] <= r["measured"] <= r["high"] for r in predicted(results)]
    return fmean(inside) if inside else None


def half_width(results: Sequence[Result]) -> float | None:
    """Median of half the interval's width as a fraction of the prediction."""
    widths = [(r["high"] - r["low"]) / (2 * r["predicted"]) for r in predicted(results)]
    return median(widths) if widths else None


def interval_score(results: Sequence[Result], alpha: float = ALPHA) -> float | None:
    """Mean interval score in log space, lower is better: S = (u - l) + (2 / alpha) (max(l - x, 0) + max(x - u, 0)).

    Args:
        results: x is the logarithm of the measured value; l and u of its interval's ends.
        alpha: Share that may lie outside.

    Source: Gneiting & Raftery 2007, J. Amer. Statist. Assoc. 102, eq. 43.
    """
    scores = []
    for r in predicted(results):
        low, x, high = math.log(r["low"]), math.log(r["measured"]), math.log(r["high"])
        scores.append((high - low) + (2 / alpha) * (max(low - x, 0.0) + max(x - high, 0.0)))
    return fmean(scores) if scores else None


def best_constant_width(results: Sequence[Result], alpha: float = ALPHA) -> float | None:
    """The interval score of ``predicted * exp(-+c)`` with the one c that is best for these very results.

    The score is convex and piecewise linear in c with its corners at the absolute log errors, so one of them is best.
    Chosen in hindsight: a hard rival.
    """
    errors = [abs(math.log(r["predicted"] / r["measured"])) for r in predicted(results)]
    if not errors:
        return None
    return min(2 * c + (2 / alpha) * fmean(max(error - c, 0.0) for error in errors) for c in {0.0, *errors})


def constant_mfu_errors(results: Sequence[Result], calibration: Collection[str] = ()) -> list[float]:
    """Errors of the control: constant MFU times one factor, as fractions of the measured value.

    The factor is the geometric median of measured over control, of the results whose id is in ``calibration`` (these
    are then not scored), or of all if none is.
    """
    known = [r for r in predicted(results) if r.get("control") is not None]
    seen = [r for r in known if r["id"] in calibration]
    logs = [math.log(r["measured"] / r["control"]) for r in seen or known]
    if not logs:
        return []
    factor = math.exp(median(logs))
    return [factor * r["control"] / r["measured"] - 1 for r in known if r["id"] not in calibration]


def choose_calibration(ids: Iterable[str], k: int, draw: int) -> tuple[str, ...]:
    """K of the ids, by the order of sha256("draw:id"): which ones depends on nothing but the ids and the draw."""
    return tuple(sorted(set(ids), key=lambda name: hashlib.sha256(f"{draw}:{name}".encode()).digest())[:k])


def macro_average(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line per metric: every figure's mean over the blocks that have it, each block counting once.

    Counts are added up, ``blocks`` says of how many, and ``regret_max`` stays the greatest.
    """
    averages = []
    for metric in dict.fromkeys(line["metric"] for line in lines):
        mine = [line for line in lines if line["metric"] == metric]
        average: dict[str, Any] = {"block": "macro average", "metric": metric, "blocks": len(mine), **_means(mine)}
        average.update({key: sum(line[key] for line in mine) for key in COUNTED if key in mine[0]})
        averages.append(average)
    return averages


def over_draws(draws: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The summaries of several draws of calibration rows as one: a line per block and metric.

    Every figure is the mean over draws (``regret_max`` the greatest); ``mape_worst`` and its like are those of the
    worst draw; ``draws`` says how many had the block.
    """
    lines: list[Mapping[str, Any]] = [line for summary in draws for line in summary]
    merged = []
    for block, metric in dict.fromkeys((line["block"], line["metric"]) for line in lines):
        mine = [line for line in lines if (line["block"], line["metric"]) == (block, metric)]
        worst = {}
        for key, pick in WORST.items():
            values = [line[key] for line in mine if line.get(key) is not None]
            worst[f"{key}_worst"] = pick(values) if values else None
        merged.append({"block": block, "metric": metric, "draws": len(mine), **_means(mine), **worst})
    return merged


def _means(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of every figure over the lines that have it; what is no number is left out."""
    means: dict[str, Any] = {}
    for key in dict.fromkeys(key for line in lines for key in line):
        values = [line[key] for line in lines if line.get(key) is not None]
        if all(isinstance(value, int | float) for value in values):
            means[key] = (max if key == "regret_max" else fmean)(values) if values else None
    return means
