"""What a model is made of: the numbers of its architecture and how many parameters they give.

A `ModelSpec` is everything the cost model, the search and the executor need to know about a model. It is read from a
Hugging Face ``config.json`` or a preset by `trainplan.costmodel.model_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

AttentionKind = Literal["full", "sliding", "linear"]
MlpKind = Literal["dense", "moe"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MoE(_Frozen):
    """Mixture-of-experts feed-forward: a router sends each token to ``top_k`` of ``num_experts`` gated MLPs."""

    num_experts: int = Field(gt=0)
    top_k: int = Field(gt=0)
    ffn_hidden_size: int = Field(gt=0, description="Width of one expert.")
    shared_ffn_hidden_size: int = Field(0, ge=0, description="Width of the always-on expert; 0 = none.")
    shared_gate: bool = Field(False, description="A scalar sigmoid gate on the shared expert (1 x hidden weight).")
    router_bias: bool = Field(False, description="A bias or correction term per expert.")
    expert_bias: bool = Field(False, description="Biases on the expert projections.")
    norm_topk_prob: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> MoE:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} is more than num_experts={self.num_experts}.")
        return self


class LinearAttention(_Frozen):
    """Gated delta-net: the linear-attention mixer of Qwen3-Next and Qwen3.5."""

    num_key_heads: int = Field(gt=0)
    num_value_heads: int = Field(gt=0)
    key_head_dim: int = Field(gt=0)
    value_head_dim: int = Field(gt=0)
    conv_kernel_size: int = Field(gt=0)


class MLA(_Frozen):
    """Multi-head latent attention of DeepSeek-V2/V3: low-rank query and key-value projections."""

    q_lora_rank: int | None = Field(description="None: the query projection is full rank.")
    kv_lora_rank: int = Field(gt=0)
    qk_nope_head_dim: int = Field(gt=0)
    qk_rope_head_dim: int = Field(gt=0)
    v_head_dim: int = Field(gt=0)


class ModelSpec(_Frozen):
    """The architecture of a decoder-only language model.

    ``attention_pattern`` and ``mlp_pattern`` repeat over the layers: layer ``i`` is of kind
    ``pattern[i % len(pattern)]``. A pattern that never repeats has one entry per layer.
    """

    name: str
    family: str = Field(description="Hugging Face model_type, text part: qwen2, qwen3, qwen3_moe, llama, ...")
    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    ffn_hidden_size: int | None = Field(description="Width of the dense MLP; None where every layer is MoE.")
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    tie_word_embeddings: bool = False
    attention_bias: Literal["none", "qkv", "qkvo"] = "none"
    mlp_bias: bool = False
    qk_norm: bool = False
    gated_mlp: bool = Field(True, description="SwiGLU or GeGLU (three matrices) rather than two.")
    hidden_act: str = "silu"
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = Field(1e-6, gt=0)
    norms_per_layer: int = Field(2, ge=1)
    position: Literal["rope", "learned", "alibi"] = "rope"
    rope_theta: float = Field(10000.0, gt=0)
    rope_scaling: dict[str, Any] | None = Field(
        None, description="The config's rope scaling block in its current spelling (rope_type); None = unscaled."
    )
    partial_rotary_factor: float = Field(1.0, gt=0, le=1)
    attention_pattern: tuple[AttentionKind, ...] = ("full",)
    sliding_window: int | None = Field(None, gt=0)
    mlp_pattern: tuple[MlpKind, ...] = ("dense",)
    moe: MoE | None = None
    linear_attention: LinearAttention | None = None
    mla: MLA | None = None
    attn_output_gate: bool = Field(
        False, description="Full attention has a sigmoid gate: the query projection doubles."
    )
    attention_sinks: bool = Field(False, description="One learned logit per head.")
    attn_softcap: float | None = Field(None, gt=0)
    logit_softcap: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        def fail(field: str, why: str) -> None:
            raise ValueError(f"{field} of {self.name}: {why}")

        if self.num_heads % self.num_kv_heads and self.mla is None:
            fail("num_kv_heads", f"{self.num_kv_heads} does not divide num_heads={self.num_heads}.")
        la = self.linear_attention
        if la is not None and la.num_value_heads % la.num_key_heads:
            fail(
                "linear_attention",
                f"num_key_heads={la.num_key_heads} does not divide num_value_heads={la.num_value_heads}.",
            )
        if "sliding" in self.attention_pattern and self.sliding_window is None:
            fail("sliding_window", "missing, but attention_pattern has sliding layers.")
        if "linear" in self.attention_pattern and self.linear_attention is None:
            fail("linear_attention", "missing, but attention_pattern has linear layers.")
        if "moe" in self.mlp_pattern and self.moe is None:
            fail("moe", "missing, but mlp_pattern has MoE layers.")
        if "dense" in self.mlp_pattern and self.ffn_hidden_size is None:
            fail("ffn_hidden_size", "missing, but mlp_pattern has dense layers.")
        for field in ("attention_pattern", "mlp_pattern"):
            if not 0 < len(getattr(self, field)) <= self.num_layers:
                fail(field, f"needs 1 to num_layers={self.num_layers} entries.")
        return self

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], name: str) -> ModelSpec:
        """The architecture that a Hugging Face ``config.json`` describes; see `model_config.from_hf_config`."""
        from trainplan.costmodel.model_config import from_hf_config  # model_config builds this type: a cycle otherwise

        return from_hf_config(config, name)

    def layer_kinds(self) -> tuple[tuple[AttentionKind, MlpKind], ...]:
        """(attention kind, MLP kind) of every layer, in order."""
        a, m = self.attention_pattern, self.mlp_pattern
        return tuple((a[i % len(a)], m[i % len(m)]) for i in range(self.num_layers))

    def attention_parameters(self, kind: AttentionKind) -> int:
        """Parameters of one token mixer, norms over the hidden size not counted (see `layer_parameters`)."""
        h = self.hidden_size
        if kind == "linear":
            la = self.linear_attention
            assert la is not None  # held by the validator
            key, value, heads = (
                la.num_key_heads * la.key_head_dim,
                la.num_value_heads * la.value_head_dim,
                la.num_value_heads,
            )
            projections = h * (2 * key + 2 * value) + 2 * h * heads + value * h
            return projections + (2 * key + value) * la.conv_kernel_size + 2 * heads + la.value_head_dim
        if self.mla is not None:
            return self._mla_parameters(self.mla)
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q_out = q * (2 if self.attn_output_gate else 1)
        n = h * q_out + 2 * h * kv + q * h
        n += {"none": 0, "qkv": q_out + 2 * kv, "qkvo": q_out + 2 * kv + h}[self.attention_bias]
        n += 2 * self.head_dim if self.qk_norm else 0
        return n + (self.num_heads if self.attention_sinks else 0)

    def _mla_parameters(self, mla: MLA) -> int:
        h, heads, qk = self.hidden_size, self.num_heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim
        r = mla.q_lora_rank
        n = h * heads * qk if r is None else h * r + r + r * heads * qk
        n += h * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
        n += mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        n += heads * mla.v_head_dim * h
        if self.attention_bias == "qkvo":  # on the two down-projections and the output projection
            n += (r or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim + h
        return n

    def expert_parameters(self) -> int:
        """Parameters of one routed expert; 0 for a dense model."""
        if self.moe is None:
            return 0
        h, f = self.hidden_size, self.moe.ffn_hidden_size
        return 3 * h * f + (2 * f + h if self.moe.expert_bias else 0)

    def mlp_parameters(self, kind: MlpKind, *, experts: int | None = None) -> int:
        """Parameters of one feed-forward block; ``experts`` counts only so many routed experts (None = all)."""
        h = self.hidden_size
        if kind == "dense":
            f = self.ffn_hidden_size
            assert f is not None  # held by the validator
            matrices = 3 if self.gated_mlp else 2
            return matrices * h * f + ((matrices - 1) * f + h if self.mlp_bias else 0)
        moe = self.moe
        assert moe is not None  # held by the validator
        n = h * moe.num_experts + (moe.num_experts if moe.router_bias else 0)
        if moe.shared_ffn_hidden_size:
            n += 3 * h * moe.shared_ffn_hidden_size + (h if moe.shared_gate else 0)
        return n + self.expert_parameters() * (moe.num_experts if experts is None else experts)

    def layer_parameters(self, attention: AttentionKind, mlp: MlpKind, *, experts: int | None = None) -> int:
        """Parameters of one decoder layer of the given kinds."""
        norm = self.hidden_size * (2 if self.norm == "layer" else 1)
        return (
            self.norms_per_layer * norm
            + self.attention_parameters(attention)
            + self.mlp_parameters(mlp, experts=experts)
        )

    def final_norm_parameters(self) -> int:
        """Parameters of the norm before the output head."""
        return self.hidden_size * (2 if self.norm == "layer" else 1)

    def embedding_parameters(self) -> int:
        """The input embedding, the output head where it is not tied, and learned positions."""
        positions = self.max_position_embeddings * self.hidden_size if self.position == "learned" else 0
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2) + positions

    def parameters(self) -> int:
        """Every parameter of the text model."""
        layers = sum(self.layer_parameters(a, m) for a, m in self.layer_kinds())
        return self.embedding_parameters() + layers + self.final_norm_parameters()

    def active_parameters(self) -> int:
        """Parameters that one token meets: only ``top_k`` of the routed experts."""
        k = self.moe.top_k if self.moe else None
        layers = sum(self.layer_parameters(a, m, experts=k if m == "moe" else None) for a, m in self.layer_kinds())
        return self.embedding_parameters() + layers + self.final_norm_parameters()
