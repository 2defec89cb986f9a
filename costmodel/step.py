"""What does a step cost? Joins units, the graph of a step and memory into the time and memory of strategies.

`price` takes strategies that share the shape of their step's graph and returns columns; `estimate` explains one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trainplan.costmodel.durations import COMPUTE_PARTS, INLINE_PARTS, Durations, durations
from trainplan.costmodel.estimate import Estimate, Interval
from trainplan.costmodel.factors import scopes, shipped
from trainplan.costmodel.graph import Work
from trainplan.costmodel.hardware import Precision
from trainplan.costmodel.hardware_presets import gpu_facts
from trainplan.costmodel.job import Job
from trainplan.costmodel.layout import Layout, layout
from trainplan.costmodel.memory import RankBytes, own_parameters, rank_bytes, stage_memory
from trainplan.costmodel.packing import useful_token_frac
from trainplan.costmodel.rates import DRAWS, RESIDUAL_LOG_SD, Rates, Value, rates
from trainplan.costmodel.simulate import critical_path, step_seconds
from trainplan.costmodel.stacks import STACKS, Stack
from trainplan.costmodel.strategy import CHOICES, Strategy, StrategyTable
from trainplan.costmodel.units import unit_seconds
from trainplan.costmodel.work import LINEAR_CHUNK, Column, Shapes, attended_causal

DATA_PARALLEL = (Work.GATHER, Work.GATHER_FORWARD, Work.GATHER_BACKWARD, Work.REDUCE)
PIPELINE = (Work.SEND_FORWARD, Work.SEND_BACKWARD)


ROUNDING = 1e-9
"""Waits below this share of a step are differences of sums that should be equal."""


@dataclass(frozen=True)
class Priced:
    """Strategies of one shape, priced: columns are ``[rows]``, or ``[draws, rows]`` where rates were drawn."""

    job: Job
    stack: Stack
    table: StrategyTable
    place: Layout
    work: Durations

    def step_s(self, without: Iterable[Work] = ()) -> Column:
        """Simulated seconds of a step; ``without`` sets the duration of some kinds of work to 0."""
        seconds = dict(self.work.seconds)
        for kind in without:
            seconds[kind] = np.zeros(())
        graph = self.work.graph
        columns = graph.classes.durations(seconds)
        flat = step_seconds(graph, columns.reshape(-1, columns.shape[-1]))
        return np.asarray(flat.reshape(columns.shape[:-1]))

    @cached_property
    def memory(self) -> list[RankBytes]:
        """Bytes of every pipeline rank."""
        first = self.table.row(0)
        return rank_bytes(self.job, self.stack, self.table, self.place, first.grad_accum, first.schedule)

    @property
    def device_bytes(self) -> Column:
        """95 % point of device memory of the fullest rank."""
        gpu = self.job.cluster.device.kind == "gpu"
        return np.asarray(np.max(np.stack(np.broadcast_arrays(*(rank.device(2, gpu) for rank in self.memory))), axis=0))


def price(job: Job, backend: str, table: StrategyTable, of: Rates | None = None) -> Priced:
    """Price strategies that agree in `trainplan.planner.space.SHAPE_FIELDS`.

    Args:
        job: Model, cluster and workload.
        backend: Whose software stack runs it.
        table: The strategies, legal for the job.
        of: Rates to use; None = `table_rates`.
    """
    stack = STACKS[backend]
    first = table.row(0)
    place = layout(job, first)
    units = unit_seconds(job, stack, table, of or table_rates(job, stack, table))
    shapes = Shapes(job, table, stack)
    own = [own_parameters(shapes, place, [stage]) for stage in range(place.num_stages)]
    return Priced(job, stack, table, place, durations(first, stack, place, units, own))


def assumed_rates(job: Job, stack: Stack, strategy: Strategy, draws: int = 0) -> Rates:
    """The rates of a cluster as training sees them: the stated ones, slowed by the factors that published runs gave.

    A GPU's factors apply where its numbers are the presets'; a machine that was measured, and a CPU, state their own.

    Args:
        job: Model, cluster and workload.
        stack: The software.
        strategy: Any one of those to price: factors depend on its precision and attention.
        draws: 0 = the most probable rates; else as many draws, [draws, 1] each.
    """
    stated = rates(job.cluster, job.workload.precision, draws)
    device = job.cluster.device
    if device.kind == "cpu" or device.name not in gpu_facts():
        return stated
    return stated.slowed(shipped().at(scopes(job.cluster, stack, strategy), draws))


def table_rates(job: Job, stack: Stack, table: StrategyTable) -> Rates:
    """`assumed_rates` of strategies that may differ in attention: each kernel has a factor of its own."""
    first, codes = table.row(0), table["attention"]
    found = {
        int(code): assumed_rates(job, stack, first.model_copy(update={"attention": CHOICES["attention"][code]}))
        for code in np.unique(codes)
    }
    if len(found) == 1:
        return next(iter(found.values()))
    attention: dict[Precision, Value] = {
        precision: np.select([codes == code for code in found], [of.attention[precision] for of in found.values()])
        for precision in next(iter(found.values())).attention
    }
    return replace(next(iter(found.values())), attention=attention)


def critical_seconds(job: Job, backend: str, strategy: Strategy) -> dict[str, float]:
    """Seconds of each kind of work on the longest path of a step, which add up to it.

    Each is also how much the step changes, for a small change, per relative change of that work: what is not on the
    path costs nothing.
    """
    priced = price(job, backend, StrategyTable.from_strategies([strategy]))
    graph = priced.work.graph
    columns = graph.classes.durations(priced.work.seconds).reshape(-1)
    _, counts = critical_path(graph, columns)
    found: dict[str, float] = {}
    for column in np.flatnonzero(counts).tolist():
        kind, _ = graph.classes.name(column)
        name = kind.name.lower()
        found[name] = found.get(name, 0.0) + float(counts[column] * columns[column])
    return {name: value for name, value in found.items() if value > 0}


def memory_limit(job: Job) -> float:
    """Bytes a rank may use."""
    return job.cluster.device.memory_bytes.value


def estimate(job: Job, backend: str, strategy: Strategy, limit_bytes: float | None = None) -> Estimate:
    """The full price of one strategy, with its interval from draws of the rates.

    Args:
        job: Model, cluster and workload.
        backend: Whose software stack runs it.
        strategy: Legal for the job.
        limit_bytes: Memory a rank may use; None = all of its device.
    """
    table = StrategyTable.from_strategies([strategy])
    priced = price(job, backend, table)
    step_s = _value(priced.step_s())
    breakdown, exposed = _breakdown(priced, strategy, step_s)
    gpu = job.cluster.device.kind == "gpu"
    useful = useful_token_frac(job.workload, strategy.packing)
    tokens_per_s = job.workload.tokens_per_step * useful / step_s
    price_per_hour = job.cluster.price_per_gpu_hour
    stated = rates(job.cluster, job.workload.precision)
    return Estimate(
        step_time_s=_interval(job, backend, table, step_s),
        breakdown_s=breakdown,
        tokens_per_s=tokens_per_s,
        useful_token_frac=useful,
        mfu=model_flops_per_token(job) * tokens_per_s / (job.cluster.num_gpus * _peak_flops_per_s(job, strategy)),
        bubble_frac=_bubble_frac(priced, strategy, step_s),
        exposed_comm_s=exposed,
        stages=tuple(stage_memory(rank, gpu) for rank in priced.memory),
        memory_limit_bytes=limit_bytes or memory_limit(job),
        price_per_1b_tokens=None
        if price_per_hour is None
        else 1e9 / tokens_per_s / 3600 * job.cluster.num_gpus * price_per_hour.value,
        weakest_provenance=stated.weakest,
    )


def _interval(job: Job, backend: str, table: StrategyTable, mid: float) -> Interval:
    """5 and 95 % points over draws of the rates and of what the formulas leave out."""
    drawn = price(job, backend, table, assumed_rates(job, STACKS[backend], table.row(0), DRAWS)).step_s()
    noise = np.exp(RESIDUAL_LOG_SD * np.random.default_rng(1).standard_normal(drawn.shape))
    low, high = np.quantile(drawn * noise, [0.05, 0.95])
    return Interval(low=min(float(low), mid), mid=mid, high=max(float(high), mid))


def _breakdown(priced: Priced, strategy: Strategy, step_s: float) -> tuple[dict[str, float], float]:
    """Parts of the step on the busiest rank, which add up to it, and the exposed communication in them.

    What the simulation loses when data-parallel communication takes no time was exposed by it; the same for the
    pipeline's transfers. What a rank then still waits is the bubble.
    """
    alone = _value(priced.step_s(without=(*DATA_PARALLEL, *PIPELINE)))
    with_sends = _value(priced.step_s(without=DATA_PARALLEL))
    busy = _busy_parts(priced, strategy.grad_accum)
    rank = int(np.argmax([sum(parts.values()) for parts in busy]))
    parts = dict(busy[rank])
    waits = {
        "exposed_data_parallel": step_s - with_sends,
        "exposed_pipeline": with_sends - alone,
        "bubble": alone - sum(parts.values()),
    }
    parts |= {name: value if value > ROUNDING * step_s else 0.0 for name, value in waits.items()}
    inline = sum(parts[name] for name in INLINE_PARTS)
    exposed = inline + parts["exposed_data_parallel"] + parts["exposed_pipeline"]
    return {name: value for name, value in parts.items() if value > 0}, exposed


def _busy_parts(priced: Priced, num_micro_batches: int) -> list[dict[str, float]]:
    """Seconds per part that each pipeline rank is busy, optimizer included."""
    ranks = np.array(priced.work.ranks)
    finish = np.broadcast_to(priced.work.seconds[Work.FINISH], (1, priced.work.graph.classes.num_units))[0]
    busy = []
    for rank in range(int(ranks.max()) + 1):
        mine = ranks == rank
        parts = {
            name: num_micro_batches * float(np.sum(np.broadcast_to(priced.work.parts[name], (1, len(ranks)))[0][mine]))
            for name in (*COMPUTE_PARTS, *INLINE_PARTS)
        }
        parts["optimizer"] = float(np.sum(finish[mine])) if len(ranks) == len(finish) else float(np.sum(finish))
        busy.append(parts)
    return busy


def _bubble_frac(priced: Priced, strategy: Strategy, step_s: float) -> float:
    """Share of the step that ranks wait with all communication beside the computation free, averaged over ranks."""
    alone = _value(priced.step_s(without=(*DATA_PARALLEL, *PIPELINE)))
    busy = [sum(parts.values()) for parts in _busy_parts(priced, strategy.grad_accum)]
    idle_frac = (alone - float(np.mean(busy))) / step_s
    return idle_frac if idle_frac > ROUNDING else 0.0


def model_flops_per_token(job: Job) -> float:
    """6 N plus attention, as `trainplan.costmodel.estimate.MFU_DEFINITION` says; a backward counts twice a forward.

    Attention: 4 c d per token and head forward for c attended positions (c = S / 2 when causal) and head width d.
    """
    model, seq_len = job.model, job.workload.seq_len
    active = model.active_parameters() - (0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size)
    attention = 0.0
    for kind, _ in model.layer_kinds():
        if kind == "linear":
            la = model.linear_attention
            assert la is not None  # held by ModelSpec
            dk, dv = la.key_head_dim, la.value_head_dim
            attention += la.num_value_heads * (2 * LINEAR_CHUNK * (3 * dk + 2 * dv) + 6 * dk * dv)
            continue
        width = 2 * model.head_dim
        if model.mla is not None:
            width = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim + model.mla.v_head_dim
        attention += (
            2 * attended_causal(seq_len, model.sliding_window if kind == "sliding" else None) * width * model.num_heads
        )
    return 6 * active + 3 * attention


def _peak_flops_per_s(job: Job, strategy: Strategy) -> float:
    peaks = job.cluster.device.peak_flops_per_s
    quantity = peaks.get(strategy.precision) or peaks[job.workload.precision]
    return quantity.value


def _value(column: Column) -> float:
    return float(np.squeeze(column))
