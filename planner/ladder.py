"""How does a baseline become the plan? One change at a time, each with the factor that it is predicted to bring.

The order is greedy: of the changes that are left and legal, the one that makes the step shortest comes next. What is
legal only together comes as one change at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainplan.costmodel.backends import backend
from trainplan.costmodel.job import Job
from trainplan.costmodel.strategy import DEFAULT, FIELDS, NumericsClass, Strategy, canonical
from trainplan.planner.alternatives import DEPENDENT, Outcome, moved, outcome
from trainplan.planner.baselines import Baseline
from trainplan.planner.summary import changes

ORDER: tuple[NumericsClass, ...] = ("same", "rounding", "lossy")


@dataclass(frozen=True)
class Rung:
    """One change on the way.

    Attributes:
        change: What was set, as it is typed; the baseline's name on the first.
        outcome: The strategy after it.
        factor: Step time before over after.
        total: Step time of the baseline over that after it.
        numerics: What the change itself does to the result.
    """

    change: str
    outcome: Outcome
    factor: float
    total: float
    numerics: NumericsClass


def ladder(
    job: Job, start: Baseline, backend_name: str, goal: Strategy, limit_bytes: float | None = None
) -> list[Rung]:
    """The way from a baseline to a plan; empty where the baseline can't be priced.

    Args:
        job: Model, cluster and workload.
        start: Where it begins.
        backend_name: The plan's.
        goal: The plan's strategy.
        limit_bytes: Memory of a rank.
    """
    at = outcome(job, start.backend, start.strategy, limit_bytes)
    if at.step_s is None:
        return []
    first_s, rungs = at.step_s, [Rung(start.name, at, 1.0, 1.0, "same")]

    def climb(change: str, to: Outcome) -> None:
        before, after = rungs[-1].outcome, to
        assert before.step_s is not None  # only priced outcomes are rungs
        assert after.step_s is not None
        of = after.numerics if ORDER.index(after.numerics) > ORDER.index(before.numerics) else "same"
        rungs.append(Rung(change, after, before.step_s / after.step_s, first_s / after.step_s, of))

    if start.backend != backend_name:
        to = outcome(job, backend_name, _translated(backend_name, start.strategy, goal), limit_bytes)
        if to.step_s is not None:
            climb(f"backend={backend_name}", to)
    while (now := rungs[-1].outcome.strategy) != goal:
        found = [(text, of) for text, of in _next(job, backend_name, now, goal, limit_bytes) if of.step_s is not None]
        if not found:
            climb(_text(goal, now), outcome(job, backend_name, goal, limit_bytes))
            break
        climb(*min(found, key=lambda option: (option[1].step_s, option[0])))
    return rungs


def _translated(backend_name: str, strategy: Strategy, goal: Strategy) -> Strategy:
    """A strategy with the values that another backend runs; where it can't be kept, the plan's."""
    allowed = backend(backend_name).values
    values = strategy.model_dump()
    for name in FIELDS:
        if name in allowed and values[name] not in allowed[name]:
            default = getattr(DEFAULT, name)
            values[name] = default if default in allowed[name] else getattr(goal, name)
    return canonical(Strategy(**values))


def _next(
    job: Job, backend_name: str, now: Strategy, goal: Strategy, limit_bytes: float | None
) -> list[tuple[str, Outcome]]:
    """Every knob that the plan sets otherwise, set so: (what was changed, what comes of it); none that leads away."""
    found, distance = [], _distance(now, goal)
    for knob in FIELDS:
        if knob in DEPENDENT or getattr(now, knob) == getattr(goal, knob):
            continue
        value = getattr(goal, knob)
        if knob == "recompute":
            value = (goal.recompute, goal.recompute_modules)
        after = moved(job, backend(backend_name), now, knob, value)
        if after != now and _distance(after, goal) < distance:
            found.append((_text(after, now), outcome(job, backend_name, after, limit_bytes)))
    return found


def _text(after: Strategy, before: Strategy) -> str:
    return " ".join(f"{name}={value}" for name, value in changes(after, before).items())


def totals(rungs: list[Rung]) -> dict[NumericsClass, float]:
    """The factor of all changes of each numerics class."""
    found: dict[NumericsClass, float] = {}
    for rung in rungs[1:]:
        found[rung.numerics] = found.get(rung.numerics, 1.0) * rung.factor
    return found


def _distance(one: Strategy, other: Strategy) -> int:
    """How many knobs differ."""
    return sum(getattr(one, name) != getattr(other, name) for name in FIELDS)
