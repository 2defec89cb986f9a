"""An editable install: every folder is importable as trainplan.<folder> and under no other name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.packaging.conftest import Environment

FOLDERS = ("planner", "costmodel", "executor", "kernels", "profiles")
IMPORTABLE = f"import importlib.util; print([n for n in {FOLDERS!r} if importlib.util.find_spec(n)])"
MODEL_FILE = "import trainplan.costmodel.model as model; print(model.__file__)"


@pytest.fixture(scope="module")
def checkout(copy_tree: Callable[[], Path]) -> Path:
    """A tree of its own, since an editable install writes into it."""
    return copy_tree()


def test_editable_install(checkout: Path, borrowing_environment: Environment, tmp_path: Path) -> None:
    environment = borrowing_environment
    environment.install("--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed", "--editable", checkout)
    model = checkout / "costmodel" / "model.py"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    printed = environment.run_ok("python", "-c", MODEL_FILE, cwd=elsewhere).strip()
    assert Path(printed).resolve() == model
    assert environment.run_ok("python", "-c", IMPORTABLE, cwd=elsewhere) == "[]\n"

    safe = {"PYTHONSAFEPATH": "1"}  # as every child process of ours starts
    printed = environment.run_ok("python", "-c", MODEL_FILE, cwd=checkout, env=safe).strip()
    assert Path(printed).resolve() == model
    assert environment.run_ok("python", "-c", IMPORTABLE, cwd=checkout, env=safe) == "[]\n"
    # Without it Python itself puts the working directory on the path: this is what the variable is for.
    assert environment.run_ok("python", "-c", IMPORTABLE, cwd=checkout) == f"{list(FOLDERS)}\n"

    with model.open("a") as source:
        source.write("\nEDITED = 'seen without another install'\n")
    edited = "from trainplan.costmodel.model import EDITED; print(EDITED)"
    assert environment.run_ok("python", "-c", edited, cwd=elsewhere) == "seen without another install\n"
