"""Padding waste against hand counts."""

import pytest

from trainplan.costmodel.packing import useful_token_frac
from trainplan.costmodel.workload import Workload


def of(*histogram: tuple[int, float], seq_len: int = 1024) -> Workload:
    return Workload(seq_len=seq_len, global_batch_size=8, length_histogram=histogram)


def test_full_sequences_waste_nothing() -> None:
    assert useful_token_frac(of(), True) == 1
    assert useful_token_frac(of((1024, 1.0)), False) == 1


def test_padding_keeps_the_mean_length_over_the_row() -> None:
    assert useful_token_frac(of((256, 1.0)), False) == pytest.approx(1 / 4)
    assert useful_token_frac(of((256, 0.5), (768, 0.5)), False) == pytest.approx(1 / 2)


def test_packing_fills_rows_where_lengths_match() -> None:
    assert useful_token_frac(of((256, 1.0)), True) == pytest.approx(1)
    assert useful_token_frac(of((256, 0.5), (768, 0.5)), True) == pytest.approx(1)
    assert useful_token_frac(of((600, 1.0)), True) == pytest.approx(600 / 1024)  # two never fit in one row


def test_a_long_document_is_cut_into_pieces() -> None:
    assert useful_token_frac(of((1536, 1.0)), False) == pytest.approx(1536 / 2048)
    assert useful_token_frac(of((1536, 1.0)), True) == pytest.approx(1)  # two halves share a row
