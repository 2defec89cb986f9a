"""What does a Hugging Face ``config.json`` leave unsaid? Each supported architecture's defaults and fixed traits.

The defaults are those of the configuration class of each ``model_type`` in transformers 5.24.0; a test compares them
with the classes themselves. Traits (bias, QK-norm, gates) are what the modelling code does whatever the config says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# How the attention kinds of the layers follow from the config:
#   full           no layer has a window
#   window         every layer has the window, where there is one
#   window_last    layers from max_window_layers on have it, if use_sliding_window
#   window_even    every other of the first max_window_layers layers has it, if use_sliding_window
#   window_switch  every layer has it, if use_sliding_window
#   alternate      every other layer has it, the first one included
#   local_global   all but every n-th layer have it; n is sliding_window_pattern, else `period`
#   linear         all but every n-th layer are linear attention; n is full_attention_interval, else `period`
AttentionRule = Literal[
    "full", "window", "window_last", "window_even", "window_switch", "alternate", "local_global", "linear"
]
# Which layers are mixture-of-experts: none, all, all from first_k_dense_replace on, or every decoder_sparse_step-th
# that mlp_only_layers does not name.
MoeRule = Literal["none", "all", "after_dense", "step"]
BiasRule = Literal["none", "qkv", "qkv_bias", "attention_bias"]  # fixed, or the config field that decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. ``name`` is its `ModelSpec.family`; ``defaults`` are in the config's own spelling."""

    name: str
    defaults: Mapping[str, Any]
    # What a config must state, beside hidden_size and num_hidden_layers; transformers itself would fill these in
    # silently with another model's numbers.
    required: tuple[str, ...] = ("num_attention_heads", "vocab_size")
    attention: AttentionRule = "full"
    reads_layer_types: bool = False  # layer_types overrides `attention`
    period: int = 0
    moe: MoeRule = "none"
    expert_width: str = "moe_intermediate_size"
    expert_bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False
    bias: BiasRule = "none"
    qk_norm: bool = False
    norms_per_layer: int = 2
    output_gate: bool = False
    sinks: bool = False
    mla: bool = False
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    rope_scaling: Mapping[str, Any] | None = None  # where the config has no rope block at all
    rope_renames: Mapping[str, str] = field(default_factory=dict)


# Where a default is None, the config class derives the value: num_key_value_heads from num_attention_heads, head_dim
# from hidden_size / num_attention_heads.
_QWEN2 = {
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_DELTA_NET = {
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 4096,
    "use_bidirectional_attention": None,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DELTA_NET_TRAITS: dict[str, Any] = {
    "attention": "linear",
    "reads_layer_types": True,
    "period": 4,
    "bias": "attention_bias",
    "qk_norm": True,
    "output_gate": True,
    "partial_rotary_factor": 0.25,
}

_ALL = {
    "qwen2": Family(name="qwen2", defaults=_QWEN2, attention="window_last", reads_layer_types=True, bias="qkv"),
    "qwen2_moe": Family(
        name="qwen2_moe",
        defaults={
            **_QWEN2,
            **_SPARSE,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "qkv_bias": True,
        },
        attention="window_even",
        reads_layer_types=True,
        bias="qkv_bias",
        moe="step",
        shared_gate=True,
    ),
    "qwen3": Family(
        name="qwen3",
        defaults={**_QWEN2, "head_dim": 128, "attention_bias": False},
        attention="window_last",
        reads_layer_types=True,
        bias="attention_bias",
        qk_norm=True,
    ),
    "qwen3_moe": Family(
        name="qwen3_moe",
        defaults={
            **{key: value for key, value in _QWEN2.items() if key != "max_window_layers"},
            **_SPARSE,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "attention_bias": False,
        },
        attention="window_switch",
        bias="attention_bias",
        qk_norm=True,
        moe="step",
    ),
    "qwen3_next": Family(
        name="qwen3_next",
        defaults={
            **_DELTA_NET,
            **_SPARSE,
            "num_key_value_heads": 2,
            "intermediate_size": 5632,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        moe="step",
        shared_gate=True,
        **_DELTA_NET_TRAITS,
    ),
    "qwen3_5_text": Family(name="qwen3_5", defaults={**_DELTA_NET, "num_key_value_heads": 4}, **_DELTA_NET_TRAITS),
    "qwen3_5_moe_text": Family(
        name="qwen3_5_moe",
        defaults={
            **_DELTA_NET,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        moe="all",
        shared_gate=True,
        **_DELTA_NET_TRAITS,
    ),
    "llama": Family(
        name="llama",
        defaults={
            "num_key_value_heads": None,
            "head_dim": None,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
        },
        bias="attention_bias",
    ),
    "mistral": Family(
        name="mistral",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": None,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "sliding_window": 4096,
        },
        attention="window",
    ),
    "mixtral": Family(
        name="mixtral",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": None,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        attention="window",
        moe="all",
        expert_width="intermediate_size",
        rope_theta=1e6,
    ),
    "gemma2": Family(
        name="gemma2",
        defaults={
            **_GEMMA,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        attention="alternate",
        reads_layer_types=True,
        bias="attention_bias",
        norms_per_layer=4,
    ),
    "gemma3_text": Family(
        name="gemma3",
        defaults={
            **_GEMMA,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "use_bidirectional_attention": False,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
        },
        required=(),  # published Gemma 3 files leave out heads and vocabulary where the class default is meant
        attention="local_global",
        reads_layer_types=True,
        period=6,
        bias="attention_bias",
        qk_norm=True,
        norms_per_layer=4,
        rope_theta=1e6,
    ),
    "deepseek_v3": Family(
        name="deepseek_v3",
        defaults={
            "num_key_value_heads": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        bias="attention_bias",
        moe="after_dense",
        router_bias=True,  # e_score_correction_bias, a buffer in transformers
        mla=True,
    ),
    "gpt_oss": Family(
        name="gpt_oss",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        attention="alternate",
        reads_layer_types=True,
        bias="attention_bias",
        moe="all",
        expert_width="intermediate_size",
        expert_bias=True,
        router_bias=True,
        sinks=True,
        rope_theta=150000.0,
        rope_scaling=_GPT_OSS_ROPE,
    ),
    "phi3": Family(
        name="phi3",
        defaults={
            "num_key_value_heads": None,
            "head_dim": None,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "sliding_window": None,
        },
        attention="window",
        rope_renames={"su": "longrope", "yarn": "longrope"},  # spellings of earlier releases
    ),
}

# model_type -> architecture. A multimodal wrapper and the text model inside it are the same language model.
FAMILIES: Mapping[str, Family] = {
    **_ALL,
    "qwen3_5": _ALL["qwen3_5_text"],
    "qwen3_5_moe": _ALL["qwen3_5_moe_text"],
    "gemma3": _ALL["gemma3_text"],
}
WRAPPERS = frozenset({"qwen3_5", "qwen3_5_moe", "gemma3"})  # the language model is under text_config

# One field, several spellings over the years; the first one present counts.
SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
    "hidden_act": ("hidden_activation", "hidden_act"),
    "sliding_window_pattern": ("sliding_window_pattern", "_sliding_window_pattern"),
}
