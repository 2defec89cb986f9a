"""Seconds of the parts a step is made of: each kind of layer, the embedding and the head, per micro-batch and rank.

A unit is also what FSDP gathers and reduces at a time. All columns broadcast: one row per strategy, with a leading
axis of draws where the rates have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainplan.costmodel.collectives import (
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    group,
    p2p_s,
    reduce_scatter_s,
)
from trainplan.costmodel.job import Job
from trainplan.costmodel.kernel_seconds import KernelSeconds
from trainplan.costmodel.lora import adapter_parameters
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


def unit_seconds(job: Job, stack: Stack, table: StrategyTable, rates: Rates) -> Units:
    """Price every unit of ``job``; shapes broadcast as ``[draws, rows]``."""
    shapes = Shapes(job, table, stack)
    pricer = _Pricer(shapes, rates)
    kinds = dict.fromkeys(job.model.layer_kinds())
    h, e = job.model.hidden_size, shapes.element_bytes
    sent = shapes.norm_tokens * h * e
    return Units(
        layers={kind: pricer.layer(kind) for kind in kinds},
        embedding=pricer.embedding(),
        head=pricer.head(),
        send=np.where(table["pp"] > 1, p2p_s(sent, _pipeline_span(table), rates), 0.0),
        optimizer_per_parameter=np.asarray(stack.optimizer_traffic_bytes / np.asarray(rates.memory))
        + _offload_s(table, rates),
        step_host_s=np.asarray((stack.step_host_s + stack.shard_broadcast_s * _shards(table)) * rates.step),
        overlaps_gather=table["overlap_param_gather"],
        overlaps_reduce=table["overlap_grad_reduce"],
        contention=np.asarray(rates.contention),
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


class _Pricer:
    """Turns work into seconds for the strategies of one table."""

    def __init__(self, shapes: Shapes, rates: Rates) -> None:
        self.shapes, self.rates, self.t = shapes, rates, shapes.table
        self.kernels = KernelSeconds(shapes, rates)
        stride = self.t["tp"] * np.where(self.t.chosen("rank_order", "tp-cp-pp-dp"), self.t["pp"], 1)
        sharded = ~self.t.chosen("sharding", "none")
        shard = np.where(sharded, self.t["dp_shard"] * self.t["cp"], 1)
        replicas = self.t.dp * self.t["cp"] // shard
        self.tp_group = group(self.t["tp"], np.ones((), dtype=int), rates)
        self.cp_group = group(self.t["cp"], self.t["tp"], rates)
        self.ep_group = group(self.t["ep"], self.t["etp"], rates)
        self.shard_group = group(shard, stride, rates)
        self.replica_group = group(replicas, stride * shard, rates)
        expert_ranks = np.maximum(self.t["tp"] * self.t["cp"] * self.t["dp_shard"] // (self.t["ep"] * self.t["etp"]), 1)
        self.expert_shard_group = group(np.where(sharded, expert_ranks, 1), self.t["ep"] * self.t["etp"], rates)
        self.expert_replicas = np.maximum(
            self.t["tp"]
            * self.t["cp"]
            * self.t.dp
            // (self.t["ep"] * self.t["etp"])
            // np.where(sharded, expert_ranks, 1),
            1,
        )

    def layer(self, kind: LayerKind) -> Unit:
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
        model = self.shapes.job.model
        routed = model.expert_parameters() * model.moe.num_experts if model.moe and kind[1] == "moe" else 0
        dense = model.layer_parameters(*kind) - routed
        experts_here = routed / (self.t["ep"] * self.t["etp"])
        lora = self.shapes.job.workload.lora
        trained = None if lora is None else adapter_parameters(model, lora, *kind) / self.t["tp"]
        gather, reduce = self._data_parallel_s(dense / self.t["tp"], experts_here, trained)
        return Unit(forward, input_grad, weight_grad, recompute, inline, gather, reduce)

    def embedding(self) -> Unit:
        model = self.shapes.job.model
        return self._edge(embedding_work(self.shapes), model.vocab_size * model.hidden_size)

    def head(self) -> Unit:
        model = self.shapes.job.model
        table = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
        return self._edge(head_work(self.shapes), table, model.final_norm_parameters())

    def _edge(self, work: Sequence[Work], table: int, norm: int = 0) -> Unit:
        forward, input_grad, weight_grad = (self.kernels.total(work, phase) for phase in PHASES)
        frozen = None if self.shapes.job.workload.lora is None else np.zeros(())
        gather, reduce = self._data_parallel_s(table / self.t["tp"] + norm, np.zeros(()), frozen)
        message = self.shapes.tokens * self.shapes.job.model.hidden_size * self.shapes.element_bytes
        inline = np.where(self.t["tp"] > 1, all_reduce_s(message, self.tp_group, self.rates), 0.0)
        zero = np.zeros(())
        if work[0].name != "embedding":
            forward = forward + self.shapes.stack.micro_batch_host_s * self.rates.host
        # The look-up's partial rows are summed in forward; the head's input gradients in backward.
        summed = (inline, zero) if work[0].name == "embedding" else (zero, inline)
        return Unit(forward, input_grad, weight_grad, zero, {"tensor_parallel": summed}, gather, reduce)

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

    def _data_parallel_s(self, dense: Column, routed: Column, trained: Column | None = None) -> tuple[Column, Column]:
        """(gather, reduce) seconds of a unit with ``dense`` and ``routed`` parameters on this tp rank.

        Gather: the compute copy over the shard group, frozen weights too. Reduce: reduce-scatter over the shard group
        and all-reduce of the own shard over the replicas; of the ``trained`` parameters only, where they are fewer.
        """
        width = np.select([self.t.chosen("reduce_dtype", "fp32"), self.t.chosen("reduce_dtype", "bf16")], [4, 2], 1)
        e, algo = self.shapes.element_bytes, self.t["collective_algo"]
        expert_replica = Group(self.expert_replicas, np.minimum(self.replica_group.local, self.expert_replicas))
        # FSDP2 scatters gradients of every micro-batch where they are sharded, and sums over replicas at the end.
        every = self.t.at_least("sharding", "gradients")
        once = np.where(every & self.shapes.stack.fsdp2, 1 / self.t["grad_accum"], 1.0)
        gather, reduce = np.zeros(()), np.zeros(())
        for count, learns, shard, replica in (
            (dense, dense if trained is None else trained, self.shard_group, self.replica_group),
            (routed, routed if trained is None else np.zeros(()), self.expert_shard_group, expert_replica),
        ):
            if np.any(count):
                gather = gather + all_gather_s(count * e, shard, self.rates)
            if np.any(learns):
                reduce = reduce + reduce_scatter_s(learns * width, shard, self.rates)
                reduce = reduce + once * all_reduce_s(learns * width / shard.n, replica, self.rates, algo)
        return gather, reduce
