"""Weights in: from a Hugging Face directory, or random, into a model that may be sharded over ranks.

Each rank reads only the slices that it holds, one tensor at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from trainplan.costmodel.errors import MachineMismatchError, UsageError
from trainplan.executor.compat import local_slices

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHOWN = 5  # names in an error message; more would hide its point
_INITIALIZER_RANGE = 0.02  # what the configs of the supported families give for their normal initialisation


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a Hugging Face directory.

    Raises:
        UsageError: There are none, the index is malformed, or a file that it names is missing.
    """
    index = model_dir / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            paths = [model_dir / str(name) for name in names]
        except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError):
            raise UsageError(
                f"{index} is not an index of safetensors files (an object with a weight_map). Download it again."
            ) from None
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise UsageError(
                f"{model_dir} lacks {', '.join(missing[:_SHOWN])}, named in {INDEX}: {len(missing)} of {len(paths)} "
                f"weight files are missing. Download the model again."
            )
        return paths
    if (model_dir / SINGLE).is_file():
        return [model_dir / SINGLE]
    pickled = any(model_dir.glob("pytorch_model*.bin"))
    mend = (
        "It has pytorch_model.bin, which can run code when it is read: save the model with safe_serialization=True."
        if pickled
        else "Download the weights, or start from random ones with --init random."
    )
    raise UsageError(f"{model_dir} holds no safetensors weights ({SINGLE} or {INDEX}). {mend}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{path} is not a whole safetensors file ({error}): it is truncated or damaged. Download it again."
        ) from None


def _is_known_extra(name: str, tied: bool) -> bool:
    # Old checkpoints hold the rotary frequencies, and some a copy of the tied output embedding.
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def load_pretrained(model: nn.Module, model_dir: Path) -> None:
    """Fills every parameter of ``model``, sharded or not, from the safetensors files of ``model_dir``.

    Raises:
        UsageError: Weights are missing or damaged.
        MachineMismatchError: Their names or shapes are not those of the model.
    """
    parameters = dict(model.named_parameters())
    files = weight_files(model_dir)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with _opened(path) as file:
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    _check_names(model_dir, {name: tuple(p.shape) for name, p in parameters.items()}, shapes)
    for path in files:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                if name in parameters:
                    _fill(parameters[name], file.get_slice(name))


def _check_names(model_dir: Path, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    tied = "lm_head.weight" not in wanted
    problems = []
    missing = sorted(set(wanted) - set(found))
    extra = sorted(name for name in set(found) - set(wanted) if not _is_known_extra(name, tied))
    shapes = [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in sorted(wanted.items())
        if name in found and found[name] != shape
    ]
    for what, names in (("missing", missing), ("unknown", extra), ("of another shape", shapes)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            problems.append(f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}")
    if problems:
        raise MachineMismatchError(
            f"the weights in {model_dir} don't fit its config.json ({'; '.join(problems)}). "
            f"Use the config.json and the weights of one model."
        )


def _fill(parameter: nn.Parameter, source: Any) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.numel():
        with torch.no_grad():
            local.copy_(source[local_slices(parameter)])


def init_random(model: nn.Module, seed: int) -> None:
    """Fills every parameter with fresh values that depend on ``seed`` and its name only, not on how it is sharded.

    Norms are 1, biases 0, matrices normal with standard deviation 0.02.
    """
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        with torch.no_grad():
            if parameter.dim() == 1:
                local.fill_(0.0 if name.endswith(".bias") else 1.0)
                continue
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            full = torch.empty(parameter.shape).normal_(0.0, _INITIALIZER_RANGE, generator=generator)
            local.copy_(full[local_slices(parameter)])
