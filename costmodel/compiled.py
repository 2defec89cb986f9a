"""Which loops run compiled, and where is their machine code kept?

numba is slow to import (0.3 s) and to compile (1 to 2 s, once per machine), so it is loaded only when it pays: a single
estimate never does, a search does. Every caller has a plain NumPy or Python way to the same bits.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

Engine = Literal["auto", "numba", "numpy"]

# Nodes times rows from which loading numba costs less than the NumPy way: that plays about 5 million per second
# (benchmarks/simulate_speed.py), and loading takes half a second.
PAYS_FROM = 2_000_000


def use_numba(engine: Engine, work: int) -> bool:
    """Whether to run compiled.

    Args:
        engine: "numpy" and "numba" decide by themselves; "auto" is compiled once numba is loaded or if it pays.
        work: Graph nodes times rows of this call.

    Raises:
        ImportError: "numba" was asked for and can't be imported.
    """
    if engine == "auto":
        return ("numba" in sys.modules or work >= PAYS_FROM) and load()
    if engine == "numba" and not load():
        raise ImportError("numba can't be imported, so nothing runs compiled. Reinstall it, or use the numpy engine.")
    return engine == "numba"


@cache
def load() -> bool:
    """Import numba ahead of its first use; False if it is missing or broken."""
    folder = _cache_folder()
    if folder is not None:
        os.environ.setdefault("NUMBA_CACHE_DIR", str(folder))
    try:
        importlib.import_module("numba")
    except ImportError:  # missing, or built for another numpy
        return False
    return True


def _cache_folder() -> Path | None:
    """Where compiled code goes if it can't go beside the source; None if it can, or if nowhere is writable."""
    source = Path(__file__).parent
    beside = source / "__pycache__"
    if os.access(beside if beside.is_dir() else source, os.W_OK):
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainplan" / "numba"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in machine code, kept on disk where possible; it releases the interpreter lock."""
    njit = importlib.import_module("numba").njit
    try:
        return njit(nogil=True, cache=True)(function)  # type: ignore[no-any-return]  # numba has no types
    except RuntimeError:  # no folder it may write to: compile in every process
        return njit(nogil=True)(function)  # type: ignore[no-any-return]
