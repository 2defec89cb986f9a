"""Rows and steps: no token lost or predicted across documents, and the same steps whatever the layout."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainplan.costmodel.errors import MachineMismatchError, UsageError
from trainplan.executor.data import PADDING, Rows, StepData, lay_rows
from trainplan.executor.loss import IGNORED
from trainplan.executor.tokens import TokenCache, TokenMeta, open_cache


def cache_of(lengths: list[int]) -> TokenCache:
    """Documents of consecutive numbers: token t of the corpus is t."""
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    total = int(offsets[-1])
    meta = TokenMeta(
        documents=len(lengths), tokens=total, max_id=total - 1, skipped_lines=0, first_skipped=(), empty_documents=0
    )
    return TokenCache("test", meta, np.arange(total, dtype=np.uint32), offsets)


def steps_of(lengths: list[int], **changes: Any) -> StepData:
    values = {"seq_len": 16, "global_batch_size": 4, "vocab_size": 10**9, "packing": True, "seed": 0}
    return StepData(cache_of(lengths), **{**values, **changes})


LENGTHS = [int(n) for n in np.random.default_rng(7).integers(1, 60, size=100)]


def pieces_of(rows: Rows) -> list[tuple[int, int]]:
    return sorted(zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True))


@pytest.mark.parametrize("packing", [True, False])
def test_every_token_is_in_one_piece_but_for_tails_of_one_token(packing: bool) -> None:
    offsets = cache_of(LENGTHS).offsets
    rows = lay_rows(offsets, 16, packing=packing, seed=0)
    expected = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        cuts = [(at, min(16, end - at)) for at in range(begin, end, 16)]
        expected += [cut for cut in cuts if cut[1] >= 2]
    assert pieces_of(rows) == expected
    for row in range(len(rows)):
        held = rows.lengths[rows.bounds[row] : rows.bounds[row + 1]]
        assert 0 < held.sum() <= 16
        assert packing or len(held) == 1


def test_packing_reaches_the_least_possible_number_of_rows_on_a_hand_case() -> None:
    """10+6, 9+7, 8+8, 5+5+6 of 16: four full rows."""
    rows = lay_rows(np.cumsum([0, 10, 9, 8, 8, 7, 6, 6, 5, 5]), 16, packing=True, seed=3)
    assert len(rows) == 4


def test_packing_fills_a_skewed_corpus_above_98_percent() -> None:
    """Log-normal lengths, as text has: median 150, a long tail, rows of 1024."""
    sizes = np.random.default_rng(0).lognormal(5, 1.2, size=20_000).astype(int) + 2
    data = StepData(cache_of(sizes.tolist()), seq_len=1024, global_batch_size=8, vocab_size=10**9, packing=True, seed=0)
    assert data.fill_frac > 0.98
    padded = lay_rows(np.cumsum([0, *sizes]), 1024, packing=False, seed=0)
    assert len(padded) > 3 * len(data.rows)


def test_a_row_holds_documents_with_their_own_positions_and_no_label_across() -> None:
    data = steps_of(LENGTHS, seq_len=90, global_batch_size=20)
    batch = data.share(0, dp_rank=0, dp=1, grad_accum=1).micro_batches[0]
    assert batch.position_ids is not None
    assert batch.documents is not None
    assert batch.input_ids.shape == (20, 90)
    assert int((batch.documents == PADDING).sum()) > 0
    for ids, labels, positions, numbers in zip(
        batch.input_ids.tolist(),
        batch.labels.tolist(),
        batch.position_ids.tolist(),
        batch.documents.tolist(),
        strict=True,
    ):
        for i in range(90):
            if numbers[i] == PADDING:
                assert labels[i] == IGNORED
                continue
            starts_document = i == 0 or numbers[i - 1] != numbers[i]
            assert positions[i] == (0 if starts_document else positions[i - 1] + 1)
            ends_document = i == 89 or numbers[i + 1] != numbers[i]
            assert labels[i] == (IGNORED if ends_document else ids[i + 1])
            if not ends_document:
                assert ids[i + 1] == ids[i] + 1  # token t of the corpus is t: neighbours in a document


def test_without_packing_a_row_is_one_document_and_no_mask_is_needed() -> None:
    batch = steps_of(LENGTHS, packing=False).share(0, dp_rank=0, dp=1, grad_accum=1).micro_batches[0]
    assert batch.position_ids is None
    assert batch.documents is None


def step_tokens(data: StepData, step: int, dp: int, grad_accum: int) -> torch.Tensor:
    shares = [data.share(step, dp_rank=r, dp=dp, grad_accum=grad_accum) for r in range(dp)]
    return torch.cat([batch.input_ids for share in shares for batch in share.micro_batches])


@pytest.mark.parametrize("packing", [True, False])
def test_a_steps_rows_depend_on_seed_and_step_only(packing: bool) -> None:
    """For every division into ranks and micro-batches, asked in any order, and over the end of an epoch."""
    data = steps_of(LENGTHS, packing=packing, global_batch_size=8)
    epoch = len(data.rows) // 8
    for step in (0, 1, epoch, 3 * epoch + 2, 2):
        whole = step_tokens(data, step, 1, 1)
        fresh = steps_of(LENGTHS, packing=packing, global_batch_size=8)
        for dp, grad_accum in ((1, 8), (2, 1), (2, 4), (4, 2), (8, 1)):
            assert torch.equal(step_tokens(fresh, step, dp, grad_accum), whole)
    assert not torch.equal(step_tokens(data, 0, 1, 1), step_tokens(data, 1, 1, 1))
    assert not torch.equal(
        step_tokens(data, 0, 1, 1),
        step_tokens(steps_of(LENGTHS, packing=packing, global_batch_size=8, seed=1), 0, 1, 1),
    )


def test_an_epoch_has_every_row_once_and_the_next_another_order() -> None:
    data = steps_of(LENGTHS, global_batch_size=4)
    n = len(data.rows)
    order = np.concatenate([data.step_rows(step) for step in range(2 * n)])  # 8 epochs
    epochs = order[: 2 * n].reshape(2, n)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(n))
    assert epochs[0].tolist() != epochs[1].tolist()


def test_shares_count_tokens_and_labels() -> None:
    data = steps_of([16, 16, 10, 3], packing=False)
    share = data.share(0, dp_rank=0, dp=1, grad_accum=2)
    assert (share.tokens, share.loss_tokens) == (16 + 16 + 10 + 3, 15 + 15 + 9 + 2)
    halves = [data.share(0, dp_rank=r, dp=2, grad_accum=1) for r in (0, 1)]
    assert sum(half.tokens for half in halves) == share.tokens
    assert sum(half.loss_tokens for half in halves) == share.loss_tokens


def test_too_little_data_for_one_step_says_how_much_there_is() -> None:
    with pytest.raises(UsageError, match=r"20 tokens in 1 documents: 2 sequences .* global_batch_size=4"):
        steps_of([20])


def test_a_token_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(MachineMismatchError, match="token 99, but the model's vocab_size is 99"):
        steps_of([100], vocab_size=99)


def test_the_tiny_corpus_packs_densely(token_cache: Path, tiny: Any) -> None:
    cache = open_cache(token_cache)
    data = StepData(cache, seq_len=64, global_batch_size=8, vocab_size=tiny.vocab_size, packing=True, seed=0)
    assert data.fill_frac > 0.98
    assert int(data.rows.lengths.sum()) <= cache.meta.tokens


def test_packing_takes_microseconds_per_document() -> None:
    """1.5 were measured; 100 leaves room for a busy machine, and a quadratic search would take far more."""
    sizes = np.random.default_rng(0).lognormal(5, 1.2, size=200_000).astype(int) + 2
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    began = time.process_time()
    lay_rows(offsets, 4096, packing=True, seed=0)
    assert time.process_time() - began < 100e-6 * len(sizes)
