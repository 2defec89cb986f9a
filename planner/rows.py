"""What does a published measurement say was run? A row of a measurements file as a job, a stack and a strategy.

Nothing is guessed: a row that leaves something open, or contradicts itself, is skipped with the field named.
"""

from __future__ import annotations

import json
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
from trainplan.costmodel.job import Job
from trainplan.costmodel.layout import balanced
from trainplan.costmodel.model import ModelSpec, MoE
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Workload

GPUS = {
    "A100-SXM-80GB": "A100-SXM4-80GB",
    "A100-80GB": "A100-SXM4-80GB",
    "A100-40GB": "A100-SXM4-40GB",
    "A100 (memory size not stated)": "A100-SXM4-80GB",  # time does not depend on the memory's size
    "H100-SXM-80GB": "H100-SXM5-80GB",
    "H200-SXM": "H200-SXM-141GB",
    "H200-SXM-141GB": "H200-SXM-141GB",
    "B200-SXM": "B200-SXM-180GB",
    "B200": "B200-SXM-180GB",
    "GB200": "GB200-186GB",
}
"""Names that measurements use for the GPUs of `planner hardware`; a part of other power or memory type is not one."""
STACKS = (
    ("Megatron", "megatron"),
    ("torchtitan", "torchtitan"),
    ("Composer/llm-foundry", "accelerate"),
    ("HF Transformers + DeepSpeed", "deepspeed"),
    ("ms-swift + DeepSpeed", "deepspeed"),
)
"""Start of a framework's name -> software stack whose kernels and state it has."""
SHARDING = (
    ("FSDP FULL_SHARD", "parameters"),
    ("FSDP SHARD_GRAD_OP", "gradients"),
    ("FSDP2", "parameters"),
    ("DeepSpeed ZeRO-3", "parameters"),
    ("DeepSpeed ZeRO-2", "gradients"),
    ("ZeRO-1", "optimizer"),
    ("Megatron distributed optimizer", "optimizer"),
    ("DDP (recipes enable", "optimizer"),
    ("none", "none"),
)
"""Start of ``zero_or_fsdp`` -> level."""


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
    model: RowModel
    gpu: str
    n_gpus: int
    gpus_per_node: int | None = None
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
    stack = next((name for start, name in STACKS if row.framework.startswith(start)), None)
    if stack is None:
        raise Skip(f"framework {row.framework!r} has no software stack")
    if row.task and "lora" in row.task:
        raise Skip("task: adapters are not priced")
    seq, gbs, mbs = _stated(row, "seq"), _stated(row, "gbs"), _stated(row, "mbs")
    tp, pp, cp, dp = _stated(row, "tp"), _stated(row, "pp"), row.cp or 1, _stated(row, "dp")
    if tp * pp * cp * dp != row.n_gpus:
        raise Skip(f"tp*pp*cp*dp is {tp * pp * cp * dp}, n_gpus {row.n_gpus}")
    if gbs % (mbs * dp):
        raise Skip("mbs*dp does not divide gbs")
    spec = _model(row)
    vpp = row.vpp or 1
    stages = pp * vpp
    if stages > spec.num_layers:
        raise Skip("pp*vpp is more than layers")
    sharding = _sharding(row, dp)
    whole = sharding == "parameters"
    values: dict[str, Any] = {
        "tp": tp,
        "sp": bool(row.sp) and tp > 1,
        "pp": pp,
        "vpp": vpp if pp > 1 else 1,
        "schedule": "interleaved" if pp > 1 and vpp > 1 else "1f1b",
        "stage_layers": None if spec.num_layers % stages == 0 or pp == 1 else balanced(spec, stages),
        "dp_replicate": dp if sharding == "none" else 1,
        "dp_shard": 1 if sharding == "none" else dp,
        "sharding": sharding,
        "reshard_after_forward": whole,
        "cp": cp,
        "ep": row.ep or 1,
        "etp": row.etp or 1,
        "micro_batch_size": mbs,
        "grad_accum": gbs // (mbs * dp),
        "precision": _precision(row),
        **_recompute(row),
        **_kernels(stack),
    }
    workload = Workload(seq_len=seq, global_batch_size=gbs, precision="bf16")
    return Run(Job(spec, _cluster(row), workload), stack, Strategy(**values))


def _stated(row: Row, field: str) -> int:
    value = getattr(row, field)
    if not value:
        raise Skip(f"{field} is not published")
    return int(value)


def _model(row: Row) -> ModelSpec:
    m = row.model
    for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
        if not getattr(m, field):
            raise Skip(f"model.{field} is not published")
    attention = str(m.extra.get("attention", ""))
    if attention:
        raise Skip(f"model.extra.attention: {attention} is not determined by the row")
    position = str(m.extra.get("position", ""))
    moe = None
    if m.moe:
        first = int(m.moe.get("first_dense_layers") or 0)
        moe = MoE(
            num_experts=m.moe["experts"],
            top_k=m.moe["top_k"],
            ffn_hidden_size=m.moe["expert_ffn"],
            shared_ffn_hidden_size=int(m.moe.get("shared_ffn") or 0),
        )
        pattern = ("dense",) * first + ("moe",) * (int(m.layers or 0) - first) if first else ("moe",)
    gated = bool(m.gated_mlp)
    try:
        return ModelSpec(
            name=m.name,
            family="moe" if moe else "llama" if gated else "gpt",
            num_layers=int(m.layers or 0),
            hidden_size=int(m.hidden or 0),
            ffn_hidden_size=m.ffn,
            num_heads=int(m.heads or 0),
            num_kv_heads=int(m.kv_heads or 0),
            head_dim=int(m.head_dim or 0),
            vocab_size=int(m.vocab or 0),
            max_position_embeddings=int(row.seq or 1),
            tie_word_embeddings=not gated or "tied" in position,
            gated_mlp=gated,
            norm="rms" if gated else "layer",
            position="rope" if gated else "learned",
            mlp_pattern=pattern if moe else ("dense",),
            moe=moe,
        )
    except ValidationError as exc:
        raise Skip(f"model: {explain(exc)}") from None


@lru_cache(maxsize=512)
def _named_cluster(gpu: str, gpus: int, per_node: int) -> Cluster:
    return load_cluster(f"{gpus}x{gpu}" if gpus <= per_node else f"{gpus // per_node}x{per_node}x{gpu}")


def _cluster(row: Row) -> Cluster:
    gpu = GPUS.get(row.gpu)
    if gpu is None:
        raise Skip(f"gpu {row.gpu!r} is not in the hardware profiles")
    per_node = row.gpus_per_node or 8
    if row.n_gpus > per_node and row.n_gpus % per_node:
        raise Skip("gpus_per_node does not divide n_gpus")
    try:
        return _named_cluster(gpu, row.n_gpus, per_node)
    except TrainplanError as exc:
        raise Skip(f"cluster: {exc}") from None


def _sharding(row: Row, dp: int) -> str:
    if dp * (row.cp or 1) == 1:
        return "none"
    if row.zero_or_fsdp is None:
        raise Skip("zero_or_fsdp is not published")
    level = next((level for start, level in SHARDING if row.zero_or_fsdp.startswith(start)), None)
    if level is None:
        raise Skip(f"zero_or_fsdp {row.zero_or_fsdp!r} is not a level known here")
    return level


def _precision(row: Row) -> str:
    text = (row.precision or "").lower()
    if not text:
        raise Skip("precision is not published")
    if "nvfp4" in text or "int4" in text:
        raise Skip(f"precision {row.precision!r} is not priced")
    return "fp8" if "fp8" in text else "bf16"  # fp16 runs at the rate of bf16


def _recompute(row: Row) -> dict[str, Any]:
    text = (row.recompute or "").lower()
    if not text:
        raise Skip("recompute is not published")
    if text.startswith("none") or text == "selective modules []":
        return {}
    if text.startswith("full"):
        return {"recompute": "full"}
    if text.startswith(("selective attention", "selective")) and "modules" not in text and "per-op" not in text:
        return {"recompute": "selective", "recompute_modules": ("core_attn",)}
    if "per-op" in text:
        return {"recompute": "selective", "recompute_modules": ("ops",)}
    raise Skip(f"recompute {row.recompute!r} is not priced")


def _kernels(stack: str) -> dict[str, Any]:
    """Megatron's fused kernels; the attention of each stack's usual setting."""
    if stack == "megatron":
        return {"attention": "flash", "fused_kernels": ("cross_entropy", "norm", "rope", "swiglu")}
    return {"compile": True} if stack == "torchtitan" else {}
