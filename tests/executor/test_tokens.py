"""From JSONL to token ids: the cache, and every kind of bad line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainplan.costmodel.errors import UsageError
from trainplan.executor.tokens import TokenSource, build_cache, open_cache


@pytest.fixture
def model_dir(model_dirs: Callable[..., Path]) -> Path:
    return model_dirs("qwen3")


def documents(folder: Path) -> list[list[int]]:
    cache = open_cache(folder)
    return [part.tolist() for part in np.split(np.asarray(cache.tokens), cache.offsets[1:-1])]


def test_documents_are_the_tokenizers_ids_and_an_end_token(model_dir: Path, tmp_path: Path, tiny: Any) -> None:
    from transformers import AutoTokenizer

    texts = ["the quick brown fox", "jumps", "Umlaute \u00e4\u00f6\u00fc \u4e2d\u6587"]
    data = tiny.write_lines(tmp_path / "data.jsonl", [{"text": text, "source": "here"} for text in texts])
    found = documents(build_cache(TokenSource(data, model_dir), tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert found == [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert [tokenizer.decode(ids[:-1]) for ids in found] == texts


def test_token_ids_are_taken_as_they_are(model_dir: Path, tmp_path: Path, tiny: Any) -> None:
    data = tiny.write_lines(tmp_path / "data.jsonl", [{"input_ids": [5, 6, 7]}, {"input_ids": [1, 2]}])
    folder = build_cache(TokenSource(data, tmp_path), tmp_path / "cache")  # no tokenizer needed
    assert documents(folder) == [[5, 6, 7], [1, 2]]
    meta = open_cache(folder).meta
    assert (meta.documents, meta.tokens, meta.max_id) == (2, 5, 7)


def test_text_and_ids_may_mix_and_another_field_may_hold_the_text(model_dir: Path, tmp_path: Path, tiny: Any) -> None:
    data = tiny.write_lines(tmp_path / "data.jsonl", [{"body": "fox"}, {"input_ids": [9, 9]}, {"body": "dog"}])
    found = documents(build_cache(TokenSource(data, model_dir, text_field="body"), tmp_path / "cache"))
    assert len(found) == 3
    assert found[1] == [9, 9]


def test_the_second_run_reads_the_cache_and_a_change_makes_a_new_one(
    model_dir: Path, tmp_path: Path, tiny: Any
) -> None:
    data = tiny.write_lines(tmp_path / "data.jsonl", [{"text": "the fox"}])
    calls: list[tuple[int, int]] = []
    source, root = TokenSource(data, model_dir), tmp_path / "cache"
    first = build_cache(source, root, lambda *at: calls.append(at))
    assert calls[-1] == (data.stat().st_size, data.stat().st_size)
    before = len(calls)
    assert build_cache(source, root, lambda *at: calls.append(at)) == first
    assert len(calls) == before  # nothing was read again
    tiny.write_lines(data, [{"text": "the dog"}])
    assert build_cache(source, root) != first
    assert build_cache(TokenSource(data, model_dir, skip_bad_lines=True), root) not in (
        first,
        build_cache(source, root),
    )


def test_another_tokenizer_makes_another_cache(model_dir: Path, tmp_path: Path, tiny: Any) -> None:
    data = tiny.write_lines(tmp_path / "data.jsonl", [{"text": "the fox"}])
    copy = Path(shutil.copytree(model_dir, tmp_path / "model"))
    first = build_cache(TokenSource(data, model_dir), tmp_path / "cache")
    assert build_cache(TokenSource(data, copy), tmp_path / "cache") == first
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "fox"}))
    assert build_cache(TokenSource(data, copy), tmp_path / "cache") != first


BAD_LINES = {
    "empty": ("", "line 2: the line is empty"),
    "blank": ("   ", "line 2: the line is empty"),
    "malformed": ('{"text": "a"', "line 2: not JSON at column"),
    "list": ('["a"]', "line 2: a list, not an object"),
    "number": ("3", "line 2: a int, not an object"),
    "missing field": ('{"body": "a", "id": 3}', "line 2: neither 'text' nor 'input_ids'.*: body, id"),
    "no field": ("{}", "line 2: neither .* fields: none"),
    "not text": ('{"text": 3}', "line 2: 'text' is a int"),
    "null": ('{"text": null}', "line 2: 'text' is a NoneType"),
    "half a pair": ('{"text": "\\ud800"}', "line 2: 'text' holds half a surrogate pair"),
    "ids of words": ('{"input_ids": ["a"]}', "line 2: 'input_ids' is not a list of token numbers"),
    "negative ids": ('{"input_ids": [-1]}', "line 2: 'input_ids'"),
    "huge ids": ('{"input_ids": [4294967296]}', "line 2: 'input_ids'"),
    "true ids": ('{"input_ids": [true]}', "line 2: 'input_ids'"),
    "deep": ("[" * 100_000, "line 2: not usable JSON"),
    "digits": ('{"text": ' + "1" * 5000 + "}", "line 2: not usable JSON"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_by_its_number_or_skipped_and_counted(
    kind: str, model_dir: Path, tmp_path: Path, tiny: Any
) -> None:
    line, message = BAD_LINES[kind]
    data = tiny.write_lines(tmp_path / "data.jsonl", [{"text": "the fox"}, line, {"text": "a dog"}])
    with pytest.raises(UsageError, match=message) as caught:
        build_cache(TokenSource(data, model_dir), tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half made is left
    cache = open_cache(build_cache(TokenSource(data, model_dir, skip_bad_lines=True), tmp_path / "cache"))
    assert (cache.meta.documents, cache.meta.skipped_lines, cache.meta.first_skipped) == (2, 1, (2,))


def test_text_that_is_not_utf8_is_named_by_line_and_byte(model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(b'{"text": "fox"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(UsageError, match=r"line 2: not UTF-8 \(byte 14 of the line\)"):
        build_cache(TokenSource(data, model_dir), tmp_path / "cache")
    cache = open_cache(build_cache(TokenSource(data, model_dir, skip_bad_lines=True), tmp_path / "cache"))
    assert cache.meta.skipped_lines == 1


def test_a_byte_order_mark_and_a_last_line_without_end_are_fine(model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(b'\xef\xbb\xbf{"text": "fox"}\r\n{"text": "dog"}')
    assert open_cache(build_cache(TokenSource(data, model_dir), tmp_path / "cache")).meta.documents == 2


def test_files_without_documents_say_so(model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: None, "does not exist"),
        (lambda: data.write_bytes(b""), "is empty"),
        (lambda: data.write_text('{"input_ids": []}\n'), "holds no document with any text"),
    ]
    for prepare, message in cases:
        prepare()
        with pytest.raises(UsageError, match=message):
            build_cache(TokenSource(data, model_dir), tmp_path / "cache")
    with pytest.raises(UsageError, match="is a folder"):
        build_cache(TokenSource(tmp_path, model_dir), tmp_path / "cache")
    data.write_text("oops\n")
    with pytest.raises(UsageError, match=r"\(1 malformed lines were skipped\)"):
        build_cache(TokenSource(data, model_dir, skip_bad_lines=True), tmp_path / "cache")


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path, tiny: Any) -> None:
    data = tiny.write_lines(tmp_path / "data.jsonl", [{"text": "fox"}])
    with pytest.raises(UsageError, match="holds no tokenizer"):
        build_cache(TokenSource(data, tmp_path), tmp_path / "cache")


def test_a_damaged_tokenizer_gives_one_line(model_dir: Path, tmp_path: Path, tiny: Any) -> None:
    copy = Path(shutil.copytree(model_dir, tmp_path / "model"))
    (copy / "tokenizer.json").write_text("{")
    data = tiny.write_lines(tmp_path / "data.jsonl", [{"text": "fox"}])
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        build_cache(TokenSource(data, copy), tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_a_damaged_cache_is_refused(model_dir: Path, tmp_path: Path, tiny: Any) -> None:
    data = tiny.write_lines(tmp_path / "data.jsonl", [{"text": "the fox"}])
    folder = build_cache(TokenSource(data, model_dir), tmp_path / "cache")
    (folder / "tokens.bin").write_bytes(b"\0" * 4)
    with pytest.raises(UsageError, match="not complete"):
        open_cache(folder)
    (folder / "offsets.npy").unlink()
    with pytest.raises(UsageError, match="is damaged"):
        open_cache(folder)


def test_stopping_while_tokenizing_leaves_nothing(model_dir: Path, tmp_path: Path, tiny: Any) -> None:
    data = tiny.write_lines(tmp_path / "data.jsonl", [{"text": "the fox"}])

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_cache(TokenSource(data, model_dir), tmp_path / "cache", stop)
    assert list((tmp_path / "cache").iterdir()) == []
