"""Seconds of a memory-bound kernel that moves a number of bytes on one device.

The device's memory rate is the sustained one of large fused norms (profiles/hardware/derived.json), so efficiencies
here are relative to it and near 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainplan.costmodel.hardware import Device

Array = npt.NDArray[np.float64]
EFFICIENCY = {"fused": 0.90, "eager": 0.66}
"""Counted bytes per second over the device's sustained rate, medians of large tensors in Liger-Kernel's benchmark table
(A100, H100; benchmarks/kernel_accuracy.py prints them). Eager chains are counted operation by operation; their strided
and mixed-type kernels reach less than a norm does."""
KNOWN_ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
RAMP_BYTES = 4e6
"""Bytes whose transfer at the full rate takes as long as filling the memory pipeline of a large GPU."""


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """A launch floor, and bytes over an efficiency's share of the sustained rate."""

    bytes_per_s: float
    floor_s: float
    ramp_bytes: float
    efficiency: tuple[tuple[str, float], ...]

    def seconds(self, moved: npt.ArrayLike, kind: Literal["eager", "fused"] = "fused") -> Array:
        """Seconds of one kernel that reads and writes ``moved`` bytes in all."""
        moved = np.asarray(moved, float)
        share = dict(self.efficiency)[kind]
        busy = (moved + np.where(moved > 0, self.ramp_bytes, 0.0)) / (self.bytes_per_s * share)
        return np.asarray(np.maximum(busy, np.where(moved > 0, self.floor_s, 0.0)))


def memory_model(device: Device) -> MemoryModel:
    """The model of a device; one of unknown make moves bytes at exactly its stated rate."""
    rate, floor = device.memory_bytes_per_s.value, device.op_overhead_s.value
    if device.arch not in KNOWN_ARCHITECTURES:
        return MemoryModel(rate, floor, 0.0, (("eager", 1.0), ("fused", 1.0)))
    return MemoryModel(rate, floor, RAMP_BYTES, tuple(EFFICIENCY.items()))
