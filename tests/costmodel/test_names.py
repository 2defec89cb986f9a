"""Near names: the one a person meant comes first."""

from __future__ import annotations

from trainplan.costmodel.names import did_you_mean, near_names

KNOWN = ["Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B", "dgx-h100"]


def test_a_typing_mistake_finds_its_name() -> None:
    assert near_names("qwen3-8", KNOWN)[0] == "Qwen/Qwen3-8B"
    assert near_names("dgx-h10", KNOWN) == ["dgx-h100"]
    assert near_names("Llama-3.1-8B-Instruct", KNOWN)[0] == "meta-llama/Llama-3.1-8B"


def test_nothing_near_gives_nothing() -> None:
    assert near_names("zzz", KNOWN) == []
    assert did_you_mean("zzz", KNOWN) == ""
    assert did_you_mean("dgx-h10", KNOWN) == " Did you mean dgx-h100?"


def test_at_most_as_many_as_asked() -> None:
    assert len(near_names("Qwen3-8B", [f"Qwen3-{i}B" for i in range(10)], count=2)) == 2
