"""Legality as data: a rule is a condition on many strategies at once and the sentence that explains a broken one.

Each backend lists the values it can run per field and the rules that tie fields together. The search, the executor
and the exporters read the same tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainplan.costmodel.job import Job
from trainplan.costmodel.strategy import CHOICES, TUPLES, Strategy, StrategyTable

Mask = np.ndarray


@dataclass(frozen=True)
class Rule:
    """``holds`` returns a bool array that broadcasts against the table; ``reason`` explains one broken strategy."""

    name: str
    holds: Callable[[Job, StrategyTable], Mask]
    reason: Callable[[Job, Strategy], str]


@dataclass(frozen=True)
class Broken:
    """A rule that a strategy breaks, with what is wrong, why, and the values that would do."""

    rule: str
    reason: str


@dataclass(frozen=True)
class Backend:
    """What one training framework can run.

    Attributes:
        name: native, megatron, torchtitan, deepspeed or accelerate.
        version: The version that the table describes.
        families: Hugging Face model types it trains.
        lora: Whether it trains adapters.
        values: Field -> values it accepts; a field that is absent takes any value.
        rules: Conditions between fields, the model, the cluster and the workload.
    """

    name: str
    version: str
    families: Collection[str]
    lora: bool
    values: Mapping[str, Collection[Any]]
    rules: tuple[Rule, ...]

    def legal(self, job: Job, strategy: Strategy) -> tuple[Broken, ...]:
        """Every broken rule of one strategy; empty when it is legal."""
        table = StrategyTable.from_strategies([strategy])
        broken = [Broken(*pair) for pair in self.refusals(job)]
        for name, allowed in self.values.items():
            value = getattr(strategy, name)
            if value not in allowed:
                options = ", ".join(_shown(option) for option in sorted(allowed, key=repr))
                broken.append(Broken(name, f"{name}={_shown(value)}: {self.name} runs {name} in {{{options}}}."))
        failed = [rule for rule in self.rules if not bool(np.all(rule.holds(job, table)))]
        return (*broken, *(Broken(rule.name, rule.reason(job, strategy)) for rule in failed))

    def refusals(self, job: Job) -> tuple[tuple[str, str], ...]:
        """(rule, reason) for what no strategy can mend: the model kind or the task."""
        reasons = []
        if job.model.family not in self.families:
            known = ", ".join(sorted(self.families))
            reasons.append(
                ("family", f"{self.name} does not train model_type {job.model.family!r}. It trains {known}.")
            )
        precisions = self.values.get("precision")
        if precisions is not None and job.workload.precision not in precisions:
            known = ", ".join(sorted(precisions))
            reasons.append(
                ("precision", f"{self.name} does not train in {job.workload.precision}. It trains in {known}.")
            )
        if job.workload.lora is not None and not self.lora:
            reasons.append(
                ("lora", f"{self.name} does not train LoRA adapters. Leave --lora out or choose another backend.")
            )
        return tuple(reasons)

    def legal_mask(self, job: Job, table: StrategyTable, among: Mask | None = None) -> tuple[Mask, dict[str, int]]:
        """Which rows are legal, and how many rows each rule was the first to refuse.

        Args:
            job: Model, cluster and workload.
            table: The rows, flat or as a grid.
            among: The rows that count; None = all.

        Returns:
            A bool array that broadcasts against the table, no larger than the rules need, and {rule name: rows}.
        """
        alive = np.ones((1,) * len(table.shape), dtype=bool) if among is None else among
        counts: dict[str, int] = {}
        for name, keep in self._masks(job, table):
            if keep.all():
                continue
            left = alive & keep
            every = table.size // left.size
            lost = (int(np.count_nonzero(np.broadcast_to(alive, left.shape))) - int(np.count_nonzero(left))) * every
            if lost:
                counts[name] = counts.get(name, 0) + lost
            alive = left
            if not alive.any():
                break
        return alive, counts

    def _masks(self, job: Job, table: StrategyTable) -> Iterator[tuple[str, Mask]]:
        """What each refusal, list of values and rule leaves."""
        yield from ((name, np.zeros((), dtype=bool)) for name, _ in self.refusals(job))
        yield from ((rule.name, np.asarray(rule.holds(job, table))) for rule in self.rules)
        yield from ((name, _allowed_mask(table, name, allowed)) for name, allowed in self.values.items())


def _allowed_mask(table: StrategyTable, name: str, allowed: Collection[Any]) -> Mask:
    if name in CHOICES:
        column = table[name]
        if column.size == 1:
            return np.asarray(CHOICES[name][column.item()] in allowed)
        return table.chosen(name, *allowed)
    if name in TUPLES:
        return table.mapped(name, lambda value: value in allowed).astype(bool)
    column = table[name]
    return np.asarray(column.item() in allowed) if column.size == 1 else np.isin(column, list(allowed))


def _shown(value: Any) -> str:
    return "none" if value in ((), None) else "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
