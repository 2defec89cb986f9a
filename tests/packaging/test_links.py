"""trainplan/<folder> are symbolic links; a checkout that lost them says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("planner", "costmodel", "executor", "kernels", "profiles")


def import_trainplan(root: Path) -> subprocess.CompletedProcess[str]:
    """Imports trainplan from ``root`` alone: no site-packages, no environment."""
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import trainplan; print(trainplan.__version__)"
    return subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree with trainplan/ and its links, the folders empty."""
    shutil.copytree(REPOSITORY / "trainplan", tmp_path / "trainplan", symlinks=True)
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    return tmp_path


def test_links_point_to_the_folders_of_the_repository(checkout: Path) -> None:
    assert {path.name: str(path.readlink()) for path in (checkout / "trainplan").iterdir() if path.is_symlink()} == {
        folder: f"../{folder}" for folder in FOLDERS
    }
    assert import_trainplan(checkout).returncode == 0


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_link_that_became_a_plain_file_is_explained(checkout: Path, folder: str) -> None:
    link = checkout / "trainplan" / folder
    link.unlink()
    link.write_text(f"../{folder}")  # what git writes for a link where core.symlinks is false
    done = import_trainplan(checkout)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"ImportError: trainplan/{folder} is not a folder")
    assert "core.symlinks=true" in message


def test_a_link_that_leads_nowhere_is_explained(checkout: Path) -> None:
    (checkout / "kernels").rmdir()
    assert "ImportError: trainplan/kernels is not a folder" in import_trainplan(checkout).stderr
