"""What does this machine have, and is it the one a plan was made for? Imports no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainplan.costmodel.errors import MachineMismatchError, ProfileError
from trainplan.costmodel.hardware import Cluster, Device
from trainplan.costmodel.hardware_presets import gpu_names, normal
from trainplan.costmodel.plan import Plan
from trainplan.executor.measure import fingerprint

_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,compute_cap,uuid", "--format=csv,noheader,nounits")
GPU_FILES = ("/dev/kfd", "/dev/nvidiactl", "/dev/dxg")
"""One of them is there where a driver is loaded: AMD's, NVIDIA's, or that of Windows' subsystem for Linux."""
_ASK_S = 20.0  # a driver that answers later than this is not in working order
_TORCH_ASK_S = 120.0  # a first import of torch from a cold disk takes up to a minute
_SAME_MEMORY_FRAC = 0.1
"""Drivers report up to 8 % less than a datasheet; parts of one name differ by a quarter or more (80 and 96 GB)."""
_ARCHS = {"amd64": "x86_64", "arm64": "aarch64"}
_ASK_TORCH = """
import json, torch
found = []
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    arch = getattr(p, "gcnArchName", "").split(":")[0] if torch.version.hip else f"sm_{p.major}{p.minor}"
    found.append([p.name, p.total_memory, arch])
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that a process started now would see."""

    name: str
    memory_bytes: float
    arch: str


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine, as far as a plan can depend on it."""

    gpus: tuple[Gpu, ...]
    cores: int
    arch: str
    processor: str


def this_machine() -> Machine:
    """The GPUs, usable cores and processor architecture of this machine."""
    return Machine(gpus(), usable_cores(), _arch(platform.machine()), fingerprint()["processor"])


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine: asked of NVIDIA's driver, else of torch in a process of its own; none if neither knows.

    ``CUDA_VISIBLE_DEVICES`` is obeyed, as a training process would.
    """
    text = _output(_QUERY, _ASK_S)
    if text is not None:
        return visible(parse_driver(text), os.environ)
    if not any(Path(file).exists() for file in GPU_FILES) or importlib.util.find_spec("torch") is None:
        return ()
    text = _output((sys.executable, "-P", "-c", _ASK_TORCH), _TORCH_ASK_S)
    try:
        return tuple(Gpu(name, float(memory), arch) for name, memory, arch in json.loads(text or "[]"))
    except (ValueError, TypeError):
        return ()


def _output(command: Sequence[str], timeout_s: float) -> str | None:
    """What a command prints; None if it can't be run, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def parse_driver(text: str) -> list[tuple[str, Gpu]]:
    """(uuid, GPU) of each line of the driver's answer; lines it could not fill in are left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4 or not cells[1].isdigit():
            continue
        name, mib, capability, uuid = cells
        found.append((uuid, Gpu(name, float(mib) * 2**20, f"sm_{capability.replace('.', '')}")))
    return found


def visible(found: Sequence[tuple[str, Gpu]], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows a process: indices or uuids, up to the first that does not exist."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(gpu for _, gpu in found)
    kept: list[Gpu] = []
    for word in chosen.split(","):
        word = word.strip()
        if word.isdigit() and int(word) < len(found):
            kept.append(found[int(word)][1])
        elif by_uuid := [gpu for uuid, gpu in found if word and uuid.startswith(word)]:
            kept.append(by_uuid[0])
        else:
            break
    return tuple(kept)


def _arch(name: str) -> str:
    return _ARCHS.get(name.lower(), name.lower())


def same_gpu(planned: Device, found: Gpu) -> bool:
    """Whether a GPU is of the kind a plan is for: by name where both are known, else by architecture and memory."""
    known = gpu_names()
    names = {normal(name) for name in (planned.name, found.name)}
    if len(names) == 1:
        return True
    if all(name in known for name in names):
        return len({known[name] for name in names}) == 1
    off = abs(found.memory_bytes / planned.memory_bytes.value - 1)
    return found.arch == planned.arch and off <= _SAME_MEMORY_FRAC


def differences(cluster: Cluster, machine: Machine) -> list[str]:
    """What ``machine`` lacks or has otherwise than ``cluster``; empty where a plan for the one runs on the other."""
    device, needed = cluster.device, cluster.num_gpus
    if cluster.num_nodes > 1:
        return [f"it is for {cluster.num_nodes} nodes, this is one machine"]
    if device.kind == "cpu":
        found = []
        if _arch(device.arch) != machine.arch:
            found.append(f"it is for {device.arch} processors, this one is {machine.arch}")
        measured = cluster.software.get("processor", machine.processor)
        if measured != machine.processor:
            found.append(f"it was measured on {measured}, this is {machine.processor}")
        if needed > machine.cores:
            found.append(f"it has {needed} CPU ranks, this machine has {machine.cores} usable cores")
        return found
    if not machine.gpus:
        return [f"it is for {needed} x {device.name}, this machine shows no GPU"]
    found = [
        f"it is for {device.name}, GPU {i} here is {gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB, {gpu.arch})"
        for i, gpu in enumerate(machine.gpus[:needed])
        if not same_gpu(device, gpu)
    ][:1]
    if needed > len(machine.gpus):
        found.append(f"it needs {needed} GPUs, this machine shows {len(machine.gpus)}")
    return found


def check_machine(plan: Plan, where: Path, machine: Machine) -> None:
    """Returns if ``plan`` was made for a machine like this one.

    Raises:
        MachineMismatchError: It was not; the message says what differs.
    """
    if found := differences(plan.cluster, machine):
        raise MachineMismatchError(
            f"{where} does not match this machine: {'; '.join(found)}. Run it where it was made for, or plan for this "
            "machine: `planner profile`, then `planner tune` with --cluster local."
        )


def changed(cluster: Cluster, now: Mapping[str, str]) -> list[str]:
    """What of a measured cluster's software and hardware is otherwise ``now``, among what both of them name."""
    return [
        f"{name} was {then}, is {now[name]}"
        for name, then in cluster.software.items()
        if name in now and now[name] != then
    ]


def check_profile(cluster: Cluster) -> None:
    """Returns if the profile of this machine still describes it.

    Raises:
        ProfileError: The machine or its software has changed since it was measured.
    """
    if found := changed(cluster, fingerprint()):
        raise ProfileError(
            f"local: the profile of this machine is stale: {'; '.join(found)}. Run `planner profile` again, or name a "
            "cluster such as 8xH100."
        )
