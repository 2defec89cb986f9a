"""How fast is this machine? Short measurements of what a training step is made of, as a `Cluster`. Imports no torch.

Every rank measures at the same time in a process of its own, as in training, so that shared memory bandwidth and clocks
are those of a run. The measurements themselves are in `trainplan.executor.measure_rank`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainplan.costmodel.errors import ProfileError
from trainplan.costmodel.hardware import Cluster, Device, Link, Precision, Quantity
from trainplan.executor.launch import environment, torchrun

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
SETUP_S = 120.0
"""Time that starting the processes may take beside the measuring: a cold import of torch on a slow disk."""
END_S = 35.0
"""How long torchrun gets to end its ranks; after 30 s it kills those that are left."""
_WORDS = re.compile(r"(?:\[rank\d+\]: )?((?:\w+\.)*(?!ChildFailedError)\w*(?:Error|Exception)\b.*)")
"""The last line of a rank's traceback; torchrun's own ChildFailedError only says that there was one."""


def measure_machine(
    nproc: int | None = None, seconds: float = 20.0, on_progress: Callable[[str, float], None] | None = None
) -> Cluster:
    """Measure this machine with one process per device and describe it as a cluster named ``local``.

    Args:
        nproc: Processes; None = one per GPU, or one on a machine without.
        seconds: About how long to measure.
        on_progress: Called with what is being measured and the share done, 0 to 1.

    Raises:
        ModuleNotFoundError: torch is not installed.
        ProfileError: A measuring process failed or hung.
    """
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    ranks = nproc or _gpu_count() or 1
    report = on_progress or (lambda what, share: None)
    with tempfile.TemporaryDirectory(prefix="trainplan-measure-") as folder:
        result = Path(folder) / "result.json"
        target = ("-m", "trainplan.executor.measure_rank", "--seconds", str(seconds), "--output", str(result))
        _run(torchrun(ranks, *target), ranks, seconds, Path(folder) / "stderr.log", report)
        measured = json.loads(result.read_text(encoding="utf-8"))
    return _cluster(
        measured, ranks, f"measured on this machine by {ranks} processes at once, torch {measured['torch']}"
    )


def fingerprint() -> dict[str, str]:
    """What a profile of this machine depends on; another value of any entry makes it stale."""
    found = {"processor": _processor(), "cores": str(os.cpu_count() or 1), "machine": platform.machine()}
    with suppress(PackageNotFoundError):
        found["torch"] = version("torch")
    return found


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _gpu_count() -> int:
    """GPUs that torch sees, asked in a process of its own: CUDA can't be left once initialised."""
    ask = "import torch; print(torch.cuda.device_count())"
    command = [sys.executable, "-P", "-c", ask]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SETUP_S, check=False)
    except subprocess.TimeoutExpired:
        raise ProfileError(
            f"torch has not counted the GPUs within {SETUP_S:.0f} s. Give their number: --nproc."
        ) from None
    return int(answer.stdout) if answer.returncode == 0 and answer.stdout.strip().isdigit() else 0


def _run(command: list[str], ranks: int, seconds: float, log_path: Path, report: Callable[[str, float], None]) -> None:
    """Start the ranks and follow the progress lines of rank 0; ProfileError if they fail or hang."""
    limit_s = SETUP_S + 5 * seconds
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, env=environment(ranks), stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        try:
            ended = _follow(process, report, limit_s)
        finally:
            _end(process)  # still there only after an interruption
    if not ended:
        raise ProfileError(f"measuring hung: no end after {limit_s:.0f} s. Use fewer --nproc.")
    if process.returncode != 0:
        raise ProfileError(
            f"a measuring process ended with code {process.returncode} ({_last_words(log_path)}). "
            "Use fewer --nproc, or free memory, and run `planner profile` again."
        )


def _last_words(log_path: Path) -> str:
    """The first error that a rank wrote: those of other ranks often follow from it."""
    found = map(_WORDS.match, log_path.read_text(encoding="utf-8", errors="replace").splitlines())
    return next((" ".join(match[1].split())[:300] for match in found if match), "no word")


def _cluster(of: dict[str, Any], ranks: int, source: str) -> Cluster:
    """The measured numbers as a cluster of one node."""

    def quantity(value: float, what: str = "") -> Quantity:
        return Quantity(value=value, provenance="measured", source=f"{what}{', ' if what else ''}{source}")

    device = Device(
        name=of["name"],
        kind=of["kind"],
        arch=of["arch"],
        memory_bytes=quantity(
            of["memory_bytes"], "free memory of the machine over the processes" if of["kind"] == "cpu" else ""
        ),
        memory_bytes_per_s=quantity(
            of["memory_bytes_per_s"], "norm, gated activation and residual, forward and backward"
        ),
        peak_flops_per_s={
            p: quantity(of["peak_flops_per_s"][p], "best matrix product of those tried") for p in PRECISIONS
        },
        matmul_flops_per_s={
            p: quantity(of["matmul_flops_per_s"][p], "linear layers, forward and backward") for p in PRECISIONS
        },
        attention_flops_per_s={
            p: quantity(of["attention_flops_per_s"][p], "causal attention, forward and backward") for p in PRECISIONS
        },
        op_overhead_s=quantity(of["op_overhead_s"], "small operations under autograd"),
    )
    link = None
    if ranks > 1:
        rates = {
            name: quantity(of["link"][name], f"{of['backend']} {name.removesuffix('_bytes_per_s')}")
            for name in of["link"]
        }
        link = Link(kind=of["backend"], **rates)
    return Cluster(
        name="local",
        device=device,
        num_nodes=1,
        gpus_per_node=ranks,
        scale_up=link,
        scale_up_domain=ranks,
        software=fingerprint(),
    )


def _follow(process: subprocess.Popen[str], report: Callable[[str, float], None], limit_s: float) -> bool:
    """Pass on ``share what`` lines until the process ends by itself; False if it had to be ended after ``limit_s``."""
    hung = threading.Event()

    def give_up() -> None:
        hung.set()
        _end(process)

    timer = threading.Timer(limit_s, give_up)
    timer.start()
    try:
        assert process.stdout is not None  # it was asked for
        for line in process.stdout:
            share, _, what = line.strip().partition(" ")
            with suppress(ValueError):
                report(what, float(share))
        process.wait()
    finally:
        timer.cancel()
    return not hung.is_set()


def _end(process: subprocess.Popen[str]) -> None:
    """End torchrun, which ends its ranks: they have sessions of their own, so no signal of ours reaches them."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
