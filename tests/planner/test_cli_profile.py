"""`planner profile`: what it writes where, and what it never writes over. The executor's tests measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.errors import ProfileError
from trainplan.costmodel.hardware import Cluster

if TYPE_CHECKING:
    from tests.planner.conftest import Done, Small

Measured = list[tuple[int | None, float]]


@pytest.fixture
def measured(small: Small, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """What was asked to be measured; the answer is always the small cluster."""
    asked: Measured = []

    def pretend(nproc: int | None, seconds: float, report: Callable[[str, float], None]) -> Cluster:
        asked.append((nproc, seconds))
        report("attention", 0.5)
        return load_cluster(small.cluster)

    monkeypatch.setattr("trainplan.executor.measure.measure_machine", pretend)
    return asked


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr("trainplan.executor.measure.measure_machine", failing)


def test_what_was_measured_is_the_cluster_local(
    planner: Callable[..., Done], small: Small, folder: Path, measured: Measured
) -> None:
    done = planner("profile", "--nproc", "2", "--seconds", "5", "-o", "own.yaml")
    assert done.code == 0, done.err
    assert measured == [(2, 5.0)]
    assert load_cluster("local") == load_cluster(folder / "own.yaml") == load_cluster(small.cluster)
    assert f"Written to {folder / 'cache' / 'local.yaml'} and own.yaml" in done.out
    assert "80.0 GFLOP/s" in done.out
    assert done.err == "measuring attention (50.0 % done)\n"


def test_it_measures_again_over_an_older_or_damaged_profile(
    planner: Callable[..., Done], small: Small, folder: Path, measured: Measured
) -> None:
    (folder / "cache").mkdir()
    for content in (small.cluster.read_text(), "damaged: ["):
        (folder / "cache" / "local.yaml").write_text(content)
        assert planner("profile", "-o", "own.yaml").code == 0
        assert load_cluster("local") == load_cluster(small.cluster)
    assert measured == [(None, 20.0), (None, 20.0)]


def test_another_file_is_left_alone_before_anything_is_measured(
    planner: Callable[..., Done], folder: Path, measured: Measured
) -> None:
    (folder / "notes.yaml").write_text("notes: do not lose\n")
    done = planner("profile", "-o", "notes.yaml")
    assert (done.code, done.error) == (
        2,
        "notes.yaml exists and is no cluster file, so it is left alone. Give another name.",
    )
    assert "is a folder" in planner("profile", "-o", folder).error
    assert "does not exist" in planner("profile", "-o", folder / "none" / "cluster.yaml").error
    assert (folder / "notes.yaml").read_text() == "notes: do not lose\n"
    assert measured == []


def test_a_cache_that_cannot_be_made_is_named(
    planner: Callable[..., Done], folder: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("TRAINPLAN_CACHE", str(folder / "file" / "cache"))
    done = planner("profile")
    assert (done.code, "Set TRAINPLAN_CACHE" in done.error) == (2, True)
    (folder / "cache" / "local.yaml").mkdir(parents=True)
    monkeypatch.setenv("TRAINPLAN_CACHE", str(folder / "cache"))
    done = planner("profile")
    assert (done.code, "local.yaml is a folder" in done.error) == (2, True)
    assert measured == []


@pytest.mark.parametrize(
    "options", [("--nproc", "0"), ("--seconds", "0.5"), ("--seconds", "inf"), ("--seconds", "nan")]
)
def test_bad_options_exit_2(
    planner: Callable[..., Done], folder: Path, measured: Measured, options: tuple[str, ...]
) -> None:
    done = planner("profile", *options)
    assert (done.code, options[0] in done.error) == (2, True)
    assert measured == []


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ProfileError("a measuring process ended with code 1."), 4, "a measuring process ended with code 1."),
        (KeyboardInterrupt(), 130, "interrupted; the profile was left as it was."),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "Run: pip install 'trainplan[train]'"),
    ],
)
def test_a_failure_leaves_the_profile_as_it_was(
    planner: Callable[..., Done],
    small: Small,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    words: str,
) -> None:
    fail_with(monkeypatch, error)
    (folder / "cache").mkdir()
    (folder / "cache" / "local.yaml").write_bytes(small.cluster.read_bytes())
    done = planner("profile")
    assert (done.code, words in done.error) == (code, True)
    assert load_cluster("local") == load_cluster(small.cluster)
