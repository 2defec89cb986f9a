"""How much speed does memory buy? The fastest plan under ever smaller limits: nothing is both faster and smaller."""

from __future__ import annotations

from collections.abc import Iterator

from trainplan.costmodel.backends import backend
from trainplan.costmodel.job import Job
from trainplan.costmodel.step import memory_limit
from trainplan.planner.board import Board, Candidate, Counts
from trainplan.planner.certify import Cuts
from trainplan.planner.rounds import Rounds
from trainplan.planner.space import Pins, Space
from trainplan.planner.unit_book import UnitBook
from trainplan.planner.workers import Here

SMALLER_FRAC = 0.02
"""How much less memory the next point of a front must need: a finer step is below what memory is predicted to."""


def front(job: Job, backend_name: str, pins: Pins, *, points: int, gap_frac: float = 0.0) -> Iterator[Candidate]:
    """Plans that trade step time for memory, the fastest first; each is proven under the limit that its memory sets.

    Args:
        job: Model, cluster and workload.
        backend_name: Whose rules and software apply.
        pins: What the user fixed; the first plan keeps its memory limit.
        points: At most so many.
        gap_frac: As in `trainplan.planner.search.tune`.
    """
    space = Space(job, backend(backend_name), pins)
    book, cuts = UnitBook(space), Cuts()
    limit = pins.memory_limit_bytes or memory_limit(job)
    for _ in range(points):
        kept = Space(job, space.backend, pins.model_copy(update={"memory_limit_bytes": limit}))
        board = Board(1)
        Rounds(Here(kept, book.within(kept), cuts), board, Counts(), gap_frac).run()
        if not board.candidates:
            return
        yield board.candidates[0]
        limit = board.candidates[0].device_bytes * (1 - SMALLER_FRAC)
