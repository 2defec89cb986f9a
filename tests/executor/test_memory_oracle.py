"""Memory of the cost model against torch's memory trackers, on the model and the step that the executor runs.

Under fake tensors nothing is computed, but every tensor is made and freed as in a real step, so that the tracker's peak
is exact. One child process per half of the cases plays them (this file run as a script: a fake process group can't
live beside a real one) and prints what the tracker saw in a step with optimizer state.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.job import Job
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.step import price
from trainplan.costmodel.strategy import Strategy, StrategyTable
from trainplan.costmodel.workload import Workload

SEQ_LEN = 256
TOLERANCE = 0.001
"""Left out: scalars, gradients of norm weights and biases, AdamW's step counters. The largest deviation is 0.03 %."""


def model(**changes: Any) -> ModelSpec:
    """About 0.6 million parameters, and 1.1 MB of activations per layer and sequence in bf16."""
    values: dict[str, Any] = {
        "name": "tiny",
        "family": "qwen3",
        "num_layers": 3,
        "hidden_size": 128,
        "ffn_hidden_size": 352,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 2048,
        "max_position_embeddings": SEQ_LEN,
        "qk_norm": True,
        "tie_word_embeddings": True,
    }
    return ModelSpec(**{**values, **changes})


@dataclass(frozen=True)
class Case:
    """What is tracked. ``documents`` per row; 0 = rows without packing. ``optimizer``: of this device."""

    name: str
    spec: ModelSpec
    strategy: Strategy
    documents: int = 0
    optimizer: str = "cuda"

    def as_json(self) -> dict[str, Any]:
        return {
            "spec": self.spec.model_dump(mode="json"),
            "strategy": self.strategy.model_dump(mode="json"),
            "documents": self.documents,
            "optimizer": self.optimizer,
        }


FEW = {"vocab_size": 64}  # so few logits that the peak is not at the loss
BOTH = ("fp32", "bf16")
FULL: dict[str, Any] = {"recompute": "full"}
ZERO3: dict[str, Any] = {"dp_shard": 4, "sharding": "parameters"}
FREED: dict[str, Any] = {**ZERO3, "reshard_after_forward": True}
LEVELS: dict[str, dict[str, Any]] = {
    "none": {"dp_replicate": 2},
    "optimizer": {"dp_shard": 4, "sharding": "optimizer"},
    "gradients": {"dp_shard": 4, "sharding": "gradients"},
    "parameters": ZERO3,
    "freed": FREED,
    "hsdp": {"dp_shard": 2, "dp_replicate": 2, "sharding": "parameters", "reshard_after_forward": True},
}


def cases() -> Iterator[Case]:
    def case(name: str, spec: ModelSpec, documents: int = 0, optimizer: str = "cuda", **values: Any) -> Case:
        return Case(name, spec, Strategy(**{"micro_batch_size": 4, **values}), documents, optimizer)

    for precision in BOTH:
        p: dict[str, Any] = {"precision": precision}
        for m in (1, 2):
            a = {**p, "grad_accum": m}
            yield case(f"{precision} m={m}", model(), **a)
            yield case(f"{precision} m={m}, in the layers", model(**FEW), **a)
            yield case(f"{precision} m={m}, recomputed", model(**FEW), **FULL, **a)
        yield case(f"{precision}, untied", model(tie_word_embeddings=False), grad_accum=2, **ZERO3, **p)
        yield case(f"{precision}, chunked loss", model(tie_word_embeddings=False), grad_accum=2, loss_chunk=128, **p)
        yield case(f"{precision}, packed", model(**FEW), documents=4, **FREED, **p)
    yield case("fp32, freed", model(**FEW), precision="fp32", **FREED)
    yield case("fp32, freed, two ahead", model(**FEW), precision="fp32", prefetch_units=2, **FREED)
    for name, level in LEVELS.items():
        yield case(f"bf16 m=1, {name}, recomputed", model(**FEW), **FULL, **level)
        yield case(f"bf16 m=2, {name}, recomputed", model(**FEW), grad_accum=2, **FULL, **level)
        if name in ("none", "optimizer", "hsdp"):  # in fp32 gradients are accumulated without a copy
            yield case(f"fp32 m=2, {name}, recomputed", model(**FEW), precision="fp32", grad_accum=2, **FULL, **level)
    half = model(num_layers=4, **FEW)
    yield case("fp32, first half recomputed", half, recompute_layers=(2,), precision="fp32", **FULL, **FREED)
    yield case("bf16, freed, chunked loss", model(), loss_chunk=128, **FREED)
    yield case("bf16, three micro-batches", model(), grad_accum=3, **LEVELS["optimizer"])
    yield case("bf16, reduced in bf16", model(**FEW), grad_accum=2, reduce_dtype="bf16", **FULL, **LEVELS["hsdp"])
    yield case("bf16, packed, recomputed", model(**FEW), documents=4, **FULL)
    yield case("bf16, qwen2", model(family="qwen2", qk_norm=False, attention_bias="qkv", **FEW))
    yield case("bf16, llama", model(family="llama", qk_norm=False, **FEW), grad_accum=2, **FULL, **FREED)
    many = model(hidden_size=256, num_layers=6, **FEW)
    yield case("fp32, optimizer on a CPU", many, optimizer="cpu", micro_batch_size=1, precision="fp32", **FULL)


CASES = {case.name: case for case in cases()}


@pytest.fixture(scope="module")
def tracked() -> dict[str, dict[str, int]]:
    """What the tracker saw, by case."""
    names = list(CASES)

    def play(part: list[str]) -> list[dict[str, int]]:
        document = json.dumps([CASES[name].as_json() for name in part])
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, __file__], input=document, capture_output=True, text=True, timeout=300, env=environment
        )
        assert done.returncode == 0, done.stderr
        found: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
        return found

    halves = names[::2], names[1::2]
    with ThreadPoolExecutor() as pool:
        results = pool.map(play, halves)
        found = [seen for part in results for seen in part]
    return dict(zip((*halves[0], *halves[1]), found, strict=True))


def priced(case: Case) -> tuple[dict[str, float], float]:
    """The cost model's breakdown, and its peak of live tensors [bytes]."""
    strategy = case.strategy
    workload = Workload(
        seq_len=SEQ_LEN,
        global_batch_size=strategy.global_batch_size,
        precision=strategy.precision,
        length_histogram=((SEQ_LEN // case.documents, 1.0),) if case.documents else (),
    )
    cluster = load_cluster("1xH100")
    if case.optimizer == "cpu":
        device = cluster.device.model_copy(update={"kind": "cpu"})
        cluster = cluster.model_copy(update={"device": device})
    (rank,) = price(Job(case.spec, cluster, workload), "native", StrategyTable.from_strategies([strategy])).memory
    return {name: float(column.max()) for name, column in rank.parts.items()}, float(rank.allocated.max())


@pytest.mark.parametrize("name", CASES)
def test_peak_is_what_torchs_tracker_sees(name: str, tracked: dict[str, dict[str, int]]) -> None:
    parts, allocated = priced(CASES[name])
    assert allocated == pytest.approx(tracked[name]["peak"], rel=TOLERANCE)
    assert sum(parts.values()) == pytest.approx(allocated)


@pytest.mark.parametrize("name", CASES)
def test_state_is_exact(name: str, tracked: dict[str, dict[str, int]]) -> None:
    """fp32 weights, gradients before the optimizer's step and both moments, on this rank, to the byte."""
    parts, _ = priced(CASES[name])
    seen = tracked[name]
    assert parts["parameters"] == seen["parameters"]
    assert parts["parameters"] == seen["gradients"]  # both fp32
    assert parts["optimizer"] == seen["optimizer"] - 4 * seen["tensors"]  # a step counter per tensor


def test_the_oracle_sees_more_than_the_loss(tracked: dict[str, dict[str, int]]) -> None:
    """A guard against cases that all peak at the loss: each of these must raise or lower the peak."""
    few, recomputed = tracked["bf16 m=1, in the layers"]["peak"], tracked["bf16 m=1, recomputed"]["peak"]
    assert recomputed < few < tracked["bf16 m=1"]["peak"]
    levels = [tracked[f"bf16 m=2, {name}, recomputed"]["peak"] for name in ("none", "optimizer", "gradients", "freed")]
    assert levels == sorted(levels, reverse=True)
    assert tracked["fp32, freed, two ahead"]["peak"] > tracked["fp32, freed"]["peak"]


def track(case: dict[str, Any]) -> dict[str, int]:
    """Plays a step of a case as `trainplan.executor.train` does, and returns what was alive in it."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.fsdp import FSDPModule
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from trainplan.executor.decoder import CausalLm
    from trainplan.executor.mesh import build_mesh
    from trainplan.executor.optimizer import build_optimizer
    from trainplan.executor.options import RunOptions
    from trainplan.executor.parallel import check_strategy, parallelize

    spec, strategy = ModelSpec(**case["spec"]), Strategy(**case["strategy"])
    check_strategy(spec, strategy)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=strategy.world_size)
    mesh = build_mesh(strategy, "cpu")  # outside the fake mode: it reads numbers from a tensor
    mesh["dp_shard"]
    with FakeTensorMode():
        model = CausalLm(spec)
        policy = parallelize(model, strategy, mesh)
        options = RunOptions(model_dir=Path("model"), data=Path("data"), output_dir=Path("out"), steps=1)
        optimizer = build_optimizer(model.parameters(), options, case["optimizer"])
        sharded = isinstance(model, FSDPModule)
        tracker = FSDPMemTracker(model, optimizer) if sharded else MemTracker()
        if not sharded:
            tracker.track_external(model, optimizer)

        def alive(kind: str = "current") -> dict[str, int]:
            (found,) = (
                of for device, of in tracker.get_tracker_snapshot(kind).items() if device == torch.device("cpu")
            )
            return {str(getattr(name, "name", name)): int(size) for name, size in found.items()}

        shape = (strategy.micro_batch_size, SEQ_LEN)
        with tracker:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # makes the optimizer's state
            optimizer.zero_grad(set_to_none=True)
            tracker._peak_mem_snap = tracker.get_tracker_snapshot("current")
            tracker._peak_mem = {device: of["Total"] for device, of in tracker._peak_mem_snap.items()}
            total = torch.zeros(())
            for i in range(strategy.grad_accum):
                tracker.reset_mod_stats()
                policy.enter_micro_batch(model, last=i == strategy.grad_accum - 1)
                ids, labels = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
                packed = case["documents"] > 0
                positions, documents = (torch.zeros(shape, dtype=torch.int64) if packed else None for _ in range(2))
                loss = model(ids, labels, positions, documents) / 1000
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = alive()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()
    kinds = ("SHARDED_PARAM", "SHARDED_GRAD") if sharded else ("PARAM", "GRAD")
    return {
        "peak": alive("peak")["Total"],
        "parameters": before[kinds[0]],
        "gradients": before[kinds[1]],
        "optimizer": before["OPT"],
        "tensors": len(list(model.parameters())),
    }


if __name__ == "__main__":
    print(json.dumps([track(case) for case in json.load(sys.stdin)]))
