"""The demo: when it fails, what it prints beside the prediction, and, as a slow test, the whole of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from trainplan.costmodel.plan import Plan
from trainplan.executor.measurement import Measurement
from trainplan.planner.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"


def write_losses(run: Path, losses: list[float]) -> None:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps({"loss": loss}) + "\n" for loss in losses))


@pytest.mark.parametrize(
    ("losses", "falls"),
    [
        ([8.0] * 10 + [9.0] * 20 + [7.0] * 10, True),
        ([8.0] * 40, False),
        ([8.0] * 30 + [8.1] * 10, False),
        ([8.0] * 30 + [float("nan")] * 10, False),
    ],
)
def test_a_loss_that_does_not_fall_fails_the_demo(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], losses: list[float], falls: bool
) -> None:
    write_losses(tmp_path, losses)
    assert demo.check_loss(tmp_path) is falls
    out = capsys.readouterr().out
    assert "loss over 40 steps: mean of the first ten 8.000" in out
    assert ("did not fall" in out) is not falls


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    job = ("tune", "Qwen/Qwen3-0.6B", "--cluster", "1xH100", "--seq-len", "512", "--global-batch-size", "8")
    assert main([*job, "--json"]) == 0
    return tmp_path / "plan.yaml"


def measure(plan: Plan, folder: Path, factor: float, *, slowest: float = 1.0, data_wait_s: float = 0.0) -> None:
    """Writes the measurement of steps that took ``factor`` times the prediction, one of them ``slowest`` times that."""
    step_s = factor * plan.estimate.step_time_s.mid
    folder.mkdir(exist_ok=True)
    Measurement(
        plan_hash=plan.plan_hash,
        model=plan.model,
        workload=plan.workload,
        strategy=plan.strategy,
        step_time_s=step_s,
        samples_s=(step_s, step_s, step_s * slowest),
        warmup_steps=3,
        tokens_per_s=1.0,
        padding_frac=0.0,
        data_wait_s=data_wait_s,
        checkpoint_s=0.0,
        peak_memory_bytes=1,
        loss_first=3.0,
        loss_last=2.0,
        steps=6,
        environment={},
    ).save(folder)


@pytest.mark.parametrize(
    ("factor", "slowest", "words"),
    [
        (1.07, 1.0, None),
        (1.99, 1.0, None),
        (0.51, 1.0, None),
        (2.5, 1.0, "the measured rates of this machine are not those"),
        (0.4, 1.0, "the measured rates of this machine are not those"),
        (2.5, 3.0, "another load on this machine slowed the run"),
    ],
)
def test_outside_a_factor_of_two_a_cause_is_named(
    demo: ModuleType,
    plan: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    factor: float,
    slowest: float,
    words: str | None,
) -> None:
    measure(Plan.load(plan), tmp_path / "run", factor, slowest=slowest, data_wait_s=0.0125)
    capsys.readouterr()
    demo.compare(plan, tmp_path / "run")
    out = capsys.readouterr().out
    assert f"measured over predicted {factor:.2f}" in out
    assert ("factor of 2 apart" in out) is (words is not None)
    if words is not None:
        assert words in out
        assert "waiting for data took 12 ms" in out  # 12.5 rounded to even
        assert "backward" in out


def test_a_command_that_fails_ends_the_demo_with_its_code(demo: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    demo.planner("models", "Qwen/Qwen3-8B")
    with pytest.raises(SystemExit) as ended:
        demo.planner("models", "Qwen/Qwen3-8X")
    assert ended.value.code == 2
    out, err = capfd.readouterr()
    assert "$ planner models Qwen/Qwen3-8B" in out
    assert "8,190,735,360" in out
    assert "Did you mean Qwen/Qwen3-8B" in err


@pytest.mark.parametrize(("gpus", "cores", "ranks"), [(0, 1, 1), (0, 2, 2), (0, 64, 2), (1, 64, 1), (8, 64, 2)])
def test_a_machine_with_one_gpu_trains_with_one_process(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, ranks: int
) -> None:
    cuda = SimpleNamespace(device_count=lambda: gpus)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert demo.ranks() == ranks


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path) -> None:
    """A copy, so that what it writes is not where a person's own demo is; three minutes on two cores."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    command = [sys.executable, "-P", str(tmp_path / "examples" / "demo.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Qwen/Qwen3-8B on 8xH100" in done.stdout
    assert "step 40/40" in done.stdout
    assert "transformers loads the checkpoint" in done.stdout
    assert "measured over predicted" in done.stdout
    output = tmp_path / "demo-output"
    losses = [json.loads(line)["loss"] for line in (output / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 40
    assert sum(losses[-10:]) < sum(losses[:10]) - 5
    for name in ("qwen3-8b.yaml", "plan.yaml"):
        Plan.load(output / name)
