"""Strategies: canonical forms, numerics classes and tables."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainplan.costmodel.strategy import (
    CHOICES,
    DEFAULT,
    FIELDS,
    Strategy,
    StrategyTable,
    canonical,
    numerics,
)

DEGREES = st.sampled_from([1, 2, 4])


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    values: dict[str, Any] = {name: draw(st.sampled_from(choices)) for name, choices in CHOICES.items()}
    for name in ("tp", "pp", "vpp", "dp_replicate", "dp_shard", "cp", "ep", "etp", "micro_batch_size", "grad_accum"):
        values[name] = draw(DEGREES)
    for name in ("sp", "reshard_after_forward", "overlap_tp", "compile", "packing"):
        values[name] = draw(st.booleans())
    values["recompute_layers"] = draw(st.sampled_from([(), (0,), (2, 3)]))
    values["recompute_modules"] = draw(st.sampled_from([(), ("mlp", "core_attn"), ("core_attn", "mlp")]))
    values["prefetch_units"] = draw(st.sampled_from([1, 2]))
    return Strategy(**values)


@given(strategies())
@settings(max_examples=200, deadline=None)
def test_canonical_is_idempotent_and_keeps_what_a_step_computes(strategy: Strategy) -> None:
    once = canonical(strategy)
    assert canonical(once) == once
    assert (once.world_size, once.global_batch_size) == (strategy.world_size, strategy.global_batch_size)


@pytest.mark.parametrize(
    ("same", "as_this"),
    [
        ({"tp": 1, "sp": True}, {}),
        ({"pp": 1, "schedule": "interleaved", "vpp": 4}, {}),
        ({"pp": 2, "schedule": "interleaved", "vpp": 1}, {"pp": 2}),
        ({"dp_shard": 8, "sharding": "none"}, {"dp_replicate": 8}),
        ({"dp_shard": 1, "sharding": "parameters", "reshard_after_forward": True}, {}),
        ({"recompute": "full", "recompute_layers": (0,)}, {}),
        ({"recompute": "none", "recompute_modules": ("mlp",), "recompute_layers": (3,)}, {}),
        ({"reduce_dtype": "bf16"}, {}),  # nothing to reduce on one rank
    ],
)
def test_strategies_that_run_the_same_have_one_form(same: dict[str, object], as_this: dict[str, object]) -> None:
    assert canonical(Strategy(**same)) == Strategy(**as_this)  # type: ignore[arg-type]


def test_numerics_classes() -> None:
    assert numerics(Strategy(), "bf16") == "same"
    assert numerics(Strategy(precision="bf16"), "fp32") == "lossy"
    assert numerics(Strategy(reduce_dtype="bf16"), "bf16") == "rounding"
    assert numerics(Strategy(reduce_dtype="int8"), "bf16") == "lossy"
    assert numerics(Strategy(precision="fp8"), "bf16") == "lossy"


@given(st.lists(strategies(), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_a_table_gives_its_strategies_back(rows: list[Strategy]) -> None:
    table = StrategyTable.from_strategies(rows)
    assert [table.row(i) for i in range(table.size)] == rows


def test_a_grid_broadcasts_its_columns() -> None:
    table = StrategyTable.of(tp=np.array([1, 2, 4])[:, None], micro_batch_size=np.array([1, 8]), sharding="parameters")
    assert table.shape == (3, 2)
    assert table.row(5) == Strategy(tp=4, micro_batch_size=8, sharding="parameters")
    assert table.take(np.array([1, 4])).row(1) == Strategy(tp=4, micro_batch_size=1, sharding="parameters")
    assert table.at_least("sharding", "gradients").all()
    assert not table.chosen("sharding", "none", "optimizer").any()


def test_a_missing_column_holds_the_default() -> None:
    table = StrategyTable.of(tp=2)
    for name in set(FIELDS) - {"tp"}:
        assert getattr(table.row(0), name) == getattr(DEFAULT, name)
