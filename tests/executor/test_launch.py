"""Whole runs through torchrun: their files, exit codes, signals, and kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trainplan.costmodel.errors import MachineMismatchError, TrainplanError, UsageError
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.plan import Plan
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Workload
from trainplan.executor.launch import environment, run_plan, torchrun
from trainplan.executor.measurement import Measurement
from trainplan.executor.metrics import read_metrics
from trainplan.executor.options import RunOptions

WORKLOAD = Workload(seq_len=64, global_batch_size=8, precision="fp32")
ONE = Strategy(precision="fp32", micro_batch_size=4, grad_accum=2)
TWO = Strategy(
    precision="fp32", micro_batch_size=2, grad_accum=2, dp_shard=2, sharding="parameters", reshard_after_forward=True
)


class Runs:
    """Starts runs of one tiny model."""

    def __init__(self, model_dir: Path, data: Path, folder: Path, tiny: Any) -> None:
        self.model_dir, self.data, self.folder, self.tiny = model_dir, data, folder, tiny
        self.spec = load_model(str(model_dir))

    def plan(self, strategy: Strategy, **changes: Any) -> Path:
        path = self.folder / f"plan-{time.monotonic_ns()}.yaml"
        self.tiny.plan(self.spec, strategy, WORKLOAD, **changes).save(path)
        return path

    def options(self, name: str, **changes: Any) -> RunOptions:
        values = {"model_dir": self.model_dir, "data": self.data, "output_dir": self.folder / name, "steps": 6}
        return RunOptions(**{**values, "learning_rate": 3e-3, **changes})

    def run(self, strategy: Strategy, name: str, **changes: Any) -> int:
        return run_plan(self.plan(strategy), self.options(name, **changes))

    def start(self, strategy: Strategy, name: str, **changes: Any) -> subprocess.Popen[str]:
        """The same in a process of its own, as the command line would."""
        options = self.folder / f"{name}.json"
        options.write_text(self.options(name, **changes).model_dump_json())
        code = (
            "import sys; from pathlib import Path; from trainplan.executor.launch import run_plan; "
            "from trainplan.executor.options import RunOptions; "
            "sys.exit(run_plan(Path(sys.argv[1]), RunOptions.model_validate_json(Path(sys.argv[2]).read_text())))"
        )
        command = [sys.executable, "-P", "-c", code, str(self.plan(strategy)), str(options)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def curve(self, name: str) -> list[tuple[int, float, float]]:
        lines = read_metrics(self.folder / name / "metrics.jsonl")
        return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]

    def wait_for_step(self, name: str, step: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 120
        while len(self.curve(name)) < step:
            assert time.monotonic() < deadline, "no step in two minutes"
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)


@pytest.fixture
def runs(
    model_dirs: Callable[..., Path], corpus: Path, tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> Runs:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Runs(model_dirs("qwen3"), corpus, tmp_path, tiny)


def worker_pids(launcher: int) -> list[int]:
    """The ranks under a launcher: launcher -> torchrun -> workers, as Linux lists them."""
    agents = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for agent in agents for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]


def gone(pids: list[int], timeout_s: float = 60) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("strategy", [ONE, TWO], ids=["one rank", "two ranks"])
def test_a_run_leaves_metrics_a_model_and_a_measurement(
    strategy: Strategy, runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plan = Plan.load(runs.plan(strategy))
    assert runs.run(strategy, "out", steps=6, checkpoint_every=2, log_every=2) == 0
    out, err = capfd.readouterr()
    assert "step 6/6" in out
    assert "step 5/6" not in out  # log_every
    assert err == ""  # what libraries say is in stderr.log
    output = runs.folder / "out"
    lines = read_metrics(output / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    assert all(line["tokens"] + line["padded_tokens"] == 8 * 64 for line in lines)
    measured = Measurement.load(output / "measurement.json")
    assert measured.plan_hash == plan.plan_hash
    assert measured.strategy == strategy
    assert len(measured.samples_s) == 3
    assert measured.environment["torch"] == torch.__version__
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    ids = AutoTokenizer.from_pretrained(output / "model")("the quick brown fox jumps", return_tensors="pt")
    assert model(**ids, labels=ids["input_ids"]).loss.item() < 5.5  # random weights: log(384) = 5.95
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["latest", "step-4", "step-6"]
    assert not (output / "error.json").exists()


def test_a_killed_run_resumes_bitwise_as_if_undisturbed(runs: Runs) -> None:
    """Kill -9 of the rank in mid-training; the checkpoint before it is taken up, on one process bit by bit."""
    settings = {"steps": 40, "checkpoint_every": 7}
    assert runs.run(ONE, "whole", **settings) == 0
    process = runs.start(ONE, "killed", **settings)
    runs.wait_for_step("killed", 16, process)
    os.kill(worker_pids(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "left no message: they were killed" in err
    assert len(runs.curve("killed")) < 40
    assert runs.run(ONE, "killed", resume=True, **settings) == 0
    assert runs.curve("killed") == runs.curve("whole")
    whole, killed = (load_file(runs.folder / name / "model" / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_ranks_after_a_whole_step_with_a_checkpoint(number: int, runs: Runs) -> None:
    settings = {"steps": 200, "checkpoint_every": 0}
    process = runs.start(TWO, "out", **settings)
    runs.wait_for_step("out", 5, process)
    workers = worker_pids(process.pid)
    assert len(workers) == 2
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    done = len(runs.curve("out"))
    assert 5 <= done < 200
    assert f"stopped after step {done} of 200" in err
    assert "Traceback" not in err
    assert (runs.folder / "out" / "checkpoints" / "latest").read_text() == f"step-{done}\n"
    assert gone(workers)
    assert runs.run(TWO, "out", resume=True, steps=done + 2) == 0
    assert [line[0] for line in runs.curve("out")] == list(range(1, done + 3))


def test_ranks_end_by_themselves_when_the_launcher_is_killed(runs: Runs) -> None:
    """Nobody would notice them go on; they save first, and the folder is free again."""
    process = runs.start(TWO, "out", steps=100_000)
    runs.wait_for_step("out", 3, process)
    workers = worker_pids(process.pid)
    process.kill()
    process.wait()
    assert gone(workers)
    done = len(runs.curve("out"))
    assert (runs.folder / "out" / "checkpoints" / "latest").read_text() == f"step-{done}\n"


def test_errors_of_ranks_keep_their_exit_code_and_are_one_line(runs: Runs, model_dirs: Callable[..., Path]) -> None:
    bad_line = runs.tiny.write_lines(runs.folder / "bad.jsonl", [{"text": "the fox"}, {"txt": "dog"}])
    with pytest.raises(UsageError, match="line 2: neither 'text' nor 'input_ids'") as caught:
        runs.run(TWO, "bad-line", data=bad_line)
    assert "\n" not in str(caught.value)

    with pytest.raises(MachineMismatchError, match="needs GPU 0 on this machine, which has none"):
        run_plan(runs.plan(ONE, kind="gpu"), runs.options("gpu"))

    with pytest.raises(TrainplanError, match="not finite in 3 steps in a row") as failed:
        runs.run(ONE, "diverged", learning_rate=1e30, lr_schedule="constant")
    assert failed.value.exit_code == 1
    content = json.loads((runs.folder / "diverged" / "error.json").read_text())
    assert content["exit_code"] == 1
    assert content["rank"] == 0


def test_skipped_lines_are_counted_on_the_screen(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    lines = runs.data.read_text().splitlines()
    data = runs.tiny.write_lines(runs.folder / "some.jsonl", [*lines[:100], "oops", *lines[100:], "{}"])
    assert runs.run(ONE, "out", data=data, skip_bad_lines=True, init="random", steps=2) == 0
    assert "2 malformed lines skipped (first: 101, 242)" in capfd.readouterr().out


def test_no_folder_of_ours_can_be_taken_for_another_package(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers imports a package called kernels; from a checkout that name must not find ours."""
    script = runs.folder / "look.py"
    script.write_text(
        "import sys, transformers, trainplan.executor.worker\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "bare = {'kernels', 'executor', 'planner', 'costmodel', 'profiles'} & set(sys.modules)\n"
        "assert not bare, bare\n"
    )
    monkeypatch.chdir(Path(__file__).parents[2])
    done = subprocess.run(torchrun(1, str(script)), env=environment(1), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
