"""Seconds of a memory-bound kernel that moves a number of bytes on one device.

time = max(launch floor, ramp + bytes / (sustained rate * efficiency)), for each launch.

`Device.memory_bytes_per_s` is already what large fused norms sustain (about 0.75 of the datasheet,
benchmarks/derive_hardware.py), so efficiencies are relative to that and near 1. "fused": one kernel for the operation
(cuDNN, Liger, torch.compile), bytes by `kernel_sets.FUSED`; "eager": one for each tensor operation (the formulas of
transformers), bytes by `kernel_sets.EAGER_BF16` or EAGER_FP32. benchmarks/fit_kernels.py fits both and the ramps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainplan.costmodel.hardware import Device, Provenance
from trainplan.profiles import read_json

Array = npt.NDArray[np.float64]
Kind = Literal["eager", "fused"]
KNOWN_ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of the sustained rate that large tensors get, and the fixed time of filling and draining [s]."""

    share: float
    ramp_s: float
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Seconds of kernels by the bytes they move."""

    bytes_per_s: float
    floor_s: float
    fused: Efficiency
    eager: Efficiency

    def seconds(self, moved: npt.ArrayLike, kind: Kind = "fused") -> Array:
        """Seconds of one kernel that reads and writes ``moved`` bytes in all; 0 if there is nothing to move."""
        moved = np.asarray(moved, float)
        of = self.eager if kind == "eager" else self.fused
        busy = of.ramp_s + moved / (self.bytes_per_s * of.share)
        return np.asarray(np.where(moved > 0, np.maximum(busy, self.floor_s), 0.0))


@functools.cache
def _fits() -> Any:
    return read_json("measurements", "kernel_fit.json")["memory"]


def _efficiency(arch: str, kind: Kind) -> Efficiency:
    """Of the architecture's tables; without one, the median of the others', which the file holds as "elsewhere"."""
    own = _fits().get(arch, {}).get(kind)
    fit = own or _fits()["elsewhere"][kind]
    return Efficiency(fit["share"], fit["ramp_s"], "measured" if own else "fitted")


def memory_model(device: Device) -> MemoryModel:
    """The model of a device; one of unknown make moves bytes at exactly its stated rate."""
    rate, floor = device.memory_bytes_per_s.value, device.op_overhead_s.value
    if device.arch not in KNOWN_ARCHITECTURES:
        plain = Efficiency(1.0, 0.0, device.memory_bytes_per_s.provenance)
        return MemoryModel(rate, floor, plain, plain)
    return MemoryModel(rate, floor, _efficiency(device.arch, "fused"), _efficiency(device.arch, "eager"))
