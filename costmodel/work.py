"""The work of a decoder layer, the embedding and the head: FLOP, bytes and launches of each operation and phase.

Everything is per rank and micro-batch and takes a `StrategyTable`, so one function explains one strategy and prices a
million. A phase is forward, input_grad or weight_grad.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from trainplan.costmodel.job import Job
from trainplan.costmodel.model import AttentionKind, MlpKind
from trainplan.costmodel.stacks import FUSED, Kernel, KernelSet, Stack, traffic
from trainplan.costmodel.strategy import StrategyTable
from trainplan.costmodel.workload import Workload

Column = np.ndarray
Phase = Literal["forward", "input_grad", "weight_grad"]
PHASES: tuple[Phase, ...] = ("forward", "input_grad", "weight_grad")
ATTENTION_BACKWARD = 2.5
"""Flash attention's backward has five matrix products where its forward has two (Dao et al. 2022, arXiv:2205.14135)."""
LINEAR_CHUNK = 64
"""Chunk length of the gated delta rule in flash-linear-attention and transformers."""


@dataclass(frozen=True, slots=True)
class Work:
    """One operation in one phase. ``part``: what selective recompute may repeat, core_attn, layernorm, mlp or other."""

    name: str
    phase: Phase
    unit: Literal["matmul", "attention", "memory"]
    flops: Column
    bytes: Column
    launches: Column | int
    part: str = "other"


@dataclass(frozen=True)
class Shapes:
    """Sizes that many operations share: tokens per rank, element bytes, and the kernels in use."""

    job: Job
    table: StrategyTable
    stack: Stack

    @cached_property
    def tokens(self) -> Column:
        """Tokens of a micro-batch on a rank of the tp group, after cp."""
        return np.asarray(self.table["micro_batch_size"] * self.job.workload.seq_len / self.table["cp"])

    @cached_property
    def norm_tokens(self) -> Column:
        """Tokens that norms and residuals see: sequence parallelism splits them over tp."""
        return np.asarray(self.tokens / np.where(self.table["sp"], self.table["tp"], 1))

    @cached_property
    def element_bytes(self) -> Column:
        """Bytes of an activation."""
        return np.where(self.table.chosen("precision", "fp32"), 4, 2)

    def kernel(self, name: str) -> list[tuple[Column, Kernel]]:
        """(share of rows, kernel): the eager one, and the fused one where compile or a fused kernel replaces it."""
        eager: KernelSet = self.stack.kernels(int(np.max(self.element_bytes)))
        fused = self.fused(name)
        if not fused.any():
            return [(np.ones(()), getattr(eager, name))]
        return (
            [(np.ones(()), getattr(FUSED, name))]
            if fused.all()
            else [(~fused, getattr(eager, name)), (fused, getattr(FUSED, name))]
        )

    def fused(self, name: str) -> Column:
        """Rows in which an operation's fused kernel runs (bool)."""
        return self._fused[name]

    @cached_property
    def _fused(self) -> dict[str, Column]:
        """Kernel -> the rows in which it is fused."""
        compiled = self.table["compile"]
        return {
            name: np.asarray(
                compiled | self.table.mapped("fused_kernels", lambda names, of=of: of in names).astype(bool)
            )
            for name, of in _FUSED_NAMES.items()
        }


_FUSED_NAMES = {"norm": "norm", "rope": "rope", "glu": "swiglu", "residual": "norm", "loss": "cross_entropy"}


def attended_causal(length: float, window: int | None) -> float:
    """Mean positions a token of one document attends to: n / 2; a sliding window w < n leaves w - w^2 / (2 n)."""
    w = min(length, window) if window else length
    return w - w**2 / (2 * length)


def attended(workload: Workload, window: int | None) -> float:
    """Mean positions a token attends to inside its own document, documents weighted by their tokens."""
    lengths = [(min(n, workload.seq_len), share) for n, share in workload.length_histogram] or [(workload.seq_len, 1.0)]
    tokens = sum(share * n for n, share in lengths)
    return sum(share * n * attended_causal(n, window) for n, share in lengths) / tokens


def _gemm(
    s: Shapes, name: str, m: Column, n: Column, k: Column, part: str = "other", frozen: bool = False
) -> Iterator[Work]:
    """M x k by k x n, and its input and weight gradients: 2 m n k FLOP each, operands and result moved once."""
    moved = s.element_bytes * (m * k + k * n + m * n)
    for phase in PHASES[: 2 if frozen else 3]:
        yield Work(name, phase, "matmul", 2 * m * n * k, moved, 1, part)


def _pointwise(s: Shapes, kernel: str, elements: Column, part: str = "other") -> Iterator[Work]:
    e, none = s.element_bytes, np.zeros(())
    for share, k in s.kernel(kernel):
        forward, backward = traffic(k.forward, e) * elements, traffic(k.backward, e) * elements
        yield Work(kernel, "forward", "memory", none, share * forward, share * k.forward_launches, part)
        yield Work(kernel, "input_grad", "memory", none, share * backward, share * k.backward_launches, part)


def attention_work(s: Shapes, kind: AttentionKind) -> Iterator[Work]:
    """Projections, rotary embedding and the token mixer of one layer."""
    if kind == "linear":
        yield from _linear_attention(s)
    elif s.job.model.mla is not None:
        yield from _latent_attention(s)
    else:
        yield from _grouped_query_attention(s, kind)


def _grouped_query_attention(s: Shapes, kind: AttentionKind) -> Iterator[Work]:
    model, t = s.job.model, s.table
    heads = model.num_heads * model.head_dim / t["tp"]
    kv = np.maximum(model.num_kv_heads / t["tp"], 1) * model.head_dim
    h, gate = np.asarray(model.hidden_size), 2 if model.attn_output_gate else 1
    for name, width in (("q_proj", heads * gate), ("k_proj", kv), ("v_proj", kv)):
        yield from _gemm(s, name, s.tokens, width, h)
    if model.qk_norm:
        yield from _pointwise(s, "norm", s.tokens * heads, "layernorm")
        yield from _pointwise(s, "norm", s.tokens * kv, "layernorm")
    if model.position == "rope":
        yield from _pointwise(s, "rope", s.tokens * heads * model.partial_rotary_factor)
        yield from _pointwise(s, "rope", s.tokens * kv * model.partial_rotary_factor)
    window = model.sliding_window if kind == "sliding" else None
    yield from _core_attention(s, heads, 2 * heads, 2 * (heads + kv), window)
    yield from _gemm(s, "o_proj", s.tokens, h, heads)


def _core_attention(
    s: Shapes, score_width: Column, product_width: Column, moved: Column, window: int | None
) -> Iterator[Work]:
    """softmax(q k^T) v: 2 T c (width of q k + width of v) FLOP for c attended positions per token.

    Eager attention computes the whole square and moves the fp32 scores about five times; a packed row does the whole
    square too where the stack masks instead of skipping.
    """
    workload, t = s.job.workload, s.table
    packed = (
        float(workload.seq_len) if workload.length_histogram and s.stack.masks_documents else attended(workload, window)
    )
    context = np.where(t["packing"], packed, attended_causal(workload.seq_len, window))
    context = np.where(t.chosen("attention", "eager"), workload.seq_len, context)
    flops = 2 * s.tokens * context * product_width
    heads = score_width / s.job.model.head_dim
    scores = np.where(t.chosen("attention", "eager"), 5 * 4 * s.tokens * workload.seq_len * heads, 0)
    moved_bytes = s.element_bytes * s.tokens * moved + scores
    yield Work("core_attention", "forward", "attention", flops, moved_bytes, 1, "core_attn")
    yield Work("core_attention", "input_grad", "attention", ATTENTION_BACKWARD * flops, 2 * moved_bytes, 2, "core_attn")


def _latent_attention(s: Shapes) -> Iterator[Work]:
    model, mla = s.job.model, s.job.model.mla
    assert mla is not None  # the caller looked
    heads, h = model.num_heads / s.table["tp"], np.asarray(model.hidden_size)
    qk, v = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim
    rank, latent = np.asarray(mla.q_lora_rank or 0), np.asarray(mla.kv_lora_rank)
    if mla.q_lora_rank is None:
        yield from _gemm(s, "q_proj", s.tokens, heads * qk, h)
    else:
        yield from _gemm(s, "q_a_proj", s.tokens, rank, h)
        yield from _pointwise(s, "norm", s.tokens * rank, "layernorm")
        yield from _gemm(s, "q_b_proj", s.tokens, heads * qk, rank)
    yield from _gemm(s, "kv_a_proj", s.tokens, latent + mla.qk_rope_head_dim, h)
    yield from _pointwise(s, "norm", s.tokens * latent, "layernorm")
    yield from _gemm(s, "kv_b_proj", s.tokens, heads * (mla.qk_nope_head_dim + v), latent)
    yield from _pointwise(s, "rope", s.tokens * (heads + 1) * mla.qk_rope_head_dim)
    yield from _core_attention(s, heads * model.head_dim, heads * (qk + v), heads * 2 * (qk + v), None)
    yield from _gemm(s, "o_proj", s.tokens, h, heads * v)


def _linear_attention(s: Shapes) -> Iterator[Work]:
    """Gated delta-net in chunks of C: per token and head 2 C (3 dk + 2 dv) inside a chunk and 6 dk dv on the state."""
    model, la, tp = s.job.model, s.job.model.linear_attention, s.table["tp"]
    assert la is not None  # held by ModelSpec
    h, value_heads = np.asarray(model.hidden_size), la.num_value_heads / tp
    key, value = la.num_key_heads * la.key_head_dim / tp, value_heads * la.value_head_dim
    yield from _gemm(s, "in_proj", s.tokens, 2 * key + 2 * value + 2 * value_heads, h)
    yield from _pointwise(s, "glu", s.tokens * (2 * key + value))  # short convolution with silu: the same traffic
    dk, dv = la.key_head_dim, la.value_head_dim
    flops = s.tokens * value_heads * (2 * LINEAR_CHUNK * (3 * dk + 2 * dv) + 6 * dk * dv)
    moved = s.element_bytes * s.tokens * (2 * key + 2 * value)
    yield Work("delta_rule", "forward", "attention", flops, moved, 4, "core_attn")
    yield Work("delta_rule", "input_grad", "attention", 2 * flops, 2 * moved, 6, "core_attn")
    yield from _pointwise(s, "norm", s.tokens * value, "layernorm")
    yield from _gemm(s, "out_proj", s.tokens, h, value)


def mlp_work(s: Shapes, kind: MlpKind) -> Iterator[Work]:
    """The feed-forward block of one layer: dense, or router, experts and shared expert."""
    model, t = s.job.model, s.table
    h = np.asarray(model.hidden_size)
    if kind == "dense":
        yield from _glu_mlp(s, "mlp", s.tokens, np.asarray(model.ffn_hidden_size) / t["tp"])
        return
    moe = model.moe
    assert moe is not None  # held by ModelSpec
    tokens = s.norm_tokens
    yield from _gemm(s, "router", tokens, np.asarray(moe.num_experts), h)
    routed = tokens * moe.top_k * t["etp"]  # balanced routing: what leaves for other ranks comes back from them
    yield from _pointwise(s, "residual", 2 * routed * h)  # permute and combine: read, write
    yield from _glu_mlp(s, "experts", routed, moe.ffn_hidden_size / t["etp"], moe.num_experts / t["ep"])
    if moe.shared_ffn_hidden_size:
        yield from _glu_mlp(s, "shared_expert", s.tokens, moe.shared_ffn_hidden_size / t["tp"])


def _glu_mlp(s: Shapes, name: str, tokens: Column, width: Column, groups: Column | float = 1) -> Iterator[Work]:
    """Gate, up and down projections (two matrices without a gate); ``groups`` weight sets of this width."""
    model = s.job.model
    h, up = np.asarray(model.hidden_size), 2 if model.gated_mlp else 1
    for part, n, k in ((f"{name}_up", width * up, h), (f"{name}_down", h, width)):
        moved = s.element_bytes * (tokens * (k + n) + groups * k * n)
        for phase in PHASES:
            yield Work(part, phase, "matmul", 2 * tokens * n * k, moved, 1 if part.endswith("down") else up, "mlp")
    yield from _pointwise(s, "glu", tokens * width, "mlp")


def layer_work(s: Shapes, attention: AttentionKind, mlp: MlpKind) -> list[Work]:
    """Every operation of one decoder layer."""
    h = s.job.model.hidden_size
    work: list[Work] = []
    for _ in range(s.job.model.norms_per_layer):
        work += _pointwise(s, "norm", s.norm_tokens * h, "layernorm")
    for _ in range(2):
        work += _pointwise(s, "residual", s.norm_tokens * h)
    return [*work, *attention_work(s, attention), *mlp_work(s, mlp)]


def embedding_work(s: Shapes) -> list[Work]:
    """Look-up forward; backward writes a dense gradient of the whole (tp-split) table."""
    h, none = s.job.model.hidden_size, np.zeros(())
    rows = s.job.model.vocab_size / s.table["tp"]
    moved = 2 * s.element_bytes * s.tokens * h
    table_bytes = s.element_bytes * rows * h
    return [
        Work("embedding", "forward", "memory", none, moved, 1),
        Work("embedding", "weight_grad", "memory", none, moved + 2 * table_bytes, 2),
    ]


def head_work(s: Shapes) -> list[Work]:
    """Final norm, output projection and cross-entropy; a chunked loss computes the projection twice."""
    h, vocab = np.asarray(s.job.model.hidden_size), s.job.model.vocab_size / s.table["tp"]
    work = list(_pointwise(s, "norm", s.norm_tokens * h))
    projection = list(_gemm(s, "lm_head", s.tokens, vocab, h))
    loss = list(_pointwise(s, "loss", s.tokens * vocab))
    chunked = (s.table["loss_chunk"] > 0).astype(float)
    again = [
        Work(w.name, "input_grad", w.unit, chunked * w.flops, chunked * w.bytes, chunked * w.launches)
        for w in (*projection, *loss)
        if w.phase == "forward"
    ]
    return [*work, *projection, *loss, *again]
