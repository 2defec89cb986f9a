"""Bytes that stay alive between forward and backward: what each operation saves, per layer and micro-batch on a rank.

An operation saves what its backward reads. Counts for the native stack are exact for eager PyTorch and tested against
autograd's own saved tensors; for the others they follow the same operations with fused kernels.
"""

from __future__ import annotations

import numpy as np

from trainplan.costmodel.kernel_sets import FUSED, traffic
from trainplan.costmodel.lora import module_sizes
from trainplan.costmodel.model import AttentionKind, MlpKind
from trainplan.costmodel.work import Column, Shapes, remembered

LayerKind = tuple[AttentionKind, MlpKind]
STATISTIC_BYTES = 4
"""One fp32 number per row: a norm's reciprocal root, attention's log-sum-exp."""


@remembered
def saved_bytes(s: Shapes, kind: LayerKind) -> Column:
    """Bytes one layer saves for one micro-batch when nothing of it is recomputed."""
    parts = _parts(s, kind)
    return np.asarray(sum(parts.values(), start=np.zeros(())))


@remembered
def kept_bytes(s: Shapes, kind: LayerKind) -> Column:
    """Bytes that a recomputed layer keeps: its input (full), or what the selective modules don't repeat."""
    parts = _parts(s, kind)
    total = saved_bytes(s, kind)
    dropped = sum(
        (s.table.mapped("recompute_modules", lambda names, p=part: p in names) * size for part, size in parts.items()),
        start=np.zeros(()),
    )
    boundary = s.element_bytes * s.norm_tokens * s.job.model.hidden_size
    by_operator = s.table.mapped("recompute_modules", lambda names: "ops" in names).astype(bool)
    selective = np.where(by_operator, boundary + _operator_policy_bytes(s, kind), total - dropped)
    return np.asarray(np.where(s.table.chosen("recompute", "full"), boundary, np.maximum(selective, boundary)))


@remembered
def boundary_bytes(s: Shapes) -> Column:
    """Bytes of the hidden states between two layers: what full recompute keeps, and the gradient that flows back."""
    return np.asarray(s.element_bytes * s.norm_tokens * s.job.model.hidden_size)


@remembered
def recomputed_bytes(s: Shapes, kind: LayerKind) -> Column:
    """Bytes that come back to life when a layer is recomputed.

    An eager norm below fp32 saves an fp32 copy of its input, so what full recompute kept of it stays beside that; any
    other norm saves the input itself.
    """
    copies = sum((share * (k.saved[1] > 0) for share, k in s.kernel("norm")), start=np.zeros(()))
    twice = copies * s.table.chosen("recompute", "full") * boundary_bytes(s)
    return np.asarray(saved_bytes(s, kind) - kept_bytes(s, kind) + twice)


@remembered
def backward_bytes(s: Shapes, kind: LayerKind) -> Column:
    """Bytes beside the saved ones at the worst moment of a layer's backward, in its MLP.

    The gradients of the layer's output and of the MLP's product are there, those of the gate's two sides have just been
    computed, and the product itself, saved for the down projection, is gone.
    """
    model, e = s.job.model, s.element_bytes
    if kind[1] == "dense":
        width = s.tokens * np.asarray(model.ffn_hidden_size) / s.table["tp"]
    else:
        moe = model.moe
        assert moe is not None  # held by ModelSpec
        width = s.norm_tokens * moe.top_k * moe.ffn_hidden_size
    return np.asarray(boundary_bytes(s) + e * width * (2 if model.gated_mlp else 1))


@remembered
def norm_backward_bytes(s: Shapes) -> Column:
    """Bytes at the worst moment of the backward of a norm over the hidden size, its input among them.

    Eager: six fp32 tensors (the input, its gradient so far, and the square's gradient with its two factors and their
    product). A fused one: the input and two gradients.
    """
    eager = sum((share * (k.backward_launches > 2) for share, k in s.kernel("norm")), start=np.zeros(()))
    per_value = np.where(eager, 6 * 4, 3 * s.element_bytes)
    return np.asarray(s.norm_tokens * (s.job.model.hidden_size * per_value + 2 * STATISTIC_BYTES))


@remembered
def head_backward_bytes(s: Shapes) -> Column:
    """Bytes of the head's product in backward: gradients of the logits, of its weight and of its input."""
    vocab, e = s.job.model.vocab_size / s.table["tp"], s.element_bytes
    whole = e * (s.tokens * vocab + s.job.model.hidden_size * vocab) + boundary_bytes(s)
    return np.where((s.table["loss_chunk"] > 0) & (s.table["loss_chunk"] < s.tokens), 0, whole)


@remembered
def batch_bytes(s: Shapes) -> Column:
    """Bytes that all layers of a micro-batch share: ids and labels, rotary tables, and what tells documents apart."""
    job, t = s.job, s.table
    packed = bool(job.workload.length_histogram) & t["packing"]
    masked = packed & s.stack.masks_documents
    numbers = np.where(packed, 8 * 4, 8 * 2)  # int64: ids and labels; document numbers and positions
    rows = np.where(packed, s.tokens, job.workload.seq_len / t["cp"])  # every row has the same positions
    tables = 2 * s.element_bytes * job.model.head_dim * rows * (job.model.position == "rope")
    kept = masked & t.chosen(
        "recompute", "full"
    )  # the mask, one byte per pair: only a second forward asks for it again
    return np.asarray(numbers * s.tokens + tables + np.where(kept, s.tokens * job.workload.seq_len, 0))


@remembered
def edge_bytes(s: Shapes) -> Column:
    """Bytes the head saves beside the logits: the final norm and its output."""
    return np.asarray(_norm_bytes(s, s.norm_tokens, s.job.model.hidden_size) + _input_bytes(s))


@remembered
def loss_bytes(s: Shapes) -> Column:
    """Peak bytes of logits and their gradients: a micro-batch's, or one chunk's.

    Chunked, the weight gradient is summed in fp32 and the hidden states' fills up; beside them are three copies of a
    chunk's logits (those of the chunk before are still there), or two and the chunk's part of the weight gradient.
    """
    chunk, e, h = s.table["loss_chunk"], s.element_bytes, s.job.model.hidden_size
    vocab = s.job.model.vocab_size / s.table["tp"]
    eager = s.stack.kernels(int(np.max(e))).logit_peak_bytes
    whole = s.tokens * vocab * np.where(s.fused("loss"), FUSED.logit_peak_bytes, eager)
    logits = np.maximum(12 * chunk * vocab, (4 + e) * chunk * vocab + e * vocab * h)
    chunked = logits + 4 * vocab * h + s.tokens * (e * h + STATISTIC_BYTES)
    return np.where((chunk > 0) & (chunk < s.tokens), chunked, whole)


def _input_bytes(s: Shapes) -> Column:
    """The input that projections of the hidden size share."""
    return np.asarray(s.element_bytes * s.norm_tokens * s.job.model.hidden_size)


def _norm_bytes(s: Shapes, tokens: Column, width: Column | float, rows_per_token: Column | float = 1) -> Column:
    saved = sum(share * traffic(k.saved, s.element_bytes) for share, k in s.kernel("norm"))
    return np.asarray(tokens * (width * saved + STATISTIC_BYTES * rows_per_token))


def _glu_bytes(s: Shapes, tokens: Column, width: Column) -> Column:
    """Gate, up and (eager) the activated gate, and the product that the down projection reads."""
    saved = sum(share * traffic(k.saved, s.element_bytes) for share, k in s.kernel("glu"))
    gated = saved if s.job.model.gated_mlp else s.element_bytes
    return np.asarray(tokens * width * (gated + s.element_bytes))


@remembered
def _parts(s: Shapes, kind: LayerKind) -> dict[str, Column]:
    """Saved bytes by the names that selective recompute uses, and ``other``."""
    model, t, e = s.job.model, s.table, s.element_bytes
    attention, mlp = kind
    norms = model.norms_per_layer * _norm_bytes(s, s.norm_tokens, model.hidden_size)
    inputs = 2 * _input_bytes(s)
    core, other, head_norms = _attention_bytes(s, attention)
    if mlp == "dense":
        feed = _glu_bytes(s, s.tokens, np.asarray(model.ffn_hidden_size) / t["tp"])
    else:
        moe = model.moe
        assert moe is not None  # held by ModelSpec
        routed = s.norm_tokens * moe.top_k * t["etp"]
        feed = _glu_bytes(s, routed, np.asarray(moe.ffn_hidden_size) / t["etp"])
        if moe.shared_ffn_hidden_size:
            feed = feed + _glu_bytes(s, s.tokens, np.asarray(moe.shared_ffn_hidden_size) / t["tp"])
        other = other + 2 * e * routed * model.hidden_size + STATISTIC_BYTES * s.norm_tokens * moe.num_experts
    other = other + _adapter_bytes(s, kind)
    return {"core_attn": core, "layernorm": norms + inputs, "mlp": feed, "other": other + head_norms}


def _adapter_bytes(s: Shapes, kind: LayerKind) -> Column:
    """What adapters save: of each target module its input after dropout, the mask, and the narrow product."""
    lora, e = s.job.workload.lora, s.element_bytes
    if lora is None:
        return np.zeros(())
    sizes = module_sizes(s.job.model, *kind)
    inputs = sum(inputs for name, (inputs, _) in sizes.items() if name in lora.target_modules)
    modules = sum(name in lora.target_modules for name in sizes)
    return np.asarray(s.tokens * ((e + 1) * inputs / s.table["tp"] + e * lora.rank * modules))


def _attention_bytes(s: Shapes, kind: AttentionKind) -> tuple[Column, Column, Column]:
    """(repeatable with core_attn, the rest, norms per head) of one token mixer."""
    model, t, e, tokens = s.job.model, s.table, s.element_bytes, s.tokens
    if kind == "linear":
        la = model.linear_attention
        assert la is not None  # held by ModelSpec
        key, value = 2 * la.num_key_heads * la.key_head_dim / t["tp"], la.num_value_heads * la.value_head_dim / t["tp"]
        state = la.num_value_heads / t["tp"] * la.key_head_dim * la.value_head_dim / 64  # one fp32 state per chunk
        return e * tokens * value + 4 * tokens * state, e * tokens * (2 * (key + value) + 2 * value), np.zeros(())
    heads = model.num_heads / t["tp"]
    if model.mla is not None:
        mla = model.mla
        qk, v = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim
        latent = (mla.q_lora_rank or 0) + mla.kv_lora_rank
        low_rank = _norm_bytes(s, tokens, latent) + e * tokens * latent
        return STATISTIC_BYTES * tokens * heads + e * tokens * heads * v, e * tokens * heads * (2 * qk + v), low_rank
    q = heads * model.head_dim
    kv = np.maximum(model.num_kv_heads / t["tp"], 1) * model.head_dim
    head_norms = np.zeros(())
    if model.qk_norm:
        head_norms = _norm_bytes(s, tokens, q, heads) + _norm_bytes(s, tokens, kv, kv / model.head_dim)
    masked = bool(s.job.workload.length_histogram) & s.table["packing"] & s.stack.masks_documents
    # A mask repeats the key-value heads for every query head and is kept as numbers of the compute type, per layer.
    keys = np.where(masked, 2 * q, 2 * kv)
    mask = np.where(masked, e * tokens * s.job.workload.seq_len, 0)
    scores = np.where(t.chosen("attention", "eager"), 2 * e * tokens * s.job.workload.seq_len * heads, 0)
    core = STATISTIC_BYTES * tokens * heads + scores
    return core, e * tokens * (q + keys + q) + mask, head_norms


def _operator_policy_bytes(s: Shapes, kind: LayerKind) -> Column:
    """Torchtitan's operator policy keeps attention's output and every second matrix product's."""
    model, t = s.job.model, s.table
    q, kv = model.num_heads * model.head_dim / t["tp"], 2 * model.num_kv_heads * model.head_dim / t["tp"]
    f = np.asarray((model.ffn_hidden_size if kind[1] == "dense" else _expert_width(s)) or 0) / t["tp"]
    products = q + kv + 2 * f + 2 * model.hidden_size
    return np.asarray(s.element_bytes * s.tokens * (q + products / 2))


def _expert_width(s: Shapes) -> int:
    moe = s.job.model.moe
    return moe.ffn_hidden_size * moe.top_k + moe.shared_ffn_hidden_size if moe else 0
