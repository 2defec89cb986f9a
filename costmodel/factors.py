"""By how much do whole steps differ from what tables and stated rates say? Factors by device, fabric and stack.

A factor multiplies seconds of one kind: 1.1 is 10 % slower than stated. It is a product over scopes: what holds
everywhere, what holds for a die or a fabric, what holds for a software stack. None belongs to a model or a publication.
The values are fitted to published step times by benchmarks/fit_factors.py (`trainplan.costmodel.calibrate` is the fit)
and kept in profiles/measurements/factors.json with their covariance, from which intervals are drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainplan.costmodel.calibrate import Factor
from trainplan.costmodel.hardware import Cluster, Device
from trainplan.costmodel.rates import Multipliers
from trainplan.costmodel.stacks import Stack
from trainplan.costmodel.strategy import Strategy
from trainplan.profiles import read_json

DIES = {
    "A100-SXM4-80GB": "A100",
    "A100-SXM4-40GB": "A100",
    "A100-PCIe-80GB": "A100",
    "A800-SXM4-80GB": "A100",
    "H100-SXM5-80GB": "H100",
    "H100-SXM5-96GB-HBM2e": "H100",
    "H200-SXM-141GB": "H100",
    "H20-SXM5-96GB": "H100",
    "B200-SXM-180GB": "B200",
    "GB200-186GB": "B200",
}
"""Parts of one die share what its sustained clocks do to long runs."""
SECONDS_OF_KIND: Mapping[str, tuple[float, float, float, str]] = {
    "matmul": (0.06, 0.7, 1.8, "seconds of matrix products in training over those of the table, timed alone"),
    "attention": (0.15, 0.5, 2.5, "seconds of attention kernels over their model"),
    "memory": (0.12, 0.6, 2.5, "seconds of memory-bound kernels over counted bytes at the measured rate"),
    "scale_up": (0.08, 0.6, 2.0, "seconds of collectives inside a scale-up domain over their table"),
    "scale_out": (0.25, 0.4, 3.0, "seconds of collectives between domains over those at the stated bandwidth"),
    "host": (0.30, 0.3, 3.0, "host seconds per launch over the stack's stated ones"),
    "step": (0.80, 0.05, 20.0, "host seconds per step over the stack's stated ones"),
    "contention": (0.40, 0.2, 5.0, "slow-down of computation beside communication over the stated one"),
}
"""Kind -> (prior log sd of each scope, lowest and highest product, meaning)."""


@functools.cache
def trained_tables() -> frozenset[tuple[str, str, str]]:
    """(device, type, library) of tables that were measured through a training library's own layers.

    They hold some of what sets training apart from a kernel timed alone, so they have a factor of their own.
    """
    keys = read_json("measurements", "gemm_fit.json")["tables"]
    parts = (key.split("/") for key in keys)
    return frozenset((device, dtype, library) for device, dtype, library in parts if library != "torch")


def scopes(cluster: Cluster, stack: Stack, strategy: Strategy) -> dict[str, tuple[str, ...]]:
    """Kind -> names of the factors whose product applies to a run."""
    device: Device = cluster.device
    die = DIES.get(device.name, device.name)
    kernel = stack.attention.get(strategy.attention, "eager")
    own_table = (device.name, strategy.precision, stack.gemm_library) in trained_tables()
    matmul = ["matmul/training" if own_table else "matmul", f"matmul/{die}", f"matmul/{stack.name}"]
    if strategy.precision in ("fp8", "nvfp4"):
        matmul.append(f"matmul/{strategy.precision}")
    up = cluster.scale_up.kind if cluster.scale_up else "none"
    out = cluster.scale_out.kind if cluster.scale_out else "none"
    return {
        "matmul": tuple(matmul),
        "attention": (f"attention/{kernel}", f"attention/{kernel}/{die}"),
        "memory": ("memory", f"memory/{die}", f"memory/{stack.name}"),
        "scale_up": ("scale_up", f"scale_up/{up}"),
        "scale_out": ("scale_out", f"scale_out/{out}"),
        "host": (f"host/{stack.name}",),
        "step": (f"step/{stack.name}",),
        "contention": ("contention",),
    }


EVERYWHERE = 2.0
"""How much wider than one scope's the prior of matrix products everywhere is: tables time them on a cool device."""


def factor(name: str) -> Factor:
    """The prior of a factor by its name."""
    sd, low, high, meaning = SECONDS_OF_KIND[name.split("/")[0]]
    if name in ("matmul", "matmul/training"):
        sd = EVERYWHERE * sd
    return Factor(name, "ratio of seconds", sd, low, high, meaning)


def multipliers(names: Mapping[str, Sequence[str]], index: Mapping[str, int], theta: np.ndarray) -> Multipliers:
    """Products of the factors of a run, for each of several factor vectors.

    Args:
        names: From `scopes`.
        index: Factor -> column of ``theta``; a factor without a column is 1.
        theta: [D, P] log factors.

    Returns:
        Arrays [D, 1], inside the limits of each kind.
    """
    values: dict[str, np.ndarray] = {}
    for kind, of in names.items():
        columns = [index[name] for name in of if name in index]
        _, low, high, _ = SECONDS_OF_KIND[kind]
        product = np.exp(theta[:, columns].sum(axis=1)) if columns else np.ones(len(theta))
        values[kind] = np.clip(product, low, high)[:, None]
    return Multipliers(**values)


@dataclass(frozen=True)
class FittedFactors:
    """Fitted factors: most probable log values [P], their covariance [P, P], and what the fit leaves."""

    names: tuple[str, ...]
    theta: np.ndarray
    cov: np.ndarray
    residual_log_sd: float

    @functools.cached_property
    def index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def at(self, names: Mapping[str, Sequence[str]], draws: int = 0, seed: int = 0) -> Multipliers:
        """The multipliers of a run: the most probable ones, or draws of them.

        A scope that no measurement has seen is drawn from its prior.
        """
        if not draws:
            single = multipliers(names, self.index, self.theta[None])
            return Multipliers(**{kind: float(np.squeeze(value)) for kind, value in vars(single).items()})
        known = np.random.default_rng(seed).standard_normal((draws, len(self.names)))
        theta = self.theta + known @ np.linalg.cholesky(self.cov + 1e-12 * np.eye(len(self.names))).T
        extra = [name for of in names.values() for name in of if name not in self.index]
        index = self.index | {name: len(self.names) + i for i, name in enumerate(extra)}
        prior = np.array([factor(name).prior_log_sd for name in extra])
        unseen = np.random.default_rng(seed + 1).standard_normal((draws, len(extra))) * prior
        return multipliers(names, index, np.concatenate([theta, unseen], axis=1))


@functools.cache
def shipped() -> FittedFactors:
    """The factors of profiles/measurements/factors.json."""
    data: Mapping[str, Any] = read_json("measurements", "factors.json")
    return FittedFactors(
        names=tuple(data["names"]),
        theta=np.log(np.asarray(data["values"], dtype=float)),
        cov=np.asarray(data["cov"], dtype=float),
        residual_log_sd=float(data["residual_log_sd"]),
    )
