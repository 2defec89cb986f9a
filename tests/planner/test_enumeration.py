"""A search that is interrupted, taken up again, or shared by processes ends as if one had run it at one go."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from trainplan.costmodel.backends import backend
from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.job import Job
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.workload import Workload
from trainplan.planner.board import Progress
from trainplan.planner.order import Order
from trainplan.planner.search import Pins, Result, Stopped, tune
from trainplan.planner.space import Space
from trainplan.planner.unit_book import UnitBook
from trainplan.planner.workers import Here, workers


def job(gbs: int = 64) -> Job:
    return Job(
        load_model("Qwen/Qwen3-8B"), load_cluster("16xH100"), Workload(seq_len=4096, global_batch_size=gbs)
    )  # fmt: skip


def search(of: Job, path: Path | None = None, **options: object) -> Result:
    return tune(of, "megatron", Pins(), gap_frac=0.005, study_path=path, **options)  # type: ignore[arg-type]


def interrupt_at(report: int) -> Callable[[Progress], None]:
    """Ctrl-C while the search says for the ``report``-th time where it is."""
    seen = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == report:
            raise KeyboardInterrupt

    return interrupt


@pytest.fixture(scope="module")
def whole() -> Result:
    """At one go, in one process."""
    return search(job())


@pytest.mark.parametrize("report", [2, 3, 5])
def test_an_interrupted_search_goes_on_to_the_same_answer(whole: Result, tmp_path: Path, report: int) -> None:
    path = tmp_path / "study.log"
    with pytest.raises(Stopped) as stopped:
        search(job(), path, on_progress=interrupt_at(report))
    assert stopped.value.kept == path
    assert search(job(), path, resume=True) == whole
    with pytest.raises(UsageError, match="no interrupted search"):
        search(job(), path, resume=True)


def test_a_search_may_be_interrupted_again_and_again(whole: Result, tmp_path: Path) -> None:
    path, resume, times = tmp_path / "study.log", False, 0
    while True:
        try:
            found = search(job(), path, resume=resume, on_progress=interrupt_at(2 + resume))
            break
        except Stopped:
            resume, times = True, times + 1
    assert times > 2
    assert found == whole


def test_without_a_study_it_is_kept_where_it_can_be_rescued(whole: Result, tmp_path: Path) -> None:
    path = tmp_path / "plan.study"
    with pytest.raises(Stopped) as stopped:
        search(job(), rescue_path=path, on_progress=interrupt_at(4))
    assert stopped.value.kept == path
    assert search(job(), rescue_path=path, resume=True) == whole


def test_before_the_first_round_there_is_nothing_to_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Order, "of", interrupted)
    with pytest.raises(Stopped) as stopped:
        search(job(), rescue_path=tmp_path / "plan.study")
    assert stopped.value.kept is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_something_else_is_not_taken_for_the_rescue(tmp_path: Path) -> None:
    path = tmp_path / "plan.study"
    path.write_text("not a study\n")
    with pytest.raises(Stopped) as stopped:
        search(job(), rescue_path=path, on_progress=interrupt_at(4))
    assert stopped.value.kept is None
    assert path.read_text() == "not a study\n"


def test_an_interrupted_search_of_other_options_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    with pytest.raises(Stopped):
        search(job(), path, on_progress=interrupt_at(3))
    with pytest.raises(UsageError, match="other knobs, --top, --gap"):
        tune(job(), "megatron", Pins(), gap_frac=0.0, study_path=path, resume=True)
    with pytest.raises(UsageError, match="other knobs, --top, --gap"):
        tune(job(), "megatron", Pins(values={"tp": (1, 2)}), gap_frac=0.005, study_path=path, resume=True)
    with pytest.raises(UsageError, match="another model, cluster, workload or backend"):
        search(job(gbs=32), path, resume=True)


def test_nothing_to_go_on_with(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file to go on with"):
        search(job(), tmp_path / "none.log", resume=True)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_a_search_and_give_its_answer(whole: Result, processes: int) -> None:
    assert search(job(), workers=processes) == whole
    assert not multiprocessing.active_children()


def test_a_study_may_be_an_sqlite_database(whole: Result, tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    with pytest.raises(Stopped):
        search(job(), path, on_progress=interrupt_at(3))
    assert search(job(), path, resume=True) == whole
    study = optuna.load_study(study_name="trainplan", storage=f"sqlite:///{path}")
    assert study.best_value == pytest.approx(whole.candidates[0].step_s)


def test_a_sampled_search_goes_on_to_its_number_of_trials(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    with pytest.raises(Stopped):
        search(job(), path, engine="optuna", trials=12, on_progress=interrupt_at_signal(4))
    search(job(), path, engine="optuna", trials=12, resume=True)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    trials = optuna.load_study(study_name="trainplan", storage=storage).trials
    assert len(trials) == 12
    assert all(trial.state.is_finished() for trial in trials)


def interrupt_at_signal(report: int) -> Callable[[Progress], None]:
    """The same by a signal, for what puts it off until a trial is written."""
    import signal

    seen = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == report:
            signal.raise_signal(signal.SIGINT)

    return interrupt


def test_trials_may_be_solved_by_several_processes() -> None:
    """Each coarse choice has one answer, whoever solves it; which are proposed may differ."""
    found = search(job(), engine="optuna", trials=16, workers=2)
    for candidate in found.candidates:
        s = candidate.strategy
        pins = Pins(values={"tp": (s.tp,), "pp": (s.pp,), "cp": (s.cp,), "micro_batch_size": (s.micro_batch_size,)})
        assert tune(job(), "megatron", pins, top=1).candidates[0].step_s == pytest.approx(candidate.step_s)
    assert len(found.candidates) > 1


def dies_elsewhere(_: Here, number: int) -> int:
    """Squares, but a worker that is asked to ends at once, as one does that the system kills."""
    if multiprocessing.parent_process() is not None:
        os._exit(1)
    return number * number


def squares(_: Here, number: int) -> int:
    return number * number


def test_what_a_dead_worker_was_at_is_done_here() -> None:
    space = Space(job(), backend("native"), Pins())
    with workers(Here(space, UnitBook(space)), 2) as by:
        while not by._ready.done():  # type: ignore[attr-defined]
            pass
        assert by.run(squares, [(n,) for n in range(6)]) == [0, 1, 4, 9, 16, 25]
        for _ in range(2):  # the second finds the pool broken
            assert by.run(dies_elsewhere, [(n,) for n in range(6)]) == [0, 1, 4, 9, 16, 25]
