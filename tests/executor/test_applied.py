"""A plan's every choice is visible in what was applied, and a difference refuses to train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainplan.costmodel.errors import MachineMismatchError
from trainplan.costmodel.model_config import from_hf_config
from trainplan.costmodel.strategy import Strategy
from trainplan.executor import applied
from trainplan.executor.data import StepData
from trainplan.executor.decoder import CausalLm
from trainplan.executor.mesh import build_mesh
from trainplan.executor.optimizer import build_optimizer
from trainplan.executor.options import RunOptions
from trainplan.executor.parallel import parallelize
from trainplan.executor.tokens import TokenCache, open_cache

BASE: dict[str, Any] = {"precision": "bf16", "dp_shard": 4, "sharding": "parameters", "micro_batch_size": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "dp_replicate": {"dp_replicate": 2},
    "dp_shard": {"dp_shard": 2},
    "sharding": {"sharding": "gradients"},
    "sharding optimizer": {"sharding": "optimizer"},
    "sharding none": {"sharding": "none", "dp_replicate": 4, "dp_shard": 1},
    "reshard_after_forward": {"reshard_after_forward": True},
    "micro_batch_size": {"micro_batch_size": 1, "grad_accum": 2},
    "recompute": {"recompute": "full"},
    "recompute_layers": {"recompute": "full", "recompute_layers": (1,)},
    "loss_chunk": {"loss_chunk": 32},
    "reduce_dtype": {"reduce_dtype": "bf16"},
    "precision": {"precision": "fp32"},
    "compile": {"compile": True},
    "prefetch_units": {"prefetch_units": 2},
    "packing": {"packing": False},
}


def model(tiny: Any) -> CausalLm:
    with torch.device("meta"):
        return CausalLm(from_hf_config(tiny.config("qwen3"), "tiny"))


@pytest.mark.parametrize("field", CHANGES)
def test_every_choice_that_is_run_shows_in_what_is_expected(field: str, tiny: Any) -> None:
    base = applied.expected(model(tiny), Strategy(**BASE), "cpu", 64)
    changed = applied.expected(model(tiny), Strategy(**{**BASE, **CHANGES[field]}), "cpu", 64)
    assert base != changed


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "really",
    [
        {"precision": "fp32"},
        {"recompute": "full"},
        {"recompute": "full", "recompute_layers": (1,)},
        {"loss_chunk": 32},
        {"reduce_dtype": "bf16"},
        {"compile": True},
        {"packing": False},
        {"micro_batch_size": 1, "grad_accum": 2},
    ],
    ids=str,
)
def test_a_set_up_that_is_not_the_plan_is_named_and_refused(
    really: dict[str, Any], tiny: Any, token_cache: Path, tmp_path: Path
) -> None:
    cache: TokenCache = open_cache(token_cache)
    planned = Strategy(precision="bf16", micro_batch_size=2)

    def set_up(strategy: Strategy) -> dict[str, Any]:
        decoder, mesh = model(tiny), build_mesh(strategy, "cpu")
        policy = parallelize(decoder, strategy, mesh)
        options = RunOptions(model_dir=tmp_path, data=tmp_path, output_dir=tmp_path, steps=1)
        optimizer = build_optimizer(decoder.parameters(), options, "cpu")
        data = StepData(cache, seq_len=64, global_batch_size=2, vocab_size=384, packing=strategy.packing, seed=0)
        share = data.share(0, dp_rank=0, dp=1, grad_accum=strategy.grad_accum)
        return applied.observed(decoder, optimizer, mesh, policy, data, share)

    wanted = applied.expected(model(tiny), planned, "cpu", 64)
    applied.verify(set_up(planned), wanted, tmp_path, writes=True)
    with pytest.raises(MachineMismatchError, match="what was set up is not the plan: ") as caught:
        applied.verify(set_up(Strategy(**{**planned.model_dump(), **really})), wanted, tmp_path, writes=True)
    assert caught.value.exit_code == 5
    differs = json.loads((tmp_path / applied.FILE).read_text())["differs"]
    assert differs
    assert all(name in str(caught.value) for name in differs)
