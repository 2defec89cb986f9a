"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed. Imports no torch."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainplan.costmodel.errors import UsageError

ERROR_FILE = "error.json"  # what ended a run, left by the first rank that failed
LOCK_FILE = ".lock"  # held by the run that writes to a folder


def sync_folder(folder: Path) -> None:
    """Flushes a folder's list of names, so that a rename inside it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flushes every file and folder under ``folder``, and itself."""
    for root, _, names in os.walk(folder):
        for name in names:
            with open(Path(root) / name, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(root))


def write_json(path: Path, value: Any) -> None:
    """Replaces ``path`` by ``value`` as JSON: a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def publish(temporary: Path, final: Path) -> None:
    """Flushes the folder ``temporary`` and gives it its ``final`` name; an older folder of that name goes away."""
    sync_tree(temporary)
    if final.exists():
        old = final.with_name(f".old-{final.name}")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old)
    else:
        temporary.rename(final)
    sync_folder(final.parent)


@contextmanager
def lock(path: Path, *, when: bool = True) -> Iterator[None]:
    """Holds ``path`` for this process, if ``when``; the system lets go of it however the process ends.

    Raises:
        UsageError: Another process holds it.
    """
    if not when:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another run is writing to {path.parent}. Wait for it or stop it, or give another output folder."
            ) from None
        yield
