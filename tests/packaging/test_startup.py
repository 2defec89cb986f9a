"""The commands start fast, and planning loads no torch."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.packaging.conftest import Environment

HELP_CPU_S = 0.150  # promised for --help, beyond the interpreter's own start
HEAVY = {"torch", "transformers", "triton", "datasets", "tensorboard"}
# Python runs a module of this name when it starts; this one writes what the process had loaded when it ended.
SITECUSTOMIZE = """
import atexit, os, sys
def record():
    with open(os.path.join(os.environ["LOADED_MODULES"], str(os.getpid())), "w") as out:
        out.write("\\n".join(sys.modules))
atexit.register(record)
"""


@pytest.fixture
def loaded(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """Environment variables that make every Python process write its modules to a file in the folder."""
    hook, folder = tmp_path / "hook", tmp_path / "loaded"
    hook.mkdir()
    folder.mkdir()
    (hook / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return {"PYTHONPATH": str(hook), "LOADED_MODULES": str(folder)}, folder


def loaded_modules(folder: Path) -> set[str]:
    """The modules of all processes that wrote to ``folder``."""
    return {name for path in folder.iterdir() for name in path.read_text().splitlines()}


def test_the_record_shows_what_a_process_loads(
    wheel_environment: Environment, loaded: tuple[dict[str, str], Path], tmp_path: Path
) -> None:
    env, folder = loaded
    wheel_environment.run_ok("python", "-c", "import safetensors", cwd=tmp_path, env=env)
    assert "safetensors" in loaded_modules(folder)
    assert "json" not in loaded_modules(folder)


def test_help_loads_no_torch(
    wheel_environment: Environment, loaded: tuple[dict[str, str], Path], tmp_path: Path
) -> None:
    env, folder = loaded
    wheel_environment.run_ok("planner", "--help", cwd=tmp_path, env=env)
    modules = loaded_modules(folder)
    assert "trainplan.planner.cli" in modules
    assert HEAVY & modules == set()


def test_tune_loads_no_torch(
    wheel_environment: Environment, loaded: tuple[dict[str, str], Path], tmp_path: Path
) -> None:
    env, folder = loaded
    tune = (
        "planner",
        "tune",
        "Qwen/Qwen3-8B",
        "--cluster",
        "8xH100",
        "--seq-len",
        "4096",
        "--global-batch-size",
        "256",
    )
    json.loads(wheel_environment.run_ok(*tune, "--json", cwd=tmp_path, env=env))
    modules = loaded_modules(folder)
    assert "trainplan.planner.cli" in modules
    assert HEAVY & modules == set()


def test_help_costs_little(wheel_environment: Environment, tmp_path: Path) -> None:
    """CPU seconds, user and system, the least of several runs: other work on the machine only ever adds."""

    def cpu_s(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        wheel_environment.run_ok(*command, cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    cpu_s("planner", "--help")  # writes the bytecode of modules run for the first time
    runs = [(cpu_s("python", "-P", "-c", "pass"), cpu_s("planner", "--help")) for _ in range(7)]
    bare_s, help_s = (min(column) for column in zip(*runs, strict=True))
    assert help_s - bare_s <= HELP_CPU_S, f"planner --help costs {help_s:.3f} s, an empty interpreter {bare_s:.3f} s"
