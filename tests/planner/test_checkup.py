"""What `planner doctor` finds: each lack with what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trainplan.costmodel.cluster_config import load_cluster, save_cluster
from trainplan.planner import checkup
from trainplan.planner.machine import Gpu, Machine, this_machine

if TYPE_CHECKING:
    from tests.planner.conftest import Done, Small

GPU = Gpu("NVIDIA H200", 143771 * 2**20, "sm_90")
BARE = Machine(gpus=(), cores=2, arch="x86_64", processor="a processor")
EIGHT = Machine(gpus=(GPU,) * 8, cores=96, arch="x86_64", processor="a processor")


def nothing(package: str) -> str | None:
    return None


def test_missing_packages_are_those_that_training_imports() -> None:
    assert checkup.missing_packages(nothing) == ["torch", "transformers", "tokenizers", "safetensors"]
    assert checkup.missing_packages(lambda package: "1.0") == []
    assert checkup.version_of("typer") is not None
    assert checkup.version_of("trainplan-no-such-package") is None


def test_a_lack_says_what_to_do() -> None:
    lacks = [check for check in checkup.check_packages(BARE, nothing) if check.state == "lacks"]
    assert [check.name for check in lacks] == list(checkup.NEEDED)
    assert all("pip install 'trainplan[train]'" in check.mend for check in lacks)


@pytest.mark.parametrize(("machine", "state"), [(BARE, "note"), (EIGHT, "lacks")])
def test_only_a_gpu_needs_triton(machine: Machine, state: str) -> None:
    assert checkup.check_packages(machine, nothing)[-1].state == state


def test_gpus_of_a_kind_are_counted() -> None:
    assert checkup.check_gpus(EIGHT).found == "8 x NVIDIA H200 (140 GiB, sm_90)"
    assert checkup.check_gpus(BARE).state == "note"


def test_memory_is_read_from_the_system(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n")
    assert checkup.check_memory(meminfo).found == "16.0 GiB, 8.00 GiB available"
    assert checkup.check_memory(tmp_path / "none").state == "note"


def test_little_disk_is_noted(tmp_path: Path) -> None:
    assert checkup.check_disk(tmp_path, 10 * 2**30).state == "note"
    assert checkup.check_disk(tmp_path, 100 * 2**30).state == "ok"


def test_the_profile_ages(small: Small, folder: Path) -> None:
    path = folder / "cache" / "local.yaml"
    here = this_machine()
    assert checkup.check_profile(path, here, 0.0).state == "lacks"
    path.parent.mkdir()
    save_cluster(load_cluster(small.cluster), path)
    written_s = path.stat().st_mtime
    assert checkup.check_profile(path, here, written_s + 10 * 86400).found.startswith("1x test-cpu, 10 days old")
    assert checkup.check_profile(path, here, written_s + 91 * 86400).state == "note"
    assert "stale" in checkup.check_profile(path, Machine((), 0, here.arch, ""), written_s).mend
    path.write_text("not a cluster")
    assert checkup.check_profile(path, here, written_s).state == "lacks"


def test_the_command_lists_every_check(planner: Callable[..., Done], folder: Path) -> None:
    done = planner("doctor")
    assert (done.code, done.err) == (0, "")
    names = [check["name"] for check in planner("doctor", "--json").json["checks"]]
    assert {"Python", "torch", "triton", "GPUs", "cores", "memory", "disk", "local profile"} <= set(names)
    assert all(name in done.out for name in names)
    assert "planner profile" in done.out
