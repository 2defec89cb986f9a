"""Errors a person can mend: each is one line saying what is wrong, why and how to mend it, and has an exit code."""

from __future__ import annotations

from typing import ClassVar


class TrainplanError(Exception):
    """Base of every error that the command line prints as one line, without a traceback."""

    exit_code: ClassVar[int] = 1


class UsageError(TrainplanError):
    """What was asked, or a file that was given, is malformed or contradicts itself."""

    exit_code = 2


class NoPlanError(TrainplanError):
    """No legal strategy fits the cluster."""

    exit_code = 3


class ProfileError(TrainplanError):
    """A profile of the hardware is missing or stale."""

    exit_code = 4


class MachineMismatchError(TrainplanError):
    """A plan does not match the machine, the model directory or the data it is run with."""

    exit_code = 5


class ExportCheckError(TrainplanError):
    """An exported file does not hold what the plan says."""

    exit_code = 6
