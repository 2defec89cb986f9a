"""Reading safetensors directories, and refusing those that are not whole or not of the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainplan.costmodel.errors import MachineMismatchError, UsageError
from trainplan.costmodel.model_config import load_model
from trainplan.executor.decoder import CausalLm
from trainplan.executor.weights import INDEX, SINGLE, init_random, load_pretrained


@pytest.fixture
def folder(model_dirs: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a tiny model that a test may damage."""
    return Path(shutil.copytree(model_dirs("qwen3"), tmp_path / "model"))


def load(folder: Path) -> CausalLm:
    model = CausalLm(load_model(str(folder)))
    load_pretrained(model, folder)
    return model


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def test_every_weight_is_the_files(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    for name, parameter in load(folder).named_parameters():
        assert torch.equal(parameter, tensors[name])


def test_bf16_files_fill_fp32_master_weights(folder: Path) -> None:
    edit(folder, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    model = load(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.model.norm.weight, load_file(folder / SINGLE)["model.norm.weight"].float())


def test_missing_unknown_and_misshapen_weights_are_listed(folder: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.7.extra"] = torch.zeros(1)
        tensors["lm_head.weight"] = torch.zeros(384, 65)

    edit(folder, damage)
    with pytest.raises(MachineMismatchError) as caught:
        load(folder)
    message = str(caught.value)
    assert "1 missing: model.norm.weight" in message
    assert "1 unknown: model.layers.7.extra" in message
    assert "lm_head.weight is [384, 65], not [384, 64]" in message
    assert "\n" not in message


def test_a_copy_of_the_tied_embedding_is_left_alone(model_dirs: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dirs("qwen2-tied"), tmp_path / "model"))
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in dict(load(folder).named_parameters())


def test_a_folder_without_weights_says_what_to_do(folder: Path) -> None:
    (folder / SINGLE).unlink()
    with pytest.raises(UsageError, match="no safetensors weights"):
        load(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(UsageError, match="safe_serialization"):
        load(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    for size in (4, 200, len(content) - 10):
        (folder / SINGLE).write_bytes(content[:size])
        with pytest.raises(UsageError, match=r"model.safetensors is not a whole safetensors file"):
            load(folder)


def test_a_shard_that_is_not_there_is_named(model_dirs: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_dirs("qwen3", sharded=True), tmp_path / "model"))
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UsageError, match=shard.name):
        load(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", json.dumps({"weight_map": 3})])
def test_a_malformed_index_is_refused(content: str, folder: Path) -> None:
    (folder / INDEX).write_text(content)
    with pytest.raises(UsageError, match="not an index"):
        load(folder)


def test_random_weights_follow_seed_and_name_only(folder: Path) -> None:
    def fresh(seed: int) -> dict[str, torch.Tensor]:
        model = CausalLm(load_model(str(folder)))
        torch.rand(3)  # the global generator has no part in it
        init_random(model, seed)
        return dict(model.named_parameters())

    first, again, other = fresh(0), fresh(0), fresh(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    embedding = "model.embed_tokens.weight"
    assert not torch.equal(first[embedding], other[embedding])
    assert not torch.equal(first["model.layers.0.mlp.up_proj.weight"], first["model.layers.1.mlp.up_proj.weight"])
    assert first[embedding].std().item() == pytest.approx(0.02, rel=0.05)  # 24,576 samples: 0.5 % standard error
    assert bool((first["model.norm.weight"] == 1).all())
