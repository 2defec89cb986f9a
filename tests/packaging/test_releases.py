"""pyproject.toml, the pinned releases and the Makefile agree."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PINS = {
    requirement.name.lower(): requirement
    for line in (REPOSITORY / "requirements" / "test-constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for requirement in [Requirement(line)]
}


def test_every_dependency_is_pinned_inside_its_range() -> None:
    asked = [
        Requirement(text)
        for text in PROJECT["dependencies"]
        + PROJECT["optional-dependencies"]["train-cpu"]
        + PROJECT["optional-dependencies"]["test"]
    ]
    assert [requirement.name for requirement in asked if requirement.name.lower() not in PINS] == []
    for requirement in asked:
        (pin,) = PINS[requirement.name.lower()].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{requirement} excludes the tested release {pin.version}"


def test_pins_name_no_build_and_no_place() -> None:
    """A local version (2.13.0+cpu) or an address would hold on one machine only."""
    assert all(re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)) and pin.url is None for pin in PINS.values())


def test_every_dependency_has_its_reason() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    asked = PROJECT["dependencies"] + [entry for extra in PROJECT["optional-dependencies"].values() for entry in extra]
    bare = [entry for entry in asked if f'"{entry}",  # ' not in text]
    assert bare == ["trainplan[train-cpu]"]  # itself; its entries carry the reasons


def test_make_says_so_when_there_is_no_python(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    shutil.copytree(REPOSITORY / "requirements", tmp_path / "requirements")
    make = shutil.which("make")
    assert make is not None
    done = subprocess.run(
        [make, "venv"], cwd=tmp_path, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2  # make's own status for a recipe that failed
    assert done.stderr.startswith("No Python 3.11 or newer with the modules venv and ensurepip is on PATH")
