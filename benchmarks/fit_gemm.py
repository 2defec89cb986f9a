"""Fit the base of the matrix product model to the published tables.

    python benchmarks/fit_gemm.py

Reads profiles/measurements/gemm.json and profiles/hardware, writes profiles/measurements/gemm_fit.json: per device and
type the parameters of `trainplan.costmodel.gemm.Base`, and how far the base alone is from its table. Least squares of
log times with a soft loss, from one start inside physical limits; the same answer on every run.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from trainplan.costmodel.gemm import ELEMENT_BYTES, PROCESSORS, Base, forward, rows
from trainplan.costmodel.hardware_presets import device, gpu_facts
from trainplan.profiles import read_json

OUT = Path(__file__).resolve().parent.parent / "profiles" / "measurements" / "gemm_fit.json"
# share of the datasheet peak, ramp along k, tile penalty, share of the datasheet bandwidth, fixed us, quantising share
START = (0.85, 100.0, 0.1, 0.75, 4.0, 0.5)
LOW = (0.2, 0.5, 0.0005, 0.6, 0.3, 0.02)
HIGH = (1.1, 2000.0, 3.0, 1.3, 40.0, 1.2)


def make_base(p: np.ndarray, name: str, precision: str) -> Base:
    """The base of a vector of logarithms of the parameters."""
    share, ramp, penalty, memory, fixed, quantise = np.exp(p)
    peak = device(name).peak_flops_per_s[precision].value  # type: ignore[index]
    bandwidth = gpu_facts()[name]["memory_gbps"] * 1e9
    return Base(
        processors=PROCESSORS[name],
        flops_per_s=float(share * peak),
        k_ramp=float(ramp),
        tile_penalty=float(penalty),
        bytes_per_s=float(memory * bandwidth),
        fixed_s=float(fixed * 1e-6),
        quantise_bytes_per_s=float(quantise * bandwidth) if precision == "fp8" else float("inf"),
    )


def fit_base(name: str, precision: str, measured: np.ndarray) -> Base:
    """The base that is nearest to rows [n, 4] of m, n, k, seconds."""
    element = ELEMENT_BYTES[precision]

    def errors(p: np.ndarray) -> np.ndarray:
        return np.log(make_base(p, name, precision).seconds(*measured[:, :3].T, element) / measured[:, 3])

    limits = (np.log(LOW), np.log(HIGH))
    found = least_squares(errors, np.log(START), bounds=limits, loss="soft_l1", f_scale=0.05)
    return make_base(found.x, name, precision)


def main() -> None:
    """Fit every complete table, and the scattered one of a device that has no other."""
    fits = {}
    every = read_json("measurements", "gemm.json")["tables"]
    for table in sorted(every, key=lambda table: "aiconfigurator" not in table["source"]):
        name, precision, measured = table["device"], table["dtype"], rows(table)[forward(table)]
        if f"{name}/{precision}" in fits:
            continue
        base = fit_base(name, precision, measured)
        errors = np.abs(base.seconds(*measured[:, :3].T, ELEMENT_BYTES[precision]) / measured[:, 3] - 1)
        entry = {key: value for key, value in vars(base).items() if np.isfinite(value)}
        fits[f"{name}/{precision}"] = {
            "base": {k: v if k == "processors" else float(f"{v:.6g}") for k, v in entry.items()},
            "source": table["source"],
            "rows": len(measured),
            "base_median_error": round(float(np.median(errors)), 4),
            "base_p90_error": round(float(np.quantile(errors, 0.9)), 4),
        }
        print(name, precision, fits[f"{name}/{precision}"])
    OUT.write_text(json.dumps(fits, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
