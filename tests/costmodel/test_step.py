"""Step time against hand counts, closed forms and known directions."""

from collections.abc import Callable

import numpy as np
import pytest

from trainplan.costmodel.bounds import lower_bound_s
from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.graph import Work
from trainplan.costmodel.hardware import Cluster
from trainplan.costmodel.job import Job
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.rates import rates
from trainplan.costmodel.simulate import step_seconds
from trainplan.costmodel.stacks import STACKS
from trainplan.costmodel.step import assumed_rates, critical_seconds, estimate, model_flops_per_token, price
from trainplan.costmodel.strategy import Strategy, StrategyTable
from trainplan.costmodel.units import unit_seconds
from trainplan.costmodel.work import Shapes, layer_work
from trainplan.costmodel.workload import Workload

MakeCluster = Callable[..., Cluster]
MEGATRON = {"attention": "flash", "fused_kernels": ("cross_entropy", "norm", "rope", "swiglu"), "loader_workers": 2}


def job(cluster: Cluster, model: str = "Qwen/Qwen3-8B", gbs: int = 16, seq_len: int = 4096) -> Job:
    return Job(load_model(model), cluster, Workload(seq_len=seq_len, global_batch_size=gbs))


def step_s(of: Job, backend: str, **values: object) -> float:
    values = {**(MEGATRON if backend == "megatron" else {}), **values}
    return estimate(of, backend, Strategy(**values)).step_time_s.mid  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B", "microsoft/phi-4"])
def test_matrix_products_of_a_layer_are_two_flop_per_weight_and_token(round_cluster: MakeCluster, model: str) -> None:
    """Every weight matrix is multiplied once per token forward, and once for each gradient."""
    of = job(round_cluster(1), model)
    shapes = Shapes(of, StrategyTable.from_strategies([Strategy(grad_accum=16)]), STACKS["native"])
    work = [w for w in layer_work(shapes, "full", "dense") if w.unit == "matmul"]
    h, heads, kv = (
        of.model.hidden_size,
        of.model.num_heads * of.model.head_dim,
        of.model.num_kv_heads * of.model.head_dim,
    )
    ffn = of.model.ffn_hidden_size or 0
    weights = h * (heads + 2 * kv) + heads * h + 3 * h * ffn
    for phase in ("forward", "input_grad", "weight_grad"):
        assert sum(float(np.squeeze(w.flops)) for w in work if w.phase == phase) == pytest.approx(2 * weights * 4096)


def test_causal_attention_is_two_flop_per_score_pair_half_of_them(round_cluster: MakeCluster) -> None:
    """Q K^T and P V: 2 x 2 S^2 d per head, half of it causal; the backward is 2.5 times as much."""
    of = job(round_cluster(1))
    shapes = Shapes(of, StrategyTable.from_strategies([Strategy(grad_accum=16)]), STACKS["native"])
    core = [w for w in layer_work(shapes, "full", "dense") if w.part == "core_attn"]
    forward, backward = (
        sum(float(np.squeeze(w.flops)) for w in core if w.phase == phase) for phase in ("forward", "input_grad")
    )
    assert forward == pytest.approx(2 * 4096**2 * 128 * 32)
    assert backward == pytest.approx(2.5 * forward)


def test_routed_experts_do_the_work_of_the_chosen_ones(round_cluster: MakeCluster) -> None:
    of = job(round_cluster(1), "Qwen/Qwen3-30B-A3B")
    shapes = Shapes(of, StrategyTable.from_strategies([Strategy(grad_accum=16)]), STACKS["megatron"])
    experts = [w for w in layer_work(shapes, "full", "moe") if w.name.startswith("experts") and w.phase == "forward"]
    assert sum(float(np.squeeze(w.flops)) for w in experts) == pytest.approx(2 * 4096 * 8 * 3 * 2048 * 768)


def test_model_flops_follow_the_published_definition() -> None:
    """Llama-3.1-8B at 8192: 6 (N - embedding) + 6 L S h; the last is 12 L S h, halved for causal attention."""
    of = job(load_cluster("8xH100"), "meta-llama/Llama-3.1-8B", seq_len=8192)
    assert model_flops_per_token(of) == pytest.approx(6 * (8_030_261_248 - 128256 * 4096) + 6 * 32 * 8192 * 4096)


def test_an_even_pipeline_takes_the_closed_form(round_cluster: MakeCluster) -> None:
    """1F1B, p equal stages, m micro-batches: (m + p - 1)(F + B), Narayanan et al. 2021, arXiv:2104.04473, sec. 2.2.

    Equal stages: a vocabulary of one token makes embedding and head vanish; links take no time.
    """
    spec = ModelSpec(
        name="even", family="gpt", num_layers=8, hidden_size=1024, ffn_hidden_size=4096, num_heads=8, num_kv_heads=8,
        head_dim=128, vocab_size=1, max_position_embeddings=4096,
    )  # fmt: skip
    of = Job(spec, round_cluster(4), Workload(seq_len=4096, global_batch_size=8))
    alone = Job(spec, round_cluster(1), of.workload)
    piped = estimate(of, "megatron", Strategy(pp=4, grad_accum=8, **MEGATRON))  # type: ignore[arg-type]
    one = estimate(alone, "megatron", Strategy(grad_accum=8, **MEGATRON))  # type: ignore[arg-type]
    work = one.breakdown_s["forward"] + one.breakdown_s["backward"]
    busy = piped.breakdown_s["forward"] + piped.breakdown_s["backward"]
    assert busy == pytest.approx(work / 4, rel=0.03)  # the head's norm, 2 % of a stage here, is on the last one
    ideal = piped.step_time_s.mid - piped.breakdown_s["optimizer"] - piped.breakdown_s.get("exposed_pipeline", 0)
    assert ideal == pytest.approx(busy * (8 + 3) / 8, rel=0.03)  # the same excess
    assert piped.bubble_frac == pytest.approx(3 / 11, abs=0.03)


def test_the_breakdown_adds_up_and_nothing_is_negative() -> None:
    of = job(load_cluster("2x8xH100"), gbs=64)
    for values in (
        {"tp": 2, "sp": True, "pp": 4, "dp_shard": 2, "sharding": "optimizer", "grad_accum": 32},
        {"pp": 4, "vpp": 3, "schedule": "interleaved", "dp_replicate": 4, "grad_accum": 16},
        {"cp": 2, "dp_shard": 8, "sharding": "optimizer", "grad_accum": 8, "recompute": "full"},
    ):
        result = estimate(of, "megatron", Strategy(**{**MEGATRON, **values}))  # type: ignore[arg-type]
        assert sum(result.breakdown_s.values()) == pytest.approx(result.step_time_s.mid, rel=1e-6)
        assert min(result.breakdown_s.values()) > 0
        assert result.step_time_s.low < result.step_time_s.mid < result.step_time_s.high


def test_bounds_are_below_what_they_bound() -> None:
    of = job(load_cluster("2x8xH100"), gbs=64)
    for backend, values in (
        ("megatron", {"pp": 8, "dp_replicate": 2, "grad_accum": 32}),
        ("megatron", {"pp": 2, "vpp": 6, "schedule": "interleaved", "tp": 4, "dp_replicate": 2, "grad_accum": 32}),
        ("native", {"dp_shard": 16, "sharding": "parameters", "reshard_after_forward": True, "grad_accum": 4}),
        ("native", {"dp_replicate": 2, "dp_shard": 8, "sharding": "optimizer", "grad_accum": 4}),
    ):
        values = {**(MEGATRON if backend == "megatron" else {}), **values}
        table, stack = StrategyTable.from_strategies([Strategy(**values)]), STACKS[backend]  # type: ignore[arg-type]
        units = unit_seconds(of, stack, table, assumed_rates(of, stack, table.row(0)))
        bound_s = float(lower_bound_s(of, stack, table, units)[0])
        assert 0.9 < bound_s / float(price(of, backend, table).step_s()[0]) <= 1 + 1e-12


def test_known_directions(round_cluster: MakeCluster) -> None:
    of = job(round_cluster(8), gbs=64)
    fsdp = {"dp_shard": 8, "sharding": "parameters", "reshard_after_forward": True, "grad_accum": 8}
    plain = step_s(of, "native", **fsdp)
    assert (
        step_s(of, "native", **fsdp, recompute="full")
        > step_s(of, "native", **fsdp, recompute="full", recompute_layers=(18,))
        > plain
    )
    assert step_s(of, "native", **fsdp, compile=True) < plain
    assert step_s(of, "native", **fsdp, loss_chunk=1024) > plain
    assert step_s(of, "native", **{**fsdp, "reshard_after_forward": False}) <= plain
    assert step_s(of, "native", dp_replicate=8, grad_accum=8) <= plain
    assert step_s(of, "native", dp_replicate=8, grad_accum=8, reduce_dtype="bf16") <= step_s(
        of, "native", dp_replicate=8, grad_accum=8
    )


def test_a_faster_machine_is_never_slower(round_cluster: MakeCluster) -> None:
    slow, fast = round_cluster(8), round_cluster(8)
    device = fast.device.model_dump()
    for name in ("matmul_flops_per_s", "attention_flops_per_s"):
        for precision in device[name]:
            device[name][precision]["value"] *= 2
    device["memory_bytes_per_s"]["value"] *= 2
    fast = Cluster(**{**fast.model_dump(), "device": device})
    strategy = {"dp_shard": 8, "sharding": "parameters", "reshard_after_forward": True, "grad_accum": 2}
    assert step_s(job(fast), "native", **strategy) < step_s(job(slow), "native", **strategy)


def test_less_certain_numbers_give_a_wider_interval(round_cluster: MakeCluster) -> None:
    def width(provenance: str) -> float:
        interval = estimate(job(round_cluster(1, 400, provenance)), "native", Strategy(grad_accum=16)).step_time_s
        return (interval.high - interval.low) / interval.mid

    assert width("measured") < width("fitted") < width("datasheet")


def test_draws_are_around_the_stated_rates() -> None:
    drawn = rates(load_cluster("8xH100"), "bf16", draws=64).matmul["bf16"]
    assert np.shape(drawn) == (64, 1)
    assert float(np.median(drawn)) == pytest.approx(794.5e12, rel=0.05)  # measured: a spread of 5 %


def test_price_per_billion_tokens(round_cluster: MakeCluster) -> None:
    """8 GPUs at 2 per hour, so a second costs 16 / 3600."""
    base = round_cluster(8)
    cost = {"value": 2.0, "provenance": "datasheet", "source": "a price list"}
    of = job(Cluster(**{**base.model_dump(), "price_per_gpu_hour": cost}))
    result = estimate(of, "native", Strategy(dp_shard=8, sharding="parameters", grad_accum=2))
    assert result.price_per_1b_tokens == pytest.approx(16 / 3600 * 1e9 / result.tokens_per_s)


def test_a_gpu_that_nobody_measured_says_so_and_has_a_wide_interval() -> None:
    """The L40S has datasheet numbers and what other GPUs' shares of theirs suggest; the A100 has tables."""

    def half_width(cluster: str) -> tuple[str, float]:
        found = estimate(job(load_cluster(cluster), "Qwen/Qwen2.5-0.5B"), "native", Strategy(grad_accum=16))
        step = found.step_time_s
        return found.weakest_provenance, (step.high - step.low) / 2 / step.mid

    unknown, known = half_width("1xL40S"), half_width("1xA100")
    assert unknown[0] == "datasheet"
    assert known[0] != "datasheet"
    assert unknown[1] > 1.3 * known[1]


def test_the_longest_path_is_the_derivative_of_the_step() -> None:
    """A kind of work that takes 1e-6 more makes the step longer by 1e-6 of its seconds on the path."""
    of = job(load_cluster("2x8xH100"), gbs=64)
    values = {**MEGATRON, "pp": 4, "vpp": 3, "schedule": "interleaved", "dp_replicate": 4, "grad_accum": 16}
    strategy = Strategy(**values)  # type: ignore[arg-type]
    found = critical_seconds(of, "megatron", strategy)
    priced = price(of, "megatron", StrategyTable.from_strategies([strategy]))
    step = float(priced.step_s()[0])
    assert sum(found.values()) == pytest.approx(step, rel=1e-9)
    assert {"forward", "backward", "send_forward"} <= set(found)
    for kind in (Work.FORWARD, Work.BACKWARD, Work.SEND_FORWARD, Work.FINISH):
        slower = dict(priced.work.seconds) | {kind: priced.work.seconds[kind] * (1 + 1e-6)}
        longer = float(step_seconds(priced.work.graph, priced.work.graph.classes.durations(slower))[0])
        assert (longer - step) / 1e-6 == pytest.approx(found.get(kind.name.lower(), 0.0), rel=1e-3, abs=1e-6)


def test_strategies_with_different_attention_are_priced_together_as_each_alone() -> None:
    """Every kernel has a factor of its own, so one's must not price the other."""
    of = job(load_cluster("8xH100"), gbs=8)
    strategies = [
        Strategy(**{**MEGATRON, "dp_replicate": 8, "attention": kind})  # type: ignore[arg-type]
        for kind in ("eager", "flash", "cudnn")
    ]
    together = price(of, "megatron", StrategyTable.from_strategies(strategies)).step_s()
    alone = [float(price(of, "megatron", StrategyTable.from_strategies([s])).step_s()[0]) for s in strategies]
    assert together.tolist() == pytest.approx(alone, rel=1e-12)
    assert len(set(alone)) == 3
