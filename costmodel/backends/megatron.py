"""What Megatron-LM runs: flags and limits of megatron-core 0.19.2 (training/arguments.py and transformer config)."""

from __future__ import annotations

from trainplan.costmodel.backends.common import ASYNC_TP_NEEDS_SP, EAGER_CP, RULES, kv_heads, micro_batches
from trainplan.costmodel.backends.rules import Backend, Rule

_ZERO_PP = Rule(
    "sharding_pp",
    lambda job, t: (t["pp"] == 1) | t.chosen("sharding", "none", "optimizer"),
    lambda job, s: (
        f"sharding {s.sharding} with pp={s.pp}: under a pipeline only the optimizer state is sharded. Use optimizer."
    ),
)

_MOE_TP_SP = Rule(
    "moe_sp",
    lambda job, t: (job.model.moe is None) | (t["tp"] == 1) | t["sp"],
    lambda job, s: (
        f"tp={s.tp} without sp on a mixture of experts: the token dispatcher needs sequence parallelism. Set sp."
    ),
)

_ETP = Rule(
    "etp",
    lambda job, t: (t["etp"] == 1) | (t["etp"] == t["tp"]),
    lambda job, s: f"etp={s.etp}: experts are split over the tp={s.tp} group or not at all. Use etp in [1, {s.tp}].",
)

_RECOMPUTE_LAYERS = Rule(
    "recompute_layers",
    lambda job, t: (
        t.mapped("recompute_layers", lambda v: len(set(v)) <= 1)
        & ((t.mapped("recompute_layers", len) == 0) | t.chosen("recompute", "full"))
    ),
    lambda job, s: (
        f"recompute_layers={list(s.recompute_layers)} with recompute {s.recompute}: --recompute-num-layers is one "
        "number for all stages, and for full only. Use equal counts with recompute full, or leave them out."
    ),
)

_OFFLOAD_SHARDING = Rule(
    "offload_sharding",
    lambda job, t: ~t["optimizer_offload"] | t.at_least("sharding", "optimizer"),
    lambda job, s: (
        "optimizer_offload without sharding: --optimizer-cpu-offload needs the distributed optimizer. Use sharding "
        "optimizer or above."
    ),
)

BACKEND = Backend(
    name="megatron",
    version="megatron-core 0.19",
    families=frozenset(
        {
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "qwen3_next",
            "llama",
            "mistral",
            "mixtral",
            "deepseek_v3",
            "gpt_oss",
            "gpt",
        }
    ),
    lora=False,
    values={
        "schedule": {"1f1b", "interleaved"},
        "collective_algo": {"auto"},
        "token_budget": {0},
        "recompute_modules": {
            (),
            ("core_attn",),
            ("layernorm",),
            ("mlp",),
            ("core_attn", "layernorm"),
            ("layernorm", "mlp"),
        },
        "activation_offload": {False},
        "loss_chunk": {0},
        "reduce_dtype": {"fp32", "bf16"},
        "precision": {"bf16", "fp8"},
        "compile": {False},
        "attention": {"flash", "eager"},
        "fused_kernels": {("cross_entropy", "norm", "rope", "swiglu")},
        "overlap_grad_reduce": {True},
        "overlap_param_gather": {True},
        "prefetch_units": {1},
        "bucket_bytes": {0},
        "checkpoint_mode": {"sync"},
        "loader_workers": {2},
    },
    rules=(
        *RULES,
        kv_heads(replicate=True),
        micro_batches(megatron=True),
        _ZERO_PP,
        _MOE_TP_SP,
        _ETP,
        _RECOMPUTE_LAYERS,
        _OFFLOAD_SHARDING,
        ASYNC_TP_NEEDS_SP,
        EAGER_CP,
    ),
)
