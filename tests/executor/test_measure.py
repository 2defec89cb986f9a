"""Measuring this machine: a short real run, and what becomes of one that fails, hangs or is interrupted."""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainplan.costmodel.cluster_config import load_cluster, save_cluster
from trainplan.costmodel.errors import ProfileError
from trainplan.costmodel.hardware import Cluster
from trainplan.executor import measure
from trainplan.executor.measure import fingerprint, measure_machine

# What any machine that can import torch reaches and none exceeds: an old laptop to a large GPU, busy or not.
RATES = {"flops_per_s": (1e8, 1e17), "bytes_per_s": (1e6, 1e14)}
SECONDS = (1e-9, 0.1)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Has torchrun start a file of this code on each rank."""
    real = measure.torchrun

    def other(ranks: int, *target: str) -> list[str]:
        script = Path(target[target.index("--output") + 1]).with_name("rank.py")
        script.write_text(code)
        return real(ranks, str(script))

    monkeypatch.setattr(measure, "torchrun", other)


def rates(cluster: Cluster) -> dict[str, float]:
    """Every measured rate of a device and its link, by name."""
    device = cluster.device
    found = {"memory_bytes_per_s": device.memory_bytes_per_s.value}
    for name in ("peak_flops_per_s", "matmul_flops_per_s", "attention_flops_per_s"):
        found |= {f"{precision} {name}": quantity.value for precision, quantity in getattr(device, name).items()}
    if cluster.scale_up is not None:
        for name in ("all_reduce", "all_gather", "all_to_all", "p2p"):
            found[f"{name}_bytes_per_s"] = getattr(cluster.scale_up, f"{name}_bytes_per_s").value
    return found


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_short_run_describes_this_machine(nproc: int, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    cluster = measure_machine(nproc, 2.0, lambda what, share: seen.append((what, share)))
    save_cluster(cluster, tmp_path / "local.yaml")
    assert load_cluster(tmp_path / "local.yaml") == cluster
    assert (cluster.name, cluster.num_nodes, cluster.gpus_per_node) == ("local", 1, nproc)
    assert cluster.device.kind == ("gpu" if torch.cuda.is_available() else "cpu")
    assert cluster.software == fingerprint()
    for name, value in rates(cluster).items():
        low, high = next(bounds for suffix, bounds in RATES.items() if name.endswith(suffix))
        assert low < value < high, name
    for precision in ("fp32", "bf16"):  # the best of several products is no slower than the middle one
        assert cluster.device.peak_flops_per_s[precision].value >= cluster.device.matmul_flops_per_s[precision].value
    assert SECONDS[0] < cluster.device.op_overhead_s.value < SECONDS[1]
    assert 2**26 < cluster.device.memory_bytes.value < 2**50
    assert (cluster.scale_up is None) == (nproc == 1)
    if cluster.scale_up is not None:
        assert SECONDS[0] < cluster.scale_up.latency_s.value < SECONDS[1]
        assert cluster.scale_up.latency_s.source.startswith(f"{cluster.scale_up.kind} latency_s, measured on this")
    sources = [cluster.device.memory_bytes_per_s.source, cluster.device.op_overhead_s.source]
    assert all(f"{nproc} processes at once, torch {torch.__version__}" in source for source in sources)
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1] < 1) == (0.0, True)
    assert seen[0][0] == "operation overhead"


def test_what_ranks_report_becomes_a_cluster_with_its_sources() -> None:
    described: dict[str, Any] = {
        "name": "cpu", "kind": "cpu", "arch": platform.machine(), "memory_bytes": 4e9,
        "torch": "2.0", "backend": "gloo", "memory_bytes_per_s": 1e10, "op_overhead_s": 1e-6, "link": {},
        **{name: {"fp32": 1e11, "bf16": 2e11} for name in ("peak_flops_per_s", "matmul_flops_per_s")},
        "attention_flops_per_s": {"fp32": 1e10, "bf16": 2e10},
    }  # fmt: skip
    cluster = measure._cluster(described, 1, "measured here")
    assert cluster.device.memory_bytes.value == 4e9
    assert cluster.device.memory_bytes.source == "free memory of the machine over the processes, measured here"
    assert cluster.device.matmul_flops_per_s["bf16"].value == 2e11
    assert cluster.scale_up is None


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_failing_rank_is_named_with_its_own_error(monkeypatch: pytest.MonkeyPatch, nproc: int) -> None:
    """Not torchrun's ChildFailedError, which says only that there was one."""
    instead(monkeypatch, "raise RuntimeError('no memory for x')\n")
    with pytest.raises(ProfileError) as caught:
        measure_machine(nproc, 1.0)
    assert "ended with code 1 (RuntimeError: no memory for x)" in str(caught.value)
    assert "planner profile" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_rank_that_is_killed_has_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(ProfileError, match=r"ended with code 1 \(no word\)"):
        measure_machine(1, 1.0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[rank1]: torch.OutOfMemoryError: CUDA out of memory.", "torch.OutOfMemoryError: CUDA out of memory."),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "no word"),
        ("    raise ValueError('in the middle of a traceback')", "no word"),
    ],
)
def test_words_are_the_last_line_of_a_traceback(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "log").write_text(f"a warning\n{line}\n")
    assert measure._last_words(tmp_path / "log") == words


def waiting(folder: Path) -> str:
    """A rank that says that it is there and then hangs, with standard output open."""
    path = str(folder / "pid")
    return f"import os, time\nopen({path!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "], ids=["ends when asked", "must be killed"])
def test_measuring_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trap: str) -> None:
    """In torchrun's place a shell, whose children keep standard output open as ranks do."""
    shell = f"{trap}echo $$ > {tmp_path}/pid; echo '0.50 something'; while :; do sleep 1; done"
    monkeypatch.setattr(measure, "torchrun", lambda ranks, *target: ["sh", "-c", shell])
    monkeypatch.setattr(measure, "SETUP_S", 1.5)
    monkeypatch.setattr(measure, "END_S", 3.0)
    seen: list[tuple[str, float]] = []
    with pytest.raises(ProfileError, match="measuring hung: no end after 2 s"):
        measure_machine(1, 0.0, lambda what, share: seen.append((what, share)))
    assert seen == [("something", 0.5)]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_an_interruption_ends_the_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gone: Callable[[int], bool]
) -> None:
    """They have sessions of their own: Ctrl-C on a terminal does not reach them."""
    interrupt = f"os.kill({os.getpid()}, {int(signal.SIGINT)})\n"
    instead(monkeypatch, waiting(tmp_path).replace("time.sleep", interrupt + "time.sleep"))
    with pytest.raises(KeyboardInterrupt):
        measure_machine(1, 1.0)
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """Whether a process has ended, or does within some seconds."""

    def ask(pid: int) -> bool:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.05)
        return False

    return ask


def test_counting_gpus_that_hangs_names_the_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr(measure, "SETUP_S", 0.2)
    with pytest.raises(ProfileError, match="Give their number: --nproc"):
        measure_machine()


def test_without_torch_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as caught:
        measure_machine(1)
    assert caught.value.name == "torch"


def test_a_fingerprint_names_the_processor_and_the_version_of_torch() -> None:
    """The system's own answers; a build's local label, as in 2.13.0+cpu, is part of the version."""
    found = fingerprint()
    assert found["cores"] == str(os.cpu_count())
    assert found["machine"] == platform.machine()
    assert found["torch"] == torch.__version__
    assert found["processor"]
    assert fingerprint() == found
