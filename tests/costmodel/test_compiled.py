"""When numba is loaded, and where its compiled code goes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainplan.costmodel import compiled

PROBE = """
import sys
from trainplan.costmodel.graph import Key, build
from trainplan.costmodel.simulate import step_seconds
import numpy as np
graph = build(Key("1f1b", 2, 1, 4))
rows = np.ones(({rows}, len(graph.classes)))
print(step_seconds(graph, rows).max(), "numba" in sys.modules)
"""


def probed(rows: int, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(rows=rows)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.split()


def test_a_single_step_does_not_load_numba() -> None:
    assert probed(1)[1] == "False"


def test_many_rows_load_numba_and_find_the_same() -> None:
    few, many = probed(1), probed(compiled.PAYS_FROM // 20)  # a graph of more than 20 nodes
    assert many == [few[0], "True"]


def test_code_is_kept_in_the_users_cache_beside_a_read_only_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: str(path).startswith(str(tmp_path)))
    assert compiled._cache_folder() == tmp_path / "trainplan" / "numba"
    assert (tmp_path / "trainplan" / "numba").is_dir()


def test_code_is_kept_beside_its_source_where_that_is_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    assert compiled._cache_folder() is None


def test_nowhere_to_write_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))  # a folder can't be made below a file
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert compiled._cache_folder() is None


def test_without_numba_everything_runs_on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "load", lambda: False)
    assert not compiled.use_numba("auto", 10**9)
    assert not compiled.use_numba("numpy", 10**9)
    with pytest.raises(ImportError, match="numpy engine"):
        compiled.use_numba("numba", 1)
