"""Fresh virtual environments, and the distributions built from a copy of this tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDERS = ("planner", "costmodel", "executor", "kernels", "profiles")
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment."""

    root: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.root / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where it installs."""
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.root), "platbase": str(self.root)}))

    def run(
        self, *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``command`` in ``cwd``; its first word is looked up among the environment's scripts.

        The child sees no PYTHON* variable of this process, except those of ``env``.
        """
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        program, *arguments = command
        return subprocess.run(
            [self.root / "bin" / program, *arguments],
            cwd=cwd,
            env={**clean, **(env or {})},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def run_ok(self, *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        """The same, for a command that must succeed; returns what it printed on stdout."""
        done = self.run(*command, cwd=cwd, env=env)
        assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def install(self, *arguments: str | Path) -> None:
        """``pip install`` into it, by the pip of the running interpreter."""
        pip("--python", self.python, "install", *arguments)


def pip(*arguments: str | Path) -> None:
    """Runs the pip of the running interpreter; fails the test with its output if it fails."""
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"


def _new_environment(root: Path, *, borrow: bool) -> Environment:
    """An empty environment; with ``borrow`` it also finds what the running interpreter has installed, to save minutes.

    Borrowed folders come last on its path, and .pth files in them are not read: an editable install of trainplan there
    does not show here.
    """
    venv.create(root, with_pip=False, symlinks=True)
    environment = Environment(root)
    if borrow:
        borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (environment.site_packages / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n")
    return environment


@pytest.fixture
def borrowing_environment(tmp_path: Path) -> Environment:
    """A fresh environment that borrows the installed dependencies."""
    return _new_environment(tmp_path / "venv", borrow=True)


@pytest.fixture
def bare_environment(tmp_path: Path) -> Environment:
    """A fresh environment with nothing but the standard library."""
    return _new_environment(tmp_path / "venv", borrow=False)


@pytest.fixture(scope="session")
def copy_tree(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes a copy of what the distribution is built from, links kept, so that no build touches the checkout."""

    def copy() -> Path:
        tree = tmp_path_factory.mktemp("tree")
        ignore = shutil.ignore_patterns("__pycache__", ".*_cache")
        for name in ("trainplan", *FOLDERS):
            shutil.copytree(REPOSITORY / name, tree / name, symlinks=True, ignore=ignore)
        for name in ("pyproject.toml", "LICENSE", "README.md"):
            shutil.copy(REPOSITORY / name, tree)
        return tree

    return copy


@pytest.fixture(scope="session")
def tree(copy_tree: Callable[[], Path]) -> Path:
    """One such copy, for the builds below."""
    return copy_tree()


@pytest.fixture(scope="session")
def build_wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Builds a wheel from a folder or a source distribution."""

    def build(source: Path) -> Path:
        out = tmp_path_factory.mktemp("wheel")
        pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source)
        (built,) = out.glob("*.whl")
        return built

    return build


@pytest.fixture(scope="session")
def wheel(tree: Path, build_wheel: Callable[[Path], Path]) -> Path:
    """A wheel built from the tree."""
    return build_wheel(tree)


@pytest.fixture(scope="session")
def wheel_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh environment with the wheel installed; dependencies are borrowed."""
    environment = _new_environment(tmp_path_factory.mktemp("wheel-env") / "venv", borrow=True)
    environment.install("--quiet", "--no-deps", "--ignore-installed", wheel)
    return environment
