"""Every field of a strategy is real: where a backend takes another value, time or memory moves."""

import math
from typing import Any

import pytest

from trainplan.costmodel.backends import BACKENDS, backend
from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.job import Job
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.step import price
from trainplan.costmodel.strategy import CHOICES, FIELDS, Strategy, StrategyTable, canonical
from trainplan.costmodel.workload import Workload

FUSED = ("cross_entropy", "norm", "rope", "swiglu")
LENGTHS = ((1024, 0.5), (4096, 0.5))
ALTERNATIVES: dict[str, tuple[Any, ...]] = {
    **CHOICES,
    "stage_layers": ((17, 19), (10, 9, 9, 8), (8, 9, 9, 10)),
    "recompute_modules": (("core_attn",), ("layernorm",), ("mlp",), ("ops",)),
    "recompute_layers": ((9,), (9, 9), (4, 4, 4, 4)),
    "fused_kernels": ((), ("norm",), FUSED),
    "token_budget": (8192,),
    "loss_chunk": (0, 1024),
    "prefetch_units": (0, 1, 2),
    "bucket_bytes": (0, 2**25),
    "loader_workers": (0, 2),
}
BASES: dict[str, list[dict[str, Any]]] = {
    "native": [
        {"dp_shard": 16, "sharding": "parameters", "reshard_after_forward": True, "grad_accum": 4, "recompute": "full"},
        {"dp_replicate": 2, "dp_shard": 8, "sharding": "gradients", "grad_accum": 4},
        {"dp_replicate": 16, "grad_accum": 4},
    ],
    "megatron": [
        {"tp": 2, "sp": True, "pp": 2, "dp_shard": 4, "sharding": "optimizer", "grad_accum": 16, "recompute": "full"},
        {"pp": 4, "dp_replicate": 4, "grad_accum": 16, "recompute": "selective", "recompute_modules": ("mlp",)},
        {"cp": 2, "dp_shard": 8, "sharding": "optimizer", "grad_accum": 8},
    ],
    "torchtitan": [
        {"tp": 2, "sp": True, "dp_shard": 8, "sharding": "parameters", "grad_accum": 8, "recompute": "full"},
        {"pp": 4, "dp_shard": 4, "sharding": "parameters", "grad_accum": 16},
        {"pp": 2, "vpp": 2, "schedule": "interleaved", "dp_replicate": 8, "grad_accum": 8},
    ],
    "deepspeed": [
        {"dp_shard": 16, "sharding": "optimizer", "grad_accum": 4, "recompute": "full"},
        {"tp": 2, "dp_shard": 8, "sharding": "gradients", "grad_accum": 8},
    ],
    "accelerate": [{"dp_shard": 16, "sharding": "parameters", "grad_accum": 4, "recompute": "full"}],
}
FIXED: dict[str, dict[str, Any]] = {
    "megatron": {"attention": "flash", "fused_kernels": FUSED, "loader_workers": 2},
    "deepspeed": {"cp_method": "ulysses"},
}
MAY_HIDE = {"prefetch_units"}
"""Gathers hidden by computation, and a peak at the loss, where no unit is gathered ahead: the step is the same. What it
moves where the peak is in a layer is in tests/executor/test_memory_oracle.py."""


def values_of(field: str) -> tuple[Any, ...]:
    if field in ALTERNATIVES:
        return ALTERNATIVES[field]
    return (False, True) if isinstance(getattr(Strategy(), field), bool) else (1, 2, 4, 8)


def cost(of: Job, name: str, strategy: Strategy) -> tuple[float, float]:
    priced = price(of, name, StrategyTable.from_strategies([strategy]))
    return float(priced.step_s()[0]), float(priced.device_bytes[0])


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_legal_change_of_one_knob_moves_time_or_memory(name: str) -> None:
    cluster, model = load_cluster("2x8xH100"), load_model("Qwen/Qwen3-8B")
    of = Job(model, cluster, Workload(seq_len=4096, global_batch_size=64, length_histogram=LENGTHS))
    moved: set[str] = set()
    for values in BASES[name]:
        base = Strategy(**{**FIXED.get(name, {}), **values})
        assert not backend(name).legal(of, base)
        before = cost(of, name, base)
        for field in FIELDS:
            for value in values_of(field):
                other = Strategy(**{**base.model_dump(), field: value})
                if canonical(other) == canonical(base) or backend(name).legal(of, other):
                    continue
                after = cost(of, name, other)
                same = all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(before, after, strict=True))
                assert not same or field in MAY_HIDE, f"{field}={value!r} changes nothing of {base!r}"
                moved.add(field)
    assert moved
