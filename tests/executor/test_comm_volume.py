"""Bytes of a step's collectives: counted as torch issues them, as the cost model counts them, and as it charges them.

A child process (this file run as a script) plays the executor's own step on a fake process group, rank 0 of the world,
and sums the sizes of what every collective is given.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.durations import durations
from trainplan.costmodel.graph import Work
from trainplan.costmodel.job import Job
from trainplan.costmodel.layout import layout
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.rates import LinkRates, Rates
from trainplan.costmodel.stacks import STACKS
from trainplan.costmodel.strategy import Strategy, StrategyTable
from trainplan.costmodel.units import unit_seconds
from trainplan.costmodel.volume import Volume, data_parallel_volume
from trainplan.costmodel.workload import Workload

SEQ_LEN, VOCAB, HIDDEN = 16, 96, 32


def model(tied: bool) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        family="qwen3",
        num_layers=3,
        hidden_size=HIDDEN,
        ffn_hidden_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        max_position_embeddings=SEQ_LEN,
        qk_norm=True,
        tie_word_embeddings=tied,
    )


LEVELS: dict[str, dict[str, Any]] = {
    "alone, fp32": {"precision": "fp32"},
    "alone, bf16": {},
    "none": {"dp_replicate": 2},
    "optimizer": {"dp_shard": 2, "sharding": "optimizer"},
    "gradients": {"dp_shard": 2, "sharding": "gradients"},
    "parameters": {"dp_shard": 2, "sharding": "parameters"},
    "parameters, fp32": {"dp_shard": 2, "sharding": "parameters", "precision": "fp32"},
    "parameters, reduced in bf16": {"dp_shard": 4, "sharding": "parameters", "reduce_dtype": "bf16"},
    "freed": {"dp_shard": 4, "sharding": "parameters", "reshard_after_forward": True},
    "freed, recomputed": {
        **{"dp_shard": 4, "sharding": "parameters", "reshard_after_forward": True, "recompute": "full"}
    },
    "freed, two ahead": {"dp_shard": 4, "sharding": "parameters", "reshard_after_forward": True, "prefetch_units": 2},
    "hsdp, optimizer": {"dp_replicate": 2, "dp_shard": 2, "sharding": "optimizer"},
    "hsdp, gradients": {"dp_replicate": 2, "dp_shard": 2, "sharding": "gradients"},
    "hsdp, freed": {"dp_replicate": 2, "dp_shard": 2, "sharding": "parameters", "reshard_after_forward": True},
}
CASES = {
    f"{name}, m={m}, {'tied' if tied else 'untied'}": (
        model(tied),
        Strategy(**{"micro_batch_size": 2, **values, "grad_accum": m}),
    )
    for name, values in LEVELS.items()
    for m, tied in ((1, True), (2, False))
}


@pytest.fixture(scope="module")
def issued() -> dict[str, dict[str, int]]:
    """Collective -> bytes, by case."""
    cases = [
        {"model": spec.model_dump(mode="json"), "strategy": strategy.model_dump(mode="json")}
        for spec, strategy in CASES.values()
    ]
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_counted_bytes_are_what_torch_issues(name: str, issued: dict[str, dict[str, int]]) -> None:
    spec, strategy = CASES[name]
    counted, seen = data_parallel_volume(spec, strategy), issued[name]
    assert counted == Volume(seen.get("gathered", 0), seen.get("scattered", 0), seen.get("replicated", 0))


@pytest.mark.parametrize("name", CASES)
def test_the_rest_of_a_step_is_a_few_numbers(name: str, issued: dict[str, dict[str, int]]) -> None:
    """Ranks agree on tokens, loss tokens and a signal each (8 bytes), then on the loss and the gradient norm (4)."""
    _, strategy = CASES[name]
    assert issued[name]["small"] <= 8 * (2 + strategy.world_size) + 4 + 2 * 4


def one_byte_per_second(all_reduce: float) -> Rates:
    """A cluster that computes in no time and whose links take a second per byte of a bus; all-reduces may differ."""
    link = LinkRates(all_reduce=all_reduce, all_gather=1.0, all_to_all=1.0, p2p=1.0, latency=0.0)
    fast: Any = {"bf16": 1e30, "fp32": 1e30}
    return Rates(
        matmul=fast,
        attention=fast,
        memory=1e30,
        op_overhead=0.0,
        host_link=1e30,
        scale_up=link,
        scale_out=link,
        scale_up_domain=8,
        sequential_issue=False,
        weakest="measured",
    )


def charged_seconds(spec: ModelSpec, strategy: Strategy, all_reduce: float) -> tuple[float, float]:
    """(gathers, reductions) of one step: what each node of the graph takes, times how often it is there."""
    workload = Workload(seq_len=SEQ_LEN, global_batch_size=strategy.global_batch_size, precision=strategy.precision)
    job, stack = Job(spec, load_cluster("8xH100"), workload), STACKS["native"]
    place = layout(job, strategy)
    table = StrategyTable.from_strategies([strategy])
    units = unit_seconds(job, stack, table, one_byte_per_second(all_reduce))
    work = durations(strategy, stack, place, units, [np.zeros(())])
    kinds = np.repeat([int(kind) for kind in work.graph.classes.kinds], work.graph.classes.num_units)
    nodes = np.broadcast_to(work.graph.classes.durations(work.seconds), (1, len(kinds)))[0] * work.graph.node_counts[0]
    gathers = np.isin(kinds, (Work.GATHER, Work.GATHER_FORWARD, Work.GATHER_BACKWARD))
    return float(nodes[gathers].sum()), float(nodes[kinds == Work.REDUCE].sum())


@pytest.mark.parametrize("name", CASES)
def test_charged_seconds_are_the_counted_bytes(name: str) -> None:
    """At one byte per second: S (n - 1) / n for a gather or scatter over n, 2 S (r - 1) / r over r replicas."""
    spec, strategy = CASES[name]
    counted = data_parallel_volume(spec, strategy)
    n, r = strategy.dp_shard, strategy.dp_replicate
    gathers, both = charged_seconds(spec, strategy, 1.0)
    _, scatters = charged_seconds(spec, strategy, 1e30)
    assert gathers == pytest.approx(counted.gathered * (n - 1) / n)
    assert scatters == pytest.approx(counted.scattered * (n - 1) / n)
    assert both - scatters == pytest.approx(counted.replicated * 2 * (r - 1) / r)


def play(spec: ModelSpec, strategy: Strategy) -> dict[str, int]:
    """Bytes by collective of one step of `trainplan.executor.train`, on rank 0 of a fake process group."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode

    from trainplan.executor import train
    from trainplan.executor.data import MicroBatch, StepShare
    from trainplan.executor.mesh import build_mesh
    from trainplan.executor.optimizer import build_optimizer
    from trainplan.executor.options import RunOptions

    seen: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # its local operations come back here
            namespace, _, operation = func._schema.name.partition("::")
            if namespace in ("c10d", "_c10d_functional") and "wait" not in operation:
                tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
                sizes = [x.numel() * x.element_size() for x in tensors]
                if max(sizes) <= 8 * (2 + strategy.world_size):
                    seen["small"] += max(sizes)
                else:
                    kind = {
                        "_allgather_base_": "gathered",
                        "_reduce_scatter_base_": "scattered",
                        "allreduce_": "replicated",
                    }.get(operation, operation)
                    seen[kind] += max(sizes)  # of a gather its output, of a scatter its input
            return func(*args, **(kwargs or {}))

    class Rows:
        """Rows of zeros in the place of a corpus."""

        def share(self, step: int, *, dp_rank: int, dp: int, grad_accum: int) -> StepShare:
            zeros = torch.zeros(strategy.micro_batch_size, SEQ_LEN, dtype=torch.int64)
            tokens = zeros.numel() * grad_accum
            return StepShare([MicroBatch(zeros, zeros, None, None)] * grad_accum, tokens, tokens)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=strategy.world_size)
    device = torch.device("cpu")
    options = RunOptions(model_dir=Path("m"), data=Path("d"), output_dir=Path("o"), steps=1, init="random")
    mesh = build_mesh(strategy, "cpu")
    net, policy = train.build(spec, strategy, mesh, device, options)
    optimizer = build_optimizer(net.parameters(), options, "cpu")
    rows: Any = Rows()
    ready = train._Ready(net, optimizer, policy, mesh, rows, device)
    workload = Workload(seq_len=SEQ_LEN, global_batch_size=strategy.global_batch_size, precision=strategy.precision)
    with Counting():
        train._step(train.Job(spec, workload, strategy, options), ready, 0, 0)
    dist.destroy_process_group()
    return dict(seen)


if __name__ == "__main__":
    print(json.dumps([play(ModelSpec(**case["model"]), Strategy(**case["strategy"])) for case in json.load(sys.stdin)]))
