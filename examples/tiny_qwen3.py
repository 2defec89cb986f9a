"""A small Qwen3 model directory and a text corpus, made on the spot from what every machine has.

The corpus is the Python standard library's own sources; the tokenizer is trained on it; the weights are random.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

VOCAB_SIZE = 4096
HELD_OUT_EVERY = 20
END = "<|endoftext|>"


def write_corpus(path: Path, *, held_out: bool = False, max_bytes: int = 4_000_000) -> int:
    """Write standard library modules as JSONL, one ``{"text": source}`` per line, in the order of their paths.

    Args:
        path: The file to write.
        held_out: Every `HELD_OUT_EVERY`-th module, which the other corpus leaves out, instead of the rest.
        max_bytes: Stop before the sources exceed this.

    Returns:
        How many modules were written.
    """
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "site-packages", "idlelib", "encodings"}  # encodings are tables, not programs
    modules = sorted(m for m in library.rglob("*.py") if not left_out & set(m.relative_to(library).parts))
    chosen = [m for i, m in enumerate(modules) if (i % HELD_OUT_EVERY == 0) == held_out]
    written = size = 0
    with path.open("w", encoding="utf-8") as file:
        for module in chosen:
            try:
                text = module.read_text(encoding="utf-8")
            except UnicodeDecodeError:  # a few test vectors are in other encodings
                continue
            if not text.strip():
                continue
            size += len(text.encode())
            if size > max_bytes:
                break
            file.write(json.dumps({"text": text}) + "\n")
            written += 1
    return written


def make_tokenizer(corpus: Path, folder: Path) -> None:
    """Train a byte-level BPE tokenizer on the texts of ``corpus`` and save it as a Hugging Face tokenizer."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trainer = ByteLevelBPETokenizer()
    texts = (json.loads(line)["text"] for line in corpus.open(encoding="utf-8"))
    trainer.train_from_iterator(texts, vocab_size=VOCAB_SIZE, special_tokens=[END], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=trainer._tokenizer, eos_token=END, pad_token=END).save_pretrained(folder)


def make_model(folder: Path, seed: int = 0) -> int:
    """Save a random Qwen3 of about 4 million parameters with transformers; returns how many parameters it has."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def length_histogram(corpus: Path, folder: Path, seq_len: int) -> list[tuple[int, float]]:
    """(length in tokens, share of documents) of a corpus, lengths rounded up to eighths of ``seq_len``.

    A document counts as it is trained on: with the end-of-text token behind it.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    step = max(1, seq_len // 8)
    counts: dict[int, int] = {}
    for line in corpus.open(encoding="utf-8"):
        tokens = len(tokenizer.backend_tokenizer.encode(json.loads(line)["text"]).ids) + 1
        rounded = -(-tokens // step) * step
        counts[rounded] = counts.get(rounded, 0) + 1
    total = sum(counts.values())
    return [(length, count / total) for length, count in sorted(counts.items())]
