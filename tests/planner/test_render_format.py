"""Each expected text was written by hand from the number."""

from __future__ import annotations

import pytest

from trainplan.costmodel.estimate import Interval
from trainplan.planner.render import format


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.001234, "0.00123"),
        (0.9996, "1.00"),
        (1.0, "1.00"),
        (9.996, "10.0"),
        (12.34, "12.3"),
        (99.96, "100"),
        (999.6, "1000"),
        (12345.0, "12345"),
        (-1.5, "-1.50"),
        (float("inf"), "inf"),
    ],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert format.three(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (4.5e-7, "0.450 us"),
        (4.5e-4, "450 us"),
        (0.0123, "12.3 ms"),
        (0.9999, "1.00 s"),
        (9.8231, "9.82 s"),
        (119.0, "119 s"),
        (210.0, "3.50 min"),
        (7200.0, "2.00 h"),
        (18000.0, "5.00 h"),
        (3 * 86400.0, "3.00 days"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert format.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (512 * 2**20, "512 MiB"),
        (1.5 * 2**30, "1.50 GiB"),
        (80 * 2**30, "80.0 GiB"),
        (2**40, "1.00 TiB"),
    ],
)
def test_sizes_are_binary(value: float, text: str) -> None:
    assert format.size(value) == text


def test_bandwidths_are_decimal() -> None:
    assert format.bytes_per_s(450e9) == "450 GB/s"
    assert format.bytes_per_s(3.35e12) == "3350 GB/s"
    assert format.bytes_per_s(50) == "50.0 B/s"


def test_flops() -> None:
    assert format.flops_per_s(989.4e12) == "989 TFLOP/s"
    assert format.flops_per_s(42.5e9) == "42.5 GFLOP/s"


def test_counts() -> None:
    assert format.count(8_190_735_360) == "8.19 B"
    assert format.count(494_032_768) == "494 M"
    assert format.whole(1_048_576) == "1,048,576"


def test_shares_and_factors() -> None:
    assert format.percent(0.4213) == "42.1 %"
    assert format.factor(1.066) == "1.07x"


def test_tokens_per_s() -> None:
    assert format.tokens_per_s(106_987.4) == "106,987 tokens/s"
    assert format.tokens_per_s(12.34) == "12.3 tokens/s"


def test_an_interval_is_the_middle_and_its_ends() -> None:
    assert format.interval(Interval(low=8.9, mid=9.82, high=11.2), format.seconds) == "9.82 s (8.90 s to 11.2 s)"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("all_reduce_bytes_per_s", 370e9, "370 GB/s"),
        ("peak_flops_per_s", 2e15, "2000 TFLOP/s"),
        ("memory_bytes", 80 * 2**30, "80.0 GiB"),
        ("latency_s", 5e-6, "5.00 us"),
        ("bubble_frac", 0.125, "12.5 %"),
        ("price_per_gpu_hour", 2.5, "2.50"),
    ],
)
def test_the_name_of_a_field_decides_its_unit(field: str, value: float, text: str) -> None:
    assert format.by_unit(field, value) == text
