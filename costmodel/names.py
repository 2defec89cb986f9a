"""Which known name did a person mean? Near names for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_names(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """At most ``count`` of ``known`` that look like ``name``, the nearest first; case and folder parts do not matter.

    ``Qwen3-8b`` is near ``Qwen/Qwen3-8B``: both the whole name and what follows its last slash are compared.
    """
    wanted = name.lower()
    scores: dict[str, float] = {}
    for candidate in known:
        lower = candidate.lower()
        parts = {lower, lower.rsplit("/", 1)[-1]}
        wanted_parts = {wanted, wanted.rsplit("/", 1)[-1]}
        scores[candidate] = max(difflib.SequenceMatcher(None, w, p).ratio() for w in wanted_parts for p in parts)
    close = [candidate for candidate, score in scores.items() if score >= 0.6]  # difflib.get_close_matches' own cutoff
    return sorted(close, key=lambda candidate: (-scores[candidate], candidate))[:count]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean A, B?``, with a leading space, or the empty string where nothing known is near."""
    near = near_names(name, known)
    return f" Did you mean {', '.join(near)}?" if near else ""
