"""Rotary position embedding: which angle turns which pair of a head's values at which position."""

from __future__ import annotations

import math
from typing import Any

import torch

from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.model import ModelSpec

ROPE_TYPES = ("default", "linear", "llama3")


def rope_type(spec: ModelSpec) -> str:
    """Name of the scaling rule in ``spec.rope_scaling``: ``default`` where there is none.

    Raises:
        UsageError: The rule is none of `ROPE_TYPES`, or one of its numbers is missing.
    """
    scaling = spec.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise UsageError(
            f"rope_scaling of {spec.name} has type {kind!r}, which the native executor does not compute. It knows "
            f"{', '.join(ROPE_TYPES)}; choose a model with one of these, or another backend."
        )
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }[kind]
    missing = [key for key in needed if not isinstance(scaling.get(key), int | float)]
    if missing:
        raise UsageError(
            f"rope_scaling of {spec.name} has type {kind!r} but no number for {', '.join(missing)}. "
            f"Add it to config.json, as the model's publisher gives it."
        )
    return str(kind)


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians per position of every pair of values. Returns [head_dim / 2], fp32, on the CPU.

    Pair j turns by theta^(-2j/d) per position. ``linear`` divides every frequency by ``factor``. ``llama3`` divides
    those whose wavelength is longer than the original context over ``low_freq_factor``, keeps those shorter than it
    over ``high_freq_factor``, and blends between: Llama 3.1's rule.
    """
    kind = rope_type(spec)
    d = spec.head_dim
    frequency = 1.0 / (spec.rope_theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d))
    if kind == "default":
        return frequency
    scaling: dict[str, Any] = spec.rope_scaling or {}
    factor = scaling["factor"]
    if kind == "linear":
        return frequency / factor
    context = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    kept_share = (context / wavelength - low) / (high - low)
    blended = (1 - kept_share) * frequency / factor + kept_share * frequency
    scaled = torch.where(wavelength > context / low, frequency / factor, blended)
    return torch.where(wavelength < context / high, frequency, scaled)


def rotation(
    position_ids: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every angle. ``position_ids``: [rows, tokens]. Returns two [rows, tokens, head_dim]."""
    angle = position_ids[..., None].float() * inv_freq  # fp32: bf16 can't tell large positions apart
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns every pair of ``x`` by its angle.

    Value j is paired with value j + head_dim / 2, as Hugging Face checkpoints are laid out.

    Args:
        x: [rows, heads, tokens, head_dim].
        cos: [rows, tokens, head_dim].
        sin: [rows, tokens, head_dim].
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
