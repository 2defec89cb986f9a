"""How is a search over all strategies run, kept now and then, and gone on with after Ctrl-C?"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trainplan.costmodel.errors import TrainplanError, UsageError
from trainplan.planner.board import Board, Candidate, Counts, Progress
from trainplan.planner.rounds import Rounds, Unfinished
from trainplan.planner.space import Space
from trainplan.planner.unit_book import UnitBook
from trainplan.planner.workers import Here

KEEP_EVERY_S = 2.0
"""Between two states of a search that are written to its study."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C. ``kept``: the study that has the search so far; None where there was nothing to keep, or nowhere."""

    def __init__(self, kept: Path | None) -> None:
        super().__init__()
        self.kept = kept


def enumerate_all(
    space: Space,
    board: Board,
    gap_frac: float,
    processes: int,
    report: Callable[[Progress], None],
    *,
    path: Path | None = None,
    rescue: Path | None = None,
    resume: bool = False,
) -> tuple[Board, Counts]:
    """The best of all strategies, and what became of the others.

    Args:
        space: All strategies.
        board: How many are wanted.
        gap_frac: How much better than the answer, as a share of its step time, some strategy may be.
        processes: That search.
        report: Called now and then.
        path: Study that keeps the search.
        rescue: Where it is kept when it is interrupted and has no ``path``.
        resume: Go on with the one that is kept in ``path``.

    Raises:
        UsageError: The study is of another job, or its interrupted search of other options.
        Stopped: Ctrl-C.
    """
    rounds = Rounds(Here(space, UnitBook(space)), board, Counts(), gap_frac)
    if resume and path is not None:
        _go_on(rounds, path)
    keeper = _Keeper(rounds, path)
    try:
        rounds.run(report, keeper.after_round, processes)
    except KeyboardInterrupt:
        raise Stopped(keeper.rescue(path or rescue)) from None
    keeper.finish()
    return rounds.board, rounds.counts


def _go_on(rounds: Rounds, path: Path) -> None:
    from trainplan.planner.study import load_unfinished

    unfinished = load_unfinished(rounds.here.space, path)
    if unfinished.identity != rounds.identity:
        raise UsageError(
            f"{path}: its interrupted search had other knobs, --top, --gap or limits, or another version of trainplan. "
            "Give the options of that search, or leave --resume out."
        )
    rounds.go_on_from(unfinished)


class _Keeper:
    """Writes a search to its study: now and then, when it is interrupted, and when it is over."""

    def __init__(self, rounds: Rounds, path: Path | None) -> None:
        self._rounds, self._path = rounds, path
        self._last: Unfinished | None = None
        self._next_s = time.monotonic() + KEEP_EVERY_S

    def after_round(self) -> None:
        """Note the search as it is, whole; a later interruption falls into a round."""
        self._last = self._rounds.unfinished()
        if self._path is not None and time.monotonic() >= self._next_s:
            self._write(self._path, self._last)
            self._next_s = time.monotonic() + KEEP_EVERY_S

    def rescue(self, path: Path | None) -> Path | None:
        """Keep what was noted last; where that is."""
        if path is None or self._last is None:
            return None
        try:
            self._write(path, self._last)
        except TrainplanError:  # the file is of something else, and is left alone
            return None
        return path

    def finish(self) -> None:
        """Add what was simulated to the study, and forget the unfinished search."""
        if self._path is None:
            return
        from trainplan.planner.study import interrupt_between_writes, save_candidates

        found = self._rounds.board.candidates
        with interrupt_between_writes():
            self._write(self._path, None)
            save_candidates(self._rounds.here.space, self._simulated(), found[0] if found else None, self._path)

    def _simulated(self) -> list[Candidate]:
        """The best that were simulated, those of the answer among them, each once."""
        logged = {of.rank: of for of in (*self._rounds.board.candidates, *self._rounds.log.candidates)}
        return [logged[rank] for rank in sorted(logged)]

    def _write(self, path: Path, unfinished: Unfinished | None) -> None:
        from trainplan.planner.study import interrupt_between_writes, save_unfinished

        with interrupt_between_writes() as interrupted:
            save_unfinished(self._rounds.here.space, unfinished, path)
        if interrupted():
            raise KeyboardInterrupt
