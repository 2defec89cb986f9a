"""The Optuna side of a search: the record that resumes and opens in optuna-dashboard, and the sampling engine.

A trial proposes coarse knobs as places in fixed lists of values, which are decoded to degrees that multiply to the
cluster; every fine knob is solved inside the trial, by the search that proves its answer.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from trainplan.costmodel.backends.rules import divisors
from trainplan.costmodel.errors import UsageError
from trainplan.planner.board import Board, Candidate, Counts, Progress
from trainplan.planner.certify import Certifier, Cuts
from trainplan.planner.space import MAX_MICRO_BATCH, Pins, Space
from trainplan.planner.unit_book import UnitBook

if TYPE_CHECKING:
    import optuna

SamplerName = Literal["tpe", "gp", "nsga2", "random"]
NAME = "trainplan"
PLACE = "place_"
"""Before the name of a coarse knob: which of its values, ascending, a trial proposes."""
COARSE = ("tp", "pp", "cp", "micro_batch_size")
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
    path: Path | None,
    report: Callable[[Progress], None],
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
        path: Journal to keep and resume; None = in memory.
        report: Called after each trial.
        sampler: Which of Optuna's proposes.
        seeded: Try the usual starting points first.

    Raises:
        UsageError: The study file belongs to another job, or can't be read.
    """
    import optuna

    book, cuts = UnitBook(space), Cuts()

    def solve(degrees: dict[str, int]) -> float | None:
        return _solve(space, degrees, board, counts, book, cuts)

    levels = _levels(space)
    solved: dict[tuple[int, ...], float | None] = {}

    def objective(trial: optuna.Trial) -> float:
        chosen = {name: trial.suggest_int(PLACE + name, 0, len(of) - 1) for name, of in levels.items()}
        degrees = decode(space, {name: levels[name][place] for name, place in chosen.items()})
        key = tuple(degrees.values())
        if key not in solved:
            solved[key] = solve(degrees)
        step_s = solved[key]
        trial.set_user_attr("degrees", degrees)
        report(Progress("sampling", trial.number + 1 - before, trials, board.best_s))
        if step_s is None:
            raise optuna.TrialPruned("nothing legal fits with these degrees")
        return step_s

    with _interrupt_between_writes() as interrupted:
        study = _open(space, path, samplers(seed)[sampler]())
        before = sum(trial.state.is_finished() for trial in study.trials)
        for start in _starts(levels) if seeded and not study.trials else ():
            study.enqueue_trial(start, skip_if_exists=True)
        for best in _best_degrees(
            study
        ):  # a resumed study is solved again there: its answer is never worse than before
            solved[tuple(best.values())] = solve(best)
        if not interrupted():
            study.optimize(objective, n_trials=trials, callbacks=[lambda of, _: of.stop() if interrupted() else None])
        _note_best(study, board.candidates)
    if interrupted():
        raise KeyboardInterrupt


def _starts(levels: dict[str, list[int]]) -> list[dict[str, int]]:
    """The places of the usual starting points that are among the levels."""
    starts = [dict(zip(COARSE, start, strict=True)) for start in SEEDS]
    inside = [start for start in starts if all(value in levels[name] for name, value in start.items())]
    return [{PLACE + name: levels[name].index(value) for name, value in start.items()} for start in inside]


def _best_degrees(study: optuna.Study) -> list[dict[str, int]]:
    """The degrees of the best finished trial, if there is one."""
    done = [trial for trial in study.trials if trial.value is not None and "degrees" in trial.user_attrs]
    if not done:
        return []
    best = min(done, key=lambda trial: float(trial.value or 0.0))
    return [{name: int(value) for name, value in best.user_attrs["degrees"].items()}]


@contextmanager
def _interrupt_between_writes() -> Iterator[Callable[[], bool]]:
    """Put off a first Ctrl-C until what goes on is written: inside a write optuna may lose its lock or tear a line.

    Yields what tells whether one came; a second one interrupts at once. Outside the main thread nothing changes.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, _: FrameType | None) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def save_candidates(space: Space, candidates: list[Candidate], path: Path) -> None:
    """Add the best strategies of an enumeration to the study at ``path``, each as a finished trial."""
    import optuna

    study, levels = _open(space, path, samplers(0)["tpe"]()), _levels(space)
    known = {trial.user_attrs.get("strategy") for trial in study.trials}
    distributions: dict[str, Any] = {
        PLACE + name: optuna.distributions.IntDistribution(0, len(of) - 1) for name, of in levels.items()
    }
    new = [
        optuna.trial.create_trial(
            params={PLACE + name: levels[name].index(getattr(c.strategy, name)) for name in COARSE},
            distributions=distributions,
            value=c.step_s,
            user_attrs={"strategy": c.strategy.model_dump_json(), "device_bytes": c.device_bytes},
        )
        for c in candidates
        if c.strategy.model_dump_json() not in known
        and all(getattr(c.strategy, name) in of for name, of in levels.items())
    ]
    study.add_trials(new)
    _note_best(study, candidates)


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


def _levels(space: Space) -> dict[str, list[int]]:
    """The values of each coarse knob, ascending; fixed for a job, so that a study can be resumed."""
    degrees = divisors(space.job.cluster.num_gpus)
    batches = [d for d in divisors(space.job.workload.global_batch_size) if d <= MAX_MICRO_BATCH]
    return {"tp": degrees, "pp": degrees, "cp": degrees, "micro_batch_size": batches}


def _solve(
    space: Space, degrees: dict[str, int], board: Board, counts: Counts, book: UnitBook, cuts: Cuts
) -> float | None:
    """The best step time with these degrees over all fine knobs; None if nothing is legal and fits."""
    pinned = dict(space.pins.values)
    for name, value in degrees.items():
        if value not in space.options(name, (value,)):  # pinned otherwise, or nothing that the backend runs
            return None
        pinned[name] = (value,)
    inner = Space(space.job, space.backend, Pins(**{**space.pins.model_dump(), "values": pinned}))
    own = Board(1)
    Certifier(inner, book.within(inner), own, counts, cuts=cuts).run()
    for candidate in own.candidates:
        if candidate not in board.candidates:
            board.add(candidate)
    return own.best_s


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


def _open(space: Space, path: Path | None, sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = None
    if path is not None:
        repair(path)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    try:
        study = optuna.create_study(
            storage=storage, sampler=sampler, study_name=NAME, load_if_exists=True, direction="minimize"
        )
    except Exception as exc:  # a journal of something else can fail anywhere inside optuna
        raise UsageError(
            f"{path}: not a usable study ({type(exc).__name__}: {exc}). Give another --study file."
        ) from None
    identity = job_hash(space)
    if study.user_attrs.get("job", identity) != identity:
        raise UsageError(
            f"{path}: this study is of another model, cluster, workload or backend. Give another --study file."
        )
    if "job" not in study.user_attrs:
        study.set_user_attr("job", identity)
    return study


def job_hash(space: Space) -> str:
    """What a study belongs to: model, cluster, workload and backend."""
    job = space.job
    text = "\n".join(
        (job.model.model_dump_json(), job.cluster.model_dump_json(), job.workload.model_dump_json(), space.backend.name)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def repair(path: Path) -> None:
    """Cut a journal back to its last whole line: a writer that was killed leaves a torn one, which poisons the file.

    The bytes cut off stay beside it in ``<name>.torn``.
    """
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole == len(data):
        return
    torn = path.with_name(path.name + ".torn")
    torn.write_bytes(data[whole:])
    fresh = path.with_name(path.name + ".repaired")
    shutil.copyfile(path, fresh)
    with fresh.open("r+b") as file:
        file.truncate(whole)
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _note_best(study: optuna.Study, candidates: list[Candidate]) -> None:
    if candidates:
        best = candidates[0]
        study.set_user_attr("best_strategy", best.strategy.model_dump_json())
        study.set_user_attr("best_step_s", best.step_s)
