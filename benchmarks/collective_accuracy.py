"""How far are the collective curves from measurements they have not seen?

    python benchmarks/collective_accuracy.py [--json]

Leaves a range of sizes out of every curve at a time, then one whole group size, builds the curves from the rest and
prints the errors on what was left out. Apart: the curve of a table against another source of the same GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trainplan.costmodel.link_curves import LinkCurves, curve, link_curves, table_points
from trainplan.profiles import read_json

KIB, MIB = 2.0**10, 2.0**20
SAME_SOURCE = "aiconfigurator"
OTHER_SOURCE = "vTrain"
Points = Mapping[int, list[tuple[float, float]]]  # ranks -> (bytes, seconds)
RANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "64 KiB to 1 MiB": lambda sizes: (sizes >= 64 * KIB) & (sizes <= MIB),
    "1 to 16 MiB": lambda sizes: (sizes >= MIB) & (sizes <= 16 * MIB),
    "16 to 128 MiB": lambda sizes: (sizes >= 16 * MIB) & (sizes <= 128 * MIB),
    "largest two": lambda sizes: sizes >= np.sort(sizes)[-2],
    "smallest two": lambda sizes: sizes <= np.sort(sizes)[1],
    "every other size": lambda sizes: np.arange(len(sizes)) % 2 == 1,
}
INNER = ("64 KiB to 1 MiB", "1 to 16 MiB", "16 to 128 MiB")
POOLED = (*INNER, "largest two", "smallest two", "group of 4 from 2 and 8")


def devices() -> list[str]:
    """Devices whose tables of all four operations come from the source that the curves use."""
    found = dict.fromkeys(table["device"] for table in read_json("measurements", "collectives.json")["tables"])
    return [name for name in found if link_curves(name) is not None]


def range_out(operation: str, points: Points, chosen: Callable[[np.ndarray], np.ndarray]) -> list[float]:
    """Errors on the sizes left out of every curve of an operation, predicted over measured less 1."""
    errors: list[float] = []
    for n, of in points.items():
        measured = np.array(sorted(of))
        out = chosen(measured[:, 0])
        kept = LinkCurves({operation: {n: curve([(size, t) for size, t in measured[~out]])}})
        errors.extend(kept.seconds(operation, measured[out, 0], n) / measured[out, 1] - 1)
    return errors


def group_out(operation: str, points: Points, n: int) -> list[float]:
    """Errors on one group size, from the curves of the others; sizes of at least 64 KiB, which training sends."""
    kept = LinkCurves({operation: {of: curve(rows) for of, rows in points.items() if of != n}})
    measured = np.array(sorted(row for row in points[n] if row[0] >= 64 * KIB))
    return list(kept.seconds(operation, measured[:, 0], n) / measured[:, 1] - 1)


def line(device: str, operation: str, what: str, errors: list[float]) -> dict[str, Any]:
    """A row of the report."""
    absolute = np.abs(errors)
    return {
        "device": device, "op": operation, "left_out": what, "n": len(errors),
        "median": float(np.median(absolute)), "p90": float(np.quantile(absolute, 0.9)),
        "worst": float(absolute.max()), "bias": float(np.median(errors)),
    }  # fmt: skip


def report() -> list[dict[str, Any]]:
    """Every device, operation and range, pooled figures, and the other source."""
    lines: list[dict[str, Any]] = []
    pooled: dict[str, list[float]] = {}
    for name in devices():
        for operation, points in table_points(name, SAME_SOURCE).items():
            found = {what: range_out(operation, points, chosen) for what, chosen in RANGES.items()}
            if {2, 4, 8} <= set(points):
                found["group of 4 from 2 and 8"] = group_out(operation, points, 4)
                found["group of 8 from 2 and 4"] = group_out(operation, points, 8)
            for what, errors in found.items():
                lines.append(line(name, operation, what, errors))
                pooled.setdefault(what, []).extend(errors)
    lines.extend(line("all", "all", what, errors) for what, errors in pooled.items())
    lines.append(line("all", "all", "inner ranges pooled", [e for what in INNER for e in pooled[what]]))
    lines.append(line("all", "all", "pooled", [e for what in POOLED for e in pooled[what]]))
    return lines + other_source()


def other_source() -> list[dict[str, Any]]:
    """The curves against all-reduce tables of another source, as they are."""
    lines: list[dict[str, Any]] = []
    for name in devices():
        curves = link_curves(name)
        assert curves is not None  # as devices() says
        every: list[float] = []
        for operation, points in table_points(name, OTHER_SOURCE).items():
            for n, rows in sorted(points.items()):
                measured = np.array(sorted(rows))
                errors = list(curves.seconds(operation, measured[:, 0], n) / measured[:, 1] - 1)
                lines.append(line(name, operation, f"{OTHER_SOURCE}, {n} ranks", errors))
                every.extend(errors)
            lines.append(line(name, operation, f"{OTHER_SOURCE}, all", every))
    return lines


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
            f"{of['device']:16} {of['op']:14} {of['left_out']:24} n={of['n']:5}  median {of['median']:6.1%}  "
            f"p90 {of['p90']:6.1%}  worst {of['worst']:6.1%}  bias {of['bias']:+6.1%}"
        )


if __name__ == "__main__":
    main()
