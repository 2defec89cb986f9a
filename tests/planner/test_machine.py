"""Is this the machine a plan was made for? Answers of drivers are written here as they print them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.errors import ProfileError
from trainplan.costmodel.hardware import Cluster, Device
from trainplan.executor.measure import fingerprint
from trainplan.planner import machine
from trainplan.planner.machine import Gpu, Machine

DRIVER = """\
NVIDIA H100 80GB HBM3, 81559, 9.0, GPU-aaa
NVIDIA H100 80GB HBM3, 81559, 9.0, GPU-bbb
NVIDIA GeForce RTX 4090, 24564, 8.9, GPU-ccc
"""
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20, "sm_90")
RTX = Gpu("NVIDIA GeForce RTX 4090", 24564 * 2**20, "sm_89")


def of(*gpus: Gpu, **changes: Any) -> Machine:
    return Machine(**{"gpus": gpus, "cores": 2, "arch": "x86_64", "processor": "a processor", **changes})


def test_a_driver_answer_is_read() -> None:
    assert machine.parse_driver(DRIVER) == [("GPU-aaa", H100), ("GPU-bbb", H100), ("GPU-ccc", RTX)]


@pytest.mark.parametrize("text", ["", "No devices were found\n", "NVIDIA H100, [N/A], 9.0, GPU-a\n", "a, b\n"])
def test_lines_without_numbers_are_left_out(text: str) -> None:
    assert machine.parse_driver(text) == []


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, (H100, H100, RTX)),
        ("", ()),
        ("2,0", (RTX, H100)),
        ("GPU-c", (RTX,)),
        ("0,7,1", (H100,)),  # CUDA stops at the first that does not exist
        ("-1", ()),
    ],
)
def test_visible_devices_are_obeyed(chosen: str | None, expected: tuple[Gpu, ...]) -> None:
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert machine.visible(machine.parse_driver(DRIVER), environment) == expected


def test_the_driver_is_asked_first_and_torch_where_a_driver_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def answer(command: tuple[str, ...], timeout_s: float) -> str | None:
        asked.append(command[0])
        return None if command[0] == "nvidia-smi" else '[["AMD Instinct MI300X", 205900000000, "gfx942"]]'

    monkeypatch.setattr(machine, "_output", answer)
    monkeypatch.setattr(machine, "GPU_FILES", (str(tmp_path / "none"),))
    assert machine.gpus() == ()
    assert asked == ["nvidia-smi"]
    asked.clear()
    monkeypatch.setattr(machine, "GPU_FILES", (str(tmp_path),))
    assert machine.gpus() == (Gpu("AMD Instinct MI300X", 205.9e9, "gfx942"),)
    assert asked[0] == "nvidia-smi"
    assert len(asked) == 2


def test_a_command_that_fails_or_is_missing_answers_nothing() -> None:
    assert machine._output(("trainplan-no-such-command",), 5.0) is None
    assert machine._output(("false",), 5.0) is None
    assert machine._output(("sleep", "5"), 0.05) is None
    assert machine._output(("echo", "yes"), 5.0) == "yes\n"


@pytest.mark.parametrize(
    ("planned", "found", "same"),
    [
        ("H100", H100, True),
        ("H100", RTX, False),
        ("H100", Gpu("NVIDIA H100 PCIe", 81559 * 2**20, "sm_90"), False),
        ("H100", Gpu("NVIDIA H100 96GB HBM3", 97871 * 2**20, "sm_90"), False),
        ("H100", Gpu("NVIDIA H100 80GB HBM2e X", 81079 * 2**20, "sm_90"), True),  # no known name: same arch and memory
        ("H200", Gpu("NVIDIA H200", 143771 * 2**20, "sm_90"), True),
        ("A100", Gpu("NVIDIA A100-SXM4-80GB", 81920 * 2**20, "sm_80"), True),
        ("A100", Gpu("NVIDIA A100-SXM4-40GB", 40960 * 2**20, "sm_80"), False),
        ("4090", RTX, True),
    ],
)
def test_gpus_are_told_apart(planned: str, found: Gpu, same: bool) -> None:
    assert machine.same_gpu(load_cluster(planned).device, found) is same


def test_a_gpu_that_was_measured_is_known_by_its_own_name() -> None:
    planned = Device(**{**load_cluster("H100").device.model_dump(), "name": "Some New GPU"})
    assert machine.same_gpu(planned, Gpu("Some New GPU", 1.0, "sm_999"))


@pytest.mark.parametrize(
    ("cluster", "here", "words"),
    [
        ("2xH100", of(H100, H100), ""),
        ("2xH100", of(H100, H100, H100), ""),
        ("4xH100", of(H100, H100), "it needs 4 GPUs, this machine shows 2"),
        ("2xH100", of(H100, RTX), "it is for H100-SXM5-80GB, GPU 1 here is NVIDIA GeForce RTX 4090 (24 GiB, sm_89)"),
        ("2xH100", of(), "it is for 2 x H100-SXM5-80GB, this machine shows no GPU"),
        ("2x8xH100", of(H100), "it is for 2 nodes, this is one machine"),
    ],
)
def test_differences_are_named(cluster: str, here: Machine, words: str) -> None:
    assert "; ".join(machine.differences(load_cluster(cluster), here)) == words


def cpu(path: Path, **software: str) -> Cluster:
    return Cluster(**{**load_cluster(path).model_dump(), "software": software})


def test_a_cpu_plan_needs_its_architecture_cores_and_processor(small: Any) -> None:
    arch = machine.this_machine().arch
    assert machine.differences(cpu(small.cluster, processor="a processor"), of(arch=arch)) == []
    assert machine.differences(cpu(small.cluster, processor="another"), of(arch=arch)) == [
        "it was measured on another, this is a processor"
    ]
    assert len(machine.differences(cpu(small.cluster), of(arch="ppc64le", cores=0))) == 2


def test_a_profile_of_this_machine_is_fresh_until_something_changes(small: Any) -> None:
    now = fingerprint()
    machine.check_profile(cpu(small.cluster, **now))
    machine.check_profile(cpu(small.cluster, nccl="2.29"))  # what this machine does not know is no change
    with pytest.raises(ProfileError, match=r"torch was 1\.0, is .*`planner profile`"):
        machine.check_profile(cpu(small.cluster, **{**now, "torch": "1.0"}))


def test_this_machine_has_cores_and_a_processor() -> None:
    here = machine.this_machine()
    assert here.cores >= 1
    assert here.processor
