"""Which models ship with the package? The published architectures of profiles/models, as `ModelSpec`.

The facts hold shapes, published sizes and sources. What they leave out, rope scaling, changes no cost and stays unset.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from trainplan.costmodel.model import MLA, AttentionKind, LinearAttention, MlpKind, ModelSpec, MoE
from trainplan.costmodel.model_families import FAMILIES
from trainplan.profiles import read_json

_FACT_PATTERNS: Mapping[str, tuple[AttentionKind, ...]] = {
    "every 2nd layer local": ("sliding", "full"),
    "alternating local / global": ("sliding", "full"),
    "5 local : 1 global": ("sliding",) * 5 + ("full",),
}
# From the published config.json files; every other family has 1e-6.
_FACT_NORM_EPS = {"llama": 1e-5, "mistral": 1e-5, "mixtral": 1e-5, "gpt_oss": 1e-5, "phi3": 1e-5}


def preset_models() -> list[tuple[str, ModelSpec, dict[str, Any]]]:
    """(name, spec, facts) of every shipped model; the facts hold the published sizes and the sources of each number."""
    return [(facts["name"], presets()[facts["name"]], facts) for facts in read_json("models", "facts.json")]


@functools.cache
def presets() -> Mapping[str, ModelSpec]:
    """Name -> spec of every shipped model."""
    return {facts["name"]: _from_facts(facts) for facts in read_json("models", "facts.json")}


def preset_name(ref: str) -> str | None:
    """The preset that ``ref`` names in full or by the part after the slash, whatever its case; None if not just one."""
    full = [name for name in presets() if name.lower() == ref.lower()]
    short = [name for name in presets() if name.rsplit("/", 1)[-1].lower() == ref.lower()]
    found = full or short
    return found[0] if len(found) == 1 else None


def _from_facts(facts: Mapping[str, Any]) -> ModelSpec:
    """The spec of one entry of profiles/models/facts.json."""
    layers, moe, linear, mla = facts["num_hidden_layers"], facts["moe"], facts["linear_attention"], facts["mla"]
    family = next(f for f in FAMILIES.values() if f.name == facts["family"])
    pattern: tuple[AttentionKind, ...] = _FACT_PATTERNS.get(facts.get("sliding_pattern", ""), ("full",))
    if linear:
        pattern = ("linear",) * (linear["full_attention_interval"] - 1) + ("full",)
    mlp: tuple[MlpKind, ...] = ("dense",)
    if moe:
        dense = moe["first_k_dense_replace"]
        mlp = ("dense",) * dense + ("moe",) * (layers - dense) if dense else ("moe",)
    return ModelSpec(
        name=facts["name"],
        family=facts["family"],
        num_layers=layers,
        hidden_size=facts["hidden_size"],
        ffn_hidden_size=facts["intermediate_size"] if "dense" in mlp else None,
        num_heads=facts["num_attention_heads"],
        num_kv_heads=facts["num_key_value_heads"],
        head_dim=facts["head_dim"],
        vocab_size=facts["vocab_size"],
        max_position_embeddings=facts["max_position_embeddings"],
        tie_word_embeddings=facts["tie_word_embeddings"],
        attention_bias=facts["attention_bias"] or "none",
        qk_norm=facts["qk_norm"],
        hidden_act=family.defaults.get("hidden_activation", "silu"),
        norm_eps=_FACT_NORM_EPS.get(facts["family"], 1e-6),
        norms_per_layer=facts.get("norms_per_layer", 2),
        rope_theta=facts["rope_theta"],
        partial_rotary_factor=(linear or facts).get("partial_rotary_factor", 1.0),
        attention_pattern=pattern,
        sliding_window=facts["sliding_window"] if "sliding" in pattern else None,
        mlp_pattern=mlp,
        moe=_moe_from_facts(moe) if moe else None,
        linear_attention=LinearAttention(
            num_key_heads=linear["linear_num_key_heads"],
            num_value_heads=linear["linear_num_value_heads"],
            key_head_dim=linear["linear_key_head_dim"],
            value_head_dim=linear["linear_value_head_dim"],
            conv_kernel_size=linear["linear_conv_kernel_dim"],
        )
        if linear
        else None,
        mla=MLA(**mla) if mla else None,
        attn_output_gate=bool(linear and linear["attn_output_gate"]),
        attention_sinks=facts.get("attention_sinks", False),
        attn_softcap=facts.get("attn_softcap"),
        logit_softcap=facts.get("logit_softcap"),
    )


def _moe_from_facts(moe: Mapping[str, Any]) -> MoE:
    return MoE(
        num_experts=moe["num_experts"],
        top_k=moe["num_experts_per_tok"],
        ffn_hidden_size=moe["moe_intermediate_size"],
        shared_ffn_hidden_size=moe["shared_expert_intermediate_size"],
        shared_gate=moe["shared_expert_gate"],
        router_bias=moe.get("router_bias", False),
        expert_bias=moe.get("expert_bias", False),
        norm_topk_prob=moe["norm_topk_prob"],
    )
