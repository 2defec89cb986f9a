"""What a person sees while a run trains: a bar on a terminal, lines elsewhere. Only rank 0 has one."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainplan.executor.metrics import StepMetrics


class Reporter:
    """Shows steps as they end."""

    def __init__(self, *, done: int, total: int, log_every: int, console: Console | None = None) -> None:
        """Starts at step ``done`` of ``total``."""
        self._console = console or Console()
        self._total, self._log_every = total, log_every
        self._bar: Progress | None = None
        self._task: Any = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("train", total=total, completed=done, state="")
            self._bar.start()

    def step(self, metrics: StepMetrics) -> None:
        """Shows one step."""
        state = f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step, state=state)
        elif metrics.step % self._log_every == 0 or metrics.step == self._total:
            left = (self._total - metrics.step) * metrics.step_time_s
            self.say(
                f"step {metrics.step}/{self._total}  {state}  lr {metrics.learning_rate:.2e}  "
                f"grad norm {metrics.grad_norm:.3f}  {metrics.step_time_s * 1e3:.0f} ms  left {left:.0f} s"
            )

    def say(self, line: str) -> None:
        """Prints a line, above the bar where there is one."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.stop()
