"""Seconds of fused attention on one device, by kernel.

time = fixed + max(arithmetic, traffic); arithmetic = FLOP / (peak * share) * ramp * fill:

- share: of the dense bf16 peak, by a long pass with heads of 128 on a full device;
- ramp = 1 + (start + diagonal) / keys read: what a query tile pays besides its keys, in keys. Starting takes time, so
  its keys are worth less the wider the heads are; the tiles on the diagonal are half empty, whatever their width;
- fill = max(waves + tail, longest) / waves: the last tiles leave processors idle, and no pass is shorter than its
  longest tile, which reads twice the mean where attention is causal.

The parameters are in profiles/measurements/kernel_fit.json (benchmarks/fit_kernels.py); benchmarks/kernel_accuracy.py
prints how far they are from the tables. A kernel that no table has takes its level from a publication, see PUBLISHED.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainplan.costmodel.gemm import PROCESSORS
from trainplan.costmodel.hardware import Device, Provenance
from trainplan.profiles import read_json

Array = npt.NDArray[np.float64]
Value = npt.ArrayLike
Kernel = Literal["efficient", "flash1", "flash2", "flash3", "cudnn"]
TILE = 128
"""Queries (forward) or keys (backward) of a thread block."""
HEAD_WIDTH = 128
"""Of queries and keys, and of values, that shares and starts belong to."""
BACKWARD_FLOPS = 2.5
"""Five matrix products where the forward has two (Dao et al. 2022, arXiv:2205.14135)."""
FIXED_S = 5e-6
"""Launch, prologue and epilogue, where a table does not say more. Most begin at 50 us and cannot tell 2 from 8."""
SMS: Mapping[str, int] = {
    **PROCESSORS,
    "L40S": 142,
    "L4": 58,
    "RTX-4090": 128,
    "RTX-5090": 170,
    "RTX-PRO-6000-Blackwell-Server": 188,
}
"""Streaming multiprocessors of the devices that attention is timed on by shape (NVIDIA's architecture papers)."""
TABLE_OF_ARCH: Mapping[str, str] = {
    "sm_80": "A100-PCIe-80GB",  # one die: A100 of any form and memory, A800 (slower NVLink); the PCIe card has 300 W
    "sm_90": "H200-SXM-141GB",  # one die: H100 of any form and memory, H200, GH200; H20 with fewer processors
    "sm_100": "GB200-186GB",
    "sm_103": "GB300-288GB",
}
"""The device whose table stands for an architecture. One with a table of its own uses that."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One direction of a kernel; see the module for the parameters.

    Attributes:
        share: Of the dense peak that a long pass on a full device reaches.
        start: Keys of 128-wide heads that starting a tile is worth.
        diagonal: Keys that the half-empty tiles on the diagonal are worth.
        tail: Waves that the end of the pass is worth.
        narrow: Rate of heads of at most 64, relative to 128.
        wide: Rate of heads of more than 128, relative to 128.
        fixed_s: Time of a call besides [s].
    """

    share: float
    start: float
    diagonal: float
    tail: float
    narrow: float
    wide: float
    fixed_s: float = FIXED_S

    def seconds(
        self, peak_flops_per_s: float, processors: int, flops: Array, keys: Array, tiles: Array, qk: Value, v: Value,
        causal: Value,
    ) -> Array:  # fmt: skip
        """Seconds of arithmetic. ``keys``: read by a query, on average; ``tiles``: thread blocks, may be fractional."""
        qk, v, causal = np.asarray(qk, float), np.asarray(v, float), np.asarray(causal, bool)
        width = np.where(qk <= 64, self.narrow, np.where(qk > HEAD_WIDTH, self.wide, 1.0))
        beside = self.start * (2 * HEAD_WIDTH / (qk + v)) + self.diagonal * causal
        waves = np.maximum(tiles / processors, 1e-9)
        fill = np.maximum(waves + self.tail, 1.0 + causal) / waves
        return np.asarray(flops / (peak_flops_per_s * self.share * width) * (1 + beside / np.maximum(keys, 1)) * fill)


@dataclass(frozen=True, slots=True)
class Published:
    """Shares of a kernel that no table has; the shape is that of another kernel's table."""

    forward: float
    backward: float
    shape: str
    narrow: float
    source: str


PUBLISHED: Mapping[tuple[str, str], Published] = {
    ("flash3", "sm_90"): Published(
        0.72, 0.58, "cudnn/H200-SXM-141GB", 0.89,  # heads of 64: H100 prefill table
        "FlashAttention-3 paper, arXiv:2407.08608: up to 75 % of the H100's peak forward; backward 1.5 to 1.75 times "
        "FlashAttention-2's",
    ),
    ("flash2", "sm_90"): Published(
        0.37, 0.32, "flash2/A100-PCIe-80GB", 0.93,
        "FlashAttention-3 paper, arXiv:2407.08608: FlashAttention-2 reaches 35 % of the H100's peak forward",
    ),
    ("flash2", "sm_100"): Published(
        0.17, 0.14, "flash2/A100-PCIe-80GB", 0.93,
        "no table: Hopper's FLOP/s of the same Ampere instructions, by processors and clocks (148 to 132)",
    ),
    ("flash1", "sm_80"): Published(
        0.40, 0.32, "flash2/A100-PCIe-80GB", 0.93,
        "FlashAttention-2 paper, arXiv:2307.08691: FlashAttention 1 reaches 25 to 40 % of the A100's peak",
    ),
    ("flash1", "sm_90"): Published(
        0.21, 0.17, "flash2/A100-PCIe-80GB", 0.93,
        "no table: a third of the tensor rate as on Ampere, whose instructions reach about 60 % of it on Hopper",
    ),
    ("flash1", "sm_100"): Published(
        0.11, 0.09, "flash2/A100-PCIe-80GB", 0.93,
        "no table: Hopper's FLOP/s of the same Ampere instructions, by processors and clocks (148 to 132)",
    ),
    # PyTorch's memory-efficient attention: CUTLASS kernels for Ampere, of FlashAttention 1's generation.
    ("efficient", "sm_80"): Published(0.40, 0.32, "flash2/A100-PCIe-80GB", 0.93, "as FlashAttention 1"),
    ("efficient", "sm_90"): Published(0.21, 0.17, "flash2/A100-PCIe-80GB", 0.93, "as FlashAttention 1"),
    ("efficient", "sm_100"): Published(0.11, 0.09, "flash2/A100-PCIe-80GB", 0.93, "as FlashAttention 1"),
}  # fmt: skip
STATED_AT_TOKENS = 8192
"""Where `Device.attention_flops_per_s` was read (benchmarks/derive_hardware.py)."""


@dataclass(frozen=True, slots=True)
class AttentionModel:
    """Seconds of attention passes; without passes (unknown make) arithmetic runs at the sustained rate.

    Attributes:
        forward: Parameters of the forward pass, or None.
        backward: Parameters of the backward pass, or None.
        flops_per_s: What the shares are of; the sustained rate where there are none.
        bytes_per_s: Sustained rate of memory.
        processors: Streaming multiprocessors.
        provenance: "measured" on this very device, or "fitted".
        source: Which table or publication.
    """

    forward: Pass | None
    backward: Pass | None
    flops_per_s: float
    bytes_per_s: float
    processors: int
    provenance: Provenance
    source: str

    def forward_s(
        self, batch: Value, heads: Value, kv_heads: Value, q_len: Value, kv_len: Value, head_dim_qk: Value,
        head_dim_v: Value, causal: Value, window: int | None = None,
    ) -> Array:  # fmt: skip
        """Seconds of the forward pass; everything broadcasts, and batch, heads and lengths may be fractions.

        Args:
            batch: Sequences.
            heads: Query heads.
            kv_heads: Key and value heads.
            q_len: Queries of a sequence on this rank.
            kv_len: Keys that the sequence has.
            head_dim_qk: Width of a query and key head.
            head_dim_v: Width of a value head.
            causal: A token reads only what is before it.
            window: Tokens it reads at most.
        """
        flops = attention_flops(batch, heads, q_len, kv_len, head_dim_qk, head_dim_v, causal, window)
        moved = _moved(batch, heads, kv_heads, q_len, kv_len, head_dim_qk, head_dim_v)
        tiles = _product(batch, heads, np.ceil(np.asarray(q_len, float) / TILE))
        keys = keys_read(kv_len, causal, window)
        return self._seconds(self.forward, flops, moved, keys, tiles, head_dim_qk, head_dim_v, causal)

    def backward_s(
        self, batch: Value, heads: Value, kv_heads: Value, q_len: Value, kv_len: Value, head_dim_qk: Value,
        head_dim_v: Value, causal: Value, window: int | None = None,
    ) -> Array:  # fmt: skip
        """Seconds of the backward pass; arguments as for `forward_s`."""
        forward = attention_flops(batch, heads, q_len, kv_len, head_dim_qk, head_dim_v, causal, window)
        flops = np.asarray(BACKWARD_FLOPS * forward)
        # q, k, v, o and do are read, dq, dk, dv written: twice the forward's four.
        moved = 2 * _moved(batch, heads, kv_heads, q_len, kv_len, head_dim_qk, head_dim_v)
        tiles = _product(batch, heads, np.ceil(np.asarray(kv_len, float) / TILE))
        keys = keys_read(kv_len, causal, window)
        return self._seconds(self.backward, flops, moved, keys, tiles, head_dim_qk, head_dim_v, causal)

    def _seconds(
        self, of: Pass | None, flops: Array, moved: Array, keys: Array, tiles: Array, qk: Value, v: Value, causal: Value
    ) -> Array:
        traffic = moved / self.bytes_per_s
        if of is None:
            return np.asarray(np.maximum(flops / self.flops_per_s, traffic))
        busy = of.seconds(self.flops_per_s, self.processors, flops, keys, tiles, qk, v, causal)
        return np.asarray(np.where(flops > 0, of.fixed_s + np.maximum(busy, traffic), 0.0))


def keys_read(kv_len: Value, causal: Value, window: int | None) -> Array:
    """Keys that a query reads on average: all, half, or a band of w - w^2 / (2 kv)."""
    kv = np.asarray(kv_len, float)
    if window:
        w = np.minimum(window, kv)
        return np.asarray(w - w**2 / (2 * np.maximum(kv, 1)))
    return np.asarray(np.where(np.asarray(causal, bool), kv / 2, kv))


def attention_flops(
    batch: Value, heads: Value, q_len: Value, kv_len: Value, head_dim_qk: Value, head_dim_v: Value, causal: Value,
    window: int | None,
) -> Array:  # fmt: skip
    """FLOP of q k^T and p v over the pairs that are read: 2 b h q keys (d_qk + d_v)."""
    pairs = _product(batch, heads, q_len, keys_read(kv_len, causal, window))
    return np.asarray(2 * pairs * (np.asarray(head_dim_qk, float) + np.asarray(head_dim_v, float)))


def _moved(
    batch: Value, heads: Value, kv_heads: Value, q_len: Value, kv_len: Value, head_dim_qk: Value, head_dim_v: Value
) -> Array:
    """Bytes of q, k, v and the output, 2 each."""
    widths = np.asarray(head_dim_qk, float) + np.asarray(head_dim_v, float)
    return np.asarray(2 * (_product(batch, heads, q_len) + _product(batch, kv_heads, kv_len)) * widths)


def _product(*factors: Value) -> Array:
    result = np.ones(())
    for factor in factors:
        result = result * np.asarray(factor, float)
    return np.asarray(result)


@functools.cache
def _fits() -> Mapping[str, Any]:
    found: Mapping[str, Any] = read_json("measurements", "kernel_fit.json")["attention"]
    return found


def _passes(key: str) -> tuple[Pass, Pass]:
    fit = _fits()[key]
    forward, backward = (Pass(**fit[d]["parameters"], fixed_s=fit[d]["fixed_s"]) for d in ("forward", "backward"))
    return forward, backward


def attention_model(device: Device, kernel: Kernel) -> AttentionModel:
    """The model of a kernel on a device.

    In this order: the kernel's table of the device, its table of the architecture, a published level, the same for
    FlashAttention-2 (which runs wherever newer kernels do not), the device's sustained rate.
    """
    stated = device.attention_flops_per_s.get("bf16") or next(iter(device.attention_flops_per_s.values()))
    peak = device.peak_flops_per_s.get("bf16") or next(iter(device.peak_flops_per_s.values()))
    return _model(
        device.name, device.arch, kernel, peak.value, stated.value, device.memory_bytes_per_s.value, stated.provenance
    )


@functools.cache
def _model(
    name: str, arch: str, kernel: Kernel, peak: float, stated: float, bytes_per_s: float, provenance: Provenance
) -> AttentionModel:
    processors = SMS.get(name, 0)
    rate = "the device's sustained rate of attention"
    if not processors:
        return AttentionModel(None, None, stated, bytes_per_s, 0, provenance, rate)
    choices: tuple[Kernel, ...] = (kernel,) if kernel in ("flash1", "flash2") else (kernel, "flash2")
    for choice in choices:
        for table in (name, TABLE_OF_ARCH.get(arch, "")):
            key = f"{choice}/{table}"
            if key in _fits():
                forward, backward = _passes(key)
                own: Provenance = "measured" if table == name else "fitted"
                return AttentionModel(forward, backward, peak, bytes_per_s, processors, own, _fits()[key]["source"])
        published = PUBLISHED.get((choice, {"sm_103": "sm_100"}.get(arch, arch)))
        if published:
            shape = [replace(p, narrow=published.narrow) for p in _passes(published.shape)]
            return AttentionModel(
                replace(shape[0], share=published.forward), replace(shape[1], share=published.backward),
                peak, bytes_per_s, processors, "fitted", published.source,
            )  # fmt: skip
    # The sustained rate covers both directions and was read at 8K tokens, causally: the shares undo its ramp.
    shape = [
        replace(p, share=1 + (p.start + p.diagonal) / (STATED_AT_TOKENS / 2))
        for p in _passes(f"cudnn/{TABLE_OF_ARCH['sm_90']}")
    ]
    return AttentionModel(shape[0], shape[1], stated, bytes_per_s, processors, provenance, rate)
