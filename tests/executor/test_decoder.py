"""The decoder against transformers, bit by bit, and packed rows against separate documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.model import MLA, LinearAttention, ModelSpec, MoE
from trainplan.costmodel.model_config import from_hf_config, load_model
from trainplan.executor.decoder import CausalLm, check_supported
from trainplan.executor.loss import IGNORED
from trainplan.executor.weights import load_pretrained

FAMILIES = ("qwen2", "qwen2-tied", "qwen3", "qwen3-tied", "llama", "llama3", "llama-linear", "mistral")


def load(folder: Path) -> CausalLm:
    model = CausalLm(load_model(str(folder)))
    load_pretrained(model, folder)
    return model


def oracle_of(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def relative_gap(ours: torch.Tensor, theirs: torch.Tensor, scale: float) -> float:
    return float((ours - theirs).abs().max()) / scale


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_bitwise_and_gradients_close_to_transformers(
    family: str, sharded: bool, model_dirs: Callable[..., Path]
) -> None:
    """1e-5 of the largest gradient: matrix products may be ordered differently in the backward pass."""
    folder = model_dirs(family, sharded=sharded)
    assert len(list(folder.glob("*.safetensors"))) > 1 or not sharded
    ours, theirs = load(folder), oracle_of(folder)
    ids = torch.randint(0, ours.spec.vocab_size, (2, 100), generator=torch.Generator().manual_seed(1))
    assert torch.equal(ours(ids), theirs(ids).logits)
    labels = torch.cat((ids[:, 1:], torch.full((2, 1), IGNORED)), dim=1)
    loss = ours(ids, labels) / (labels != IGNORED).sum()
    expected = theirs(ids, labels=ids).loss
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    loss.backward()
    expected.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    scale = max(float(g.abs().max()) for g in gradients.values())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert relative_gap(parameter.grad, gradients[name], scale) < 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_spec(family: str, tiny: Any) -> None:
    with torch.device("meta"):
        model = CausalLm(from_hf_config(tiny.config(family), family))
    assert sum(p.numel() for p in model.parameters()) == model.spec.parameters()


def test_bf16_logits_are_bitwise_equal_to_transformers(model_dirs: Callable[..., Path]) -> None:
    folder = model_dirs("qwen3")
    ours, theirs = load(folder).bfloat16(), oracle_of(folder, torch.bfloat16)
    ours.reset_buffers("cpu")  # .bfloat16() rounded the rotary frequencies too, which stay fp32 in training
    ids = torch.arange(64)[None] % 300
    assert torch.equal(ours(ids), theirs(ids).logits)


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_a_packed_row_equals_its_documents_alone(family: str, model_dirs: Callable[..., Path]) -> None:
    """No attention across documents, positions restart, and each document's loss and gradient are its own."""
    model = load(model_dirs(family))
    lengths = (40, 17, 30)
    documents = [torch.randint(0, 384, (n,), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(lengths)]
    separate = [model(document[None])[0] for document in documents]
    padding = torch.zeros(9, dtype=torch.int64)
    ids = torch.cat((*documents, padding))[None]
    positions = torch.cat([torch.arange(n) for n in (*lengths, 9)])[None]
    numbers = torch.cat([torch.full((n,), i) for i, n in enumerate((*lengths, 9))])[None]
    packed = model(ids, position_ids=positions, documents=numbers)[0]
    for document, alone in zip(packed.split((*lengths, 9)), separate, strict=False):
        torch.testing.assert_close(document, alone, atol=2e-6, rtol=0)  # another kernel sums in another order

    labels = torch.cat([torch.cat((d[1:], torch.tensor([IGNORED]))) for d in documents] + [padding + IGNORED])[None]
    together = model(ids, labels, positions, numbers)
    together.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    apart = sum(model(d[None], torch.cat((d[1:], torch.tensor([IGNORED])))[None]) for d in documents)
    assert isinstance(apart, torch.Tensor)
    assert together.item() == pytest.approx(apart.item(), rel=1e-6)
    apart.backward()
    scale = max(float(g.abs().max()) for g in gradients)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert relative_gap(gradient, parameter.grad, scale) < 1e-5


@pytest.mark.parametrize("count", [1, 3])
def test_recomputed_layers_give_the_same_gradients(count: int, model_dirs: Callable[..., Path]) -> None:
    """Bitwise: the second forward pass repeats the first."""
    ids = torch.arange(100).reshape(2, 50)
    results = []
    for recomputed in (0, count):
        model = load(model_dirs("qwen3"))
        for block in model.blocks[:recomputed]:
            block.recompute = True
        model(ids, ids).backward()
        results.append([p.grad for p in model.parameters()])
    for plain, again in zip(*results, strict=True):
        assert plain is not None
        assert again is not None
        assert torch.equal(plain, again)


@pytest.mark.slow
def test_compiled_layers_give_the_same_loss_and_gradients(model_dirs: Callable[..., Path]) -> None:
    """1e-5: the compiler fuses and so rounds differently."""
    ids = torch.arange(100).reshape(2, 50)
    losses, gradients = [], []
    for compiled in (False, True):
        model = load(model_dirs("qwen3"))
        model.blocks[1].recompute = True
        if compiled:
            for block in model.blocks:
                block.compile_body()
        loss = model(ids, ids)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append([p.grad for p in model.parameters()])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    scale = max(float(g.abs().max()) for g in gradients[0] if g is not None)
    for plain, other in zip(*gradients, strict=True):
        assert plain is not None
        assert other is not None
        assert relative_gap(plain, other, scale) < 1e-5


def spec_with(**changes: Any) -> ModelSpec:
    values = {
        "name": "odd",
        "family": "qwen3",
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 100,
        "max_position_embeddings": 128,
    }
    return ModelSpec(**{**values, **changes})


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "moe": {"moe": MoE(num_experts=4, top_k=2, ffn_hidden_size=32), "mlp_pattern": ("moe",)},
    "mla": {
        "mla": MLA(q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16),
    },
    "linear_attention": {
        "linear_attention": LinearAttention(
            num_key_heads=2, num_value_heads=2, key_head_dim=16, value_head_dim=16, conv_kernel_size=4
        ),
        "attention_pattern": ("linear", "full"),
    },
    "attention_pattern": {"attention_pattern": ("sliding",), "sliding_window": 32, "family": "mistral"},
    "attn_output_gate": {"attn_output_gate": True},
    "attention_sinks": {"attention_sinks": True},
    "attn_softcap": {"attn_softcap": 50.0},
    "logit_softcap": {"logit_softcap": 30.0},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "position": {"position": "learned"},
    "norm": {"norm": "layer"},
    "norms_per_layer": {"norms_per_layer": 4},
    "gated_mlp": {"gated_mlp": False},
    "hidden_act": {"hidden_act": "gelu"},
    "family": {"family": "phi3"},
    "rope_scaling": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_is_not_computed_is_refused_by_the_name_of_its_field(field: str) -> None:
    check_supported(spec_with())
    with pytest.raises(UsageError, match=rf"^{field} of odd ") as caught:
        check_supported(spec_with(**UNSUPPORTED[field]))
    assert "\n" not in str(caught.value)


def test_a_sliding_window_is_named() -> None:
    with pytest.raises(UsageError, match="sliding_window=32"):
        check_supported(spec_with(**UNSUPPORTED["attention_pattern"]))


def test_llama3_scaling_without_its_numbers_is_refused() -> None:
    with pytest.raises(UsageError, match="low_freq_factor, high_freq_factor"):
        check_supported(
            spec_with(rope_scaling={"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64})
        )
