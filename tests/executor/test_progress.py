"""What a person sees while a run trains."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest
from rich.console import Console

from trainplan.executor.metrics import StepMetrics
from trainplan.executor.progress import Reporter
from trainplan.executor.stop import LAUNCHER_PID, Interrupted, StopWatch


def step(number: int) -> StepMetrics:
    return StepMetrics(
        step=number,
        loss=2.34567,
        learning_rate=1e-3,
        grad_norm=0.5,
        step_time_s=0.25,
        tokens=900,
        padded_tokens=124,
        loss_tokens=890,
        tokens_per_s=3600.0,
        data_wait_s=0.01,
        peak_memory_bytes=10**9,
    )


def show(terminal: bool, log_every: int) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    reporter = Reporter(done=0, total=5, log_every=log_every, console=console)
    for number in range(1, 6):
        reporter.step(step(number))
    reporter.say("done [/tmp/a]")
    reporter.close()
    return out.getvalue()


def test_a_line_per_step_where_there_is_no_terminal() -> None:
    lines = show(terminal=False, log_every=2).splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == ["step 2/5", "step 4/5", "step 5/5"]
    assert "loss 2.3457  3,600 tokens/s" in lines[0]
    assert lines[0].endswith("250 ms  left 1 s")  # 3 steps of 0.25 s
    assert lines[-1] == "done [/tmp/a]"


def test_a_bar_with_loss_and_speed_on_a_terminal() -> None:
    shown = show(terminal=True, log_every=1)
    assert "5/5" in shown
    assert "loss 2.3457  3,600 tokens/s" in shown
    assert "done [/tmp/a]" in shown


def test_a_request_to_stop_comes_by_signal_file_or_the_launchers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = StopWatch(tmp_path)
    restore = watch.install()
    try:
        assert watch.signal_number() == 0
        watch.raise_if_stopped()
        signal.raise_signal(signal.SIGINT)
        assert watch.signal_number() == signal.SIGINT
    finally:
        restore()
    (tmp_path / "stop.json").write_text('{"signal": 2}')
    other = StopWatch(tmp_path)
    with pytest.raises(Interrupted, match="SIGINT before the first step") as caught:
        other.raise_if_stopped()
    assert caught.value.exit_code == 130
    (tmp_path / "stop.json").write_text("{")  # damaged: no request that can be understood
    assert StopWatch(tmp_path).signal_number() == 0
    (tmp_path / "stop.json").unlink()
    monkeypatch.setenv(LAUNCHER_PID, str(2**22 + 1))  # above the largest process id of Linux
    assert StopWatch(tmp_path).signal_number() == signal.SIGTERM
