"""How long does a collective of any size take inside a scale-up domain? Curves through measured tables.

Per operation and group size, a latency and a bandwidth between each two measured sizes; between measured group sizes
along log n. Bus bandwidth at the sizes of tensor parallelism is a quarter to nine tenths of what the largest messages
reach, so one bandwidth won't do. benchmarks/collective_accuracy.py prints the errors on sizes and groups left out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainplan.profiles import read_json

Array = npt.NDArray[np.float64]
OPERATIONS = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
              "alltoall": "all_to_all"}  # fmt: skip
"""Name in the tables -> ours."""
SAME_FABRIC = {"A100-SXM4-40GB": "A100-SXM4-80GB"}
"""Devices on the same links and switches (NVLink3, NVSwitch); only their memory differs."""


@dataclass(frozen=True)
class Curve:
    """Seconds of one operation on one group size: rising sizes [S] in bytes and their times [S], never falling."""

    sizes: Array
    seconds: Array

    def __call__(self, moved: Array) -> Array:
        """A straight line in bytes between two sizes; constant below the table, at its last two's bandwidth beyond."""
        last, before = self.sizes[-1], self.sizes[-2]
        slope = max((self.seconds[-1] - self.seconds[-2]) / (last - before), 0.5 * self.seconds[-1] / last)
        beyond = np.maximum(moved - last, 0.0) * slope
        return np.asarray(np.interp(moved, self.sizes, self.seconds) + beyond)


@dataclass(frozen=True, eq=False)  # one object per device
class LinkCurves:
    """Curves of one scale-up tier: operation -> group size -> curve."""

    curves: Mapping[str, Mapping[int, Curve]]

    def seconds(self, operation: str, moved: npt.ArrayLike, n: npt.ArrayLike) -> Array:
        """Seconds of a collective.

        Args:
            operation: all_reduce, all_gather, reduce_scatter or all_to_all.
            moved: Bytes as nccl-tests counts them: the buffer of a rank for all_reduce and all_to_all, the whole
                gathered or scattered buffer for the others.
            n: Ranks; 1 takes no time.
        """
        moved, n = np.broadcast_arrays(np.asarray(moved, float), np.asarray(n, float))
        if moved.size == 1:
            return np.full(moved.shape, self.one(operation, float(moved.flat[0]), float(n.flat[0])))
        if moved.size > DISTINCT_FROM:
            pairs, back = np.unique(np.stack([moved.ravel(), n.ravel()]), axis=1, return_inverse=True)
            return self._seconds(operation, pairs[0], pairs[1])[back].reshape(moved.shape)
        return self._seconds(operation, moved, n)

    @functools.lru_cache(maxsize=2**14)  # noqa: B019 - as many objects as devices, which live as long as the process
    def one(self, operation: str, moved: float, n: float) -> float:
        """`seconds` of one collective, remembered."""
        return float(self._seconds(operation, np.array([moved]), np.array([n]))[0])

    def _seconds(self, operation: str, moved: Array, n: Array) -> Array:
        known = self.curves[operation]
        ranks = np.array(sorted(known))
        times = np.stack([known[int(r)](moved) for r in ranks])
        at = np.clip(np.searchsorted(ranks, n, side="right") - 1, 0, max(len(ranks) - 2, 0))
        low, high = ranks[at], ranks[np.minimum(at + 1, len(ranks) - 1)]
        share = np.where(high > low, np.log(np.maximum(n, 1) / low) / np.log(np.maximum(high / low, 1.0001)), 0.0)
        first = np.take_along_axis(times, at[None], 0)[0]
        second = np.take_along_axis(times, np.minimum(at + 1, len(ranks) - 1)[None], 0)[0]
        inside = np.exp(np.log(first) + np.clip(share, 0, 1) * (np.log(second) - np.log(first)))
        # Beyond the largest group: traffic grows as (n - 1) / n, and each rank more is a hop more, as it was before.
        most = ranks[-1]
        more = np.maximum(n, most)
        traffic = ((more - 1) / more) / ((most - 1) / most)
        latency = np.array([known[int(r)].seconds[0] for r in ranks])
        hop = max(latency[-1] - latency[-2], 0.0) / (most - ranks[-2]) if len(ranks) > 1 else latency[-1] / most
        outside = (inside - latency[-1]) * (traffic - 1) + (more - most) * hop
        return np.asarray(np.where(n > 1, inside + outside, 0.0))

    def extrapolated(self, operation: str, moved: npt.ArrayLike, n: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Where the size or the group lies outside the tables."""
        known = self.curves[operation]
        sizes = next(iter(known.values())).sizes
        moved, n = np.asarray(moved, float), np.asarray(n, float)
        return np.asarray((moved < sizes[0]) | (moved > sizes[-1]) | (n > max(known)) | (n < min(known)))


DISTINCT_FROM = 4096
"""Columns longer than this are priced once per distinct (bytes, ranks)."""


def curve(points: Sequence[tuple[float, float]]) -> Curve:
    """A curve through (bytes, seconds); a time below that of a smaller message is raised to it, as jitter."""
    ordered = sorted(points)
    sizes, seconds = np.array([p[0] for p in ordered]), np.array([p[1] for p in ordered])
    return Curve(sizes, np.maximum.accumulate(seconds))


def table_points(device: str, source: str = "aiconfigurator") -> dict[str, dict[int, list[tuple[float, float]]]]:
    """Operation -> ranks -> (bytes, seconds) of a device's tables from one source."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    tables: list[Mapping[str, Any]] = read_json("measurements", "collectives.json")["tables"]
    for table in tables:
        operation = OPERATIONS.get(table["op"])
        if (
            operation is None
            or table["device"] != device
            or source not in table["source"]
            or "us" not in table["columns"]
        ):
            continue
        for row in table["rows"]:
            values = {**table["fixed"], **dict(zip(table["columns"], row, strict=True))}
            points = found.setdefault(operation, {}).setdefault(int(values["n_ranks"]), [])
            points.append((float(values["size_bytes"]), float(values["us"]) * 1e-6))
    return found


@functools.lru_cache(maxsize=64)
def link_curves(device: str) -> LinkCurves | None:
    """The curves of a device's own links; None where none were measured."""
    points = table_points(SAME_FABRIC.get(device, device))
    if set(points) != set(OPERATIONS.values()):
        return None
    return LinkCurves({op: {n: curve(of) for n, of in by_n.items()} for op, by_n in points.items()})
