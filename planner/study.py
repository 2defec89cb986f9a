"""What of a search is kept in a file? A standard Optuna study: it resumes, and opens in optuna-dashboard.

Its journal is written in batches, by one process. A file that ends in .db or .sqlite3 is an SQLite database.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trainplan.costmodel.backends.rules import divisors
from trainplan.costmodel.errors import UsageError
from trainplan.planner.board import Candidate
from trainplan.planner.rounds import Unfinished
from trainplan.planner.space import MAX_MICRO_BATCH, Space

if TYPE_CHECKING:
    import optuna

NAME = "trainplan"
PLACE = "place_"
"""Before the name of a coarse knob: which of its values, ascending, a trial proposes."""
COARSE = ("tp", "pp", "cp", "micro_batch_size")
DATABASES = (".db", ".sqlite3")
UNFINISHED = "unfinished_search"
_JOURNAL = b'{"op_code":'
"""How every line of a journal begins that Optuna 4 writes."""
_SQLITE = b"SQLite format 3\0"


def levels(space: Space) -> dict[str, list[int]]:
    """The values of each coarse knob, ascending; fixed for a job, so that a study can be resumed."""
    degrees = divisors(space.job.cluster.num_gpus)
    batches = [d for d in divisors(space.job.workload.global_batch_size) if d <= MAX_MICRO_BATCH]
    return {"tp": degrees, "pp": degrees, "cp": degrees, "micro_batch_size": batches}


def distributions(space: Space) -> dict[str, optuna.distributions.BaseDistribution]:
    """What a trial proposes of each coarse knob."""
    import optuna

    return {PLACE + name: optuna.distributions.IntDistribution(0, len(of) - 1) for name, of in levels(space).items()}


def save_candidates(space: Space, simulated: Sequence[Candidate], best: Candidate | None, path: Path) -> None:
    """Add what an enumeration simulated to the study at ``path``, each strategy as a finished trial, in one batch."""
    import optuna

    study, values, proposed = open_study(space, path), levels(space), distributions(space)
    known = {trial.user_attrs.get("strategy") for trial in study.trials}
    new = [
        optuna.trial.create_trial(
            params={PLACE + name: values[name].index(getattr(c.strategy, name)) for name in COARSE},
            distributions=proposed,
            value=c.step_s,
            user_attrs={"strategy": c.strategy.model_dump_json(), "device_bytes": c.device_bytes},
        )
        for c in simulated
        if c.strategy.model_dump_json() not in known
        and all(getattr(c.strategy, name) in of for name, of in values.items())
    ]
    study.add_trials(new)
    if best is not None:
        note_best(study, best)


def save_unfinished(space: Space, unfinished: Unfinished | None, path: Path) -> None:
    """Keep a search that is not finished in the study at ``path``; None = it is."""
    study = open_study(space, path)
    if unfinished is not None or UNFINISHED in study.user_attrs:
        study.set_user_attr(UNFINISHED, None if unfinished is None else unfinished.model_dump_json())


def load_unfinished(space: Space, path: Path) -> Unfinished:
    """The search that was interrupted.

    Raises:
        UsageError: There is none in the study at ``path``.
    """
    kept = open_study(space, path).user_attrs.get(UNFINISHED) if path.exists() else None
    if kept is None:
        raise UsageError(f"{path}: there is no interrupted search in it to go on with. Leave --resume out.")
    try:
        return Unfinished.model_validate_json(kept)
    except ValidationError:
        raise UsageError(
            f"{path}: its interrupted search was kept by another version of trainplan. Leave --resume out."
        ) from None


def open_study(space: Space, path: Path) -> optuna.Study:
    """The study at ``path``, made if there is none.

    Raises:
        UsageError: The file is of another job, or can't be read.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if path.exists() and not is_study(path):  # optuna would first write to it
        raise UsageError(f"{path}: not a usable study (it is another file). Give another --study file.")
    try:
        study = optuna.create_study(
            storage=_storage(path), study_name=NAME, load_if_exists=True, direction="minimize"
        )  # fmt: skip
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


def is_study(path: Path) -> bool:
    """Whether a file starts as Optuna's do, or is still empty: a search may have been killed at its start."""
    magic = _SQLITE if path.suffix in DATABASES else _JOURNAL
    try:
        with path.open("rb") as file:
            start = file.read(len(magic)) if path.is_file() else b"-"
    except OSError:
        return False
    return magic.startswith(start)


def _storage(path: Path) -> optuna.storages.BaseStorage:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    if path.suffix in DATABASES:
        return optuna.storages.RDBStorage(f"sqlite:///{path.absolute()}")
    repair(path)
    return optuna.storages.JournalStorage(JournalFileBackend(str(path)))


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


def note_best(study: optuna.Study, best: Candidate) -> None:
    """Keep the best strategy where people look for it first."""
    study.set_user_attr("best_strategy", best.strategy.model_dump_json())
    study.set_user_attr("best_step_s", best.step_s)


@contextmanager
def interrupt_between_writes() -> Iterator[Callable[[], bool]]:
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
