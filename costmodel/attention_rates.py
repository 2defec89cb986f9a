"""Seconds of fused attention on one device, by the generation of its kernel.

time = fixed + FLOP / (peak * share * fill) * (1 + ramp / kv_len), at least the bytes moved. Fill is the last wave of
query tiles over the processors; the ramp is what starting a tile's loop over the keys costs, and, causally, the tiles
on the diagonal that are half empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainplan.costmodel.gemm import PROCESSORS
from trainplan.costmodel.hardware import Device, Provenance

Array = npt.NDArray[np.float64]
Value = npt.ArrayLike
Kernel = Literal["flash1", "flash2", "flash3", "cudnn"]
QUERY_TILE = 128
BACKWARD_FLOPS = 2.5
"""Five matrix products where the forward has two (Dao et al. 2022, arXiv:2205.14135)."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Share of the dense peak that a long pass reaches, and keys that its ramp is worth.

    ``narrow`` and ``wide``: what heads of at most 64, and of more than 128, reach of that.
    """

    share: float
    ramp: float
    narrow: float = 0.75
    wide: float = 1.0


@dataclass(frozen=True, slots=True)
class Generation:
    """Forward and backward of a kernel on an architecture, and where the numbers are from."""

    forward: Pass
    backward: Pass
    provenance: Provenance
    source: str


GENERATIONS: dict[tuple[str, str], Generation] = {
    # (kernel, architecture or device); a device's own numbers come before its architecture's
    ("cudnn", "sm_90"): Generation(
        Pass(0.715, 900), Pass(0.615, 1300), "measured",
        "NVIDIA/cudnn-frontend SDPA tables, H200, causal bf16 head_dim 128, least squares",
    ),
    ("cudnn", "sm_100"): Generation(
        Pass(0.70, 1150, 0.66), Pass(0.55, 1000, 0.66, 0.9), "measured",
        "NVIDIA/cudnn-frontend SDPA tables, GB200, causal bf16 head_dim 128, least squares",
    ),
    ("cudnn", "B200-SXM-180GB"): Generation(
        Pass(0.60, 3000, 0.66), Pass(0.47, 900, 0.66, 0.78), "measured",
        "MooreThreads/SimuMax SDPA efficiencies through Transformer Engine, B200, causal bf16, 4K to 128K tokens; "
        "aiconfigurator's inference kernel on the same part agrees",
    ),
    ("flash3", "sm_90"): Generation(
        Pass(0.72, 900), Pass(0.58, 1300), "fitted",
        "FlashAttention-3 paper, arXiv:2407.08608: up to 740 TFLOP/s forward, backward 1.5 to 1.75 times FA2's",
    ),
    ("flash2", "sm_80"): Generation(
        Pass(0.66, 600, 0.93, 0.9), Pass(0.57, 800, 0.93, 0.85), "fitted",
        "FlashAttention-2 paper, arXiv:2307.08691: 73 % forward, 63 % backward of the A100's peak, causal less",
    ),
    ("flash2", "sm_90"): Generation(
        Pass(0.37, 600, 0.93), Pass(0.32, 800, 0.93), "fitted",
        "FlashAttention-3 paper, arXiv:2407.08608: FlashAttention-2 reaches 35 % of the H100's peak",
    ),
    ("flash2", "sm_100"): Generation(
        Pass(0.17, 600, 0.93), Pass(0.14, 800, 0.93), "fitted",
        "Hopper's FLOP/s of the same Ampere instructions, by processors and clocks (148 to 132)",
    ),
    ("flash1", "sm_80"): Generation(
        Pass(0.42, 400, 0.93), Pass(0.34, 400, 0.93), "fitted",
        "FlashAttention-2 paper, arXiv:2307.08691: FlashAttention 1 reaches 30 to 50 % forward, 25 to 35 % backward",
    ),
    ("flash1", "sm_90"): Generation(
        Pass(0.25, 400, 0.93), Pass(0.20, 400, 0.93), "fitted",
        "the same kernels as on Ampere, whose instructions reach about 60 % of the tensor rate on Hopper",
    ),
    ("flash1", "sm_100"): Generation(
        Pass(0.12, 400, 0.93), Pass(0.10, 400, 0.93), "fitted",
        "Hopper's FLOP/s of the same Ampere instructions, by processors and clocks (148 to 132)",
    ),
}  # fmt: skip
FIXED_S = 6e-6


@dataclass(frozen=True, slots=True)
class AttentionModel:
    """Seconds of attention passes; ``generation`` is None on a device that only states a sustained rate."""

    generation: Generation | None
    peak_flops_per_s: float
    sustained_flops_per_s: float
    bytes_per_s: float
    processors: int
    provenance: Provenance

    def forward_s(
        self, batch: Value, heads: Value, kv_heads: Value, q_len: Value, kv_len: Value, qk_width: int, v_width: int,
        causal: bool, window: int | None = None,
    ) -> Array:  # fmt: skip
        """Seconds of the forward pass.

        Args:
            batch: Sequences.
            heads: Query heads.
            kv_heads: Key and value heads.
            q_len: Queries of a sequence on this rank.
            kv_len: Keys that the sequence has.
            qk_width: Width of a query and key head.
            v_width: Width of a value head.
            causal: A token reads only what is before it.
            window: Tokens it reads at most.
        """
        flops = attention_flops(batch, heads, q_len, kv_len, qk_width, v_width, causal, window)
        moved = self._moved(batch, heads, kv_heads, q_len, kv_len, qk_width, v_width)
        of = self.generation.forward if self.generation else None
        return self._seconds(of, flops, moved, batch, heads, q_len, kv_len, qk_width)

    def backward_s(
        self, batch: Value, heads: Value, kv_heads: Value, q_len: Value, kv_len: Value, qk_width: int, v_width: int,
        causal: bool, window: int | None = None,
    ) -> Array:  # fmt: skip
        """Seconds of the backward pass; arguments as for `forward_s`."""
        flops = BACKWARD_FLOPS * attention_flops(batch, heads, q_len, kv_len, qk_width, v_width, causal, window)
        moved = 2 * self._moved(batch, heads, kv_heads, q_len, kv_len, qk_width, v_width)
        of = self.generation.backward if self.generation else None
        return self._seconds(of, flops, moved, batch, heads, q_len, kv_len, qk_width)

    def _moved(
        self, batch: Value, heads: Value, kv_heads: Value, q_len: Value, kv_len: Value, qk: int, v: int
    ) -> Array:
        queries, keys = np.asarray(q_len, float) * heads, np.asarray(kv_len, float) * kv_heads
        return np.asarray(2 * np.asarray(batch, float) * (queries + keys) * (qk + v))

    def _seconds(
        self, of: Pass | None, flops: Array, moved: Array, batch: Value, heads: Value, q_len: Value, kv_len: Value,
        qk_width: int,
    ) -> Array:  # fmt: skip
        if of is None:
            return np.asarray(np.maximum(flops / self.sustained_flops_per_s, moved / self.bytes_per_s))
        share = of.share * (of.narrow if qk_width <= 64 else of.wide if qk_width > 128 else 1.0)
        rate = self.peak_flops_per_s * share
        tiles = np.asarray(batch, float) * heads * np.ceil(np.asarray(q_len, float) / QUERY_TILE)
        busy = flops / rate * (1 + of.ramp / np.maximum(kv_len, 1))
        if self.processors:
            waves = tiles / self.processors
            busy = busy * np.where(waves > 0, np.ceil(waves) / np.maximum(waves, 1e-9), 1.0)
        seconds = FIXED_S + np.maximum(busy, moved / self.bytes_per_s)
        return np.asarray(np.where(flops > 0, seconds, 0.0))


def attention_flops(
    batch: Value, heads: Value, q_len: Value, kv_len: Value, qk_width: int, v_width: int, causal: bool,
    window: int | None,
) -> Array:  # fmt: skip
    """FLOP of q k^T and p v over the pairs that are read: half of the square, or a band of it."""
    q, kv = np.asarray(q_len, float), np.asarray(kv_len, float)
    read = kv
    if window:
        w = np.minimum(window, kv)
        read = w - w**2 / (2 * np.maximum(kv, 1))
    elif causal:
        read = kv / 2
    return np.asarray(2 * np.asarray(batch, float) * heads * q * read * (qk_width + v_width))


def attention_model(device: Device, kernel: Kernel) -> AttentionModel:
    """The model of a kernel on a device; without numbers for its architecture, the device's sustained rate."""
    arch = {"sm_103": "sm_100"}.get(device.arch, device.arch)
    name = "flash2" if (kernel, arch) not in GENERATIONS and kernel != "flash1" else kernel
    generation = GENERATIONS.get((name, device.name)) or GENERATIONS.get((name, arch))
    generation = generation if device.name in PROCESSORS else None
    stated = device.attention_flops_per_s.get("bf16") or next(iter(device.attention_flops_per_s.values()))
    peak = device.peak_flops_per_s.get("bf16") or next(iter(device.peak_flops_per_s.values()))
    return AttentionModel(
        generation=generation,
        peak_flops_per_s=peak.value,
        sustained_flops_per_s=stated.value,
        bytes_per_s=device.memory_bytes_per_s.value,
        processors=PROCESSORS.get(device.name, 0),
        provenance=generation.provenance if generation else stated.provenance,
    )
