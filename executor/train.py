"""The training loop: one plan, one data file, so many optimizer steps."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainplan.costmodel.errors import TrainplanError, UsageError
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Workload
from trainplan.executor import applied, checkpoint
from trainplan.executor.data import StepData, StepShare
from trainplan.executor.decoder import CausalLm
from trainplan.executor.export import export_model
from trainplan.executor.measurement import Measurement, steady_state
from trainplan.executor.mesh import build_mesh, dp_rank
from trainplan.executor.metrics import MetricsLog, StepMetrics, peak_memory_bytes
from trainplan.executor.optimizer import build_optimizer, learning_rate, set_learning_rate
from trainplan.executor.options import RunOptions
from trainplan.executor.parallel import DTYPES, SyncPolicy, check_strategy, parallelize
from trainplan.executor.progress import Reporter
from trainplan.executor.stop import Interrupted
from trainplan.executor.tokens import TokenCache
from trainplan.executor.weights import init_random, load_pretrained

MODEL_FOLDER = "model"
_KEPT_STEPS = 1000  # for the median step time; a run of weeks must not keep all
_MAX_BAD_STEPS = 3  # one bad batch may pass, a run of them means that training has diverged


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained and how."""

    spec: ModelSpec
    workload: Workload
    strategy: Strategy
    options: RunOptions
    plan_hash: str | None = None


@dataclass(slots=True)
class _Ready:
    """Everything that the loop works on."""

    model: CausalLm
    optimizer: torch.optim.Optimizer
    policy: SyncPolicy
    mesh: DeviceMesh
    data: StepData
    device: torch.device

    @property
    def rank(self) -> int:
        return dist.get_rank()


def train(
    job: Job, cache: TokenCache, device: torch.device, *, stop_signal: Callable[[], int] = lambda: 0
) -> Measurement | None:
    """Trains ``job`` on the documents of ``cache``; every rank calls it, inside an initialised process group.

    Checkpoints, metrics, ``applied.json``, ``measurement.json`` and the trained model (``model/``) go to the output
    folder.

    Args:
        job: What to train.
        cache: The tokenized data.
        device: This rank's.
        stop_signal: Asked before each step; a number other than 0 ends the run after that step.

    Returns:
        What was measured; None where no step was left to do.

    Raises:
        UsageError: The strategy, the data or the weights can't be used.
        MachineMismatchError: The ranks, the weights or what was set up are not those of the plan.
        Interrupted: It was stopped by a signal, after saving a checkpoint.
        TrainplanError: The loss is not finite, or a checkpoint could not be written.
    """
    options = job.options
    ready = _set_up(job, cache, device)
    identity = _identity(job, cache)
    done = _resume(ready, options, identity)
    dist.barrier()
    writes = ready.rank == 0
    log = MetricsLog(options.output_dir, steps_kept=done) if writes else None
    reporter = Reporter(done=done, total=options.steps, log_every=options.log_every) if writes else None
    if reporter:
        reporter.say(_opening(job, ready, done))
    try:
        history, loss_first, checkpoint_s = _loop(job, ready, identity, done, log, reporter, stop_signal)
    finally:
        if reporter:
            reporter.close()
        if log:
            log.close()
    export_model(ready.model, options.model_dir, options.output_dir / MODEL_FOLDER, DTYPES[job.strategy.precision])
    if not history:
        return None
    # After the last step: what a checkpoint or the export gathers is no part of training.
    peak = torch.tensor(history[-1].peak_memory_bytes, dtype=torch.int64)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    measured = Measurement(
        plan_hash=job.plan_hash,
        model=job.spec,
        workload=job.workload,
        strategy=job.strategy,
        checkpoint_s=checkpoint_s,
        peak_memory_bytes=int(peak),
        loss_first=_finite(loss_first),
        loss_last=_finite(history[-1].loss),
        steps=options.steps - done,
        environment=environment(device),
        **steady_state(history, options.steps - done),
    )
    if writes:
        measured.save(options.output_dir)
    return measured


def build(
    spec: ModelSpec, strategy: Strategy, mesh: DeviceMesh, device: torch.device, options: RunOptions
) -> tuple[CausalLm, SyncPolicy]:
    """The model as ``strategy`` says, on ``device``, with the weights that ``options`` name.

    It is built on the meta device, sharded, then given memory: no rank ever holds more than its part.
    """
    with torch.device("meta"):
        model = CausalLm(spec)
    policy = parallelize(model, strategy, mesh)
    model.to_empty(device=device)
    model.reset_buffers(device)
    if options.init == "random":
        init_random(model, options.seed)
    else:
        load_pretrained(model, options.model_dir)
    model.train()
    return model, policy


def _set_up(job: Job, cache: TokenCache, device: torch.device) -> _Ready:
    spec, workload, strategy, options = job.spec, job.workload, job.strategy, job.options
    check_strategy(spec, strategy)
    if strategy.global_batch_size != workload.global_batch_size:
        raise UsageError(
            f"micro_batch_size*grad_accum*dp = {strategy.micro_batch_size}*{strategy.grad_accum}*{strategy.dp} = "
            f"{strategy.global_batch_size} is not the workload's global_batch_size={workload.global_batch_size}. "
            f"Tune the plan again."
        )
    if strategy.precision != workload.precision:
        raise UsageError(
            f"precision={strategy.precision} is not the workload's {workload.precision}. Tune the plan again."
        )
    if workload.lora is not None:
        raise UsageError("lora is set, but the native executor trains all weights. Plan without it.")
    if workload.seq_len > spec.max_position_embeddings:
        raise UsageError(
            f"seq_len={workload.seq_len} is more than max_position_embeddings={spec.max_position_embeddings} of "
            f"{spec.name}. Plan with a shorter seq_len."
        )
    data = StepData(
        cache,
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        vocab_size=spec.vocab_size,
        packing=strategy.packing,
        seed=options.seed,
    )
    mesh = build_mesh(strategy, device.type)
    torch.manual_seed(options.seed)
    model, policy = build(spec, strategy, mesh, device, options)
    optimizer = build_optimizer(model.parameters(), options, device.type)
    share = data.share(0, dp_rank=dp_rank(mesh), dp=strategy.dp, grad_accum=strategy.grad_accum)
    seen = applied.observed(model, optimizer, mesh, policy, data, share)
    wanted = applied.expected(model, strategy, device.type, workload.seq_len)
    applied.verify(seen, wanted, options.output_dir, writes=dist.get_rank() == 0)
    return _Ready(model, optimizer, policy, mesh, data, device)


def _identity(job: Job, cache: TokenCache) -> dict[str, Any]:
    """What two runs must share for one to continue the other: together they decide the data of every step."""
    return {
        "model": job.spec.model_dump(mode="json", exclude={"name"}),
        "data": cache.key,
        "seq_len": job.workload.seq_len,
        "global_batch_size": job.workload.global_batch_size,
        "packing": job.strategy.packing,
        "seed": job.options.seed,
    }


def _resume(ready: _Ready, options: RunOptions, identity: dict[str, Any]) -> int:
    """Steps already done, with the state after them loaded; 0 for a fresh start."""
    if ready.rank == 0:
        checkpoint.clean(options.output_dir)
    found: list[Any] = [checkpoint.newest(options.output_dir) if options.resume and ready.rank == 0 else None]
    dist.broadcast_object_list(found, src=0)  # one rank looks, so that all take the same
    if found[0] is None:
        return 0
    checkpoint.check_same_job(found[0], identity)
    checkpoint.load(found[0], ready.model, ready.optimizer)
    return int(found[0].step)


def _opening(job: Job, ready: _Ready, done: int) -> str:
    s, o = job.strategy, job.options
    start = f"resuming after step {done}" if done else f"starting from {o.init} weights"
    if o.resume and not done:
        start += f" (no complete checkpoint in {o.output_dir / checkpoint.FOLDER})"
    return (
        f"{job.spec.name}: {s.world_size} x {ready.device.type}, sharding {s.sharding}, {s.precision}; "
        f"{len(ready.data.rows)} sequences of {job.workload.seq_len}, {ready.data.fill_frac:.1%} full; {start}"
    )


def _loop(
    job: Job,
    ready: _Ready,
    identity: dict[str, Any],
    done: int,
    log: MetricsLog | None,
    reporter: Reporter | None,
    stop_signal: Callable[[], int],
) -> tuple[list[StepMetrics], float, float]:
    """Runs the steps left. Returns the last of them, the first one's loss, and the mean seconds of a checkpoint."""
    options = job.options
    history: deque[StepMetrics] = deque(maxlen=_KEPT_STEPS)
    loss_first = math.nan
    saves: list[float] = []
    bad_steps = 0

    def save(steps: int) -> None:
        began = time.perf_counter()
        checkpoint.save(
            options.output_dir, steps, ready.model, ready.optimizer, job=identity, keep=options.keep_checkpoints
        )
        saves.append(time.perf_counter() - began)

    for step in range(done, options.steps):
        metrics, signal_number = _step(job, ready, step, stop_signal())
        history.append(metrics)
        loss_first = metrics.loss if step == done else loss_first
        if log and reporter:
            log.write(metrics)
            reporter.step(metrics)
        bad_steps = bad_steps + 1 if metrics.skipped else 0
        if bad_steps == _MAX_BAD_STEPS:
            raise TrainplanError(
                f"loss or gradient was not finite in {bad_steps} steps in a row, up to step {step + 1}; the weights "
                f"are as before them. Use a smaller learning rate or more warm-up, or look at the data of these steps."
            )
        finished = step + 1
        due = options.checkpoint_every and finished % options.checkpoint_every == 0
        if due or signal_number or finished == options.steps:
            save(finished)
        if signal_number and finished < options.steps:
            raise Interrupted(
                f"stopped after step {finished} of {options.steps}, checkpoint saved in "
                f"{options.output_dir / checkpoint.FOLDER}. Continue with --resume.",
                signal_number,
            )
    return list(history), loss_first, sum(saves) / len(saves) if saves else 0.0


def _step(job: Job, ready: _Ready, step: int, signal_number: int) -> tuple[StepMetrics, int]:
    """One optimizer step. Returns its metrics and the signal that the ranks agreed to obey after it, 0 = none."""
    strategy, options = job.strategy, job.options
    began = time.perf_counter()
    share = ready.data.share(step, dp_rank=dp_rank(ready.mesh), dp=strategy.dp, grad_accum=strategy.grad_accum)
    data_wait_s = time.perf_counter() - began
    tokens, loss_tokens, signal_number = _agree(share, signal_number)
    loss = _forward_backward(ready, share, loss_tokens)
    norm = torch.nn.utils.clip_grad_norm_(ready.model.parameters(), options.max_grad_norm or math.inf)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    dist.all_reduce(loss)
    loss_value, norm_value = torch.stack((loss, norm.to(loss))).tolist()
    skipped = not (math.isfinite(loss_value) and math.isfinite(norm_value))
    rate = learning_rate(step, options)
    if not skipped:
        set_learning_rate(ready.optimizer, rate)
        ready.optimizer.step()
    ready.optimizer.zero_grad(set_to_none=True)
    if ready.device.type == "cuda":
        torch.cuda.synchronize(ready.device)
    step_time_s = time.perf_counter() - began
    metrics = StepMetrics(
        step=step + 1,
        loss=loss_value,
        learning_rate=rate,
        grad_norm=norm_value,
        step_time_s=step_time_s,
        tokens=tokens,
        padded_tokens=strategy.global_batch_size * job.workload.seq_len - tokens,
        loss_tokens=loss_tokens,
        tokens_per_s=tokens / step_time_s,
        data_wait_s=data_wait_s,
        peak_memory_bytes=peak_memory_bytes(ready.device),
        skipped=skipped,
    )
    return metrics, signal_number


def _agree(share: StepShare, signal_number: int) -> tuple[int, int, int]:
    """Tokens and loss tokens of the step over all ranks, and the largest signal number that any rank saw.

    On the CPU, by gloo, also where training is on GPUs: the host needs the answer, and the GPU must not wait for it.
    """
    counts = torch.zeros(2 + dist.get_world_size(), dtype=torch.int64)
    counts[0], counts[1], counts[2 + dist.get_rank()] = share.tokens, share.loss_tokens, signal_number
    dist.all_reduce(counts)
    return int(counts[0]), int(counts[1]), int(counts[2:].max())


def _forward_backward(ready: _Ready, share: StepShare, loss_tokens: int) -> torch.Tensor:
    """This rank's part of the step's mean loss; gradients are left on the parameters, summed over ranks."""
    total = torch.zeros((), dtype=torch.float32, device=ready.device)
    last = len(share.micro_batches) - 1
    for i, batch in enumerate(share.micro_batches):
        ready.policy.enter_micro_batch(ready.model, last=i == last)
        here = batch.to(ready.device)
        # Divided by the tokens of all ranks and micro-batches: each token weighs the same, however they are spread.
        loss = ready.model(here.input_ids, here.labels, here.position_ids, here.documents) / loss_tokens
        loss.backward()
        total += loss.detach()
    return total


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def environment(device: torch.device) -> dict[str, str]:
    """What a measurement depends on beside the plan."""
    cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "cuda": str(torch.version.cuda) if cuda else "none",
        "threads": str(torch.get_num_threads()),
        "platform": platform.platform(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
    }
