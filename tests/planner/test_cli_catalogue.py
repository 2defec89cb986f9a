"""`planner models` and `planner hardware`: what is known, in a list and one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trainplan.costmodel.cluster_config import preset_devices, preset_nodes
from trainplan.costmodel.hardware import Cluster

if TYPE_CHECKING:
    from tests.planner.conftest import Done, Small


def test_all_56_models_are_listed(planner: Callable[..., Done]) -> None:
    found = planner("models", "--json").json["models"]
    assert len(found) == 56
    text = planner("models").out
    assert all(model["name"] in text for model in found)
    assert max(map(len, text.splitlines())) <= 80


def test_one_model_shows_its_published_size(planner: Callable[..., Done]) -> None:
    """8,190,735,360 is the parameter count of transformers' own class for this config."""
    text = planner("models", "qwen3-8b").out
    assert "8,190,735,360 (8.19 B)" in text
    assert "36 full attention with dense MLP" in text
    assert planner("models", "qwen3-8b", "--json").json["parameters"] == 8_190_735_360


def test_layers_of_several_kinds_are_counted(planner: Callable[..., Done]) -> None:
    """Qwen3-Next: three of four layers are linear attention, of 48."""
    text = planner("models", "Qwen/Qwen3-Next-80B-A3B").out
    assert "36 linear attention with experts, 12 full attention with experts" in " ".join(text.split())
    assert "active per token" in text


def test_a_config_of_ones_own(planner: Callable[..., Done], small: Small) -> None:
    found = planner("models", small.model, "--json").json
    assert (found["name"], found["num_layers"], found["facts"]) == ("model", 4, {})
    assert "Published" not in planner("models", small.model).out


def test_all_hardware_is_listed(planner: Callable[..., Done]) -> None:
    found = planner("hardware", "--json").json
    assert [gpu["name"] for gpu in found["gpus"]] == [name for name, _, _ in preset_devices()]
    assert [node["name"] for node in found["nodes"]] == [name for name, _, _ in preset_nodes()]
    text = planner("hardware").out
    names = [entry["name"] for kind in ("gpus", "nodes") for entry in found[kind]]
    assert all(name in text for name in names)
    assert max(map(len, text[: text.rindex("Sources of one")].splitlines())) <= 80


@pytest.mark.parametrize("name", ["H100", "4x8xH200", "dgx-h100:2"])
def test_one_cluster_shows_where_each_number_comes_from(planner: Callable[..., Done], name: str) -> None:
    text = planner("hardware", name).out
    assert "device.matmul_flops_per_s.bf16" in text
    assert "Sources\n[1]" in text
    assert Cluster.model_validate(json.loads(planner("hardware", name, "--json").out)).device.kind == "gpu"


def test_local_is_what_was_measured(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    assert planner("hardware", "local").code == 4
    (folder / "cache").mkdir()
    (folder / "cache" / "local.yaml").write_bytes(small.cluster.read_bytes())
    assert planner("hardware", "local").out.startswith("1x test-cpu: 1 x 1 x test-cpu")


@pytest.mark.parametrize(
    ("arguments", "near"), [(("models", "Qwen3-8X"), "Qwen/Qwen3-8B"), (("hardware", "dgx-h10"), "dgx-h100")]
)
def test_an_unknown_name_brings_near_ones(
    planner: Callable[..., Done], folder: Path, arguments: tuple[str, ...], near: str
) -> None:
    done = planner(*arguments)
    assert done.code == 2
    assert near in done.error
