"""What a wheel and a source distribution hold, and that the installed script starts."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import trainplan

if TYPE_CHECKING:
    from tests.packaging.conftest import Environment

FOLDERS = ("planner", "costmodel", "executor", "kernels", "profiles")


def package_files(tree: Path) -> set[str]:
    """Every file of the package, code and data, as ``trainplan/costmodel/model.py``."""
    own = {f"trainplan/{path.name}" for path in (tree / "trainplan").iterdir() if path.is_file()}
    linked = {
        f"trainplan/{path.relative_to(tree)}"
        for folder in FOLDERS
        for path in (tree / folder).rglob("*")
        if path.is_file()
    }
    return own | linked


def test_wheel_holds_every_file_and_nothing_else(tree: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {
            name for name in archive.namelist() if not name.startswith(f"trainplan-{trainplan.__version__}.dist-info/")
        }
    assert "trainplan/costmodel/model.py" in names
    assert names == package_files(tree)


def test_wheel_names_its_licence_and_runs_on_any_platform(wheel: Path) -> None:
    assert wheel.name == f"trainplan-{trainplan.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        info = f"trainplan-{trainplan.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata


def test_source_distribution_builds_the_same_wheel(
    tree: Path, wheel: Path, build_wheel: Callable[[Path], Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-P", "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(tree)]
    subprocess.run(command, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("trainplan-*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert [member.name for member in archive if member.issym() or member.islnk()] == []
    with zipfile.ZipFile(build_wheel(sdist)) as again, zipfile.ZipFile(wheel) as first:
        assert {item.filename: item.CRC for item in again.infolist() if not item.filename.endswith("/RECORD")} == {
            item.filename: item.CRC for item in first.infolist() if not item.filename.endswith("/RECORD")
        }


def test_installed_data_is_found(tree: Path, wheel_environment: Environment, tmp_path: Path) -> None:
    code = (
        "from importlib.resources import files\n"
        "def walk(folder, prefix=''):\n"
        "    for entry in folder.iterdir():\n"
        "        if entry.is_dir() and entry.name != '__pycache__':\n"
        "            yield from walk(entry, prefix + entry.name + '/')\n"
        "        elif entry.name.endswith(('.json', '.jsonl', '.yaml')):\n"
        "            yield prefix + entry.name\n"
        "print('\\n'.join(sorted(walk(files('trainplan.profiles')))))"
    )
    data = sorted(
        str(path.relative_to(tree / "profiles"))
        for path in (tree / "profiles").rglob("*")
        if path.suffix in (".json", ".jsonl", ".yaml")
    )
    assert len(data) >= 2  # models and hardware at least
    assert wheel_environment.run_ok("python", "-c", code, cwd=tmp_path).splitlines() == data


def test_other_folders_are_not_importable_beside_the_wheel(wheel_environment: Environment, tmp_path: Path) -> None:
    code = f"import importlib.util; print([n for n in {(*FOLDERS, 'tests')!r} if importlib.util.find_spec(n)])"
    assert wheel_environment.run_ok("python", "-c", code, cwd=tmp_path) == "[]\n"


def test_planner_starts(wheel_environment: Environment, tmp_path: Path) -> None:
    assert trainplan.__version__ in wheel_environment.run_ok("planner", "--version", cwd=tmp_path)
    shown = wheel_environment.run_ok("planner", "--help", cwd=tmp_path)
    assert [
        command for command in ("tune", "run", "explain", "models", "hardware", "validate") if command not in shown
    ] == []


@pytest.mark.slow
def test_the_plain_distribution_plans_without_torch(bare_environment: Environment, wheel: Path, tmp_path: Path) -> None:
    """What `pip install trainplan` brings from a package index is enough to plan."""
    bare_environment.install("--quiet", wheel)
    assert bare_environment.run("python", "-c", "import torch", cwd=tmp_path).returncode == 1
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
    bare_environment.run_ok(*tune, "--json", cwd=tmp_path)
