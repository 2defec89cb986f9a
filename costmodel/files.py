"""How is a person's file read safely? Size limits, safe parsers, and errors of one line.

Every reader here raises the error class it is given, so that a broken profile and a broken model file keep their own
exit codes. Nothing in a file is ever executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from trainplan.costmodel.errors import TrainplanError, UsageError

MAX_BYTES = 5_000_000  # the largest config.json known is under 0.1 MB


def read_text(path: Path, *, error: type[TrainplanError] = UsageError) -> str:
    """The UTF-8 text of a regular file of at most 5 MB.

    Raises:
        error: if the file is missing, unreadable, not a regular file, too large or not UTF-8.
    """
    try:
        if not path.exists():
            raise error(f"{path}: no such file. Check the path.")
        if not path.is_file():
            raise error(f"{path}: not a regular file. Give the path of a file.")
        with path.open("rb") as file:  # one byte past the limit: a file that grows meanwhile stays bounded
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise error(f"{path}: cannot be read ({exc.strerror or exc}). Check its permissions.") from None
    if len(data) > MAX_BYTES:
        raise error(f"{path}: larger than {MAX_BYTES // 10**6} MB, so it is not the file meant. Check the path.")
    try:
        return data.decode("utf-8-sig")  # a byte order mark is legal in a file that a person edited
    except UnicodeDecodeError as exc:
        raise error(f"{path}: not UTF-8 text (byte {exc.start}). Save it as UTF-8.") from None


def read_json_object(path: Path, *, error: type[TrainplanError] = UsageError) -> dict[str, Any]:
    """The object in a JSON file; ``error`` says where the text stops being JSON, or what it holds instead."""
    text = read_text(path, error=error)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as exc:
        cut = exc.pos >= len(text.rstrip())
        why = "the text ends too early, so the file is truncated" if cut else exc.msg
        mend = "Copy or download it again." if cut else "Correct that place."
        raise error(f"{path}: not valid JSON at line {exc.lineno} column {exc.colno}: {why}. {mend}") from None
    except (ValueError, RecursionError) as exc:  # an integer of thousands of digits; thousands of nested brackets
        why = "nested too deeply" if isinstance(exc, RecursionError) else "a number has too many digits"
        raise error(f"{path}: not usable JSON: {why}. Check that it is the file meant.") from None
    return _an_object(value, path, error)


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that also refuses aliases (they can grow without bound) and keys given twice."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.get_mark()
            raise yaml.constructor.ConstructorError(None, None, "aliases (*name) are not allowed", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = getattr(key_node, "value", None)
            if isinstance(key, str):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} is given twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml_object(path: Path, *, error: type[TrainplanError] = UsageError) -> dict[str, Any]:
    """The mapping in a YAML file, read by a safe loader without aliases or repeated keys."""
    text = read_text(path, error=error)
    try:
        value = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader: builds plain values only
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = f" at line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise error(f"{path}: not usable YAML{where}: {exc.problem}. Correct that place.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        why = "nested too deeply" if isinstance(exc, RecursionError) else " ".join(str(exc).split())
        raise error(f"{path}: not usable YAML: {why}. Check that it is the file meant.") from None
    return _an_object(value, path, error)


def _an_object(value: object, path: Path, error: type[TrainplanError]) -> dict[str, Any]:
    if not isinstance(value, dict):
        held = "nothing" if value is None else f"a {type(value).__name__}"
        raise error(f"{path}: holds {held}, but an object of named fields is needed. Check that it is the file meant.")
    if bad := next((key for key in value if not isinstance(key, str)), None):
        raise error(f"{path}: the key {bad!r} is not text. Quote it.")
    return value


def write_yaml(value: dict[str, Any], path: Path) -> None:
    """Write a mapping as YAML so that a reader sees the old file or the whole new one, never a part.

    Raises:
        UsageError: if the folder is missing or cannot be written.
    """
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=False, width=120)
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as exc:
        raise UsageError(
            f"{path}: cannot be written ({exc.strerror or exc}). Give a path in a folder you own."
        ) from None
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes 0600; a cluster file is for sharing
        os.replace(temporary, path)
    except OSError as exc:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise UsageError(
            f"{path}: cannot be written ({exc.strerror or exc}). Check the path and the space left."
        ) from None


def explain(exc: ValidationError) -> str:
    """The first error of a pydantic validation as one line: ``device.kind: Input should be 'gpu' or 'cpu'``."""
    first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = " ".join(first["msg"].removeprefix("Value error, ").split()).rstrip(".")
    if first["type"] == "extra_forbidden":
        message = "unknown key. Check its spelling, or remove it"
    more = f" (and {exc.error_count() - 1} more)" if exc.error_count() > 1 else ""
    return f"{field}: {message}{more}." if field else f"{message}{more}."
