"""Other distributions may own the top-level names kernels, executor, planner, costmodel and profiles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.packaging.conftest import Environment

FOLDERS = ("planner", "costmodel", "executor", "kernels", "profiles")
REPOSITORY = Path(__file__).resolve().parents[2]
# A tiny Qwen3 is built too: making a model is what makes transformers look for kernels to use. It prints the top-level
# modules of our folders' names, loaded or only importable, and where each comes from.
USE_TRANSFORMERS = """
from importlib.util import find_spec
from transformers import AutoModelForCausalLM, Qwen3Config
AutoModelForCausalLM.from_config(
    Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                num_key_value_heads=1, head_dim=8)
)
import trainplan.costmodel.model, trainplan.executor, trainplan.kernels, trainplan.planner, trainplan.profiles
for name in ("planner", "costmodel", "executor", "kernels", "profiles"):
    if spec := find_spec(name):
        print(name, spec.origin)
"""


def add_strangers(environment: Environment) -> None:
    """Installs another distribution that owns all five names."""
    for folder in FOLDERS:
        package = environment.site_packages / folder
        package.mkdir()
        (package / "__init__.py").write_text("owner = 'a stranger'\n")
    info = environment.site_packages / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_installed_beside_strangers_of_the_same_names(
    editable: bool, borrowing_environment: Environment, wheel: Path, copy_tree: Callable[[], Path], tmp_path: Path
) -> None:
    environment = borrowing_environment
    add_strangers(environment)
    source = ("--no-build-isolation", "--editable", copy_tree()) if editable else (wheel,)
    environment.install("--quiet", "--no-deps", "--ignore-installed", *source)
    code = (
        "import importlib\n"
        f"for name in {FOLDERS!r}:\n"
        "    theirs, ours = importlib.import_module(name), importlib.import_module('trainplan.' + name)\n"
        "    print(theirs.owner, ours.__name__, hasattr(ours, 'owner'))"
    )
    printed = environment.run_ok("python", "-c", code, cwd=tmp_path).splitlines()
    assert printed == [f"a stranger trainplan.{folder} False" for folder in FOLDERS]


def test_a_worker_in_the_repository_sees_no_bare_folder() -> None:
    """Hugging Face transformers imports a package called kernels if it finds one: it must not find our folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", USE_TRANSFORMERS],  # -c looks in the working directory, unless told to be safe
        cwd=REPOSITORY,
        env={**clean, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [
        line for line in done.stdout.splitlines() if str(REPOSITORY) in line
    ] == []  # an installed stranger may be there


@pytest.mark.slow
def test_beside_the_kernels_package_of_hugging_face(borrowing_environment: Environment, wheel: Path) -> None:
    """The real one, from the package index: whoever says kernels gets theirs, trainplan.kernels is ours."""
    environment = borrowing_environment
    environment.install("--quiet", "--no-deps", "--ignore-installed", wheel)
    environment.install("--quiet", "kernels")
    # Imported by name, as transformers does only for the releases of it that it knows.
    code = "import kernels\n" + USE_TRANSFORMERS + "print('trainplan.kernels', trainplan.kernels.__file__)\n"
    printed = environment.run_ok("python", "-c", code, cwd=REPOSITORY, env={"PYTHONSAFEPATH": "1"})
    site = environment.site_packages
    assert dict(line.split(maxsplit=1) for line in printed.splitlines()) == {
        "kernels": str(site / "kernels" / "__init__.py"),
        "trainplan.kernels": str(site / "trainplan" / "kernels" / "__init__.py"),
    }
