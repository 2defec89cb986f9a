"""What the README tells people to type exists: commands, options, make targets and linked files."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainplan.planner.cli import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```\n(.*?)```", README, flags=re.DOTALL))
COMMANDS = sorted({line.split("#")[0].strip() for line in BLOCKS.splitlines() if re.match(r"planner [a-z]+ ", line)})


def options(name: str) -> set[str]:
    """The options that ``planner NAME --help`` lists."""
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0, f"planner has no command {name}"
    return set(re.findall(r"(?<!\w)--?[a-z][a-z-]*", result.output))


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_line_of_the_readme_uses_options_that_exist(line: str) -> None:
    _, name, *words = shlex.split(line)
    used = {word for word in words if word.startswith("-")}
    assert used <= options(name)


def test_options_named_in_the_text_exist() -> None:
    commands = ("tune", "explain", "size", "run", "profile", "validate")
    known = {"--debug"}.union(*(options(command) for command in commands))
    named = set(re.findall(r"`(--[a-z-]+)", README)) | set(
        re.findall(r"^planner .*?(--[a-z-]+)", README, flags=re.MULTILINE)
    )
    assert named <= known


def test_make_targets_and_linked_files_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([a-z-]+)", BLOCKS, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_the_readme_shows_commands_at_all() -> None:
    assert len(COMMANDS) >= 4
