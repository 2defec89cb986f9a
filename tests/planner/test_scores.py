"""Figures of predictions beside measurements, against hand counts on a few results."""

import math
from typing import Any

import pytest

from trainplan.planner.scores import (
    best_constant_width,
    choose_calibration,
    constant_mfu_errors,
    coverage,
    error_figures,
    half_width,
    interval_score,
    kendall_tau_within,
    macro_average,
    over_draws,
    regret,
    summarise,
)


def result(name: str, measured: float, predicted: float, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "block": "a",
        "metric": "step_time_s",
        "measured": measured,
        "predicted": predicted,
        "low": predicted / 1.1,
        "high": predicted * 1.1,
        "error_frac": predicted / measured - 1,
        **more,
    }


def skipped(name: str, *, complete: bool = False) -> dict[str, Any]:
    return {"id": name, "block": "a", "metric": "step_time_s", "skipped": "why", "complete": complete}


TWO_WORKLOADS = [
    result("a1", 10.0, 11.0, workload="w1"),  # predicted in the order 3, 1, 2 of measured: one pair of three is right
    result("a2", 12.0, 12.0, workload="w1"),
    result("a3", 14.0, 10.0, workload="w1"),
    result("b1", 1.0, 2.0, workload="w2"),  # all three in order
    result("b2", 2.0, 3.0, workload="w2"),
    result("b3", 4.0, 4.0, workload="w2"),
    result("c1", 5.0, 1.0, workload="w3"),  # two layouts: no ranking
    result("c2", 4.0, 9.0, workload="w3"),
]


def test_errors() -> None:
    figures = error_figures([0.1, -0.2, 0.3, -0.4])
    assert figures == {
        "mape": pytest.approx(0.25),
        "median": pytest.approx(0.25),
        "p90": 0.4,
        "bias": pytest.approx(-0.05),
    }
    assert error_figures([]) == {"mape": None, "median": None, "p90": None, "bias": None}


def test_tau_within_is_the_mean_over_workloads_with_three_layouts() -> None:
    figures = kendall_tau_within(TWO_WORKLOADS)
    # w1: (a1, a2) agree, (a1, a3) and (a2, a3) do not: (1 - 2) / 3. w2: 1.
    assert figures["tau_within"] == pytest.approx((-1 / 3 + 1) / 2)


def test_tau_with_ties_is_tau_b() -> None:
    rows = [result("a", 1.0, 5.0), result("b", 2.0, 5.0), result("c", 3.0, 6.0), result("d", 4.0, 7.0)]
    # Five of six pairs agree and one is tied in the prediction: 5 / sqrt(5 * 6).
    assert kendall_tau_within(rows)["tau"] == pytest.approx(5 / math.sqrt(30))


def test_a_prediction_that_tells_nothing_apart_ranks_nothing() -> None:
    rows = [result(str(i), 1.0 + i, 3.0, workload="w") for i in range(4)]
    assert kendall_tau_within(rows) == {"tau_within": 0.0, "tau": 0.0}


def test_measurements_without_an_order_are_not_ranked() -> None:
    rows = [result(str(i), 3.0, 1.0 + i, workload="w") for i in range(4)]
    assert kendall_tau_within(rows) == {"tau_within": None, "tau": None}


def test_regret_is_what_the_pick_takes_over_the_best() -> None:
    # w1: we pick a3, 14 s, of which the best is 10 s: 40 %. w2: we pick the best.
    assert regret(TWO_WORKLOADS) == {"mean": pytest.approx(0.2), "max": pytest.approx(0.4)}
    # Our best two of w1 are a3 and a1, and a1 is the best.
    assert regret(TWO_WORKLOADS, top=2) == {"mean": 0.0, "max": 0.0}


def test_regret_of_throughput_is_of_time_per_token() -> None:
    rows = [
        result(name, tokens, told, workload="w", metric="tokens_per_s_per_gpu")
        for name, tokens, told in (("a", 100.0, 90.0), ("b", 80.0, 110.0), ("c", 50.0, 40.0))
    ]
    # We pick b, the most tokens predicted; a token takes 1/80 s there and 1/100 s at a: 25 % more.
    assert regret(rows)["max"] == pytest.approx(0.25)
    assert kendall_tau_within(rows)["tau"] == pytest.approx(1 / 3)  # only (a, b) is the wrong way round


def test_memory_has_no_regret() -> None:
    rows = [result(str(i), 1.0 + i, 3.0 - i, workload="w", metric="peak_mem_gib") for i in range(3)]
    assert regret(rows) == {"mean": None, "max": None}


def test_equal_predictions_are_picked_in_the_order_of_ids() -> None:
    rows = [
        result("b", 1.0, 5.0, workload="w"),
        result("a", 2.0, 5.0, workload="w"),
        result("c", 4.0, 9.0, workload="w"),
    ]
    assert regret(rows)["mean"] == pytest.approx(1.0)
    assert regret(rows[::-1]) == regret(rows)


def test_interval_figures() -> None:
    rows = [
        result("in", 10.0, 10.0, low=8.0, high=12.0),
        result("below", 10.0, 15.0, low=12.0, high=18.0),
        result("above", 10.0, 6.0, low=4.0, high=8.0),
    ]
    assert coverage(rows) == pytest.approx(1 / 3)
    assert half_width(rows) == pytest.approx(0.2)  # of 2/10, 3/15 and 2/6
    # Widths log(12/8) = log(18/12) and log(8/4); 2/0.1 times log(12/10) below and log(10/8) above.
    by_hand = (2 * math.log(1.5) + math.log(2) + 20 * (math.log(1.2) + math.log(1.25))) / 3
    assert interval_score(rows) == pytest.approx(by_hand)
    assert interval_score(rows, alpha=0.5) == pytest.approx(
        (2 * math.log(1.5) + math.log(2) + 4 * (math.log(1.2) + math.log(1.25))) / 3
    )


def test_the_best_constant_width() -> None:
    rows = [result(str(i), 1.0, math.exp(error)) for i, error in enumerate((0.01, -0.02, 0.03, 0.30))]
    # With 10 % outside, missing one of four (0.25 > 0.1) costs more than it saves: c = 0.30.
    assert best_constant_width(rows) == pytest.approx(2 * 0.30)
    # With 50 %, two may be outside: any c from 0.02 to 0.03, 2 * 0.02 + 4 * (0.01 + 0.28) / 4.
    assert best_constant_width(rows, alpha=0.5) == pytest.approx(2 * 0.02 + 0.29)


@pytest.mark.parametrize("alpha", [0.1, 0.3])
def test_no_constant_width_scores_better_than_the_best(alpha: float) -> None:
    errors = [0.05 * math.sin(3.0 * i) + 0.02 for i in range(30)]
    best = best_constant_width([result(str(i), 1.0, math.exp(e)) for i, e in enumerate(errors)], alpha)
    assert best is not None
    for c in (0.005 * i for i in range(30)):
        rows = [
            result(str(i), 1.0, math.exp(e), low=math.exp(e - c), high=math.exp(e + c)) for i, e in enumerate(errors)
        ]
        score = interval_score(rows, alpha)
        assert score is not None
        assert score >= best - 1e-12  # rounding of sums


def test_the_control_has_one_factor() -> None:
    rows = [
        result("a", 2.0, 1.0, control=1.0),
        result("b", 3.0, 1.0, control=1.0),
        result("c", 8.0, 1.0, control=2.0),
        result("d", 1.0, 1.0),
    ]
    # Measured over control is 2, 3 and 4: the factor is 3.
    assert constant_mfu_errors(rows) == [pytest.approx(0.5), pytest.approx(0.0), pytest.approx(-0.25)]
    # Calibrated on a and b the factor is sqrt(2 * 3), and c alone is scored.
    assert constant_mfu_errors(rows, calibration={"a", "b"}) == [pytest.approx(math.sqrt(6) / 4 - 1)]
    assert constant_mfu_errors([result("d", 1.0, 1.0)]) == []


def test_calibration_rows_depend_on_ids_and_draw_alone() -> None:
    ids = [f"row{i}" for i in range(20)]
    chosen = choose_calibration(ids, 5, draw=0)
    assert len(set(chosen)) == 5
    assert choose_calibration([*reversed(ids), *ids], 5, draw=0) == chosen
    assert {choose_calibration(ids, 5, draw=draw) for draw in range(4)} > {chosen}
    assert len(choose_calibration(ids, 50, draw=0)) == 20
    # sha256sum of "0:a" starts with 9d, of "0:b" with e0, of "0:c" with be.
    assert choose_calibration("abc", 2, draw=0) == ("a", "c")


def test_summary_of_a_block() -> None:
    rows = [*TWO_WORKLOADS, skipped("s1", complete=True), skipped("s2")]
    (line,) = summarise(rows)
    errors = [0.1, 0.0, 4 / 14, 1.0, 0.5, 0.0, 0.8, 1.25]
    assert (line["block"], line["metric"], line["rows"], line["skipped"]) == ("a", "step_time_s", 8, 2)
    assert line["skipped_ids"] == ["s1", "s2"]
    assert line["mape"] == pytest.approx(sum(errors) / 8)
    assert line["mape_with_skipped"] == pytest.approx((sum(errors) + 1) / 9)
    assert (line["workloads"], line["regret_max"], line["regret_top3_mean"]) == (2, pytest.approx(0.4), 0.0)
    assert line["tau_within"] == pytest.approx(1 / 3)
    assert line["coverage"] == pytest.approx(3 / 8)  # a1, a2 and b3
    assert line["control_mape"] is None
    assert line["control_tau"] is None


def test_summary_of_the_control() -> None:
    rows = [{**r, "control": 2 * r["measured"]} for r in TWO_WORKLOADS]
    (line,) = summarise(rows)
    assert line["control_mape"] == pytest.approx(0.0)
    assert (line["control_tau"], line["control_tau_within"]) == (pytest.approx(1.0), pytest.approx(1.0))
    assert line["control_regret_mean"] == 0.0


def test_calibration_rows_are_not_scored_and_set_the_control() -> None:
    rows = [result("a", 2.0, 9.0, control=1.0), result("b", 3.0, 3.3, control=1.0), skipped("c")]
    (line,) = summarise(rows, calibration={"a", "c"})
    assert (line["rows"], line["skipped"], line["mape"]) == (1, 0, pytest.approx(0.1))
    assert line["control_mape"] == pytest.approx(1 / 3)  # factor 2 of row a, 2 against 3 at row b


def test_summary_of_nothing_predicted() -> None:
    (line,) = summarise([skipped("s1"), skipped("s2")])
    counts = {"rows": 0, "skipped": 2, "complete_skipped": 0, "workloads": 0}
    assert {key: line[key] for key in counts} == counts
    assert all(line[key] is None for key in set(line) - set(counts) - {"block", "metric", "skipped_ids"})
    assert summarise([skipped("s1", complete=True)])[0]["mape_with_skipped"] == 1.0
    assert summarise([]) == []


def test_a_line_per_block_and_metric() -> None:
    rows = [
        result("a", 1.0, 1.0, block="x"),
        result("a", 1.0, 1.0, block="x", metric="peak_mem_gib"),
        result("b", 1.0, 1.0),
    ]
    assert [(line["block"], line["metric"]) for line in summarise(rows)] == [
        ("x", "step_time_s"),
        ("x", "peak_mem_gib"),
        ("a", "step_time_s"),
    ]


def test_macro_average_counts_each_block_once() -> None:
    rows = [result(str(i), 1.0, 1.1) for i in range(9)] + [result("z", 1.0, 1.5, block="b")]
    (average,) = macro_average(summarise(rows))
    assert average["mape"] == pytest.approx((0.1 + 0.5) / 2)
    assert (average["blocks"], average["rows"]) == (2, 10)
    assert average["regret_mean"] is None


def test_draws_give_mean_and_worst() -> None:
    draws = [summarise([result("a", 1.0, 1.0 + error)]) for error in (0.1, 0.3)]
    (line,) = over_draws(draws)
    assert (line["block"], line["draws"]) == ("a", 2)
    assert (line["mape"], line["mape_worst"]) == (pytest.approx(0.2), pytest.approx(0.3))
    assert line["tau_within_worst"] is None
