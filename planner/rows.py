"""What does a published measurement say was run? A row of a measurements file as a job, a stack and a strategy.

Nothing is guessed: a row that leaves something open, or contradicts itself, is skipped with the field named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.errors import TrainplanError, UsageError
from trainplan.costmodel.files import explain, read_text
from trainplan.costmodel.hardware import Cluster
from trainplan.costmodel.hardware_presets import default_node, gpu_names, node_facts, normal
from trainplan.costmodel.job import Job
from trainplan.costmodel.layout import balanced
from trainplan.costmodel.model import MLA, MlpKind, ModelSpec, MoE
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Lora, Workload
from trainplan.planner.frameworks import Framework, framework

GPUS = {
    "V100-32GB": "V100-SXM2-32GB",
    "A100-SXM-80GB": "A100-SXM4-80GB",
    "A100-80GB": "A100-SXM4-80GB",
    "A100-40GB": "A100-SXM4-40GB",
    "A100 (memory size not stated)": "A100-SXM4-80GB",  # time does not depend on the memory's size
    "A800-80GB": "A800-SXM4-80GB",
    "H20-96GB": "H20-SXM5-96GB",
    "H100-SXM-96GB-HBM2e-500W": "H100-SXM5-96GB-HBM2e",
    "H100-SXM-80GB": "H100-SXM5-80GB",
    "H200-SXM": "H200-SXM-141GB",
    "H200-SXM-141GB": "H200-SXM-141GB",
    "B200-SXM": "B200-SXM-180GB",
    "B200": "B200-SXM-180GB",
    "GB200": "GB200-186GB",
    "GB300": "GB300-288GB",
    "B300": "B300-SXM-288GB",
    "H100-SXM": "H100-SXM5-80GB",
    "H100-80GB": "H100-SXM5-80GB",
    "A100-SXM-40GB": "A100-SXM4-40GB",
}
"""Names that measurements use for GPUs, where they are none of `planner hardware`; a part of other power or memory type
is not one."""
SHARDING = (
    ("FSDP FULL_SHARD", "parameters"),
    ("FSDP SHARD_GRAD_OP", "gradients"),
    ("FSDP2", "parameters"),
    ("FSDP zero1", "parameters"),
    ("DeepSpeed ZeRO-3", "parameters"),
    ("DeepSpeed ZeRO-2", "gradients"),
    ("ZeRO-1", "optimizer"),
    ("Megatron distributed optimizer", "optimizer"),
    ("Megatron-FSDP", "parameters"),
    ("DDP (recipes enable", "optimizer"),
    ("FSDP", "parameters"),
    ("HSDP", "parameters"),
    ("DDP", "none"),
    ("none", "none"),
)
"""Start of ``zero_or_fsdp`` -> level; the first that fits."""
SHARDING_WORDS = (
    (r"zero[- _]?3|full[_ ]shard|fully", "parameters"),
    (r"zero[- _]?2|shard_grad_op", "gradients"),
    (r"zero[- _]?1|distributed optimizer", "optimizer"),
)
"""What else names a level, where no start does."""
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "moe_act", "mla_up_proj")
"""Megatron's names of what selective recomputation repeats, as far as they are priced."""


BACKENDS_OF_SDPA = {"cudnn": "cudnn", "flash-attn 2": "flash"}
"""``extra.attention_backend`` -> attention; anything else is what the stack's "sdpa" stands for."""


class Skip(Exception):
    """A row is not determined, or not priced; the text says by which field."""


class RowModel(BaseModel):
    """The model of a row, in the file's own names."""

    model_config = ConfigDict(extra="ignore")
    name: str
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    gated_mlp: bool | None = None
    moe: dict[str, Any] | None = None
    extra: dict[str, Any] = {}


class Row(BaseModel):
    """One measured training configuration."""

    model_config = ConfigDict(extra="ignore")
    id: str
    block: str = ""
    source_url_or_repo_path: str = ""
    model: RowModel
    gpu: str
    n_gpus: int
    gpus_per_node: int | None = None
    network: str | None = None
    seq: int | None = None
    gbs: int | None = None
    mbs: int | None = None
    tp: int | None = None
    sp: bool | None = None
    pp: int | None = None
    vpp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    zero_or_fsdp: str | None = None
    recompute: str | None = None
    precision: str | None = None
    framework: str
    task: str | None = None
    notes: str = ""
    measured: dict[str, Any] = {}
    extra: dict[str, Any] | None = None


@dataclass(frozen=True)
class Run:
    """What a row says was run."""

    job: Job
    stack: str
    strategy: Strategy


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSONL file.

    Raises:
        UsageError: The file is missing or empty, or a line is malformed (its number is named).
    """
    lines = [(number, line) for number, line in enumerate(read_lines(path), start=1) if line.strip()]
    if not lines:
        raise UsageError(f"{path}: no rows. Give a JSONL file with one measurement per line.")
    for number, line in lines:
        try:
            yield Row.model_validate(json.loads(line))
        except ValidationError as exc:
            raise UsageError(f"{path}, line {number}: {explain(exc)} See the schema of measurement rows.") from None
        except ValueError as exc:
            raise UsageError(f"{path}, line {number}: not JSON ({exc}). Mend or remove the line.") from None


def read_lines(path: Path) -> list[str]:
    """The lines of a file of any size that a person names.

    Raises:
        UsageError: It can't be read.
    """
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return read_text(path).splitlines()  # says what is wrong with it


def interpret(row: Row) -> Run:
    """The run of a row.

    Raises:
        Skip: Something is not published, contradicts itself, or is not priced.
    """
    extra = row.extra or {}
    if extra.get("duplicate_of"):
        raise Skip("duplicate of another row")
    if extra.get("exclude_from_scoring"):
        raise Skip("excluded: the source contradicts itself")
    entry = framework(row.framework, row.source_url_or_repo_path, row.task)
    if entry is None:
        raise Skip(f"framework {row.framework!r} has no software stack")
    row = _filled(row, entry)
    seq, gbs, mbs = _stated(row, "seq"), _stated(row, "gbs"), _stated(row, "mbs")
    tp, pp, cp, dp = _stated(row, "tp"), _stated(row, "pp"), row.cp or 1, _stated(row, "dp")
    if tp * pp * cp * dp != row.n_gpus:
        raise Skip(f"tp*pp*cp*dp is {tp * pp * cp * dp}, n_gpus {row.n_gpus}")
    if gbs % (mbs * dp):
        raise Skip("mbs*dp does not divide gbs")
    spec = _model(row, entry)
    cluster, precision = _cluster(row), _precision(row)
    vpp = (row.vpp or 1) if pp > 1 else 1
    sharding, shard = _sharding(row, dp)
    chosen = {key: value for key, value in entry.strategy.items() if key != "overlap_tp" or tp > 1}
    splits_sequence = chosen.pop("sp", "overlap_tp" in chosen)
    values: dict[str, Any] = {
        "tp": tp,
        # Megatron needs sequence parallelism for experts under tp, and its overlap of tensor parallelism builds on it.
        "sp": tp > 1 and bool(splits_sequence if row.sp is None else row.sp),
        "pp": pp,
        "vpp": vpp,
        "schedule": "interleaved" if vpp > 1 else "1f1b",
        "stage_layers": _stage_layers(spec, pp, vpp, entry.stack),
        "dp_replicate": dp // shard,
        "dp_shard": shard,
        "sharding": sharding,
        "reshard_after_forward": sharding == "parameters",
        "cp": cp,
        "ep": row.ep or 1,
        "etp": row.etp or 1,
        "micro_batch_size": mbs,
        "grad_accum": gbs // (mbs * dp),
        "precision": precision,
        **chosen,
        **_recompute(row),
        **_attention(row),
    }
    packed = entry.document_tokens if "packing" in row.notes else 0
    workload = Workload(
        seq_len=seq,
        global_batch_size=gbs,
        precision="bf16",
        lora=_lora(row, entry),
        length_histogram=((packed, 1.0),) if packed else (),
    )
    hooked = entry.stack_of_sharded_parameters if sharding == "parameters" else ""
    moments = "-bf16-moments" if "bf16 exp_avg" in (row.zero_or_fsdp or "") else ""
    several = entry.stack_of_several_gpus if row.n_gpus > 1 else ""
    stack = (hooked or several or entry.stack) + moments
    return Run(Job(spec, cluster, workload), stack, Strategy(**values))


def _filled(row: Row, entry: Framework) -> Row:
    """The row with what its framework's scripts set where it is silent."""
    silent = {name: value for name, value in entry.silent.items() if name != "vocab" and not getattr(row, name, None)}
    if "zero_or_fsdp" in silent and (row.task or "").endswith("lora") and row.n_gpus == 1:
        silent["zero_or_fsdp"] = "none"
    model = row.model
    if not model.vocab and "vocab" in entry.silent:
        model = model.model_copy(update={"vocab": entry.silent["vocab"]})
    return row.model_copy(update={**silent, "model": model})


def _stage_layers(spec: ModelSpec, pp: int, vpp: int, stack: str) -> tuple[int, ...] | None:
    """Layers per stage where they do not divide evenly; None where they do.

    Megatron can count the embedding and the head as a layer each, which is how an uneven model fills its stages.
    """
    stages = pp * vpp
    if pp == 1 or spec.num_layers % stages == 0:
        return None
    if (spec.num_layers + 2) % stages == 0 and stack == "megatron":
        whole = (spec.num_layers + 2) // stages
        return (whole - 1, *(whole,) * (stages - 2), whole - 1)
    if stages > spec.num_layers:
        raise Skip("pp*vpp is more than layers")
    return balanced(spec, stages)


def _lora(row: Row, entry: Framework) -> Lora | None:
    """Adapters of a row's task; rank and modules are the scripts'."""
    task = row.task or ""
    if "lora" not in task:
        return None
    return entry.lora.model_copy(update={"base_dtype": "int4"}) if "qlora" in task else entry.lora


def _attention(row: Row) -> dict[str, Any]:
    backend = str((row.extra or {}).get("attention_backend", ""))
    return {"attention": BACKENDS_OF_SDPA.get(backend, "sdpa")} if backend else {}


def _stated(row: Row, field: str) -> int:
    value = getattr(row, field)
    if not value:
        raise Skip(f"{field} is not published")
    return int(value)


def _model(row: Row, entry: Framework) -> ModelSpec:
    m = row.model
    for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
        if not getattr(m, field):
            raise Skip(f"model.{field} is not published")
    mla = _latent_attention(m)
    if not m.head_dim and mla is None:
        raise Skip("model.head_dim is not published")
    position = str(m.extra.get("position", ""))
    moe, mlp_pattern = _experts(m)
    window = re.search(r"sliding-window\((\d+)\)", str(m.extra.get("attention", "")))
    gated = bool(m.gated_mlp)
    padded = entry.pads_vocabulary * (row.tp or 1)
    try:
        return ModelSpec(
            name=m.name,
            family="moe" if moe else "llama" if gated else "gpt",
            num_layers=int(m.layers or 0),
            hidden_size=int(m.hidden or 0),
            ffn_hidden_size=m.ffn,
            num_heads=int(m.heads or 0),
            num_kv_heads=int(m.kv_heads or 0),
            head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else int(m.head_dim or 0),
            vocab_size=-(-int(m.vocab or 0) // padded) * padded,
            max_position_embeddings=int(row.seq or 1),
            tie_word_embeddings=not gated or "tied" in position,
            gated_mlp=gated,
            norm="rms" if gated else "layer",
            position="rope" if gated else "learned",
            attention_pattern=("sliding", "full") if window else ("full",),
            sliding_window=int(window.group(1)) if window else None,
            qk_norm="qwen3" in m.name.lower(),
            mlp_pattern=mlp_pattern,
            moe=moe,
            mla=mla,
        )
    except ValidationError as exc:
        raise Skip(f"model: {explain(exc)}") from None


def _latent_attention(m: RowModel) -> MLA | None:
    """Multi-head latent attention where the row gives its widths.

    Raises:
        Skip: The row names another attention without its numbers.
    """
    named = str(m.extra.get("attention", ""))
    if named == "MLA":
        return MLA(**{field: m.extra[field] for field in MLA.model_fields})
    if named and "sliding-window" not in named:
        raise Skip(f"model.extra.attention: {named} is not determined by the row")
    return None


def _experts(m: RowModel) -> tuple[MoE | None, tuple[MlpKind, ...]]:
    if not m.moe:
        return None, ("dense",)
    first = int(m.moe.get("first_dense_layers") or 0)
    moe = MoE(
        num_experts=m.moe["experts"],
        top_k=m.moe["top_k"],
        ffn_hidden_size=m.moe["expert_ffn"],
        shared_ffn_hidden_size=int(m.moe.get("shared_ffn") or 0),
    )
    dense: tuple[MlpKind, ...] = ("dense",)
    routed: tuple[MlpKind, ...] = ("moe",)
    return moe, dense * first + routed * (int(m.layers or 0) - first) if first else routed


@lru_cache(maxsize=512)
def _named_cluster(gpu: str, gpus: int, per_node: int, node_gbit_per_s: float | None) -> Cluster:
    """A preset; with the network of the row where it states one, as a share of the preset's sustained rates."""
    cluster = load_cluster(f"{gpus}x{gpu}" if gpus <= per_node else f"{gpus // per_node}x{per_node}x{gpu}")
    shape = default_node(gpu)
    if node_gbit_per_s is None or cluster.scale_out is None or shape is None:
        return cluster
    facts = node_facts()[shape.name]
    share = node_gbit_per_s / per_node / (8 * facts["scaleout_unidirectional_gbytes_per_s_per_gpu"])
    rates = {
        name: value.model_copy(update={"value": value.value * share})
        for name, value in cluster.scale_out
        if name.endswith("_per_s")
    }
    kind = f"{node_gbit_per_s / per_node:g} Gbit/s per GPU"
    link = cluster.scale_out.model_copy(update={**rates, "kind": kind})
    return cluster.model_copy(update={"scale_out": link})


NETWORKS = (
    (r"(\d+) ?x ?(\d+) ?Gb RoCE per node", 1),
    (r"(\d+)x Omni-Path (\d+) per node", 1),
    (r"()(\d+) Gbps/node", 1),
    (r"()(\d+) Gb/s [\w-]+ per GPU", 8),
)
"""Wordings of a node's network: links (blank = 1) times Gbit/s, and how many such per node."""
INFINIBAND_GBIT_PER_S = {"EDR": 100, "HDR": 200, "NDR": 400}
"""Of one adapter with four lanes."""


def _node_gbit_per_s(network: str | None) -> float | None:
    if found := re.search(r"(\d+)x (EDR|HDR|NDR) IB", network or ""):
        return int(found.group(1)) * INFINIBAND_GBIT_PER_S[found.group(2)]
    for pattern, times in NETWORKS:
        if found := re.search(pattern, network or ""):
            return float(found.group(1) or 1) * float(found.group(2)) * times
    return None


def _cluster(row: Row) -> Cluster:
    gpu = GPUS.get(row.gpu) or gpu_names().get(normal(row.gpu))
    if gpu is None:
        raise Skip(f"gpu {row.gpu!r} is not in the hardware profiles")
    per_node = row.gpus_per_node or 8
    if row.n_gpus > per_node and row.n_gpus % per_node:
        raise Skip("gpus_per_node does not divide n_gpus")
    try:
        return _named_cluster(gpu, row.n_gpus, per_node, _node_gbit_per_s(row.network))
    except TrainplanError as exc:
        raise Skip(f"cluster: {exc}") from None


def _sharding(row: Row, dp: int) -> tuple[str, int]:
    """(level, ranks that share it)."""
    if dp * (row.cp or 1) == 1:
        return "none", 1
    if row.zero_or_fsdp is None:
        raise Skip("zero_or_fsdp is not published")
    text = row.zero_or_fsdp
    level = next((level for start, level in SHARDING if text.lower().startswith(start.lower())), None)
    level = level or next((of for words, of in SHARDING_WORDS if re.search(words, text.lower())), None)
    if level is None:
        raise Skip(f"zero_or_fsdp {row.zero_or_fsdp!r} is not a level known here")
    over = re.search(r"over (\d+) GPUs", row.zero_or_fsdp)
    shard = 1 if level == "none" else min(int(over.group(1)), dp) if over else dp
    return (level if shard * (row.cp or 1) > 1 else "none"), shard


def _precision(row: Row) -> str:
    text = (row.precision or "").lower()
    if not text:
        raise Skip("precision is not published")
    if "int4" in text and "lora" not in text:
        raise Skip(f"precision {row.precision!r} is not priced")
    if "nvfp4" in text:
        return "nvfp4"
    return "fp8" if "fp8" in text else "bf16"  # fp16 runs at the rate of bf16


def _recompute(row: Row) -> dict[str, Any]:
    text = (row.recompute or "").lower()
    if not text:
        raise Skip("recompute is not published")
    if text.startswith(("none", "no ", "off", "false")) or text == "no":
        return {}
    if text.startswith("full"):
        return {"recompute": "full"}
    if "per-op" in text:
        return {"recompute": "selective", "recompute_modules": ("ops",)}
    if text.startswith("selective modules"):
        named = tuple(re.findall(r'"(\w+)"', text))
        unknown = [name for name in named if name not in RECOMPUTE_MODULES]
        if unknown:
            raise Skip(f"recompute {unknown[0]!r} is not priced")
        return {"recompute": "selective", "recompute_modules": named} if named else {}
    if text.startswith("selective"):
        return {"recompute": "selective", "recompute_modules": ("core_attn",)}
    raise Skip(f"recompute {row.recompute!r} is not priced")
