"""Seconds of memory-bound kernels: published rows, laws, floors."""

import time

import numpy as np
import pytest

from trainplan.costmodel.hardware_presets import device
from trainplan.costmodel.kernel_sets import EAGER_BF16, FUSED
from trainplan.costmodel.memory_rates import KNOWN_ARCHITECTURES, memory_model


@pytest.mark.parametrize(
    ("name", "us", "tolerance"),
    [
        # rms_norm forward of 16,384 x 4,096 bf16 in one kernel, cudnn-frontend and (A100: 2,048 x 32,768) Liger tables.
        # Fused backwards reach less than forwards, and the share is the median of both: forwards come out 10 to 20 %
        # slow.
        ("H200-SXM-141GB", 71, 0.20),
        ("GB200-186GB", 45, 0.15),
        ("GB300-288GB", 45, 0.15),
        ("A100-SXM4-80GB", 182.24, 0.05),
    ],
)
def test_fused_norm_tables(name: str, us: float, tolerance: float) -> None:
    """2 e bytes per element of 2**26, e = 2."""
    moved = 2**26 * FUSED.norm.forward[0] * 2
    assert float(memory_model(device(name)).seconds(moved)) * 1e6 == pytest.approx(us, rel=tolerance)


def test_eager_norm_backward_table() -> None:
    """Liger-Kernel, huggingface rms_norm backward, A100, 2,048 x 32,768 bf16: 5,014.72 us in 14 kernels."""
    a, b = EAGER_BF16.norm.backward
    launches = EAGER_BF16.norm.backward_launches
    moved = 2048 * 32768 * (2 * a + b)
    seconds = launches * float(memory_model(device("A100-SXM4-80GB")).seconds(moved / launches, "eager"))
    assert seconds * 1e6 == pytest.approx(5014.72, rel=0.10)


def test_eager_swiglu_table() -> None:
    """Liger-Kernel, megatron_swiglu forward (torch), H100, 8,192 x 8,192: 383.04 us in 2 kernels of 5 e in all."""
    moved = 8192 * 8192 * EAGER_BF16.glu.forward[0] * 2
    seconds = 2 * float(memory_model(device("H100-SXM5-80GB")).seconds(moved / 2, "eager"))
    assert seconds * 1e6 == pytest.approx(383.04, rel=0.10)


@pytest.mark.parametrize("name", ["A100-SXM4-80GB", "H100-SXM5-80GB", "B200-SXM-180GB", "GB300-288GB", "L40S"])
def test_laws(name: str) -> None:
    """Twice the bytes take twice as long, eager longer than fused, nothing less than the floor, nothing for nothing."""
    part = device(name)
    assert part.arch in KNOWN_ARCHITECTURES
    model = memory_model(part)
    for kind in ("fused", "eager"):
        once, twice = model.seconds([8e9, 16e9], kind)  # type: ignore[arg-type]
        assert twice == pytest.approx(2 * once, rel=0.005)  # the fixed time is microseconds of milliseconds
        sizes = model.seconds(np.geomspace(1, 1e10, 50), kind)  # type: ignore[arg-type]
        assert np.all(np.diff(sizes) >= 0)
        assert sizes[0] >= part.op_overhead_s.value
        assert model.seconds(0, kind) == 0  # type: ignore[arg-type]
    large = np.geomspace(1e7, 1e10, 20)
    assert np.all(model.seconds(large, "eager") > model.seconds(large, "fused"))


def test_architectures_without_a_table_take_the_median() -> None:
    """Ada has none: fitted, between the least and the most of the others. Eager Blackwell neither."""
    ada, blackwell = memory_model(device("L40S")), memory_model(device("GB200-186GB"))
    others = [memory_model(device(n)).fused.share for n in ("A100-SXM4-80GB", "H200-SXM-141GB", "GB200-186GB")]
    assert ada.fused.provenance == ada.eager.provenance == blackwell.eager.provenance == "fitted"
    assert blackwell.fused.provenance == "measured"
    assert min(others) <= ada.fused.share <= max(others)


def test_unknown_make_is_the_plain_roofline() -> None:
    """Bytes over the stated rate, at least one call."""
    part = device("MI300X")
    model = memory_model(part)
    for kind in ("fused", "eager"):
        assert model.seconds(1e9, kind) == pytest.approx(1e9 / part.memory_bytes_per_s.value)  # type: ignore[arg-type]
        assert model.seconds(1, kind) == part.op_overhead_s.value  # type: ignore[arg-type]


def test_many_sizes_are_quick() -> None:
    """1e5 sizes in well under a second."""
    model, sizes = memory_model(device("H100-SXM5-80GB")), np.geomspace(1, 1e10, 100_000)
    began = time.perf_counter()
    model.seconds(sizes, "eager")
    assert time.perf_counter() - began < 0.5  # milliseconds; the rest is for a loaded machine
