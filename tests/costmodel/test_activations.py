"""Saved bytes against what autograd really keeps of the native decoder, storage by storage."""

import numpy as np
import pytest
import torch

from trainplan.costmodel.activations import edge_bytes, kept_bytes, loss_bytes, saved_bytes
from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.job import Job
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.stacks import STACKS
from trainplan.costmodel.strategy import Strategy, StrategyTable
from trainplan.costmodel.work import Shapes
from trainplan.costmodel.workload import Workload
from trainplan.executor.decoder import CausalLm

ROWS, TOKENS, VOCAB = 2, 64, 512


def spec(family: str, layers: int) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        family=family,
        num_layers=layers,
        hidden_size=64,
        ffn_hidden_size=160,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        qk_norm=family == "qwen3",
        attention_bias="qkv" if family == "qwen2" else "none",
        tie_word_embeddings=True,
    )


def autograd_bytes(family: str, layers: int, dtype: torch.dtype, masked: bool, recompute: bool) -> int:
    """Bytes of the distinct storages that one forward pass saves, parameters left out."""
    model = CausalLm(spec(family, layers))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.reset_buffers("cpu")
    model.to(dtype)
    for block in model.blocks:
        block.recompute = recompute
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor  # kept alive, so that no address is used twice
        return tensor

    ids = torch.randint(0, VOCAB, (ROWS, TOKENS))
    documents = torch.arange(TOKENS).div(16, rounding_mode="floor")[None].expand(ROWS, TOKENS) if masked else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, labels=ids, documents=documents)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def shapes(family: str, precision: str, masked: bool, **strategy: object) -> Shapes:
    workload = Workload(
        seq_len=TOKENS,
        global_batch_size=ROWS,
        precision=precision,  # type: ignore[arg-type]
        length_histogram=((16, 1.0),) if masked else (),
    )
    row = Strategy(micro_batch_size=ROWS, precision=precision, **strategy)  # type: ignore[arg-type]
    job = Job(spec(family, 2), load_cluster("1xH100"), workload)
    return Shapes(job, StrategyTable.from_strategies([row]), STACKS["native"])


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_saves_what_autograd_keeps(family: str, precision: str, dtype: torch.dtype, masked: bool) -> None:
    one, two = (autograd_bytes(family, layers, dtype, masked, recompute=False) for layers in (2, 3))
    assert float(saved_bytes(shapes(family, precision, masked), ("full", "dense"))[0]) == two - one


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_recomputed_layer_keeps_its_input(precision: str, dtype: torch.dtype) -> None:
    one, two = (autograd_bytes("qwen3", layers, dtype, masked=False, recompute=True) for layers in (2, 3))
    kept = kept_bytes(shapes("qwen3", precision, False, recompute="full"), ("full", "dense"))
    assert float(kept[0]) == two - one


def test_the_head_saves_its_norm_and_the_log_probabilities() -> None:
    """What is left beside layers: final norm, log-softmax in fp32, rotary tables, ids that are labels too."""
    one, two = (autograd_bytes("qwen3", layers, torch.bfloat16, masked=False, recompute=False) for layers in (2, 3))
    rest = one - 2 * (two - one)
    log_probabilities = 4 * ROWS * TOKENS * VOCAB
    tables, ids, scalar = 2 * TOKENS * 16 * 2, 8 * ROWS * TOKENS, 4
    assert float(edge_bytes(shapes("qwen3", "bf16", False))[0]) == rest - log_probabilities - tables - ids - scalar


def test_logits_peak_at_three_fp32_copies_and_a_chunk_bounds_them() -> None:
    """Chunked: a chunk's logits three times, or twice and its weight gradient; both sums; one number per token."""
    whole = loss_bytes(shapes("qwen3", "fp32", False))
    assert float(whole[0]) == 3 * 4 * ROWS * TOKENS * VOCAB
    chunked = loss_bytes(shapes("qwen3", "fp32", False, loss_chunk=16))
    sums = 4 * VOCAB * 64 + ROWS * TOKENS * (4 * 64 + 4)
    assert float(chunked[0]) == max(3 * 4 * 16 * VOCAB, 2 * 4 * 16 * VOCAB + 4 * VOCAB * 64) + sums
    assert np.all(chunked < whole)
