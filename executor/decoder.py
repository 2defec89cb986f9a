"""The decoder: Qwen2, Qwen2.5, Qwen3, Llama and Mistral, dense, under the module names of Hugging Face checkpoints.

A parameter's name here is its key in a checkpoint. Three places are made to be swapped: `Attention.sdpa` (kernels,
context parallelism), `RmsNorm` (fused kernels) and `trainplan.executor.loss` (chunked or parallel loss).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.model import ModelSpec
from trainplan.executor.attention import Sdpa, document_mask
from trainplan.executor.loss import summed_loss
from trainplan.executor.rope import inverse_frequencies, rope_type, rotate, rotation

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")

# Field of a ModelSpec, the only value this decoder computes, and what another value would need.
_REQUIRED = (
    ("moe", None, "mixture-of-experts layers"),
    ("mla", None, "multi-head latent attention"),
    ("linear_attention", None, "linear attention"),
    ("attn_output_gate", False, "a gate on the attention output"),
    ("attention_sinks", False, "attention sinks"),
    ("attn_softcap", None, "a soft cap on attention scores"),
    ("logit_softcap", None, "a soft cap on logits"),
    ("partial_rotary_factor", 1.0, "rotary embedding of a part of each head"),
    ("position", "rope", "positions other than rotary"),
    ("norm", "rms", "layer norm"),
    ("norms_per_layer", 2, "norms beyond the two before attention and MLP"),
    ("gated_mlp", True, "an MLP without a gate"),
    ("hidden_act", "silu", "an activation other than silu"),
)


def check_supported(spec: ModelSpec) -> None:
    """Returns if this decoder computes exactly what ``spec`` describes.

    Raises:
        UsageError: It does not; the message names the field.
    """
    advice = "Choose a dense Qwen2, Qwen3, Llama or Mistral model, or another backend."
    for field, only, what in _REQUIRED:
        value = getattr(spec, field)
        if value != only:
            shown = value if isinstance(value, bool | int | float | str) else "set"
            raise UsageError(f"{field} of {spec.name} is {shown}: the native executor has no {what}. {advice}")
    kinds = {kind for layer in spec.layer_kinds() for kind in layer} - {"full", "dense"}
    if kinds:
        field = "mlp_pattern" if "moe" in kinds else "attention_pattern"
        window = f" (sliding_window={spec.sliding_window})" if "sliding" in kinds else ""
        raise UsageError(
            f"{field} of {spec.name} has {'/'.join(sorted(kinds))} layers{window}: the native executor has only full "
            f"attention and dense MLPs. {advice}"
        )
    if spec.family not in FAMILIES:
        raise UsageError(f"family of {spec.name} is {spec.family!r}: the native executor has no such decoder. {advice}")
    rope_type(spec)


class RmsNorm(nn.Module):
    """x / rms(x) * weight, mean in fp32 and scaling in the input's dtype: bitwise what the checkpoints expect."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [..., size]. Returns the same shape and dtype."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, and norms on queries and keys where the model has them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        bias = spec.attention_bias != "none"
        self.q_proj = nn.Linear(spec.hidden_size, q, bias=bias)
        self.k_proj = nn.Linear(spec.hidden_size, kv, bias=bias)
        self.v_proj = nn.Linear(spec.hidden_size, kv, bias=bias)
        self.o_proj = nn.Linear(q, spec.hidden_size, bias=spec.attention_bias == "qkvo")
        self.q_norm = RmsNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RmsNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.sdpa = Sdpa()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``x``: [rows, tokens, hidden_size]; ``cos``, ``sin``: [rows, tokens, head_dim]. Returns the shape of x."""
        rows, tokens, _ = x.shape
        # -1 heads: under tensor parallelism a rank has only its share of them.
        q, k, v = (p(x).view(rows, tokens, -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        out = self.sdpa(rotate(q, cos, sin), rotate(k, cos, sin), v, mask)
        return self.o_proj(out.transpose(1, 2).reshape(rows, tokens, -1))


class Mlp(nn.Module):
    """SwiGLU feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        if spec.ffn_hidden_size is None:
            raise UsageError(f"ffn_hidden_size of {spec.name} is missing: a dense MLP needs its width.")
        self.gate_proj = nn.Linear(spec.hidden_size, spec.ffn_hidden_size, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden_size, spec.ffn_hidden_size, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.ffn_hidden_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [rows, tokens, hidden_size]. Returns the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer: the unit that is recomputed, compiled and sharded."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = Mlp(spec)
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.norm_eps)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, spec.norm_eps)
        self.recompute = False
        self._compiled: Callable[..., torch.Tensor] | None = None

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def compile_body(self) -> None:
        """Compiles what the layer computes. The hooks of FSDP and the recomputation stay outside, in eager Python."""
        self._compiled = torch.compile(self._body, fullgraph=True)

    def _body(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``x``: [rows, tokens, hidden_size]. Returns the same shape."""
        body = self._compiled or self._body
        if self.recompute and torch.is_grad_enabled():
            # There is no dropout, so no random state needs to be kept for the second pass.
            return checkpoint(body, x, cos, sin, mask, use_reentrant=False, preserve_rng_state=False)
        return body(x, cos, sin, mask)


class Stack(nn.Module):
    """Embedding, layers and final norm. Layers are keyed by their number in the whole model."""

    inv_freq: torch.Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleDict({str(i): Block(spec) for i in range(spec.num_layers)})
        self.norm = RmsNorm(spec.hidden_size, spec.norm_eps)
        self.register_buffer("inv_freq", inverse_frequencies(spec), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the normalised hidden states, [rows, tokens, hidden_size]."""
        x = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        cos, sin = rotation(position_ids, self.inv_freq, x.dtype)
        mask = None if documents is None else document_mask(documents)
        for layer in self.layers.values():
            x = layer(x, cos, sin, mask)
        return self.norm(x)


class CausalLm(nn.Module):
    """A decoder-only language model. With tied embeddings there is no ``lm_head``, as in the checkpoints.

    Parameters are uninitialised: load them with `trainplan.executor.weights`.
    """

    def __init__(self, spec: ModelSpec) -> None:
        check_supported(spec)
        super().__init__()
        self.spec = spec
        self.loss_chunk = 0
        self.model = Stack(spec)
        self.lm_head = None if spec.tie_word_embeddings else nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    @property
    def blocks(self) -> list[Block]:
        return [layer for layer in self.model.layers.values() if isinstance(layer, Block)]

    def reset_buffers(self, device: torch.device | str) -> None:
        """Computes what no checkpoint holds, after the model was moved off the meta device."""
        with torch.device("cpu"):
            self.model.inv_freq = inverse_frequencies(self.spec).to(device)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The summed loss where ``labels`` are given, else the logits.

        Args:
            input_ids: [rows, tokens], int64.
            labels: [rows, tokens], int64, already shifted: ``labels[i]`` follows ``input_ids[i]``;
                `trainplan.executor.loss.IGNORED` = no prediction.
            position_ids: [rows, tokens] or [1, tokens]; None = 0, 1, 2, ...
            documents: [rows, tokens], the number of the document each token belongs to; None = one document per row.

        Returns:
            A scalar, fp32; or [rows, tokens, vocab_size] in the dtype of the parameters.
        """
        hidden = self.model(input_ids, position_ids, documents)
        weight = (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight
        if labels is None:
            return F.linear(hidden, weight)
        return summed_loss(hidden.flatten(0, 1), weight, labels.flatten(), self.loss_chunk)
