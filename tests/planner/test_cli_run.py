"""`planner run`: what is checked before a process starts and shown after it ended. The executor's tests train."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trainplan.costmodel.errors import UsageError
from trainplan.executor.measurement import Measurement
from trainplan.executor.options import RunOptions
from trainplan.planner.machine import Machine, this_machine

if TYPE_CHECKING:
    from tests.planner.conftest import Done, Small


@pytest.fixture
def inputs(small: Small, folder: Path) -> tuple[str | Path, ...]:
    """Options that name a model directory, data and an output folder that exist."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_bytes((small.model / "config.json").read_bytes())
    (model / "model.safetensors").write_bytes(b"weights")
    data = folder / "data.jsonl"
    data.write_text('{"text": "a"}\n')
    return ("--model-dir", model, "--data", data, "--output", folder / "out")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, small: Small) -> list[RunOptions]:
    """The options of every run that was started; none really is. A run leaves a measurement of twice the prediction."""
    seen: list[RunOptions] = []
    plan = small.loaded

    def pretend(plan_path: Path, options: RunOptions, *, debug: bool = False) -> int:
        seen.append(options)
        options.output_dir.mkdir(exist_ok=True)
        step_s = 2.5 * plan.estimate.step_time_s.mid
        Measurement(
            plan_hash=plan.plan_hash,
            model=plan.model,
            workload=plan.workload,
            strategy=plan.strategy,
            step_time_s=step_s,
            samples_s=(step_s,) * 6,
            warmup_steps=3,
            tokens_per_s=plan.workload.tokens_per_step / step_s,
            padding_frac=0.0,
            data_wait_s=step_s / 2,
            checkpoint_s=0.0,
            peak_memory_bytes=2**30,
            loss_first=3.0,
            loss_last=2.0,
            steps=9,
            environment={},
        ).save(options.output_dir)
        return 0

    monkeypatch.setattr("trainplan.executor.launch.run_plan", pretend)
    return seen


def test_a_run_ends_with_predicted_beside_measured(
    planner: Callable[..., Done], small: Small, inputs: tuple[str, ...], started: list[RunOptions]
) -> None:
    done = planner("run", small.plan, *inputs, "--steps", "9")
    assert done.code == 0, done.err
    assert "Predicted and measured (6 steps after 3 of warm-up)" in done.out
    (row,) = [line for line in done.out.splitlines() if line.startswith("step time")]
    assert row.endswith("2.50x")
    assert "more than a factor of 2 off" in done.out
    assert "ranks waited for data in 50 % of the step" in done.out


def test_every_option_reaches_the_run(
    planner: Callable[..., Done], small: Small, inputs: tuple[str, ...], started: list[RunOptions]
) -> None:
    wanted: dict[str, Any] = {
        "steps": 7, "learning_rate": 0.5, "warmup_steps": 2, "lr_schedule": "linear", "min_lr_frac": 0.2,
        "weight_decay": 0.3, "max_grad_norm": 4.0, "seed": 5, "checkpoint_every": 6, "keep_checkpoints": 8,
        "text_field": "body", "log_every": 9, "init": "random",
    }  # fmt: skip
    words = [word for name, value in wanted.items() for word in (f"--{name.replace('_', '-')}", value)]
    more = ("--beta1", "0.8", "--beta2", "0.7", "--resume", "--skip-bad-lines")
    assert planner("run", small.plan, *inputs, *words, *more).code == 0
    (options,) = started
    assert {name: getattr(options, name) for name in wanted} == wanted
    assert (options.betas, options.resume, options.skip_bad_lines) == ((0.8, 0.7), True, True)
    assert set(RunOptions.model_fields) == {
        *wanted,
        "betas",
        "resume",
        "skip_bad_lines",
        "model_dir",
        "data",
        "output_dir",
    }


@pytest.mark.parametrize("code", [130, 143])
def test_the_exit_code_is_that_of_the_run(
    planner: Callable[..., Done],
    small: Small,
    inputs: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    monkeypatch.setattr("trainplan.executor.launch.run_plan", lambda *_, **__: code)
    done = planner("run", small.plan, *inputs, "--steps", "9")
    assert (done.code, done.out) == (code, "")


def test_an_error_of_a_rank_is_the_one_line(
    planner: Callable[..., Done], small: Small, inputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> int:
        raise UsageError("data.jsonl line 3 is not JSON. Correct it, or use --skip-bad-lines.")

    monkeypatch.setattr("trainplan.executor.launch.run_plan", failing)
    done = planner("run", small.plan, *inputs, "--steps", "9")
    assert (done.code, done.error[:17]) == (2, "data.jsonl line 3")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"arch": "aarch64"}, "this one is aarch64"),
        ({"cores": 0}, "it has 1 CPU ranks, this machine has 0 usable cores"),
    ],
)
def test_a_plan_for_another_machine_exits_5_and_starts_nothing(
    planner: Callable[..., Done],
    small: Small,
    inputs: tuple[str, ...],
    started: list[RunOptions],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    words: str,
) -> None:
    other = replace(this_machine(), **change)
    monkeypatch.setattr("trainplan.planner.machine.this_machine", lambda: other)
    done = planner("run", small.plan, *inputs, "--steps", "9")
    assert done.code == 5
    assert words in done.error
    assert "planner profile" in done.error
    assert started == []


def test_a_gpu_plan_on_a_machine_without_gpus_exits_5(
    planner: Callable[..., Done],
    small: Small,
    inputs: tuple[str, ...],
    folder: Path,
    started: list[RunOptions],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = ("tune", small.model, "--cluster", "1xH100", "--seq-len", "64", "--global-batch-size", "4")
    assert planner(*job, "-o", "gpu.yaml").code == 0
    bare = Machine(gpus=(), cores=8, arch="x86_64", processor="a processor")
    monkeypatch.setattr("trainplan.planner.machine.this_machine", lambda: bare)
    done = planner("run", "gpu.yaml", *inputs, "--steps", "9")
    assert done.code == 5
    assert "it is for 1 x H100-SXM5-80GB, this machine shows no GPU" in done.error
    assert started == []


def test_another_model_exits_5(
    planner: Callable[..., Done], small: Small, inputs: tuple[Any, ...], started: list[RunOptions]
) -> None:
    config = Path(inputs[1]) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 3}))
    done = planner("run", small.plan, *inputs, "--steps", "9")
    assert done.code == 5
    assert "num_layers is 3, not 4" in done.error
    assert started == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda model, data: data.unlink(), "data.jsonl is not a file"),
        (lambda model, data: data.write_text(""), "data.jsonl is empty"),
        (lambda model, data: (model / "config.json").unlink(), "no config.json"),
        (lambda model, data: (model / "model.safetensors").unlink(), "no safetensors weights"),
    ],
)
def test_missing_inputs_exit_2_before_anything_starts(
    planner: Callable[..., Done],
    small: Small,
    inputs: tuple[Any, ...],
    started: list[RunOptions],
    spoil: Callable[[Path, Path], object],
    words: str,
) -> None:
    spoil(Path(inputs[1]), Path(inputs[3]))
    done = planner("run", small.plan, *inputs, "--steps", "9")
    assert done.code == 2
    assert words in done.error
    assert started == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--steps is missing"),
        (("--steps", "2", "--warmup-steps", "3"), "warmup_steps=3 is more than steps=2"),
        (("--steps", "2", "--lr-schedule", "step"), "--lr-schedule: "),
        (("--steps", "2", "--learning-rate", "0"), "--learning-rate: "),
        (("--steps", "2", "--init", "zeros"), "--init: "),
    ],
)
def test_bad_options_exit_2(
    planner: Callable[..., Done],
    small: Small,
    inputs: tuple[str, ...],
    started: list[RunOptions],
    options: tuple[str, ...],
    words: str,
) -> None:
    done = planner("run", small.plan, *inputs, *options)
    assert done.code == 2
    assert words in done.error
    assert started == []


def test_without_steps_the_tokens_of_the_job_decide(
    planner: Callable[..., Done], small: Small, inputs: tuple[str, ...], started: list[RunOptions]
) -> None:
    """2,001 tokens in steps of 4 sequences of 64: eight steps."""
    assert planner(*small.job, "--train-tokens", "2001", "-o", "job.yaml").code == 0
    assert planner("run", "job.yaml", *inputs).code == 0
    assert started[0].steps == 8


def test_missing_packages_are_named_with_the_command_that_installs_them(
    planner: Callable[..., Done],
    small: Small,
    inputs: tuple[str, ...],
    started: list[RunOptions],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainplan.planner.checkup.missing_packages", lambda: ["torch", "transformers"])
    done = planner("run", small.plan, *inputs, "--steps", "9")
    assert done.code == 2
    assert done.error.startswith("training needs torch, transformers, not installed here. Run: pip install")
    assert started == []
