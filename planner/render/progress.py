"""Where is the search? A bar on a terminal, a line now and then elsewhere; always on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from trainplan.planner.render.console import console, is_plain
from trainplan.planner.render.format import percent, seconds, whole

if TYPE_CHECKING:
    from trainplan.planner.search import Progress

LINE_EVERY_S = 2.0
"""Between two lines of one phase: a log of a minute stays readable."""


def describe(progress: Progress) -> str:
    """``searching 1,200 of 48,000 strategies, best step 9.82 s``."""
    of = f" of {whole(progress.total)}" if progress.total else ""
    best = "" if progress.best_step_s is None else f", best step {seconds(progress.best_step_s)}"
    return f"{progress.phase} {whole(progress.priced)}{of} strategies{best}"


class Lines:
    """Writes a line when a phase starts, and then at most one every `LINE_EVERY_S`."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._phase, self._next_s = "", 0.0

    def __call__(self, progress: Progress) -> None:
        """Shows where the search is, if it is time to."""
        now = self._clock()
        if progress.phase == self._phase and now < self._next_s:
            return
        self._phase, self._next_s = progress.phase, now + LINE_EVERY_S
        print(describe(progress), file=self._stream, flush=True)


@contextmanager
def shown(stream: IO[str] | None = None) -> Iterator[Callable[[Progress], None]]:
    """What to call with the progress of a search, for as long as the context lasts; a bar leaves nothing behind."""
    stream = sys.stderr if stream is None else stream
    if is_plain(stream):
        yield Lines(stream)
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console(stream), transient=True) as bars:
        task = bars.add_task("starting", total=None)

        def show(progress: Progress) -> None:
            bars.update(task, description=describe(progress), completed=progress.priced, total=progress.total or None)

        yield show


@contextmanager
def measuring(stream: IO[str] | None = None) -> Iterator[Callable[[str, float], None]]:
    """What to call with what is being measured and the share done: a bar on a terminal, a line per kind elsewhere."""
    stream = sys.stderr if stream is None else stream
    if is_plain(stream):
        last = ""

        def say(what: str, share: float) -> None:
            nonlocal last
            kind = what.partition(" of ")[0]  # the sizes of one kind would be a line each
            if kind != last:
                print(f"measuring {kind} ({percent(share)} done)", file=stream, flush=True)
            last = kind

        yield say
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    with Bars(TextColumn("{task.description}"), BarColumn(), console=console(stream), transient=True) as bars:
        task = bars.add_task("starting", total=1.0)
        yield lambda what, share: bars.update(task, description=f"measuring {what}", completed=share)


@contextmanager
def fitting(stream: IO[str] | None = None) -> Iterator[Callable[[int, int], None]]:
    """What to call with (done, of) of a fit: a bar on a terminal, a line now and then elsewhere."""
    stream = sys.stderr if stream is None else stream
    if is_plain(stream):
        next_s = time.monotonic() + LINE_EVERY_S  # what is over by then needs no line

        def say(done: int, of: int) -> None:
            nonlocal next_s
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + LINE_EVERY_S
                print(f"fitting factors ({percent(done / of)} done)", file=stream, flush=True)

        yield say
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console(stream), transient=True) as bars:
        task = bars.add_task("fitting factors", total=None)
        yield lambda done, of: bars.update(task, completed=done, total=of)
