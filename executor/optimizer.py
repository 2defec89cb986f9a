"""AdamW, and the learning rate as a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from trainplan.executor.options import RunOptions


def build_optimizer(parameters: Iterable[nn.Parameter], options: RunOptions, device_type: str) -> torch.optim.AdamW:
    """AdamW over ``parameters``, sharded or not; only matrices are decayed.

    Args:
        parameters: fp32.
        options: Learning rate, betas and weight decay.
        device_type: On ``cuda`` one fused kernel per group of tensors, else multi-tensor operations.
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    fused = device_type == "cuda"
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.learning_rate,
        betas=options.betas,
        fused=fused or None,
        foreach=None if fused else True,
    )


def learning_rate(step: int, options: RunOptions) -> float:
    """The learning rate of optimizer step ``step`` (the first is 0).

    It rises linearly over ``warmup_steps``, then falls to ``min_lr_frac`` of the peak at the last step.
    """
    peak, floor = options.learning_rate, options.learning_rate * options.min_lr_frac
    if step < options.warmup_steps:
        return peak * (step + 1) / options.warmup_steps
    if options.lr_schedule == "constant":
        return peak
    last = max(1, options.steps - 1 - options.warmup_steps)
    done = min(1.0, (step - options.warmup_steps) / last)
    share = 1 - done if options.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return floor + (peak - floor) * share


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Gives every parameter group the learning rate ``value``."""
    for group in optimizer.param_groups:
        group["lr"] = value
