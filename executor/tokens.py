"""From a JSONL file to token ids on disk: read once, tokenized once, shared by all ranks and later runs.

A cache is a folder named by a hash of everything that decides its content. It holds ``tokens.bin`` (uint32, all
documents one after another), ``offsets.npy`` (int64, where each begins, and the end) and ``meta.json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict

from trainplan.costmodel.errors import UsageError
from trainplan.executor.files import publish, write_json

_VERSION = 1  # part of the key: a change of the format or of how documents are made ends old caches
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_BATCH_CHARACTERS = 2_000_000  # texts tokenized in one call: enough to use all cores, few enough to show progress
_MAX_ID = 2**31 - 1
_SHOWN_BAD_LINES = 5


class TokenMeta(BaseModel):
    """What is known about a cache without opening its arrays."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    documents: int
    tokens: int
    max_id: int
    skipped_lines: int
    first_skipped: tuple[int, ...]
    empty_documents: int


@dataclass(frozen=True, slots=True)
class TokenCache:
    """Documents as token ids: document ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``."""

    key: str
    meta: TokenMeta
    tokens: np.ndarray
    offsets: np.ndarray


class Encoder(Protocol):
    """Turns texts into token ids, one list each."""

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, in order."""
        ...


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Where documents come from, and how lines become documents."""

    data: Path
    model_dir: Path
    text_field: str = "text"
    skip_bad_lines: bool = False


def open_cache(folder: Path) -> TokenCache:
    """Maps a cache into memory.

    Raises:
        UsageError: It is not whole.
    """
    try:
        meta = TokenMeta.model_validate_json((folder / "meta.json").read_text(encoding="utf-8"))
        offsets = np.load(folder / "offsets.npy", allow_pickle=False)
        tokens = np.memmap(folder / "tokens.bin", dtype=np.uint32, mode="r")
    except (OSError, ValueError) as error:
        raise UsageError(f"the token cache {folder} is damaged ({error}). Delete it; it is built again.") from None
    if len(tokens) != meta.tokens or len(offsets) != meta.documents + 1:
        raise UsageError(f"the token cache {folder} is not complete. Delete it; it is built again.")
    return TokenCache(folder.name, meta, tokens, offsets)


def build_cache(source: TokenSource, root: Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """The folder of the cache for ``source`` under ``root``; tokenizes only where there is none yet.

    Args:
        source: The data file and the tokenizer.
        root: Holds one folder per cache.
        progress: Called with (bytes read, bytes in all); it may raise to stop.

    Raises:
        UsageError: The file is missing, empty or malformed (the line number is given), or there is no tokenizer.
    """
    _check_readable(source.data)
    folder = root / _key(source)
    if (folder / "meta.json").is_file():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f".tmp-{folder.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        meta = _write(source, temporary, progress)
        write_json(temporary / "meta.json", meta.model_dump(mode="json"))
        publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _check_readable(data: Path) -> None:
    if not data.is_file():
        what = "is a folder, not a file" if data.is_dir() else "does not exist"
        raise UsageError(f"the data {data} {what}. Give a JSONL file, one document per line.")
    try:
        with data.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        raise UsageError(f"the data {data} cannot be read ({error.strerror}). Check its permissions.") from None
    if empty:
        raise UsageError(f'the data {data} is empty. Write one document per line, as {{"text": "..."}}.')


def _key(source: TokenSource) -> str:
    digest = hashlib.sha256(json.dumps([_VERSION, source.text_field, source.skip_bad_lines]).encode())
    paths = [source.data, *(source.model_dir / name for name in _TOKENIZER_FILES)]
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.name if path != source.data else 'data'}:{content}\n".encode())
    return digest.hexdigest()[:24]


def _write(source: TokenSource, folder: Path, progress: Callable[[int, int], None] | None) -> TokenMeta:
    offsets = array("q", [0])
    reader = _Reader(source)
    max_id, empty = -1, 0
    size = source.data.stat().st_size
    with (folder / "tokens.bin").open("wb") as out:
        for documents in reader.batches():
            for ids in documents:
                if not ids:
                    empty += 1
                    continue
                values = np.asarray(ids, dtype=np.int64)
                max_id = max(max_id, int(values.max()))
                values.astype(np.uint32).tofile(out)
                offsets.append(offsets[-1] + len(ids))
            if progress:
                progress(reader.bytes_read, size)
    if len(offsets) == 1:
        skipped = f" ({reader.skipped} malformed lines were skipped)" if reader.skipped else ""
        raise UsageError(
            f"the data {source.data} holds no document with any text{skipped}. Check that it is the file meant."
        )
    np.save(folder / "offsets.npy", np.frombuffer(offsets, dtype=np.int64), allow_pickle=False)
    return TokenMeta(
        documents=len(offsets) - 1,
        tokens=offsets[-1],
        max_id=max_id,
        skipped_lines=reader.skipped,
        first_skipped=tuple(reader.first_skipped),
        empty_documents=empty,
    )


class _Reader:
    """Reads documents in file order, texts tokenized in batches."""

    def __init__(self, source: TokenSource) -> None:
        self.source = source
        self.bytes_read = 0
        self.skipped = 0
        self.first_skipped: list[int] = []
        self._encoder: Encoder | None = None

    def batches(self) -> Iterator[list[list[int]]]:
        """Documents as token ids, some thousands at a time."""
        pending: list[str | list[int]] = []
        characters = 0
        for document in self._documents():
            pending.append(document)
            characters += len(document)
            if characters >= _BATCH_CHARACTERS:
                yield self._encode(pending)
                pending, characters = [], 0
        if pending:
            yield self._encode(pending)

    def _documents(self) -> Iterator[str | list[int]]:
        with self.source.data.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                self.bytes_read += len(raw)
                try:
                    document = self._parse(raw, number)
                except UsageError:
                    if not self.source.skip_bad_lines:
                        raise
                    self.skipped += 1
                    if len(self.first_skipped) < _SHOWN_BAD_LINES:
                        self.first_skipped.append(number)
                    continue
                yield document

    def _parse(self, raw: bytes, number: int) -> str | list[int]:
        where = f"{self.source.data}, line {number}"
        skip = "Correct the line, or pass --skip-bad-lines to leave such lines out."
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{where}: not UTF-8 (byte {error.start + 1} of the line). {skip}") from None
        if not line.strip():
            raise UsageError(f"{where}: the line is empty. {skip}")
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{where}: not JSON at column {error.colno} ({error.msg}). {skip}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not usable JSON ({type(error).__name__}). {skip}") from None
        if not isinstance(record, dict):
            raise UsageError(f'{where}: a {type(record).__name__}, not an object such as {{"text": "..."}}. {skip}')
        field = self.source.text_field
        if field in record:
            text = record[field]
            if not isinstance(text, str):
                raise UsageError(f"{where}: {field!r} is a {type(text).__name__}, not text. {skip}")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UsageError(
                    f"{where}: {field!r} holds half a surrogate pair, which is no character. {skip}"
                ) from None
            return text
        if "input_ids" in record:
            return _checked_ids(record["input_ids"], where, skip)
        seen = ", ".join(sorted(str(key) for key in record)[:8]) or "none"
        raise UsageError(
            f"{where}: neither {field!r} nor 'input_ids'; the line has these fields: {seen}. "
            f"Name the field that holds the text with --text-field, or correct the line."
        )

    def _encode(self, documents: list[str | list[int]]) -> list[list[int]]:
        texts = [document for document in documents if isinstance(document, str)]
        if texts and self._encoder is None:
            self._encoder = _load_encoder(self.source.model_dir)
        encoded = iter(self._encoder(texts) if texts and self._encoder else ())
        return [next(encoded) if isinstance(document, str) else document for document in documents]


def _checked_ids(ids: Any, where: str, skip: str) -> list[int]:
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= _MAX_ID for i in ids):
        raise UsageError(f"{where}: 'input_ids' is not a list of token numbers (whole, not negative). {skip}")
    return ids


def _load_encoder(model_dir: Path) -> Encoder:
    """The tokenizer of ``model_dir``; it ends each document with the end-of-text token, if it has one."""
    if not any((model_dir / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UsageError(
            f"{model_dir} holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json). "
            f"Copy the model's tokenizer files there, or give data with input_ids."
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers import AutoTokenizer  # seconds to import, and needed only where there is no cache yet

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for a bad file
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"the tokenizer in {model_dir} cannot be loaded ({reason}). Copy its files again.") from None
    end = tokenizer.eos_token_id

    def encode(texts: list[str]) -> list[list[int]]:
        ids = tokenizer(texts, add_special_tokens=True, return_attention_mask=False, verbose=False)["input_ids"]
        if end is not None:
            for document in ids:
                if document and document[-1] != end:
                    document.append(end)
        return ids

    return encode


class ProgressLine:
    """A bar on a terminal, a line every ten seconds elsewhere; give it to `build_cache` and close it after."""

    def __init__(self, title: str) -> None:
        from rich.progress import Progress  # only the one rank that tokenizes needs it

        self._bar = Progress(transient=True)
        self._title = title
        self._task = self._bar.add_task(title, total=None)
        self._live = self._bar.console.is_terminal
        self._last = time.monotonic()
        if self._live:
            self._bar.start()

    def __call__(self, done: int, total: int) -> None:
        """Shows that ``done`` of ``total`` bytes are read."""
        self._bar.update(self._task, completed=done, total=total)
        if not self._live and time.monotonic() - self._last > 10:
            self._last = time.monotonic()
            print(f"{self._title}: {done / max(1, total):.0%}", flush=True)

    def close(self) -> None:
        """Removes the bar."""
        if self._live:
            self._bar.stop()
