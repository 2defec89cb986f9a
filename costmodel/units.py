"""Seconds of the parts a step is made of: each kind of layer, the embedding and the head, per micro-batch and rank.

A unit is also what FSDP gathers and reduces at a time. All columns broadcast: one row per strategy, with a leading
axis of draws where the rates have one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainplan.costmodel.collectives import all_gather_s, all_reduce_s, all_to_all_s, group, p2p_s, reduce_scatter_s
from trainplan.costmodel.data_parallel import DataParallel
from trainplan.costmodel.job import Job
from trainplan.costmodel.kernel_seconds import KernelSeconds
from trainplan.costmodel.model import AttentionKind, MlpKind
from trainplan.costmodel.rates import Rates
from trainplan.costmodel.stacks import Stack
from trainplan.costmodel.strategy import CHOICES, StrategyTable
from trainplan.costmodel.work import PHASES, Shapes, Work, embedding_work, head_work, layer_work

Column = np.ndarray
LayerKind = tuple[AttentionKind, MlpKind]
RECOMPUTED_PARTS = {"core_attn": "core_attn", "layernorm": "layernorm", "mlp": "mlp"}
TP_CHUNKS = 4
"""Pieces that an overlapped tensor-parallel collective is cut into; the first is always exposed (as userbuffers do)."""


@dataclass(frozen=True)
class Unit:
    """Seconds of one layer (or the embedding or head): computation, inline communication, and its FSDP traffic.

    ``inline``: name -> (forward, backward) seconds of communication that stands between its operations.
    """

    forward: Column
    input_grad: Column
    weight_grad: Column
    recompute: Column
    inline: dict[str, tuple[Column, Column]]
    gather: Column
    reduce: Column

    @property
    def inline_forward(self) -> Column:
        return np.asarray(sum((forward for forward, _ in self.inline.values()), start=np.zeros(())))

    @property
    def inline_backward(self) -> Column:
        return np.asarray(sum((backward for _, backward in self.inline.values()), start=np.zeros(())))


@dataclass(frozen=True)
class Units:
    """All units of a job under each strategy of a table, plus what happens once per boundary and once per step.

    ``step_host_s``: what a rank does once a step and nothing hides. ``overlaps_gather``, ``overlaps_reduce``: whether
    data-parallel communication runs beside computation, which it then slows by ``contention``.
    """

    layers: dict[LayerKind, Unit]
    embedding: Unit
    head: Unit
    send: Column
    optimizer_per_parameter: Column
    step_host_s: Column
    overlaps_gather: Column
    overlaps_reduce: Column
    contention: Column

    def take(self, shape: tuple[int, ...], flat: np.ndarray) -> Units:
        """The units at flat indices of a grid of ``shape``."""
        where = np.unravel_index(flat, shape)

        def rows(column: Column) -> Column:
            return column if column.ndim == 0 else np.broadcast_to(column, shape)[where]

        def unit(of: Unit) -> Unit:
            inline = {name: (rows(forward), rows(backward)) for name, (forward, backward) in of.inline.items()}
            return Unit(
                rows(of.forward), rows(of.input_grad), rows(of.weight_grad), rows(of.recompute), inline,
                rows(of.gather), rows(of.reduce),
            )  # fmt: skip

        layers = {kind: unit(of) for kind, of in self.layers.items()}
        names = (
            "send", "optimizer_per_parameter", "step_host_s", "overlaps_gather", "overlaps_reduce", "contention",
        )  # fmt: skip
        return Units(layers, unit(self.embedding), unit(self.head), *(rows(getattr(self, name)) for name in names))


@dataclass(frozen=True)
class ComputedUnits:
    """Computation and inline communication of every unit."""

    layers: dict[LayerKind, Computed]
    embedding: Computed
    head: Computed


def computed_units(job: Job, stack: Stack, table: StrategyTable, rates: Rates) -> ComputedUnits:
    """What the units take that depends on `COMPUTE_FIELDS` alone."""
    pricer = _Pricer(Shapes(job, table, stack), rates)
    kinds = dict.fromkeys(job.model.layer_kinds())
    return ComputedUnits({kind: pricer.layer(kind) for kind in kinds}, pricer.embedding(), pricer.head())


def unit_seconds(job: Job, stack: Stack, table: StrategyTable, rates: Rates) -> Units:
    """Price every unit of ``job``; shapes broadcast as ``[draws, rows]``."""
    few, back = distinct(table)

    def spread(column: Column) -> Column:
        return column if back is None or column.ndim == 0 or column.shape[-1] == 1 else column[..., back]

    computed, shared = computed_units(job, stack, few, rates), shared_units(job, stack, table, rates)
    return joined_units(job, stack, table, rates, computed, shared, spread)


@dataclass(frozen=True)
class SharedUnits:
    """(gather, reduce) seconds of the data-parallel traffic of every unit."""

    layers: dict[LayerKind, tuple[Column, Column]]
    embedding: tuple[Column, Column]
    head: tuple[Column, Column]


def shared_units(job: Job, stack: Stack, table: StrategyTable, rates: Rates) -> SharedUnits:
    """What the units take that depends on who shares their parameters, and when."""
    model, shared = job.model, DataParallel(Shapes(job, table, stack), rates)
    rows = model.vocab_size * model.hidden_size
    head_rows = 0 if model.tie_word_embeddings else rows
    return SharedUnits(
        {kind: shared.layer(*kind) for kind in dict.fromkeys(model.layer_kinds())},
        shared.edge(rows),
        shared.edge(head_rows, model.final_norm_parameters()),
    )


def joined_units(
    job: Job, stack: Stack, table: StrategyTable, rates: Rates, computed: ComputedUnits, shared: SharedUnits,
    spread: Callable[[Column], Column],
) -> Units:  # fmt: skip
    """The units of ``table``: what was computed for distinct rows, and each row's own traffic between ranks.

    Args:
        job: Model, cluster and workload.
        stack: The software.
        table: The strategies.
        rates: The rates that both parts have.
        computed: From `computed_units`.
        shared: From `shared_units`; broadcasts against ``table``.
        spread: Turns a computed column of distinct rows into one that broadcasts against ``table``.
    """
    model, shapes = job.model, Shapes(job, table, stack)
    sent = shapes.norm_tokens * model.hidden_size * shapes.element_bytes
    return Units(
        layers={kind: _unit(of, spread, shared.layers[kind]) for kind, of in computed.layers.items()},
        embedding=_unit(computed.embedding, spread, shared.embedding),
        head=_unit(computed.head, spread, shared.head),
        send=np.where(table["pp"] > 1, p2p_s(sent, _pipeline_span(table), rates), 0.0),
        optimizer_per_parameter=np.asarray(stack.optimizer_traffic_bytes / np.asarray(rates.memory))
        + _offload_s(table, rates),
        step_host_s=np.asarray((stack.step_host_s + stack.shard_broadcast_s * _shards(table)) * rates.step),
        overlaps_gather=table["overlap_param_gather"],
        overlaps_reduce=table["overlap_grad_reduce"],
        contention=np.asarray(rates.contention),
    )


COMPUTE_FIELDS = (
    "tp", "sp", "cp", "cp_method", "ep", "etp", "micro_batch_size", "token_budget", "precision", "attention", "compile",
    "fused_kernels", "loss_chunk", "packing", "recompute", "recompute_modules", "overlap_tp", "collective_algo",
)  # fmt: skip
"""What the computation and inline communication of a unit depend on."""
WORTHWHILE = 64
"""Rows from which it pays to look for equal ones."""


def distinct(table: StrategyTable) -> tuple[StrategyTable, Column | None]:
    """(strategies whose units differ, where each row of ``table`` finds its own); None: all rows are kept."""
    if len(table.shape) != 1 or table.size < WORTHWHILE:
        return table, None
    code = np.zeros(table.size, dtype=np.int64)
    for name in COMPUTE_FIELDS:
        column = table[name]
        if column.ndim:
            values, place = np.unique(column, return_inverse=True)
            code = code * len(values) + place
    _, first, back = np.unique(code, return_index=True, return_inverse=True)
    return (table, None) if 2 * len(first) > table.size else (table.take(first), back)


def _unit(of: Computed, spread: Callable[[Column], Column], shared: tuple[Column, Column]) -> Unit:
    """A unit of every row, from those of distinct rows and each row's data-parallel traffic."""
    inline = {name: (spread(forward), spread(backward)) for name, (forward, backward) in of.inline.items()}
    return Unit(
        spread(of.forward), spread(of.input_grad), spread(of.weight_grad), spread(of.recompute), inline, *shared
    )


def _pipeline_span(t: StrategyTable) -> Column:
    outermost = t.chosen("rank_order", "tp-cp-dp-pp")
    return np.asarray(t["pp"] * t["tp"] * t["cp"] * np.where(outermost, t.dp, 1))


def _shards(t: StrategyTable) -> Column:
    """Ranks that the optimizer's state is split over; 0 where it is whole."""
    return np.where(t.chosen("sharding", "none"), 0, t["dp_shard"])


def _offload_s(t: StrategyTable, rates: Rates) -> Column:
    """Seconds per parameter to bring a gradient to the host and the updated weight back."""
    return np.where(t["optimizer_offload"], (4 + 2) / np.asarray(rates.host_link), 0.0)


@dataclass(frozen=True)
class Computed:
    """A `Unit` without its data-parallel traffic."""

    forward: Column
    input_grad: Column
    weight_grad: Column
    recompute: Column
    inline: dict[str, tuple[Column, Column]]


class _Pricer:
    """Turns work into seconds for the strategies of one table."""

    def __init__(self, shapes: Shapes, rates: Rates) -> None:
        self.shapes, self.rates, self.t = shapes, rates, shapes.table
        self.kernels = KernelSeconds(shapes, rates)
        self.tp_group = group(self.t["tp"], np.ones((), dtype=int), rates)
        self.cp_group = group(self.t["cp"], self.t["tp"], rates)
        self.ep_group = group(self.t["ep"], self.t["etp"], rates)

    def layer(self, kind: LayerKind) -> Computed:
        work = layer_work(self.shapes, *kind)
        forward, input_grad, weight_grad = (self.kernels.total(work, phase) for phase in PHASES)
        tensor = self._tensor_parallel_s(forward)
        context = self._context_parallel_s(kind, work)
        experts = self._expert_parallel_s() if kind[1] == "moe" else np.zeros(())
        # sp gathers the saved inputs once more for the weight gradients.
        tensor_backward = tensor * np.where(self.t["sp"], 1.5, 1.0)
        inline = {
            "tensor_parallel": (tensor, tensor_backward),
            "context_parallel": context,
            "expert_parallel": (experts, experts),
        }
        recompute = self._recompute_s(work, forward, tensor, context[0] + experts)
        return Computed(forward, input_grad, weight_grad, recompute, inline)

    def embedding(self) -> Computed:
        """The look-up; its partial rows are summed over tp in forward."""
        computed, summed = self._edge(embedding_work(self.shapes))
        return replace(computed, inline={"tensor_parallel": (summed, np.zeros(()))})

    def head(self) -> Computed:
        """Final norm, projection and loss; the gradients of their input are summed over tp in backward."""
        computed, summed = self._edge(head_work(self.shapes))
        forward = computed.forward + self.shapes.stack.micro_batch_host_s * self.rates.host
        return replace(computed, forward=forward, inline={"tensor_parallel": (np.zeros(()), summed)})

    def _edge(self, work: Sequence[Work]) -> tuple[Computed, Column]:
        """(computation, seconds of an all-reduce of the hidden states over tp)."""
        forward, input_grad, weight_grad = (self.kernels.total(work, phase) for phase in PHASES)
        message = self.shapes.tokens * self.shapes.job.model.hidden_size * self.shapes.element_bytes
        inline = np.where(self.t["tp"] > 1, all_reduce_s(message, self.tp_group, self.rates), 0.0)
        return Computed(forward, input_grad, weight_grad, np.zeros(()), {}), inline

    def _tensor_parallel_s(self, forward: Column) -> Column:
        """Two all-reduces of the activations per pass; with sp two all-gathers and two reduce-scatters instead.

        Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2. Overlapped with the neighbouring products,
        what they don't cover and the first of `TP_CHUNKS` pieces remain.
        """
        message = self.shapes.tokens * self.shapes.job.model.hidden_size * self.shapes.element_bytes
        plain = 2 * all_reduce_s(message, self.tp_group, self.rates, self.t["collective_algo"])
        one = all_gather_s(message, self.tp_group, self.rates)
        split = 2 * (one + reduce_scatter_s(message, self.tp_group, self.rates))
        inline = np.where(self.t["sp"], split, plain)
        hidden = np.maximum(inline / TP_CHUNKS, inline - forward)
        return np.where(self.t["tp"] > 1, np.where(self.t["overlap_tp"], hidden, inline), 0.0)

    def _context_parallel_s(self, kind: LayerKind, work: Sequence[Work]) -> tuple[Column, Column]:
        """Exposed seconds forward and backward.

        ring: cp - 1 exchanges of keys and values beside attention, twice the bytes backward. ulysses: all-to-alls of q,
        k, v and the output, inline.
        """
        model, e = self.shapes.job.model, self.shapes.element_bytes
        if kind[0] == "linear":
            return np.zeros(()), np.zeros(())
        heads, kv = (n * model.head_dim / self.t["tp"] for n in (model.num_heads, max(model.num_kv_heads, 1)))
        steps = self.t["cp"] - 1
        hop = p2p_s(self.shapes.tokens * 2 * kv * e, self.t["cp"] * self.t["tp"], self.rates)
        core = [self.kernels.total([w for w in work if w.part == "core_attn"], phase) for phase in PHASES[:2]]
        ring = [
            np.maximum(0.0, steps * hop * n - c * steps / np.maximum(self.t["cp"], 1))
            for n, c in zip((1, 2), core, strict=True)
        ]
        swap = all_to_all_s(self.shapes.tokens * e * (2 * heads + 2 * kv), self.cp_group, self.rates)
        ulysses = self.t.chosen("cp_method", "ulysses")
        forward, backward = (np.where(self.t["cp"] > 1, np.where(ulysses, swap, r), 0.0) for r in ring)
        return forward, backward

    def _expert_parallel_s(self) -> Column:
        """Dispatch and combine: two all-to-alls of the routed tokens, inline, forward and again backward."""
        model = self.shapes.job.model
        if model.moe is None:
            return np.zeros(())
        k, domains = model.moe.top_k, self.ep_group.domains
        share: Column | float = 1.0
        if self.shapes.stack.sends_once_per_domain:
            share = domains * (1 - (1 - 1 / domains) ** k) / k  # domains that k random experts lie in, per expert
        sent = self.shapes.norm_tokens * k * model.hidden_size * self.shapes.element_bytes
        return 2 * all_to_all_s(sent * self.shapes.job.workload.routing_imbalance, self.ep_group, self.rates, share)

    def _recompute_s(self, work: Sequence[Work], forward: Column, tensor: Column, comm: Column) -> Column:
        """Seconds of the second forward of a recomputed layer: all of it, or the named parts.

        A checkpoint that stops early skips the layer's last product and, under tp, the all-reduce behind it.
        """
        if self.shapes.stack.stops_early:
            last = [w for w in work if w.unit == "matmul" and w.name.endswith("_down")]
            forward, tensor = forward - self.kernels.total(last, "forward"), tensor / 2
        parts = {part: self.kernels.total([w for w in work if w.part == part], "forward") for part in RECOMPUTED_PARTS}
        named = sum(
            (self.t.mapped("recompute_modules", lambda v, p=part: p in v) * s for part, s in parts.items()),
            start=np.zeros(()),
        )
        matmuls = self.kernels.total([w for w in work if w.unit == "matmul"], "forward")
        pointwise = self.kernels.total([w for w in work if w.unit == "memory"], "forward")
        named = named + self.t.mapped("recompute_modules", lambda v: "ops" in v) * (matmuls / 2 + pointwise)
        code = CHOICES["recompute"].index
        return np.select(
            [self.t["recompute"] == code("full"), self.t["recompute"] == code("selective")],
            [forward + tensor + comm, named],
            np.zeros(()),
        )
