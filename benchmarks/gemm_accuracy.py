"""How far is the matrix product model from measurements it has not seen?

    python benchmarks/gemm_accuracy.py [--json]

Leaves one slab of each complete table out at a time (one whole k, one whole n, the smallest m, the largest m), fits
the base and the corrections to the rest, and prints the errors on the slab. Apart: the model of a table against another
source of the same GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fit_gemm import fit_base

from trainplan.costmodel.gemm import ELEMENT_BYTES, forward, gemm_model, grid_correction, rows
from trainplan.costmodel.hardware_presets import device
from trainplan.profiles import read_json


def slabs(measured: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(kind, mask of the rows left out); the ends of k and n are extrapolations too."""
    for axis, name in ((2, "k"), (1, "n")):
        for value in np.unique(measured[:, axis]):
            yield f"one {name}", measured[:, axis] == value
    yield "smallest m", measured[:, 0] == measured[:, 0].min()
    yield "largest m", measured[:, 0] == measured[:, 0].max()


def held_out(name: str, precision: str, measured: np.ndarray) -> dict[str, list[float]]:
    """Kind of slab -> absolute errors of its rows."""
    element = ELEMENT_BYTES[precision]
    errors: dict[str, list[float]] = {}
    for kind, out in slabs(measured):
        base = fit_base(name, precision, measured[~out])
        correction = grid_correction(base, element, measured[~out])
        sizes = measured[out, :3].T
        predicted = base.seconds(*sizes, element) * np.exp(correction(*sizes))
        errors.setdefault(kind, []).extend(np.abs(predicted / measured[out, 3] - 1).tolist())
    return errors


def line(device_name: str, precision: str, what: str, errors: list[float]) -> dict[str, Any]:
    """A row of the report."""
    return {
        "device": device_name, "dtype": precision, "left_out": what, "n": len(errors),
        "median": float(np.median(errors)), "p90": float(np.quantile(errors, 0.9)), "worst": float(max(errors)),
    }  # fmt: skip


def report() -> list[dict[str, Any]]:
    """Every table and kind of slab, pooled figures, and the other source."""
    lines: list[dict[str, Any]] = []
    pooled: dict[str, list[float]] = {}
    for table in read_json("measurements", "gemm.json")["tables"]:
        name, precision = table["device"], table["dtype"]
        if "aiconfigurator" not in table["source"]:
            other = rows(table)[forward(table)]
            model = gemm_model(device(name), precision, "torch")
            if model.provenance == "measured" and name == "B200-SXM-180GB":
                bias = model.seconds(*other[:, :3].T) / other[:, 3] - 1
                lines.append(
                    line(name, precision, "another source", np.abs(bias).tolist()) | {"bias": float(bias.mean())}
                )
            continue
        for kind, errors in held_out(name, precision, rows(table)).items():
            lines.append(line(name, precision, kind, errors))
            pooled.setdefault(precision, []).extend(errors)
    return lines + [line("all", precision, "all slabs", errors) for precision, errors in pooled.items()]


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    lines = report()
    if parser.parse_args().json:
        print(json.dumps(lines, indent=1))
        return
    for of in lines:
        print(
            f"{of['device']:16} {of['dtype']:5} {of['left_out']:15} n={of['n']:5}  median {of['median']:6.1%}  "
            f"p90 {of['p90']:6.1%}  worst {of['worst']:6.1%}" + (f"  bias {of['bias']:+.1%}" if "bias" in of else "")
        )


if __name__ == "__main__":
    main()
