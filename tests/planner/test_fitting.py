"""Fits of factors to runs whose times were made from known factors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trainplan.planner.comparisons import Comparison, compare
from trainplan.planner.fitting import Timed, as_factors, fit_all, linearise, log_seconds
from trainplan.planner.rows import Row
from trainplan.planner.validate import MACHINE, update

GPT: dict[str, Any] = {
    "model": {
        "layers": 24, "hidden": 4096, "heads": 32, "kv_heads": 32, "head_dim": 128, "ffn": 16384, "vocab": 51200,
        "gated_mlp": False, "moe": None,
    },
    "gpu": "A100-80GB", "n_gpus": 8, "gpus_per_node": 8, "seq": 2048, "sp": False, "pp": 1, "vpp": 1, "cp": 1,
    "recompute": "full", "precision": "fp16", "framework": "Megatron-LM", "task": "pretrain",
    "zero_or_fsdp": "none",
}  # fmt: skip


def runs(factors: dict[str, float], block: str = "made") -> list[Comparison]:
    """Rows of 8 layouts of one model whose times are what the model says under known factors."""
    rows = []
    for tp, mbs, seq in (
        (1, 1, 1024),
        (1, 4, 2048),
        (2, 1, 512),
        (2, 4, 2048),
        (4, 2, 1024),
        (8, 1, 512),
        (8, 4, 2048),
        (4, 8, 4096),
    ):
        dp = 8 // tp
        row = {
            **GPT, "id": f"{block}-{tp}-{mbs}-{seq}", "block": block, "tp": tp, "mbs": mbs, "dp": dp, "seq": seq,
            "gbs": 4 * mbs * dp, "measured": {"step_time_s": 1.0}, "model": {**GPT["model"], "name": "made"},
        }  # fmt: skip
        rows.append(Row.model_validate(row))
    found, skipped = compare(rows)
    assert not skipped
    names = tuple(factors)
    index, theta = {name: i for i, name in enumerate(names)}, np.log([list(factors.values())])
    made = []
    for c in found:
        seconds = float(np.exp(log_seconds(c.timed(), index, theta)[0]))
        made.append(replace(c, measured=seconds, as_step_s=seconds))
    return made


def test_derivatives_are_the_shares_of_a_step() -> None:
    """A step that a factor of all work scales by x has derivatives that sum to 1: every second is of some kind."""
    timed = runs({})[1].timed()
    names = tuple(dict.fromkeys(of[0] for of in timed.names.values()))
    linear = linearise([timed], names, np.zeros(len(names)))
    assert linear.slopes.min() >= 0
    assert linear.slopes.sum() == pytest.approx(1, abs=0.02)


def test_factors_that_made_the_rows_are_found_again() -> None:
    """Products 12 % slower than tables: the sum of the scopes, which nothing else tells apart, comes back."""
    made = runs({"matmul": 1.12})
    fitted = fit_all([c.timed() for c in made])
    posterior = fitted.without_block(None)
    scopes = ("matmul", "matmul/A100", "matmul/megatron-lm-2022")
    assert np.prod([posterior[name].value for name in scopes]) == pytest.approx(1.12, abs=0.03)


def test_a_block_left_out_says_nothing() -> None:
    made = [c.timed() for c in runs({"matmul": 1.3})]
    fitted = fit_all(made)
    assert fitted.without_block("made")["matmul"].value == 1
    assert not fitted.without_block("made")["matmul"].learned


def test_a_few_rows_of_a_machine_bring_the_others_near() -> None:
    made = runs({"matmul": 1.2, "memory": 0.9}, block="mine")
    other = [Timed(c.row.id, "other", c.run, c.timed().seconds / 1.2) for c in made]
    factors = as_factors(fit_all(other).without_block(None), fit_all(other).names)
    wide = replace(factors, cov=factors.cov + np.diag([(MACHINE * 0.06) ** 2] * len(factors.names)))
    linear = [linearise([c.timed()], wide.names, wide.theta) for c in made]
    after = update(wide, made[:4], linear[:4])
    index = {name: i for i, name in enumerate(wide.names)}

    def error(theta: np.ndarray, c: Comparison) -> float:
        return float(abs(log_seconds(c.timed(), index, theta[None])[0] - np.log(c.timed().seconds)))

    before = np.mean([error(wide.theta, c) for c in made[4:]])
    assert np.mean([error(after.theta, c) for c in made[4:]]) < before / 2
    assert np.trace(after.cov) < np.trace(wide.cov)


def test_one_wild_row_does_not_carry_the_others_away() -> None:
    """Five rows of a machine as predicted, one of them three times as slow: the factors hardly move."""
    made = runs({})
    fitted = fit_all([c.timed() for c in made])
    factors = as_factors(fitted.without_block("made"), fitted.names)
    wild = [replace(made[0], measured=3 * made[0].measured, as_step_s=3 * made[0].timed().seconds), *made[1:5]]
    linear = [linearise([c.timed()], factors.names, factors.theta) for c in wild]
    after = update(factors, wild, linear)
    index = {name: i for i, name in enumerate(factors.names)}
    shifts = [float(log_seconds(c.timed(), index, after.theta[None])[0] - np.log(c.timed().seconds)) for c in made[5:]]
    assert np.abs(shifts).max() < 0.1
