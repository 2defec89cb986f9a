"""The root of the command line: help, versions, and how every way to end becomes one line and an exit code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from trainplan import __version__
from trainplan.costmodel import errors
from trainplan.planner.cli import COMMANDS
from trainplan.planner.commands import complete
from trainplan.planner.interrupt import Interrupted

if TYPE_CHECKING:
    from tests.planner.conftest import Done

NAMES = [command.__name__ for command, _ in COMMANDS]
HEAVY = {"numpy", "pydantic", "yaml", "rich", "scipy", "numba", "optuna", "torch", "transformers"}
CALL = "import sys; from trainplan.planner.cli import main; code = main(sys.argv[1:]); "


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in an interpreter of its own."""
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Makes `planner models` raise ``error`` from the depth of its work."""

    def raising(*_: object) -> None:
        raise error

    monkeypatch.setattr("trainplan.costmodel.model_config.load_model", raising)


def test_help_lists_every_command_and_examples(planner: Callable[..., Done]) -> None:
    done = planner("--help")
    assert (done.code, done.err) == (0, "")
    assert "planner tune Qwen/Qwen3-8B --cluster 8xH100 --seq-len 4096 --global-batch-size 256" in done.out
    listed = done.out[done.out.index("Commands:") :]
    assert [line.split()[0] for line in listed.splitlines()[1:]] == NAMES
    assert "..." not in listed, "a one-line help is too long to show whole"


def test_no_arguments_show_the_same_help(planner: Callable[..., Done]) -> None:
    assert planner() == planner("--help")


@pytest.mark.parametrize("name", NAMES)
def test_the_help_of_each_command_has_its_examples(planner: Callable[..., Done], name: str) -> None:
    done = planner(name, "--help")
    assert (done.code, done.err) == (0, "")
    examples = dict(zip(NAMES, (examples for _, examples in COMMANDS), strict=True))[name]
    assert examples
    for example in examples:
        assert example.startswith(f"planner {name}")
        assert example in done.out


def test_version(planner: Callable[..., Done]) -> None:
    assert planner("--version").out == f"planner {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tuen",), ("tuen", "planner --help")),
        (("models", "--jsn"), ("--jsn", "planner models --help")),
        (("tune", "Qwen/Qwen3-8B"), ("--cluster", "planner tune --help")),
        (("tune", "m", "--cluster", "c", "--seq-len", "x", "--global-batch-size", "1"), ("--seq-len",)),
        (("tune", "m", "--cluster", "c", "--seq-len", "0", "--global-batch-size", "1"), ("--seq-len",)),
    ],
)
def test_a_misused_command_line_is_one_line_and_exits_2(
    planner: Callable[..., Done], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = planner(*arguments)
    assert done.code == 2
    for word in words:
        assert word in done.error


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UsageError, 2),
        (errors.NoPlanError, 3),
        (errors.ProfileError, 4),
        (errors.MachineMismatchError, 5),
        (errors.ExportCheckError, 6),
        (Interrupted, 130),
        (errors.TrainplanError, 1),
    ],
)
def test_every_error_has_its_documented_code(
    planner: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, kind: type[errors.TrainplanError], code: int
) -> None:
    fail_with(monkeypatch, kind("what is wrong,\nand how to mend it."))
    done = planner("models", "x")
    assert (done.code, done.error) == (code, "what is wrong, and how to mend it.")


def test_an_internal_error_shows_a_traceback_only_when_asked(
    planner: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, RuntimeError("boom"))
    plain = planner("models", "x")
    assert (plain.code, plain.error) == (
        1,
        "internal error: RuntimeError: boom. Run again with --debug and report what it prints.",
    )
    for arguments in (("--debug", "models", "x"), ("models", "x", "--debug")):
        shown = planner(*arguments)
        assert shown.code == 1
        assert "Traceback" in shown.err


def test_an_interruption_says_that_nothing_was_saved(
    planner: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    done = planner("models", "x")
    assert (done.code, done.error) == (130, "interrupted; nothing was saved.")


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("tune", "--help")])
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    allowed = {"pydantic"} if "tune" in arguments else set()  # typer itself imports it to parse a command's arguments
    done = python(CALL + f"print('heavy:', sorted({HEAVY - allowed!r} & set(sys.modules)))", *arguments)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_a_reader_that_leaves_is_no_error() -> None:
    """As `planner models | head -0`: the pipe is closed before a line is written."""
    code = (
        "import os, sys\nread, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)\n"
        "from trainplan.planner.cli import main\nsys.exit(main(['models']))"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_shell_is_offered_known_names() -> None:
    assert complete.model_names("Qwen3-8") == ["Qwen/Qwen3-8B"]
    assert complete.cluster_names("DGX-H") == ["dgx-h100", "dgx-h200"]
    assert complete.backend_names("mega") == ["megatron"]
