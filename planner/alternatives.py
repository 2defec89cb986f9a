"""What if one knob of a plan were set otherwise? Step time and memory of each such strategy, or why it can't run.

A knob takes others with it where it must: degrees change the data-parallel degree that fills the cluster, and that the
number of micro-batches; a schedule brings its number of stages; a level of sharding its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainplan.costmodel.backends import Backend, backend
from trainplan.costmodel.job import Job
from trainplan.costmodel.layout import balanced
from trainplan.costmodel.step import memory_limit, price
from trainplan.costmodel.strategy import (
    CHOICES,
    FIELDS,
    NumericsClass,
    Strategy,
    StrategyTable,
    canonical,
    numerics,
)
from trainplan.planner.space import VIRTUAL, Pins, Space, splits

DEPENDENT = ("grad_accum", "dp_replicate", "recompute_modules", "etp")
"""Fields that follow others and are not changed by themselves."""
ALL_NUMERICS = Pins(allow=frozenset({"rounding", "lossy"}))


@dataclass(frozen=True)
class Outcome:
    """What a strategy would cost: its step and the fullest rank's memory (95 % point), or the first rule it breaks."""

    strategy: Strategy
    numerics: NumericsClass
    step_s: float | None
    device_bytes: float | None
    fits: bool
    broken: str = ""


@dataclass(frozen=True)
class Alternative:
    """One knob set to another value."""

    knob: str
    value: Any
    outcome: Outcome


def outcome(job: Job, backend_name: str, strategy: Strategy, limit_bytes: float | None = None) -> Outcome:
    """The price of a strategy, or why the backend can't run it."""
    of = numerics(strategy, job.workload.precision)
    broken = backend(backend_name).legal(job, strategy)
    if broken:
        return Outcome(strategy, of, None, None, False, broken[0].reason)
    priced = price(job, backend_name, StrategyTable.from_strategies([strategy]))
    device = float(np.squeeze(priced.device_bytes))
    step_s = float(np.squeeze(priced.step_s()))
    return Outcome(strategy, of, step_s, device, device <= (limit_bytes or memory_limit(job)))


def alternatives(
    job: Job, backend_name: str, strategy: Strategy, limit_bytes: float | None = None
) -> Iterator[Alternative]:
    """Every other value of every knob, each alone; what runs the same as the plan is left out.

    Args:
        job: Model, cluster and workload.
        backend_name: Whose rules and software apply.
        strategy: The plan's.
        limit_bytes: Memory of a rank; None = all of its device.
    """
    of, seen = backend(backend_name), {canonical(strategy)}
    for knob in FIELDS:
        if knob in DEPENDENT:
            continue
        for value in _values(job, of, strategy, knob):
            changed = moved(job, of, strategy, knob, value)
            if changed not in seen:
                seen.add(changed)
                yield Alternative(knob, value, outcome(job, backend_name, changed, limit_bytes))


def _values(job: Job, of: Backend, strategy: Strategy, knob: str) -> list[Any]:
    """Values to set a knob to; degrees and micro-batches are doubled and halved."""
    now = getattr(strategy, knob)
    if knob in ("tp", "pp", "cp", "ep", "dp_shard", "micro_batch_size"):
        near = [2 * now, *([now // 2] if now % 2 == 0 else [])]
        if knob == "dp_shard":
            near = [shard for shard in near if strategy.dp % shard == 0]
        return near if knob != "ep" or job.model.moe else []
    space = Space(job, of, ALL_NUMERICS)
    free: tuple[Any, ...]
    if knob == "vpp":
        free = VIRTUAL if strategy.pp > 1 else ()
    elif knob == "recompute":
        return [(kind, names) for kind, names in space.recomputations() if (kind, names) != _recompute(strategy)]
    elif knob == "recompute_layers":
        layers = balanced(job.model, strategy.pp * strategy.vpp)
        quarters = (tuple(n * quarter // 4 for n in layers) for quarter in (1, 2, 3))
        free = ((), *(part for part in quarters if any(part))) if strategy.recompute != "none" else ()
    elif knob == "stage_layers":
        free = splits(job, strategy.pp * strategy.vpp)
    elif knob == "prefetch_units":
        free = (1, 2)
    elif knob == "precision":
        free = space.precisions()
    elif knob in space.fine:
        free = space.fine[knob]
    else:
        free = CHOICES.get(knob, (False, True) if isinstance(now, bool) else ())
    return [value for value in free if value != now]


def _recompute(strategy: Strategy) -> tuple[str, tuple[str, ...]]:
    return strategy.recompute, strategy.recompute_modules


def moved(job: Job, of: Backend, strategy: Strategy, knob: str, value: Any) -> Strategy:
    """The strategy with one knob set otherwise, and what must follow it; it may break rules."""
    s = strategy.model_dump()
    s[knob] = value
    if knob == "recompute":
        kind, names = value if isinstance(value, tuple) else (value, ())
        s.update(recompute=kind, recompute_modules=names, recompute_layers=())
    _follow_pipeline(job, of, s, knob, strategy)
    _follow_data_parallel(job, s, knob, strategy)
    return canonical(Strategy(**s))


def _follow_pipeline(job: Job, of: Backend, s: dict[str, Any], knob: str, before: Strategy) -> None:
    """Schedule, stages and layers that go with a pipeline."""
    if knob not in ("pp", "vpp", "schedule"):
        return
    if s["pp"] == 1:
        s.update(schedule="1f1b", vpp=1)
    elif knob == "schedule":
        s["vpp"] = {"interleaved": max(2, s["vpp"]), "zbv": 2, "dualpipev": 2}.get(s["schedule"], 1)
    elif knob == "vpp" and s["schedule"] in ("1f1b", "gpipe", "interleaved"):
        s["schedule"] = "interleaved" if s["vpp"] > 1 else "1f1b"
    if s["pp"] * s["vpp"] == before.pp * before.vpp:
        return
    split = splits(job, s["pp"] * s["vpp"])[0]
    allowed = of.values.get("stage_layers")
    s["stage_layers"] = split if allowed is None or split in allowed else None
    s["recompute_layers"] = ()


def _follow_data_parallel(job: Job, s: dict[str, Any], knob: str, before: Strategy) -> None:
    """Ranks that share the batch, and how many micro-batches each then has."""
    ranks = max(1, job.cluster.num_gpus // (s["tp"] * s["pp"] * s["cp"]))
    if knob == "dp_shard":
        s["dp_replicate"] = max(1, ranks // s["dp_shard"])
    elif ranks != before.dp or knob == "sharding":
        shard = 1 if s["sharding"] == "none" else ranks
        if s["sharding"] != "none" and knob != "sharding" and ranks % before.dp_replicate == 0:
            shard = ranks // before.dp_replicate
        s.update(dp_replicate=ranks // shard, dp_shard=shard)
    if s["dp_shard"] > 1 and s["sharding"] == "none":
        s["sharding"] = "optimizer"
    per_rank = job.workload.global_batch_size // (s["dp_replicate"] * s["dp_shard"])
    s["grad_accum"] = max(1, per_rank // s["micro_batch_size"])
    if knob == "sharding":
        s["reshard_after_forward"] = s["sharding"] == "parameters"
