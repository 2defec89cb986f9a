"""What is refused before a process is started."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainplan.costmodel.errors import MachineMismatchError, TrainplanError, UsageError
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.plan import Plan
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Workload
from trainplan.executor.launch import environment, run_plan
from trainplan.executor.options import RunOptions


@pytest.fixture
def run(model_dirs: Callable[..., Path], corpus: Path, tmp_path: Path, tiny: Any) -> Callable[..., int]:
    """Tries to start a run with something changed; ``prepare`` may damage a copy of the model directory first."""
    folder = Path(shutil.copytree(model_dirs("qwen3"), tmp_path / "model"))
    spec = load_model(str(folder))

    def start(prepare: Callable[[Path], object] = lambda _: None, plan: Plan | None = None, **changes: Any) -> int:
        workload = Workload(seq_len=64, global_batch_size=8, precision="fp32")
        planned = plan or tiny.plan(spec, Strategy(precision="fp32", micro_batch_size=8), workload)
        planned.save(tmp_path / "plan.yaml")
        prepare(folder)
        values = {"model_dir": folder, "data": corpus, "output_dir": tmp_path / "out", "steps": 3, **changes}
        return run_plan(tmp_path / "plan.yaml", RunOptions(**values))

    return start


def edit_config(**changes: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


def test_a_model_directory_without_config_weights_or_with_another_model(run: Callable[..., int]) -> None:
    with pytest.raises(MachineMismatchError, match=r"another model .* hidden_size is 128, not 64"):
        run(edit_config(hidden_size=128))
    with pytest.raises(MachineMismatchError, match=r"rope_theta is 5\.0"):
        run(edit_config(hidden_size=64, rope_parameters={"rope_type": "default", "rope_theta": 5.0}))
    with pytest.raises(UsageError, match="no safetensors weights"):
        run(lambda folder: (folder / "model.safetensors").unlink())
    with pytest.raises(UsageError, match=r"config\.json"):
        run(lambda folder: (folder / "config.json").write_text('{"model_type": "qw'), init="random")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        run(lambda folder: (folder / "config.json").unlink())


def test_data_that_is_missing_or_empty(run: Callable[..., int], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.jsonl is not a file"):
        run(data=tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match=r"empty.jsonl is empty"):
        run(data=tmp_path / "empty.jsonl")


def test_an_output_folder_that_holds_a_run_or_is_a_file(run: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UsageError, match=r"already holds a run .* --resume"):
        run()
    with pytest.raises(UsageError, match="is a file"):
        run(output_dir=tmp_path / "plan.yaml")


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_lives(
    run: Callable[..., int], tmp_path: Path
) -> None:
    from trainplan.executor.files import LOCK_FILE, lock

    (tmp_path / "out").mkdir()
    marker = tmp_path / "out" / "error.json"
    marker.write_text("{}")
    with lock(tmp_path / "out" / LOCK_FILE), pytest.raises(UsageError, match="another run is writing"):
        run()
    assert marker.exists()  # nothing of the first run was touched


def test_plans_for_other_machines_and_backends(
    run: Callable[..., int], tiny: Any, model_dirs: Callable[..., Path]
) -> None:
    spec = load_model(str(model_dirs("qwen3")))
    workload = Workload(seq_len=64, global_batch_size=8, precision="fp32")
    plan = tiny.plan(spec, Strategy(precision="fp32", micro_batch_size=8), workload)
    other = Plan(**{**dict(plan), "backend": "accelerate"})
    with pytest.raises(UsageError, match="backend 'accelerate'"):
        run(plan=other)
    two = Strategy(precision="fp32", micro_batch_size=4, dp_replicate=2)
    cluster = tiny.plan(spec, two, workload).cluster
    halves = type(cluster)(
        **{**dict(cluster), "num_nodes": 2, "gpus_per_node": 1, "scale_up_domain": 1, "scale_out": cluster.scale_up}
    )
    spread = Plan(**{**dict(plan), "cluster": halves, "strategy": two})
    with pytest.raises(MachineMismatchError, match="for 2 nodes"):
        run(plan=spread)


def test_a_damaged_plan_file(tmp_path: Path, corpus: Path, model_dirs: Callable[..., Path]) -> None:
    options = RunOptions(model_dir=model_dirs("qwen3"), data=corpus, output_dir=tmp_path / "out", steps=1)
    (tmp_path / "plan.yaml").write_text("model: [")
    with pytest.raises(TrainplanError) as caught:
        run_plan(tmp_path / "plan.yaml", options)
    assert caught.value.exit_code == 2


def test_cores_are_divided_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [environment(n)["OMP_NUM_THREADS"] for n in (1, 2, 5, 24)] == ["12", "6", "2", "1"]
    assert environment(2)["PYTHONSAFEPATH"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environment(2)["OMP_NUM_THREADS"] == "3"


def test_starting_a_run_imports_no_torch() -> None:
    """The launcher lives as long as the run: it must not hold a second copy of torch, nor wait for it to load."""
    code = (
        "import sys, trainplan.executor.launch, trainplan.executor.measurement, trainplan.executor.options; "
        "sys.exit(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers')) != [])"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
