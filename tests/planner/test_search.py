"""The search: equal to brute force, honours pins, resumes its study, and says why nothing is left."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from trainplan.costmodel.backends import backend
from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.errors import NoPlanError, UsageError
from trainplan.costmodel.job import Job
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.step import memory_limit, price
from trainplan.costmodel.strategy import Strategy, StrategyTable, canonical
from trainplan.costmodel.workload import Workload
from trainplan.planner.sampling import decode
from trainplan.planner.search import Pins, Progress, tune
from trainplan.planner.space import Space
from trainplan.planner.study import repair


def job(
    model: str = "Qwen/Qwen3-8B", cluster: str = "8xH100", gbs: int = 32, seq_len: int = 4096, **workload: Any
) -> Job:
    return Job(load_model(model), load_cluster(cluster), Workload(seq_len=seq_len, global_batch_size=gbs, **workload))


def everything(of: Job, name: str, pins: Pins) -> list[Strategy]:
    space = Space(of, backend(name), pins)
    return [strategy for group in space.groups() for strategy in group.strategies()]


@pytest.mark.parametrize(
    ("name", "of", "pins"),
    [
        ("native", {}, Pins(values={"micro_batch_size": (1, 2), "prefetch_units": (1,), "loss_chunk": (0,)})),
        ("native", {"model": "Qwen/Qwen3-0.6B", "cluster": "2xL4", "gbs": 8, "seq_len": 2048}, Pins()),
        (
            "megatron",
            {"cluster": "4xH100", "gbs": 16},
            Pins(
                values={
                    "recompute": ("none",),
                    "attention": ("flash",),
                    "cp": (1,),
                    "optimizer_offload": (False,),
                    "sp": (True,),
                }
            ),
        ),
        (
            "torchtitan",
            {"model": "Qwen/Qwen3-1.7B", "cluster": "2xA100", "gbs": 4, "seq_len": 1024},
            Pins(values={"compile": (True,)}),
        ),
        (
            "deepspeed",
            {"model": "Qwen/Qwen2.5-1.5B", "cluster": "2xH100", "gbs": 4},
            Pins(values={"attention": ("sdpa",)}),
        ),
    ],
)
def test_the_winner_is_that_of_brute_force(name: str, of: dict[str, Any], pins: Pins) -> None:
    """Every legal strategy priced and simulated alone: the least time among those that fit, and the counts."""
    problem = job(**of)
    legal = [s for s in everything(problem, name, pins) if not backend(name).legal(problem, s)]
    assert 5 < len(legal) < 1500
    alone = [price(problem, name, StrategyTable.from_strategies([s])) for s in legal]
    fits = [float(one.device_bytes[0]) <= memory_limit(problem) for one in alone]
    fitting = [float(one.step_s()[0]) for one, fit in zip(alone, fits, strict=True) if fit]
    found = tune(problem, name, pins)
    assert found.candidates[0].step_s == pytest.approx(min(fitting), rel=1e-9)
    record = found.record
    assert record.covered == len(everything(problem, name, pins))
    assert record.covered == sum(record.illegal.values()) + record.infeasible + record.feasible + record.dropped
    assert len(found.candidates) <= record.simulated <= record.feasible <= len(fitting)
    assert record.infeasible <= len(legal) - len(fitting)
    assert [c.step_s for c in found.candidates] == pytest.approx(sorted(fitting)[: len(found.candidates)], rel=1e-8)
    assert found.estimate.fits


def test_every_strategy_of_a_space_is_canonical_and_met_once() -> None:
    for name in ("native", "megatron", "torchtitan"):
        met = everything(job("Qwen/Qwen3-1.7B", "2xH100", 4), name, Pins(values={"recompute": ("none", "full")}))
        assert len(set(met)) == len(met)
        legal = [s for s in met if not backend(name).legal(job("Qwen/Qwen3-1.7B", "2xH100", 4), s)]
        assert legal
        assert all(canonical(s) == s for s in legal)


def test_pins_are_honoured() -> None:
    pins = Pins(values={"tp": (4,), "pp": (1, 2)}, no_recompute=True, max_micro_batch=2)
    for candidate in tune(job(), "megatron", pins).candidates:
        s = candidate.strategy
        assert s.tp == 4
        assert s.pp in (1, 2)
        assert s.recompute == "none"
        assert s.micro_batch_size <= 2


def test_numerics_classes_open_only_when_allowed() -> None:
    def reductions(**pins: Any) -> set[tuple[str, str]]:
        found = everything(job(), "megatron", Pins(values={"tp": (1,), "cp": (1,), "pp": (1,)}, **pins))
        return {(s.reduce_dtype, s.precision) for s in found}

    assert reductions() == {("fp32", "bf16")}
    assert reductions(allow=frozenset({"rounding"})) == {("fp32", "bf16"), ("bf16", "bf16")}
    assert reductions(allow=frozenset({"rounding", "lossy"})) == set(
        itertools.product(("fp32", "bf16"), ("bf16", "fp8"))
    )


def test_a_memory_limit_below_the_device_is_kept() -> None:
    limit = 60 * 2**30
    found = tune(job(), "native", Pins(memory_limit_bytes=limit))
    assert all(c.device_bytes <= limit for c in found.candidates)
    assert found.estimate.memory_limit_bytes == limit


def test_nothing_fits() -> None:
    with pytest.raises(NoPlanError, match=r"none of \d+ legal strategies fits: the smallest .* GiB"):
        tune(job("Qwen/Qwen2.5-72B", "1xL4", 1), "native", Pins())


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (Pins(values={"tp": (3,)}), "leaves no strategy"),
        (Pins(values={"warp": (1,)}), "unknown knob 'warp'"),
        (Pins(values={"sharding": ("zero",)}), "is not one of none, optimizer"),
        (Pins(allow=frozenset({"magic"})), "unknown numerics class"),
        (Pins(values={"recompute": ("full",)}, no_recompute=True), "contradicts"),
    ],
)
def test_contradictory_pins_are_named(pins: Pins, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tune(job(), "native", pins)


def test_a_degree_that_a_backend_cannot_run_is_named_with_the_values_that_would_do() -> None:
    with pytest.raises(NoPlanError, match=r"tp=2: native runs tp in \{1\}"):
        tune(job(), "native", Pins(values={"tp": (2,)}))
    with pytest.raises(NoPlanError, match=r"does not divide num_heads=14 .* Use tp in \[1, 2, 7, 14\]"):
        tune(job("Qwen/Qwen2-0.5B"), "megatron", Pins(values={"tp": (8,)}))


def test_a_batch_that_no_micro_batch_divides_is_named_with_the_nearest_that_would_do() -> None:
    with pytest.raises(UsageError, match=r"global_batch_size=36 is not divisible by the 8 .* Use 32 or 40"):
        tune(job(gbs=36), "native", Pins())
    with pytest.raises(UsageError, match="Use 8"):
        tune(job(gbs=3), "native", Pins())


def test_a_model_that_a_backend_does_not_train_is_refused_before_the_search() -> None:
    with pytest.raises(UsageError, match="does not train model_type 'qwen3_moe'"):
        tune(job("Qwen/Qwen3-30B-A3B"), "native", Pins())


def test_progress_is_reported() -> None:
    seen: list[Progress] = []
    tune(job(), "native", Pins(), on_progress=seen.append)
    assert {p.phase for p in seen} == {"searching"}
    assert seen[-1].best_step_s is not None


class TestOptuna:
    def test_sampling_reaches_the_proven_winner_on_a_small_space(self) -> None:
        """Coarse knobs of the native space are the micro-batch alone: 40 trials see every value."""
        best = tune(job(), "native", Pins()).candidates[0]
        sampled = tune(job(), "native", Pins(), engine="optuna", trials=40, seed=1)
        assert sampled.candidates[0].step_s == pytest.approx(best.step_s)
        assert not sampled.record.proven

    def test_a_proposal_is_decoded_to_degrees_that_fill_the_cluster(self) -> None:
        space = Space(job(gbs=24), backend("megatron"), Pins())
        assert decode(space, {"tp": 7, "pp": 3, "cp": 8, "micro_batch_size": 5}) == {
            "tp": 4,
            "pp": 2,
            "cp": 1,
            "micro_batch_size": 4,
        }

    def test_a_study_is_kept_resumed_and_belongs_to_its_job(self, tmp_path: Path) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        path = tmp_path / "study.log"
        tune(job(), "native", Pins(), engine="optuna", trials=4, study_path=path)
        tune(job(), "native", Pins(), engine="optuna", trials=3, study_path=path)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
        trials = optuna.load_study(study_name="trainplan", storage=storage).trials
        assert sum(trial.state.is_finished() for trial in trials) == 4 + 3
        with pytest.raises(UsageError, match="another model, cluster, workload or backend"):
            tune(job(gbs=64), "native", Pins(), engine="optuna", trials=1, study_path=path)

    def test_an_enumeration_records_its_best(self, tmp_path: Path) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        path = tmp_path / "study.log"
        for _ in range(2):  # the second adds nothing new
            found = tune(job(), "native", Pins(), study_path=path)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
        study = optuna.load_study(study_name="trainplan", storage=storage)
        assert study.best_value == pytest.approx(found.candidates[0].step_s)
        assert len(found.candidates) <= len(study.trials) <= len(found.candidates) + found.record.simulated

    @pytest.mark.parametrize("cut", [1, 7, 40])
    def test_a_torn_last_line_is_cut_off_and_kept_beside(self, tmp_path: Path, cut: int) -> None:
        path = tmp_path / "study.log"
        tune(job(), "native", Pins(), engine="optuna", trials=3, study_path=path)
        whole = path.read_bytes()
        path.write_bytes(whole[:-cut])
        repair(path)
        lines = whole.splitlines(keepends=True)
        assert path.read_bytes() == b"".join(lines[:-1])
        assert path.with_name("study.log.torn").read_bytes() == lines[-1][:-cut]
        tune(job(), "native", Pins(), engine="optuna", trials=1, study_path=path)

    def test_a_file_that_is_no_study_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "study.log"
        path.write_text("not a journal\n")
        with pytest.raises(UsageError, match="not a usable study"):
            tune(job(), "native", Pins(), engine="optuna", trials=1, study_path=path)

    def test_ctrl_c_waits_for_the_trial_under_way(self, tmp_path: Path) -> None:
        import signal

        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
        from optuna.study import load_study

        path, reports = tmp_path / "study.log", []

        def interrupt(progress: Progress) -> None:
            reports.append(progress)
            if len(reports) == 3:
                signal.raise_signal(signal.SIGINT)

        handler = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            tune(job(), "native", Pins(), engine="optuna", trials=50, study_path=path, on_progress=interrupt)
        assert signal.getsignal(signal.SIGINT) is handler
        trials = load_study(study_name="trainplan", storage=JournalStorage(JournalFileBackend(str(path)))).trials
        assert sum(trial.state.is_finished() for trial in trials) == 3  # the third was finished and written
        assert not any(trial.state.name == "RUNNING" for trial in trials)
