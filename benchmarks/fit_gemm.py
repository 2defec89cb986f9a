"""Fit the base of the matrix product model to the published tables.

    python benchmarks/fit_gemm.py

Reads profiles/measurements/gemm.json and profiles/hardware, writes profiles/measurements/gemm_fit.json:

- tables: per device, type and library the parameters of `trainplan.costmodel.gemm.Base`, and how far the base alone is
  from its table;
- generic: per architecture the medians of those of torch in bf16, for a device without a table, and the share of the
  best product's rate (matmul_flops_per_s) that full waves sustain;
- exposed_accumulation: per device with such rows, the share of an fp32 accumulation's extra traffic that shows.

Least squares of log times with a soft loss, each parameter with a physical range and a weak prior, from three fixed
starts; the same answer on every run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from trainplan.costmodel.gemm import (
    ELEMENT_BYTES,
    PROCESSORS,
    Base,
    forward,
    library_of,
    rows,
    scatter_correction,
)
from trainplan.costmodel.hardware import Device
from trainplan.costmodel.hardware_presets import device, gpu_facts
from trainplan.profiles import read_json

OUT = Path(__file__).resolve().parent.parent / "profiles" / "measurements" / "gemm_fit.json"
ROUNDS_TO = 6  # significant digits in the file
AMPERE = {"tile_power": 2.0, "max_split": 4}
"""Chosen by the held-out error on the A100's smallest m: 22 % at the 90th percentile without, 10 % with. Splits and the
square make no table of Hopper or Blackwell better."""

# Per parameter: lowest, usual, highest, and the prior's width in log.
PRIORS: Mapping[str, tuple[float, float, float, float]] = {
    "share of peak": (0.3, 0.75, 1.0, 0.3),
    "k ramp": (2, 100, 800, 0.7),  # two to six stages of 32 or 64 elements
    "tile penalty": (0.002, 0.05, 3, 1.0),  # well-fed kernels hide most of it
    "share of bandwidth": (0.4, 0.85, 1.0, 0.1),  # what copy kernels reach; large products hardly tell
    "fixed us": (0.1, 1.5, 15, 0.4),
    "floor us": (1, 5, 40, 0.3),
    "quantising, share of bandwidth": (0.05, 0.3, 1.0, 0.7),  # reads for the maximum, then again for the cast
}
FP8_LAUNCHES = 3  # the input's maximum, its cast, the product: as many fixed parts and floors
PRIOR_WEIGHT = 3.0  # a table's rows are far from independent: its hundreds count as a few dozen
STARTS = (0.05, 0.3, 1.0)  # of the tile penalty, which has several minima
SOFT = 0.05  # log error beyond which a row counts less


def make_base(p: np.ndarray, name: str, precision: str) -> Base:
    """The base of a vector of logarithms of the parameters, in the order of PRIORS."""
    share, ramp, penalty, memory, fixed, floor, quantise = (float(x) for x in np.exp(p))
    part: Device = device(name)
    bandwidth = gpu_facts()[name]["memory_gbps"] * 1e9
    return Base(
        processors=PROCESSORS[name],
        flops_per_s=share * part.peak_flops_per_s[precision].value,  # type: ignore[index]
        k_ramp=ramp,
        tile_penalty=penalty,
        bytes_per_s=memory * bandwidth,
        fixed_s=fixed * 1e-6,
        floor_s=floor * 1e-6,
        quantise_bytes_per_s=quantise * bandwidth if precision == "fp8" else float("inf"),
        **(AMPERE if part.arch == "sm_80" else {}),  # type: ignore[arg-type]
    )


def fit_base(name: str, precision: str, measured: np.ndarray) -> Base:
    """The base that is nearest to rows [n, 4] of m, n, k, seconds."""
    low, usual, high, width = np.array(list(PRIORS.values())).T
    if precision == "fp8":
        usual[[list(PRIORS).index("fixed us"), list(PRIORS).index("floor us")]] *= FP8_LAUNCHES
    prior = np.log(usual)
    sizes, seconds, element = measured[:, :3].T, measured[:, 3], ELEMENT_BYTES[precision]

    def errors(p: np.ndarray) -> np.ndarray:
        of_rows = np.log(make_base(p, name, precision).seconds(*sizes, element) / seconds)
        return np.concatenate([of_rows, SOFT * PRIOR_WEIGHT * (p - prior) / width])

    fits = []
    for start in STARTS:
        first = prior.copy()
        first[list(PRIORS).index("tile penalty")] = np.log(start)
        fits.append(least_squares(errors, first, bounds=(np.log(low), np.log(high)), loss="soft_l1", f_scale=SOFT))
    return make_base(min(fits, key=lambda fit: fit.cost).x, name, precision)


def exposed_accumulation(base: Base, name: str, table: Mapping[str, Any]) -> float:
    """Share of an fp32 accumulation's extra traffic that shows in its time.

    Traffic: 6 bytes per output element, at the sustained memory rate; time: beyond the model of rows that add nothing.
    """
    measured, plain = rows(table), forward(table)
    fp32 = np.array([row[table["columns"].index("out_dtype")] == "fp32" for row in table["rows"]])
    sizes, seconds = measured[~plain & fp32, :3].T, measured[~plain & fp32, 3]
    usual = base.seconds(*sizes, 2) * np.exp(scatter_correction(base, 2, measured[plain])(*sizes))
    extra = 6 * sizes[0] * sizes[1] / device(name).memory_bytes_per_s.value
    found = least_squares(
        lambda share: np.log((usual + share * extra) / seconds), [0.5], bounds=(0, 2), loss="soft_l1", f_scale=SOFT
    )
    return float(found.x[0])


def main() -> None:
    """Fit every table."""
    fits: dict[str, Any] = {}
    exposed: dict[str, float] = {}
    generic: dict[str, list[Base]] = {}
    shares: dict[str, list[float]] = {}
    for table in read_json("measurements", "gemm.json")["tables"]:
        name, precision, measured = table["device"], table["dtype"], rows(table)[forward(table)]
        base = fit_base(name, precision, measured)
        errors = np.abs(base.seconds(*measured[:, :3].T, ELEMENT_BYTES[precision]) / measured[:, 3] - 1)
        fits[f"{name}/{precision}/{library_of(table)}"] = {
            "base": {key: rounded(value) for key, value in vars(base).items() if np.isfinite(value)},
            "source": table["source"],
            "rows": len(measured),
            "base_median_error": round(float(np.median(errors)), 4),
            "base_p90_error": round(float(np.quantile(errors, 0.9)), 4),
        }
        if library_of(table) == "transformer_engine":
            exposed[name] = round(exposed_accumulation(base, name, table), 3)
        elif precision == "bf16":
            generic.setdefault(device(name).arch, []).append(base)
            best = device(name).matmul_flops_per_s["bf16"].value
            shares.setdefault(device(name).arch, []).append(base.flops_per_s / best)
    exposed["elsewhere"] = round(float(np.mean(list(exposed.values()))), 3)
    shared = ("k_ramp", "tile_penalty", "fixed_s", "floor_s", "tile_power", "max_split")
    by_arch = {
        arch: {
            key: rounded(type(getattr(bases[0], key))(np.median([getattr(b, key) for b in bases]))) for key in shared
        }
        for arch, bases in generic.items()
    }
    for arch, found in shares.items():
        by_arch[arch]["share_of_best"] = round(median(found), 3)
    written = {"tables": dict(sorted(fits.items())), "generic": by_arch, "exposed_accumulation": exposed}
    OUT.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(written, indent=1))


def median(values: list[Any]) -> Any:
    """Of the values' own type."""
    return type(values[0])(np.median(values))


def rounded(value: float) -> float:
    """To the digits that are written; counts stay counts."""
    return value if isinstance(value, int) else float(f"{value:.{ROUNDS_TO}g}")


if __name__ == "__main__":
    main()
