"""How is a number written for a person? Each with its unit, at three significant digits. Plain text, ASCII only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trainplan.costmodel.estimate import Interval

_TIMES = ((1e-6, "us"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"), (86400.0, "days"))
_UNTIL = (1000.0, 1000.0, 120.0, 120.0, 48.0, math.inf)  # how many of a unit are written before the next one is used
_BINARY = ((1.0, "B"), (2.0**10, "KiB"), (2.0**20, "MiB"), (2.0**30, "GiB"), (2.0**40, "TiB"))
_DECIMAL = ((1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T"), (1e15, "P"))
_COUNTS = ((1.0, ""), (1e3, "K"), (1e6, "M"), (1e9, "B"), (1e12, "T"))


def three(value: float) -> str:
    """Three significant digits without an exponent; digits before the point are kept whole: ``12345``, ``0.00123``."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    decimals = 2 - math.floor(math.log10(abs(float(f"{value:.2e}"))))
    return f"{value:.{max(0, decimals)}f}"


def _scaled(value: float, units: Sequence[tuple[float, str]], until: Sequence[float]) -> str:
    """``value`` in the first unit of which fewer than ``until`` are needed after rounding."""
    if value == 0 or not math.isfinite(value):
        return f"{three(value)} {units[0][1]}".rstrip()
    text = ""
    for (scale, unit), limit in zip(units, until, strict=True):
        text = f"{three(value / scale)} {unit}".rstrip()
        if abs(float(three(value / scale))) < limit:
            break
    return text


def _until(units: Sequence[tuple[float, str]], step: float) -> list[float]:
    return [step] * (len(units) - 1) + [math.inf]


def seconds(value: float) -> str:
    """``450 us``, ``12.3 ms``, ``9.82 s``, ``3.50 min``, ``5.00 h``, ``3.00 days``; ``0 s`` for nothing."""
    return "0 s" if value == 0 else _scaled(value, _TIMES, _UNTIL)


def size(value: float) -> str:
    """Bytes in binary units: ``61.2 GiB``, ``512 MiB``."""
    return _scaled(value, _BINARY, _until(_BINARY, 1024.0))


def bytes_per_s(value: float) -> str:
    """A bandwidth in decimal units, as vendors and benchmarks write it: ``450 GB/s``."""
    text = _scaled(value, _DECIMAL, _until(_DECIMAL, 10000.0))
    return f"{text}B/s" if text[-1].isalpha() else f"{text} B/s"


def flops_per_s(value: float) -> str:
    """``989 TFLOP/s``."""
    text = _scaled(value, _DECIMAL, _until(_DECIMAL, 10000.0))
    return f"{text}FLOP/s" if text[-1].isalpha() else f"{text} FLOP/s"


def count(value: float) -> str:
    """A large count, such as parameters: ``8.19 B``, ``494 M``; below 1000 as it is."""
    return _scaled(value, _COUNTS, _until(_COUNTS, 1000.0))


def whole(value: float) -> str:
    """A whole number with thousands marked: ``1,048,576``."""
    return f"{value:,.0f}"


def percent(frac: float) -> str:
    """A share of 1 as ``42.1 %``."""
    return f"{100 * frac:.1f} %"


def factor(value: float) -> str:
    """``1.07x``."""
    return f"{value:.2f}x"


def tokens_per_s(value: float) -> str:
    """``107,000 tokens/s``; one digit after the point below 100."""
    return f"{value:,.0f} tokens/s" if value >= 100 else f"{value:.1f} tokens/s"


def money(value: float) -> str:
    """An amount in the user's currency: ``123.40``."""
    return f"{value:,.2f}"


def interval(value: Interval, write: Callable[[float], str]) -> str:
    """``9.82 s (8.90 s to 11.2 s)``: the middle, then the 5 and 95 % points."""
    return f"{write(value.mid)} ({write(value.low)} to {write(value.high)})"


_BY_SUFFIX: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_flops_per_s", flops_per_s),
    ("_bytes_per_s", bytes_per_s),
    ("_bytes", size),
    ("_frac", percent),
    ("_s", seconds),
)


def by_unit(field: str, value: float) -> str:
    """A number in the unit that the field's name ends with; plain digits where it names none."""
    for suffix, write in _BY_SUFFIX:
        if field.endswith(suffix):
            return write(value)
    return three(value)


def words(name: str) -> str:
    """A field's name for a person: ``tensor_parallel`` as ``tensor parallel``."""
    return name.replace("_", " ")
