"""The files of examples/, which is no package, as modules; and a small corpus, tokenizer and model made by them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_qwen3() -> Iterator[ModuleType]:
    """examples/tiny_qwen3.py, under the name by which the demo imports it."""
    module = load("tiny_qwen3")
    sys.modules["tiny_qwen3"] = module
    yield module
    del sys.modules["tiny_qwen3"]


@pytest.fixture
def demo(tiny_qwen3: ModuleType) -> ModuleType:
    """examples/demo.py, fresh for every test."""
    return load("demo")


@dataclass(frozen=True)
class Made:
    """What the demo makes before it measures, of a tenth of the corpus."""

    corpus: Path
    model: Path
    parameters: int


@pytest.fixture(scope="session")
def made(tiny_qwen3: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    tiny_qwen3.write_corpus(folder / "corpus.jsonl", max_bytes=400_000)
    tiny_qwen3.make_tokenizer(folder / "corpus.jsonl", folder / "model")
    return Made(folder / "corpus.jsonl", folder / "model", tiny_qwen3.make_model(folder / "model"))
