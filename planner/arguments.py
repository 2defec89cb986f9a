"""What does an option's text mean? Sizes, counts, lengths and the values of knobs, as typed or as read from a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trainplan.costmodel.backends import backend
from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.files import read_text
from trainplan.costmodel.names import did_you_mean
from trainplan.costmodel.strategy import CHOICES, DEFAULT, FIELDS, TUPLES, Strategy

Checked = TypeVar("Checked", bound=BaseModel)
_UNITS: dict[str, float] = {
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
    **{unit: 1024**power for power, unit in enumerate(("b", "kib", "mib", "gib", "tib"))},
}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_TRUE, _FALSE = ("true", "on", "yes", "1"), ("false", "off", "no", "0")
_INTEGER_TUPLES = ("stage_layers", "recompute_layers")
_MOST_LENGTHS = 100_000  # distinct document lengths; more is a list of documents, not a histogram


def option(field: str) -> str:
    """A field's name as an option: ``micro_batch_size`` as ``--micro-batch-size``."""
    return "--" + field.replace("_", "-")


def choice(word: str, name: str, known: Sequence[str]) -> None:
    """Returns if ``word`` is one of ``known``.

    Raises:
        UsageError: It is not; ``name`` is the option in the message.
    """
    if word not in known:
        raise UsageError(f"{name} {word!r} is not known.{did_you_mean(word, known)} Use {', '.join(known)}.")


def validated(kind: type[Checked], values: Mapping[str, Any]) -> Checked:
    """A ``kind`` built from what a person gave.

    Raises:
        UsageError: The first value that it refuses, by the name of its option.
    """
    try:
        return kind(**values)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        named = f"{option(str(first['loc'][0]))}: " if first["loc"] else ""
        message = " ".join(first["msg"].removeprefix("Value error, ").split()).rstrip(".")
        raise UsageError(f"{named}{message}.") from None


def bytes_of(text: str, name: str) -> float:
    """``70GiB`` or ``80 GB`` as bytes.

    Raises:
        UsageError: No number, no unit, or nothing above 0; ``name`` is the option in the message.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]+)\s*", text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or not float(found[1]) > 0:
        raise UsageError(f"{name} {text!r} is not a size. Write a number above 0 with its unit, as in 70GiB or 80GB.")
    return float(found[1]) * unit


def count_of(text: str, name: str) -> int:
    """``20B``, ``1.5T``, ``1e9`` or ``4000`` as a whole number.

    Raises:
        UsageError: It is none of these, or not a whole number above 0.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE]\+?[0-9]{1,2})?)\s*([kKmMbBtT]?)\s*", text)
    value = Decimal(found[1]) * _COUNT_UNITS[found[2].lower()] if found else Decimal(0)
    if not 0 < value < 10**18 or value % 1:
        raise UsageError(f"{name} {text!r} is not a count. Write a whole number above 0, as in 4000, 1e9 or 20B.")
    return int(value)


_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def duration_of(text: str, name: str) -> float:
    """``3d``, ``36h``, ``90m`` or ``1.5w`` in seconds.

    Raises:
        UsageError: It is none of these, or nothing above 0; ``name`` is the option in the message.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([mhdw])\s*", text)
    if found is None or not float(found[1]) > 0:
        raise UsageError(f"{name} {text!r} is not a time. Write a number above 0 with its unit, as in 3d, 36h or 90m.")
    return float(found[1]) * _SECONDS[found[2]]


def lengths(text: str) -> tuple[tuple[int, float], ...]:
    """A histogram of document lengths, shortest first: ``512:0.5,4096:0.5``, or a JSON file of the same.

    The file holds an object (``{"512": 0.5}``) or a list of pairs (``[[512, 0.5]]``).

    Raises:
        UsageError: The text or file is malformed, or names a length twice.
    """
    pairs = _pairs_of_file(Path(text)) if text.endswith(".json") else _pairs_of_text(text)
    histogram: dict[int, float] = {}
    for length, share in pairs:
        if length in histogram:
            raise UsageError(f"--lengths gives length {length} twice. Add its shares up.")
        histogram[length] = share
    if not histogram or not sum(histogram.values()) > 0:
        raise UsageError("--lengths names no documents. Give at least one length with a share above 0.")
    return tuple(sorted(histogram.items()))


def _pairs_of_text(text: str) -> list[tuple[int, float]]:
    return [_pair(*entry.partition(":")[::2], where=f"--lengths {entry.strip()!r}") for entry in text.split(",")]


def _pairs_of_file(path: Path) -> list[tuple[int, float]]:
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as exc:
        place = f" at line {exc.lineno}" if isinstance(exc, json.JSONDecodeError) else ""
        raise UsageError(f'{path}: not valid JSON{place}. Write {{"512": 0.5, "4096": 0.5}}.') from None
    entries = list(content.items()) if isinstance(content, dict) else content
    if not isinstance(entries, list) or len(entries) > _MOST_LENGTHS:
        raise UsageError(f'{path}: not a histogram of lengths. Write {{"512": 0.5, "4096": 0.5}}.')
    pairs = []
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise UsageError(f"{path}: entry {number} is not a pair of a length and its share. Write [512, 0.5].")
        pairs.append(_pair(str(entry[0]), str(entry[1]), where=f"{path}: entry {number}"))
    return pairs


def _pair(length: str, share: str, *, where: str) -> tuple[int, float]:
    try:
        tokens, weight = int(length), float(share)
    except ValueError:
        tokens, weight = 0, math.nan
    if not 0 < tokens < 2**31 or not 0 <= weight < math.inf:
        raise UsageError(f"{where} is not a length in tokens with its share. Write it as in 512:0.5.")
    return tokens, weight


def knob_values(field: str, text: str) -> tuple[Any, ...]:
    """The values of a knob from a comma list: ``1,2`` for pp, ``none,full`` for recompute, ``true`` for compile.

    A knob that is itself a list joins its elements by plus signs: ``20+16`` for stage_layers.

    Raises:
        UsageError: No such knob, or a value it can't take.
    """
    if field not in FIELDS:
        raise UsageError(f"unknown knob {field!r}.{did_you_mean(field, FIELDS)} Knobs are {', '.join(FIELDS)}.")
    return tuple(dict.fromkeys(_knob_value(field, word.strip()) for word in text.split(",")))


def _knob_value(field: str, word: str) -> Any:
    default = getattr(DEFAULT, field)
    if field in CHOICES:
        if word in CHOICES[field]:
            return word
        hint = did_you_mean(word, CHOICES[field])
        raise UsageError(f"{option(field)} {word!r} is not known.{hint} Use {', '.join(CHOICES[field])}.")
    if field in TUPLES:
        return _tuple_value(field, word)
    if isinstance(default, bool):
        if word.lower() not in (*_TRUE, *_FALSE):
            raise UsageError(f"{option(field)} {word!r} is neither true nor false. Write one of them, or true,false.")
        return word.lower() in _TRUE
    least = next((bound.ge for bound in Strategy.model_fields[field].metadata if hasattr(bound, "ge")), 0)
    if not re.fullmatch(r"[0-9]{1,12}", word) or int(word) < least:
        raise UsageError(f"{option(field)} {word!r} is not a whole number of at least {least}. Write it as in 1,2,4.")
    return int(word)


def _tuple_value(field: str, word: str) -> tuple[Any, ...] | None:
    if word == "none":
        return None if getattr(DEFAULT, field) is None else ()
    parts = word.split("+")
    if field not in _INTEGER_TUPLES:
        return tuple(parts)
    if not all(re.fullmatch(r"[0-9]{1,6}", part) for part in parts):
        raise UsageError(f"{option(field)} {word!r} is not a list of layer counts. Join them by plus signs: 20+16.")
    return tuple(int(part) for part in parts)


def pinned(options: Mapping[str, str | None], assignments: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Field -> values from the options that were given and from ``field=values`` assignments.

    Raises:
        UsageError: A malformed value, or a knob that is given twice.
    """
    values = {field: knob_values(field, text) for field, text in options.items() if text is not None}
    for assignment in assignments:
        field, equals, text = assignment.partition("=")
        field = field.strip().replace("-", "_")
        if not equals:
            raise UsageError(f"--set {assignment!r} names no values. Write it as in --set bucket_bytes=0,25000000.")
        if field in values:
            raise UsageError(f"{field} is given twice. Write all its values in one comma list.")
        values[field] = knob_values(field, text)
    return values


def check_values(backend_name: str, values: Mapping[str, Sequence[Any]]) -> None:
    """Returns if the backend runs every value that was asked for.

    Raises:
        UsageError: It is unknown, or a value it never runs; the message names those it does.
    """
    runs = backend(backend_name)
    for field, asked in values.items():
        allowed = runs.values.get(field)
        for value in asked:
            if allowed is not None and value not in allowed:
                legal = ", ".join(sorted((shown(one) for one in allowed), key=_natural))
                asked_for = f"{option(field)} {shown(value)}"
                raise UsageError(
                    f"{asked_for}: the {runs.name} backend runs {field} in {{{legal}}} only. Use one "
                    "of these, or another --backend."
                )


def _natural(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (0, text)


def shown(value: Any) -> str:
    """A knob's value as it is typed: ``true``, ``none``, ``20+16``."""
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
