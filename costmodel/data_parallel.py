"""Seconds of data-parallel traffic: gathering a unit's parameters and reducing its gradients, by how they are split."""

from __future__ import annotations

import numpy as np

from trainplan.costmodel.collectives import Group, all_gather_s, all_reduce_s, group, reduce_scatter_s
from trainplan.costmodel.lora import adapter_parameters
from trainplan.costmodel.model import AttentionKind, MlpKind
from trainplan.costmodel.rates import Rates
from trainplan.costmodel.work import Column, Shapes


class DataParallel:
    """The groups that share parameters under each strategy of a table, and what they cost per unit."""

    def __init__(self, shapes: Shapes, rates: Rates) -> None:
        self.shapes, self.rates, t = shapes, rates, shapes.table
        self.t = t
        stride = t["tp"] * np.where(t.chosen("rank_order", "tp-cp-pp-dp"), t["pp"], 1)
        sharded = ~t.chosen("sharding", "none")
        shard = np.where(sharded, t["dp_shard"] * t["cp"], 1)
        replicas = t.dp * t["cp"] // shard
        self.shards = group(shard, stride, rates)
        self.replicas = group(replicas, stride * shard, rates)
        owners = t["ep"] * t["etp"]
        expert_ranks = np.where(sharded, np.maximum(t["tp"] * t["cp"] * t["dp_shard"] // owners, 1), 1)
        self.expert_shards = group(expert_ranks, owners, rates)
        copies = np.maximum(t["tp"] * t["cp"] * t.dp // owners // expert_ranks, 1)
        self.expert_replicas = Group(copies, np.minimum(self.replicas.local, copies))

    def layer(self, attention: AttentionKind, mlp: MlpKind) -> tuple[Column, Column]:
        """(gather, reduce) seconds of a decoder layer."""
        job, t = self.shapes.job, self.t
        model, lora = job.model, job.workload.lora
        routed = model.expert_parameters() * model.moe.num_experts if model.moe and mlp == "moe" else 0
        dense = model.layer_parameters(attention, mlp) - routed
        trained = None if lora is None else adapter_parameters(model, lora, attention, mlp) / t["tp"]
        return self._seconds(dense / t["tp"], routed / (t["ep"] * t["etp"]), trained)

    def edge(self, table: int, whole: int = 0) -> tuple[Column, Column]:
        """(gather, reduce) seconds of an embedding ``table`` that tp splits and ``whole`` parameters of each rank."""
        frozen = None if self.shapes.job.workload.lora is None else np.zeros(())
        return self._seconds(table / self.t["tp"] + whole, np.zeros(()), frozen)

    def _seconds(self, dense: Column, routed: Column, trained: Column | None) -> tuple[Column, Column]:
        """(gather, reduce) of a unit with ``dense`` and ``routed`` parameters on this tp rank.

        Gather: the compute copy over the shard group, frozen weights too. Reduce: reduce-scatter over the shard group
        and all-reduce of the own shard over the replicas; of the ``trained`` parameters only, where they are fewer.
        """
        width = np.select([self.t.chosen("reduce_dtype", "fp32"), self.t.chosen("reduce_dtype", "bf16")], [4, 2], 1)
        e, algo = self.shapes.element_bytes, self.t["collective_algo"]
        # FSDP2 scatters gradients of every micro-batch where they are sharded, and sums over replicas at the end.
        every = self.t.at_least("sharding", "gradients")
        once = np.where(every & self.shapes.stack.fsdp2, 1 / self.t["grad_accum"], 1.0)
        gather, reduce = np.zeros(()), np.zeros(())
        for count, learns, shard, replica in (
            (dense, dense if trained is None else trained, self.shards, self.replicas),
            (routed, routed if trained is None else np.zeros(()), self.expert_shards, self.expert_replicas),
        ):
            if np.any(count):
                gather = gather + all_gather_s(count * e, shard, self.rates)
            if np.any(learns):
                reduce = reduce + reduce_scatter_s(learns * width, shard, self.rates)
                reduce = reduce + once * all_reduce_s(learns * width / shard.n, replica, self.rates, algo)
        return gather, reduce
