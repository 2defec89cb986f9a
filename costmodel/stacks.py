"""The software a strategy runs on: which kernels, which attention, what overlaps, and how it keeps its state.

A `Stack` belongs to a framework, a range of its versions and documented flags, never to a model or a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trainplan.costmodel.kernel_sets import (
    COMPOSER_GPT,
    EAGER_BF16,
    EAGER_FP32,
    FUSED,
    MEGATRON_GPT,
    KernelSet,
)

AttentionKernel = Literal["efficient", "flash1", "flash2", "flash3", "cudnn"]
TORCH_ATTENTION: Mapping[str, AttentionKernel] = {"sdpa": "flash2", "flash": "flash2", "cudnn": "cudnn"}
"""What each choice of `Strategy.attention` runs on a GPU under PyTorch's dispatcher and flash-attn 2."""


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
        attention: `Strategy.attention` -> kernel; "eager" is always unfused.
        fuses_projections: One product for q, k and v, and one for gate and up.
        accumulates_fp32: The weight gradient's product adds to an fp32 buffer (Megatron's accumulation fusion).
        gemm_library: Whose measured products apply where a device has several tables.
        stops_early: Recomputation ends before the last product of a layer, whose output nobody needs (PyTorch's
            non-reentrant checkpoint).
        sends_once_per_domain: A token goes over the network once to each scale-up domain that has one of its experts,
            and is copied inside it (DeepEP and Megatron's hybrid dispatcher); otherwise once per expert.
        loops_over_experts: One product and activation per expert (Transformers' modules); otherwise grouped kernels.
        shard_broadcast_s: Host time per shard where updated parameters return from sharded optimizers by one broadcast
            per rank instead of an all-gather [s].
        host_launch_s: Host time per kernel launched on a GPU [s].
        micro_batch_host_s: Host time per micro-batch that the device waits for: handing the batch to the
            tensor-parallel ranks, building masks and positions, reading the loss back [s].
        step_host_s: Host time per optimizer step that nothing hides: loader, loss read-back, logging [s].
        parallel_loss_is_eager: Under tp the loss over a split vocabulary is not compiled (PyTorch's loss_parallel).
        gradient_copy_bytes: Per parameter, of gradients in the compute type that stay beside the fp32 ones they are
            added to [bytes].
        optimizer_state_bytes: Per parameter, without FSDP2: fp32 master weight and two moments [bytes].
        comm_buffer_bytes: Communication library buffers of a process [bytes].
        context_bytes: Device context and loaded libraries of a process [bytes].
    """

    name: str
    kernels_bf16: KernelSet
    kernels_fp32: KernelSet
    fsdp2: bool
    masks_documents: bool
    rendezvous_p2p: bool
    attention: Mapping[str, AttentionKernel] = field(default_factory=lambda: TORCH_ATTENTION)
    fuses_projections: bool = False
    accumulates_fp32: bool = False
    gemm_library: Literal["torch", "transformer_engine"] = "torch"
    stops_early: bool = False
    sends_once_per_domain: bool = False
    loops_over_experts: bool = False
    shard_broadcast_s: float = 0.0
    host_launch_s: float = 8e-6
    micro_batch_host_s: float = 0.0
    step_host_s: float = 0.0
    optimizer_traffic_bytes: float = 7 * 4 + 4 + 8
    """Per parameter and step: AdamW reads p, g, m, v and writes p, m, v in fp32; the gradient norm reads once and
    scaling reads and writes."""
    parallel_loss_is_eager: bool = False
    gradient_copy_bytes: float = 0.0
    optimizer_state_bytes: float = 12.0
    comm_buffer_bytes: float = 342e6
    """342 to 392 MB by group size: ai-dynamo/aiconfigurator, system files, nccl_mem."""
    context_bytes: float = 0.6e9
    """CUDA context with cuBLAS loaded, recalled as 0.4 to 0.8 GB; `MEMORY_SPREAD` covers it."""

    def kernels(self, element_bytes: int) -> KernelSet:
        """The memory-bound operations for elements of 2 or 4 bytes."""
        return self.kernels_bf16 if element_bytes < 4 else self.kernels_fp32


_MEGATRON = Stack(
    "megatron", FUSED, FUSED, fsdp2=False, masks_documents=False, rendezvous_p2p=False, fuses_projections=True,
    accumulates_fp32=True, gemm_library="transformer_engine", optimizer_traffic_bytes=7 * 4 + 12 + 2,
    sends_once_per_domain=True,
)  # fmt: skip
_PEFT = Stack(
    "hf-peft", EAGER_BF16, EAGER_FP32, fsdp2=False, masks_documents=False, rendezvous_p2p=False, host_launch_s=26e-6,
)  # fmt: skip
_HOOKED = Stack(  # hooks around every module fetch and release its parameters from Python
    "hf-deepspeed-zero3", EAGER_BF16, EAGER_FP32, fsdp2=False, masks_documents=False, rendezvous_p2p=False,
    host_launch_s=180e-6, loops_over_experts=True,
)  # fmt: skip
STACKS: dict[str, Stack] = {
    stack.name: stack
    for stack in (
        Stack(
            "native", EAGER_BF16, EAGER_FP32, fsdp2=True, masks_documents=True, rendezvous_p2p=True, stops_early=True,
        ),
        Stack(
            "torchtitan", EAGER_BF16, EAGER_FP32, fsdp2=True, masks_documents=False, rendezvous_p2p=True,
            parallel_loss_is_eager=True,
        ),
        Stack("accelerate", EAGER_BF16, EAGER_FP32, fsdp2=True, masks_documents=False, rendezvous_p2p=False),
        Stack(
            "deepspeed", EAGER_BF16, EAGER_FP32, fsdp2=False, masks_documents=False, rendezvous_p2p=False,
            loops_over_experts=True,
        ),
        _MEGATRON,
        # Transformer Engine's precision-aware optimizer with both moments in bf16
        replace(_MEGATRON, name="megatron-bf16-moments", optimizer_state_bytes=8.0),
        Stack(
            "megatron-lm-2022", MEGATRON_GPT, FUSED, fsdp2=False, masks_documents=False, rendezvous_p2p=False,
            fuses_projections=True, accumulates_fp32=True,
        ),
        Stack(  # gradients are added to fp32 ones by kernels of their own; six communicators
            "megatron-deepspeed-fused", MEGATRON_GPT, FUSED, fsdp2=False, masks_documents=False, rendezvous_p2p=False,
            fuses_projections=True, accumulates_fp32=True, gradient_copy_bytes=2, comm_buffer_bytes=6 * 0.6e9,
        ),
        Stack(
            "megatron-deepspeed", MEGATRON_GPT, FUSED, fsdp2=False, masks_documents=False,
            rendezvous_p2p=False, fuses_projections=True, host_launch_s=66e-6, micro_batch_host_s=1.2e-3,
        ),
        Stack(
            "llm-foundry", COMPOSER_GPT, EAGER_FP32, fsdp2=True, masks_documents=False, rendezvous_p2p=False,
            fuses_projections=True, attention={"sdpa": "flash1", "flash": "flash1"}, stops_early=True,
        ),
        Stack(
            "internevo", FUSED, FUSED, fsdp2=False, masks_documents=False, rendezvous_p2p=False,
            fuses_projections=True, shard_broadcast_s=2.8e-3,
        ),
        Stack(  # pure bf16, SGD: reads p and g, writes p
            "hf-sgd", EAGER_BF16, EAGER_FP32, fsdp2=True, masks_documents=False, rendezvous_p2p=False,
            optimizer_traffic_bytes=6, attention={"sdpa": "efficient", "flash": "flash2", "cudnn": "cudnn"},
        ),
        Stack(
            "nanotron", FUSED, FUSED, fsdp2=False, masks_documents=False, rendezvous_p2p=True, fuses_projections=True,
            accumulates_fp32=True,
        ),
        Stack("fms-fsdp", EAGER_BF16, EAGER_FP32, fsdp2=True, masks_documents=False, rendezvous_p2p=False),
        Stack("torchtune", EAGER_BF16, EAGER_FP32, fsdp2=True, masks_documents=False, rendezvous_p2p=False),
        _PEFT,
        replace(_PEFT, name="hf-peft-gptq"),
        replace(_PEFT, name="hf-peft-zero2"),
        _HOOKED,
        replace(_HOOKED, name="swift-deepspeed-zero3"),
    )
}  # fmt: skip
