"""Parameter counts by hand, and what a `ModelSpec` refuses."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainplan.costmodel.model import MLA, LinearAttention, ModelSpec, MoE

BASE: dict[str, Any] = {
    "name": "m",
    "family": "llama",
    "num_layers": 3,
    "hidden_size": 8,
    "ffn_hidden_size": 20,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 2,
    "vocab_size": 10,
    "max_position_embeddings": 16,
}


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec(**{**BASE, **changes})


def test_a_dense_layer_by_hand() -> None:
    # q and o 8 x 8, k and v 8 x 4, three 8 x 20 matrices, two norms of 8
    layer = 2 * 64 + 2 * 32 + 3 * 160 + 2 * 8
    assert layer == 688
    assert spec().parameters() == 3 * layer + 8 + 2 * 80  # and the final norm, the embedding, the head
    assert spec(tie_word_embeddings=True).parameters() == spec().parameters() - 80


def test_biases_and_norms_by_hand() -> None:
    plain = spec().attention_parameters("full")
    assert spec(attention_bias="qkv").attention_parameters("full") == plain + 8 + 4 + 4
    assert spec(attention_bias="qkvo").attention_parameters("full") == plain + 8 + 4 + 4 + 8
    assert spec(qk_norm=True).attention_parameters("full") == plain + 2 * 2  # one norm of head_dim for q, one for k
    assert spec(attention_sinks=True).attention_parameters("full") == plain + 4
    assert spec(attn_output_gate=True).attention_parameters("full") == plain + 64
    assert spec(mlp_bias=True).mlp_parameters("dense") == 3 * 160 + 20 + 20 + 8


def test_only_the_chosen_experts_are_active() -> None:
    moe = MoE(num_experts=4, top_k=2, ffn_hidden_size=5)
    model = spec(ffn_hidden_size=None, mlp_pattern=("moe",), moe=moe)
    assert model.parameters() - model.active_parameters() == 3 * 2 * (3 * 8 * 5)  # 3 layers, 2 idle experts of 120


def test_latent_attention_by_hand() -> None:
    mla = MLA(q_lora_rank=6, kv_lora_rank=4, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=3)
    model = spec(mla=mla, num_kv_heads=4, head_dim=5)
    query = 8 * 6 + 6 + 6 * 4 * 5  # down, norm, up to 4 heads of 3 + 2
    key_value = 8 * (4 + 2) + 4 + 4 * 4 * (3 + 3)  # down with the shared rope part, norm, up to keys and values
    assert model.attention_parameters("full") == query + key_value + 4 * 3 * 8


def test_patterns_repeat_over_the_layers() -> None:
    model = spec(attention_pattern=("sliding", "full"), sliding_window=4, num_layers=3)
    assert [a for a, _ in model.layer_kinds()] == ["sliding", "full", "sliding"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"attention_pattern": ("sliding",)}, "sliding_window"),
        ({"attention_pattern": ("linear",)}, "linear_attention"),
        ({"mlp_pattern": ("moe",)}, "moe"),
        ({"ffn_hidden_size": None}, "ffn_hidden_size"),
        ({"attention_pattern": ()}, "attention_pattern"),
        ({"mlp_pattern": ("dense",) * 4}, "mlp_pattern"),
        ({"num_layers": 0}, "num_layers"),
        ({"hiden_size": 8}, "hiden_size"),
        (
            {
                "linear_attention": LinearAttention(
                    num_key_heads=2, num_value_heads=3, key_head_dim=2, value_head_dim=2, conv_kernel_size=4
                )
            },
            "linear_attention",
        ),
    ],
)
def test_a_contradiction_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        spec(**changes)


def test_more_chosen_experts_than_there_are() -> None:
    with pytest.raises(ValidationError, match="top_k=3 is more than num_experts=2"):
        MoE(num_experts=2, top_k=3, ffn_hidden_size=5)
