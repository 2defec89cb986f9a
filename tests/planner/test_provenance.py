"""Where numbers come from: every quantity of a cluster is listed once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.plan import Plan
from trainplan.planner.provenance import assumptions, provenance_counts, quantities
from trainplan.planner.render.cluster import source_numbers


@pytest.mark.parametrize("name", ["8xH100", "4x8xH200", "1xMI300X", "gb200-nvl72:2"])
def test_every_quantity_is_listed_with_its_unit(name: str) -> None:
    cluster = load_cluster(name)
    found = quantities(cluster)
    assert len(found) == json.dumps(cluster.model_dump(mode="json")).count('"provenance"')
    assert len({quantity.path for quantity in found}) == len(found)
    assert all(quantity.path.split(".")[-1] == quantity.field or quantity.field in quantity.path for quantity in found)
    assert sum(provenance_counts(cluster).values()) == len(found)


def test_a_path_leads_to_its_number() -> None:
    cluster = load_cluster("8xH100")
    values = {quantity.path: quantity.value for quantity in quantities(cluster)}
    assert values["device.peak_flops_per_s.bf16"] == 989e12  # the dense peak of NVIDIA's datasheet, 989 TFLOP/s
    assert cluster.scale_up is not None
    assert values["scale_up.latency_s"] == cluster.scale_up.latency_s.value


def test_sources_are_numbered_in_order_without_repeats() -> None:
    found = quantities(load_cluster("8xH100"))
    numbers = source_numbers(found)
    assert list(numbers.values()) == list(range(1, len(numbers) + 1))
    assert set(numbers) == {quantity.source for quantity in found}


def test_assumptions_follow_the_plan(small: Any) -> None:
    plan = small.loaded
    assert any("Every sequence is full" in sentence for sentence in assumptions(plan))
    assert any("5 % measured" in sentence and "datasheet" not in sentence for sentence in assumptions(plan))
    workload = {**plan.workload.model_dump(), "length_histogram": ((16, 1.0),)}
    packed = Plan(**{**plan.model_dump(), "workload": workload})
    assert any("packed" in sentence for sentence in assumptions(packed))
    padded = Plan(**{**packed.model_dump(), "strategy": {**plan.strategy.model_dump(), "packing": False}})
    assert any("padded to seq_len" in sentence for sentence in assumptions(padded))
