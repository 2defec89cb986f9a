"""When should a run end early? On a signal, on the launcher's request, or when its parent is gone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from trainplan.costmodel.errors import TrainplanError

STOP_FILE = "stop.json"
LAUNCHER_PID = "TRAINPLAN_LAUNCHER_PID"


class Interrupted(TrainplanError):
    """The run was asked to end and did, with what it had done saved. The exit code is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number  # type: ignore[misc]  # depends on the signal, so it is no class constant


class StopWatch:
    """Remembers the first request to stop. Signals only set it; the training loop ends a whole step first."""

    def __init__(self, output_dir: Path) -> None:
        self._file = output_dir / STOP_FILE
        self._signal = 0
        self._parent = os.getppid()
        self._launcher = int(os.environ.get(LAUNCHER_PID, "0"))

    def install(self) -> Callable[[], None]:
        """Takes over SIGINT and SIGTERM; returns what gives them back."""
        old = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}

        def restore() -> None:
            for number, handler in old.items():
                signal.signal(number, handler)

        return restore

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signal = self._signal or number

    def signal_number(self) -> int:
        """Number of the signal to obey, 0 = none so far."""
        if not self._signal:
            self._signal = self._requested() or (signal.SIGTERM if self._orphaned() else 0)
        return self._signal

    def _requested(self) -> int:
        try:
            number = json.loads(self._file.read_text(encoding="utf-8"))["signal"]
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return number if number in (signal.SIGINT, signal.SIGTERM) else int(signal.SIGTERM)

    def _orphaned(self) -> bool:
        """The launcher or torchrun was killed: nobody would notice this run going on, or stop it."""
        if os.getppid() != self._parent:
            return True
        if not self._launcher:
            return False
        try:
            os.kill(self._launcher, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def raise_if_stopped(self) -> None:
        """For long work before the first step, when there is nothing to save.

        Raises:
            Interrupted: There was a request.
        """
        if number := self.signal_number():
            raise Interrupted(f"stopped by {signal.Signals(number).name} before the first step.", number)
