"""What do a few measurements say about the physical factors of a cost model? A maximum a posteriori fit in log space.

A factor multiplies one physical quantity (seconds of matrix products on a device, of messages on a fabric, of host work
in a software stack); 1 means the tables are right. Each has a prior width and hard limits, so that few measurements
move only what they determine. What they do not determine comes back as "not learned".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
LogPredict = Callable[[Array], Array]
"""[D, P] log factors -> [D, N] log predictions, one row per vector of factors."""
Loss = Literal["linear", "soft_l1", "student_t"]

LEARNED_BELOW = 0.7
"""Posterior over prior width of a factor that learned. Two factors that nothing tells apart keep 1 / sqrt(2) each: they
have not."""
STEP = 1e-4  # of a log factor, for derivatives: far below any noise, far above rounding
SOFT_FROM = 2.0  # standard deviations where soft_l1 turns from square to straight: normal noise loses 3 % of its say
DEGREES = 4.0  # of freedom of student_t, Lange, Little & Taylor 1989, J. Amer. Statist. Assoc. 84, sec. 1
WILD_FROM = 2.5  # standard deviations; 1.2 % of normal errors lie beyond
WILD_SHARE = 0.97756
"""E min(z^2, c^2) of a normal z with c = 2.5: (2 Phi(c) - 1) - 2 c phi(c) + 2 c^2 (1 - Phi(c))."""
NEAR = 1e-3  # a log factor this close to a limit is at it: the solver stays strictly inside
RESIDUAL_LOG_SD, RESIDUAL_WEIGHT = 0.06, 5.0
"""What the residual is thought to be before anything is measured, and how many measurements this is worth. 6 % is what
whole steps leave in accuracy_study.md, sec. 1, when all factors are fitted."""


@dataclass(frozen=True)
class Factor:
    """A physical factor; the prior is log-normal around 1."""

    name: str
    """What and of which device, fabric or stack: "matmul/A100"."""
    unit: str
    prior_log_sd: float
    low: float
    high: float
    """Physical limits that no fit and no draw crosses."""
    meaning: str

    def __post_init__(self) -> None:
        if not self.prior_log_sd > 0:
            raise ValueError(f"factor {self.name}: prior_log_sd is {self.prior_log_sd}. Give a positive width.")
        if not (0 < self.low <= 1 <= self.high < math.inf and self.low < self.high):
            raise ValueError(f"factor {self.name}: limits {self.low} to {self.high} must be positive and hold 1.")


@dataclass(frozen=True)
class Observation:
    """Something measured that the factors predict."""

    id: str
    measured: float
    kind: Literal["time", "at_least"] = "time"
    """time: the value was seen. at_least: it is known to be exceeded (out of memory: the bytes exceed the limit)."""
    log_sd: float = RESIDUAL_LOG_SD
    """Standard deviation of log(measured / predicted) under the right factors: noise and what the model can't say."""

    def __post_init__(self) -> None:
        if not 0 < self.measured < math.inf:
            raise ValueError(f"observation {self.id}: measured is {self.measured}. Give a positive number.")
        if not self.log_sd > 0:
            raise ValueError(f"observation {self.id}: log_sd is {self.log_sd}. Give a positive width.")


@dataclass(frozen=True)
class FittedFactor:
    """A factor after the fit."""

    factor: Factor
    value: float
    """The most probable value (MAP)."""
    log_sd: float
    at_limit: bool
    """The measurements ask for a value beyond a physical limit: something else is wrong."""

    @property
    def width_ratio(self) -> float:
        """Posterior over prior width; 1 means that the measurements say nothing."""
        return self.log_sd / self.factor.prior_log_sd

    @property
    def learned(self) -> bool:
        return self.width_ratio < LEARNED_BELOW


@dataclass(frozen=True)
class Posterior:
    """What is known of the factors after the fit."""

    factors: tuple[FittedFactor, ...]
    cov: Array
    """[P, P], of log factors."""
    residual_log_sd: float
    """Standard deviation of log(measured / predicted) that the fit leaves, shrunk towards ``RESIDUAL_LOG_SD``."""
    n_observations: int
    converged: bool = True

    @property
    def values(self) -> Array:
        """[P] most probable factors."""
        return np.array([f.value for f in self.factors])

    def __getitem__(self, name: str) -> FittedFactor:
        return next(f for f in self.factors if f.factor.name == name)

    def draws(self, count: int, seed: int) -> Array:
        """[count, P] factors from the posterior; what falls beyond a limit is mirrored at it.

        One set of draws prices every plan, so the plans' differences are not lost in sampling noise.
        """
        low = np.array([f.factor.low for f in self.factors])
        high = np.array([f.factor.high for f in self.factors])
        normal = np.random.default_rng(seed).standard_normal((count, len(self.factors)))
        theta = np.log(self.values) + normal @ np.linalg.cholesky(self.cov).T
        width = np.log(high) - np.log(low)
        folded = width - np.abs((theta - np.log(low)) % (2 * width) - width)
        return np.asarray(np.clip(low * np.exp(folded), low, high))

    def describe(self) -> list[str]:
        """A line per factor: its value and width, and whether it learned."""
        lines = []
        for f in self.factors:
            width = f"+-{100 * f.log_sd:.1f} %, {100 * f.width_ratio:.0f} % of its prior width"
            text = f"{f.factor.name} {f.value:.3f} {width}"
            said = [] if f.learned else ["not learned"]
            if f.at_limit:
                said.append(f"at its limit ({f.factor.low:g} to {f.factor.high:g})")
            lines.append(": ".join([text, ", ".join(said)]) if said else text)
        return lines


def fit(
    factors: Sequence[Factor],
    observations: Sequence[Observation],
    log_predict: LogPredict,
    *,
    start: Sequence[float] | None = None,
    iterations: int = 50,
    loss: Loss = "soft_l1",
    residual: tuple[float, float] = (RESIDUAL_LOG_SD, RESIDUAL_WEIGHT),
    adapt_noise: bool = False,
) -> Posterior:
    """The most probable factors and how sure they are.

    Minimises over theta, the log factors within their limits,
    sum_j (theta_j / prior_log_sd_j)^2 + sum_i rho(z_i^2) - 2 sum_k log Phi(z_k), where z is
    log(predicted / measured) / log_sd, i are values seen, k values known to be exceeded, and rho is the loss. By
    Gauss-Newton within a trust region; the covariance is the inverse Gauss-Newton Hessian at the optimum, so it knows
    nothing of what another operation hides there (the smaller side of a maximum).

    Args:
        factors: P of them, of any mix of devices, fabrics and stacks.
        observations: N of them.
        log_predict: [D, P] -> [D, N]. Called once per trial point, with D = P + 1.
        start: Factors to start from; all 1 by default.
        iterations: Most trial points.
        loss: How values seen that are far off count: "linear" in full, "soft_l1" and "student_t" less.
        residual: What the residual is thought to be, and the number of observations this is worth.
        adapt_noise: Trust no value seen to better than the residual that the fit leaves: fit again with
            max(log_sd, residual_log_sd) until this settles.

    Raises:
        ValueError: Names repeat, or a prediction is not finite or of another shape.
    """
    names = [f.name for f in factors]
    if len(set(names)) < len(names):
        raise ValueError(f"factors: names repeat in {names}. Give each factor once.")
    problem = _Problem(factors, observations, log_predict, loss)
    theta = np.zeros(len(names)) if start is None else np.log(np.asarray(start, dtype=float))
    theta, converged = problem.solve(theta, iterations)
    residual_log_sd = problem.residual(theta, *residual)
    for _ in range(4 if adapt_noise else 0):  # it settles in two or three
        problem.floor = residual_log_sd
        theta, converged = problem.solve(theta, iterations)
        before, residual_log_sd = residual_log_sd, problem.residual(theta, *residual)
        if abs(residual_log_sd / before - 1) < 0.01:
            break
    cov = problem.cov(theta)
    at_limit = np.minimum(theta - problem.low, problem.high - theta) < NEAR
    fitted = tuple(
        FittedFactor(f, float(np.clip(np.exp(theta[j]), f.low, f.high)), float(np.sqrt(cov[j, j])), bool(at_limit[j]))
        for j, f in enumerate(factors)
    )
    return Posterior(fitted, cov, residual_log_sd, len(observations), converged)


class _Problem:
    """The residuals of a fit and their derivatives; the last point is kept, so that both cost one call."""

    def __init__(
        self, factors: Sequence[Factor], observations: Sequence[Observation], log_predict: LogPredict, loss: Loss
    ) -> None:
        self.observations, self.log_predict, self.loss = observations, log_predict, loss
        self.prior = np.array([f.prior_log_sd for f in factors], dtype=float)
        self.low = np.log([f.low for f in factors])
        self.high = np.log([f.high for f in factors])
        self.log_measured = np.log([o.measured for o in observations])
        self.log_sd = np.array([o.log_sd for o in observations], dtype=float)
        self.seen = np.array([o.kind == "time" for o in observations], dtype=bool)
        self.floor = 0.0  # of the noise of values seen
        self._at: tuple[bytes, Array, Array] | None = None

    @property
    def noise(self) -> Array:
        return np.where(self.seen, np.maximum(self.log_sd, self.floor), self.log_sd)

    def errors(self, theta: Array) -> tuple[Array, Array]:
        """log(predicted / measured) [N] and its derivatives [N, P]; one call of ``log_predict``."""
        if self._at is None or self._at[0] != theta.tobytes():
            n, p = len(self.observations), len(theta)
            step = np.where(theta + STEP > self.high, -STEP, STEP)
            found = np.empty((p + 1, 0))
            if n:
                found = np.asarray(self.log_predict(np.vstack([theta, theta + np.diag(step)])), dtype=float)
            if found.shape != (p + 1, n):
                raise ValueError(f"log_predict returned shape {found.shape}, not {(p + 1, n)}.")
            finite: list[bool] = np.all(np.isfinite(found), axis=0).tolist()
            if not all(finite):
                wrong = [o.id for o, fine in zip(self.observations, finite, strict=True) if not fine]
                raise ValueError(f"log_predict is not finite for {', '.join(wrong[:5])}. Leave out what is not priced.")
            slopes = ((found[1:] - found[0]) / step[:, None]).T
            self._at = theta.tobytes(), found[0] - self.log_measured, slopes
        return self._at[1], self._at[2]

    def residuals(self, theta: Array) -> Array:
        """[N + P]: of the observations, then of the prior."""
        z = self.errors(theta)[0] / self.noise
        return np.concatenate([np.where(self.seen, z, _exceeded(z)[0]), theta / self.prior])

    def jacobian(self, theta: Array) -> Array:
        """[N + P, P], of the residuals."""
        errors, slopes = self.errors(theta)
        z = errors / self.noise
        per_z = np.where(self.seen, 1.0, _exceeded(z)[1]) / self.noise
        return np.vstack([per_z[:, None] * slopes, np.diag(1 / self.prior)])

    def rho(self, squares: Array) -> Array:
        """[3, N + P]: loss of squared residuals and its derivatives; only values seen are forgiven, never the prior."""
        plain = np.array([squares, np.ones_like(squares), np.zeros_like(squares)])
        forgiven = np.concatenate([self.seen, np.zeros(len(self.prior), dtype=bool)])
        return np.where(forgiven, _rho(squares, self.loss), plain)

    def solve(self, theta: Array, iterations: int) -> tuple[Array, bool]:
        """The optimum from a starting point, and whether it was reached within ``iterations``."""
        from scipy.optimize import least_squares  # takes a third of a second to import

        if not len(theta):
            return theta, True
        inside = np.clip(theta, self.low, self.high)
        found = least_squares(
            self.residuals,
            inside,
            jac=self.jacobian,
            bounds=(self.low, self.high),
            x_scale=self.prior,
            loss=self.rho,
            max_nfev=iterations,
        )
        best: Array = np.asarray(found.x, dtype=float)
        best = np.where(best - self.low < NEAR, self.low, np.where(self.high - best < NEAR, self.high, best))
        return best, bool(found.status > 0)

    def information(self, theta: Array) -> Array:
        """[P, P] Gauss-Newton Hessian of the observations alone."""
        n = len(self.observations)
        weight = self.rho(self.residuals(theta) ** 2)[1][:n]
        rows = self.jacobian(theta)[:n]
        return np.asarray(rows.T @ (weight[:, None] * rows))

    def cov(self, theta: Array) -> Array:
        """[P, P] covariance of the log factors; at most the prior's."""
        return np.asarray(np.linalg.inv(self.information(theta) + np.diag(self.prior**-2.0)))

    def residual(self, theta: Array, prior_sd: float, prior_weight: float) -> float:
        """The s with s^2 = (w0 s0^2 + sum_i min(e_i^2, (c s)^2) / k) / (w0 + max(n - p, 0)).

        e are the log errors of the n values seen and p the number of factors that they determine, tr(cov information).
        Beyond c s an error counts as c s, so that a few wild ones do not widen every interval; k makes this exact for
        normal errors. With the linear loss c is infinite.

        Source: Huber 1964, Ann. Math. Statist. 35, proposal 2.
        """
        squares = self.errors(theta)[0][self.seen] ** 2
        determined = float(np.trace(self.cov(theta) @ self.information(theta)))
        c, k = (math.inf, 1.0) if self.loss == "linear" else (WILD_FROM, WILD_SHARE)
        weight = prior_weight + max(len(squares) - determined, 0.0)
        sd = math.sqrt((prior_weight * prior_sd**2 + float(squares.sum())) / weight)
        for _ in range(50):  # it falls to the root, by half or more each time
            counted = np.minimum(squares, (c * sd) ** 2)
            sd = math.sqrt((prior_weight * prior_sd**2 + float(counted.sum()) / k) / weight)
        return sd


def _rho(squares: Array, loss: Loss) -> Array:
    """[3, ...]: the loss of squared standardised errors and its first two derivatives."""
    if loss == "linear":
        return np.array([squares, np.ones_like(squares), np.zeros_like(squares)])
    if loss == "soft_l1":
        c = SOFT_FROM**2
        root = np.sqrt(1 + squares / c)
        return np.array([2 * c * (root - 1), 1 / root, -1 / (2 * c * root**3)])
    nu = DEGREES
    return np.array(
        [(nu + 1) * np.log1p(squares / nu), (nu + 1) / (nu + squares), -(nu + 1) / (nu + squares) ** 2],
    )


def _exceeded(z: Array) -> tuple[Array, Array]:
    """sqrt(-2 log Phi(z)), the residual of a value known to be exceeded, and its derivative; 0 far above."""
    from scipy.special import log_ndtr

    log_phi = log_ndtr(z)
    size = np.sqrt(-2 * log_phi)
    density = np.exp(-0.5 * z**2 - log_phi) / math.sqrt(2 * math.pi)  # of the normal, over Phi
    return size, -density / np.maximum(size, 1e-150)
