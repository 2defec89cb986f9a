"""Nothing fits: what is the smallest change of the job that would make some plan fit?

Of each kind of change the smallest that works is told: free a knob that was fixed, a shorter sequence, adapters instead
of all weights, more GPUs of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainplan.costmodel.backends import backend
from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.errors import TrainplanError
from trainplan.costmodel.job import Job
from trainplan.costmodel.workload import Lora
from trainplan.planner.board import Board, Candidate, Counts
from trainplan.planner.rounds import Rounds
from trainplan.planner.space import Pins, Space
from trainplan.planner.unit_book import UnitBook
from trainplan.planner.workers import Here

SHORTEST = 256
"""Tokens below which a shorter sequence is no advice."""
MOST_TIMES = 64
"""How many times as many GPUs are tried."""
ADAPTERS = Lora(rank=16, alpha=32)
ROUGH_FRAC = 0.5
"""A plan that fits is enough; how far it is from the fastest does not matter."""


@dataclass(frozen=True)
class Remedy:
    """A change that makes a plan fit: as options, with that plan."""

    options: str
    plan: Candidate


def remedies(job: Job, backend_name: str, pins: Pins) -> Iterator[Remedy]:
    """The smallest change of each kind that works.

    Args:
        job: Model, cluster and workload.
        backend_name: Whose rules and software apply.
        pins: What the user fixed.
    """
    for way in (_freed(job, pins), _shorter(job, pins), _adapters(job, backend_name, pins), _more_gpus(job, pins)):
        for options, changed, kept in way:
            found = _some_plan(changed, backend_name, kept)
            if found is not None:
                yield Remedy(options, found)
                break


def _some_plan(job: Job, backend_name: str, pins: Pins) -> Candidate | None:
    """A plan that fits, and not a slow one; None if there is none."""
    space, board = Space(job, backend(backend_name), pins), Board(1)
    if space.backend.refusals(job):
        return None
    Rounds(Here(space, UnitBook(space)), board, Counts(), ROUGH_FRAC).run()
    return board.candidates[0] if board.candidates else None


Change = tuple[str, Job, Pins]


def _freed(job: Job, pins: Pins) -> Iterator[Change]:
    if pins.no_recompute:
        yield "no --no-recompute", job, pins.model_copy(update={"no_recompute": False})
    for name in pins.values:
        left = {field: values for field, values in pins.values.items() if field != name}
        yield f"no --{name.replace('_', '-')}", job, pins.model_copy(update={"values": left})


def _shorter(job: Job, pins: Pins) -> Iterator[Change]:
    seq_len = job.workload.seq_len // 2
    while seq_len >= SHORTEST:
        workload = job.workload.model_copy(update={"seq_len": seq_len})
        yield f"--seq-len {seq_len}", Job(job.model, job.cluster, workload), pins
        seq_len //= 2


def _adapters(job: Job, backend_name: str, pins: Pins) -> Iterator[Change]:
    if job.workload.lora is None and backend(backend_name).lora:
        workload = job.workload.model_copy(update={"lora": ADAPTERS})
        yield f"--lora-rank {ADAPTERS.rank}", Job(job.model, job.cluster, workload), pins


def _more_gpus(job: Job, pins: Pins) -> Iterator[Change]:
    """Twice, four times, ... as many of the same kind, where the presets know a network for them."""
    times = 2
    while times <= MOST_TIMES:
        name = f"{times * job.cluster.num_gpus}x{job.cluster.device.name}"
        times *= 2
        try:
            cluster = load_cluster(name)
        except TrainplanError:
            return
        if cluster.device == job.cluster.device:
            yield f"--cluster {name}", Job(job.model, cluster, job.workload), pins
