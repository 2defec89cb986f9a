"""`planner tune --study` and `--engine optuna`: a search that is kept, goes on, and touches no other file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from trainplan.costmodel.plan import Plan

if TYPE_CHECKING:
    from tests.planner.conftest import Done, Small

SAMPLED = ("--engine", "optuna", "--trials", "12", "--study", "study.log", "--json")


def trials(path: Path) -> list[optuna.trial.FrozenTrial]:
    """The finished trials of a study as Optuna itself reads it."""
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    (name,) = optuna.get_all_study_names(storage)
    return [trial for trial in optuna.load_study(study_name=name, storage=storage).trials if trial.state.is_finished()]


def test_a_sampled_search_is_kept_and_continued(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    first = planner(*small.job, *SAMPLED)
    assert first.code == 0, first.err
    assert first.json["search"]["engine"] == "optuna"
    assert first.json["search"]["proven"] is False
    assert len(trials(folder / "study.log")) == 12
    second = planner(*small.job, *SAMPLED)
    assert second.code == 0, second.err
    assert len(trials(folder / "study.log")) == 24
    assert second.json["candidates"][0]["predicted_step_s"] <= first.json["candidates"][0]["predicted_step_s"]
    assert Plan.load(folder / "plan.yaml").provenance.search is not None


def test_a_sampled_search_needs_no_study(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    done = planner(*small.job, "--engine", "optuna", "--trials", "12")
    assert done.code == 0, done.err
    assert "Search (optuna)" in done.out
    assert "sampled: a better one may exist" in done.out
    assert [path.name for path in folder.iterdir()] == ["plan.yaml"]


def test_the_same_seed_gives_the_same_plan(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    """Nothing of a search depends on the clock or on what was done before."""
    job = ("tune", "Qwen/Qwen3-0.6B", "--cluster", "4xH100", "--seq-len", "512", "--global-batch-size", "16")
    sampled = (*job, "--backend", "megatron", "--recompute", "none", "--engine", "optuna", "--trials", "6", "--json")
    first, second = (planner(*sampled, "--seed", "3").json for _ in range(2))
    assert first["candidates"] == second["candidates"]
    assert first["plan"]["plan_hash"] == second["plan"]["plan_hash"]


def test_an_enumeration_adds_its_best_to_a_study(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    done = planner(*small.job, "--top", "3", "--study", "study.log", "--json")
    assert done.code == 0, done.err
    values = [trial.value for trial in trials(folder / "study.log")]
    best = [candidate["predicted_step_s"] for candidate in done.json["candidates"]]
    assert values[:3] == pytest.approx(best)
    assert values == sorted(values, key=float)  # type: ignore[arg-type]
    assert 3 <= len(values) <= 3 + done.json["search"]["simulated"]


def test_the_study_of_another_job_is_refused(planner: Callable[..., Done], small: Small, folder: Path) -> None:
    assert planner(*small.job, *SAMPLED).code == 0
    kept = (folder / "study.log").read_bytes()
    other = [word if word != "64" else "32" for word in small.job]
    done = planner(*other, *SAMPLED)
    assert done.code == 2
    assert done.out == ""
    assert done.err.splitlines()[-1] == (
        "error: study.log: this study is of another model, cluster, workload or backend. Give another --study file."
    )
    assert trials(folder / "study.log")
    assert (folder / "study.log").read_bytes().startswith(kept)


@pytest.mark.parametrize("engine", ["enumerate", "optuna"])
@pytest.mark.parametrize(
    "content", ["notes, without an end of line", "notes\n", "schema_version: '1.0'\n", '{"a": 1}\n']
)
def test_a_file_that_is_no_study_is_left_alone(
    planner: Callable[..., Done], small: Small, folder: Path, content: str, engine: str
) -> None:
    (folder / "notes").write_text(content)
    done = planner(*small.job, "--engine", engine, "--study", "notes")
    assert (done.code, "notes exists and is no study file" in done.error) == (2, True)
    assert (folder / "notes").read_text() == content
    assert [path.name for path in folder.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("study", "words"),
    [(".", "is a folder"), ("none/study.log", "the folder none does not exist"), ("plan.yaml", "--study and -o both")],
)
def test_an_impossible_place_for_a_study_is_refused_before_the_search(
    planner: Callable[..., Done], small: Small, folder: Path, study: str, words: str
) -> None:
    done = planner(*small.job, "--study", study)
    assert (done.code, words in done.error) == (2, True)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b'{"op_c'])
def test_a_study_that_was_killed_at_its_start_is_taken_up(
    planner: Callable[..., Done], small: Small, folder: Path, content: bytes
) -> None:
    (folder / "study.log").write_bytes(content)
    assert planner(*small.job, *SAMPLED).code == 0
    assert len(trials(folder / "study.log")) == 12
