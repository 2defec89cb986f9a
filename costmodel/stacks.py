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
    """The memory-bound operations of a decoder layer and of the loss.

    ``logit_peak_bytes``: bytes per logit alive at the worst moment of the loss. Eager: the saved log-softmax, the
    gradient of the negative log-likelihood and that of the log-softmax, fp32 each.
    """

    norm: Kernel
    rope: Kernel
    glu: Kernel
    residual: Kernel
    loss: Kernel
    logit_peak_bytes: int


EAGER_BF16 = KernelSet(
    # x.float(), pow, mean, mul by rsqrt, cast, mul by weight: the formula of transformers' RMSNorm, one kernel each.
    norm=Kernel((5, 26), (7, 48), (1, 4), 7, 14),
    rope=Kernel((10, 0), (12, 0), (0, 0), 5, 6),
    glu=Kernel((5, 0), (9, 0), (3, 0), 2, 3),
    residual=Kernel((3, 0), (3, 0), (0, 0), 1, 1),
    loss=Kernel((1, 12), (1, 16), (0, 4), 3, 3),
    logit_peak_bytes=12,
)
EAGER_FP32 = KernelSet(
    norm=Kernel((7, 0), (14, 0), (2, 0), 5, 11),
    rope=EAGER_BF16.rope,
    glu=EAGER_BF16.glu,
    residual=EAGER_BF16.residual,
    loss=Kernel((3, 0), (4, 0), (1, 0), 2, 2),
    logit_peak_bytes=12,
)
FUSED = KernelSet(
    norm=Kernel((2, 0), (3, 0), (1, 0), 1, 2),
    rope=Kernel((2, 0), (2, 0), (0, 0), 1, 1),
    glu=Kernel((3, 0), (5, 0), (2, 0), 1, 1),
    residual=Kernel((3, 0), (3, 0), (0, 0), 1, 1),
    loss=Kernel((1, 0), (2, 0), (0, 4), 1, 1),
    logit_peak_bytes=6,
)


@dataclass(frozen=True, slots=True)
class Stack:
    """How one framework keeps its state and orders its work.

    Attributes:
        fsdp2: State lives in FSDP2 units: fp32 parameters are the master, computation runs on gathered copies in the
            compute type, gradients are reduced per unit. Otherwise weights are kept in the compute type, with fp32
            main gradients and an fp32 master in the optimizer state.
        masks_documents: Documents of a packed row are told apart by a mask over the whole square; otherwise attention
            skips what it may not read.
        rendezvous_p2p: Pipeline neighbours meet to exchange (PyTorch's 1F1B); otherwise sends run on their own.
        comm_buffer_bytes: Communication library buffers of a process [bytes].
        host_launch_s: Host time per kernel launch on a GPU [s].
        context_bytes: Device context and loaded libraries of a process [bytes].
    """

    name: str
    kernels_bf16: KernelSet
    kernels_fp32: KernelSet
    fsdp2: bool
    masks_documents: bool
    rendezvous_p2p: bool
    host_launch_s: float = 8e-6
    """Python and framework time per kernel launched on a GPU. Measured published step times of small models imply 8 us
    for Megatron and 14 us for Hugging Face modules with adapters (fits over published rows, see docs/cost-model.md)."""
    comm_buffer_bytes: float = 342e6
    """342 to 392 MB by group size: ai-dynamo/aiconfigurator, system files, nccl_mem."""
    context_bytes: float = 0.6e9
    """CUDA context with cuBLAS loaded, recalled as 0.4 to 0.8 GB; `MEMORY_SPREAD` covers it."""

    def kernels(self, element_bytes: int) -> KernelSet:
        """The memory-bound operations for elements of 2 or 4 bytes."""
        return self.kernels_bf16 if element_bytes < 4 else self.kernels_fp32


STACKS: dict[str, Stack] = {
    stack.name: stack
    for stack in (
        Stack("native", EAGER_BF16, EAGER_FP32, fsdp2=True, masks_documents=True, rendezvous_p2p=True),
        Stack("torchtitan", EAGER_BF16, EAGER_FP32, fsdp2=True, masks_documents=False, rendezvous_p2p=True),
        Stack("accelerate", EAGER_BF16, EAGER_FP32, fsdp2=True, masks_documents=False, rendezvous_p2p=False),
        Stack("deepspeed", EAGER_BF16, EAGER_FP32, fsdp2=False, masks_documents=False, rendezvous_p2p=False),
        Stack("megatron", FUSED, FUSED, fsdp2=False, masks_documents=False, rendezvous_p2p=False),
    )
}


def traffic(counts: tuple[float, float], element_bytes: np.ndarray | float) -> np.ndarray:
    """Bytes per element: a * e + b."""
    return np.asarray(counts[0] * np.asarray(element_bytes) + counts[1])
