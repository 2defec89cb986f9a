"""Who searches? This process, or this one and others beside it; what each task returns does not depend on which."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from trainplan.costmodel.backends import backend
from trainplan.costmodel.job import Job
from trainplan.planner.certify import Cuts
from trainplan.planner.order import Order
from trainplan.planner.space import Pins, Space
from trainplan.planner.unit_book import UnitBook

Answer = TypeVar("Answer")
AHEAD = 2
"""Tasks that a worker has at most, so that it need not wait for this process to end its own."""


@dataclass
class Here:
    """What a process knows of the space that it searches: its units, its order, and cuts found so far."""

    space: Space
    book: UnitBook
    cuts: Cuts = field(default_factory=Cuts)

    @cached_property
    def order(self) -> Order:
        """The families in the order in which they are searched."""
        return Order.of(self.space, self.book)


class Workers:
    """This process alone."""

    def __init__(self, here: Here) -> None:
        self.here = here

    def run(self, task: Callable[..., Answer], arguments: Sequence[tuple[Any, ...]]) -> list[Answer]:
        """``task(here, *arguments)`` for each, in their order. A task is a function of a module."""
        return [task(self.here, *of) for of in arguments]


class _Pool(Workers):
    """Other processes and this one; this one alone while they start, or if one of them dies."""

    def __init__(self, here: Here, pool: ProcessPoolExecutor, others: int) -> None:
        super().__init__(here)
        self._pool, self._others = pool, others
        self._ready = pool.submit(_nothing)

    def run(self, task: Callable[..., Answer], arguments: Sequence[tuple[Any, ...]]) -> list[Answer]:
        """``task(here, *arguments)`` for each, in their order; the last ones in this process."""
        if len(arguments) == 1 or not self._ready.done() or self._ready.exception() is not None:
            return super().run(task, arguments)
        left, begun, answers = deque(range(len(arguments))), dict[int, Future[Answer]](), dict[int, Answer]()
        while left:
            waiting = sum(not of.done() for of in begun.values())
            for _ in range(min(AHEAD * self._others - waiting, len(left) - 1)):
                place = left.popleft()
                try:
                    begun[place] = self._pool.submit(_there, task, arguments[place])
                except BrokenProcessPool:
                    left.append(place)
            place = left.pop()
            answers[place] = task(self.here, *arguments[place])
        for place, of in begun.items():
            answers[place] = self._result(of, task, arguments[place])
        return [answers[place] for place in range(len(arguments))]

    def _result(self, of: Future[Answer], task: Callable[..., Answer], arguments: tuple[Any, ...]) -> Answer:
        try:
            return of.result()
        except BrokenProcessPool:  # the system ended a worker, as when memory runs out
            return task(self.here, *arguments)


@contextmanager
def workers(here: Here, count: int) -> Iterator[Workers]:
    """Who searches: ``count`` processes with this one. The others end with the context, whatever they are at."""
    if count <= 1:
        yield Workers(here)
        return
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(
        count - 1,
        mp_context=multiprocessing.get_context("spawn"),  # a fork would copy the locks of threads that draw or write
        initializer=_start,
        initargs=(here.space.job, here.space.backend.name, here.space.pins),
    )
    try:
        yield _Pool(here, pool, count - 1)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()


_here: Here
"""In a worker: what it knows."""


def _start(job: Job, backend_name: str, pins: Pins) -> None:
    global _here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the first one ends the others
    space = Space(job, backend(backend_name), pins)
    _here = Here(space, UnitBook(space))


def _nothing() -> None:
    """Runs once a worker has started."""


def _there(task: Callable[..., Answer], arguments: tuple[Any, ...]) -> Answer:
    return task(_here, *arguments)
