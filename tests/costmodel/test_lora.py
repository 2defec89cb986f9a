"""What adapters add, against PEFT's rule and hand counts, and what freezing takes away."""

from collections.abc import Callable

import numpy as np
import pytest

from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.hardware import Cluster
from trainplan.costmodel.job import Job
from trainplan.costmodel.lora import adapter_parameters, module_sizes
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.stacks import STACKS
from trainplan.costmodel.step import estimate, price
from trainplan.costmodel.strategy import Strategy, StrategyTable
from trainplan.costmodel.work import Phase, Shapes, Work, layer_work
from trainplan.costmodel.workload import Lora, Workload

MakeCluster = Callable[..., Cluster]
QWEN = "Qwen/Qwen2.5-7B"
TOKENS, H, KV, FFN = 4096, 3584, 512, 18944
SUMS = {
    # inputs + outputs of each target module of a layer of Qwen2.5-7B
    "q_proj": H + H, "k_proj": H + KV, "v_proj": H + KV, "o_proj": H + H,
    "gate_proj": H + FFN, "up_proj": H + FFN, "down_proj": FFN + H,
}  # fmt: skip
WEIGHTS = H * (H + 2 * KV) + H * H + 3 * H * FFN


def lora(rank: int = 64, **values: object) -> Lora:
    return Lora(rank=rank, alpha=16, **values)  # type: ignore[arg-type]


def layer(cluster: Cluster, of: Lora | None, stack: str = "hf-peft", **strategy: object) -> list[Work]:
    workload = Workload(seq_len=TOKENS, global_batch_size=1, lora=of)
    table = StrategyTable.from_strategies([Strategy(**strategy)])  # type: ignore[arg-type]
    return layer_work(Shapes(Job(load_model(QWEN), cluster, workload), table, STACKS[stack]), "full", "dense")


def total(work: list[Work], phase: Phase, what: str = "flops", names: tuple[str, ...] = ()) -> float:
    return sum(float(np.squeeze(getattr(w, what))) for w in work if w.phase == phase and (not names or w.name in names))


def test_adapters_of_a_layer_by_hand() -> None:
    """64 (2 x 7168 + 2 x 4096 + 3 x 22528) = 64 x 90,112."""
    model = load_model(QWEN)
    assert adapter_parameters(model, lora(64), "full", "dense") == 64 * 90112 == 64 * sum(SUMS.values())
    attention_only = lora(64, target_modules=("q_proj", "v_proj"))
    assert adapter_parameters(model, attention_only, "full", "dense") == 64 * (7168 + 4096)
    assert adapter_parameters(model, lora(64, target_modules=("in_proj",)), "full", "dense") == 0


def test_peft_prints_the_same_number() -> None:
    """Qwen2.5-7B, rank 16, every linear layer: "trainable params: 40,370,176", as PEFT's users report it."""
    model = load_model(QWEN)
    assert model.num_layers * adapter_parameters(model, lora(16), "full", "dense") == 40_370_176


def test_modules_are_those_of_a_layers_kind() -> None:
    """A layer of experts has no dense MLP to adapt; a gate doubles the query projection's outputs (Qwen3-Next)."""
    assert set(module_sizes(load_model("Qwen/Qwen3-30B-A3B"), "full", "moe")) == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
    gated = load_model("Qwen/Qwen3-Next-80B-A3B")
    assert module_sizes(gated, "full", "moe")["q_proj"] == (2048, 2 * 16 * 256)
    assert module_sizes(gated, "linear", "moe") == {}


def test_frozen_weights_have_input_gradients_and_no_weight_gradients(round_cluster: MakeCluster) -> None:
    """2 FLOP per weight and token forward and back; of weight gradients only the adapters' 2 r (k + n) per token."""
    names = (*SUMS, "mlp_down")
    work = layer(round_cluster(1), lora(64))
    assert total(work, "forward", names=names) == pytest.approx(2 * WEIGHTS * TOKENS)
    assert total(work, "input_grad", names=names) == pytest.approx(2 * WEIGHTS * TOKENS)
    assert total(work, "weight_grad", names=names) == 0
    adapters = 2 * 64 * sum(SUMS.values()) * TOKENS
    for phase in ("forward", "input_grad", "weight_grad"):
        assert total(work, phase, names=("lora_a", "lora_b")) == pytest.approx(adapters)  # type: ignore[arg-type]
    full = layer(round_cluster(1), None)
    assert total(full, "weight_grad") == pytest.approx(2 * WEIGHTS * TOKENS)
    assert total(work, "weight_grad") == pytest.approx(adapters)


def test_only_target_modules_get_adapters(round_cluster: MakeCluster) -> None:
    work = layer(round_cluster(1), lora(64, target_modules=("q_proj", "v_proj")))
    assert total(work, "weight_grad") == pytest.approx(2 * 64 * (7168 + 4096) * TOKENS)
    # A, B, dropout, its mask's product, scaling and addition: 2 products and 4 kernels each.
    assert sum(int(np.squeeze(w.launches)) for w in work if w.phase == "forward" and "lora" in w.name) == 2 * (2 + 4)


def test_a_fused_projection_counts_as_its_modules(round_cluster: MakeCluster) -> None:
    """Megatron's one product for q, k and v gets one adapter over all of its columns."""
    work = layer(round_cluster(1), lora(64, target_modules=("q_proj", "k_proj", "v_proj")), "megatron")
    assert total(work, "weight_grad") == pytest.approx(2 * 64 * (H + H + 2 * KV) * TOKENS)


def test_four_bit_weights_are_turned_into_bf16_before_every_product(round_cluster: MakeCluster) -> None:
    """17 bytes per weight, forward and again backward: shift, cast, mask, zeros and scale, by torch's operators."""
    plain, quantised = (layer(round_cluster(1), lora(64, base_dtype=of)) for of in ("bf16", "int4"))
    for phase in ("forward", "input_grad"):
        added = total(quantised, phase, "bytes") - total(plain, phase, "bytes")  # type: ignore[arg-type]
        assert added == pytest.approx(17 * WEIGHTS)
    assert total(quantised, "weight_grad", "bytes") == total(plain, "weight_grad", "bytes")
    assert {w.unit for w in quantised if w.name == "dequantise"} == {"memory"}


def test_adapters_cost_time_and_freezing_saves_it(round_cluster: MakeCluster) -> None:
    """A wider adapter is slower; a frozen step of long sequences is faster than a full one; 4-bit bases are slower."""

    def step_s(of: Lora | None) -> float:
        job = Job(
            load_model(QWEN), round_cluster(1, memory_gb=2000), Workload(seq_len=8192, global_batch_size=4, lora=of)
        )
        return estimate(job, "native", Strategy(grad_accum=4)).step_time_s.mid

    assert step_s(lora(8)) < step_s(lora(256))
    assert step_s(lora(16, target_modules=("q_proj",))) < step_s(None)
    assert step_s(lora(16)) < step_s(lora(16, base_dtype="int4"))


def memory(cluster: Cluster, of: Lora | None, stack: str, **strategy: object) -> dict[str, float]:
    workload = Workload(seq_len=1024, global_batch_size=8, lora=of)
    job = Job(load_model(QWEN), cluster, workload)
    table = StrategyTable.from_strategies([Strategy(grad_accum=8 // cluster.num_gpus, **strategy)])  # type: ignore[arg-type]
    (rank,) = price(job, stack, table).memory
    return {name: float(np.squeeze(column)) for name, column in rank.parts.items()}


ADAPTERS = 28 * 64 * 90112
BASE = 7_615_616_512  # Qwen2.5-7B's parameters, as its card counts them
EDGE = 2 * 152064 * H + H  # embedding, head and last norm stay in bf16 under int4


def test_state_of_adapters_on_a_frozen_base_by_hand(round_cluster: MakeCluster) -> None:
    """Base in bf16, or 4 bits with a scale of 2 bytes and a zero of half a byte for 128; adapters 4 + 4 + 8 bytes."""
    one = memory(round_cluster(1), lora(64), "hf-peft", recompute="full")
    assert one["parameters"] == pytest.approx(2 * BASE + 4 * ADAPTERS, rel=1e-6)
    assert one["gradients"] == pytest.approx(4 * ADAPTERS)
    assert one["optimizer"] == pytest.approx(8 * ADAPTERS)
    int4 = memory(round_cluster(1), lora(64, base_dtype="int4"), "hf-peft-gptq", recompute="full")
    expected = (BASE - EDGE) * (0.5 + 2.5 / 128) + 2 * EDGE + 4 * ADAPTERS
    assert int4["parameters"] == pytest.approx(expected, rel=1e-6)


def test_fsdp_shards_the_base_and_others_only_at_level_three(round_cluster: MakeCluster) -> None:
    four = {"dp_shard": 4, "sharding": "parameters", "reshard_after_forward": True, "recompute": "full"}
    sharded = memory(round_cluster(4), lora(64), "accelerate", **four)
    assert sharded["parameters"] == pytest.approx((2 * BASE + 4 * ADAPTERS) / 4, rel=1e-6)
    assert 0 < sharded["gathered"] < 2 * BASE / 4  # two layers, embedding and head
    zero2 = memory(round_cluster(4), lora(64), "hf-peft-zero2", dp_shard=4, sharding="gradients", recompute="full")
    assert zero2["parameters"] == pytest.approx(2 * BASE + 4 * ADAPTERS, rel=1e-6)
    assert zero2["gradients"] == pytest.approx(4 * ADAPTERS / 4)
    assert zero2["optimizer"] == pytest.approx(8 * ADAPTERS / 4)


@pytest.mark.parametrize(
    ("seq_len", "published_gb"), [(256, 20.1), (512, 20.4), (1024, 21.5), (2048, 23.8), (4096, 29.7), (8192, 36.6)]
)
def test_a_published_run_needs_what_its_table_says(seq_len: int, published_gb: float) -> None:
    """Qwen-7B's README of 2023: LoRA of rank 64 on one A100, batch 1. The tool that measured is not named: 8 %."""
    model = ModelSpec(
        name="Qwen-7B", family="llama", num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_heads=32,
        num_kv_heads=32, head_dim=128, vocab_size=151936, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    job = Job(model, load_cluster("1xA100"), Workload(seq_len=seq_len, global_batch_size=8, lora=lora(64)))
    knobs = {"attention": "flash", "fused_kernels": ("norm", "rope"), "recompute": "full", "grad_accum": 8}
    (rank,) = price(job, "hf-peft", StrategyTable.from_strategies([Strategy(**knobs)])).memory  # type: ignore[arg-type]
    assert float(np.squeeze(rank.device(1, gpu=True))) / 1e9 == pytest.approx(published_gb, rel=0.08)


def test_the_optimizer_steps_adapters_only(round_cluster: MakeCluster) -> None:
    workload = Workload(seq_len=256, global_batch_size=1)
    cluster = round_cluster(1)
    full = Job(load_model(QWEN), cluster, workload)
    frozen = Job(load_model(QWEN), cluster, workload.model_copy(update={"lora": lora(64)}))
    steps = [estimate(job, "hf-peft", Strategy(recompute="full")).breakdown_s["optimizer"] for job in (full, frozen)]
    assert steps[1] / steps[0] == pytest.approx(ADAPTERS / BASE, rel=1e-3)
