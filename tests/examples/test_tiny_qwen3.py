"""The small model and corpus that the demo makes on the spot."""

from __future__ import annotations

import json
import sysconfig
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from trainplan.costmodel.model_config import load_model

if TYPE_CHECKING:
    from tests.examples.conftest import Made

# By hand: an embedding that is also the output; of 4 layers q and o, k and v of half the width, the norms of a head of
# q and k, three matrices of the MLP and two norms; a last norm.
PARAMETERS = 4096 * 256 + 4 * (2 * 256 * 256 + 2 * 256 * 128 + 2 * 32 + 3 * 256 * 768 + 2 * 256) + 256


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def library(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> Path:
    """A standard library of these modules, each with a text of its own of 20 bytes."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}".ljust(19) + "\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda kind: str(folder))
    return folder


def test_a_corpus_is_the_same_every_time(tiny_qwen3: ModuleType, tmp_path: Path) -> None:
    for name in ("a", "b"):
        tiny_qwen3.write_corpus(tmp_path / name, max_bytes=300_000)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_corpora_are_whole_modules_and_share_none(tiny_qwen3: ModuleType, tmp_path: Path) -> None:
    count = tiny_qwen3.write_corpus(tmp_path / "train")
    held_out = tiny_qwen3.write_corpus(tmp_path / "held-out", held_out=True)
    train, unseen = texts(tmp_path / "train"), texts(tmp_path / "held-out")
    assert (len(train), len(unseen)) == (count, held_out)
    assert unseen
    assert set(train).isdisjoint(unseen)
    assert all(text.strip() for text in train + unseen)
    size = sum(len(text.encode()) for text in train)
    assert 1_000_000 < size <= 4_000_000
    modules = {path.read_text() for path in Path(sysconfig.get_path("stdlib")).glob("a*.py")}
    assert modules & set(train)


def test_every_twentieth_module_is_held_out(
    tiny_qwen3: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(tmp_path / "lib", monkeypatch, *(f"m{i:02}.py" for i in range(45)))
    assert tiny_qwen3.write_corpus(tmp_path / "train") == 42
    assert tiny_qwen3.write_corpus(tmp_path / "unseen", held_out=True) == 3
    assert [text.split()[1] for text in texts(tmp_path / "unseen")] == ["m00.py", "m20.py", "m40.py"]


def test_only_programs_count_wherever_the_library_lies(
    tiny_qwen3: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder called test above the library is not one of its tests."""
    skipped = ("test/a.py", "json/tests/b.py", "site-packages/c.py", "idlelib/d.py", "encodings/e.py")
    folder = library(tmp_path / "test" / "lib", monkeypatch, *skipped, "held.py", "json/kept.py", "os.py")
    (folder / "latin.py").write_bytes(b"# \xe9\n")
    (folder / "nothing.py").write_text("\n")
    assert tiny_qwen3.write_corpus(tmp_path / "train") == 2
    assert [text.split()[1] for text in texts(tmp_path / "train")] == ["json/kept.py", "os.py"]


@pytest.mark.parametrize(("max_bytes", "count"), [(59, 2), (60, 3), (79, 3), (0, 0)])
def test_a_corpus_ends_before_its_limit_in_bytes(
    tiny_qwen3: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_bytes: int, count: int
) -> None:
    """Two-byte characters count twice."""
    folder = library(tmp_path / "lib", monkeypatch, *(f"m{i}.py" for i in range(5)))
    (folder / "m1.py").write_text("\u00e9" * 10, encoding="utf-8")
    assert tiny_qwen3.write_corpus(tmp_path / "train", max_bytes=max_bytes) == count


def test_the_model_loads_in_transformers_and_in_the_planner_with_equal_counts(made: Made) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(made.model)
    assert made.parameters == sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS
    spec = load_model(str(made.model))
    assert spec.parameters() == PARAMETERS
    assert (spec.family, spec.num_layers, spec.tie_word_embeddings) == ("qwen3", 4, True)


def test_a_seed_decides_the_weights(tiny_qwen3: ModuleType, made: Made, tmp_path: Path) -> None:
    for name, seed in (("same", 0), ("other", 1)):
        tiny_qwen3.make_model(tmp_path / name, seed=seed)
    same, other, first = (path / "model.safetensors" for path in (tmp_path / "same", tmp_path / "other", made.model))
    assert same.read_bytes() == first.read_bytes()
    assert other.read_bytes() != first.read_bytes()


def test_the_tokenizer_loses_nothing_and_fits_the_model(made: Made) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made.model)
    assert len(tokenizer) == load_model(str(made.model)).vocab_size
    assert tokenizer.eos_token == "<|endoftext|>"
    for text in (*texts(made.corpus)[:3], "\u00e9\u4e16 \U0001f600\t\n  x"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = tokenizer(texts(made.corpus)[0])["input_ids"]
    assert len(ids) < len(texts(made.corpus)[0].encode()) / 2  # it has learned more than bytes


def test_the_histogram_counts_documents_with_their_end_in_eighths_of_a_sequence(
    tiny_qwen3: ModuleType, made: Made, tmp_path: Path
) -> None:
    """The end-of-text token written in a text is one token, as the letter x is: lengths are known without the code."""
    corpus = tmp_path / "corpus.jsonl"
    end = "<|endoftext|>"
    documents = ["x", end * 6, end * 7, end * 8, end * 8, end * 63, end * 64, end * 100]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    rounded = Counter([8, 8, 8, 16, 16, 64, 72, 104])  # of 2, 7, 8, 9, 9, 64, 65 and 101 tokens
    histogram = tiny_qwen3.length_histogram(corpus, made.model, 64)
    assert histogram == [(length, count / 8) for length, count in sorted(rounded.items())]


def test_the_histogram_is_that_of_what_is_trained_on(tiny_qwen3: ModuleType, made: Made, tmp_path: Path) -> None:
    """The executor's own cache of the same corpus."""
    from trainplan.executor.tokens import TokenSource, build_cache, open_cache

    cache = open_cache(build_cache(TokenSource(made.corpus, made.model), tmp_path))
    sizes = [int(end - start) for start, end in zip(cache.offsets[:-1], cache.offsets[1:], strict=True)]
    counts = Counter(-(-size // 32) * 32 for size in sizes)
    histogram = tiny_qwen3.length_histogram(made.corpus, made.model, 256)
    assert histogram == [(length, count / len(sizes)) for length, count in sorted(counts.items())]
