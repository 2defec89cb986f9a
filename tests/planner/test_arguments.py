"""What options mean; expected values are counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.workload import Lora, Workload
from trainplan.planner import arguments


@pytest.mark.parametrize(
    ("text", "expected"),
    [("70GiB", 75_161_927_680), ("80 GB", 80e9), ("1.5tib", 1_649_267_441_664), (".5MB", 5e5), ("7b", 7)],
)
def test_sizes(text: str, expected: float) -> None:
    assert arguments.bytes_of(text, "--memory-limit") == expected


@pytest.mark.parametrize("text", ["70", "GiB", "0GB", "-1GB", "70 gigs", "1e3GB", ""])
def test_what_is_no_size_names_its_option(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--memory-limit .*as in 70GiB"):
        arguments.bytes_of(text, "--memory-limit")


@pytest.mark.parametrize(
    ("text", "expected"), [("4000", 4000), ("1e9", 10**9), ("0.3B", 300_000_000), ("1.5t", 15 * 10**11)]
)
def test_counts(text: str, expected: int) -> None:
    assert arguments.count_of(text, "--train-tokens") == expected


@pytest.mark.parametrize("text", ["0", "-5", "1.5", "many", "1e99", "20 billion", "nan"])
def test_what_is_no_count_names_its_option(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--train-tokens "):
        arguments.count_of(text, "--train-tokens")


def test_lengths_are_sorted_pairs() -> None:
    assert arguments.lengths("4096:0.5, 512:1") == ((512, 1.0), (4096, 0.5))


@pytest.mark.parametrize("content", [{"512": 1, "64": 0.5}, [[512, 1], [64, 0.5]]])
def test_lengths_come_from_a_file_too(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(content))
    assert arguments.lengths(str(path)) == ((64, 0.5), (512, 1.0))


@pytest.mark.parametrize(
    "text", ["512", "512:x", "x:1", "0:1", "512:-1", "512:nan", "512:inf", "512:1,512:1", "512:0", ""]
)
def test_malformed_lengths(text: str) -> None:
    with pytest.raises(UsageError, match="--lengths"):
        arguments.lengths(text)


@pytest.mark.parametrize("content", ["{", "3", '["a"]', "[[1,2,3]]", "null", "[" * 100_000])
def test_malformed_files_of_lengths_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"lengths\.json: "):
        arguments.lengths(str(path))


def test_a_missing_file_of_lengths_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        arguments.lengths(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        ("tp", "4", (4,)),
        ("pp", "1, 2,2", (1, 2)),
        ("recompute", "none,full", ("none", "full")),
        ("compile", "true,OFF", (True, False)),
        ("loss_chunk", "0", (0,)),
        ("stage_layers", "20+16,none", ((20, 16), None)),
        ("recompute_layers", "none", ((),)),
        ("fused_kernels", "rope+rms_norm", (("rope", "rms_norm"),)),
    ],
)
def test_knobs(field: str, text: str, expected: tuple[Any, ...]) -> None:
    assert arguments.knob_values(field, text) == expected


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("tp", "0", "--tp '0' is not a whole number of at least 1"),
        ("tp", "two", "--tp 'two'"),
        ("micro_batch_size", "1,", "--micro-batch-size ''"),
        ("recompute", "ful", "Did you mean full"),
        ("compile", "maybe", "--compile 'maybe' is neither true nor false"),
        ("stage_layers", "20-16", "Join them by plus signs"),
        ("tpp", "1", "unknown knob 'tpp'. Did you mean pp, tp"),
    ],
)
def test_bad_knobs(field: str, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        arguments.knob_values(field, text)
    assert message in str(caught.value)


def test_options_and_assignments_join() -> None:
    found = arguments.pinned({"tp": "2", "pp": None}, ["prefetch-units=2", "overlap_tp=true"])
    assert found == {"tp": (2,), "prefetch_units": (2,), "overlap_tp": (True,)}


def test_a_knob_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="tp is given twice"):
        arguments.pinned({"tp": "2"}, ["tp=4"])


def test_an_assignment_without_values_is_refused() -> None:
    with pytest.raises(UsageError, match="--set 'tp' names no values"):
        arguments.pinned({}, ["tp"])


def test_a_refused_value_is_named_by_its_option() -> None:
    with pytest.raises(UsageError, match=r"^--global-batch-size: "):
        arguments.validated(Workload, {"seq_len": 1, "global_batch_size": 0})
    with pytest.raises(UsageError, match=r"^--rank: "):
        arguments.validated(Lora, {"rank": -1, "alpha": 1.0})


def test_a_value_that_the_backend_never_runs_is_refused_with_those_it_does() -> None:
    arguments.check_values("megatron", {"tp": (1, 8)})
    with pytest.raises(UsageError) as caught:
        arguments.check_values("native", {"reduce_dtype": ("fp32", "int8")})
    assert "--reduce-dtype int8: the native backend runs reduce_dtype in {bf16, fp32} only" in str(caught.value)


def test_numbers_are_listed_in_their_order() -> None:
    with pytest.raises(UsageError, match=r"prefetch_units in \{1, 2\} only"):
        arguments.check_values("native", {"prefetch_units": (10,)})


@pytest.mark.parametrize(
    ("value", "text"), [(None, "none"), ((), "none"), (True, "true"), (False, "false"), ((20, 16), "20+16"), (4, "4")]
)
def test_values_are_shown_as_they_are_typed(value: Any, text: str) -> None:
    assert arguments.shown(value) == text
