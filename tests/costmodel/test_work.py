"""The work of a layer against hand counts: what is multiplied, what is moved, and by how many kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trainplan.costmodel.hardware import Cluster
from trainplan.costmodel.job import Job
from trainplan.costmodel.model import MLA, LinearAttention, ModelSpec, MoE
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.stacks import STACKS
from trainplan.costmodel.strategy import Strategy, StrategyTable
from trainplan.costmodel.work import (
    Mixer,
    Phase,
    Product,
    Shapes,
    Work,
    attended,
    attended_causal,
    attention_work,
    embedding_work,
    head_work,
    layer_work,
    mlp_work,
)
from trainplan.costmodel.workload import Workload

MakeCluster = Callable[..., Cluster]
T = 1024
SMALL: dict[str, Any] = {
    "name": "small", "family": "llama", "num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 640, "num_heads": 8,
    "num_kv_heads": 2, "head_dim": 32, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip


def shapes(
    cluster: Cluster, model: ModelSpec, stack: str = "native", micro_batch_size: int = 1, **strategy: Any
) -> Shapes:
    histogram = strategy.pop("length_histogram", ())
    workload = Workload(seq_len=T, global_batch_size=micro_batch_size, length_histogram=histogram)
    one = Strategy(micro_batch_size=micro_batch_size, **strategy)
    return Shapes(Job(model, cluster, workload), StrategyTable.from_strategies([one]), STACKS[stack])


def spec(**values: Any) -> ModelSpec:
    return ModelSpec(**{**SMALL, **values})


def total(work: list[Work], phase: Phase, what: str = "flops", *names: str) -> float:
    return sum(float(np.squeeze(getattr(w, what))) for w in work if w.phase == phase and (not names or w.name in names))


def test_unfused_attention_computes_the_whole_square(round_cluster: MakeCluster) -> None:
    """4 b h s^2 d forward (scores and context, 2 b h s^2 d each), twice that backward."""
    s = shapes(round_cluster(1), spec(), micro_batch_size=3, attention="eager")
    core = [w for w in attention_work(s, "full") if w.part == "core_attn"]
    square = 4 * 3 * 8 * T**2 * 32
    assert total(core, "forward", "flops", "scores", "context") == pytest.approx(square)
    assert total(core, "input_grad", "flops", "scores", "context") == pytest.approx(2 * square)
    assert total(core, "weight_grad") == 0
    # Fused attention reads the causal half of it.
    fused = list(attention_work(shapes(round_cluster(1), spec(), micro_batch_size=3, attention="sdpa"), "full"))
    assert total(fused, "forward", "flops", "core_attention") == pytest.approx(square / 2)
    assert total(fused, "input_grad", "flops", "core_attention") == pytest.approx(2.5 * square / 2)


def test_scores_move_through_memory_by_hand(round_cluster: MakeCluster) -> None:
    """Eager bf16 per score: scale 4, mask 6, cast to fp32 6, softmax 8, cast back 6 bytes: 30.

    Megatron's masked softmax reads and writes 2 each, dropout again and a byte of mask: 9.
    """
    scores = 2 * 8 * T**2
    for stack, forward in (("native", 30), ("megatron-lm-2022", 9)):
        s = shapes(round_cluster(1), spec(), stack, micro_batch_size=2, attention="eager")
        softmax = [w for w in attention_work(s, "full") if w.name == "softmax"]
        assert total(softmax, "forward", "bytes") == pytest.approx(forward * scores)
        assert total(softmax, "input_grad", "bytes") > forward * scores / 2
        assert {w.unit for w in softmax} == {"memory"}


def test_a_fused_projection_is_one_product_of_the_same_flop(round_cluster: MakeCluster) -> None:
    """Query, key and value 256, 64 and 64 columns wide: one product of 384; gate and up 640 each: one of 1,280."""
    model = spec()
    one, three = (
        list(layer_work(shapes(round_cluster(1), model, stack), "full", "dense")) for stack in ("megatron", "native")
    )
    names = {"forward": 0.0, "input_grad": 0.0, "weight_grad": 0.0}
    for phase in names:
        fused = total(one, phase, "flops", "qkv_proj", "mlp_up")  # type: ignore[arg-type]
        single = total(three, phase, "flops", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # type: ignore[arg-type]
        assert fused == single == pytest.approx(2 * T * 256 * (384 + 1280))
    (qkv,) = [w for w in one if w.name == "qkv_proj" and w.phase == "forward"]
    assert isinstance(qkv.shape, Product)
    assert [int(np.squeeze(of)) for of in (qkv.shape.m, qkv.shape.n, qkv.shape.k)] == [T, 384, 256]
    # The input is read once instead of three times.
    saved = total(three, "forward", "bytes", "q_proj", "k_proj", "v_proj") - total(one, "forward", "bytes", "qkv_proj")
    assert saved == pytest.approx(2 * 2 * T * 256)


def test_products_of_the_three_phases_by_hand(round_cluster: MakeCluster) -> None:
    """y[T, 256] = x[T, 640] w: dx is T x 256 by 256 x 640, dw is 640 x T by T x 256."""
    work = list(mlp_work(shapes(round_cluster(1), spec()), "dense"))
    sizes = {}
    for w in work:
        if w.name == "mlp_down":
            assert isinstance(w.shape, Product)
            sizes[w.phase] = [int(np.squeeze(of)) for of in (w.shape.m, w.shape.n, w.shape.k)]
            assert float(np.squeeze(w.flops)) == 2 * T * 640 * 256
    assert sizes == {"forward": [T, 256, 640], "input_grad": [T, 640, 256], "weight_grad": [640, 256, T]}


def test_megatron_adds_weight_gradients_to_fp32(round_cluster: MakeCluster) -> None:
    """8 bytes read and written per weight instead of the 2 of a bf16 result."""
    models = [list(mlp_work(shapes(round_cluster(1), spec(), stack), "dense")) for stack in ("megatron", "native")]
    added, plain = (total(work, "weight_grad", "bytes", "mlp_down") for work in models)
    assert added - plain == pytest.approx(6 * 640 * 256)


def test_a_gelu_model_has_two_matrices_and_one_kernel(round_cluster: MakeCluster) -> None:
    """4 T h f forward; GELU reads and writes f per token where SwiGLU reads two and writes one."""
    model = spec(gated_mlp=False, hidden_act="gelu", position="learned", norm="layer", num_kv_heads=8)
    work = list(mlp_work(shapes(round_cluster(1), model, "megatron"), "dense"))
    assert [w.name for w in work if w.phase == "forward"] == ["mlp_up", "gelu", "mlp_down"]
    assert total(work, "forward") == 4 * T * 256 * 640
    assert total(work, "forward", "bytes", "gelu") == 2 * 2 * T * 640
    gated = list(mlp_work(shapes(round_cluster(1), spec(), "megatron"), "dense"))
    assert total(gated, "forward", "bytes", "glu") == 3 * 2 * T * 640
    layer = layer_work(shapes(round_cluster(1), model, "megatron"), "full", "dense")
    assert "rope" not in {w.name for w in layer}


def test_latent_attention_by_hand(round_cluster: MakeCluster) -> None:
    """DeepSeek-V3 (arXiv:2412.19437, section 4.2), multiplications of weights per token and layer.

    7168 x 1536 + 1536 x 128 x 192 (queries), 7168 x 576 (latent and shared key), 512 x 128 x 256 (keys and values),
    128 x 128 x 7168 (output): 187.1 M; and causal attention over 192 + 128 wide heads.
    """
    model = load_model("deepseek-ai/DeepSeek-V3")
    work = list(attention_work(shapes(round_cluster(1), model), "full"))
    weights = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert weights == 187_105_280
    core = total(work, "forward", "flops", "core_attention")
    assert total(work, "forward") - core == pytest.approx(2 * weights * T)
    assert core == pytest.approx(2 * 128 * T * (T / 2) * (192 + 128))
    (mixer,) = [w.shape for w in work if w.name == "core_attention" and w.phase == "forward"]
    assert isinstance(mixer, Mixer)
    assert (mixer.qk_width, mixer.v_width) == (192, 128)
    direct = spec(
        num_kv_heads=8,
        mla=MLA(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=20),
    )
    work = list(attention_work(shapes(round_cluster(1), direct), "full"))
    weights = 256 * 8 * 32 + 256 * 24 + 16 * 8 * 44 + 8 * 20 * 256
    assert total(work, "forward") - total(work, "forward", "flops", "core_attention") == pytest.approx(2 * weights * T)


def test_delta_net_by_hand(round_cluster: MakeCluster) -> None:
    """2 key heads of 12, 4 value heads of 14, chunks of 64 (Yang et al. 2024, arXiv:2412.06464, section 3.3).

    Per token and value head: k k^T, q k^T and the triangular inverse times k over a chunk, 2 x 64 x 12 each; that
    inverse times v and the scores times v, 2 x 64 x 14 each; the state read by k and q and written, 2 x 12 x 14 each.
    Projections: q and k of 24, v and its gate of 56, two numbers per value head.
    """
    mixer = LinearAttention(num_key_heads=2, num_value_heads=4, key_head_dim=12, value_head_dim=14, conv_kernel_size=3)
    model = spec(attention_pattern=("linear",), linear_attention=mixer)
    work = list(attention_work(shapes(round_cluster(1), model), "linear"))
    per_head = 3 * 2 * 64 * 12 + 2 * 2 * 64 * 14 + 3 * 2 * 12 * 14
    assert total(work, "forward", "flops", "delta_rule") == T * 4 * per_head
    assert total(work, "input_grad", "flops", "delta_rule") == 2 * T * 4 * per_head
    assert total(work, "forward", "flops", "in_proj") == 2 * T * 256 * (2 * 24 + 2 * 56 + 2 * 4)
    assert total(work, "forward", "flops", "out_proj") == 2 * T * 56 * 256
    # Twice the sequences, twice the work: nothing is quadratic.
    twice = list(attention_work(shapes(round_cluster(1), model, micro_batch_size=2), "linear"))
    assert total(twice, "forward") == 2 * total(work, "forward")


def test_experts_by_hand(round_cluster: MakeCluster) -> None:
    """8 experts of 96, 2 per token, and one shared of 64: 3 matrices each, and the router's 8 columns."""
    moe = MoE(num_experts=8, top_k=2, ffn_hidden_size=96, shared_ffn_hidden_size=64)
    model = spec(mlp_pattern=("moe",), moe=moe)
    work = list(mlp_work(shapes(round_cluster(1), model), "moe"))
    assert total(work, "forward") == 2 * T * 256 * (3 * (2 * 96 + 64) + 8)
    assert total(work, "weight_grad") == total(work, "forward")
    assert {
        float(np.squeeze(w.shape.groups)) for w in work if w.name == "experts_down" and isinstance(w.shape, Product)
    } == {8}
    # Permuting and combining: each routed token of h is read and written by either, 3 e per element and pass.
    assert total(work, "forward", "bytes", "residual") == 3 * 2 * 2 * (2 * T) * 256


def test_tensor_parallel_ranks_share_the_products(round_cluster: MakeCluster) -> None:
    one, four = (
        layer_work(shapes(round_cluster(8), load_model("Qwen/Qwen3-8B"), tp=tp), "full", "dense") for tp in (1, 4)
    )
    for phase in ("forward", "input_grad", "weight_grad"):
        assert total(one, phase) == pytest.approx(4 * total(four, phase))  # type: ignore[arg-type]


def test_positions_that_a_token_reads() -> None:
    """Half of its document; with a window w of n, w - w^2 / 2n; documents count by their tokens."""
    assert attended_causal(1000, None) == 500
    assert attended_causal(1000, 200) == 200 - 20
    assert attended_causal(100, 200) == 50
    workload = Workload(seq_len=1000, global_batch_size=1, length_histogram=((100, 3), (700, 1)))
    assert attended(workload, None) == pytest.approx((300 * 50 + 700 * 350) / 1000)


def test_skipped_documents_cost_less_than_masked_ones(round_cluster: MakeCluster) -> None:
    """Documents of 256 in rows of 1,024: a quarter of the causal half where attention skips, the square with a mask."""
    forward = {
        stack: total(
            list(attention_work(shapes(round_cluster(1), spec(), stack, length_histogram=((256, 1.0),)), "full")),
            "forward", "flops", "core_attention",
        )
        for stack in ("torchtitan", "native")
    }  # fmt: skip
    square = 4 * 8 * T**2 * 32
    for stack, flops in forward.items():
        assert flops == pytest.approx(square if STACKS[stack].masks_documents else square / 2 / 4)


def test_embedding_and_head_by_hand(round_cluster: MakeCluster) -> None:
    """A row of 256 is read and written per token; the head multiplies 256 x 1000; a chunked loss does so twice."""
    s = shapes(round_cluster(1), spec())
    embedding = embedding_work(s)
    assert total(embedding, "forward", "bytes") == 2 * 2 * T * 256
    assert total(embedding, "weight_grad", "bytes") == 2 * 2 * T * 256 + 2 * 2 * 1000 * 256
    head = head_work(s)
    products = 2 * T * 256 * 1000
    assert total(head, "forward") == total(head, "input_grad") == total(head, "weight_grad") == products
    chunked = head_work(shapes(round_cluster(1), spec(), loss_chunk=128))
    assert total(chunked, "input_grad") == 2 * products
