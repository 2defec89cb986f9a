"""The matrix product model against its published tables, hand counts and what any product must obey."""

import math

import numpy as np
import pytest

from trainplan.costmodel.gemm import Base, GemmModel, forward, gemm_model, rows, tables
from trainplan.costmodel.hardware import Device
from trainplan.costmodel.hardware_presets import device

MEASURED = [
    ("A100-SXM4-80GB", "bf16"), ("H100-SXM5-80GB", "bf16"), ("H100-SXM5-80GB", "fp8"), ("H200-SXM-141GB", "bf16"),
    ("H200-SXM-141GB", "fp8"), ("B200-SXM-180GB", "bf16"), ("B200-SXM-180GB", "fp8"), ("GB200-186GB", "bf16"),
    ("GB200-186GB", "fp8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "precision"), MEASURED)
def test_a_measured_product_takes_its_published_time(name: str, precision: str) -> None:
    (table,) = [t for t in tables(name, precision) if "aiconfigurator" in t["source"]]
    measured = rows(table)
    model = gemm_model(device(name), precision)  # type: ignore[arg-type]
    assert model.provenance == "measured"
    np.testing.assert_allclose(model.seconds(*measured[:, :3].T), measured[:, 3], rtol=1e-6)
    assert not model.extrapolated(*measured[:, :3].T).any()


def test_published_times_read_by_eye() -> None:
    """Three rows of the A100 and H100 tables as printed there, in microseconds."""
    assert gemm_model(device("A100-SXM4-80GB"), "bf16").seconds(8192, 16384, 7168) == pytest.approx(7353.105e-6)
    assert gemm_model(device("A100-SXM4-80GB"), "bf16").seconds(1024, 1024, 4096) == pytest.approx(54.579e-6)
    assert gemm_model(device("H100-SXM5-80GB"), "bf16").seconds(1024, 1024, 1024) == pytest.approx(6.15e-6)


def test_waves_of_the_base_by_hand() -> None:
    """10 processors of 1 TFLOP/s, no ramp: 11 tiles of 256 x 256 need two waves, 2 x 2 x 256^3 FLOP each processor."""
    base = Base(10, 10e12, 0.0, 0.0, 1e30, 0.0)
    two_waves = 2 * 2 * 256 * 256 * 512 / 1e12
    one_wave_small = math.ceil(44 / 10) * 2 * 128 * 128 * 512 / 1e12  # 44 tiles of 128 x 128 in 5 waves
    assert base.seconds(256 * 11, 256, 512, 2) <= two_waves
    assert one_wave_small < two_waves  # so smaller tiles are chosen
    assert base.seconds(256 * 11, 256, 512, 2) == pytest.approx(
        min(one_wave_small, math.ceil(176 / 10) * 2 * 64 * 64 * 512 / 1e12), rel=1e-6
    )


def test_far_outside_the_table_the_roofline_rules() -> None:
    model = gemm_model(device("A100-SXM4-80GB"), "bf16")
    assert model.extrapolated(64, 64, 64)
    assert model.seconds(2**21, 8192, 8192) == pytest.approx(2 * model.seconds(2**20, 8192, 8192), rel=0.01)
    peak = 312e12
    assert model.seconds(2**20, 8192, 8192) > 2 * 2**20 * 8192**2 / peak
    moved = 2 * 8192 * 65536  # one row: the weights are read once, which no cache hides
    assert model.seconds(1, 65536, 8192) > moved / 2.8e12
    assert model.seconds(1, 65536, 8192) < 10 * moved / 2.0e12
    assert 2e-6 < model.seconds(16, 64, 64) < 30e-6  # a launch


@pytest.mark.parametrize(("name", "precision"), MEASURED)
def test_more_work_is_not_faster(name: str, precision: str) -> None:
    model = gemm_model(device(name), precision)  # type: ignore[arg-type]
    sizes = np.exp(np.random.default_rng(0).uniform(np.log(64), np.log(60000), (3, 2000)))
    once = model.seconds(*sizes)
    for axis in range(3):
        doubled = sizes.copy()
        doubled[axis] *= 2
        assert (model.seconds(*doubled) > 0.9 * once).all()
    assert (model.seconds(sizes[0], sizes[1], sizes[2], accumulate_fp32=True) >= once).all()


def test_an_idle_expert_takes_no_time() -> None:
    assert model_of("A100-SXM4-80GB").seconds(0, 4096, 4096) == 0


def model_of(name: str) -> GemmModel:
    return gemm_model(device(name), "bf16")


def test_a_device_without_a_table_has_its_own_rates_and_no_other_devices_table() -> None:
    l40s = gemm_model(device("L40S"), "bf16")
    assert l40s.provenance == device("L40S").matmul_flops_per_s["bf16"].provenance
    assert l40s.extrapolated(4096, 4096, 4096)
    rate = device("L40S").matmul_flops_per_s["bf16"].value
    assert l40s.seconds(16384, 16384, 16384) == pytest.approx(2 * 16384**3 / rate, rel=0.05)
    h20 = gemm_model(device("H20-SXM5-96GB"), "bf16")
    rate = device("H20-SXM5-96GB").matmul_flops_per_s["bf16"].value
    assert h20.seconds(16384, 16384, 16384) == pytest.approx(2 * 16384**3 / rate, rel=0.1)


def test_an_unknown_make_is_a_plain_roofline() -> None:
    known = device("A100-SXM4-80GB")
    other: Device = known.model_copy(update={"name": "mine", "arch": "x"})
    seconds = gemm_model(other, "bf16").seconds(4096, 4096, 4096)
    assert seconds == pytest.approx(2 * 4096**3 / known.matmul_flops_per_s["bf16"].value)


def test_a_library_with_its_own_table_is_near_its_rows() -> None:
    """SimuMax's products on the B200 are about a quarter slower than aiconfigurator's of the same shape."""
    (table,) = [t for t in tables("B200-SXM-180GB", "bf16") if "SimuMax" in t["source"]]
    measured = rows(table)[forward(table)]
    own = gemm_model(device("B200-SXM-180GB"), "bf16", "transformer_engine").seconds(*measured[:, :3].T)
    torch = gemm_model(device("B200-SXM-180GB"), "bf16", "torch").seconds(*measured[:, :3].T)
    assert np.median(np.abs(own / measured[:, 3] - 1)) < 0.07
    assert -0.35 < np.median(torch / measured[:, 3] - 1) < -0.15
