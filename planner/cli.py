"""The `planner` command: which commands there are, and how each way to end becomes one line and an exit code.

Nothing heavy is imported here or by the modules of the commands: what a command needs is imported when it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainplan import __version__
from trainplan.costmodel.errors import TrainplanError
from trainplan.planner.commands import doctor, explain, hardware, models, profile, run, size, tune, validate
from trainplan.planner.commands.output import Asked
from trainplan.planner.interrupt import Interrupted

HELP = """Plans fast LLM training and runs it: prices every legal way to train, and proves the best.

\b
Examples:
  planner tune Qwen/Qwen3-8B --cluster 8xH100 --seq-len 4096 --global-batch-size 256
  planner explain plan.yaml
  planner run plan.yaml --model-dir Qwen3-8B --data train.jsonl --output out --steps 1000

\b
Exit codes: 0 ok, 1 failed, 2 usage, 3 no plan fits, 4 profile missing or stale,
5 plan does not match this machine, 6 export check failed, 130 interrupted.
"""


class Commands(TyperGroup):
    """The group of all commands; an interruption or a reader that leaves ends them without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; nothing was saved.") from None
        except BrokenPipeError:
            _reader_gone()
            raise typer.Exit from None


app = typer.Typer(
    name="planner",
    cls=Commands,
    help=HELP,
    rich_markup_mode=None,  # rich takes as long to import as all the rest of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: tuple[tuple[Callable[..., None], Sequence[str]], ...] = (
    (tune.tune, tune.EXAMPLES),
    (size.size, size.EXAMPLES),
    (explain.explain, explain.EXAMPLES),
    (run.run, run.EXAMPLES),
    (profile.profile, profile.EXAMPLES),
    (models.models, models.EXAMPLES),
    (hardware.hardware, hardware.EXAMPLES),
    (validate.validate, validate.EXAMPLES),
    (doctor.doctor, doctor.EXAMPLES),
)
for command, examples in COMMANDS:
    app.command(epilog="\n  ".join(("\b\nExamples:", *examples)))(command)


def _version(asked: bool) -> None:
    if asked:
        print(f"planner {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; also accepted after a command.")] = False,
) -> None:
    """Takes the options that go before a command; `main` has read --debug."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `planner` with ``arguments`` (those of the process where None); returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    until = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:until]
    words = [word for word in words[:until] if word != "--debug"] + words[until:]
    try:
        code = typer.main.get_command(app).main(
            words or ["--help"], prog_name="planner", standalone_mode=False, obj=Asked(("planner", *words), debug)
        )
        sys.stdout.flush()  # here, where a reader that has gone is not an error yet
    except BrokenPipeError:
        _reader_gone()
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted; nothing was saved.", Interrupted.exit_code)
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        return _failed(error)
    return code if isinstance(code, int) else 0


def _reader_gone() -> None:
    """Whoever read standard output has left, as `head` does: what is still buffered goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(error: Exception) -> int:
    """Print the one line of an error; returns its exit code."""
    if isinstance(error, TrainplanError):
        return _say(str(error), error.exit_code)
    if is_usage_error(error):
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "planner"
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]  # held by is_usage_error
        return _say(f"{message}. See `{path} --help`.", 2)
    reason = f"{type(error).__name__}: {error}".rstrip(": ")
    return _say(f"internal error: {reason}. Run again with --debug and report what it prints.", 1)


def is_usage_error(error: Exception) -> bool:
    """Whether ``error`` is about the command line: click's own class, or the copy of it that later typers carry."""
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)


def _say(message: str, code: int) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
