"""One knob otherwise, and the ladder from a baseline: priced as themselves, or named by the rule they break."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trainplan.costmodel.backends import backend
from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.job import Job
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.step import estimate
from trainplan.costmodel.strategy import Strategy, canonical
from trainplan.costmodel.workload import Workload
from trainplan.planner.alternatives import alternatives, moved
from trainplan.planner.baselines import NAMES, Baseline, baseline
from trainplan.planner.ladder import ladder, totals
from trainplan.planner.search import Pins, tune
from trainplan.profiles import read_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.planner.conftest import Done, Small

FSDP = Strategy(dp_shard=8, sharding="parameters", reshard_after_forward=True, micro_batch_size=2, grad_accum=2)
MEGATRON = Strategy(
    tp=2, sp=True, pp=2, dp_shard=2, sharding="optimizer", grad_accum=16, attention="flash", loader_workers=2,
    fused_kernels=("cross_entropy", "norm", "rope", "swiglu"),
)  # fmt: skip


def job(model: str = "Qwen/Qwen3-8B", cluster: str = "8xH100", gbs: int = 32) -> Job:
    return Job(load_model(model), load_cluster(cluster), Workload(seq_len=4096, global_batch_size=gbs))


@pytest.mark.parametrize(("name", "strategy"), [("native", FSDP), ("megatron", MEGATRON)])
def test_an_alternative_is_priced_as_itself_or_names_its_rule(name: str, strategy: Strategy) -> None:
    of, met = job(), set()
    for found in alternatives(of, name, strategy):
        assert found.outcome.strategy != strategy
        assert canonical(found.outcome.strategy) == found.outcome.strategy
        broken = backend(name).legal(of, found.outcome.strategy)
        if broken:
            assert found.outcome.broken == broken[0].reason
            assert (found.outcome.step_s, found.outcome.fits) == (None, False)
        else:
            price = estimate(of, name, found.outcome.strategy)
            assert found.outcome.step_s == pytest.approx(price.step_time_s.mid, rel=1e-9)
            assert found.outcome.device_bytes == pytest.approx(price.peak.device_bytes.high, rel=1e-9)
            assert found.outcome.fits == price.fits
            met.add(found.knob)
    assert {"micro_batch_size", "recompute"} <= met
    assert {"sharding", "dp_shard"} & met


def test_degrees_take_the_batch_with_them() -> None:
    """Eight ranks and 32 sequences: tp 2 -> 4 halves dp, which doubles the micro-batches of each."""
    after = moved(job(), backend("megatron"), MEGATRON, "tp", 4)
    assert (after.tp, after.pp, after.dp, after.grad_accum) == (4, 2, 1, 32)
    assert after.sharding == "none"  # one rank has nobody to share with
    alone = moved(job(), backend("megatron"), MEGATRON, "pp", 1)
    assert (alone.pp, alone.schedule, alone.dp_shard, alone.grad_accum) == (1, "1f1b", 4, 8)
    chunks = moved(job(), backend("megatron"), MEGATRON, "vpp", 3)
    assert (chunks.schedule, chunks.vpp) == ("interleaved", 3)


@pytest.mark.parametrize("name", NAMES)
def test_the_ladder_leads_from_the_baseline_to_the_plan(name: str) -> None:
    of = job()
    rungs = ladder(of, baseline(name, of), "native", FSDP)
    assert rungs[0].outcome.strategy == baseline(name, of).strategy
    assert rungs[-1].outcome.strategy == FSDP
    first, last = rungs[0].outcome.step_s, rungs[-1].outcome.step_s
    assert first is not None
    assert last is not None
    assert math.prod(rung.factor for rung in rungs) == pytest.approx(first / last)
    assert rungs[-1].total == pytest.approx(first / last)
    assert math.prod(totals(rungs).values()) == pytest.approx(first / last)


def test_lossy_changes_are_counted_apart() -> None:
    of = job()
    start = Baseline("file", "native", FSDP, "a plan")
    rungs = ladder(of, start, "native", FSDP.model_copy(update={"reduce_dtype": "bf16", "compile": True}))
    assert set(totals(rungs)) == {"same", "rounding"}
    assert {rung.change: rung.numerics for rung in rungs[1:]} == {
        "reduce_dtype=bf16": "rounding",
        "compile=true": "same",
    }


def test_baselines_are_what_their_sources_say() -> None:
    of = job()
    assert baseline("hf-default", of).strategy == Strategy(dp_replicate=8, micro_batch_size=4)  # 8 does not divide 4
    fsdp = baseline("fsdp-default", of).strategy
    assert (fsdp.sharding, fsdp.dp_shard, fsdp.micro_batch_size, fsdp.recompute) == ("parameters", 8, 1, "none")
    recipe = baseline("megatron-recipe", of).strategy
    assert (recipe.tp, recipe.pp, recipe.dp, recipe.sp) == (4, 1, 2, False)
    with pytest.raises(UsageError, match="no recipe of meta-llama/Llama-3"):
        baseline("megatron-recipe", job("meta-llama/Llama-3.1-8B"))
    with pytest.raises(UsageError, match="'mine' is not known"):
        baseline("mine", of)
    with pytest.raises(UsageError, match="multiple of 4 GPUs, not 2"):
        baseline("megatron-recipe", job(cluster="2xH100"))


RECIPES = read_json("recipes", "megatron_bridge.json")["recipes"]


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, id=r["model"], marks=[pytest.mark.slow] if r["gpus"] > 16 else []) for r in RECIPES],
)
def test_no_default_recipe_is_faster_than_the_winner(recipe: dict[str, object]) -> None:
    of = job(str(recipe["model"]), f"{recipe['gpus']}xH100", gbs=256)
    default = baseline("megatron-recipe", of)
    assert not backend("megatron").legal(of, default.strategy)
    rung = ladder(of, default, "megatron", default.strategy)[0].outcome
    best = tune(of, "megatron", Pins(memory_limit_bytes=max(rung.device_bytes or 0, 80e9)), gap_frac=0.005)
    assert rung.step_s is not None
    assert best.candidates[0].step_s <= rung.step_s / (1 - 0.005)


def test_the_commands_show_both(planner: "Callable[..., Done]", small: "Small", folder: Path) -> None:
    done = planner("explain", small.plan, "--baseline", small.plan)
    assert done.code == 0, done.err
    assert "If one knob were set otherwise" in done.out
    assert "nothing was changed" in done.out
    found = planner("explain", small.plan, "--baseline", "fsdp-default", "--json").json
    assert found["baseline"]["backend"] == "accelerate"
    assert found["ladder"][-1]["strategy"] == found["plan"]["strategy"]
    assert all(of["step_s"] is None or of["step_s"] > 0 for of in found["alternatives"])
    other = planner("tune", *small.job[1:], "--seq-len", "32", "-o", folder / "other.yaml")
    if other.code == 0:
        refused = planner("explain", small.plan, "--baseline", folder / "other.yaml")
        assert (refused.code, "another model, cluster or workload" in refused.error) == (2, True)
