"""Tiny model directories, tokenizers and data, made on the spot: nothing is downloaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainplan.costmodel.estimate import Estimate, Interval, StageMemory
from trainplan.costmodel.hardware import Cluster, Device, Link, Quantity
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.plan import Plan, Provenance
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Workload
from trainplan.executor.tokens import TokenSource, build_cache

VOCAB_SIZE = 384  # odd multiples of nothing: 384 / 4 ranks is whole, while 96-wide shards differ from every other size
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": False},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama3": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_theta": 500000.0, **LLAMA3_SCALING},
    },
    "llama-linear": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0},
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
    # No number of ranks divides these: shards are uneven, and the last may be empty.
    "odd": {
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "vocab_size": 389,
        "intermediate_size": 113,
    },
}
WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"),
    *("while", "seven", "old", "wizards", "mix", "strange", "black", "quartz"),
)


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json of a model with 3 layers and about 100 thousand parameters."""
    return {
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        **FAMILIES[family],
        **changes,
    }


def make_oracle(config: dict[str, Any], seed: int = 0) -> Any:
    """The transformers model of ``config`` with random weights, norms and biases included."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kept = dict(config)
    torch.manual_seed(seed)
    oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(kept.pop("model_type"), **kept), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    return oracle.eval()


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with an end-of-text token, trained on a few words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


class Tiny:
    """The helpers of this file, for tests: a conftest can't be imported."""

    families = FAMILIES
    vocab_size = VOCAB_SIZE
    config = staticmethod(tiny_config)
    oracle = staticmethod(make_oracle)
    tokenizer = staticmethod(make_tokenizer)
    write_lines = staticmethod(write_lines)
    plan: Callable[..., Plan]
    run_ranks: Callable[..., None]


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    """Tiny models, tokenizers, data and plans."""
    Tiny.plan = staticmethod(make_plan)
    Tiny.run_ranks = staticmethod(run_ranks)
    return Tiny


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives the directory of a tiny model: config.json, safetensors weights (sharded on request), a tokenizer."""
    made: dict[tuple[str, bool], Path] = {}

    def make(family: str, *, sharded: bool = False) -> Path:
        if (family, sharded) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{'sharded' if sharded else 'single'}")
            oracle = make_oracle(tiny_config(family))
            oracle.save_pretrained(folder, max_shard_size="150KB" if sharded else "5GB")
            make_tokenizer(folder)
            made[family, sharded] = folder
        return made[family, sharded]

    return make


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """240 documents of very different lengths, of words that follow each other in a learnable order."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = [{"text": " ".join(WORDS[(i + j) % len(WORDS)] for j in range(2 + (i * 37) % 90))} for i in range(240)]
    return write_lines(path, lines)


def make_plan(spec: ModelSpec, strategy: Strategy, workload: Workload, *, kind: str = "cpu") -> Plan:
    """A plan of the native backend for one small machine; its prediction is a made-up number."""

    def quantity(value: float) -> Quantity:
        return Quantity(value=value, provenance="datasheet", source="made up for a test")

    rates = {"fp32": quantity(1e11), "bf16": quantity(1e11)}
    device = Device(
        name="test",
        kind=kind,  # type: ignore[arg-type]
        arch="sm_90" if kind == "gpu" else "x86_64",
        memory_bytes=quantity(8e9),
        memory_bytes_per_s=quantity(1e10),
        peak_flops_per_s=rates,  # type: ignore[arg-type]
        matmul_flops_per_s=rates,  # type: ignore[arg-type]
        attention_flops_per_s=rates,  # type: ignore[arg-type]
        op_overhead_s=quantity(1e-5),
    )
    link = Link(
        kind="shared memory",
        all_reduce_bytes_per_s=quantity(1e9),
        all_gather_bytes_per_s=quantity(1e9),
        all_to_all_bytes_per_s=quantity(1e9),
        p2p_bytes_per_s=quantity(1e9),
        latency_s=quantity(1e-5),
    )
    ranks = strategy.world_size
    cluster = Cluster(
        name="test", device=device, num_nodes=1, gpus_per_node=ranks, scale_up=link, scale_up_domain=ranks
    )
    time_s = Interval(low=0.01, mid=0.02, high=0.04)
    memory = Interval(low=1e8, mid=2e8, high=3e8)
    stage = StageMemory(
        stage=0,
        breakdown_bytes={"parameters": 1e8},
        allocated_bytes=1e8,
        reserved_bytes=memory,
        device_bytes=memory,
    )
    estimate = Estimate(
        step_time_s=time_s,
        breakdown_s={"forward": 0.02},
        tokens_per_s=1e4,
        useful_token_frac=1.0,
        mfu=0.1,
        bubble_frac=0.0,
        exposed_comm_s=0.0,
        stages=(stage,),
        memory_limit_bytes=8e9,
        weakest_provenance="datasheet",
    )
    provenance = Provenance(trainplan_version="test", created="2026-01-01T00:00:00Z", command="test")
    return Plan(
        model=spec,
        cluster=cluster,
        workload=workload,
        backend="native",
        strategy=strategy,
        estimate=estimate,
        provenance=provenance,
    )


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """A process group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def token_cache(model_dirs: Callable[..., Path], corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tokenized corpus; all tiny models share one tokenizer."""
    return build_cache(TokenSource(corpus, model_dirs("qwen3")), tmp_path_factory.mktemp("tokens"))


def run_ranks(nproc: int, script: Path, *arguments: str, timeout_s: float = 300) -> None:
    """Runs a Python file on ``nproc`` ranks by torchrun; fails with what it printed if any rank fails."""
    command = [
        *(sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={nproc}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost", str(script), *arguments),
    ]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
