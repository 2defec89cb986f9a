"""`planner tune`: from a model, a cluster and a workload to the best plan."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainplan.planner.commands.complete import backend_names, cluster_names, model_names
from trainplan.planner.commands.output import provenance

if TYPE_CHECKING:
    from trainplan.costmodel.job import Job
    from trainplan.costmodel.plan import Plan
    from trainplan.costmodel.workload import Workload
    from trainplan.planner.board import Candidate
    from trainplan.planner.search import Pins, Result

EXAMPLES = (
    "planner tune Qwen/Qwen3-8B --cluster 8xH100 --seq-len 4096 --global-batch-size 256",
    "planner tune ./my-model --cluster local --seq-len 1024 --global-batch-size 32 --sharding parameters",
    "planner tune Qwen/Qwen3-32B --cluster 4x8xH200 --seq-len 8192 --global-batch-size 512 "
    "--backend megatron --tp 4,8 --pp 1,2 --json",
)


def tune(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(autocompletion=model_names, help="config.json, model folder, or known name."),
    ],
    cluster: Annotated[
        str, typer.Option(autocompletion=cluster_names, help="8xH100, 4x8xH200, dgx-h100:16, a YAML file, or local.")
    ],
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")],
    global_batch_size: Annotated[int, typer.Option(min=1, help="Sequences per optimizer step.")],
    backend: Annotated[
        str,
        typer.Option(autocompletion=backend_names, help="native, megatron, torchtitan, deepspeed or accelerate."),
    ] = "native",
    precision: Annotated[str, typer.Option(help="Arithmetic of the job: bf16, fp32 or fp8.")] = "bf16",
    lengths: Annotated[
        str | None,
        typer.Option(help="Document lengths and their shares: 512:0.5,4096:0.5, or a .json file of the same."),
    ] = None,
    no_packing: Annotated[bool, typer.Option("--no-packing", help="One document per sequence, padded.")] = False,
    train_tokens: Annotated[str | None, typer.Option(help="Tokens of the whole job, as in 20B.")] = None,
    lora_rank: Annotated[int | None, typer.Option(min=1, help="Train adapters of this rank only.")] = None,
    lora_alpha: Annotated[float | None, typer.Option(min=0, help="Their scale; twice the rank if left out.")] = None,
    lora_modules: Annotated[
        str | None, typer.Option(help="Projections with adapters, as in q_proj,v_proj; all if left out.")
    ] = None,
    tp: Annotated[str | None, typer.Option(help="Tensor parallel degrees.")] = None,
    sp: Annotated[str | None, typer.Option(help="Sequence parallel norms: true, false.")] = None,
    pp: Annotated[str | None, typer.Option(help="Pipeline stages.")] = None,
    vpp: Annotated[str | None, typer.Option(help="Model chunks per pipeline rank.")] = None,
    schedule: Annotated[str | None, typer.Option(help="gpipe, 1f1b, interleaved, zero-bubble, zbv, dualpipev.")] = None,
    stage_layers: Annotated[str | None, typer.Option(help="Layers of each stage, as in 20+16.")] = None,
    dp_replicate: Annotated[str | None, typer.Option(help="Replicas of the sharded group.")] = None,
    dp_shard: Annotated[str | None, typer.Option(help="Ranks that sharding splits over.")] = None,
    sharding: Annotated[str | None, typer.Option(help="none, optimizer, gradients, parameters (ZeRO 0 to 3).")] = None,
    reshard_after_forward: Annotated[str | None, typer.Option(help="Free gathered parameters: true, false.")] = None,
    cp: Annotated[str | None, typer.Option(help="Context parallel degrees.")] = None,
    cp_method: Annotated[str | None, typer.Option(help="ring, ulysses.")] = None,
    ep: Annotated[str | None, typer.Option(help="Expert parallel degrees.")] = None,
    etp: Annotated[str | None, typer.Option(help="Tensor parallel degrees of the experts.")] = None,
    rank_order: Annotated[str | None, typer.Option(help="tp-cp-dp-pp, tp-cp-pp-dp.")] = None,
    micro_batch_size: Annotated[str | None, typer.Option(help="Sequences per micro-batch and rank.")] = None,
    grad_accum: Annotated[str | None, typer.Option(help="Micro-batches per optimizer step.")] = None,
    recompute: Annotated[str | None, typer.Option(help="none, selective, full.")] = None,
    optimizer_offload: Annotated[str | None, typer.Option(help="Optimizer state in host memory: true, false.")] = None,
    loss_chunk: Annotated[str | None, typer.Option(help="Tokens whose logits exist at a time; 0 = all.")] = None,
    reduce_dtype: Annotated[str | None, typer.Option(help="Gradient reduction: fp32, bf16, int8.")] = None,
    compile: Annotated[str | None, typer.Option(help="torch.compile: true, false.")] = None,
    attention: Annotated[str | None, typer.Option(help="sdpa, flash, cudnn, eager.")] = None,
    assign: Annotated[
        list[str] | None, typer.Option("--set", help="Any other knob of a plan, as in --set prefetch_units=2.")
    ] = None,
    max_micro_batch: Annotated[int | None, typer.Option(min=1, help="Largest micro-batch to consider.")] = None,
    no_recompute: Annotated[bool, typer.Option("--no-recompute", help="Keep all activations.")] = False,
    allow: Annotated[
        str, typer.Option(help="Numerics beyond summation order: rounding (bf16 reduction), lossy (int8, fp8).")
    ] = "",
    memory_limit: Annotated[str | None, typer.Option(help="Memory per device, as in 70GiB; all if left out.")] = None,
    engine: Annotated[str, typer.Option(help="enumerate (covers all, proves its answer) or optuna.")] = "enumerate",
    gap: Annotated[
        float,
        typer.Option(min=0, max=50, help="How far from the fastest, in percent, the answer may be; 0 = not at all."),
    ] = 0.5,
    trials: Annotated[int, typer.Option(min=1, help="Trials of the optuna engine.")] = 200,
    study: Annotated[
        Path | None, typer.Option(help="Optuna study to keep the search in: a journal, or SQLite if it ends in .db.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted search, in --study or beside the plan.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that search; all give one answer.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the optuna engine.")] = 0,
    top: Annotated[int, typer.Option(min=1, help="Plans to list.")] = 10,
    pareto: Annotated[
        int, typer.Option(min=0, max=50, help="Also list up to so many plans that trade speed for memory, each proven.")
    ] = 0,
    output: Annotated[Path, typer.Option("-o", "--output", help="Plan file to write.")] = Path("plan.yaml"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Find the fastest way to train a model; write it as a plan.

    Every legal strategy within the options is priced or excluded by a bound, and the fastest that fits in memory wins.
    Knobs that are left out are free; one that is given may have several values to choose from: --tp 1,2,4.
    """
    from trainplan.costmodel.cluster_config import load_cluster
    from trainplan.costmodel.errors import UsageError
    from trainplan.costmodel.job import Job
    from trainplan.costmodel.model_config import load_model
    from trainplan.planner.arguments import check_values, choice, pinned
    from trainplan.planner.commands.output import check_plan_target, check_study_target
    from trainplan.planner.machine import check_profile

    options = {
        "tp": tp, "sp": sp, "pp": pp, "vpp": vpp, "schedule": schedule, "stage_layers": stage_layers,
        "dp_replicate": dp_replicate, "dp_shard": dp_shard, "sharding": sharding,
        "reshard_after_forward": reshard_after_forward, "cp": cp, "cp_method": cp_method, "ep": ep, "etp": etp,
        "rank_order": rank_order, "micro_batch_size": micro_batch_size, "grad_accum": grad_accum,
        "recompute": recompute, "optimizer_offload": optimizer_offload, "loss_chunk": loss_chunk,
        "reduce_dtype": reduce_dtype, "compile": compile, "attention": attention,
        "packing": "false" if no_packing else None,
    }  # fmt: skip
    choice(engine, "--engine", ("enumerate", "optuna"))
    check_plan_target(output)
    if study is not None:
        check_study_target(study)
        if study.absolute() == output.absolute():
            raise UsageError(f"--study and -o both name {study}. Give each a file of its own.")
    lora = (lora_rank, lora_alpha, lora_modules)
    workload = _workload(seq_len, global_batch_size, precision, lengths, train_tokens, lora)
    values = pinned(options, assign or ())
    check_values(backend, values)
    pins = _pins(values, max_micro_batch, allow, memory_limit, no_recompute)
    job = Job(load_model(model), load_cluster(cluster), workload)
    if cluster.strip().lower() == "local":
        check_profile(job.cluster)
    _check_limit(job, pins)
    _note_positions(job)
    how = _How(engine, gap / 100, trials, seed, study, output.with_suffix(".study"), resume, workers, top)
    result = _search(job, backend, pins, how)
    plan = _plan(job, backend, result, context)
    plan.save(output)
    limit_bytes = pins.memory_limit_bytes or plan.estimate.memory_limit_bytes
    front = _front(job, backend, pins, pareto, gap / 100)
    if as_json:
        _print_json(plan, result, front, output)
    else:
        _print(plan, result, front, output, limit_bytes)


def _workload(
    seq_len: int,
    global_batch_size: int,
    precision: str,
    lengths: str | None,
    train_tokens: str | None,
    lora: tuple[int | None, float | None, str | None],
) -> Workload:
    from typing import get_args

    from trainplan.costmodel.errors import UsageError
    from trainplan.costmodel.hardware import Precision
    from trainplan.costmodel.workload import Lora, Workload
    from trainplan.planner import arguments

    rank, alpha, modules = lora
    if rank is None and (alpha is not None or modules is not None):
        raise UsageError("--lora-alpha and --lora-modules describe adapters, but --lora-rank is missing. Give it.")
    arguments.choice(precision, "--precision", get_args(Precision))
    adapters = None
    if rank is not None:
        named = {} if modules is None else {"target_modules": tuple(word.strip() for word in modules.split(","))}
        adapters = arguments.validated(Lora, {"rank": rank, "alpha": 2.0 * rank if alpha is None else alpha, **named})
    return arguments.validated(
        Workload,
        {
            "seq_len": seq_len,
            "global_batch_size": global_batch_size,
            "precision": precision,
            "length_histogram": () if lengths is None else arguments.lengths(lengths),
            "train_tokens": None if train_tokens is None else arguments.count_of(train_tokens, "--train-tokens"),
            "lora": adapters,
        },
    )


def _pins(
    values: dict[str, tuple[Any, ...]],
    max_micro_batch: int | None,
    allow: str,
    memory_limit: str | None,
    no_recompute: bool,
) -> Pins:
    from trainplan.costmodel.errors import UsageError
    from trainplan.planner.arguments import bytes_of, choice
    from trainplan.planner.search import Pins

    asked = max(values.get("micro_batch_size", (0,)))
    if max_micro_batch is not None and asked > max_micro_batch:
        raise UsageError(f"--micro-batch-size {asked} contradicts --max-micro-batch {max_micro_batch}. Leave one out.")
    classes = frozenset(word.strip() for word in allow.split(",") if word.strip())
    for word in sorted(classes):
        choice(word, "--allow", ("rounding", "lossy"))
    return Pins(
        values=values,
        max_micro_batch=max_micro_batch,
        allow=classes,
        memory_limit_bytes=None if memory_limit is None else bytes_of(memory_limit, "--memory-limit"),
        no_recompute=no_recompute,
    )


def _check_limit(job: Job, pins: Pins) -> None:
    """Returns if the memory limit is one: a plan that needs more than a device has would only fail later.

    Raises:
        UsageError: It is above what a device has.
    """
    from trainplan.costmodel.errors import UsageError
    from trainplan.costmodel.step import memory_limit
    from trainplan.planner.render.format import size

    limit, has = pins.memory_limit_bytes, memory_limit(job)
    if limit is not None and limit > has:
        device = job.cluster.device.name
        raise UsageError(f"--memory-limit is {size(limit)}, but {device} has {size(has)}. Give less, or leave it out.")


def _note_positions(job: Job) -> None:
    if job.workload.seq_len > job.model.max_position_embeddings:
        print(
            f"note: seq_len {job.workload.seq_len} is more than the {job.model.max_position_embeddings} positions that "
            f"{job.model.name} was made for: it needs rope scaling to train well.",
            file=sys.stderr,
        )


@dataclass(frozen=True)
class _How:
    """How a search is run, as `trainplan.planner.search.tune` takes it."""

    engine: str
    gap_frac: float
    trials: int
    seed: int
    study: Path | None
    rescue: Path
    resume: bool
    workers: int
    top: int


def _search(job: Job, backend: str, pins: Pins, how: _How) -> Result:
    from trainplan.planner import search, summary
    from trainplan.planner.interrupt import Interrupted
    from trainplan.planner.render.format import size
    from trainplan.planner.render.plan import assignments
    from trainplan.planner.render.progress import shown

    try:
        with shown() as report:
            return search.tune(
                job, backend, pins,
                engine="optuna" if how.engine == "optuna" else "enumerate",
                trials=how.trials, seed=how.seed, study_path=how.study, rescue_path=how.rescue, resume=how.resume,
                top=how.top, gap_frac=how.gap_frac, workers=how.workers, on_progress=report,
            )  # fmt: skip
    except search.NothingFitsError as error:
        for of in error.nearest:
            knobs = assignments(summary.knobs(of.strategy))
            print(f"nearest: {size(of.device_bytes)} of {size(error.limit_bytes)}: {knobs}", file=sys.stderr)
        raise
    except search.Stopped as stopped:
        raise Interrupted(
            f"interrupted; the search so far is in {stopped.kept}. Give the same command with --resume to go on."
            if stopped.kept
            else "interrupted; no plan was written, and nothing was found that could be kept."
        ) from None


def _plan(job: Job, backend: str, result: Result, context: typer.Context) -> Plan:
    from trainplan.costmodel.plan import Plan

    return Plan(
        model=job.model,
        cluster=job.cluster,
        workload=job.workload,
        backend=backend,
        strategy=result.candidates[0].strategy,
        estimate=result.estimate,
        provenance=provenance(context, result.record),
    )


def _front(job: Job, backend: str, pins: Pins, points: int, gap_frac: float) -> list[Candidate]:
    if not points:
        return []
    from trainplan.planner.pareto import front

    return list(front(job, backend, pins, points=points, gap_frac=gap_frac))


def _print_json(plan: Plan, result: Result, front: list[Candidate], output: Path) -> None:
    from trainplan.planner.commands.output import plan_document, print_json

    def row(candidate: Candidate) -> dict[str, Any]:
        return {
            "predicted_step_s": candidate.step_s,
            "device_bytes": candidate.device_bytes,
            "strategy": candidate.strategy.model_dump(mode="json"),
        }

    print_json(
        {
            "plan": plan_document(plan),
            "candidates": [row(candidate) for candidate in result.candidates],
            "pareto": [row(candidate) for candidate in front],
            "search": result.record.model_dump(mode="json"),
            "plan_file": str(output),
        }
    )


def _print(plan: Plan, result: Result, front: list[Candidate], output: Path, limit_bytes: float) -> None:
    from trainplan.planner.render import plan as screen
    from trainplan.planner.render.console import console, line
    from trainplan.planner.summary import differing

    to = console()
    screen.print_job(to, plan)
    screen.print_strategy(to, plan.strategy)
    screen.print_estimate(to, plan, limit_bytes)
    screen.print_breakdown(to, plan.estimate)
    screen.print_memory(to, plan.estimate, limit_bytes)
    screen.print_rivals(to, differing(result.candidates))
    if front:
        screen.print_front(to, front)
    screen.print_search(to, result.record)
    to.print()
    line(to, f"Plan {plan.plan_hash} written to {output}")
    if plan.backend == "native" and plan.cluster.num_nodes == 1:
        line(to, f"Run it:     {run_command(output)}")
    line(to, f"Explain it: planner explain {shlex.quote(str(output))}")


def run_command(plan_file: Path) -> str:
    """The command that trains a plan, with placeholders for what the plan does not know."""
    return f"planner run {shlex.quote(str(plan_file))} --model-dir DIR --data FILE.jsonl --output DIR --steps N"
