"""The work of a decoder layer, the embedding and the head: FLOP, bytes and launches of each operation and phase.

Everything is per rank and micro-batch and takes a `StrategyTable`, so one function explains one strategy and prices a
million. A phase is forward, input_grad or weight_grad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Concatenate, Literal, ParamSpec, TypeVar, cast

import numpy as np

from trainplan.costmodel.job import Job
from trainplan.costmodel.kernel_sets import FUSED, Kernel, KernelSet, traffic
from trainplan.costmodel.model import AttentionKind, MlpKind
from trainplan.costmodel.stacks import Stack
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
class Product:
    """A matrix product m x k by k x n; ``groups`` products share the m rows between them (experts).

    ``accumulates``: the result is added to an fp32 gradient in memory.
    """

    m: Column
    n: Column
    k: Column
    groups: Column | float = 1.0
    accumulates: bool = False


@dataclass(frozen=True, slots=True)
class Mixer:
    """One pass of fused attention: sequences, heads, query and key length, widths, and how far back a token reads."""

    batch: Column
    heads: Column
    kv_heads: Column
    q_len: Column
    kv_len: Column
    qk_width: int
    v_width: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """One operation in one phase.

    Attributes:
        name: What it is.
        phase: forward, input_grad or weight_grad.
        unit: What bounds it.
        flops: Of all launches together.
        bytes: Moved by all launches together.
        launches: Kernels.
        part: What selective recompute may repeat: core_attn, layernorm, mlp or other.
        shape: Of a matrix product or fused attention.
        share: In which rows it runs, 0 or 1.
        eager: A memory-bound kernel that is one of a chain of unfused ones.
    """

    name: str
    phase: Phase
    unit: Literal["matmul", "attention", "memory"]
    flops: Column
    bytes: Column
    launches: Column | float
    part: str = "other"
    shape: Product | Mixer | None = None
    share: Column | float = 1.0
    eager: bool = False


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

    @cached_property
    def known(self) -> dict[tuple[object, ...], object]:
        """What `remembered` functions have found for these shapes."""
        return {}

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
        eager = name == "loss" and self.stack.parallel_loss_is_eager
        return self._fused[name] & (self.table["tp"] == 1) if eager else self._fused[name]

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


Given = ParamSpec("Given")
Found = TypeVar("Found")


def remembered(function: Callable[Concatenate[Shapes, Given], Found]) -> Callable[Concatenate[Shapes, Given], Found]:
    """A function of shapes that is evaluated once for each of them and its other arguments."""

    @wraps(function)
    def once(shapes: Shapes, /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        key = (function.__name__, *args)
        if key not in shapes.known:
            shapes.known[key] = function(shapes, *args, **kwargs)
        return cast(Found, shapes.known[key])

    return once


_FUSED_NAMES = {
    "norm": "norm",
    "rope": "rope",
    "glu": "swiglu",
    "gelu": "swiglu",
    "residual": "norm",
    "loss": "cross_entropy",
}


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
    s: Shapes, name: str, m: Column, n: Column, k: Column, part: str = "other", groups: Column | float = 1.0
) -> Iterator[Work]:
    """M x k by k x n, and its input and weight gradients: 2 m n k FLOP each, operands and result moved once.

    Under LoRA the weight is frozen: it has no gradient, and the adapter beside a target module has two small ones.
    """
    e, flops = s.element_bytes, 2 * m * n * k
    moved = e * (m * k + groups * k * n + m * n)
    lora = s.job.workload.lora
    launches = groups if s.stack.loops_over_experts else 1
    yield Work(name, "forward", "matmul", flops, moved, launches, part, Product(m, n, k, groups))
    yield Work(name, "input_grad", "matmul", flops, moved, launches, part, Product(m, k, n, groups))
    if lora is None:
        accumulates = s.stack.accumulates_fp32
        added = np.where(accumulates, (8 - e) * groups * k * n, 0)
        shape = Product(k * groups, n, m / groups, groups, accumulates)
        yield Work(name, "weight_grad", "matmul", flops, moved + added, launches, part, shape)
    elif name in lora.target_modules or (name in FUSED_TARGETS and set(FUSED_TARGETS[name]) & set(lora.target_modules)):
        yield from _adapter(s, m, n, k, part, lora.rank)
    if lora is not None and lora.base_dtype == "int4" and name != "lm_head":
        for phase in PHASES[:2]:
            moved = DEQUANTISE_BYTES * groups * k * n
            yield Work("dequantise", phase, "memory", np.zeros(()), moved, 6, part)


DEQUANTISE_BYTES = 17
"""Per weight, from int4 to bf16 by torch's operators: shift (0.5 + 4), cast (4 + 1), mask (2), zeros (2), scale (3)."""
FUSED_TARGETS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp_up": ("gate_proj", "up_proj"),
    "mlp_down": ("down_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""A fused projection -> the Hugging Face modules it stands for."""


def _adapter(s: Shapes, m: Column, n: Column, k: Column, part: str, rank: int) -> Iterator[Work]:
    """A low-rank adapter: x A B added to the output, with dropout on its input as PEFT runs it."""
    e, r = s.element_bytes, np.asarray(rank)
    for name, rows, columns in (("lora_a", r, k), ("lora_b", n, r)):
        flops, moved = 2 * m * rows * columns, e * (m * columns + rows * columns + m * rows)
        yield Work(name, "forward", "matmul", flops, moved, 1, part, Product(m, rows, columns))
        yield Work(name, "input_grad", "matmul", flops, moved, 1, part, Product(m, columns, rows))
        yield Work(name, "weight_grad", "matmul", flops, moved, 1, part, Product(columns, rows, m))
    none = np.zeros(())
    # Dropout of the input (read, write, mask), scaling and addition to the output; backward the same and a sum.
    yield Work("lora", "forward", "memory", none, (2 * e + 1) * m * k + 5 * e * m * n, 4, part)
    yield Work("lora", "input_grad", "memory", none, (5 * e + 1) * m * k + 2 * e * m * n, 4, part)


CHAINS = ("norm", "rope")
"""Operations whose unfused kernels run below the memory rate: strided halves, reductions and mixed types. Elementwise
kernels (activations, additions, the loss) reach it one by one."""


def _pointwise(
    s: Shapes, kernel: str, elements: Column, part: str = "other", calls: Column | float = 1.0
) -> Iterator[Work]:
    """An operation on ``elements``, in ``calls`` equal pieces."""
    e, none = s.element_bytes, np.zeros(())
    for share, k in s.kernel(kernel):
        eager = k.forward_launches > 1 and kernel in CHAINS
        for phase, counts, launches in (
            (PHASES[0], k.forward, k.forward_launches),
            (PHASES[1], k.backward, k.backward_launches),
        ):
            moved = share * traffic(counts, e) * elements
            yield Work(kernel, phase, "memory", none, moved, share * launches * calls, part, None, share, eager)


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
    heads = model.num_heads / t["tp"]
    kv_heads = np.maximum(model.num_kv_heads / t["tp"], 1)
    width, kv = heads * model.head_dim, kv_heads * model.head_dim
    h, gate = np.asarray(model.hidden_size), 2 if model.attn_output_gate else 1
    if s.stack.fuses_projections:
        yield from _gemm(s, "qkv_proj", s.tokens, width * gate + 2 * kv, h)
    else:
        for name, n in (("q_proj", width * gate), ("k_proj", kv), ("v_proj", kv)):
            yield from _gemm(s, name, s.tokens, n, h)
    if model.qk_norm:
        yield from _pointwise(s, "norm", s.tokens * width, "layernorm")
        yield from _pointwise(s, "norm", s.tokens * kv, "layernorm")
    if model.position == "rope":
        yield from _pointwise(s, "rope", s.tokens * width * model.partial_rotary_factor)
        yield from _pointwise(s, "rope", s.tokens * kv * model.partial_rotary_factor)
    window = model.sliding_window if kind == "sliding" else None
    yield from _core_attention(s, heads, kv_heads, model.head_dim, model.head_dim, window)
    yield from _gemm(s, "o_proj", s.tokens, h, width)


def _core_attention(
    s: Shapes, heads: Column, kv_heads: Column, qk_width: int, v_width: int, window: int | None
) -> Iterator[Work]:
    """softmax(q k^T) v: 2 T c (width of q k + width of v) FLOP for c attended positions per token.

    Fused attention keeps the scores on chip. Eager attention computes the whole square as batched products and moves
    the scores through memory. A packed row does the whole square too where the stack masks instead of skipping.
    """
    eager = s.table.chosen("attention", "eager")
    if not eager.all():
        yield from _fused_attention(s, np.where(eager, 0.0, 1.0), heads, kv_heads, qk_width, v_width, window)
    if eager.any():
        yield from _unfused_attention(s, np.where(eager, 1.0, 0.0), heads, qk_width, v_width)


def _fused_attention(
    s: Shapes, share: Column, heads: Column, kv_heads: Column, qk_width: int, v_width: int, window: int | None
) -> Iterator[Work]:
    workload, t = s.job.workload, s.table
    packed = (
        float(workload.seq_len) if workload.length_histogram and s.stack.masks_documents else attended(workload, window)
    )
    context = np.where(t["packing"], packed, attended_causal(workload.seq_len, window))
    flops = share * 2 * s.tokens * context * heads * (qk_width + v_width)
    moved = share * s.element_bytes * s.tokens * (heads + kv_heads) * (qk_width + v_width)
    # Documents of one length that read as far on average; a window keeps the row and reads a band of it.
    length = np.asarray(workload.seq_len) if window else 2 * context
    ulysses = t.chosen("cp_method", "ulysses")
    rows = length / np.where(ulysses, 1, t["cp"])
    split = np.where(ulysses, t["cp"], 1)
    batch = s.tokens * t["cp"] / length
    shape = Mixer(batch, heads / split, np.maximum(kv_heads / split, 1), rows, length, qk_width, v_width, window)
    yield Work("core_attention", "forward", "attention", flops, moved, 1 * share, "core_attn", shape, share)
    yield Work(
        "core_attention", "input_grad", "attention", ATTENTION_BACKWARD * flops, 2 * moved, 2 * share, "core_attn",
        shape, share,
    )  # fmt: skip


def _unfused_attention(s: Shapes, share: Column, heads: Column, qk_width: int, v_width: int) -> Iterator[Work]:
    """Two batched products over the whole square, and the kernels between them on the scores."""
    e, seq = s.element_bytes, np.asarray(s.job.workload.seq_len)
    rows = s.tokens * heads
    scores = share * rows * seq
    for name, n, k in (("scores", seq, np.asarray(qk_width)), ("context", np.asarray(v_width), seq)):
        flops = share * 2 * rows * n * k
        moved = share * e * (rows * k + rows / seq * n * k + rows * n)
        for phase, shape in ((PHASES[0], Product(rows, n, k)), (PHASES[1], Product(rows, k, n))):
            yield Work(name, phase, "matmul", flops, moved, share, "core_attn", shape, share)
        shape = Product(k * rows / seq, n, seq)
        yield Work(name, "input_grad", "matmul", flops, moved, share, "core_attn", shape, share)
    kernel = s.stack.kernels(int(np.max(e))).scores
    none = np.zeros(())
    forward, backward = traffic(kernel.forward, e) * scores, traffic(kernel.backward, e) * scores
    for phase, moved, launches in (
        (PHASES[0], forward, kernel.forward_launches),
        (PHASES[1], backward, kernel.backward_launches),
    ):
        yield Work("softmax", phase, "memory", none, moved, share * launches, "core_attn", None, share, launches > 2)


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
    yield from _core_attention(s, heads, heads, qk, v, None)
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


def _glu_mlp(s: Shapes, name: str, tokens: Column, width: Column, groups: Column | float = 1.0) -> Iterator[Work]:
    """Up (and gate) and down projections around the activation; ``groups`` weight sets of this width."""
    model = s.job.model
    h, gated = np.asarray(model.hidden_size), model.gated_mlp
    if gated and not s.stack.fuses_projections:
        yield from _gemm(s, "gate_proj", tokens, width, h, "mlp", groups)
        yield from _gemm(s, "up_proj", tokens, width, h, "mlp", groups)
    else:
        yield from _gemm(s, f"{name}_up", tokens, (2 if gated else 1) * width, h, "mlp", groups)
    calls = groups if s.stack.loops_over_experts else 1.0
    yield from _pointwise(s, "glu" if gated else "gelu", tokens * width, "mlp", calls)
    yield from _gemm(s, f"{name}_down", tokens, h, width, "mlp", groups)


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
    forward = Work("embedding", "forward", "memory", none, moved, 1)
    if s.job.workload.lora is not None:
        return [forward]  # frozen, and nothing before it needs a gradient
    return [forward, Work("embedding", "weight_grad", "memory", none, moved + 2 * table_bytes, 2)]


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
