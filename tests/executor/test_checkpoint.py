"""Checkpoints: whole or absent, the newest whole one is found, and a resumed run continues as if never stopped."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from trainplan.costmodel.errors import MachineMismatchError, TrainplanError, UsageError
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Workload
from trainplan.executor import checkpoint
from trainplan.executor.metrics import read_metrics
from trainplan.executor.options import RunOptions
from trainplan.executor.stop import Interrupted
from trainplan.executor.tokens import open_cache
from trainplan.executor.train import Job, train

pytestmark = pytest.mark.usefixtures("one_rank")
JOB = {"seed": 0, "data": "abc"}


class Small:
    """A model whose optimizer has a state."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(40, 40)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step()

    def step(self) -> None:
        self.model(torch.randn(3, 40)).pow(2).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path, step: int, keep: int = 2) -> None:
        checkpoint.save(folder, step, self.model, self.optimizer, job=JOB, keep=keep)


def test_a_loaded_checkpoint_gives_weights_optimizer_and_random_state(tmp_path: Path) -> None:
    small = Small()
    small.save(tmp_path, 7)
    for _ in range(2):
        small.step()
    other = Small(seed=1)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.step, found.job) == (7, JOB)
    checkpoint.load(found, other.model, other.optimizer)
    for _ in range(2):
        other.step()  # its random inputs are those that followed the save
    assert torch.equal(other.model.weight, small.model.weight)


def test_only_the_newest_are_kept_and_the_pointer_follows(tmp_path: Path) -> None:
    small = Small()
    for step in (5, 10, 100, 20):
        small.save(tmp_path, step, keep=2)
    folder = tmp_path / checkpoint.FOLDER
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-100", "step-20"]
    assert (folder / "latest").read_text() == "step-20\n"
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 100  # by number, not by name


def damage_truncate(path: Path) -> None:
    data = next(path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a data file is cut": damage_truncate,
    "a data file is missing": lambda path: next(path.glob("*.distcp")).unlink(),
    "the metadata is missing": lambda path: (path / ".metadata").unlink(),
    "the info is missing": lambda path: (path / "trainer.json").unlink(),
    "the info is cut": lambda path: (path / "trainer.json").write_text("{"),
    "another format": lambda path: (path / "trainer.json").write_text('{"format": 99, "files": {}, "step": 9}'),
    "another step": lambda path: path.rename(path.with_name("step-11")),
    "it was never finished": lambda path: path.rename(path.with_name(".tmp-step-9")),
    "it was half deleted": lambda path: path.rename(path.with_name(".old-step-9")),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_checkpoint_that_is_not_whole_is_passed_over(kind: str, tmp_path: Path) -> None:
    small = Small()
    small.save(tmp_path, 4)
    small.save(tmp_path, 9)
    DAMAGES[kind](tmp_path / checkpoint.FOLDER / "step-9")
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 4
    checkpoint.clean(tmp_path)
    assert not list((tmp_path / checkpoint.FOLDER).glob(".*"))


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    (tmp_path / checkpoint.FOLDER / "step-x").mkdir(parents=True)
    assert checkpoint.newest(tmp_path) is None


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """Writes beyond ``size`` bytes of a file fail, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_stops_cleanly_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    small = Small()
    small.save(tmp_path, 1)
    with files_at_most(3000), pytest.raises(TrainplanError) as caught:
        small.save(tmp_path, 2)
    message = str(caught.value)
    assert "step 2 could not be written" in message
    assert "The checkpoint of step 1 is whole" in message
    assert "\n" not in message
    assert sorted(path.name for path in (tmp_path / checkpoint.FOLDER).iterdir()) == ["latest", "step-1"]
    small.save(tmp_path, 3)  # once there is room it goes on
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 3


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    small = Small()
    small.save(tmp_path, 1)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    (found.path / ".metadata").write_bytes(b"\x80\x04N.")
    with pytest.raises(UsageError, match=r"step-1 cannot be read"):
        checkpoint.load(found, small.model, small.optimizer)


def test_another_job_is_refused_by_what_differs(tmp_path: Path) -> None:
    Small().save(tmp_path, 1)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    checkpoint.check_same_job(found, JOB)
    with pytest.raises(MachineMismatchError, match=r"another job \(seed was 0, is 1\)"):
        checkpoint.check_same_job(found, {**JOB, "seed": 1})


class Tiny:
    """Trains the tiny model in this process."""

    def __init__(self, model_dir: Path, cache: Path) -> None:
        self.model_dir, self.cache = model_dir, cache

    def train(self, output: Path, *, stop_at: int = 0, strategy: dict[str, Any] | None = None, **options: Any) -> None:
        """Trains; with ``stop_at`` a signal arrives while that step runs."""
        values = Strategy(**{"precision": "fp32", "micro_batch_size": 4, "grad_accum": 2, **(strategy or {})})
        defaults = {"steps": 8, "learning_rate": 3e-3, "checkpoint_every": 3, "data": "unused"}
        run = RunOptions(**{**defaults, **options}, model_dir=self.model_dir, output_dir=output)
        workload = Workload(seq_len=64, global_batch_size=8, precision=values.precision)
        output.mkdir(exist_ok=True)
        calls = 0

        def signal_number() -> int:
            nonlocal calls
            calls += 1
            return 15 if calls == stop_at else 0

        job = Job(load_model(str(self.model_dir)), workload, values, run)
        train(job, open_cache(self.cache), torch.device("cpu"), stop_signal=signal_number)


@pytest.fixture
def tiny_job(model_dirs: Callable[..., Path], token_cache: Path) -> Tiny:
    return Tiny(model_dirs("qwen3"), token_cache)


def curve(output: Path) -> list[tuple[int, float, float, float]]:
    lines = read_metrics(output / "metrics.jsonl")
    return [(line["step"], line["loss"], line["grad_norm"], line["learning_rate"]) for line in lines]


def same_weights(first: Path, second: Path) -> bool:
    a, b = (load_file(folder / "model" / "model.safetensors") for folder in (first, second))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("strategy", [{}, {"precision": "bf16"}, {"recompute": "full", "loss_chunk": 40}])
def test_a_stopped_and_resumed_run_is_bitwise_the_undisturbed_one(
    strategy: dict[str, Any], tiny_job: Tiny, tmp_path: Path
) -> None:
    tiny_job.train(tmp_path / "whole", strategy=strategy)
    with pytest.raises(Interrupted, match="stopped after step 5 of 8") as caught:
        tiny_job.train(tmp_path / "parts", strategy=strategy, stop_at=5)
    assert caught.value.exit_code == 143
    assert len(curve(tmp_path / "parts")) == 5
    tiny_job.train(tmp_path / "parts", strategy=strategy, resume=True)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert same_weights(tmp_path / "parts", tmp_path / "whole")


def test_steps_after_the_last_checkpoint_are_done_again(tiny_job: Tiny, tmp_path: Path) -> None:
    """As after kill -9: the newest checkpoint is of step 6, the curve has 8 steps."""
    tiny_job.train(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-8")
    tiny_job.train(tmp_path / "parts", resume=True)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert same_weights(tmp_path / "parts", tmp_path / "whole")


def test_a_signal_during_the_last_step_is_a_finished_run(tiny_job: Tiny, tmp_path: Path) -> None:
    tiny_job.train(tmp_path / "out", steps=2, stop_at=2)
    assert (tmp_path / "out" / "model" / "config.json").is_file()


def test_resuming_a_finished_run_does_nothing_more(tiny_job: Tiny, tmp_path: Path) -> None:
    tiny_job.train(tmp_path / "out", steps=2)
    before = curve(tmp_path / "out")
    tiny_job.train(tmp_path / "out", steps=2, resume=True)
    assert curve(tmp_path / "out") == before


def test_resuming_with_another_seed_is_refused(tiny_job: Tiny, tmp_path: Path) -> None:
    tiny_job.train(tmp_path / "out", steps=2)
    with pytest.raises(MachineMismatchError, match="seed was 0, is 1"):
        tiny_job.train(tmp_path / "out", steps=4, seed=1, resume=True)


def test_three_steps_that_are_not_finite_end_the_run_and_change_no_weight(tiny_job: Tiny, tmp_path: Path) -> None:
    """A learning rate of 1e30 makes the products of weights overflow after step 1; the steps after it are skipped."""
    with pytest.raises(TrainplanError, match="not finite in 3 steps in a row, up to step 4"):
        tiny_job.train(tmp_path / "out", learning_rate=1e30, lr_schedule="constant", checkpoint_every=0)
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [line["skipped"] for line in lines] == [False, True, True, True]
    assert checkpoint.newest(tmp_path / "out") is None


def test_a_checkpoint_of_two_ranks_continues_on_one_and_back(
    tiny_job: Tiny, tiny: Any, tmp_path: Path, token_cache: Path
) -> None:
    """Steps 1-3 on two ranks (ZeRO-3), 4-6 on one, 7-9 on two (replicated): the curve of one process to 1e-5."""
    fixed: dict[str, Any] = {"lr_schedule": "constant", "learning_rate": 3e-3, "checkpoint_every": 0}
    tiny_job.train(tmp_path / "whole", steps=9, **fixed)

    def on_two_ranks(steps: int, layout: dict[str, Any]) -> None:
        strategy = Strategy(precision="fp32", micro_batch_size=2, grad_accum=2, **layout).model_dump(mode="json")
        workload = {"seq_len": 64, "global_batch_size": 8, "precision": "fp32"}
        job = {
            "cache": str(token_cache),
            "output": str(tmp_path),
            "options": {**fixed, "steps": steps, "resume": True, "data": "unused"},
            "cases": [("parts", str(tiny_job.model_dir), strategy, workload)],
        }
        (tmp_path / "job.json").write_text(json.dumps(job))
        tiny.run_ranks(2, Path(__file__).parent / "ranks_train.py", str(tmp_path / "job.json"))

    on_two_ranks(3, {"dp_shard": 2, "sharding": "parameters", "reshard_after_forward": True})
    tiny_job.train(tmp_path / "parts", steps=6, resume=True, **fixed)
    on_two_ranks(9, {"dp_replicate": 2, "sharding": "none"})
    whole, parts = curve(tmp_path / "whole"), curve(tmp_path / "parts")
    assert [line[0] for line in parts] == list(range(1, 10))
    assert max(abs(a[1] - b[1]) for a, b in zip(whole, parts, strict=True)) <= 1e-5
