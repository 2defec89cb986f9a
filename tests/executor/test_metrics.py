"""The metrics file across crashes, and the steady state of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Workload
from trainplan.executor.measurement import Measurement, steady_state
from trainplan.executor.metrics import MetricsLog, StepMetrics, peak_memory_bytes, read_metrics

STEP = StepMetrics(
    step=1,
    loss=2.5,
    learning_rate=1e-3,
    grad_norm=0.5,
    step_time_s=0.25,
    tokens=900,
    padded_tokens=124,
    loss_tokens=890,
    tokens_per_s=3600.0,
    data_wait_s=0.01,
    peak_memory_bytes=10**9,
)


def test_a_resumed_curve_has_every_step_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, steps_kept=0)
    for step in range(1, 8):
        log.write(replace(STEP, step=step, loss=float(step)))
    log.close()
    with log.path.open("a") as file:
        file.write('{"step": 8, "lo')  # the process was killed while it wrote
    assert [line["step"] for line in read_metrics(log.path)] == [1, 2, 3, 4, 5, 6, 7]
    log = MetricsLog(tmp_path, steps_kept=5)
    log.write(replace(STEP, step=6, loss=60.0))
    log.close()
    lines = read_metrics(log.path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["loss"] == 60.0


def test_a_line_is_in_the_file_as_soon_as_it_is_written_and_is_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, steps_kept=0)
    log.write(replace(STEP, loss=float("nan"), skipped=True))
    line = json.loads(log.path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["loss"] is None
    assert line["skipped"] is True
    assert line["tokens"] + line["padded_tokens"] == 1024
    log.close()


def test_a_fresh_log_starts_empty(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    MetricsLog(tmp_path, steps_kept=0).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_peak_memory_grows_with_a_large_tensor() -> None:
    cpu = torch.device("cpu")
    before = peak_memory_bytes(cpu)
    held = torch.ones(before // 4 + 25_000_000)  # alone 100 MB more than this process has ever held
    assert held.nbytes < peak_memory_bytes(cpu) < held.nbytes + 2 * before


def test_the_steady_state_leaves_out_three_steps_and_takes_the_median() -> None:
    times = [9.0, 3.0, 2.0, 0.5, 0.4, 0.6, 0.5, 5.0]
    steps = [replace(STEP, step_time_s=time) for time in times]
    found = steady_state(steps, len(steps))
    assert found["step_time_s"] == 0.5
    assert found["samples_s"] == (0.5, 0.4, 0.6, 0.5, 5.0)
    assert found["warmup_steps"] == 3
    assert found["tokens_per_s"] == pytest.approx(5 * 900 / 7.0)
    assert found["padding_frac"] == pytest.approx(124 / 1024)
    assert steady_state(steps[-4:], 100)["samples_s"] == (0.4, 0.6, 0.5, 5.0)  # warm-up was long ago
    assert steady_state(steps[:2], 2)["samples_s"] == (3.0,)


def test_a_measurement_survives_its_file_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    spec = ModelSpec(
        name="m",
        family="qwen3",
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=100,
        max_position_embeddings=128,
    )
    measured = Measurement(
        plan_hash="0" * 16,
        model=spec,
        workload=Workload(seq_len=64, global_batch_size=8),
        strategy=Strategy(grad_accum=8),
        checkpoint_s=0.5,
        peak_memory_bytes=10**9,
        loss_first=5.0,
        loss_last=2.0,
        steps=2,
        environment={"torch": "2.13"},
        **steady_state([STEP, STEP], 2),
    )
    path = measured.save(tmp_path)
    assert Measurement.load(path) == measured
    path.write_text(path.read_text().replace('"step_time_s"', '"step_time"'))
    with pytest.raises(UsageError, match="step_time"):
        Measurement.load(path)
