"""What our own executor runs: only values that a test has trained with."""

from __future__ import annotations

import numpy as np

from trainplan.costmodel.backends.common import RULES
from trainplan.costmodel.backends.rules import Backend, Rule

_PREFETCH = Rule(
    "prefetch",
    lambda job, t: (t["prefetch_units"] == 1) | t.chosen("sharding", "parameters"),
    lambda job, s: (
        f"prefetch_units={s.prefetch_units} with sharding {s.sharding}: only sharded parameters are gathered ahead. "
        "Use 1."
    ),
)

_COMPILE = Rule(
    "compile",
    lambda job, t: ~t["compile"] | np.asarray(job.cluster.device.kind == "gpu"),
    lambda job, s: (
        f"compile on {job.cluster.device.name}: on a CPU it needs a C++ compiler and a minute before the "
        "first step, which no estimate counts. Use compile=false."
    ),
)

BACKEND = Backend(
    name="native",
    version="0.1",
    families=frozenset({"qwen2", "qwen3", "llama", "mistral"}),
    lora=False,
    values={
        "tp": {1},
        "sp": {False},
        "pp": {1},
        "vpp": {1},
        "schedule": {"1f1b"},
        "stage_layers": {None},
        "cp": {1},
        "cp_method": {"ring"},
        "ep": {1},
        "etp": {1},
        "rank_order": {"tp-cp-dp-pp"},
        "collective_algo": {"auto"},
        "token_budget": {0},
        "recompute": {"none", "full"},
        "recompute_modules": {()},
        "activation_offload": {False},
        "optimizer_offload": {False},
        "reduce_dtype": {"fp32", "bf16"},
        "precision": {"fp32", "bf16"},
        "attention": {"sdpa"},
        "fused_kernels": {()},
        "overlap_grad_reduce": {True},
        "overlap_param_gather": {True},
        "overlap_tp": {False},
        "prefetch_units": {1, 2},
        "bucket_bytes": {0},
        "loader_workers": {0},
        "checkpoint_mode": {"sync"},
    },
    rules=(*RULES, _PREFETCH, _COMPILE),
)
