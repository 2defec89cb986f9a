"""Tiny model directories, tokenizers and data, made on the spot: nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
}
WORDS = "the quick brown fox jumps over a lazy dog while seven old wizards mix strange black quartz".split()


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
