"""How many bytes do a framework's memory-bound kernels move and keep? Counts per element, by hand.

Counts are per element of the tensor a kernel works on, for an element of ``e`` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    ``gelu`` is the activation of an MLP without a gate; ``scores`` is what unfused attention does to each score between
    its two batched products, which read and write them besides. ``logit_peak_bytes``: bytes per logit alive at the
    worst moment of the loss. Eager: the saved log-softmax, the gradient of the negative log-likelihood and that of the
    log-softmax, fp32 each.
    """

    norm: Kernel
    rope: Kernel
    glu: Kernel
    gelu: Kernel
    residual: Kernel
    loss: Kernel
    scores: Kernel
    logit_peak_bytes: int


EAGER_BF16 = KernelSet(
    # x.float(), pow, mean, mul by rsqrt, cast, mul by weight: the formula of transformers' RMSNorm, one kernel each.
    norm=Kernel((5, 26), (7, 48), (1, 4), 7, 14),
    rope=Kernel((10, 0), (12, 0), (0, 0), 5, 6),
    glu=Kernel((5, 0), (9, 0), (3, 0), 2, 3),
    gelu=Kernel((2, 0), (3, 0), (1, 0), 1, 1),
    residual=Kernel((3, 0), (3, 0), (0, 0), 1, 1),
    loss=Kernel((1, 12), (1, 16), (0, 4), 3, 3),
    # scale (2e), mask (3e), softmax in fp32 and back (e + 4, 4 + 4, 4 + e); backward the same without the mask.
    scores=Kernel((7, 16), (4, 20), (2, 0), 5, 4),
    logit_peak_bytes=12,
)
EAGER_FP32 = KernelSet(
    norm=Kernel((7, 0), (14, 0), (2, 0), 5, 11),
    rope=EAGER_BF16.rope,
    glu=EAGER_BF16.glu,
    gelu=EAGER_BF16.gelu,
    residual=EAGER_BF16.residual,
    loss=Kernel((3, 0), (4, 0), (1, 0), 2, 2),
    scores=Kernel((7, 0), (5, 0), (2, 0), 3, 2),
    logit_peak_bytes=12,
)
FUSED = KernelSet(
    norm=Kernel((2, 0), (3, 0), (1, 0), 1, 2),
    rope=Kernel((2, 0), (2, 0), (0, 0), 1, 1),
    glu=Kernel((3, 0), (5, 0), (2, 0), 1, 1),
    gelu=Kernel((2, 0), (3, 0), (1, 0), 1, 1),
    residual=Kernel((3, 0), (3, 0), (0, 0), 1, 1),
    # Two passes over the logits, the second writes their gradient over them; backward scales it (Liger, TE).
    loss=Kernel((3, 0), (2, 0), (0, 4), 1, 1),
    scores=Kernel((2, 0), (3, 0), (1, 0), 1, 1),
    logit_peak_bytes=6,
)
MEGATRON_GPT = replace(
    # Megatron-LM's GPT recipes, with attention and hidden dropout (a mask byte per element).
    FUSED,
    residual=Kernel((3, 1), (2, 1), (0, 1), 1, 1),  # bias, dropout and addition in one kernel
    # Masked softmax in one kernel (2e, backward 3e), dropout in another (2e + 1 each way).
    scores=Kernel((4, 1), (5, 1), (2, 1), 2, 2),
    # Vocabulary-parallel cross-entropy in fp32: cast, max, subtraction, exponential, sum, division; backward in place.
    loss=Kernel((1, 36), (1, 12), (0, 4), 7, 3),
    logit_peak_bytes=12,
)
MEGATRON_UNFUSED_GPT = replace(
    # The same without the fused kernels: each operation of softmax, GELU (tanh formula), bias and dropout by itself.
    MEGATRON_GPT,
    norm=Kernel((2, 0), (3, 0), (1, 0), 1, 2),
    gelu=Kernel((4, 0), (5, 0), (2, 0), 2, 2),
    residual=Kernel((7, 1), (4, 1), (0, 1), 3, 3),
    scores=Kernel((11, 1), (7, 1), (3, 1), 4, 4),
)
COMPOSER_GPT = replace(
    # torch's own layer norm and GELU, no dropout, the loss in fp32.
    FUSED,
    residual=Kernel((3, 0), (2, 0), (0, 0), 1, 1),
    loss=EAGER_BF16.loss,
    scores=EAGER_BF16.scores,
    logit_peak_bytes=12,
)


def traffic(counts: tuple[float, float], element_bytes: np.ndarray | float) -> np.ndarray:
    """Bytes per element: a * e + b."""
    return np.asarray(counts[0] * np.asarray(element_bytes) + counts[1])
