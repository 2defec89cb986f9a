"""Bounds and memory of whole grids: never above the simulation, and equal to what one strategy alone needs."""

import numpy as np
import pytest

from trainplan.costmodel.backends import backend
from trainplan.costmodel.bounds import lower_bound_s
from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.job import Job
from trainplan.costmodel.layout import layout
from trainplan.costmodel.memory import least_device_bytes, peak_device_bytes
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.stacks import STACKS
from trainplan.costmodel.step import price
from trainplan.costmodel.strategy import Strategy, StrategyTable
from trainplan.costmodel.workload import Workload
from trainplan.planner.order import mesh_bound_s
from trainplan.planner.space import Pins, Space
from trainplan.planner.unit_book import UnitBook

JOBS = {
    "dense": ("Qwen/Qwen3-8B", "2x8xH100", 64),
    "experts": ("Qwen/Qwen3-30B-A3B", "2x8xH100", 64),
    "dense before experts": ("deepseek-ai/DeepSeek-V3", "4x8xH100", 64),
    "sliding windows": ("openai/gpt-oss-20b", "8xH100", 32),
    "linear attention": ("Qwen/Qwen3-Next-80B-A3B", "2x8xH100", 32),
}


def problem(name: str) -> Job:
    model, cluster, batch = JOBS[name]
    return Job(load_model(model), load_cluster(cluster), Workload(seq_len=4096, global_batch_size=batch))


EVERYTHING = Pins(
    values={
        "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"),
        "vpp": (1, 2), "pp": (1, 2, 4, 8), "tp": (1, 2), "cp": (1, 2),
    }
)  # fmt: skip


@pytest.mark.parametrize("name", ["megatron", "native", "torchtitan"])
@pytest.mark.parametrize("of", JOBS)
def test_bounds_of_random_strategies_are_at_most_their_simulated_time(name: str, of: str) -> None:
    """Every schedule and level of sharding, legal for the backend or not: bounds do not rest on its rules."""
    job, generator = problem(of), np.random.default_rng(0)
    space = Space(job, backend(name), EVERYTHING)
    book, stack = UnitBook(space), STACKS[name]
    families = [f for f in space.families() if f.pp * f.vpp <= 16 and f.grad_accum <= 32]
    ratios = []
    for at in generator.permutation(len(families))[:40]:
        family = families[at]
        groups = list(space.groups(family))
        group = groups[generator.integers(len(groups))]
        shape = group.table.shape
        bound = np.broadcast_to(lower_bound_s(job, stack, group.table, book.units(group)), shape).ravel()
        least = mesh_bound_s(space, book, family)
        for flat in generator.choice(np.flatnonzero(np.broadcast_to(group.canonical, shape)), 2):
            strategy = group.table.row(int(flat))
            try:
                step_s = float(price(job, name, StrategyTable.from_strategies([strategy])).step_s()[0])
            except UsageError:
                break  # the schedule has no order for so many micro-batches
            assert bound[flat] <= step_s * (1 + 1e-9), strategy
            assert least[same_mesh(family.coarse, strategy)] <= step_s * (1 + 1e-9), strategy
            ratios.append(bound[flat] / step_s)
    assert len(ratios) > 15
    assert np.median(ratios) > 0.85


def same_mesh(coarse: dict[str, np.ndarray], strategy: Strategy) -> int:
    """Where a family has the mesh of a strategy."""
    (found,) = np.flatnonzero(np.all([of == getattr(strategy, name) for name, of in coarse.items()], axis=0))
    return int(found)


@pytest.mark.parametrize("name", ["megatron", "native", "deepspeed"])
def test_memory_of_many_is_that_of_each_alone(name: str) -> None:
    job, generator = problem("dense"), np.random.default_rng(1)
    space = Space(job, backend(name), Pins())
    families = [f for f in space.families() if f.grad_accum <= 32]
    checked = 0
    for at in generator.permutation(len(families))[:12]:
        for group in space.groups(families[at]):
            legal, _ = space.backend.legal_mask(job, group.table, group.canonical)
            flat = np.flatnonzero(np.broadcast_to(legal, group.table.shape))
            for one in generator.choice(flat, 1) if len(flat) else ():
                rows = group.table.take(np.array([one]))
                strategy = rows.row(0)
                place = layout(job, strategy)
                found = peak_device_bytes(job, STACKS[name], rows, place, strategy.grad_accum, strategy.schedule)
                alone = price(job, name, StrategyTable.from_strategies([strategy])).device_bytes
                assert float(np.squeeze(found)) == pytest.approx(float(alone[0]), rel=1e-12)
                least = least_device_bytes(
                    job, STACKS[name], group.table, place, strategy.grad_accum, strategy.schedule
                )  # fmt: skip
                assert np.broadcast_to(least, group.table.shape).ravel()[one] <= float(alone[0])
                checked += 1
    assert checked > 10


def test_the_count_of_a_family_is_that_of_its_groups() -> None:
    for of in ("dense", "experts"):
        space = Space(problem(of), backend("megatron"), Pins(allow=frozenset({"rounding", "lossy"})))
        for family in list(space.families())[::9]:
            assert space.count(family) == sum(group.size for group in space.groups(family))
