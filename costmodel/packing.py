"""How much of a batch is real tokens? Padding waste from the length histogram of a workload."""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import lru_cache

from trainplan.costmodel.workload import Workload

SAMPLE = 4096
"""Documents packed to find the waste; a thousand rows or more, so the last partial one hardly counts."""


@lru_cache(maxsize=256)
def useful_token_frac(workload: Workload, packing: bool) -> float:
    """Share of tokens that are not padding, 0 to 1.

    Documents longer than ``seq_len`` are cut into pieces. Padded: one piece per row. Packed: best-fit decreasing over a
    sample with the histogram's shares.
    """
    if not workload.length_histogram:
        return 1.0
    lengths = _pieces(workload)
    rows = _best_fit_rows(lengths, workload.seq_len) if packing else len(lengths)
    return sum(lengths) / (rows * workload.seq_len)


def _pieces(workload: Workload) -> list[int]:
    """Lengths of the pieces of about `SAMPLE` documents."""
    total = sum(share for _, share in workload.length_histogram)
    pieces: list[int] = []
    for length, share in workload.length_histogram:
        count = round(SAMPLE * share / total)
        whole, rest = divmod(length, workload.seq_len)
        pieces += [workload.seq_len] * (whole * count) + [rest] * (count if rest else 0)
    return pieces or [min(max(workload.length_histogram)[0], workload.seq_len)]


def _best_fit_rows(lengths: list[int], capacity: int) -> int:
    """Rows of ``capacity`` that best-fit decreasing needs: each piece goes where the least room stays."""
    rooms: list[int] = []  # ascending room of open rows
    rows = 0
    for length in sorted(lengths, reverse=True):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            rows += 1
            room = capacity
        else:
            room = rooms.pop(at)
        if room > length:
            insort(rooms, room - length)
    return rows
