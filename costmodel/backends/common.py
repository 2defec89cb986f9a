"""Rules that hold for every backend, and building blocks for those that several share."""

from __future__ import annotations

import numpy as np

from trainplan.costmodel.backends.rules import Mask, Rule, divisors
from trainplan.costmodel.job import Job
from trainplan.costmodel.strategy import Strategy, StrategyTable
from trainplan.costmodel.workload import Workload

FP8_ARCHS = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950")
"""GPUs with fp8 matrix units (NVIDIA Ada and later, AMD CDNA3 and later)."""
NVFP4_ARCHS = ("sm_100", "sm_103", "sm_120")
"""GPUs with nvfp4 matrix units (NVIDIA Blackwell)."""
NO_BF16_ARCHS = ("sm_70",)
"""GPUs without bf16 matrix units (NVIDIA Volta)."""
LOW_PRECISION_ARCHS = {"fp8": FP8_ARCHS, "nvfp4": NVFP4_ARCHS}


def _world(job: Job, t: StrategyTable) -> Mask:
    return np.asarray(t["tp"] * t["pp"] * t["cp"] * t.dp == job.cluster.num_gpus)


def _world_reason(job: Job, s: Strategy) -> str:
    return (
        f"tp*pp*cp*dp = {s.tp}*{s.pp}*{s.cp}*{s.dp} = {s.world_size} ranks, but {job.cluster.name} has "
        f"{job.cluster.num_gpus} devices: every device holds one rank. Change dp_replicate or dp_shard."
    )


def _batch(job: Job, t: StrategyTable) -> Mask:
    sequences = t["micro_batch_size"] * t["grad_accum"] * t.dp
    return np.asarray((sequences == job.workload.global_batch_size) | (t["token_budget"] > 0))


def _batch_reason(job: Job, s: Strategy) -> str:
    gbs = job.workload.global_batch_size
    if gbs % s.dp:
        return (
            f"global_batch_size={gbs} is not divisible by dp={s.dp}: ranks would train different batches. "
            f"Use dp in {divisors(gbs)}."
        )
    return (
        f"micro_batch_size*grad_accum*dp = {s.micro_batch_size}*{s.grad_accum}*{s.dp} = {s.global_batch_size}, not "
        f"global_batch_size={gbs}. With dp={s.dp} use micro_batch_size in {divisors(gbs // s.dp)}."
    )


def _heads(job: Job, t: StrategyTable) -> Mask:
    heads = np.gcd(job.model.num_heads, _linear_heads(job))
    return np.asarray(heads % t["tp"] == 0)


def _linear_heads(job: Job) -> int:
    return job.model.linear_attention.num_key_heads if job.model.linear_attention else 0


def _heads_reason(job: Job, s: Strategy) -> str:
    heads = int(np.gcd(job.model.num_heads, _linear_heads(job)))
    return (
        f"tp={s.tp} does not divide num_heads={job.model.num_heads} of {job.model.name}: a rank would hold part of a "
        f"head. Use tp in {divisors(heads)}."
    )


def kv_heads(replicate: bool) -> Rule:
    """Tp divides the key-value heads; with ``replicate`` a multiple of them also runs, each head on several ranks."""

    def holds(job: Job, t: StrategyTable) -> Mask:
        kv = job.model.num_kv_heads
        return np.asarray((kv % t["tp"] == 0) | (replicate & (t["tp"] % kv == 0)))

    def reason(job: Job, s: Strategy) -> str:
        also = f" or a multiple of {job.model.num_kv_heads}" if replicate else ""
        return (
            f"tp={s.tp} does not divide num_kv_heads={job.model.num_kv_heads} of {job.model.name}: key-value heads "
            f"can't be split evenly. Use tp in {divisors(job.model.num_kv_heads)}{also}."
        )

    return Rule("kv_heads", holds, reason)


def _ffn_widths(job: Job) -> int:
    moe = job.model.moe
    return int(np.gcd(job.model.ffn_hidden_size or 0, moe.shared_ffn_hidden_size if moe else 0))


def _ffn(job: Job, t: StrategyTable) -> Mask:
    experts = job.model.moe.ffn_hidden_size if job.model.moe else 0
    return np.asarray((_ffn_widths(job) % t["tp"] == 0) & (experts % t["etp"] == 0))


def _ffn_reason(job: Job, s: Strategy) -> str:
    return (
        f"tp={s.tp} or etp={s.etp} does not divide the feed-forward width of {job.model.name} "
        f"(ffn_hidden_size={job.model.ffn_hidden_size}). Use a degree that divides it."
    )


VOCAB = Rule(
    "vocab",
    lambda job, t: job.model.vocab_size % t["tp"] == 0,
    lambda job, s: (
        f"tp={s.tp} does not divide vocab_size={job.model.vocab_size}: embedding rows can't be split "
        f"evenly. Use tp in {[d for d in divisors(job.model.vocab_size) if d <= 64]}."
    ),
)


def _layers(job: Job, t: StrategyTable) -> Mask:
    stages, n = t["pp"] * t["vpp"], job.model.num_layers
    explicit = t.mapped("stage_layers", lambda v: -1 if v is None else sum(v) if min(v) > 0 else 0)
    length = t.mapped("stage_layers", lambda v: 0 if v is None else len(v))
    balanced = (explicit == -1) & (stages <= n) & (n % stages == 0)
    return np.asarray(balanced | ((explicit == n) & (length == stages)))


def _layers_reason(job: Job, s: Strategy) -> str:
    n, stages = job.model.num_layers, s.pp * s.vpp
    if s.stage_layers is not None:
        return (
            f"stage_layers={list(s.stage_layers)} must have pp*vpp={stages} entries of at least 1 that add up to "
            f"num_layers={n} of {job.model.name}."
        )
    return (
        f"pp*vpp={stages} does not divide num_layers={n} of {job.model.name}: stages would be uneven. Use pp*vpp in "
        f"{divisors(n)}, or give stage_layers."
    )


def _chunks(_: Job, t: StrategyTable) -> Mask:
    vpp = t["vpp"]
    return np.asarray(
        np.select(
            [
                t.chosen("schedule", "gpipe", "1f1b"),
                t.chosen("schedule", "interleaved"),
                t.chosen("schedule", "zbv", "dualpipev"),
            ],
            [vpp == 1, vpp >= 2, vpp == 2],
            default=np.ones((), dtype=bool),
        ).astype(bool)
    )


def _chunks_reason(_: Job, s: Strategy) -> str:
    needs = {
        "gpipe": "vpp=1",
        "1f1b": "vpp=1",
        "interleaved": "vpp of at least 2",
        "zbv": "vpp=2",
        "dualpipev": "vpp=2",
    }
    return f"schedule {s.schedule} with vpp={s.vpp}: its order is defined for {needs.get(s.schedule, 'any vpp')}."


def micro_batches(megatron: bool) -> Rule:
    """How many micro-batches each schedule needs.

    Args:
        megatron: Its rules: 1F1B takes any number, interleaved whole groups of pp. Otherwise PyTorch's: 1F1B needs pp,
            interleaved runs in equal rounds of at least pp.
    """

    def holds(_: Job, t: StrategyTable) -> Mask:
        m, pp = t["grad_accum"], t["pp"]
        rounds = np.maximum(1, m // pp)
        grouped = m % pp == 0 if megatron else m % rounds == 0
        kinds = [
            t.chosen("schedule", "1f1b"),
            t.chosen("schedule", "interleaved", "zero-bubble"),
            t.chosen("schedule", "dualpipev"),
        ]
        return np.asarray(
            (pp == 1)
            | np.select(
                kinds, [m >= pp * (not megatron), grouped, m >= 2 * pp], default=np.ones((), dtype=bool)
            ).astype(bool)
        )

    def reason(_: Job, s: Strategy) -> str:
        many = f"a multiple of pp={s.pp}" if megatron else f"a multiple of max(1, grad_accum // {s.pp})"
        needs = {"1f1b": f"at least pp={s.pp}", "dualpipev": f"at least 2 pp={2 * s.pp}"}.get(s.schedule, many)
        return (
            f"schedule {s.schedule} with grad_accum={s.grad_accum} micro-batches: it needs {needs}. "
            "Use a smaller micro_batch_size or pp."
        )

    return Rule("micro_batches", holds, reason)


def _sequence(job: Job, t: StrategyTable) -> Mask:
    cp_parts = np.where(t["cp"] > 1, 2 * t["cp"], 1)
    return np.asarray(job.workload.seq_len % (cp_parts * np.where(t["sp"], t["tp"], 1)) == 0)


def _sequence_reason(job: Job, s: Strategy) -> str:
    parts = (2 * s.cp if s.cp > 1 else 1) * (s.tp if s.sp else 1)
    return (
        f"seq_len={job.workload.seq_len} is not divisible by {parts} (2*cp for balanced causal halves, times tp with "
        f"sp). Use a seq_len that is a multiple of {parts}."
    )


def _ulysses(job: Job, t: StrategyTable) -> Mask:
    split = t["tp"] * t["cp"]
    fits = (job.model.num_heads % split == 0) & (job.model.num_kv_heads % split == 0)
    return np.asarray((t["cp"] == 1) | t.chosen("cp_method", "ring") | fits)


def _ulysses_reason(job: Job, s: Strategy) -> str:
    return (
        f"cp_method ulysses splits heads: tp*cp={s.tp * s.cp} must divide num_heads={job.model.num_heads} and "
        f"num_kv_heads={job.model.num_kv_heads}. Use ring or a smaller degree."
    )


def _experts(job: Job, t: StrategyTable) -> Mask:
    if job.model.moe is None:
        return np.asarray((t["ep"] == 1) & (t["etp"] == 1))
    ranks = t["tp"] * t["cp"] * t.dp
    return np.asarray((job.model.moe.num_experts % t["ep"] == 0) & (ranks % (t["ep"] * t["etp"]) == 0))


def _experts_reason(job: Job, s: Strategy) -> str:
    if job.model.moe is None:
        return f"ep={s.ep}, etp={s.etp}: {job.model.name} has no experts. Use ep=1 and etp=1."
    return (
        f"ep={s.ep}, etp={s.etp}: ep must divide num_experts={job.model.moe.num_experts} and ep*etp must divide the "
        f"{s.tp * s.cp * s.dp} ranks of a pipeline stage."
    )


def _precision(job: Job, t: StrategyTable) -> Mask:
    allowed = t.chosen("precision", job.workload.precision)
    for low, archs in LOW_PRECISION_ARCHS.items():
        chosen = t.chosen("precision", low)
        allowed = (allowed | chosen) & (~chosen | (job.cluster.device.arch in archs))
    return allowed & ~(t.chosen("precision", "bf16") & (job.cluster.device.arch in NO_BF16_ARCHS))


def _precision_reason(job: Job, s: Strategy) -> str:
    if s.precision in LOW_PRECISION_ARCHS:
        device = job.cluster.device
        return f"precision {s.precision}: {device.name} ({device.arch}) has no {s.precision} matrix units. Use bf16."
    if s.precision == "bf16" and job.cluster.device.arch in NO_BF16_ARCHS:
        return f"precision bf16: {job.cluster.device.name} has no bf16 matrix units. Use fp32."
    asked = job.workload.precision
    return f"precision {s.precision} is not the workload's {asked}. Use that, or fp8 where the GPU has it."


def _recompute(job: Job, t: StrategyTable) -> Mask:
    named = t.mapped("recompute_modules", len) > 0
    length = t.mapped("recompute_layers", len)
    most = t.mapped("recompute_layers", lambda v: max(v, default=0))
    room = np.where(
        t.mapped("stage_layers", lambda v: v is None),
        job.model.num_layers // (t["pp"] * t["vpp"]),
        job.model.num_layers,
    )
    counted = (length == 0) | ((length == t["pp"] * t["vpp"]) & (most <= room))
    return np.asarray((t.chosen("recompute", "selective") == named) & counted)


def _recompute_reason(job: Job, s: Strategy) -> str:
    if (s.recompute == "selective") != bool(s.recompute_modules):
        named = list(s.recompute_modules)
        return f"recompute {s.recompute} with recompute_modules={named}: only selective names modules, and must."
    return (
        f"recompute_layers={list(s.recompute_layers)} must be empty or have pp*vpp={s.pp * s.vpp} counts, none above "
        "the layers of its stage."
    )


def micro_batch_tokens(workload: Workload, t: StrategyTable) -> np.ndarray:
    """Tokens of a micro-batch on one rank, before tp, after cp."""
    return np.asarray(t["micro_batch_size"] * workload.seq_len // t["cp"])


LOSS_CHUNK = Rule(
    "loss_chunk",
    lambda job, t: (t["loss_chunk"] == 0) | (t["loss_chunk"] < micro_batch_tokens(job.workload, t)),
    lambda job, s: (
        f"loss_chunk={s.loss_chunk} is not below the {s.micro_batch_size * job.workload.seq_len // s.cp} "
        "tokens of a micro-batch: it would change nothing. Use 0 or a smaller chunk."
    ),
)

NO_LINEAR_CP = Rule(
    "linear_cp",
    lambda job, t: (t["cp"] == 1) | ("linear" not in job.model.attention_pattern),
    lambda job, s: (
        f"cp={s.cp}: the state of {job.model.name}'s linear-attention layers runs along the sequence. Use cp=1."
    ),
)

NO_TIED_PP = Rule(
    "tied_pp",
    lambda job, t: (t["pp"] == 1) | (not job.model.tie_word_embeddings),
    lambda job, s: (
        f"pp={s.pp}: {job.model.name} ties its embeddings, and nothing joins the gradients of its ends. Use pp=1."
    ),
)

ONE_MESH_AXIS = Rule(
    "sharding_groups",
    lambda job, t: t.chosen("sharding", "none") == (t["dp_shard"] == 1),
    lambda job, s: (
        f"sharding {s.sharding} with dp_shard={s.dp_shard}: sharding needs dp_shard above 1, and none needs 1."
    ),
)

RESHARD = Rule(
    "reshard",
    lambda job, t: ~t["reshard_after_forward"] | t.chosen("sharding", "parameters"),
    lambda job, s: (
        f"reshard_after_forward with sharding {s.sharding}: only gathered parameters can be freed. "
        "Use sharding parameters."
    ),
)

EAGER_CP = Rule(
    "attention_cp",
    lambda job, t: (t["cp"] == 1) | ~t.chosen("attention", "eager"),
    lambda job, s: f"attention eager with cp={s.cp}: it needs the whole sequence on one rank. Use another, or cp=1.",
)

ASYNC_TP_NEEDS_SP = Rule(
    "overlap_tp",
    lambda job, t: ~t["overlap_tp"] | t["sp"],
    lambda job, s: "overlap_tp without sp: there is no gather or scatter of the sequence to overlap. Set sp.",
)

RULES: tuple[Rule, ...] = (
    Rule("world_size", _world, _world_reason),
    Rule("global_batch", _batch, _batch_reason),
    Rule("heads", _heads, _heads_reason),
    Rule("ffn", _ffn, _ffn_reason),
    Rule("layers", _layers, _layers_reason),
    Rule("chunks", _chunks, _chunks_reason),
    Rule("sequence", _sequence, _sequence_reason),
    Rule("ulysses", _ulysses, _ulysses_reason),
    Rule("experts", _experts, _experts_reason),
    Rule("precision", _precision, _precision_reason),
    Rule("recompute", _recompute, _recompute_reason),
    LOSS_CHUNK,
    ONE_MESH_AXIS,
    RESHARD,
)
