"""Seconds of a matrix product on one device: a tile and wave roofline, corrected by what was measured.

The base is physical: tiles in waves over the processors, a ramp along k, memory traffic, a fixed time per launch. Where
a device has a table, log(measured / base) is interpolated on the table's grid and fades out beyond it, so a product
outside the table still follows the roofline. A device without a table has the base alone, from its own rates.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainplan.costmodel.hardware import Device, Precision, Provenance
from trainplan.profiles import read_json

Array = npt.NDArray[np.float64]
Value = npt.ArrayLike
Library = Literal["torch", "transformer_engine"]
TILES = ((256, 256), (256, 128), (128, 256), (128, 128), (64, 128), (128, 64), (64, 64))
"""Output tiles (rows, columns) that a library chooses from."""
ELEMENT_BYTES: Mapping[str, float] = {"fp32": 4, "bf16": 2, "fp8": 1}
PROCESSORS = {
    "A100-SXM4-80GB": 108,
    "A100-SXM4-40GB": 108,
    "A100-PCIe-80GB": 108,
    "A800-SXM4-80GB": 108,
    "H100-SXM5-80GB": 132,
    "H100-SXM5-96GB-HBM2e": 132,
    "H100-PCIe-80GB": 114,
    "H200-SXM-141GB": 132,
    "GH200-SXM-96GB": 132,
    "H20-SXM5-96GB": 78,
    "B200-SXM-180GB": 148,
    "GB200-186GB": 148,
}
"""Streaming multiprocessors, from NVIDIA's architecture papers; Blackwell counts both dies."""
SAME_DIE = {
    "A100-SXM4-40GB": "A100-SXM4-80GB",
    "A800-SXM4-80GB": "A100-SXM4-80GB",
    "H100-SXM5-96GB-HBM2e": "H100-SXM5-80GB",
}
"""Parts with the processors, clocks and caches of another one; memory and links differ, which large products do not
see. The 500 W of the 96 GB part is not the 700 W of its table."""
FADES_OVER = np.log(4.0)
"""Beyond the grid a correction loses 1/e over a factor of four in size: far out only the roofline is known."""
LOCAL = 0.35
"""Width in log size over which scattered measurements speak for a product."""


@dataclass(frozen=True)
class Base:
    """The parameters of the roofline; `seconds` says what each does.

    Attributes:
        processors: Tiles that run at a time; 0 = no tiles (a device of unknown make).
        flops_per_s: Sustained by full waves of large tiles [FLOP/s].
        k_ramp: Elements along k that filling and draining a tile's pipeline costs.
        tile_penalty: Slow-down of a 128 x 128 tile against an infinite one: its operands come from the L2 cache.
        bytes_per_s: Of traffic to memory [bytes/s].
        fixed_s: Launch, prologue and epilogue [s].
        quantise_bytes_per_s: Rate at which the input is read in 2 bytes and written in 1 before an fp8 product; inf
            where the input comes quantised [bytes/s].
    """

    processors: int
    flops_per_s: float
    k_ramp: float
    tile_penalty: float
    bytes_per_s: float
    fixed_s: float
    quantise_bytes_per_s: float = float("inf")

    def seconds(self, m: Value, n: Value, k: Value, element_bytes: float) -> Array:
        """Waves of the best tile, or memory traffic where it takes longer (a smooth maximum), and the fixed part.

        waves * 2 a b (k + ramp) / rate of one processor, with tiles a x b, waves = ceil(ceil(m/a) ceil(n/b) / SMs).
        """
        m, n, k = np.asarray(m, float), np.asarray(n, float), np.asarray(k, float)
        if self.processors:
            each = self.flops_per_s / self.processors
            arithmetic = np.asarray(np.inf)
            for a, b in TILES:
                slower = 1 + self.tile_penalty * 64 * (1 / a + 1 / b)
                waves = np.ceil(np.ceil(m / a) * np.ceil(n / b) / self.processors)
                arithmetic = np.minimum(arithmetic, waves * (2 * a * b / each * slower) * (k + self.k_ramp))
        else:
            arithmetic = 2 * m * n * k / self.flops_per_s
        moved = (element_bytes * (m * k + n * k) + max(element_bytes, 2) * m * n) / self.bytes_per_s
        quantised = 3 * m * k / self.quantise_bytes_per_s
        if not self.processors:
            return np.asarray(np.maximum(np.maximum(arithmetic, moved), np.where(m * n * k > 0, self.fixed_s, 0.0)))
        smooth = np.sqrt(np.sqrt(arithmetic**4 + moved**4))
        return np.asarray(np.where(m * n * k > 0, self.fixed_s + smooth + quantised, 0.0))


@dataclass(frozen=True)
class Grid:
    """Log corrections [M, N, K] on a grid of logarithms of m, n and k."""

    axes: tuple[Array, Array, Array]
    values: Array

    def __call__(self, m: Array, n: Array, k: Array) -> Array:
        """Interpolated linearly; outside, the edge's value, fading with the distance."""
        places, fractions, outside = [], [], np.zeros(())
        for axis, size in zip(self.axes, (m, n, k), strict=True):
            x = np.log(np.maximum(size, 1e-9))
            inside = np.clip(x, axis[0], axis[-1])
            outside = outside + np.abs(x - inside)
            place = np.clip(np.searchsorted(axis, inside, side="right") - 1, 0, len(axis) - 2)
            places.append(place)
            fractions.append((inside - axis[place]) / (axis[place + 1] - axis[place]))
        total = np.zeros(())
        for corner in range(8):
            bits = [(corner >> i) & 1 for i in range(3)]
            weight = np.ones(())
            for bit, fraction in zip(bits, fractions, strict=True):
                weight = weight * (fraction if bit else 1 - fraction)
            total = total + weight * self.values[tuple(p + b for p, b in zip(places, bits, strict=True))]
        return np.asarray(total * np.exp(-outside / FADES_OVER))

    def covers(self, m: Array, n: Array, k: Array) -> npt.NDArray[np.bool_]:
        """Where a product lies on or inside the grid."""
        low, high = np.array([axis[0] for axis in self.axes]), np.array([axis[-1] for axis in self.axes])
        return _inside((m, n, k), low, high)


@dataclass(frozen=True)
class Scatter:
    """Log corrections [P] of scattered products [P, 3] (log m, n, k): their mean, and more of it near each."""

    points: Array
    values: Array
    mean: float

    def __call__(self, m: Array, n: Array, k: Array) -> Array:
        """Kernel-weighted mean of the deviations around the common mean, which counts as one far measurement."""
        shape = np.broadcast_shapes(m.shape, n.shape, k.shape)
        flat = np.stack([np.broadcast_to(np.log(np.maximum(s, 1e-9)), shape).ravel() for s in (m, n, k)], axis=1)
        distinct, back = np.unique(flat, axis=0, return_inverse=True)
        squares = ((distinct[:, None, :] - self.points[None]) ** 2).sum(axis=2)
        weights = np.exp(-squares / (2 * LOCAL**2))
        local = weights @ (self.values - self.mean) / (weights.sum(axis=1) + 0.2)
        return np.asarray((self.mean + local)[back].reshape(shape))

    def covers(self, m: Array, n: Array, k: Array) -> npt.NDArray[np.bool_]:
        """Where a product lies in the box around the measurements."""
        return _inside((m, n, k), self.points.min(axis=0), self.points.max(axis=0))


def _inside(sizes: tuple[Array, Array, Array], low: Array, high: Array) -> npt.NDArray[np.bool_]:
    """Where log sizes are within limits, up to rounding."""
    logs = [np.log(np.maximum(size, 1e-9)) for size in sizes]
    inside = [(x >= lo - 1e-9) & (x <= hi + 1e-9) for x, lo, hi in zip(logs, low, high, strict=True)]
    return np.asarray(inside[0] & inside[1] & inside[2])


@dataclass(frozen=True)
class GemmModel:
    """Seconds of y[m, n] = x[m, k] w[k, n] on one device in one type.

    ``accumulate_bytes_per_s``: rate at which an fp32 gradient is read and written beside the product. ``group_rows``:
    rows that an expert's last tile is padded to in a grouped product.
    """

    base: Base
    element_bytes: float
    correction: Grid | Scatter | None
    provenance: Provenance
    accumulate_bytes_per_s: float
    group_rows: int = 128

    def seconds(self, m: Value, n: Value, k: Value, accumulate_fp32: bool = False) -> Array:
        """Seconds of each product; sizes broadcast. A product without rows takes none.

        Args:
            m: Rows.
            n: Columns.
            k: Summed length.
            accumulate_fp32: The result is added to an fp32 matrix in memory instead of being written in 2 bytes.
        """
        m, n, k = np.asarray(m, float), np.asarray(n, float), np.asarray(k, float)
        seconds = self.base.seconds(m, n, k, self.element_bytes)
        if self.correction is not None:
            seconds = seconds * np.exp(self.correction(m, n, k))
        if accumulate_fp32:
            seconds = seconds + (8 - 2) * m * n / self.accumulate_bytes_per_s
        return seconds

    def extrapolated(self, m: Value, n: Value, k: Value) -> npt.NDArray[np.bool_]:
        """Where no table covers the product."""
        m, n, k = np.asarray(m, float), np.asarray(n, float), np.asarray(k, float)
        if self.correction is None:
            return np.ones(np.broadcast_shapes(m.shape, n.shape, k.shape), dtype=bool)
        return ~self.correction.covers(m, n, k)


EXPOSED_ACCUMULATION = 0.9
"""Share of the extra traffic of an fp32 accumulation that shows in the time: 0.6 (grouped) to 1.0 (single products) of
it at the sustained memory rate, between pairs of SimuMax's B200 rows that differ in nothing else."""
GROUP_ROWS: Mapping[str, int] = {"sm_100": 256, "sm_103": 256}
"""Rows of an output tile in a grouped product by architecture, 128 elsewhere: Blackwell pairs two processors."""


def gemm_model(device: Device, precision: Precision, library: Library = "torch") -> GemmModel:
    """The model of a device's products.

    Args:
        device: Its name finds the tables; its rates make the base where there are none.
        precision: Type of the operands.
        library: Whose table, where the device has several; without one of its own the other.
    """
    key = (device.matmul_flops_per_s[precision].value, device.memory_bytes_per_s.value, device.op_overhead_s.value)
    provenance = device.matmul_flops_per_s[precision].provenance
    return _model(device.name, device.arch, precision, library, *key, provenance)


@functools.lru_cache(maxsize=256)
def _model(
    name: str, arch: str, precision: Precision, library: Library, flops_per_s: float, bytes_per_s: float,
    overhead_s: float, provenance: Provenance,
) -> GemmModel:  # fmt: skip
    element = ELEMENT_BYTES[precision]
    accumulate = bytes_per_s / EXPOSED_ACCUMULATION
    die = SAME_DIE.get(name, name)
    fitted: Mapping[str, Any] = read_json("measurements", "gemm_fit.json")
    entry = fitted.get(f"{die}/{precision}")
    if entry is None:
        processors = PROCESSORS.get(name, 0)
        generic = GENERIC.get(arch) if processors else None
        if generic is None:
            base = Base(0, flops_per_s, 0.0, 0.0, bytes_per_s, overhead_s)
        else:
            # The stated rate is that of large products, which the generic ramp and penalty already slow a little.
            base = Base(processors, flops_per_s * 1.05, *generic, bytes_per_s, overhead_s)
        return GemmModel(base, element, None, provenance, accumulate, GROUP_ROWS.get(arch, 128))
    base = Base(**entry["base"])
    grid = scatter = None
    for table in tables(die, precision):
        if "aiconfigurator" in table["source"]:
            grid = grid or grid_correction(base, element, rows(table))
        else:
            scatter = scatter or scatter_correction(base, element, rows(table), forward(table))
    chosen = scatter if library == "transformer_engine" and scatter is not None else grid
    return GemmModel(base, element, chosen or scatter, "measured", accumulate, GROUP_ROWS.get(arch, 128))


GENERIC: Mapping[str, tuple[float, float]] = {"sm_80": (135.0, 0.16), "sm_90": (105.0, 0.03), "sm_100": (5.0, 0.03)}
"""Ramp along k and tile penalty by architecture, from the devices that have a table, for those that have none."""


def tables(name: str, precision: str) -> list[Mapping[str, Any]]:
    """The tables of a device, by its exact name."""
    every: list[Mapping[str, Any]] = read_json("measurements", "gemm.json")["tables"]
    return [table for table in every if (table["device"], table["dtype"]) == (name, precision)]


def rows(table: Mapping[str, Any]) -> Array:
    """[rows, 4] of a table: m, n, k and seconds."""
    columns = table["columns"]
    wanted = [columns.index(name) for name in ("m", "n", "k", "us")]
    found = np.array([[row[i] for i in wanted] for row in table["rows"]], dtype=float)
    found[:, 3] *= 1e-6
    return found


def forward(table: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
    """Rows of a table that add to nothing: an accumulation's traffic is priced apart."""
    if "accumulate" not in table["columns"]:
        return np.full(len(table["rows"]), not table["fixed"].get("accumulate", False))
    at = table["columns"].index("accumulate")
    return np.array([not row[at] for row in table["rows"]])


def grid_correction(base: Base, element_bytes: float, measured: Array) -> Grid:
    """Corrections of a table that is complete in m, n and k."""
    axes = [np.unique(measured[:, i]) for i in range(3)]
    values = np.zeros([len(axis) for axis in axes])
    logs = np.log(measured[:, 3] / base.seconds(measured[:, 0], measured[:, 1], measured[:, 2], element_bytes))
    at = tuple(np.searchsorted(axis, measured[:, i]) for i, axis in enumerate(axes))
    values[at] = logs
    return Grid((np.log(axes[0]), np.log(axes[1]), np.log(axes[2])), values)


def scatter_correction(base: Base, element_bytes: float, measured: Array, plain: npt.NDArray[np.bool_]) -> Scatter:
    """Corrections of a table of scattered products."""
    kept = measured[plain]
    values = np.log(kept[:, 3] / base.seconds(kept[:, 0], kept[:, 1], kept[:, 2], element_bytes))
    return Scatter(np.log(kept[:, :3]), values, float(np.median(values)))
