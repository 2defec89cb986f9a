"""Learning-rate schedules by hand, and what is decayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainplan.executor.optimizer import build_optimizer, learning_rate
from trainplan.executor.options import RunOptions


def options(**changes: Any) -> RunOptions:
    paths = {name: Path(name) for name in ("model_dir", "data", "output_dir")}
    return RunOptions(**{**paths, "steps": 11, "learning_rate": 1.0, "min_lr_frac": 0.1, **changes})


def test_warm_up_rises_linearly_to_the_peak() -> None:
    rates = [learning_rate(step, options(warmup_steps=4)) for step in range(5)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_evenly_to_the_floor() -> None:
    rates = [learning_rate(step, options(lr_schedule="linear")) for step in range(11)]
    assert rates == pytest.approx([1 - 0.09 * step for step in range(11)])


def test_cosine_is_half_way_in_the_middle_and_at_the_floor_at_the_end() -> None:
    rates = [learning_rate(step, options()) for step in range(11)]
    assert rates[0] == 1.0
    assert rates[5] == pytest.approx(0.55)
    assert rates[10] == pytest.approx(0.1)
    assert rates == sorted(rates, reverse=True)


def test_constant_stays_and_no_schedule_leaves_its_range_after_the_end() -> None:
    assert learning_rate(7, options(lr_schedule="constant")) == 1.0
    for schedule in ("cosine", "linear"):
        assert learning_rate(50, options(lr_schedule=schedule)) == pytest.approx(0.1)
    assert learning_rate(0, options(steps=1)) == 1.0


def test_only_matrices_are_decayed() -> None:
    """With zero gradients AdamW does nothing but decay: p * (1 - lr * weight_decay)."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(model.parameters(), options(weight_decay=0.5, learning_rate=0.1), "cpu")
    optimizer.step()
    values = {name: parameter.unique().tolist() for name, parameter in model.named_parameters()}
    assert values.pop("0.weight") == pytest.approx([0.95])
    assert set(values) == {"0.bias", "1.weight", "1.bias"}
    assert all(value == [1.0] for value in values.values())


def test_options_that_contradict_themselves_are_refused() -> None:
    for changes, field in (
        ({"warmup_steps": 12}, "warmup_steps"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"steps": 0}, "steps"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"lr_schedule": "wsd"}, "lr_schedule"),
        ({"learning_rat": 1.0}, "learning_rat"),
        ({"seed": -1}, "seed"),
    ):
        with pytest.raises(ValueError, match=field):
            options(**changes)


def test_options_survive_json() -> None:
    given = options(betas=(0.8, 0.99), resume=True)
    assert RunOptions.model_validate_json(given.model_dump_json()) == given
