"""What DeepSpeed runs on a Hugging Face model: ZeRO stages, offload and AutoTP of DeepSpeed 0.19."""

from __future__ import annotations

from trainplan.costmodel.backends.common import EAGER_CP, RULES, VOCAB, kv_heads
from trainplan.costmodel.backends.rules import Backend, Rule

_AUTOTP_ZERO = Rule(
    "autotp_zero",
    lambda job, t: (t["tp"] == 1) | ~t.at_least("sharding", "parameters"),
    lambda job, s: f"tp={s.tp} with sharding parameters: AutoTP runs with ZeRO stages 0 to 2. Use sharding gradients.",
)

_OFFLOAD_SHARDING = Rule(
    "offload_sharding",
    lambda job, t: ~t["optimizer_offload"] | t.at_least("sharding", "optimizer"),
    lambda job, s: (
        "optimizer_offload without sharding: ZeRO-Offload moves a sharded state. Use sharding optimizer or above."
    ),
)

_ZERO3_RESHARDS = Rule(
    "zero3_reshards",
    lambda job, t: ~t.at_least("sharding", "parameters") | t["reshard_after_forward"],
    lambda job, s: (
        "sharding parameters without reshard_after_forward: ZeRO stage 3 frees gathered parameters after use. Set it."
    ),
)

BACKEND = Backend(
    name="deepspeed",
    version="0.19",
    families=frozenset(
        {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "llama", "mistral", "mixtral", "gemma2", "gemma3", "phi3"}
    ),
    lora=True,
    values={
        "sp": {False},
        "pp": {1},
        "dp_replicate": {1},
        "cp_method": {"ulysses"},
        "ep": {1},
        "etp": {1},
        "rank_order": {"tp-cp-dp-pp"},
        "collective_algo": {"auto"},
        "token_budget": {0},
        "recompute": {"none", "full"},
        "recompute_layers": {()},
        "activation_offload": {False},
        "loss_chunk": {0},
        "reduce_dtype": {"fp32", "bf16"},
        "precision": {"fp32", "bf16"},
        "compile": {False},
        "attention": {"sdpa", "eager"},
        "fused_kernels": {()},
        "overlap_tp": {False},
        "overlap_grad_reduce": {True},
        "overlap_param_gather": {True},
        "prefetch_units": {1},
        "bucket_bytes": {0},
        "loader_workers": {0},
        "checkpoint_mode": {"sync"},
    },
    rules=(*RULES, kv_heads(replicate=False), VOCAB, _AUTOTP_ZERO, _OFFLOAD_SHARDING, _ZERO3_RESHARDS, EAGER_CP),
)
