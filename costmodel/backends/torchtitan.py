"""What torchtitan runs: configuration fields and limits of torchtitan 0.3.0 on PyTorch's pipelining and FSDP2."""

from __future__ import annotations

from trainplan.costmodel.backends.common import (
    ASYNC_TP_NEEDS_SP,
    NO_LINEAR_CP,
    NO_TIED_PP,
    RULES,
    VOCAB,
    kv_heads,
    micro_batches,
)
from trainplan.costmodel.backends.rules import Backend, Rule

_SP = Rule(
    "sp",
    lambda job, t: ~t["sp"] | (t["tp"] > 1),
    lambda job, s: f"sp with tp={s.tp}: only a tensor-parallel group shards the sequence. Leave sp out.",
)

_EXPERT_MESH = Rule(
    "expert_mesh",
    lambda job, t: (t["ep"] == 1) | (t["dp_shard"] * t["cp"] * t["tp"] % t["ep"] == 0),
    lambda job, s: (
        f"ep={s.ep} must divide dp_shard*cp*tp = {s.dp_shard}*{s.cp}*{s.tp}: experts are spread within a sharded "
        "group, never over replicas. Use more dp_shard or less ep."
    ),
)

_ASYNC_TP_COMPILE = Rule(
    "async_tp_compile",
    lambda job, t: ~t["overlap_tp"] | t["compile"],
    lambda job, s: "overlap_tp without compile: async tensor parallelism is a pass of torch.compile. Set compile.",
)

BACKEND = Backend(
    name="torchtitan",
    version="0.3",
    families=frozenset({"qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "llama", "deepseek_v3", "gpt_oss"}),
    lora=False,
    values={
        "sharding": {"none", "parameters"},
        "rank_order": {"tp-cp-dp-pp"},
        "collective_algo": {"auto"},
        "cp_method": {"ring"},
        "etp": {1},
        "token_budget": {0},
        "recompute_modules": {(), ("ops",)},
        "recompute_layers": {()},
        "activation_offload": {False},
        "optimizer_offload": {False},
        "loss_chunk": {0},
        "reduce_dtype": {"fp32", "bf16"},
        "precision": {"fp32", "bf16", "fp8"},
        "attention": {"sdpa"},
        "fused_kernels": {()},
        "overlap_grad_reduce": {True},
        "overlap_param_gather": {True},
        "prefetch_units": {1},
        "bucket_bytes": {0},
        "loader_workers": {0},
        "checkpoint_mode": {"sync"},
    },
    rules=(
        *RULES,
        kv_heads(replicate=False),
        VOCAB,
        micro_batches(megatron=False),
        NO_TIED_PP,
        NO_LINEAR_CP,
        _SP,
        _EXPERT_MESH,
        _ASYNC_TP_COMPILE,
        ASYNC_TP_NEEDS_SP,
    ),
)
