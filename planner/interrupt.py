"""A person ended a command early, and is told what was kept."""

from __future__ import annotations

from typing import ClassVar

from trainplan.costmodel.errors import TrainplanError


class Interrupted(TrainplanError):
    """Ctrl-C. The message says what was saved."""

    exit_code: ClassVar[int] = 130
