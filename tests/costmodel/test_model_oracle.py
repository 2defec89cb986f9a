"""Parameter counts and defaults against transformers: its own classes, built on the meta device, are the oracle.

Every family is built with small sizes that differ from each other, so that two swapped fields change the count.
"""

from __future__ import annotations

from typing import Any

import pytest

from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.model_config import preset_models
from trainplan.costmodel.model_families import FAMILIES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DENSE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE: dict[str, Any] = {**DENSE, "head_dim": 20}
EXPERTS: dict[str, Any] = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 48}
DELTA: dict[str, Any] = {
    **WIDE,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 14,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LATENT: dict[str, Any] = {
    **DENSE,
    "num_key_value_heads": 6,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "q_lora_rank": 36,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 18,
    "qk_rope_head_dim": 10,
    "v_head_dim": 22,
}

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2", "qwen2", DENSE),
    ("qwen2 tied", "qwen2", {**DENSE, "tie_word_embeddings": True}),
    ("qwen2 window", "qwen2", {**DENSE, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}),
    ("qwen2_moe", "qwen2_moe", {**DENSE, **EXPERTS, **SHARED}),
    ("qwen2_moe without bias", "qwen2_moe", {**DENSE, **EXPERTS, **SHARED, "qkv_bias": False}),
    (
        "qwen2_moe mixed",
        "qwen2_moe",
        {**DENSE, **EXPERTS, **SHARED, "decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 6},
    ),
    (
        "qwen2_moe window",
        "qwen2_moe",
        {**DENSE, **EXPERTS, **SHARED, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4},
    ),
    ("qwen3", "qwen3", WIDE),
    ("qwen3 bias", "qwen3", {**WIDE, "attention_bias": True}),
    ("qwen3_moe", "qwen3_moe", {**WIDE, **EXPERTS, "norm_topk_prob": True}),
    ("qwen3_moe without head_dim", "qwen3_moe", {**DENSE, **EXPERTS}),
    ("qwen3_moe mixed", "qwen3_moe", {**WIDE, **EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("qwen3_moe window", "qwen3_moe", {**WIDE, **EXPERTS, "use_sliding_window": True, "sliding_window": 64}),
    ("qwen3_next", "qwen3_next", {**DELTA, **EXPERTS, **SHARED}),
    ("qwen3_next mixed", "qwen3_next", {**DELTA, **EXPERTS, **SHARED, "mlp_only_layers": [0, 4]}),
    ("qwen3_next interval", "qwen3_next", {**DELTA, **EXPERTS, **SHARED, "full_attention_interval": 3}),
    ("qwen3_5_text", "qwen3_5_text", DELTA),
    ("qwen3_5_text tied", "qwen3_5_text", {**DELTA, "tie_word_embeddings": True, "attention_bias": True}),
    ("qwen3_5_moe_text", "qwen3_5_moe_text", {**DELTA, **EXPERTS, **SHARED}),
    ("llama", "llama", DENSE),
    ("llama biases", "llama", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    (
        "llama rope",
        "llama",
        {**DENSE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                                      "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    ("mistral", "mistral", {**DENSE, "sliding_window": 64}),
    ("mistral without window", "mistral", {**WIDE, "sliding_window": None}),
    ("mixtral", "mixtral", {**DENSE, "num_local_experts": 7, "num_experts_per_tok": 3}),
    ("mixtral wide", "mixtral", {**WIDE, "num_local_experts": 7, "sliding_window": 32}),
    ("gemma2", "gemma2", {**WIDE, "sliding_window": 64}),
    ("gemma2 untied", "gemma2", {**WIDE, "tie_word_embeddings": False, "attention_bias": True}),
    ("gemma3_text", "gemma3_text", {**WIDE, "sliding_window": 64, "num_hidden_layers": 8}),
    ("gemma3_text pattern", "gemma3_text", {**WIDE, "sliding_window": 64, "sliding_window_pattern": 3}),
    ("deepseek_v3", "deepseek_v3", LATENT),
    ("deepseek_v3 full rank", "deepseek_v3", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v3 bias", "deepseek_v3", {**LATENT, "attention_bias": True}),
    ("gpt_oss", "gpt_oss", {**WIDE, "num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 64}),
    ("gpt_oss without bias", "gpt_oss", {**WIDE, "num_local_experts": 7, "attention_bias": False}),
    ("phi3", "phi3", DENSE),
    ("phi3 tied", "phi3", {**DENSE, "tie_word_embeddings": True, "sliding_window": 64}),
]  # fmt: skip


def oracle_count(config: Any) -> int:
    """Parameters of the real model; the router's correction bias of DeepSeek-V3, a buffer there, is added by hand."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(p.numel() for p in model.parameters())
    if config.model_type == "deepseek_v3":
        count += config.n_routed_experts * (config.num_hidden_layers - config.first_k_dense_replace)
    return int(count)


@pytest.mark.parametrize(("model_type", "values"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_count_equals_that_of_the_real_model(model_type: str, values: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(model_type, **values)
    assert ModelSpec.from_hf_config(config.to_dict(), "m").parameters() == oracle_count(config)


@pytest.mark.parametrize(("model_type", "values"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_a_person_wrote_and_what_transformers_saves_give_the_same_spec(
    model_type: str, values: dict[str, Any]
) -> None:
    """The class fills in every default and rewrites old spellings; our own defaults and spellings must agree."""
    saved = transformers.AutoConfig.for_model(model_type, **values).to_dict()
    written = {"model_type": model_type, **values}
    assert ModelSpec.from_hf_config(written, "m") == ModelSpec.from_hf_config(saved, "m")


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_defaults_are_those_of_the_config_class(model_type: str) -> None:
    family = FAMILIES[model_type]
    config = transformers.AutoConfig.for_model(model_type).get_text_config()
    kinds = {"sliding_window", "mlp_only_layers", "num_key_value_heads", "head_dim"}  # replaced by the class itself
    for field, default in family.defaults.items():
        if field in kinds:
            if default is not None:
                declared = {f.name: f.default for f in config.__dataclass_fields__.values()}
                assert default == declared[field], field
        else:
            assert getattr(config, field) == default, field
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    assert rope["rope_theta"] == family.rope_theta
    assert rope.get("partial_rotary_factor", 1.0) == family.partial_rotary_factor
    if family.rope_scaling is None:
        assert rope["rope_type"] == "default"
    else:
        assert {key: value for key, value in rope.items() if key != "rope_theta"} == family.rope_scaling


@pytest.mark.parametrize(("model_type", "values"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_layer_kinds_and_rope_are_those_of_the_config_class(model_type: str, values: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(model_type, **values)
    spec = ModelSpec.from_hf_config({"model_type": model_type, **values}, "m")
    kinds = {"full": "full_attention", "sliding": "sliding_attention", "linear": "linear_attention"}
    ours = [kinds[attention] for attention, _ in spec.layer_kinds()]
    if getattr(config, "layer_types", None):
        sees_all = not config.sliding_window if hasattr(config, "sliding_window") else False
        expected = ["full_attention" if sees_all and t == "sliding_attention" else t for t in config.layer_types]
    else:  # one window for every layer, or none
        whole = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        expected = [whole] * config.num_hidden_layers
    if getattr(config, "sliding_window", None) and config.sliding_window >= config.max_position_embeddings:
        expected = ["full_attention"] * len(expected)  # the window holds the whole context
    assert ours == expected
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert spec.rope_theta == rope["rope_theta"]
    left = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    assert (spec.rope_scaling or {"rope_type": "default"}) == left


@pytest.mark.parametrize("inner", ["qwen3_5_text", "qwen3_5_moe_text", "gemma3_text"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_multimodal_wrapper_is_its_language_model(inner: str, tied: bool) -> None:
    values = {**(WIDE if inner == "gemma3_text" else {**DELTA, **EXPERTS, **SHARED}), "tie_word_embeddings": tied}
    text = transformers.AutoConfig.for_model(inner, **values)
    wrapper = {"model_type": inner.removesuffix("_text"), "text_config": text.to_dict(), "vision_config": {"depth": 2}}
    spec = ModelSpec.from_hf_config(wrapper, "m")
    assert spec == ModelSpec.from_hf_config(text.to_dict(), "m")
    assert spec.parameters() == oracle_count(text)
    del wrapper["text_config"]["tie_word_embeddings"]
    assert ModelSpec.from_hf_config({**wrapper, "tie_word_embeddings": tied}, "m").tie_word_embeddings is tied


def real_config(facts: dict[str, Any]) -> Any:
    """The real config class of a preset, from its published shapes."""
    family, moe = facts["family"], facts["moe"]
    model_type = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}.get(
        family, family
    )
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
            "tie_word_embeddings", "max_position_embeddings")  # fmt: skip
    values = {key: facts[key] for key in same}
    if family not in ("deepseek_v3", "phi3"):
        values["head_dim"] = facts["head_dim"]
    if facts["intermediate_size"]:
        values["intermediate_size"] = facts["intermediate_size"]
    if moe:
        width = "intermediate_size" if family in ("mixtral", "gpt_oss") else "moe_intermediate_size"
        experts = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "deepseek_v3": "n_routed_experts"}
        values |= {width: moe["moe_intermediate_size"], experts.get(family, "num_experts"): moe["num_experts"]}
        values |= {key: moe[key] for key in ("num_experts_per_tok",)}
        if moe["shared_expert_gate"]:
            values["shared_expert_intermediate_size"] = moe["shared_expert_intermediate_size"]
    values |= facts["mla"] or {}
    values |= {k: v for k, v in (facts["linear_attention"] or {}).items() if k.startswith("linear_")}
    if family == "phi3":
        values |= {"pad_token_id": 0}
    return transformers.AutoConfig.for_model(model_type, **values)


def test_every_published_model_has_the_size_of_the_real_class() -> None:
    for name, spec, facts in preset_models():
        assert spec.parameters() == oracle_count(real_config(facts)), name
