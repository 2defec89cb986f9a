"""Which tokens does a rank train on in optimizer step k?

Documents are cut into pieces of at most ``seq_len`` tokens and the pieces laid into rows of ``seq_len``. Which rows
exist depends on the data, ``seq_len``, ``packing`` and the seed alone; an epoch is a fresh order of all rows, and step
k takes the next ``global_batch_size`` of them. So the set and order of a step's rows is a function of (seed, k),
whatever the number of ranks, the micro-batch size and the steps run before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trainplan.costmodel.errors import MachineMismatchError, UsageError
from trainplan.executor.loss import IGNORED
from trainplan.executor.tokens import TokenCache

_WINDOW = 65_536  # pieces packed together: bounds the time of a best fit, and mixes documents by the seed
PADDING = -1  # document number of padding


@dataclass(frozen=True, slots=True)
class Rows:
    """Pieces of documents laid into rows. Row ``i`` has pieces ``bounds[i]`` to ``bounds[i + 1]``."""

    starts: np.ndarray  # int64, first token of each piece in the cache
    lengths: np.ndarray  # int64, 2 to seq_len tokens
    bounds: np.ndarray  # int64, one more than there are rows

    def __len__(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass gets. All tensors are [rows, seq_len], int64."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None  # None: 0, 1, 2, ... in every row
    documents: torch.Tensor | None  # None: no row holds two documents

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""

        def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return MicroBatch(
            self.input_ids.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            move(self.position_ids),
            move(self.documents),
        )


@dataclass(frozen=True, slots=True)
class StepShare:
    """One rank's micro-batches of one optimizer step, and what they hold."""

    micro_batches: list[MicroBatch]
    tokens: int  # not padding
    loss_tokens: int  # with a label


def lay_rows(offsets: np.ndarray, seq_len: int, *, packing: bool, seed: int) -> Rows:
    """Cuts documents into pieces and lays them into rows.

    With ``packing`` each piece goes to the row it fills best, longest first; without, each has a row of its own.
    Pieces of one token predict nothing and are left out.

    Args:
        offsets: Where each document begins, and the end of the last, [documents + 1].
        seq_len: Tokens per row.
        packing: Whether documents share rows.
        seed: Decides which documents may meet.
    """
    sizes = np.diff(offsets)
    pieces = -(-sizes // seq_len)
    document = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = offsets[:-1][document] + number * seq_len
    lengths = np.minimum(seq_len, offsets[1:][document] - starts)
    kept = lengths >= 2
    starts, lengths = starts[kept], lengths[kept]
    if not packing:
        return Rows(starts, lengths, np.arange(len(starts) + 1))
    order = np.random.default_rng([seed, 0]).permutation(len(starts))
    rows: list[list[int]] = []
    for begin in range(0, len(order), _WINDOW):
        rows += _best_fit(order[begin : begin + _WINDOW], lengths, seq_len)
    flat = np.fromiter((piece for row in rows for piece in row), dtype=np.int64, count=len(starts))
    bounds = np.concatenate(([0], np.cumsum([len(row) for row in rows], dtype=np.int64))).astype(np.int64)
    return Rows(starts[flat], lengths[flat], bounds)


def _best_fit(pieces: np.ndarray, lengths: np.ndarray, seq_len: int) -> list[list[int]]:
    """Best-fit decreasing: each piece to the fullest row that has room."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(seq_len + 1)]  # free tokens -> rows
    free_sizes = 0  # bit f is set while with_room[f] is not empty
    for piece in pieces[np.argsort(-lengths[pieces], kind="stable")].tolist():
        length = int(lengths[piece])
        fitting = free_sizes >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1  # the lowest set bit: the least room that fits
            row = with_room[free].pop()
            if not with_room[free]:
                free_sizes ^= 1 << free
            rows[row].append(piece)
        else:
            free, row = seq_len, len(rows)
            rows.append([piece])
        if free > length:
            with_room[free - length].append(row)
            free_sizes |= 1 << (free - length)
    return rows


class StepData:
    """The rows of every optimizer step."""

    def __init__(
        self, cache: TokenCache, *, seq_len: int, global_batch_size: int, vocab_size: int, packing: bool, seed: int
    ) -> None:
        """Lays the rows.

        Raises:
            MachineMismatchError: The data has token ids that the model lacks.
            UsageError: There are fewer rows than one step takes.
        """
        if cache.meta.max_id >= vocab_size:
            raise MachineMismatchError(
                f"the data has token {cache.meta.max_id}, but the model's vocab_size is {vocab_size}. "
                f"Use the tokenizer that belongs to the model."
            )
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.packing = packing
        self._tokens = cache.tokens
        self.rows = lay_rows(cache.offsets, seq_len, packing=packing, seed=seed)
        self._order: tuple[int, np.ndarray] | None = None
        if len(self.rows) < global_batch_size:
            raise UsageError(
                f"the data has {cache.meta.tokens} tokens in {cache.meta.documents} documents: {len(self.rows)} "
                f"sequences of up to {seq_len} tokens, but one step takes global_batch_size={global_batch_size}. "
                f"Give more data, or plan for a smaller batch or seq_len."
            )

    @property
    def fill_frac(self) -> float:
        """Share of the rows' tokens that is not padding."""
        return float(self.rows.lengths.sum() / (len(self.rows) * self.seq_len))

    def step_rows(self, step: int) -> np.ndarray:
        """The rows of optimizer step ``step`` (the first is 0), in order, [global_batch_size]."""
        first = step * self.global_batch_size
        place = np.arange(first, first + self.global_batch_size)
        epochs, within = np.divmod(place, len(self.rows))
        return np.concatenate([self._epoch(int(e))[within[epochs == e]] for e in np.unique(epochs)])

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self.seed, 1, epoch]).permutation(len(self.rows))
        return self._order[1]

    def share(self, step: int, *, dp_rank: int, dp: int, grad_accum: int) -> StepShare:
        """What one of ``dp`` ranks trains on in ``step``: its part of the rows, in ``grad_accum`` micro-batches."""
        mine = np.split(self.step_rows(step), dp)[dp_rank]
        parts = [self._fill(rows) for rows in np.split(mine, grad_accum)]
        tokens = sum(int(self.rows.lengths[self.rows.bounds[r] : self.rows.bounds[r + 1]].sum()) for r in mine)
        labels = sum(int((part.labels != IGNORED).sum()) for part in parts)
        return StepShare(parts, tokens, labels)

    def _fill(self, rows: np.ndarray) -> MicroBatch:
        shape = (len(rows), self.seq_len)
        ids = np.zeros(shape, dtype=np.int64)  # padding is token 0: it has no label and no later token reads it
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        documents = np.full(shape, PADDING, dtype=np.int64)
        shared = False
        for i, row in enumerate(rows):
            at = 0
            begin, end = self.rows.bounds[row], self.rows.bounds[row + 1]
            shared |= bool(end - begin > 1)
            for number, piece in enumerate(range(begin, end)):
                n, start = int(self.rows.lengths[piece]), int(self.rows.starts[piece])
                ids[i, at : at + n] = self._tokens[start : start + n]
                labels[i, at : at + n - 1] = ids[i, at + 1 : at + n]  # the last token of a piece predicts nothing
                positions[i, at : at + n] = np.arange(n)
                documents[i, at : at + n] = number
                at += n
        return MicroBatch(
            torch.from_numpy(ids),
            torch.from_numpy(labels),
            torch.from_numpy(positions) if shared else None,
            torch.from_numpy(documents) if shared else None,
        )
