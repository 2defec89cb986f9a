"""Which strategy is best? Proves it over the whole space or samples, and says how sure the answer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trainplan.costmodel.backends import backend
from trainplan.costmodel.errors import NoPlanError, UsageError
from trainplan.costmodel.estimate import Estimate
from trainplan.costmodel.job import Job
from trainplan.costmodel.plan import SearchRecord
from trainplan.costmodel.step import estimate, memory_limit, price
from trainplan.costmodel.strategy import StrategyTable
from trainplan.planner.board import Board, Candidate, Counts, Progress
from trainplan.planner.enumeration import Stopped, enumerate_all
from trainplan.planner.remedies import remedies
from trainplan.planner.space import Pins, Space

__all__ = ["Candidate", "Pins", "Progress", "Result", "Stopped", "tune"]

Engine = Literal["enumerate", "optuna"]


class NothingFitsError(NoPlanError):
    """Legal strategies exist, but none fits in memory."""

    def __init__(self, message: str, nearest: list[Candidate], limit_bytes: float) -> None:
        """``nearest``: those that need least memory, of ``limit_bytes`` a rank has."""
        super().__init__(message)
        self.nearest, self.limit_bytes = nearest, limit_bytes


@dataclass(frozen=True)
class Result:
    """The best strategies, best first, what was looked at, and the full estimate of the winner."""

    candidates: list[Candidate]
    record: SearchRecord
    estimate: Estimate


def tune(
    job: Job,
    backend_name: str,
    pins: Pins,
    *,
    engine: Engine = "enumerate",
    trials: int = 200,
    seed: int = 0,
    study_path: Path | None = None,
    rescue_path: Path | None = None,
    resume: bool = False,
    top: int = 20,
    gap_frac: float = 0.0,
    workers: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
) -> Result:
    """The best strategies of a job on a backend.

    Args:
        job: Model, cluster and workload.
        backend_name: native, megatron, torchtitan, deepspeed or accelerate.
        pins: What the user fixed.
        engine: ``enumerate`` covers everything and proves its answer; ``optuna`` samples coarse knobs.
        trials: Trials of the optuna engine.
        seed: Of the optuna engine; the other has no randomness.
        study_path: File of an Optuna study that keeps the search; what is found is added to an existing one.
        rescue_path: Where an interrupted search is kept that has no ``study_path``; None = nowhere.
        resume: Go on with the interrupted search in the study: with the same options the answer is as if it had never
            been interrupted.
        top: How many strategies to return.
        gap_frac: How much better than the answer, as a share of its step time, some strategy may be; 0 = none is.
        workers: Processes that search; the answer does not depend on it.
        on_progress: Called now and then.

    Raises:
        UsageError: The pins contradict each other, or rule out every strategy; the study can't be used.
        Stopped: Ctrl-C.
        NoPlanError: No strategy is legal; `NothingFitsError` where some are, but none fits in memory.
    """
    pins.check()
    space = Space(job, backend(backend_name), pins)
    for _, reason in space.backend.refusals(job):
        raise UsageError(reason)
    report = on_progress or (lambda progress: None)
    kept_in = study_path or rescue_path
    if resume and (kept_in is None or not kept_in.exists()):
        raise UsageError(f"{kept_in or 'no study'}: there is no such file to go on with. Leave --resume out.")
    board = Board(top)
    if engine == "optuna":
        from trainplan.planner.sampling import sample  # optuna takes half a second to import

        counts = Counts()
        try:
            sample(
                space, board, counts, trials=trials, seed=seed, path=kept_in if resume else study_path,
                rescue=rescue_path, resume=resume, processes=workers, report=report,
            )  # fmt: skip
        except KeyboardInterrupt:
            raise Stopped(kept_in) from None
    else:
        board, counts = enumerate_all(
            space, board, gap_frac, workers, report,
            path=kept_in if resume else study_path, rescue=rescue_path, resume=resume,
        )  # fmt: skip
    if not board.candidates:
        raise _nothing(space, counts)
    best = estimate(job, backend_name, board.candidates[0].strategy, pins.memory_limit_bytes)
    proven = engine == "enumerate"
    return Result(board.candidates, counts.record(engine, proven, gap_frac if proven else 0.0), best)


def _nothing(space: Space, counts: Counts) -> Exception:
    """The error that says why no strategy is left."""
    if counts.nearest:
        limit = space.pins.memory_limit_bytes or memory_limit(space.job)
        nearest = sorted((_weighed(space, of) for of in counts.nearest), key=lambda of: of.device_bytes)
        s, needs = nearest[0].strategy, nearest[0].device_bytes
        cures = [of.options for of in remedies(space.job, space.backend.name, space.pins)]
        return NothingFitsError(
            f"none of {counts.infeasible} legal strategies fits: the smallest (tp={s.tp} pp={s.pp} dp={s.dp} sharding "
            f"{s.sharding} recompute {s.recompute} micro_batch_size={s.micro_batch_size}) needs {needs / 2**30:.1f} of "
            f"{limit / 2**30:.1f} GiB. "
            + (f"Any of these would do: {', '.join(cures)}." if cures else "Use more devices or another model."),
            nearest,
            limit,
        )
    if counts.covered:
        rules = ", ".join(f"{name} {n}" for name, n in counts.illegal.most_common(4))
        broken = space.backend.legal(space.job, counts.refused) if counts.refused else ()
        return NoPlanError(
            f"none of {counts.covered} strategies is legal on {space.backend.name} ({rules}). "
            f"{broken[0].reason if broken else 'Loosen the pins or change the cluster.'}"
        )
    return UsageError(_contradiction(space))


def _weighed(space: Space, of: Candidate) -> Candidate:
    """A candidate with all of its memory: some were left out by a part of it."""
    priced = price(space.job, space.backend.name, StrategyTable.from_strategies([of.strategy]))
    return replace(of, device_bytes=float(priced.device_bytes[0]))


def _contradiction(space: Space) -> str:
    """Why the pins leave no strategy at all: no degrees that fill the cluster, or no batch split."""
    job, values = space.job, space.pins.values
    degrees = {
        name: values[name]
        for name in ("tp", "pp", "cp", "dp_replicate", "dp_shard", "micro_batch_size", "grad_accum", "schedule", "vpp")
        if name in values
    }
    stated = ", ".join(f"{name} in {list(v)}" for name, v in degrees.items()) or "the space"
    batch = job.workload.global_batch_size
    dp = job.cluster.num_gpus
    if not degrees and batch % dp:  # only a backend without tp, pp and cp leaves nothing then
        near = sorted({max(dp, batch // dp * dp), (batch // dp + 1) * dp})
        return (
            f"global_batch_size={batch} is not divisible by the {dp} data parallel ranks that {space.backend.name} "
            f"makes of {job.cluster.name}: ranks would train different batches. Use {' or '.join(map(str, near))}."
        )
    return (
        f"{stated} leaves no strategy: tp*pp*cp*dp must be {job.cluster.num_gpus} ({job.cluster.name}) and "
        f"micro_batch_size*grad_accum*dp must be global_batch_size={job.workload.global_batch_size}. "
        "Change a pin or the batch."
    )
