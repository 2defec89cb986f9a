"""What does this machine have and lack for planning and training? Reads versions without importing the packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainplan import __version__
from trainplan.costmodel.cluster_config import load_cluster, local_profile_path
from trainplan.costmodel.errors import TrainplanError
from trainplan.executor.measure import fingerprint
from trainplan.planner.machine import Machine, changed, differences, this_machine
from trainplan.planner.render.format import size

State = Literal["ok", "note", "lacks"]
NEEDED = ("torch", "transformers", "tokenizers", "safetensors")
"""Packages that training imports."""
INSTALL = "pip install 'trainplan[train]'"
STALE_DAYS = 90.0
"""After this long a driver or library has usually been updated."""
LITTLE_DISK_BYTES = 20 * 2**30
"""A checkpoint of a model of 1.5 B parameters with its optimizer, twice."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: what was found, and what to do where it is not as it should be."""

    name: str
    state: State
    found: str
    mend: str = ""


def version_of(package: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_packages(version: Callable[[str], str | None] = version_of) -> list[str]:
    """Packages that training needs and this machine lacks."""
    return [package for package in NEEDED if version(package) is None]


def checkup(folder: Path) -> list[Check]:
    """Everything looked at; ``folder`` is where runs would be written."""
    machine = this_machine()
    return [
        Check("trainplan", "ok", __version__),
        Check("Python", "ok", f"{platform.python_version()} ({sys.executable})"),
        *check_packages(machine),
        check_gpus(machine),
        Check("cores", "ok", f"{machine.cores} usable ({machine.arch})"),
        check_memory(),
        check_disk(folder),
        check_profile(local_profile_path(), machine, time.time()),
    ]


def check_packages(machine: Machine, version: Callable[[str], str | None] = version_of) -> list[Check]:
    """The packages of training; Triton only where there is a GPU to use it."""
    found = []
    for package in NEEDED:
        installed = version(package)
        mend = f"Planning works without it. To train: {INSTALL}"
        found.append(Check(package, "ok", installed) if installed else Check(package, "lacks", "not installed", mend))
    triton = version("triton")
    if triton:
        found.append(Check("triton", "ok", triton))
    elif machine.gpus:
        found.append(Check("triton", "lacks", "not installed", f"torch.compile needs it on a GPU: {INSTALL}"))
    else:
        found.append(Check("triton", "note", "not installed; only a GPU needs it"))
    return found


def check_gpus(machine: Machine) -> Check:
    """The GPUs a training process would see."""
    if not machine.gpus:
        return Check("GPUs", "note", "none visible", "Runs use the CPU; plans for any cluster can be made.")
    kinds: dict[str, int] = {}
    for gpu in machine.gpus:
        kind = f"{gpu.name} ({size(gpu.memory_bytes)}, {gpu.arch})"
        kinds[kind] = kinds.get(kind, 0) + 1
    return Check("GPUs", "ok", ", ".join(f"{count} x {kind}" for kind, count in kinds.items()))


def check_memory(meminfo: Path = Path("/proc/meminfo")) -> Check:
    """Host memory, in all and free for new processes."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
        total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError, IndexError):
        return Check("memory", "note", "unknown on this system")
    return Check("memory", "ok", f"{size(total)}, {size(free)} available")


def check_disk(folder: Path, free_bytes: int | None = None) -> Check:
    """Room for checkpoints in ``folder``."""
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    if free < LITTLE_DISK_BYTES:
        return Check("disk", "note", f"{size(free)} free here", "Give runs an --output on a larger disk.")
    return Check("disk", "ok", f"{size(free)} free here")


def check_profile(path: Path, machine: Machine, now_s: float) -> Check:
    """The measured profile of this machine: whether it is there, readable, recent, and of the hardware found.

    Args:
        path: Where it is kept.
        machine: What this machine has now.
        now_s: Seconds since the epoch.
    """
    mend = "Run `planner profile`."
    if not path.is_file():
        return Check("local profile", "lacks", f"none ({path})", f"{mend} Then --cluster local plans for this machine.")
    try:
        cluster = load_cluster("local")
    except TrainplanError as error:
        return Check("local profile", "lacks", str(error), mend)
    days = (now_s - os.path.getmtime(path)) / 86400
    found = f"{cluster.name}, {days:.0f} days old ({path})"
    if different := changed(cluster, fingerprint()) or differences(cluster, machine):
        return Check("local profile", "note", found, f"It is stale: {different[0]}. {mend}")
    if days > STALE_DAYS:
        return Check("local profile", "note", found, f"Drivers and libraries have changed since. {mend}")
    return Check("local profile", "ok", found)
