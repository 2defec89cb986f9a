"""The matrix product model against its published tables, hand counts and what any product must obey."""

import importlib.util
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from trainplan.costmodel.gemm import Base, GemmModel, forward_rows, gemm_model, grid_correction, rows, tables
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
    """10 processors of 1 TFLOP/s, no ramp, every tile as good: 44 x 4 tiles of 64 x 64 make 18 waves."""
    base = Base(10, 10e12, 0.0, 0.0, 1e30, 0.0)
    assert base.seconds(256 * 11, 256, 512, 2) == pytest.approx(18 * 2 * 64 * 64 * 512 / 1e12)


def test_two_waves_for_a_few_tiles_too_many_by_hand() -> None:
    """1024 x 4096 is 128 tiles of 128 x 256: 2 waves on an A100's 108 processors, so 59 % of the rate at best.

    The table agrees: 170 TFLOP/s at k = 5120, against 260 where 4096 x 7168 fills 8.3 of 9 waves.
    """
    only_large = Base(108, 108e12, 64.0, 1e6, 1e30, 2e-6)  # smaller tiles cost a fortune
    two_waves = 2 * 2 * 128 * 256 * (5120 + 64) / 1e12
    assert only_large.seconds(1024, 4096, 5120, 2) == pytest.approx(2e-6 + two_waves)
    split = Base(108, 108e12, 64.0, 1e6, 1e30, 2e-6, max_split=3)  # 384 tiles in 4 waves of a third each
    assert split.seconds(1024, 4096, 5120, 2) == pytest.approx(2e-6 + two_waves * 4 * (5120 / 3 + 64) / (2 * 5184))
    measured = model_of("A100-SXM4-80GB")
    reached = 2 * 1024 * 4096 * 5120 / measured.seconds(1024, 4096, 5120)
    full = 2 * 4096 * 7168 * 5120 / measured.seconds(4096, 7168, 5120)
    assert reached / full == pytest.approx(0.593 / (8.3 / 9), rel=0.1)


def test_memory_floor_and_quantising_by_hand() -> None:
    """One row of 8192 x 8192 weights moves their 134 MB; a tiny product is the floor; casting to fp8 moves 3 bytes."""
    base = Base(10, 1e18, 0.0, 0.0, 1e12, 1e-6, floor_s=4e-6)
    assert base.seconds(1, 8192, 8192, 2) == pytest.approx(1e-6 + (2 * 8192 * 8192 + 4 * 8192) / 1e12, rel=1e-3)
    assert base.seconds(8, 8, 8, 2) == pytest.approx(4e-6, rel=1e-2)
    quantised = Base(10, 1e21, 0.0, 0.0, 1e30, 0.0, quantise_bytes_per_s=3e12)
    assert quantised.seconds(4096, 4096, 8192, 1) == pytest.approx(4096 * 8192 / 1e12, rel=1e-3)


@pytest.mark.parametrize("axis", ["k", "n", "smallest m", "largest m"])
def test_a_slab_left_out_of_the_a100s_table(axis: str) -> None:
    """Issue 3: median at most 7 %, 90th percentile at most 18 %; benchmarks/gemm_accuracy.py prints every device."""
    fit_gemm = _benchmark("fit_gemm")
    measured = forward_rows("A100-SXM4-80GB", "bf16", "torch")
    out = {
        "k": measured[:, 2] == 7168,
        "n": measured[:, 1] == 4096,
        "smallest m": measured[:, 0] == 1024,
        "largest m": measured[:, 0] == 8192,
    }[axis]
    base = fit_gemm.fit_base("A100-SXM4-80GB", "bf16", measured[~out])
    correction = grid_correction(base, 2, measured[~out])
    sizes = measured[out, :3].T
    errors = np.abs(base.seconds(*sizes, 2) * np.exp(correction(*sizes)) / measured[out, 3] - 1)
    assert np.median(errors) <= 0.07
    assert np.quantile(errors, 0.9) <= 0.18


def test_the_shipped_parameters_are_those_of_the_shipped_tables() -> None:
    """The fit is deterministic; the file keeps 6 digits, and another SciPy may stop elsewhere by less than 1 %."""
    fit_gemm = _benchmark("fit_gemm")
    fitted = fit_gemm.fit_base("H200-SXM-141GB", "bf16", forward_rows("H200-SXM-141GB", "bf16", "torch"))
    shipped = gemm_model(device("H200-SXM-141GB"), "bf16").base
    sizes = ([1024, 4096, 128], [4096, 4096, 16384], [8192, 4096, 1024])
    assert shipped.seconds(*sizes, 2) == pytest.approx(fitted.seconds(*sizes, 2), rel=0.01)


def _benchmark(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    seconds = model_of("A100-SXM4-80GB").seconds(np.array([0, 1]), 4096, 4096)
    assert seconds[0] == 0
    assert seconds[1] > 0


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
    measured = forward_rows("B200-SXM-180GB", "bf16", "transformer_engine")
    own = gemm_model(device("B200-SXM-180GB"), "bf16", "transformer_engine").seconds(*measured[:, :3].T)
    torch = gemm_model(device("B200-SXM-180GB"), "bf16", "torch").seconds(*measured[:, :3].T)
    assert np.median(np.abs(own / measured[:, 3] - 1)) < 0.07
    assert -0.35 < np.median(torch / measured[:, 3] - 1) < -0.15


def test_a_library_without_a_table_takes_the_other() -> None:
    b200, pcie = device("B200-SXM-180GB"), device("A100-PCIe-80GB")
    fp8 = [gemm_model(b200, "fp8", library).seconds(4096, 4096, 4096) for library in ("torch", "transformer_engine")]
    bf16 = [gemm_model(pcie, "bf16", library).seconds(4096, 4096, 4096) for library in ("torch", "transformer_engine")]
    assert fp8[0] == fp8[1]
    assert bf16[0] == bf16[1]


def test_adding_to_an_fp32_gradient_costs_traffic() -> None:
    """At most 6 more bytes per element at the sustained rate, and never nothing."""
    for name in ("B200-SXM-180GB", "A100-PCIe-80GB", "H100-SXM5-80GB", "L40S"):
        model = gemm_model(device(name), "bf16")
        extra = model.seconds(8192, 4096, 4096, accumulate_fp32=True) - model.seconds(8192, 4096, 4096)
        assert 0 < extra <= 6 * 8192 * 4096 / device(name).memory_bytes_per_s.value


def test_a_part_of_the_same_die_differs_only_where_memory_binds() -> None:
    """The 40 GB A100 has 1,555 of the 80 GB one's 2,039 GB/s, and nothing else less."""
    large, small = model_of("A100-SXM4-80GB"), model_of("A100-SXM4-40GB")
    assert (large.provenance, small.provenance) == ("measured", "fitted")
    assert small.seconds(8192, 8192, 8192) == pytest.approx(large.seconds(8192, 8192, 8192), rel=0.01)
    slower = small.seconds(64, 65536, 65536) / large.seconds(64, 65536, 65536)
    assert 1.2 < slower < 2039 / 1555 + 0.01  # the tiles take nearly as long as the traffic


def test_an_array_of_100000_products_is_quick() -> None:
    """Well under 0.1 s on an idle core; the bound leaves room for a busy one."""
    sizes = np.exp(np.random.default_rng(0).uniform(np.log(64), np.log(60000), (3, 100_000)))
    for library in ("torch", "transformer_engine"):
        model = gemm_model(device("B200-SXM-180GB"), "bf16", library)  # type: ignore[arg-type]
        start = time.perf_counter()
        seconds = model.seconds(*sizes)
        assert time.perf_counter() - start < 0.5
        assert np.isfinite(seconds).all()


def test_a_four_bit_product_is_between_its_peak_and_eight_bits() -> None:
    """GB200: 10 PFLOP/s dense at 4 bits, 5 at 8 (datasheet)."""
    n = 16384
    four = float(gemm_model(device("GB200-186GB"), "nvfp4").seconds(n, n, n))
    eight = float(gemm_model(device("GB200-186GB"), "fp8").seconds(n, n, n))
    assert 2 * n**3 / 10e15 < four < eight
