"""Other distributions may own the top-level names kernels, executor, planner, costmodel and profiles."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trainplan.executor.launch import environment, torchrun

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
print("done")
"""


def add_strangers(fresh: Environment) -> None:
    """Installs another distribution that owns all five names."""
    for folder in FOLDERS:
        package = fresh.site_packages / folder
        package.mkdir()
        (package / "__init__.py").write_text("owner = 'a stranger'\n")
    info = fresh.site_packages / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_installed_beside_strangers_of_the_same_names(
    editable: bool, borrowing_environment: Environment, wheel: Path, copy_tree: Callable[[], Path], tmp_path: Path
) -> None:
    fresh = borrowing_environment
    add_strangers(fresh)
    source = ("--no-build-isolation", "--editable", copy_tree()) if editable else (wheel,)
    fresh.install("--quiet", "--no-deps", "--ignore-installed", *source)
    code = (
        "import importlib\n"
        f"for name in {FOLDERS!r}:\n"
        "    theirs, ours = importlib.import_module(name), importlib.import_module('trainplan.' + name)\n"
        "    print(theirs.owner, ours.__name__, hasattr(ours, 'owner'))"
    )
    printed = fresh.run_ok("python", "-c", code, cwd=tmp_path).splitlines()
    assert printed == [f"a stranger trainplan.{folder} False" for folder in FOLDERS]


def test_a_worker_in_the_repository_sees_no_bare_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face transformers imports a package called kernels if it finds one: it must not find our folder.

    The worker is started as those of a run are: by our launcher, as a module, which Python looks for in the working
    directory first unless told to be safe.
    """
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # the launcher sets it, whoever starts the launcher
    (tmp_path / "worker_of_this_test.py").write_text(USE_TRANSFORMERS)
    done = subprocess.run(
        torchrun(1, "-m", "worker_of_this_test"),
        cwd=REPOSITORY,
        env={**environment(1), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    assert [
        line for line in done.stdout.splitlines() if str(REPOSITORY) in line
    ] == []  # an installed stranger may be there


@pytest.mark.slow
def test_beside_the_kernels_package_of_hugging_face(borrowing_environment: Environment, wheel: Path) -> None:
    """The real one, from the package index: whoever says kernels gets theirs, trainplan.kernels is ours."""
    fresh = borrowing_environment
    fresh.install("--quiet", "--no-deps", "--ignore-installed", wheel)
    fresh.install("--quiet", "kernels")
    # Imported by name, as transformers does only for the releases of it that it knows.
    code = "import kernels\n" + USE_TRANSFORMERS + "print('trainplan.kernels', trainplan.kernels.__file__)\n"
    printed = fresh.run_ok("python", "-c", code, cwd=REPOSITORY, env={"PYTHONSAFEPATH": "1"})
    site = fresh.site_packages
    assert printed.splitlines() == [
        f"kernels {site / 'kernels' / '__init__.py'}",
        "done",
        f"trainplan.kernels {site / 'trainplan' / 'kernels' / '__init__.py'}",
    ]
