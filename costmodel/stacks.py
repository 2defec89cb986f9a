"""The software a strategy runs on: how many bytes its kernels move and save, and in which types it keeps its state.

A `Stack` belongs to a framework (and whether it compiles), never to a model or a measurement. Counts are per element
of the tensor a kernel works on, for an element of ``e`` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Kernel:
    """Traffic of a memory-bound operation per element: ``a * e + b`` bytes, e = bytes of the compute type.

    ``saved`` is what stays alive for the backward pass, the output not counted (whoever reads it counts it).
    """

    forward: tuple[float, float]
    backward: tuple[float, float]
    saved: tuple[float, float]
    forward_launches: int
    backward_launches: int


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The memory-bound operations of a decoder layer and of the loss."""

    norm: Kernel
    rope: Kernel
    glu: Kernel
    residual: Kernel
    loss: Kernel


EAGER_BF16 = KernelSet(
    # x.float(), pow, mean, mul by rsqrt, cast, mul by weight: the formula of transformers' RMSNorm, one kernel each.
    norm=Kernel((5, 26), (7, 48), (1, 4), 7, 14),
    rope=Kernel((10, 0), (12, 0), (0, 0), 5, 6),
    glu=Kernel((5, 0), (9, 0), (3, 0), 2, 3),
    residual=Kernel((3, 0), (3, 0), (0, 0), 1, 1),
    loss=Kernel((1, 12), (1, 16), (0, 4), 3, 3),
)
EAGER_FP32 = KernelSet(
    norm=Kernel((7, 0), (14, 0), (2, 0), 5, 11),
    rope=EAGER_BF16.rope,
    glu=EAGER_BF16.glu,
    residual=EAGER_BF16.residual,
    loss=Kernel((3, 0), (4, 0), (1, 0), 2, 2),
)
FUSED = KernelSet(
    norm=Kernel((2, 0), (3, 0), (1, 0), 1, 2),
    rope=Kernel((2, 0), (2, 0), (0, 0), 1, 1),
    glu=Kernel((3, 0), (5, 0), (2, 0), 1, 1),
    residual=Kernel((3, 0), (3, 0), (0, 0), 1, 1),
    loss=Kernel((1, 0), (2, 0), (0, 4), 1, 1),
)


@dataclass(frozen=True, slots=True)
class Stack:
    """How one framework keeps its state and orders its work.

    Attributes:
        weight_bytes: Bytes per parameter of the copy the optimizer owns that counts as parameters.
        compute_copy: Keeps an unsharded copy of all parameters in the compute type when parameters are not sharded
            but the optimizer is (or when nothing is), beside an fp32 original.
        gradient_bytes: Bytes per accumulated gradient.
        optimizer_bytes: Bytes per parameter of optimizer state, fp32 master included where weights are bf16.
        unit_overlap: FSDP gathers and reductions are issued per layer and run beside computation.
        causal_masked_packing: Attention skips other documents of a packed row; else it computes the whole square.
        rendezvous_p2p: Pipeline neighbours meet to exchange (PyTorch 1F1B); else sends run on their own.
        interleaved_multiple_of_pp: Megatron's interleaved order.
        fused_optimizer: One pass over the state per step.
        comm_buffer_bytes: Communication library buffers per process group in use.
    """

    name: str
    kernels_bf16: KernelSet
    kernels_fp32: KernelSet
    weight_bytes: int
    compute_copy: bool
    gradient_bytes: int
    optimizer_bytes: int
    unit_overlap: bool = True
    causal_masked_packing: bool = True
    rendezvous_p2p: bool = False
    fused_optimizer: bool = True
    comm_buffer_bytes: int = 350 * 2**20
    """NCCL buffers: 342 to 392 MB by group size, ai-dynamo/aiconfigurator system files."""

    def kernels(self, element_bytes: int) -> KernelSet:
        return self.kernels_bf16 if element_bytes < 4 else self.kernels_fp32


NATIVE = Stack(
    "native",
    EAGER_BF16,
    EAGER_FP32,
    weight_bytes=4,
    compute_copy=True,
    gradient_bytes=4,
    optimizer_bytes=8,
    causal_masked_packing=False,
    rendezvous_p2p=True,
)
STACKS: dict[str, Stack] = {
    "native": NATIVE,
    "torchtitan": Stack(
        "torchtitan",
        EAGER_BF16,
        EAGER_FP32,
        weight_bytes=4,
        compute_copy=True,
        gradient_bytes=4,
        optimizer_bytes=8,
        rendezvous_p2p=True,
    ),
    "accelerate": Stack(
        "accelerate", EAGER_BF16, EAGER_FP32, weight_bytes=4, compute_copy=True, gradient_bytes=4, optimizer_bytes=8
    ),
    "deepspeed": Stack(
        "deepspeed", EAGER_BF16, EAGER_FP32, weight_bytes=2, compute_copy=False, gradient_bytes=4, optimizer_bytes=12
    ),
    "megatron": Stack(
        "megatron", FUSED, FUSED, weight_bytes=2, compute_copy=False, gradient_bytes=4, optimizer_bytes=12
    ),
}
"""Megatron: bf16 weights, fp32 main gradients, fp32 master and moments. DeepSpeed bf16: the same with its flat fp32
groups. FSDP2: fp32 parameters are the master; computation runs on gathered bf16 copies."""


def traffic(counts: tuple[float, float], element_bytes: np.ndarray | float) -> np.ndarray:
    """Bytes per element: a * e + b."""
    return np.asarray(counts[0] * np.asarray(element_bytes) + counts[1])
