"""What do people run who do not search? Named strategies to set a plan's factor against, each stated in full.

A baseline is a backend and a strategy. Its micro-batch is made smaller where the batch does not divide by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainplan.costmodel.backends import backend
from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.job import Job
from trainplan.costmodel.strategy import Strategy, canonical
from trainplan.planner.space import splits
from trainplan.profiles import read_json

NAMES = ("hf-default", "fsdp-default", "megatron-recipe")
HF_MICRO_BATCH = 8
"""`TrainingArguments.per_device_train_batch_size` of Transformers."""


@dataclass(frozen=True)
class Baseline:
    """A named way to train.

    Attributes:
        name: As it is asked for.
        backend: Whose software runs it.
        strategy: All of its knobs.
        why: Where it comes from.
    """

    name: str
    backend: str
    strategy: Strategy
    why: str


def baseline(name: str, job: Job) -> Baseline:
    """The baseline of a job.

    Raises:
        UsageError: There is none of this name, or not for this model.
    """
    if name == "hf-default":
        values = _filled(job, {"micro_batch_size": HF_MICRO_BATCH}, sharding="none")
        why = "Transformers' Trainer as it comes: DDP, eight sequences per device, no checkpointing, no compile"
        return Baseline(name, "accelerate", canonical(Strategy(**values)), why)
    if name == "fsdp-default":
        values = _filled(job, {"micro_batch_size": 1, "reshard_after_forward": True}, sharding="parameters")
        why = "accelerate's FSDP as it comes: full sharding, one sequence per device, no checkpointing, no compile"
        return Baseline(name, "accelerate", canonical(Strategy(**values)), why)
    if name == "megatron-recipe":
        recipes = read_json("recipes", "megatron_bridge.json")
        found = [r for r in recipes["recipes"] if r["model"].lower() == job.model.name.lower()]
        if not found:
            known = ", ".join(recipe["model"] for recipe in recipes["recipes"])
            raise UsageError(f"--baseline megatron-recipe: no recipe of {job.model.name} is known. There are {known}.")
        return Baseline(name, "megatron", _recipe(job, found[0]), recipes["source"])
    raise UsageError(f"--baseline {name!r} is not known. Use {', '.join(NAMES)}, or a plan file.")


def _recipe(job: Job, recipe: Mapping[str, Any]) -> Strategy:
    values = {name: value for name, value in recipe.items() if name not in ("model", "gpus")}
    fixed = {"attention": "flash", "loader_workers": 2}
    kernels = max(backend("megatron").values["fused_kernels"])
    values = _filled(job, {**fixed, "fused_kernels": kernels, "micro_batch_size": 1, **values}, sharding="optimizer")
    pp = values.get("pp", 1)
    return canonical(Strategy(**values, stage_layers=splits(job, pp)[-1] if job.model.num_layers % pp else None))


def _filled(job: Job, values: Mapping[str, Any], sharding: str) -> dict[str, Any]:
    """Values with the data-parallel ranks and micro-batches that make them whole.

    Raises:
        UsageError: The cluster or batch does not divide.
    """
    n, batch = job.cluster.num_gpus, job.workload.global_batch_size
    used = values.get("tp", 1) * values.get("pp", 1) * values.get("cp", 1)
    if n % used:
        raise UsageError(f"the baseline needs a multiple of {used} GPUs, not {n}. Choose another --baseline.")
    ranks = n // used
    if batch % ranks:
        raise UsageError(f"the baseline's {ranks} data parallel ranks do not divide the batch of {batch}.")
    micro = max(d for d in range(1, values["micro_batch_size"] + 1) if (batch // ranks) % d == 0)
    shard = ranks if sharding != "none" else 1
    return {
        "precision": job.workload.precision, **values, "micro_batch_size": micro,
        "grad_accum": batch // ranks // micro, "dp_shard": shard, "dp_replicate": ranks // shard,
        "sharding": sharding if shard > 1 else "none",
    }  # fmt: skip
