"""Calibration: rows made from known factors give them back where identifiable, and "not learned" where not."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from trainplan.costmodel.calibrate import Array, Factor, Loss, Observation, Posterior, fit

MATMUL = Factor("matmul/A100", "1", 0.15, 0.6, 1.7, "time of matrix products over the table's")
MEMORY = Factor("memory/A100", "1", 0.2, 0.6, 1.7, "time of memory-bound kernels over the table's")
LINK = Factor("link/NVLink", "1", 0.3, 0.4, 2.5, "time of messages over the table's")
HOST = Factor("host/megatron", "1", 0.4, 0.3, 4.0, "host time per kernel over the usual")
TRUE = np.array([1.12, 0.85, 1.30, 1.60])
NOISE = 0.02
FACTORS = (MATMUL, MEMORY, LINK, HOST)


def mixes(count: int, seed: int = 0) -> Array:
    """[count, 4] seconds of each component of a step, from compute-bound to host-bound."""
    return np.random.default_rng(seed).dirichlet([1.5, 1.0, 1.0, 1.0], count) * np.geomspace(0.1, 20, count)[:, None]


def added(parts: Array) -> Callable[[Array], Array]:
    """Log of the sum of components, each times its factor."""
    return lambda theta: np.log(np.exp(theta) @ parts.T)


def rows(predict: Callable[[Array], Array], factors: Array, seed: int = 1, noise: float = NOISE) -> list[Observation]:
    """Measurements with known factors and noise."""
    exact = np.exp(predict(np.log(factors)[None])[0])
    off = np.exp(noise * np.random.default_rng(seed).standard_normal(len(exact)))
    return [Observation(f"row{i}", float(value), log_sd=noise) for i, value in enumerate(exact * off)]


def log_sd(posterior: Posterior) -> Array:
    return np.array([f.log_sd for f in posterior.factors])


def learned(posterior: Posterior) -> list[bool]:
    return [f.learned for f in posterior.factors]


@pytest.mark.parametrize("loss", ["linear", "soft_l1", "student_t"])
@pytest.mark.parametrize("seed", range(5))
def test_known_factors_come_back(loss: Loss, seed: int) -> None:
    predict = added(mixes(80, seed))
    found = fit(FACTORS, rows(predict, TRUE, seed + 100), predict, loss=loss)
    off = np.log(found.values / TRUE)
    assert np.all(np.abs(off) < 3 * log_sd(found))
    assert np.all(np.abs(off) < 0.05)
    assert learned(found) == [True] * 4
    assert found.converged


def test_the_posterior_is_as_wide_as_the_errors_of_many_fits() -> None:
    predict = added(mixes(20))
    fits = [fit(FACTORS, rows(predict, TRUE, seed), predict, loss="linear") for seed in range(100)]
    z = np.array([np.log(f.values / TRUE) / log_sd(f) for f in fits])
    # 100 samples give a standard deviation to 7 %; the prior's pull makes it less than 1.
    assert np.all(np.sqrt((z**2).mean(axis=0)) > 0.75)
    assert np.all(np.sqrt((z**2).mean(axis=0)) < 1.25)


def test_linear_loss_is_the_closed_form() -> None:
    """One factor and n values: a normal prior and likelihood have a normal posterior, precision 1/s^2 + n/sd^2."""
    seen = [Observation(str(i), value, log_sd=0.1) for i, value in enumerate((1.1, 1.2, 1.3))]
    found = fit([MATMUL], seen, lambda theta: np.repeat(theta, 3, axis=1), loss="linear")
    precision = 1 / 0.15**2 + 3 / 0.1**2
    mean = (math.log(1.1) + math.log(1.2) + math.log(1.3)) / 0.1**2 / precision
    assert found.values == pytest.approx([math.exp(mean)], rel=1e-6)  # the solver's tolerance is 1e-8
    assert found.cov[0, 0] == pytest.approx(1 / precision, rel=1e-6)


def test_a_component_that_no_row_has_is_not_learned() -> None:
    parts = mixes(40)
    parts[:, 2] = 0.0
    predict = added(parts)
    found = fit(FACTORS, rows(predict, TRUE), predict)
    assert learned(found) == [True, True, False, True]
    link = found["link/NVLink"]
    assert (link.value, link.log_sd) == (pytest.approx(1.0), pytest.approx(0.3))
    assert [line for line in found.describe() if "not learned" in line] == [
        "link/NVLink 1.000 +-30.0 %, 100 % of its prior width: not learned"
    ]


def test_communication_always_hidden_under_compute_is_not_learned() -> None:
    parts = mixes(40)
    parts[:, 2] = 0.1 * parts[:, 0]

    def predict(theta: Array) -> Array:
        matmul, memory, link, host = (np.exp(theta[:, [j]]) * parts[:, j] for j in range(4))
        return np.log(np.maximum(matmul, link) + memory + host)

    found = fit(FACTORS, rows(predict, TRUE), predict)
    assert learned(found) == [True, True, False, True]
    assert found["link/NVLink"].width_ratio == pytest.approx(1.0)
    assert np.abs(np.log(found.values / TRUE))[[0, 1, 3]] == pytest.approx([0, 0, 0], abs=0.05)


def test_of_factors_that_always_move_together_only_their_sum_is_learned() -> None:
    seen = [Observation(str(i), 1.2, log_sd=NOISE) for i in range(20)]
    twin = Factor("host/other", "1", HOST.prior_log_sd, HOST.low, HOST.high, "moves as the first")
    found = fit([HOST, twin], seen, lambda theta: np.repeat(theta.sum(axis=1, keepdims=True), 20, axis=1))
    assert learned(found) == [False, False]
    assert found.values == pytest.approx([math.sqrt(1.2)] * 2, rel=0.01)
    both = np.ones(2)
    assert math.sqrt(both @ found.cov @ both) < 2 * NOISE / math.sqrt(20)
    assert np.log(found.draws(500, seed=0)).sum(axis=1) == pytest.approx([math.log(1.2)] * 500, abs=0.1)


def test_five_rows_move_what_they_determine() -> None:
    """A calibration of five rows: better on other rows than no calibration at all."""
    parts = mixes(60, seed=3)
    predict = added(parts)
    all_rows = rows(predict, TRUE, seed=4)
    few = list(range(0, 60, 12))
    found = fit(FACTORS, [all_rows[i] for i in few], added(parts[few]))
    rest = [i for i in range(60) if i not in few]
    measured = np.log([all_rows[i].measured for i in rest])
    before = np.abs(predict(np.zeros((1, 4)))[0, rest] - measured).mean()
    after = np.abs(predict(np.log(found.values)[None])[0, rest] - measured).mean()
    assert after < 0.3 * before


def test_limits_hold() -> None:
    seen = [Observation(str(i), 5.0, log_sd=NOISE) for i in range(10)]
    found = fit([MATMUL], seen, lambda theta: np.repeat(theta, 10, axis=1))
    assert found.values == pytest.approx([1.7])
    assert found.values[0] <= MATMUL.high
    assert found["matmul/A100"].at_limit
    assert "at its limit (0.6 to 1.7)" in found.describe()[0]
    draws = found.draws(1000, seed=0)
    assert draws.min() >= MATMUL.low
    assert draws.max() <= MATMUL.high


def test_no_trial_point_lies_beyond_a_limit() -> None:
    asked: list[Array] = []

    def predict(theta: Array) -> Array:
        asked.append(theta)
        return theta

    fit([MATMUL], [Observation("a", 9.0, log_sd=0.01)], predict)
    assert np.vstack(asked).max() <= math.log(MATMUL.high) + 1e-12
    assert all(theta.shape == (2, 1) for theta in asked)  # the point and one step for the derivative


def test_out_of_memory_moves_memory_up() -> None:
    """Predicted 70 GiB, and it did not fit into 80."""
    factor = Factor("memory_slack/torch", "1", 0.2, 0.8, 1.5, "reserved over counted bytes")
    oom = Observation("oom", 80.0, kind="at_least", log_sd=0.05)
    found = fit([factor], [oom], lambda theta: math.log(70) + theta)
    assert 80 / 70 * 0.95 < found.values[0] < 80 / 70 * 1.1
    # A prediction far above the limit was right already.
    kept = fit([factor], [oom], lambda theta: math.log(160) + theta)
    assert kept.values == pytest.approx([1.0], abs=1e-6)
    assert not kept["memory_slack/torch"].learned


def test_out_of_memory_is_the_likelihood_of_the_normal() -> None:
    """The MAP maximises log Phi(z) - theta^2 / (2 s^2); found here on a fine grid."""
    factor = Factor("memory_slack/torch", "1", 0.2, 0.8, 1.5, "reserved over counted bytes")
    found = fit([factor], [Observation("oom", 80.0, "at_least", 0.05)], lambda theta: math.log(70) + theta)
    grid = np.linspace(0, 0.4, 40001)
    z = (math.log(70 / 80) + grid) / 0.05
    log_phi = np.log([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])
    best = grid[np.argmax(log_phi - grid**2 / (2 * 0.2**2))]
    assert math.log(found.values[0]) == pytest.approx(best, abs=1e-4)


def test_nothing_measured_gives_the_prior_back() -> None:
    found = fit(FACTORS, [], lambda theta: pytest.fail("nothing to predict"))
    assert found.values == pytest.approx([1.0] * 4)
    assert log_sd(found) == pytest.approx([0.15, 0.2, 0.3, 0.4])
    assert learned(found) == [False] * 4
    assert found.residual_log_sd == pytest.approx(0.06)
    assert found.n_observations == 0


def test_no_factors_leave_a_residual() -> None:
    seen = [Observation(str(i), math.exp(0.1), log_sd=0.1) for i in range(5)]
    found = fit([], seen, lambda theta: np.zeros((len(theta), 5)), loss="linear")
    assert found.residual_log_sd == pytest.approx(math.sqrt((5 * 0.06**2 + 5 * 0.1**2) / 10))
    assert found.draws(3, seed=0).shape == (3, 0)


@pytest.mark.parametrize("loss", ["linear", "soft_l1", "student_t"])
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.15])
def test_the_residual_is_the_noise_when_there_is_much_data(noise: float, loss: Loss) -> None:
    predict = added(mixes(400))
    seen = rows(predict, TRUE, noise=noise)
    found = fit(FACTORS, seen, predict, loss=loss, residual=(0.06, 5.0))
    drawn = np.log([o.measured for o in seen]) - predict(np.log(TRUE)[None])[0]
    # The prior is worth 5 of 405. Four fitted factors of 400 rows, and cutting at 2.5 sd, move it by a percent each.
    assert found.residual_log_sd == pytest.approx(math.sqrt((drawn @ drawn + 5 * 0.06**2) / 405), rel=0.03)


@pytest.mark.parametrize("loss", ["soft_l1", "student_t"])
def test_one_wild_row_hardly_moves_a_forgiving_fit(loss: Loss) -> None:
    predict = added(mixes(20))
    seen = rows(predict, TRUE)
    wild = [*seen[:-1], Observation("wild", seen[-1].measured * 3, log_sd=NOISE)]
    forgiving, strict = fit(FACTORS, wild, predict, loss=loss), fit(FACTORS, wild, predict, loss="linear")
    assert np.abs(np.log(forgiving.values / TRUE)).max() < 0.3 * np.abs(np.log(strict.values / TRUE)).max()
    assert forgiving.residual_log_sd < 0.6 * strict.residual_log_sd


def test_noise_that_is_larger_than_said_is_noticed() -> None:
    """Rows said to be good to 1 % that scatter by 10 %: with ``adapt_noise`` the posterior is honest."""
    predict = added(mixes(30))
    seen = [Observation(o.id, o.measured, log_sd=0.01) for o in rows(predict, TRUE, noise=0.1)]
    sure, honest = fit(FACTORS, seen, predict), fit(FACTORS, seen, predict, adapt_noise=True)
    assert log_sd(sure)[0] < 0.5 * log_sd(honest)[0]
    assert np.all(np.abs(np.log(honest.values / TRUE)) < 3 * log_sd(honest))
    assert honest.residual_log_sd == pytest.approx(0.1, rel=0.3)


def test_draws_have_the_posterior_s_mean_and_width() -> None:
    predict = added(mixes(40))
    found = fit(FACTORS, rows(predict, TRUE), predict)
    draws = np.log(found.draws(4000, seed=0))
    assert draws.mean(axis=0) == pytest.approx(np.log(found.values), abs=0.005)
    assert np.cov(draws.T) == pytest.approx(found.cov, abs=0.1 * found.cov.max())


def test_the_same_input_gives_the_same_output() -> None:
    predict = added(mixes(40))
    one, other = (fit(FACTORS, rows(predict, TRUE), predict) for _ in range(2))
    assert np.array_equal(one.values, other.values)
    assert np.array_equal(one.draws(64, seed=7), other.draws(64, seed=7))
    assert not np.array_equal(one.draws(64, seed=7), one.draws(64, seed=8))


def test_the_start_does_not_matter() -> None:
    predict = added(mixes(40))
    seen = rows(predict, TRUE)
    usual, other = fit(FACTORS, seen, predict), fit(FACTORS, seen, predict, start=[1.7, 0.6, 2.5, 0.3])
    assert other.values == pytest.approx(usual.values, rel=1e-3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Factor("a", "1", 0.0, 0.5, 2.0, ""), "prior_log_sd is 0"),
        (lambda: Factor("a", "1", 0.1, 1.5, 2.0, ""), "must be positive and hold 1"),
        (lambda: Observation("r", 0.0), "observation r: measured is 0"),
        (lambda: Observation("r", 1.0, log_sd=0.0), "log_sd is 0"),
        (lambda: fit([MATMUL, MATMUL], [], added(mixes(1))), "names repeat"),
        (lambda: fit([MATMUL], [Observation("r", 1.0)], lambda theta: theta * math.nan), "not finite for r"),
        (lambda: fit([MATMUL], [Observation("r", 1.0)], lambda theta: theta[:1]), "returned shape"),
    ],
)
def test_malformed_input_is_refused_by_name(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
