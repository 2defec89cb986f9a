"""What is exported, transformers loads, with the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainplan.costmodel.model_config import load_model
from trainplan.executor.decoder import CausalLm
from trainplan.executor.export import export_model
from trainplan.executor.weights import init_random, load_pretrained

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 150_000])
@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3", "llama3", "mistral"])
def test_transformers_loads_the_export_with_equal_logits(
    family: str, shard_bytes: int, model_dirs: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = model_dirs(family)
    model = CausalLm(load_model(str(source)))
    init_random(model, seed=5)
    export_model(model, source, tmp_path / "model", torch.float32, shard_bytes)
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < 1e6)
    assert all(file.stat().st_size < shard_bytes + 10_000 for file in files)  # the header of each file
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert theirs.dtype == torch.float32
    ids = torch.arange(60)[None]
    assert torch.equal(model(ids), theirs(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("fox")["input_ids"]


def test_the_config_says_the_dtype_of_the_weights(model_dirs: Callable[..., Path], tmp_path: Path) -> None:
    source = model_dirs("qwen3")
    model = CausalLm(load_model(str(source)))
    load_pretrained(model, source)
    export_model(model, source, tmp_path / "model", torch.bfloat16)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    again = CausalLm(load_model(str(tmp_path / "model")))
    load_pretrained(again, tmp_path / "model")
    assert torch.equal(again.model.norm.weight, model.model.norm.weight.bfloat16().float())


def test_an_export_replaces_the_one_before_and_leaves_nothing_else(
    model_dirs: Callable[..., Path], tmp_path: Path
) -> None:
    source = model_dirs("qwen3")
    model = CausalLm(load_model(str(source)))
    for seed in (0, 1):
        init_random(model, seed)
        export_model(model, source, tmp_path / "model", torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    again = CausalLm(load_model(str(tmp_path / "model")))
    load_pretrained(again, tmp_path / "model")
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)
