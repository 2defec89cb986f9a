"""Seconds of a matrix product on one device: a tile and wave roofline, corrected by what was measured.

The base is physical: tiles in waves over the processors, a ramp along k, memory traffic, a fixed time per launch. Where
a device has a table, log(measured / base) is interpolated on the table's grid and fades out beyond it, so a product
outside the table still follows the roofline. A device without a table has the base alone, from its own rates.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainplan.costmodel.hardware import Device, Precision, Provenance
from trainplan.costmodel.hardware_presets import device as device_preset
from trainplan.profiles import read_json

Array = npt.NDArray[np.float64]
Value = npt.ArrayLike
Library = Literal["torch", "transformer_engine"]
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
"""Output tiles (rows, columns) that a library chooses from."""
ELEMENT_BYTES: Mapping[str, float] = {"fp32": 4, "bf16": 2, "fp8": 1, "nvfp4": 0.5625}
"""Of an operand; nvfp4 holds a scale of one byte for 16 values of half a byte."""
NVFP4_QUANTISE_BYTES = 2 * 2 + 2 * 0.5625
"""Per element of the input: read in 2 bytes for the largest value and once more to round, written along rows and along
columns. What the quantised recipe of Transformer Engine does, at the stated bandwidth of memory [bytes]."""
PROCESSORS = {
    "V100-SXM2-32GB": 80,
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
    "B300-SXM-288GB": 148,
    "GB300-288GB": 148,
}
"""Streaming multiprocessors, from NVIDIA's architecture papers; Blackwell counts both dies."""
SAME_UNITS = {"sm_103": "sm_100"}
"""Architectures with the tiles and pipelines of another: Blackwell Ultra has more 4-bit units, nothing else."""
SAME_DIE = {
    "A100-SXM4-40GB": "A100-SXM4-80GB",  # 1,555 instead of 2,039 GB/s
    "A800-SXM4-80GB": "A100-SXM4-80GB",  # slower NVLink, nothing else
}
"""Parts that use another one's table: same processors, clocks, caches and power limit. Their memory may differ: the
base then has its bandwidth in proportion, so products bound by memory scale and products bound by arithmetic do not."""
FADES_OVER = float(np.log(3.0))
"""Beyond the grid a correction loses 1/e over a factor of three in size: far out only the roofline is known."""
SCATTER_WIDTH = 0.5
"""Width in log size over which scattered measurements speak for a product: best left-one-out of 0.2 to 1."""
SCATTER_PRIOR = 0.2
"""Weight of "the base is right" against the weights of measurements near by, each at most 1."""


@dataclass(frozen=True)
class Base:
    """The parameters of the roofline; `seconds` says what each does.

    Attributes:
        processors: Tiles that run at a time; 0 = no tiles (a device of unknown make).
        flops_per_s: Sustained by full waves of 128 x 256 tiles [FLOP/s].
        k_ramp: Elements along k that filling and draining a tile's pipeline costs.
        tile_penalty: Slow-down of a 128 x 128 tile by the operands it fetches per FLOP, relative to none.
        bytes_per_s: Of traffic to memory, each operand counted once [bytes/s].
        fixed_s: Prologue and epilogue that nothing hides [s].
        floor_s: Time between launches: a shorter product waits for the next one [s].
        tile_power: How the penalty grows with the operands per FLOP of a tile: 1 where copies run beside the
            arithmetic (Hopper and later), 2 where they take its issue slots (Ampere).
        max_split: Most parts that k is split into where tiles are too few to fill the device.
        quantise_bytes_per_s: Rate at which the input is read in 2 bytes and written in 1 before an fp8 product; inf
            where the input comes quantised [bytes/s].
    """

    processors: int
    flops_per_s: float
    k_ramp: float
    tile_penalty: float
    bytes_per_s: float
    fixed_s: float
    floor_s: float = 0.0
    tile_power: float = 1.0
    max_split: int = 1
    quantise_bytes_per_s: float = float("inf")

    def seconds(self, m: Value, n: Value, k: Value, element_bytes: float) -> Array:
        """max(fixed + max(arithmetic, traffic) + quantising, floor), 0 for a product without rows.

        Arithmetic: waves * 2 a b (k / split + ramp) / rate of one processor, for the best tile a x b and split; waves
        = ceil(split ceil(m/a) ceil(n/b) / processors); a split sum is written and read in fp32 through the cache, at
        twice the memory's rate. Maxima are smooth: (x^4 + y^4)^(1/4), at most 19 % above the sharp ones.
        """
        m, n, k = np.asarray(m, float), np.asarray(n, float), np.asarray(k, float)
        runs = m * n * k > 0
        moved = (element_bytes * (m * k + n * k) + max(element_bytes, 2) * m * n) / self.bytes_per_s
        if not self.processors:
            arithmetic = 2 * m * n * k / self.flops_per_s
            return np.asarray(np.where(runs, np.maximum(np.maximum(arithmetic, moved), self.fixed_s), 0.0))
        arithmetic = self._arithmetic_s(m, n, k)
        seconds = self.fixed_s + _smooth_max(arithmetic, moved) + 3 * m * k / self.quantise_bytes_per_s
        return np.asarray(np.where(runs, _smooth_max(seconds, self.floor_s), 0.0))

    def _arithmetic_s(self, m: Array, n: Array, k: Array) -> Array:
        each = self.flops_per_s / self.processors
        best = np.asarray(np.inf)
        for a, b in TILES:
            tiles = np.ceil(m / a) * np.ceil(n / b)
            slower = 1 + self.tile_penalty * (
                _operands(a, b) ** self.tile_power - _operands(128, 256) ** self.tile_power
            )
            for split in range(1, self.max_split + 1):
                waves = np.ceil(tiles * (split / self.processors))
                seconds = waves * (k * (1 / split) + self.k_ramp) * (2 * a * b / each * slower)
                if split > 1:
                    seconds = seconds + split * 8 * m * n / (2 * self.bytes_per_s)
                best = np.minimum(best, seconds)
        return best


def _operands(a: int, b: int) -> float:
    """Operands that an a x b tile fetches per FLOP, relative to a 128 x 128 one."""
    return 64 / a + 64 / b


def _smooth_max(x: Array, y: Array | float) -> Array:
    squares = (x * x) ** 2 + np.square(np.square(y))
    return np.asarray(np.sqrt(np.sqrt(squares)))


@dataclass(frozen=True)
class Grid:
    """Log corrections [M, N, K] on a grid of logarithms of m, n and k; `low` and `high` bound what was measured."""

    axes: tuple[Array, Array, Array]
    values: Array
    low: Array
    high: Array

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
        """Where a product lies in the box around the measurements, up to rounding."""
        inside = np.ones((), dtype=bool)
        for size, low, high in zip((m, n, k), self.low, self.high, strict=True):
            x = np.log(np.maximum(size, 1e-9))
            inside = inside & (x >= low - 1e-9) & (x <= high + 1e-9)
        return np.asarray(inside)


@dataclass(frozen=True, eq=False)  # compared by identity: `gemm_model` returns one object per device, type and library
class GemmModel:
    """Seconds of y[m, n] = x[m, k] w[k, n] on one device in one type.

    ``accumulate_bytes_per_s``: rate at which an fp32 gradient is read and written beside the product. ``group_rows``:
    rows that an expert's last tile is padded to in a grouped product.
    """

    base: Base
    element_bytes: float
    correction: Grid | None
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

    @functools.lru_cache(maxsize=2**16)  # noqa: B019 - models are as few as devices and live as long as the process
    def one(self, m: float, n: float, k: float, accumulate_fp32: bool) -> float:
        """`seconds` of a single product, remembered: many strategies share their shapes."""
        return float(self.seconds(m, n, k, accumulate_fp32))

    def extrapolated(self, m: Value, n: Value, k: Value) -> npt.NDArray[np.bool_]:
        """Where no table covers the product."""
        m, n, k = np.asarray(m, float), np.asarray(n, float), np.asarray(k, float)
        if self.correction is None:
            return np.ones(np.broadcast_shapes(m.shape, n.shape, k.shape), dtype=bool)
        return ~self.correction.covers(m, n, k)


GROUP_ROWS: Mapping[str, int] = {"sm_100": 256, "sm_103": 256}
"""Rows of an output tile in a grouped product by architecture, 128 elsewhere: Blackwell pairs two processors."""
WEAKEST_FIRST: tuple[Provenance, ...] = ("datasheet", "fitted", "measured")


def gemm_model(device: Device, precision: Precision, library: Library = "torch") -> GemmModel:
    """The model of a device's products.

    Args:
        device: Its name finds the tables; its rates make the base where there are none.
        precision: Type of the operands.
        library: Whose table, where the device has several; without one of its own the other.
    """
    rate, memory = device.matmul_flops_per_s[precision], device.memory_bytes_per_s
    provenance = min(rate.provenance, memory.provenance, key=WEAKEST_FIRST.index)
    key = (rate.value, memory.value, device.op_overhead_s.value)
    return _model(device.name, device.arch, precision, library, *key, provenance)


@functools.lru_cache(maxsize=256)
def _model(
    name: str, arch: str, precision: Precision, library: Library, flops_per_s: float, bytes_per_s: float,
    overhead_s: float, provenance: Provenance,
) -> GemmModel:  # fmt: skip
    fits: Mapping[str, Any] = read_json("measurements", "gemm_fit.json")
    element, group_rows = ELEMENT_BYTES[precision], GROUP_ROWS.get(arch, 128)
    exposed = fits["exposed_accumulation"]
    accumulate = bytes_per_s / exposed.get(name, exposed["elsewhere"])
    die = SAME_DIE.get(name, name)
    for source in (library, *LIBRARIES):
        fit = fits["tables"].get(f"{die}/{precision}/{source}")
        if fit is None:
            continue
        base, measured = Base(**fit["base"]), forward_rows(die, precision, source)
        correct = grid_correction if source == "torch" else scatter_correction
        correction = correct(base, element, measured)
        if die != name:
            memory = device_preset(name).memory_bytes_per_s.value / device_preset(die).memory_bytes_per_s.value
            base = replace(base, bytes_per_s=base.bytes_per_s * memory)
        return GemmModel(base, element, correction, "measured" if die == name else "fitted", accumulate, group_rows)
    generic, processors = fits["generic"].get(SAME_UNITS.get(arch, arch)), PROCESSORS.get(name, 0)
    if generic is None or not processors:
        base = Base(0, flops_per_s, 0.0, 0.0, bytes_per_s, overhead_s)
    else:
        # The stated rate is the best product's; full waves of usual ones sustain a share of it.
        shape = dict(generic)
        base = Base(processors, flops_per_s * shape.pop("share_of_best"), bytes_per_s=bytes_per_s, **shape)
    if precision == "nvfp4":
        base = replace(base, quantise_bytes_per_s=bytes_per_s * 3 / NVFP4_QUANTISE_BYTES)
    return GemmModel(base, element, None, provenance, accumulate, group_rows)


LIBRARIES: tuple[Library, ...] = ("torch", "transformer_engine")


def has_table(device: Device) -> bool:
    """Whether products of this GPU, or of another part of its die, were measured."""
    known = {key.split("/")[0] for key in read_json("measurements", "gemm_fit.json")["tables"]}
    return SAME_DIE.get(device.name, device.name) in known


def tables(name: str, precision: str) -> list[Mapping[str, Any]]:
    """The tables of a device, by its exact name."""
    every: list[Mapping[str, Any]] = read_json("measurements", "gemm.json")["tables"]
    return [table for table in every if (table["device"], table["dtype"]) == (name, precision)]


def library_of(table: Mapping[str, Any]) -> Library:
    """Whose products a table times: aiconfigurator's come from torch, SimuMax's from Transformer Engine."""
    return "torch" if "aiconfigurator" in table["source"] else "transformer_engine"


def forward_rows(name: str, precision: str, library: Library) -> Array:
    """[rows, 4] of the table of a device and a library, without products that add to their output."""
    (table,) = [table for table in tables(name, precision) if library_of(table) == library]
    return rows(table)[forward(table)]


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
    logs_of = (np.log(axes[0]), np.log(axes[1]), np.log(axes[2]))
    return Grid(logs_of, values, np.array([axis[0] for axis in logs_of]), np.array([axis[-1] for axis in logs_of]))


def scatter_correction(base: Base, element_bytes: float, measured: Array) -> Grid:
    """Corrections of a table of scattered products: the mean of those near, put on a grid once for speed.

    exp(-d^2 / 2 w^2) weighs a measurement at distance d in log size; the base itself counts as one more, so a product
    far from all is left to it.
    """
    points = np.log(measured[:, :3])
    logs = np.log(measured[:, 3] / base.seconds(measured[:, 0], measured[:, 1], measured[:, 2], element_bytes))
    low, high = points.min(axis=0), points.max(axis=0)
    # Half a width apart, two widths beyond the measurements.
    axes = tuple(
        np.arange(low[i] - 2 * SCATTER_WIDTH, high[i] + 2.5 * SCATTER_WIDTH, SCATTER_WIDTH / 2) for i in range(3)
    )
    near = [np.exp(-((axes[i][:, None] - points[:, i]) ** 2) / (2 * SCATTER_WIDTH**2)) for i in range(3)]
    total = np.einsum("ap,bp,cp->abc", *near, optimize=True)
    values = np.einsum("ap,bp,cp->abc", near[0] * logs, near[1], near[2], optimize=True) / (total + SCATTER_PRIOR)
    return Grid((axes[0], axes[1], axes[2]), values, low, high)
