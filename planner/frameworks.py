"""Which software stack does a published framework name stand for? Documented defaults, one entry per framework.

An entry says what the framework (in a range of versions, with the flags that its scripts document) runs where a row is
silent. It never depends on a row's model, sizes or result. Each change of an entry after its rows were seen is counted
in `REVISIONS`, which docs/accuracy.md reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainplan.costmodel.workload import Lora

FUSED = ("cross_entropy", "norm", "rope", "swiglu")
REVISIONS: tuple[str, ...] = (
    "Megatron-DeepSpeed (vTrain): fused kernels, not none; host time per launch and per micro-batch; fp16 reduction",
    "HF Transformers + DeepSpeed: fused norm and rotary kernels; host time per launch with adapters and under ZeRO-3",
    "InternEvo: a broadcast per shard after the step",
    "Megatron-SWIFT, ms-swift: packed documents of 1024 tokens; ZeRO-3's hooks",
    "Megatron-DeepSpeed (BigScience): a stack apart from Megatron-LM's",
    "Composer/llm-foundry: a third, not 40 %, of the tensor rate for first-generation flash-attention",
    "Megatron-Bridge: tokens cross the network once per domain",
    "Megatron-Bridge: adapters on the projection of queries, keys and values only",
    "HF Transformers + DeepSpeed: adapters on quantised weights, and on several GPUs, calibrated apart from others",
    "Megatron-LM (2020): the row's InfiniBand adapters instead of the preset's network",
)
"""What was changed in an entry after looking at errors of open rows."""
QWEN_LORA = Lora(rank=64, alpha=16)


@dataclass(frozen=True)
class Framework:
    """What a framework runs.

    Attributes:
        name: Start of the rows' ``framework``; ``source`` narrows it to one publication's documented scripts, ``task``
            to one kind of training.
        repos: Repositories whose published rows it runs as well, whatever they call it.
        stack: Key of `trainplan.costmodel.stacks.STACKS`.
        strategy: Fields of `Strategy` that its scripts set.
        silent: Values of row fields where a row is silent, from the framework's or script's defaults.
        stack_of_sharded_parameters: Stack of rows that shard parameters, where another one runs then.
        stack_of_several_gpus: The same for rows of more than one GPU.
        lora: Adapters of the scripts, where a row's task has some.
        document_tokens: Length of the documents that a row with packing holds, which its scripts' data sets have.
        pads_vocabulary: The vocabulary is padded to a multiple of this times tp.
        why: Version range, flags, and where they are documented.
    """

    name: str
    stack: str
    why: str
    strategy: Mapping[str, Any] = field(default_factory=dict)
    silent: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    task: str = ""
    pads_vocabulary: int = 1
    document_tokens: int = 0
    stack_of_sharded_parameters: str = ""
    stack_of_several_gpus: str = ""
    lora: Lora = QWEN_LORA
    repos: tuple[str, ...] = ()


UNOVERLAPPED = {"overlap_grad_reduce": False, "overlap_param_gather": False}
FRAMEWORKS = (
    Framework(
        "Megatron-LM 23e00ed",
        "megatron",
        "Megatron-Core of early 2026 on Transformer Engine 2.11; the launcher turns every overlap off.",
        {"attention": "cudnn", "fused_kernels": FUSED, **UNOVERLAPPED},
        pads_vocabulary=128,
    ),
    Framework(
        "NeMo AutoModel",
        "torchtitan",
        "NeMo AutoModel of 2025 and 2026: Transformers models with fused kernels on FSDP2, cuDNN attention through "
        "Transformer Engine, no recomputation where none is stated.",
        {"attention": "cudnn", "compile": True},
        {"recompute": "none", "zero_or_fsdp": "FSDP2"},
        repos=("NVIDIA-NeMo/Automodel",),
    ),
    Framework(
        "NeMo",
        "megatron",
        "NeMo 24.03 to 25.04 on Megatron-Core and Transformer Engine; adapters of rank 32 on the fused projection of "
        "queries, keys and values only, its default target; tensor-parallel and data-parallel overlap.",
        {"attention": "cudnn", "fused_kernels": FUSED, "overlap_tp": True},
        {"recompute": "none", "zero_or_fsdp": "ZeRO-1"},
        pads_vocabulary=128,
        task="lora",
        lora=Lora(rank=32, alpha=32, target_modules=("q_proj", "k_proj", "v_proj")),
        repos=("NVIDIA/NeMo",),
    ),
    Framework(
        "NeMo",
        "megatron",
        "NeMo 24.03 to 25.04 on Megatron-Core and Transformer Engine; its performance recipes turn on tensor-parallel "
        "and data-parallel overlap and run without recomputation where they state none.",
        {"attention": "cudnn", "fused_kernels": FUSED, "overlap_tp": True},
        {"recompute": "none", "zero_or_fsdp": "ZeRO-1"},
        pads_vocabulary=128,
        repos=("NVIDIA/NeMo",),
    ),
    Framework(
        "Megatron-Core",
        "megatron",
        "Megatron-Core of 2025 on Transformer Engine, as Megatron-LM's Llama example and the MoE model zoo configure "
        "it: distributed optimizer with overlap, cuDNN or flash attention, tensor-parallel overlap.",
        {"attention": "cudnn", "fused_kernels": FUSED, "overlap_tp": True},
        {"recompute": "none", "zero_or_fsdp": "ZeRO-1"},
        pads_vocabulary=128,
        repos=("yanring/Megatron-MoE-ModelZoo", "NVIDIA/Megatron-LM/examples/llama"),
    ),
    Framework(
        "Megatron-Bridge",
        "megatron",
        "As its other recipes; the performance recipes put adapters of rank 16 on the fused projection of queries, "
        "keys and values only (cfg.peft.target_modules).",
        {"attention": "cudnn", "fused_kernels": FUSED, "overlap_tp": True},
        {"recompute": "none", "zero_or_fsdp": "ZeRO-1"},
        pads_vocabulary=128,
        task="lora",
        lora=Lora(rank=16, alpha=32, target_modules=("q_proj", "k_proj", "v_proj")),
    ),
    Framework(
        "Megatron-Bridge",
        "megatron",
        "Containers 25.09 to 26.08; performance recipes turn on tensor-parallel and data-parallel overlap. Recipes "
        "that state no recomputation run without.",
        {"attention": "cudnn", "fused_kernels": FUSED, "overlap_tp": True},
        {"recompute": "none", "zero_or_fsdp": "ZeRO-1"},
        pads_vocabulary=128,
    ),
    Framework(
        "Megatron-SWIFT",
        "megatron",
        "Megatron-Core 0.12 and later under ms-swift; flash-attention 2, no tensor-parallel overlap by default; the "
        "example scripts pack instruction data of a few hundred to two thousand tokens a sample.",
        {"attention": "flash", "fused_kernels": FUSED},
        pads_vocabulary=128,
        document_tokens=1024,
    ),
    Framework(
        "Megatron-LM (2020)",
        "megatron-lm-2022",
        "Megatron-LM of 2020: fused masked softmax, bias-GELU and layer norm, dropout 0.1, fp16 gradients all-reduced "
        "after the backward.",
        {"attention": "eager", "fused_kernels": FUSED, "reduce_dtype": "bf16", **UNOVERLAPPED},
        pads_vocabulary=128,
    ),
    Framework(
        "Megatron-LM",
        "megatron-lm-2022",
        "Megatron-LM 2.x to 3.0 of 2021 and 2022: fused masked softmax, bias-GELU, bias-dropout-add and layer norm, "
        "unfused attention products, dropout 0.1, gradients reduced after the backward.",
        {"attention": "eager", "fused_kernels": FUSED, **UNOVERLAPPED},
        pads_vocabulary=128,
    ),
    Framework(
        "Megatron-DeepSpeed",
        "megatron-deepspeed",
        "Megatron-DeepSpeed of 2021 to 2023 as vTrain configures it: activation checkpointing, 1F1B, no gradient "
        "buckets, vocabulary 50257, fp16 with gradients all-reduced in fp16, DeepSpeed's pipeline engine.",
        {"attention": "eager", "reduce_dtype": "bf16", **UNOVERLAPPED},
        {"vocab": 50257, "precision": "fp16", "zero_or_fsdp": "none"},
        source="VIA-Research/vTrain",
        pads_vocabulary=128,
    ),
    Framework(
        "Megatron-DeepSpeed",
        "megatron-deepspeed-fused",
        "Megatron-DeepSpeed of 2021 and 2022 with Megatron's fused kernels built, as BigScience's scripts do.",
        {"attention": "eager", "fused_kernels": FUSED, **UNOVERLAPPED},
        pads_vocabulary=128,
    ),
    Framework(
        "Composer/llm-foundry",
        "llm-foundry",
        "llm-foundry 0.1 to 0.4 on PyTorch FSDP1 with a Triton or CUDA flash-attention of the first generation, "
        "torch layer norm in low precision, no dropout.",
        {"attention": "flash", "fused_kernels": ("norm", "swiglu")},
    ),
    Framework(
        "InternEvo",
        "internevo",
        "InternEvo 0.2 to 0.3: flash-attention 2 with its fused rotary embedding, norm and cross-entropy; ZeRO-1 "
        "with gradient reduction under the backward and parameters broadcast after the step.",
        {"attention": "flash", "fused_kernels": FUSED, "reduce_dtype": "bf16"},
    ),
    Framework(
        "HF Transformers + DeepSpeed",
        "hf-deepspeed-zero3",
        "Qwen's finetune.py of 2023 with finetune_ds.sh: Transformers' remote code, flash-attention 2, gradient "
        "checkpointing and flash-attention's kernels on, full fine-tuning under DeepSpeed ZeRO-3 also on one GPU.",
        {"attention": "flash", "fused_kernels": ("norm", "rope")},
        {"recompute": "full", "zero_or_fsdp": "DeepSpeed ZeRO-3"},
        task="full",
    ),
    Framework(
        "HF Transformers + DeepSpeed",
        "hf-peft-gptq",
        "Qwen's finetune.py of 2023 with its LoRA scripts: Transformers' remote code, flash-attention 2, gradient "
        "checkpointing on, flash-attention's rotary and RMS norm kernels, PEFT adapters on GPTQ weights of 4 bits.",
        {"attention": "flash", "fused_kernels": ("norm", "rope"), **UNOVERLAPPED},
        {"recompute": "full", "zero_or_fsdp": "DeepSpeed ZeRO-2"},
        task="qlora",
    ),
    Framework(
        "HF Transformers + DeepSpeed",
        "hf-peft",
        "Qwen's finetune.py of 2023 with its LoRA scripts: Transformers' remote code, flash-attention 2, gradient "
        "checkpointing on, flash-attention's rotary and RMS norm kernels, PEFT adapters; ZeRO-2 on several GPUs.",
        {"attention": "flash", "fused_kernels": ("norm", "rope"), **UNOVERLAPPED},
        {"recompute": "full", "zero_or_fsdp": "DeepSpeed ZeRO-2"},
        stack_of_several_gpus="hf-peft-zero2",
    ),
    Framework(
        "ms-swift + DeepSpeed + Liger",
        "deepspeed",
        "As ms-swift + DeepSpeed, with Liger's kernels: the loss in chunks that keep the logits as small as the hidden "
        "states, fused norm, rotary and SwiGLU kernels.",
        {"attention": "flash", "fused_kernels": ("norm", "rope", "swiglu"), "loss_chunk": 512},
        document_tokens=1024,
        stack_of_sharded_parameters="swift-deepspeed-zero3",
    ),
    Framework(
        "ms-swift + DeepSpeed",
        "deepspeed",
        "ms-swift 3.x on Transformers and DeepSpeed; flash-attention 2, as packing needs it; the same data. ZeRO-3 "
        "hooks every module, each expert's too.",
        {"attention": "flash"},
        document_tokens=1024,
        stack_of_sharded_parameters="swift-deepspeed-zero3",
    ),
    Framework(
        "torchtitan",
        "torchtitan",
        "torchtitan of 2024 and 2025 with torch.compile on every block; tensor parallel plans shard the sequence.",
        {"compile": True, "sp": True},
    ),
    Framework(
        "torchao",
        "torchtitan",
        "torchtitan with torchao's float8 linear layers and torch.compile on every block, as torchao's training "
        "documents run it.",
        {"attention": "sdpa", "compile": True},
        {"recompute": "none", "zero_or_fsdp": "FSDP2"},
        repos=("pytorch/ao",),
    ),
    Framework(
        "nanotron",
        "nanotron",
        "nanotron of early 2025: flash-attention 2 with its rotary and norm kernels, tensor parallelism with split "
        "sequences, 1F1B, ZeRO-1 after the backward; its benchmark runs without recomputation.",
        {"attention": "flash", "fused_kernels": FUSED, "sp": True, **UNOVERLAPPED},
        {"recompute": "none", "zero_or_fsdp": "ZeRO-1"},
        repos=("huggingface/nanotron",),
    ),
    Framework(
        "fms-fsdp",
        "fms-fsdp",
        "IBM's fms-fsdp of 2024: PyTorch FSDP on its own Llama with PyTorch's flash attention, not compiled; no "
        "recomputation where none is stated.",
        {"attention": "sdpa"},
        {"recompute": "none", "zero_or_fsdp": "FSDP FULL_SHARD"},
        repos=("foundation-model-stack/fms-fsdp",),
    ),
    Framework(
        "torchtune",
        "torchtune",
        "torchtune 0.2 to 0.6: its own eager modules, PyTorch's flash attention, FSDP2, activation checkpointing on, "
        "rank 8 adapters on queries, values and the output projection, loss in chunks.",
        {"attention": "sdpa", "loss_chunk": 512},
        {"recompute": "full", "zero_or_fsdp": "FSDP2"},
        lora=Lora(rank=8, alpha=16, target_modules=("q_proj", "v_proj", "o_proj")),
        repos=("pytorch/torchtune",),
    ),
    Framework(
        "HF transformers eager + torch 2.7 SDPA backend",
        "hf-sgd",
        "NVIDIA cudnn-frontend's training script: Transformers in eager mode, pure bf16, SGD.",
    ),
)


def framework(name: str, source: str, task: str | None) -> Framework | None:
    """The entry of a row's framework, source and task; None if there is none.

    The repository that publishes a row speaks before the framework's name, which sources spell in many ways.
    """
    fitting = [entry for entry in FRAMEWORKS if entry.task in ("", task)]
    for entry in fitting:
        if any(f"{repo.lower()}/" in source.lower() + "/" for repo in entry.repos):
            return entry
    for entry in fitting:
        if name.lower().startswith(entry.name.lower()) and entry.source in source:
            return entry
    return None
