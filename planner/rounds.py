"""What is the answer of a whole space? Its families, least bound first, until no bound is of interest.

They are taken in rounds whose sizes depend on nothing but the answer so far. Every family of a round starts from the
board at the round's start, and what was found is joined in the families' order: one process and many, interrupted or
not, give the same answer and the same counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from trainplan.planner.board import Board, Candidate, Counts, Progress
from trainplan.planner.certify import Certifier, limit_s
from trainplan.planner.workers import Here, Workers, workers

ROUND = 8
"""Families of a round, once the board is full; before that one by one, as each lowers what the next must beat."""
LOGGED = 300
"""Simulated candidates that are kept for the record of a search."""


@dataclass(frozen=True)
class Found:
    """What a family added: candidates for the board, what was simulated, and what became of its strategies."""

    candidates: list[Candidate]
    log: list[Candidate]
    counts: Counts


class Unfinished(BaseModel):
    """A search between two rounds, as it is kept when it is interrupted."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")
    identity: str
    done: int
    families: int
    candidates: tuple[Candidate, ...]
    log: tuple[Candidate, ...]
    counts: Counts


@dataclass
class Rounds:
    """A search of one space.

    Attributes:
        here: What this process knows of the space.
        board: Where the best are put.
        counts: What became of the strategies.
        gap_frac: Nothing is looked for that is better than the last of the board by no more than this share.
        log: The best of what was simulated.
        done: Families that are searched.
    """

    here: Here
    board: Board
    counts: Counts
    gap_frac: float = 0.0
    log: Board = field(default_factory=lambda: Board(LOGGED))
    done: int = 0

    def run(
        self,
        report: Callable[[Progress], None] = lambda progress: None,
        after_round: Callable[[], None] = lambda: None,
        processes: int = 1,
    ) -> None:
        """Fill the board.

        Args:
            report: Called after each round.
            after_round: The same; what was found so far is joined by then.
            processes: That search; the answer does not depend on it.
        """
        if not self.done:
            self.counts.covered += self.here.order.covered
        with workers(self.here, processes) as by:
            while self._round(by):
                after_round()
                report(Progress("searching", self.counts.looked_at, self.counts.covered, self.board.best_s))

    def _round(self, by: Workers) -> bool:
        """Search the next families; False once no bound is of interest."""
        order, limit = self.here.order, limit_s(self.board, self.gap_frac)
        full = len(self.board.candidates) >= self.board.top
        places = range(self.done, min(self.done + (ROUND if full else 1), len(order.families)))
        todo = [place for place in places if order.bounds[place].min() < limit]
        for found in by.run(_search, [(place, self.board, self.gap_frac) for place in todo]):
            self._join(found)
        self.done += len(todo)
        return bool(todo)

    def _join(self, found: Found) -> None:
        for candidate in found.candidates:
            self.board.add(candidate)
        for candidate in found.log:
            self.log.add(candidate)
        self.counts.merge(found.counts)

    @property
    def identity(self) -> str:
        """What an unfinished search belongs to: the space as the cost model sees it, and how it is searched."""
        return f"{self.here.order.checksum} {self.board.top} {self.gap_frac!r}"

    def unfinished(self) -> Unfinished:
        """The search as it is now, between two rounds."""
        return Unfinished(
            identity=self.identity, done=self.done, families=len(self.here.order.families),
            candidates=tuple(self.board.candidates), log=tuple(self.log.candidates), counts=self.counts.copy(),
        )  # fmt: skip

    def go_on_from(self, unfinished: Unfinished) -> None:
        """Begin where a search of the same space ended."""
        self.done, self.counts = unfinished.done, unfinished.counts.copy()
        self.board = Board(self.board.top, unfinished.candidates, self.board.at_most_s)
        self.log = Board(LOGGED, unfinished.log)


def _search(here: Here, place: int, start: Board, gap_frac: float) -> Found:
    """Search the family at a place of the order, beginning with a board."""
    board, log, counts = Board(start.top, start.candidates, start.at_most_s), Board(LOGGED), Counts()
    known = {id(candidate) for candidate in start.candidates}
    certifier = Certifier(here.space, here.book, board, counts, gap_frac, here.cuts, log)
    certifier.search(here.order.families[place], here.order.bounds[place])
    return Found([of for of in board.candidates if id(of) not in known], log.candidates, counts)
