"""The installed `planner` command in a process of its own: its exit codes, its one line of error, Ctrl-C, real runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.planner.conftest import Small

SCRIPT = Path(sys.executable).with_name("planner")
GPUS = ("--cluster", "1xH100", "--seq-len", "64", "--global-batch-size", "4")


@pytest.fixture(autouse=True)
def bare_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU to be seen, an empty cache, one thread for each process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def the_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The error of a command that failed with ``code``, after what it said of its progress and with nothing behind."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    *before, line = done.stderr.splitlines()
    assert all(text.startswith(("searching ", "sampling ", "nearest: ")) for text in before)
    assert line.startswith("error: ")
    return line


def test_0_a_command_that_did_its_work() -> None:
    done = run("models", "Qwen/Qwen3-0.6B", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["parameters"] == 596_049_920  # what transformers' own class has, embeddings tied


def test_2_what_was_asked_is_wrong() -> None:
    assert "Did you mean Qwen/Qwen3-8B" in the_line(run("tune", "Qwen/Qwen3-8X", *GPUS), 2)
    assert "planner --help" in the_line(run("tuen"), 2)


def test_3_no_plan_fits(folder: Path) -> None:
    line = the_line(run("tune", "Qwen/Qwen3-32B", *GPUS), 3)
    assert "GiB" in line
    assert list(folder.iterdir()) == []


def test_4_this_machine_was_never_measured(small: Small) -> None:
    job = ("tune", small.model, "--cluster", "local", "--seq-len", "64", "--global-batch-size", "4")
    assert "Run `planner profile`" in the_line(run(*job), 4)


def test_5_a_plan_for_another_machine(inputs: tuple[str | Path, ...], small: Small) -> None:
    assert run("tune", small.model, *GPUS, "-o", "gpu.yaml").returncode == 0
    line = the_line(run("run", "gpu.yaml", *inputs, "--steps", "2", "--init", "random"), 5)
    assert "it is for 1 x H100-SXM5-80GB, this machine shows no GPU" in line


def test_130_an_interrupted_search_keeps_its_study(small: Small, folder: Path) -> None:
    """More trials than a day has time for, until Ctrl-C; the same command then goes on."""
    search = (*small.job, "--engine", "optuna", "--study", "study.log", "--trials")
    command = [str(SCRIPT), *map(str, search), "10000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (folder / "study.log").exists() or (folder / "study.log").read_bytes().count(b"\n") < 30:
        assert time.monotonic() < deadline, "no trials in a minute"
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (out, "Traceback" in err) == ("", False)
    assert err.splitlines()[-1] == (
        "error: interrupted; the search so far is in study.log. Give the same command with --resume to go on."
    )
    assert not (folder / "plan.yaml").exists()
    again = run(*search, "1", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["search"]["engine"] == "optuna"


def test_130_an_interrupted_enumeration_goes_on_to_the_same_plan(folder: Path) -> None:
    """Ctrl-C once the search says where it is; --resume then ends as one that was never interrupted."""
    job = ("tune", "Qwen/Qwen3-32B", "--cluster", "64xH100", "--seq-len", "4096", "--global-batch-size", "512")
    search = (*job, "--backend", "megatron", "--workers", "2", "--json")
    process = subprocess.Popen([str(SCRIPT), *search], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("searching ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert (out, "Traceback" in err) == ("", False)
    assert [path.name for path in folder.iterdir()] == ["plan.study"]
    assert "the search so far is in plan.study" in err.splitlines()[-1]
    resumed, fresh = run(*search, "--resume"), run(*search, "-o", "fresh.yaml")
    assert resumed.returncode == 0, resumed.stderr
    for part in ("candidates", "search"):
        assert json.loads(resumed.stdout)[part] == json.loads(fresh.stdout)[part]


def test_only_debug_shows_a_traceback() -> None:
    done = run("tune", "Qwen/Qwen3-8X", *GPUS, "--debug")
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "UsageError" in done.stderr


@pytest.fixture
def inputs(small: Small, folder: Path) -> tuple[str | Path, ...]:
    """A model without weights, and documents as token ids, so that no tokenizer is needed; line 3 is cut off."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_bytes((small.model / "config.json").read_bytes())
    lines = [json.dumps({"input_ids": [(i + j) % 1024 for j in range(65)]}) for i in range(12)]
    lines[2] = lines[2][:40]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return ("--model-dir", model, "--data", folder / "data.jsonl", "--output", folder / "out")


def test_a_malformed_line_of_the_data_is_named_or_counted(inputs: tuple[str | Path, ...], small: Small) -> None:
    """The whole way: launcher, torchrun, a rank, and back as one line or as a run of two steps."""
    options = (*inputs, "--steps", "2", "--init", "random")
    line = the_line(run("run", small.plan, *options), 2)
    assert "data.jsonl, line 3: not JSON" in line
    assert "--skip-bad-lines" in line
    done = run("run", small.plan, *options, "--skip-bad-lines")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 malformed lines skipped (first: 3)" in done.stdout
    assert "step 2/2" in done.stdout
    assert "measured/predicted" in done.stdout


def test_a_run_without_weights_or_data_never_starts(inputs: tuple[str | Path, ...], small: Small, folder: Path) -> None:
    line = the_line(run("run", small.plan, *inputs, "--steps", "2"), 2)
    assert "holds no safetensors weights" in line
    assert "--init random" in line
    (folder / "data.jsonl").write_text("")
    line = the_line(run("run", small.plan, *inputs, "--steps", "2", "--init", "random"), 2)
    assert "data.jsonl is empty" in line
    assert not (folder / "out").exists()


def test_processes_of_a_test_see_no_gpu() -> None:
    """What the tests above rely on, told by doctor."""
    checks = {check["name"]: check for check in json.loads(run("doctor", "--json").stdout)["checks"]}
    assert checks["GPUs"]["found"] == "none visible"
    assert checks["local profile"]["state"] == "lacks"
    assert os.environ["TRAINPLAN_CACHE"] in checks["local profile"]["found"]
