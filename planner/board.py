"""What has a search found so far? The best strategies, and what became of all others."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from trainplan.costmodel.plan import SearchRecord
from trainplan.costmodel.strategy import Strategy
from trainplan.planner.space import complexity

NEAREST = 5
"""How many strategies that do not fit are remembered."""


@dataclass(frozen=True)
class Progress:
    """Where a search is: ``total`` is 0 while it is unknown."""

    phase: str
    priced: int
    total: int
    best_step_s: float | None


@dataclass(frozen=True)
class Candidate:
    """A feasible strategy with its simulated step time and the device memory of its fullest rank (95 % point)."""

    strategy: Strategy
    step_s: float
    device_bytes: float

    @cached_property
    def rank(self) -> tuple[float, int, str]:
        """Its place among others: by step time, then the simpler strategy, then the smaller text of it."""
        return float(f"{self.step_s:.9g}"), complexity(self.strategy), self.strategy.model_dump_json()


@dataclass
class Counts:
    """What became of the strategies a search met.

    Attributes:
        covered: All of them.
        illegal: Rule -> how many it was the first to refuse, of those whose bound did not leave them out before.
        infeasible: Legal ones that do not fit.
        feasible: Ones that fit; what is left of ``covered`` was left out by a bound.
        simulated: Ones whose step was simulated.
        nearest: Those that need least memory of what does not fit, each with another mesh or level of sharding.
        refused: One that was refused, to explain the rule by.
    """

    covered: int = 0
    illegal: Counter[str] = field(default_factory=Counter)
    infeasible: int = 0
    feasible: int = 0
    simulated: int = 0
    nearest: list[Candidate] = field(default_factory=list)
    refused: Strategy | None = None

    def too_large(self, candidate: Candidate) -> None:
        """Keep one that does not fit, if few need less memory."""
        same = [other for other in self.nearest if _place(other.strategy) == _place(candidate.strategy)]
        if any(other.device_bytes <= candidate.device_bytes for other in same):
            return
        kept = [other for other in self.nearest if other not in same]
        self.nearest = sorted([*kept, candidate], key=lambda of: of.device_bytes)[:NEAREST]

    def copy(self) -> Counts:
        """The counts as they are now."""
        return replace(self, illegal=Counter(self.illegal), nearest=list(self.nearest))

    def merge(self, other: Counts) -> None:
        """Add what became of other strategies of the same space; ``covered`` stays."""
        self.illegal.update(other.illegal)
        self.infeasible += other.infeasible
        self.feasible += other.feasible
        self.simulated += other.simulated
        for candidate in other.nearest:
            self.too_large(candidate)
        self.refused = self.refused or other.refused

    @property
    def looked_at(self) -> int:
        """Strategies that were refused or priced one by one."""
        return sum(self.illegal.values()) + self.infeasible + self.feasible

    def record(self, engine: str, proven: bool, gap_frac: float) -> SearchRecord:
        """The counts as they are kept in a plan."""
        return SearchRecord(
            engine=engine, covered=self.covered, illegal=dict(self.illegal), infeasible=self.infeasible,
            feasible=self.feasible, dropped=self.covered - self.looked_at, simulated=self.simulated,
            gap_frac=gap_frac, proven=proven,
        )  # fmt: skip


def _place(s: Strategy) -> tuple[object, ...]:
    return s.tp, s.pp, s.cp, s.ep, s.sharding


class Board:
    """The best ``top`` candidates; ties go to the simpler strategy, then to the smaller text of it.

    ``at_most_s``: step time above which a candidate is of no interest.
    """

    def __init__(self, top: int, candidates: Iterable[Candidate] = (), at_most_s: float = np.inf) -> None:
        self.top, self.at_most_s = top, at_most_s
        self.candidates = sorted(candidates, key=_rank)[:top]

    @property
    def threshold_s(self) -> float:
        """Step time that a candidate must not exceed to be of interest."""
        if len(self.candidates) < self.top:
            return self.at_most_s
        return min(self.at_most_s, self.candidates[-1].step_s) if self.candidates else 0.0

    @property
    def best_s(self) -> float | None:
        """Step time of the best."""
        return self.candidates[0].step_s if self.candidates else None

    def add(self, candidate: Candidate) -> None:
        """Put a candidate in its place."""
        insort(self.candidates, candidate, key=_rank)
        del self.candidates[self.top :]


def _rank(candidate: Candidate) -> tuple[float, int, str]:
    return candidate.rank
