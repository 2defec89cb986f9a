"""How far is the matrix product model from measurements it has not seen?

    python benchmarks/gemm_accuracy.py [--json]

Leaves one slab of each complete table out at a time (one whole k, one whole n, the smallest m, the largest m), fits
the base and the corrections to the rest, and prints the errors on the slab. Scattered tables lose one shape at a time.
Apart: the model of a table against another source of the same GPU, as it is and after one factor for the source.
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

from trainplan.costmodel.gemm import (
    ELEMENT_BYTES,
    Base,
    forward_rows,
    gemm_model,
    grid_correction,
    library_of,
    scatter_correction,
)
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
    """Kind of slab -> errors of its rows, predicted over measured less 1."""
    element = ELEMENT_BYTES[precision]
    errors: dict[str, list[float]] = {}
    for kind, out in slabs(measured):
        base = fit_base(name, precision, measured[~out])
        correction = grid_correction(base, element, measured[~out])
        sizes = measured[out, :3].T
        predicted = base.seconds(*sizes, element) * np.exp(correction(*sizes))
        errors.setdefault(kind, []).extend((predicted / measured[out, 3] - 1).tolist())
    return errors


def one_shape_out(base: Base, precision: str, measured: np.ndarray) -> list[float]:
    """Errors of a scattered table's rows, each without its shape among the corrections; the base has seen them."""
    element = ELEMENT_BYTES[precision]
    shapes, which = np.unique(measured[:, :3], axis=0, return_inverse=True)
    errors = []
    for i, shape in enumerate(shapes):
        out = which.ravel() == i
        correction = scatter_correction(base, element, measured[~out])
        predicted = base.seconds(*shape, element) * np.exp(correction(*shape))
        errors.extend((predicted / measured[out, 3] - 1).tolist())
    return errors


def line(device_name: str, precision: str, what: str, errors: list[float]) -> dict[str, Any]:
    """A row of the report."""
    absolute = np.abs(errors)
    return {
        "device": device_name, "dtype": precision, "left_out": what, "n": len(errors),
        "median": float(np.median(absolute)), "p90": float(np.quantile(absolute, 0.9)),
        "worst": float(absolute.max()), "bias": float(np.median(errors)),
    }  # fmt: skip


def report() -> list[dict[str, Any]]:
    """Every table and kind of slab, pooled figures, and the other source."""
    lines: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    pooled: dict[str, dict[str, list[float]]] = {}
    for table in read_json("measurements", "gemm.json")["tables"]:
        name, precision, library = table["device"], table["dtype"], library_of(table)
        measured = forward_rows(name, precision, library)
        if library == "torch":
            of_device: list[float] = []
            for kind, errors in held_out(name, precision, measured).items():
                lines.append(line(name, precision, kind, errors))
                of_device.extend(errors)
                pooled.setdefault(precision, {}).setdefault(kind, []).extend(errors)
            lines.append(line(name, precision, "all slabs", of_device))
            continue
        base = gemm_model(device(name), precision, library).base
        others.append(line(name, precision, "one shape", one_shape_out(base, precision, measured)))
        model = gemm_model(device(name), precision, "torch")
        if model.base != base:
            ratios = model.seconds(*measured[:, :3].T) / measured[:, 3]
            others.append(line(name, precision, "another source", (ratios - 1).tolist()))
            ratios = ratios / np.median(ratios)
            outside = model.extrapolated(*measured[:, :3].T)
            for what, of in (("on its grid", ~outside), ("beyond it", outside)):
                others.append(line(name, precision, f"{what}, 1 factor", (ratios[of] - 1).tolist()))
    for precision, kinds in pooled.items():
        lines.extend(line("all", precision, kind, errors) for kind, errors in kinds.items())
        lines.append(line("all", precision, "all slabs", [e for errors in kinds.values() for e in errors]))
    return lines + others


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    lines = report()
    if as_json:
        print(json.dumps(lines, indent=1))
        return
    for of in lines:
        print(
            f"{of['device']:16} {of['dtype']:5} {of['left_out']:21} n={of['n']:5}  median {of['median']:6.1%}  "
            f"p90 {of['p90']:6.1%}  worst {of['worst']:6.1%}  bias {of['bias']:+6.1%}"
        )


if __name__ == "__main__":
    main()
