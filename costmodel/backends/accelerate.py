"""What Hugging Face Accelerate runs with FSDP2 and its ParallelismConfig (accelerate 1.15): no pipeline, no experts."""

from __future__ import annotations

from trainplan.costmodel.backends.common import EAGER_CP, NO_LINEAR_CP, RULES, VOCAB, kv_heads
from trainplan.costmodel.backends.rules import Backend, Rule

_REPLICAS_ALONE = Rule(
    "replicas_alone",
    lambda job, t: (t["tp"] * t["cp"] == 1) | (t["dp_replicate"] == 1) | (t["dp_shard"] > 1),
    lambda job, s: (
        f"tp={s.tp}, cp={s.cp} with dp_replicate={s.dp_replicate} and dp_shard=1: ParallelismConfig replicates only "
        "sharded groups beside tp or cp. Use dp_shard above 1."
    ),
)

BACKEND = Backend(
    name="accelerate",
    version="1.15",
    families=frozenset(
        {
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_5",
            "llama",
            "mistral",
            "mixtral",
            "gemma2",
            "gemma3",
            "phi3",
        }
    ),
    lora=True,
    values={
        "sp": {False},
        "pp": {1},
        "sharding": {"none", "parameters"},
        "cp_method": {"ring"},
        "ep": {1},
        "etp": {1},
        "rank_order": {"tp-cp-dp-pp"},
        "collective_algo": {"auto"},
        "token_budget": {0},
        "recompute": {"none", "full"},
        "recompute_layers": {()},
        "activation_offload": {False},
        "optimizer_offload": {False},
        "loss_chunk": {0},
        "reduce_dtype": {"fp32"},
        "precision": {"fp32", "bf16"},
        "attention": {"sdpa", "eager"},
        "fused_kernels": {()},
        "overlap_grad_reduce": {True},
        "overlap_param_gather": {True},
        "overlap_tp": {False},
        "prefetch_units": {1},
        "bucket_bytes": {0},
        "loader_workers": {0},
        "checkpoint_mode": {"sync"},
    },
    rules=(*RULES, kv_heads(replicate=False), VOCAB, NO_LINEAR_CP, _REPLICAS_ALONE, EAGER_CP),
)
