"""The search where enumeration can't reach: Optuna proposes coarse knobs, every fine knob is solved inside a trial.

A trial proposes places in fixed lists of values, which are decoded to degrees that multiply to the cluster. The sampler
sees at most `SEEN` trials, in memory; all of them are written to the study in batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainplan.costmodel.backends.rules import divisors
from trainplan.planner.board import Board, Candidate, Counts, Progress
from trainplan.planner.rounds import Rounds
from trainplan.planner.space import Pins, Space
from trainplan.planner.study import (
    COARSE,
    PLACE,
    distributions,
    interrupt_between_writes,
    levels,
    note_best,
    open_study,
)
from trainplan.planner.unit_book import UnitBook
from trainplan.planner.workers import Here, workers

if TYPE_CHECKING:
    import optuna

SamplerName = Literal["tpe", "gp", "nsga2", "random"]
SEEN = 1000
"""Trials that a sampler is given: the best half and the latest half. TPE takes 143 ms to ask after 5,000."""
WRITE_EVERY_S = 2.0
SEEDS: tuple[tuple[int, int, int, int], ...] = (
    (1, 1, 1, 1),
    (1, 1, 1, 4),
    (2, 1, 1, 1),
    (4, 1, 1, 1),
    (8, 1, 1, 1),
    (8, 2, 1, 1),
    (8, 4, 1, 1),
    (8, 8, 1, 1),
)
"""(tp, pp, cp, micro-batch) that people start from: data parallel, then tensor parallel in a node, then a pipeline."""


def sample(
    space: Space,
    board: Board,
    counts: Counts,
    *,
    trials: int,
    seed: int,
    path: Path | None = None,
    rescue: Path | None = None,
    resume: bool = False,
    processes: int = 1,
    report: Callable[[Progress], None] = lambda progress: None,
    sampler: SamplerName = "tpe",
    seeded: bool = True,
) -> None:
    """Fill the board by trials over the coarse knobs, every fine knob solved inside a trial.

    Args:
        space: All strategies.
        board: Where the best of every trial is put.
        counts: What became of the strategies that were met.
        trials: How many.
        seed: Of the sampler.
        path: Study to keep and go on with; None = in memory.
        rescue: Where an interrupted search is kept that has no ``path``.
        resume: ``trials`` counts those that the study already has.
        processes: That solve trials; as many are proposed at a time.
        report: Called after each trial.
        sampler: Which of Optuna's proposes.
        seeded: Try the usual starting points first.

    Raises:
        UsageError: The study file belongs to another job, or can't be read.
        KeyboardInterrupt: Ctrl-C; all finished trials are kept by then.
    """
    with interrupt_between_writes() as interrupted:
        record = _Record(space, path)
        study = _in_memory(samplers(seed)[sampler](), record.trials)
        if seeded and not record.trials:
            for start in _starts(levels(space)):
                study.enqueue_trial(start, skip_if_exists=True)
        solver = _Solver(space, board, counts)
        with workers(solver.here, processes) as by:
            best = _best_degrees(record.trials)  # solved again: a resumed search is never worse than before
            solver.solve(by.run, [best] if best else [])
            left = max(0, trials - record.finished) if resume else trials
            proposed, done = distributions(space), 0
            while done < left and not interrupted():
                asked = [study.ask(proposed) for _ in range(min(processes, left - done))]
                degrees = [_degrees(space, trial) for trial in asked]
                for trial, of, value in zip(asked, degrees, solver.solve(by.run, degrees), strict=True):
                    trial.set_user_attr("degrees", of)
                    record.add(_told(study, trial, value))
                    done += 1
                    report(Progress("sampling", done, left, board.best_s))
        record.write(board, rescue if interrupted() else None)
    if interrupted():
        raise KeyboardInterrupt


def _told(study: optuna.Study, trial: optuna.Trial, value: float | None) -> optuna.trial.FrozenTrial:
    """The finished trial; without a value, nothing legal fits with its degrees."""
    from optuna.trial import TrialState

    return study.tell(trial, value, state=TrialState.PRUNED if value is None else TrialState.COMPLETE)


def _degrees(space: Space, trial: optuna.Trial) -> dict[str, int]:
    values = levels(space)
    return decode(space, {name: values[name][trial.params[PLACE + name]] for name in COARSE})


class _Record:
    """The study on disk: what it had, and what is written to it now and then."""

    def __init__(self, space: Space, path: Path | None) -> None:
        self._space = space
        self._study = None if path is None else open_study(space, path)
        found = [] if self._study is None else [of for of in self._study.trials if of.state.is_finished()]
        self.finished = len(found)
        self.trials = _chosen(found)
        self._new: list[optuna.trial.FrozenTrial] = []
        self._written_s = time.monotonic()

    def add(self, trial: optuna.trial.FrozenTrial) -> None:
        self._new.append(trial)
        if self._study is not None and time.monotonic() - self._written_s > WRITE_EVERY_S:
            self._study.add_trials(self._new)
            self._new, self._written_s = [], time.monotonic()

    def write(self, board: Board, rescue: Path | None) -> None:
        """Write what is left, and the best; to ``rescue`` if there is no file yet."""
        if self._study is None and rescue is not None:
            self._study = open_study(self._space, rescue)
        if self._study is not None:
            self._study.add_trials(self._new)
            if board.candidates:
                note_best(self._study, board.candidates[0])


def _chosen(trials: list[optuna.trial.FrozenTrial]) -> list[optuna.trial.FrozenTrial]:
    """At most `SEEN` trials: the best half of them, and the latest."""
    if len(trials) <= SEEN:
        return trials
    by_value = sorted(trials, key=lambda of: (of.value is None, of.value or 0.0))
    chosen = {of.number for of in by_value[: SEEN // 2]}
    latest = [of.number for of in trials if of.number not in chosen]
    chosen.update(latest[-(SEEN - len(chosen)) :])
    return [of for of in trials if of.number in chosen]


def _in_memory(
    sampler: optuna.samplers.BaseSampler, trials: list[optuna.trial.FrozenTrial]
) -> optuna.Study:  # fmt: skip
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler, direction="minimize")
    study.add_trials(trials)
    return study


class _Solver:
    """Solves the fine knobs of degrees, those it has met before at once."""

    def __init__(self, space: Space, board: Board, counts: Counts) -> None:
        self.here = Here(space, UnitBook(space))
        self._board, self._counts = board, counts
        self._solved: dict[tuple[int, ...], float | None] = {}

    def solve(
        self, run: Callable[..., list[tuple[list[Candidate], Counts]]], degrees: list[dict[str, int]]
    ) -> list[float | None]:
        """The best step time with each; None where nothing is legal and fits."""
        keys = [tuple(of.values()) for of in degrees]
        new = {key: of for key, of in zip(keys, degrees, strict=True) if key not in self._solved}
        for key, (candidates, counts) in zip(new, run(_solve, [(of,) for of in new.values()]), strict=True):
            for candidate in candidates:
                self._board.add(candidate)
            self._counts.merge(counts)
            self._counts.covered += counts.covered
            self._solved[key] = candidates[0].step_s if candidates else None
        return [self._solved[key] for key in keys]


def _starts(values_of: dict[str, list[int]]) -> list[dict[str, int]]:
    """The places of the usual starting points that are among the values."""
    starts = [dict(zip(COARSE, start, strict=True)) for start in SEEDS]
    inside = [start for start in starts if all(value in values_of[name] for name, value in start.items())]
    return [{PLACE + name: values_of[name].index(value) for name, value in start.items()} for start in inside]


def _best_degrees(trials: list[optuna.trial.FrozenTrial]) -> dict[str, int] | None:
    """The degrees of the best trial of a study, if there is one."""
    done = [trial for trial in trials if trial.value is not None and "degrees" in trial.user_attrs]
    if not done:
        return None
    best = min(done, key=lambda trial: float(trial.value or 0.0))
    return {name: int(value) for name, value in best.user_attrs["degrees"].items()}


def decode(space: Space, proposed: dict[str, int]) -> dict[str, int]:
    """The legal degrees nearest below a proposal: each the largest that divides what the ones before it leave."""
    left = space.job.cluster.num_gpus
    degrees: dict[str, int] = {}
    for name in ("tp", "pp", "cp"):
        degrees[name] = max(d for d in divisors(left) if d <= proposed[name])
        left //= degrees[name]
    degrees["micro_batch_size"] = max(
        d for d in divisors(space.job.workload.global_batch_size) if d <= proposed["micro_batch_size"]
    )
    return degrees


def _solve(here: Here, degrees: dict[str, int]) -> tuple[list[Candidate], Counts]:
    """The best strategy with these degrees over all fine knobs, none if nothing is legal and fits."""
    space, counts, own = here.space, Counts(), Board(1)
    pinned = dict(space.pins.values)
    for name, value in degrees.items():
        if value not in space.options(name, (value,)):  # pinned otherwise, or nothing that the backend runs
            return [], counts
        pinned[name] = (value,)
    inner = Space(space.job, space.backend, Pins(**{**space.pins.model_dump(), "values": pinned}))
    Rounds(Here(inner, here.book.within(inner), here.cuts), own, counts).run()
    return own.candidates, counts


def samplers(seed: int) -> dict[SamplerName, Callable[[], optuna.samplers.BaseSampler]]:
    """Optuna's samplers by name; a fresh one of each."""
    import optuna

    of = optuna.samplers
    return {
        "tpe": lambda: of.TPESampler(seed=seed, n_startup_trials=len(SEEDS) + 8),
        "gp": lambda: of.GPSampler(seed=seed),
        "nsga2": lambda: of.NSGAIISampler(seed=seed, population_size=30),
        "random": lambda: of.RandomSampler(seed=seed),
    }
