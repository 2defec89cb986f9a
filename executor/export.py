"""Weights out: a Hugging Face directory that transformers loads, with the tokenizer it came with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from trainplan.costmodel.errors import TrainplanError
from trainplan.executor.decoder import CausalLm
from trainplan.executor.files import publish
from trainplan.executor.weights import INDEX, SINGLE

SHARD_BYTES = 5_000_000_000
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def export_model(
    model: CausalLm, model_dir: Path, target: Path, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes ``target`` as a Hugging Face directory; every rank must call it. It appears whole or not at all.

    Rank 0 holds one file's tensors at a time, the other ranks one tensor.

    Args:
        model: Sharded or not.
        model_dir: Where config.json and the tokenizer are copied from.
        target: Replaced if it exists.
        dtype: Of the weights on disk; config.json is made to say the same.
        shard_bytes: No weight file is larger, unless a single tensor is.

    Raises:
        TrainplanError: It could not be written, for example because the disk is full.
    """
    try:
        _export(model, model_dir, target, dtype, shard_bytes)
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise TrainplanError(
            f"the trained model could not be written to {target} ({reason}). The last checkpoint is whole: free space "
            f"or mend the folder, then run again with --resume."
        ) from None


def _export(model: CausalLm, model_dir: Path, target: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    writes = not dist.is_initialized() or dist.get_rank() == 0
    temporary = target.with_name(f".tmp-{target.name}")
    if writes:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    parameters = dict(model.named_parameters())
    shards = _plan({name: p.numel() * dtype.itemsize for name, p in parameters.items()}, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            parameter = parameters[name].detach()
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter  # every rank takes part
            if writes:
                tensors[name] = full.to(device="cpu", dtype=dtype).contiguous()
            weight_map[name] = file
        if writes:
            save_file(tensors, temporary / file, metadata={"format": "pt"})
    if writes:
        if len(shards) > 1:
            total = sum(p.numel() * dtype.itemsize for p in parameters.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (temporary / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        _copy_settings(model_dir, temporary, dtype)
        publish(temporary, target)
    if dist.is_initialized():
        dist.barrier()


def _plan(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, divided so that no part exceeds ``limit`` bytes, unless one name alone does."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _copy_settings(model_dir: Path, target: Path, dtype: torch.dtype) -> None:
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    # transformers 5 writes dtype and reads both; before that it was torch_dtype.
    config.update({key: name for key in ("dtype", "torch_dtype") if key in config} or {"torch_dtype": name})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in _COPIED:
        if (model_dir / file).is_file():
            shutil.copyfile(model_dir / file, target / file)
