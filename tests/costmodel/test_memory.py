"""Memory against hand counts of state, activations in flight and sharding."""

from collections.abc import Callable
from typing import Any

import pytest

from trainplan.costmodel.hardware import Cluster
from trainplan.costmodel.job import Job
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.step import estimate
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Workload

MakeCluster = Callable[..., Cluster]
QWEN3_8B = 8_190_735_360
MEGATRON = {"attention": "flash", "fused_kernels": ("cross_entropy", "norm", "rope", "swiglu"), "loader_workers": 2}


def stages(
    cluster: Cluster, backend: str, gbs: int = 16, model: str = "Qwen/Qwen3-8B", **values: object
) -> list[dict[str, float]]:
    job = Job(load_model(model), cluster, Workload(seq_len=4096, global_batch_size=gbs))
    strategy = Strategy(**{**(MEGATRON if backend == "megatron" else {}), **values})  # type: ignore[arg-type]
    return [stage.breakdown_bytes for stage in estimate(job, backend, strategy).stages]


def test_zero3_splits_sixteen_bytes_per_parameter(round_cluster: MakeCluster) -> None:
    """fp32 parameters and gradients and two moments: 4 + 4 + 8 bytes over 8 ranks."""
    (rank,) = stages(
        round_cluster(8), "native", dp_shard=8, sharding="parameters", reshard_after_forward=True, grad_accum=2
    )
    assert rank["parameters"] == pytest.approx(4 * QWEN3_8B / 8)
    assert rank["gradients"] == pytest.approx(4 * QWEN3_8B / 8)
    assert rank["optimizer"] == pytest.approx(8 * QWEN3_8B / 8)


def test_megatron_distributed_optimizer_keeps_weights_and_main_gradients_whole(round_cluster: MakeCluster) -> None:
    (rank,) = stages(round_cluster(8), "megatron", dp_shard=8, sharding="optimizer", grad_accum=2)
    assert rank["parameters"] == 2 * QWEN3_8B
    assert rank["gradients"] == 4 * QWEN3_8B
    assert rank["optimizer"] == pytest.approx(12 * QWEN3_8B / 8)


def test_zero2_gathers_a_whole_copy_beside_its_shard(round_cluster: MakeCluster) -> None:
    (rank,) = stages(round_cluster(8), "native", dp_shard=8, sharding="gradients", grad_accum=2)
    assert rank["parameters"] == pytest.approx(4 * QWEN3_8B / 8)
    assert rank["gathered"] >= 2 * QWEN3_8B


def test_an_even_pipeline_holds_as_many_micro_batches_as_ranks_follow(round_cluster: MakeCluster) -> None:
    """1F1B on 4 ranks: rank r holds 4 - r micro-batches of its 9 layers (Narayanan et al. 2021, sec. 2.2)."""
    ranks = stages(round_cluster(4), "megatron", pp=4, grad_accum=16)
    activations = [rank["activations"] for rank in ranks]
    one = activations[2] / 2
    assert activations[:3] == pytest.approx([4 * one, 3 * one, 2 * one])


def test_full_recompute_keeps_one_input_per_layer(round_cluster: MakeCluster) -> None:
    """36 layers keep 4096 tokens x 4096 wide in bf16; the head keeps its norm (fp32 copy, normed, root) and output."""
    (rank,) = stages(round_cluster(1, memory_gb=400), "native", recompute="full", grad_accum=16)
    head = 4096 * (4096 * (4 + 2) + 4) + 4096 * 4096 * 2
    assert rank["activations"] == 36 * 4096 * 4096 * 2 + head


def test_more_of_what_saves_memory_needs_less(round_cluster: MakeCluster) -> None:
    def total(**values: Any) -> float:
        return sum(stages(round_cluster(8, memory_gb=1000), "native", dp_shard=8, grad_accum=2, **values)[0].values())

    levels = [total(sharding=level) for level in ("optimizer", "gradients", "parameters")]
    assert levels[0] > levels[1] >= levels[2]
    assert total(sharding="parameters", reshard_after_forward=True) < levels[2]
    assert (
        total(sharding="parameters", recompute="full")
        < total(sharding="parameters", recompute="full", recompute_layers=(18,))
        < levels[2]
    )
    assert total(sharding="parameters", loss_chunk=1024) < levels[2]
    assert total(sharding="parameters", compile=True) < levels[2]


def test_tensor_parallel_splits_state_and_the_sequence_splits_activations(round_cluster: MakeCluster) -> None:
    (plain,) = stages(round_cluster(8), "megatron", tp=8, grad_accum=16)
    (split,) = stages(round_cluster(8), "megatron", tp=8, sp=True, grad_accum=16)
    assert plain["parameters"] == pytest.approx(2 * QWEN3_8B / 8)
    assert split["activations"] < plain["activations"]


def test_experts_are_split_over_their_own_group(round_cluster: MakeCluster) -> None:
    """Qwen3-30B-A3B: 48 layers x 128 experts x 3 x 2048 x 768 are routed; ep 8 leaves an eighth of them on a rank."""
    routed = 48 * 128 * 3 * 2048 * 768
    dense = 30_532_122_624 - routed
    (rank,) = stages(
        round_cluster(8, memory_gb=500), "megatron", model="Qwen/Qwen3-30B-A3B", ep=8, dp_replicate=8, grad_accum=2
    )
    assert rank["parameters"] == pytest.approx(2 * (dense + routed / 8))
