"""What do measurements of runs say beside what is predicted? Rows of a file as comparisons, twins counted once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainplan.costmodel.errors import TrainplanError
from trainplan.costmodel.estimate import Interval
from trainplan.costmodel.layout import layout
from trainplan.costmodel.memory import rank_bytes, stage_memory
from trainplan.costmodel.stacks import STACKS
from trainplan.costmodel.step import model_flops_per_token
from trainplan.costmodel.strategy import StrategyTable
from trainplan.planner.fitting import Timed
from trainplan.planner.rows import Row, Run, Skip, interpret

METRICS = ("step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib")
MEMORY = (
    ("max over ranks of torch max_memory_allocated", "allocated"),
    ("torchtitan logged peak active/reserved memory", "reserved"),
    ("nvidia-smi", "device"),
    ("GiB per GPU as written by the source (rounded, nvidia-smi style)", "device"),
)
"""Start of ``peak_mem_definition`` -> which of our three numbers it is."""
NORMAL_95 = 1.6449
"""Standard deviations from the mean to the 5 and 95 % points of a normal distribution."""
ALLOCATED_LOG_SD = 0.02
"""What the count of live tensors leaves out: workspaces and temporaries of kernels."""


@dataclass(frozen=True)
class Comparison:
    """A measured metric of a run. ``as_step_s`` is the step time it implies; None for memory."""

    row: Row
    run: Run
    metric: str
    measured: float
    as_step_s: float | None

    @property
    def group(self) -> tuple[str, str, str]:
        """Block, hardware and stack: what a calibration is of."""
        return self.row.block, self.run.job.cluster.device.name, self.run.stack

    def result(self, predicted: Interval) -> dict[str, Any]:
        """The record of a prediction in the metric's own unit."""
        return {
            "id": self.row.id,
            "block": self.row.block,
            "metric": self.metric,
            "measured": self.measured,
            "predicted": predicted.mid,
            "low": predicted.low,
            "high": predicted.high,
            "error_frac": predicted.mid / self.measured - 1,
            "workload": workload_key(self.row),
        }

    def timed(self) -> Timed:
        """As an observation of a step time."""
        assert self.as_step_s is not None  # the caller looked
        return Timed(self.row.id, self.row.block, self.run, self.as_step_s)


def compare(rows: Iterable[Row]) -> tuple[list[Comparison], list[dict[str, Any]]]:
    """(what can be predicted, skipped results): twins of one configuration are compared once, the newest container."""
    comparisons: list[Comparison] = []
    skipped: list[dict[str, Any]] = []
    for row in rows:
        found, reasons = _comparisons(row)
        comparisons += found
        skipped += reasons
    best: dict[str, Comparison] = {}
    for c in sorted(comparisons, key=lambda c: str((c.row.extra or {}).get("container", "")), reverse=True):
        kept = best.setdefault(_identity(c), c)
        if kept is not c:
            skipped.append(_skipped(c.row, c.metric, f"same configuration as {kept.row.id}", complete=False))
    kept_ids = {id(c) for c in best.values()}
    return [c for c in comparisons if id(c) in kept_ids], skipped


def _identity(c: Comparison) -> str:
    """Equal for rows that ran the same; memory does not depend on how many micro-batches a step has."""
    s, workload = c.run.strategy, c.run.job.workload
    timed = c.as_step_s is not None
    extra = c.row.extra or {}
    parts = (
        c.row.block, c.metric, c.run.stack, c.run.job.model.model_dump_json(), c.run.job.cluster.name,
        workload.seq_len, workload.global_batch_size if timed else "", c.row.precision, c.row.task,
        (s if timed else s.model_copy(update={"grad_accum": 1})).model_dump_json(), extra.get("attention_backend"),
    )  # fmt: skip
    return "|".join(str(part) for part in parts)


def _comparisons(row: Row) -> tuple[list[Comparison], list[dict[str, Any]]]:
    measured = {name: row.measured.get(name) for name in METRICS}
    if measured["step_time_s"] is not None:
        measured["tokens_per_s_per_gpu"] = None  # the same fact twice
    wanted = {name: float(value) for name, value in measured.items() if value is not None}
    if not wanted:
        reason = "no step time, throughput or memory is published"
        return [], [_skipped(row, "step_time_s", reason, complete=False)]
    try:
        run = interpret(row)
    except (Skip, TrainplanError) as reason_:
        lost = complete(row) and "duplicate" not in str(reason_) and "excluded" not in str(reason_)
        return [], [_skipped(row, name, str(reason_), lost) for name in wanted]
    found, skipped = [], []
    for name, value in wanted.items():
        if name == "peak_mem_gib":
            if memory_kind(row) is None:
                reason = (
                    f"peak_mem_definition {row.measured.get('peak_mem_definition')!r} is none of allocated, reserved, "
                    "device"
                )
                skipped.append(_skipped(row, name, reason, complete=False))
                continue
            found.append(Comparison(row, run, name, value, None))
        else:
            work = run.job.workload.tokens_per_step / run.job.cluster.num_gpus
            found.append(Comparison(row, run, name, value, value if name == "step_time_s" else work / value))
    return found, skipped


def complete(row: Row) -> bool:
    """Whether a row states its whole layout and model shape."""
    m = row.model
    layout_known = all(getattr(row, name) for name in ("seq", "gbs", "mbs", "tp", "pp", "dp"))
    return layout_known and all(getattr(m, name) for name in ("layers", "hidden", "heads", "ffn"))


def workload_key(row: Row) -> str:
    """Equal for layouts of the same work on the same GPUs."""
    m = row.model
    parts = (m.name, m.layers, m.hidden, row.gpu, row.n_gpus, row.seq, row.gbs, row.precision, row.task)
    return "|".join(str(part) for part in parts)


def _skipped(row: Row, metric: str, reason: str, complete: bool) -> dict[str, Any]:
    return {"id": row.id, "block": row.block, "metric": metric, "skipped": reason, "complete": complete}


def control_s(run: Run) -> float:
    """The step time of constant MFU, up to a factor: model FLOPs, recomputation and the pipeline's bubble."""
    s, job = run.strategy, run.job
    passes = {"full": 4 / 3, "selective": 1.0, "none": 1.0}[s.recompute]
    bubble = 1 + (s.pp - 1) / (s.grad_accum * s.vpp)
    peaks = job.cluster.device.peak_flops_per_s
    peak = (peaks.get(s.precision) or peaks[job.workload.precision]).value
    work = model_flops_per_token(job) * job.workload.tokens_per_step * passes * bubble
    return work / (job.cluster.num_gpus * peak)


def memory_kind(row: Row) -> str | None:
    """Which of allocated, reserved and device a row's memory is; None if its definition is none of them."""
    definition = str(row.measured.get("peak_mem_definition"))
    return next((kind for start, kind in MEMORY if definition.startswith(start)), None)


def memory_interval(c: Comparison) -> Interval:
    """The fullest rank's memory of the row's kind [GiB]."""
    job, s = c.run.job, c.run.strategy
    table = StrategyTable.from_strategies([s])
    gpu = job.cluster.device.kind == "gpu"
    ranks = rank_bytes(job, STACKS[c.run.stack], table, layout(job, s), s.grad_accum, s.schedule)
    stages = [stage_memory(rank, gpu) for rank in ranks]
    gib = 2**30
    kind = memory_kind(c.row)
    if kind == "allocated":
        value = max(stage.allocated_bytes for stage in stages) / gib
        spread = ALLOCATED_LOG_SD * NORMAL_95
        return Interval(low=value * np.exp(-spread), mid=value, high=value * np.exp(spread))
    peak = max(stages, key=lambda stage: stage.device_bytes.high)
    of = peak.reserved_bytes if kind == "reserved" else peak.device_bytes
    return Interval(low=of.low / gib, mid=of.mid / gib, high=of.high / gib)
