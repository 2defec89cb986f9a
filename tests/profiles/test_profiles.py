"""The shipped data is whole: it parses, and every number names its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trainplan.costmodel.hardware import Quantity
from trainplan.profiles import read_json

FILES = (
    ("models", "facts.json"),
    ("hardware", "facts.json"),
    ("hardware", "derived.json"),
    ("hardware", "aliases.json"),
)


@pytest.mark.parametrize("parts", FILES, ids="/".join)
def test_a_shipped_file_is_read(parts: tuple[str, ...]) -> None:
    assert read_json(*parts)


def test_a_file_that_is_not_shipped() -> None:
    with pytest.raises(FileNotFoundError):
        read_json("hardware", "none.json")


def test_every_model_states_its_sources() -> None:
    for model in read_json("models", "facts.json"):
        assert model["source"], model["name"]
        assert model["published_source"], model["name"]
        assert model["published_parameters"], model["name"]


def test_every_gpu_and_node_states_known_sources() -> None:
    facts = read_json("hardware", "facts.json")
    assert len(facts["gpus"]) == 23
    assert len(facts["nodes"]) == 31
    assert len(facts["disagreements"]) == 6
    for entry in (*facts["gpus"], *facts["nodes"]):
        assert entry["sources"] or entry["name"] == "single-gpu"
        assert set(entry["sources"]) <= set(facts["sources"]), entry["name"]


def quantities(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "provenance" in value:
            yield value
        else:
            for inner in value.values():
                yield from quantities(inner)


def test_every_derived_number_has_provenance_and_a_source() -> None:
    found = [Quantity(**entry) for entry in quantities(read_json("hardware", "derived.json"))]
    assert len(found) > 19 * 10
    gpus = {gpu["name"] for gpu in read_json("hardware", "facts.json")["gpus"]}
    for quantity in found:
        assert len(quantity.source) > 10
        if quantity.provenance == "measured":  # never another GPU's table
            assert not any(gpu in quantity.source for gpu in gpus), quantity.source
