"""How is text put on the screen? Plain wherever it is not a terminal that a person watches."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text


def is_plain(stream: IO[str], environment: Mapping[str, str] | None = None) -> bool:
    """Whether ``stream`` gets plain text: no terminal, or one that asks for it (TERM=dumb, NO_COLOR, CI)."""
    env = os.environ if environment is None else environment
    return not stream.isatty() or env.get("TERM") == "dumb" or bool(env.get("NO_COLOR")) or bool(env.get("CI"))


class _Console(Console):
    """A console that leaves it to the caller what a reader's leaving means; rich would end the process with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stream: IO[str] | None = None) -> Console:
    """A console on ``stream``, standard output where None. It guesses no highlights and reads no markup."""
    stream = sys.stdout if stream is None else stream
    plain = is_plain(stream)
    return _Console(
        file=stream,
        force_terminal=not plain,
        no_color=plain,
        color_system=None if plain else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


def heading(to: Console, text: str) -> None:
    """A title, set off from what was before it."""
    to.print()
    to.print(Text(text, style="bold"))


def line(to: Console, text: str) -> None:
    """One line, however long: a command or path is copied whole."""
    to.print(text, soft_wrap=True)


def table(
    to: Console, rows: Iterable[Sequence[str]], *, headers: Sequence[str] = (), right: Iterable[int] = ()
) -> None:
    """Columns without rules. A cell wider than its column wraps and loses nothing; the first column stays whole.

    Args:
        to: Where to.
        rows: Cells, top to bottom.
        headers: Titles of the columns; none = no title line.
        right: Columns aligned to the right, counted from 0.
    """
    rows, right = [tuple(row) for row in rows], set(right)
    width = max((len(row) for row in rows), default=len(headers))
    grid = Table(box=None, show_header=bool(headers), pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i in range(width):
        grid.add_column(
            headers[i] if headers else "", justify="right" if i in right else "left", overflow="fold", no_wrap=i == 0
        )
    for row in rows:
        grid.add_row(*row)
    if to.color_system is not None:
        to.print(grid)
        return
    with to.capture() as captured:
        to.print(grid)
    for text in captured.get().splitlines():
        line(to, text.rstrip())  # what fills the last column would only trouble a file or a pipe
