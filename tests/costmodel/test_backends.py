"""Legality: each rule refuses what it should, names the mend, and says the same for one strategy as for many."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainplan.costmodel.backends import BACKENDS, backend
from trainplan.costmodel.backends.rules import divisors
from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.hardware import Cluster, Device, Link, Quantity
from trainplan.costmodel.job import Job
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.strategy import Strategy, StrategyTable
from trainplan.costmodel.workload import Lora, Workload


def measured(value: float) -> Quantity:
    return Quantity(value=value, provenance="measured", source="test")


def cluster(gpus: int, arch: str = "sm_90") -> Cluster:
    rate = {"bf16": measured(1e15), "fp8": measured(2e15), "fp32": measured(5e14)}
    link = Link(
        kind="test",
        all_reduce_bytes_per_s=measured(4e11),
        all_gather_bytes_per_s=measured(4e11),
        all_to_all_bytes_per_s=measured(4e11),
        p2p_bytes_per_s=measured(4e11),
        latency_s=measured(1e-6),
    )
    device = Device(
        name="test",
        kind="gpu",
        arch=arch,
        memory_bytes=measured(80e9),
        memory_bytes_per_s=measured(3e12),
        peak_flops_per_s=rate,  # type: ignore[arg-type]
        matmul_flops_per_s=rate,  # type: ignore[arg-type]
        attention_flops_per_s=rate,  # type: ignore[arg-type]
        op_overhead_s=measured(5e-6),
    )
    return Cluster(
        name=f"{gpus}xtest",
        device=device,
        num_nodes=max(1, gpus // 8),
        gpus_per_node=min(gpus, 8),
        scale_up=link,
        scale_up_domain=8,
        scale_out=link,
    )


def job(model: str = "Qwen/Qwen3-8B", gpus: int = 8, gbs: int = 32, seq_len: int = 4096, **workload: Any) -> Job:
    return Job(load_model(model), cluster(gpus), Workload(seq_len=seq_len, global_batch_size=gbs, **workload))


MEGATRON = {"attention": "flash", "fused_kernels": ("cross_entropy", "norm", "rope", "swiglu"), "loader_workers": 2}


def broken(name: str, of: Job, **values: Any) -> dict[str, str]:
    values = {**(MEGATRON if name == "megatron" else {}), **values}
    return {b.rule: b.reason for b in backend(name).legal(of, Strategy(**values))}


def test_a_plain_fsdp_strategy_is_legal_on_native() -> None:
    assert not broken("native", job(), dp_shard=8, sharding="parameters", reshard_after_forward=True, grad_accum=4)


def test_a_megatron_recipe_is_legal() -> None:
    """Megatron-Bridge's default for Qwen3-8B pre-training on 4 GPUs: TP4, here with sp, times dp 2."""
    assert not broken("megatron", job(), tp=4, sp=True, dp_shard=2, sharding="optimizer", grad_accum=16)


@pytest.mark.parametrize(
    ("backend_name", "of", "values", "rule", "words"),
    [
        ("native", {}, {"tp": 8, "grad_accum": 32}, "tp", "native runs tp in {1}"),
        ("megatron", {}, {"tp": 2, "dp_replicate": 2, "grad_accum": 16}, "world_size", "4 ranks"),
        ("native", {"gbs": 36}, {"dp_replicate": 8, "grad_accum": 4}, "global_batch", "not divisible by dp=8"),
        ("native", {}, {"dp_replicate": 8, "grad_accum": 3}, "global_batch", "use micro_batch_size in [1, 2, 4]"),
        ("megatron", {"model": "Qwen/Qwen2-0.5B"}, {"tp": 8, "grad_accum": 32}, "heads", "Use tp in [1, 2, 7, 14]"),
        (
            "torchtitan",
            {"model": "Qwen/Qwen3-30B-A3B"},
            {"tp": 8, "sp": True, "grad_accum": 32},
            "kv_heads",
            "[1, 2, 4]",
        ),
        ("megatron", {}, {"pp": 8, "grad_accum": 32}, "layers", "Use pp*vpp in [1, 2, 3, 4, 6, 9, 12, 18, 36]"),
        ("megatron", {}, {"pp": 8, "grad_accum": 32, "stage_layers": (4,) * 7 + (9,)}, "layers", "add up to"),
        ("megatron", {}, {"pp": 4, "dp_replicate": 2, "grad_accum": 16, "schedule": "interleaved"}, "chunks", "vpp"),
        (
            "megatron",
            {"gbs": 12},
            {"pp": 4, "vpp": 3, "dp_replicate": 2, "grad_accum": 6, "schedule": "interleaved"},
            "micro_batches",
            "a multiple of pp=4",
        ),
        ("megatron", {"seq_len": 4100}, {"cp": 8, "grad_accum": 32}, "sequence", "multiple of 16"),
        ("deepspeed", {}, {"cp": 8, "cp_method": "ulysses", "grad_accum": 32}, None, ""),
        ("megatron", {}, {"cp": 8, "cp_method": "ulysses", "tp": 1, "grad_accum": 32}, None, ""),
        ("megatron", {}, {"ep": 8, "dp_replicate": 8, "grad_accum": 4}, "experts", "has no experts"),
        (
            "megatron",
            {"model": "Qwen/Qwen3-30B-A3B"},
            {"tp": 2, "dp_replicate": 4, "grad_accum": 8},
            "moe_sp",
            "sequence parallelism",
        ),
        (
            "megatron",
            {},
            {"pp": 4, "dp_shard": 2, "sharding": "gradients", "grad_accum": 16},
            "sharding_pp",
            "Use optimizer",
        ),
        (
            "torchtitan",
            {"model": "Qwen/Qwen3-0.6B"},
            {"pp": 2, "dp_replicate": 4, "grad_accum": 8},
            "tied_pp",
            "Use pp=1",
        ),
        ("native", {}, {"dp_shard": 8, "grad_accum": 4}, "sharding_groups", "none needs 1"),
        ("native", {}, {"dp_replicate": 8, "grad_accum": 4, "reshard_after_forward": True}, "reshard", "parameters"),
        ("native", {}, {"dp_replicate": 8, "grad_accum": 4, "loss_chunk": 4096}, "loss_chunk", "change nothing"),
        ("native", {"precision": "fp32"}, {"dp_replicate": 8, "grad_accum": 4}, "precision", "workload's fp32"),
        (
            "native",
            {},
            {"dp_replicate": 8, "grad_accum": 4, "recompute": "full", "recompute_layers": (37,)},
            "recompute",
            "none above",
        ),
        ("native", {"model": "Qwen/Qwen3-30B-A3B"}, {"dp_replicate": 8, "grad_accum": 4}, "family", "qwen3_moe"),
        (
            "megatron",
            {},
            {
                "dp_replicate": 8,
                "grad_accum": 4,
                "recompute": "selective",
                "recompute_modules": ("core_attn",),
                "recompute_layers": (9,),
            },
            "recompute_layers",
            "recompute selective",
        ),
        (
            "megatron",
            {},
            {"pp": 2, "dp_replicate": 4, "grad_accum": 8, "recompute": "full", "recompute_layers": (4, 5)},
            "recompute_layers",
            "one number",
        ),
        (
            "megatron",
            {},
            {"pp": 2, "dp_replicate": 4, "grad_accum": 8, "recompute": "full", "recompute_layers": (4, 4)},
            None,
            "",
        ),
        ("megatron", {}, {"dp_replicate": 8, "grad_accum": 4, "optimizer_offload": True}, "offload_sharding", "needs"),
        ("megatron", {}, {"tp": 2, "dp_replicate": 4, "grad_accum": 8, "overlap_tp": True}, "overlap_tp", "Set sp"),
        ("megatron", {}, {"cp": 2, "dp_replicate": 4, "grad_accum": 8, "attention": "eager"}, "attention_cp", "eager"),
        ("torchtitan", {}, {"tp": 2, "dp_replicate": 4, "grad_accum": 8}, None, ""),
        ("torchtitan", {}, {"dp_replicate": 8, "grad_accum": 4, "sp": True}, "sp", "Leave sp out"),
        (
            "torchtitan",
            {},
            {"tp": 2, "sp": True, "dp_replicate": 4, "grad_accum": 8, "overlap_tp": True},
            "async_tp_compile",
            "Set compile",
        ),
        (
            "torchtitan",
            {},
            {"tp": 2, "dp_replicate": 4, "grad_accum": 8, "overlap_tp": True, "compile": True},
            "overlap_tp",
            "Set sp",
        ),
        (
            "torchtitan",
            {"model": "Qwen/Qwen3-30B-A3B"},
            {"dp_replicate": 4, "dp_shard": 2, "sharding": "parameters", "ep": 4, "grad_accum": 4},
            "expert_mesh",
            "never over replicas",
        ),
        (
            "deepspeed",
            {},
            {"dp_shard": 8, "sharding": "parameters", "grad_accum": 4},
            "zero3_reshards",
            "Set it",
        ),
        (
            "deepspeed",
            {},
            {"cp": 8, "cp_method": "ulysses", "grad_accum": 32, "attention": "eager"},
            "attention_cp",
            "",
        ),
        ("accelerate", {}, {"tp": 2, "dp_replicate": 4, "grad_accum": 8}, "replicas_alone", "dp_shard above 1"),
        (
            "native",
            {"lora": Lora(rank=8, alpha=16)},
            {"dp_replicate": 8, "grad_accum": 4},
            "lora",
            "does not train LoRA",
        ),
    ],
)
def test_each_rule(backend_name: str, of: dict[str, Any], values: dict[str, Any], rule: str | None, words: str) -> None:
    found = broken(backend_name, job(**of), **values)
    if rule is None:
        assert not found
    else:
        assert rule in found
        assert words in found[rule]


def test_fp8_needs_a_gpu_that_has_it() -> None:
    of = Job(load_model("Qwen/Qwen3-8B"), cluster(8, "sm_80"), Workload(seq_len=4096, global_batch_size=32))
    assert "no fp8" in broken("megatron", of, dp_replicate=8, grad_accum=4, precision="fp8")["precision"]
    assert not broken("megatron", job(), dp_replicate=8, grad_accum=4, precision="fp8")


def test_half_precision_needs_a_gpu_that_has_bf16() -> None:
    of = Job(load_model("Qwen/Qwen3-8B"), cluster(8, "sm_70"), Workload(seq_len=4096, global_batch_size=32))
    assert "no bf16" in broken("native", of, dp_shard=8, grad_accum=4, sharding="parameters")["precision"]


def test_no_backend_writes_four_bit_recipes() -> None:
    of = Job(load_model("Qwen/Qwen3-8B"), cluster(8, "sm_100"), Workload(seq_len=4096, global_batch_size=32))
    for name in BACKENDS:
        assert "precision" in broken(name, of, dp_replicate=8, grad_accum=4, precision="nvfp4")


def test_a_precision_that_a_backend_does_not_train_in_is_refused() -> None:
    reasons = dict(backend("native").refusals(job(precision="fp8")))
    assert reasons["precision"] == "native does not train in fp8. It trains in bf16, fp32."


def test_divisors_of_a_large_number_take_no_time() -> None:
    found = divisors(10**12)
    assert found[:4] == [1, 2, 4, 5]
    assert len(found) == 13 * 13  # 2^12 5^12
    assert found == sorted(found)
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="native, megatron, torchtitan, deepspeed, accelerate"):
        backend("nanotron")


@st.composite
def rows(draw: st.DrawFn) -> Strategy:
    d = st.sampled_from([1, 2, 4, 8])
    choice = {
        "schedule": draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"])),
        "sharding": draw(st.sampled_from(["none", "optimizer", "gradients", "parameters"])),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "recompute_modules": draw(st.sampled_from([(), ("core_attn",), ("mlp", "norm")])),
        "recompute_layers": draw(st.sampled_from([(), (3,), (2, 2), (40,)])),
        "stage_layers": draw(st.sampled_from([None, (36,), (18, 18), (17, 19), (36, 0)])),
        "precision": draw(st.sampled_from(["fp32", "bf16", "fp8"])),
        "attention": draw(st.sampled_from(["sdpa", "flash"])),
        "cp_method": draw(st.sampled_from(["ring", "ulysses"])),
    }
    degrees = {
        name: draw(d)
        for name in ("tp", "pp", "vpp", "cp", "ep", "dp_replicate", "dp_shard", "micro_batch_size", "grad_accum")
    }
    flags = {name: draw(st.booleans()) for name in ("sp", "reshard_after_forward", "optimizer_offload", "compile")}
    return Strategy(
        **choice, **degrees, **flags, etp=draw(st.sampled_from([1, 2])), loss_chunk=draw(st.sampled_from([0, 2048]))
    )


@given(
    st.lists(rows(), min_size=4, max_size=4),
    st.sampled_from(sorted(BACKENDS)),
    st.sampled_from(["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"]),
)
@settings(max_examples=150, deadline=None)
def test_the_mask_of_many_agrees_with_the_reasons_of_one(strategies: list[Strategy], name: str, model: str) -> None:
    of = job(model)
    found, counts = backend(name).legal_mask(of, StrategyTable.from_strategies(strategies))
    mask = np.broadcast_to(found, len(strategies))
    assert mask.tolist() == [not backend(name).legal(of, s) for s in strategies]
    assert sum(counts.values()) == np.count_nonzero(~mask)
