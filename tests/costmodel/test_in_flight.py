"""Micro-batches that a pipeline rank holds activations of: hand counts, and the memory that follows from them.

Rows are ``[micro-batches per stage of the rank]`` at the moments that can be its peak. Letters in the comments: F1a is
the forward of stage 1 and micro-batch a; B a full backward; I and W its input and weight gradient. Activations are held
from F to B or W.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from trainplan.costmodel.hardware import Cluster
from trainplan.costmodel.job import Job
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.orders import in_flight_peaks, rank_orders, walked_peaks
from trainplan.costmodel.step import price
from trainplan.costmodel.strategy import Schedule, Strategy, StrategyTable
from trainplan.costmodel.workload import Workload

MakeCluster = Callable[..., Cluster]


def rows(schedule: Schedule, pp: int, vpp: int, m: int) -> list[list[list[int]]]:
    return [sorted(peaks.tolist()) for peaks in in_flight_peaks(schedule, pp, vpp, m)]


def order(schedule: Schedule, pp: int, vpp: int, m: int, rank: int) -> str:
    return " ".join(f"{'FBIW'[kind]}{stage}{'abcdef'[i]}" for kind, stage, i in rank_orders(schedule, pp, vpp, m)[rank])


@pytest.mark.parametrize("pp", [2, 3, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 16])
def test_gpipe_holds_all_micro_batches(pp: int, m: int) -> None:
    assert rows("gpipe", pp, 1, m) == [[[m]]] * pp


@pytest.mark.parametrize("pp", [2, 3, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 16])
def test_1f1b_holds_as_many_as_ranks_follow(pp: int, m: int) -> None:
    """min(m, p - r): Narayanan et al. 2021, arXiv:2104.04473, sec. 2.2.1."""
    assert rows("1f1b", pp, 1, m) == [[[min(m, pp - rank)]] for rank in range(pp)]


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("vpp", [2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_interleaved_holds_megatrons_warm_up_and_one_more(pp: int, vpp: int, groups: int) -> None:
    """2 (p - r - 1) + (v - 1) p + 1 chunks, at most all m v: Megatron-LM, schedules.py, `get_pp_rank_microbatches`."""
    m = groups * pp
    for rank, peaks in enumerate(in_flight_peaks("interleaved", pp, vpp, m)):
        assert peaks.sum(axis=1).max() == min(2 * (pp - rank - 1) + (vpp - 1) * pp + 1, m * vpp)


def test_interleaved_of_two_ranks_by_hand() -> None:
    """Rank 0 has stages 0 and 2, warm-up 2 + 2 = 4 chunks; rank 1 has 1 and 3, warm-up 2."""
    assert order("interleaved", 2, 2, 4, 0) == "F0a F0b F2a F2b F0c B2a F0d B2b F2c B0a F2d B0b B2c B2d B0c B0d"
    assert order("interleaved", 2, 2, 4, 1) == "F1a F1b F3a B3a F3b B3b F1c B1a F1d B1b F3c B3c F3d B3d B1c B1d"
    # Rank 0: F0c makes [3, 2]; B2a, F0d [4, 1]; B2b, F2c [4, 1]; B0a, F2d [3, 2].
    # Rank 1: F3a [2, 1]; B3a, F3b the same; B3b, F1c [3, 0]; B1a, F1d [3, 0]; B1b, F3c [2, 1].
    assert rows("interleaved", 2, 2, 4) == [[[3, 2], [4, 1]], [[2, 1], [3, 0]]]


def test_zero_bubble_of_two_ranks_by_hand() -> None:
    """The last rank delays weight gradients by one, and so holds two micro-batches, where 1F1B holds one."""
    assert order("zero-bubble", 2, 1, 4, 0) == "F0a F0b I0a W0a F0c I0b W0b F0d I0c W0c I0d W0d"
    assert order("zero-bubble", 2, 1, 4, 1) == "F1a I1a F1b I1b W1a F1c I1c W1b F1d I1d W1c W1d"
    assert rows("zero-bubble", 2, 1, 4) == [[[2]], [[2]]]


def test_zbv_of_two_ranks_by_hand() -> None:
    """Rank 0 has stages 0 and 3, rank 1 stages 1 and 2; both hold at most 2 p = 4 chunks."""
    assert order("zbv", 2, 2, 3, 0) == "F0a F0b F0c F3a I3a W3a F3b I3b W3b I0a W0a F3c I3c W3c I0b W0b I0c W0c"
    # After F3a [3, 1], and again after F3b; W0a leaves [2, 0], F3c makes [2, 1].
    assert order("zbv", 2, 2, 3, 1) == "F1a F2a F1b F2b I2a W2a F1c I1a W1a F2c I2b W2b I1b I2c I1c W1b W2c W1c"
    # F2b [2, 2]; W2a, F1c [3, 1]; W1a, F2c [2, 2].
    assert rows("zbv", 2, 2, 3) == [[[3, 1]], [[2, 2], [3, 1]]]


def test_dualpipev_of_two_ranks_by_hand() -> None:
    """One chunk more than ZB-V: 2 p + 1 = 5, as a forward runs beside the backward that frees."""
    first = "F0a F0b F0c F3a I3a W3a F3b F0d B3b F3c B0a B3c F3d B0b B3d I0c W0c I0d W0d"
    assert order("dualpipev", 2, 2, 4, 0) == first
    # F3a [3, 1]; W3a, F3b [3, 1]; F0d [4, 1]; B3b, F3c [4, 1]; B0a and less.
    second = "F1a F2a F1b F2b F1c B2a F2c B1a F1d B2b F2d B1b B2c B1c I2d I1d W2d W1d"
    assert order("dualpipev", 2, 2, 4, 1) == second
    # F2b [2, 2]; F1c [3, 2]; B2a, F2c [3, 2]; B1a, F1d [3, 2].
    assert rows("dualpipev", 2, 2, 4) == [[[4, 1]], [[3, 2]]]


@pytest.mark.parametrize(
    ("schedule", "vpp", "held"),
    [("gpipe", 1, [8, 8]), ("1f1b", 1, [2, 1]), ("interleaved", 2, [2.5, 1.5]), ("zero-bubble", 1, [2, 2])],
)
def test_memory_holds_so_many_layers(
    round_cluster: MakeCluster, schedule: Schedule, vpp: int, held: list[float]
) -> None:
    """Two ranks of 4 equal layers, 8 micro-batches; a vocabulary of one token makes embedding and logits vanish."""
    spec = ModelSpec(
        name="even", family="gpt", num_layers=8, hidden_size=64, ffn_hidden_size=256, num_heads=4, num_kv_heads=4,
        head_dim=16, vocab_size=1, max_position_embeddings=512,
    )  # fmt: skip
    job = Job(spec, round_cluster(2), Workload(seq_len=512, global_batch_size=8))

    def activations(**values: object) -> list[float]:
        table = StrategyTable.from_strategies([Strategy(attention="flash", **values)])  # type: ignore[arg-type]
        return [float(np.max(rank.parts["activations"])) for rank in price(job, "megatron", table).memory]

    found = activations(pp=2, vpp=vpp, schedule=schedule, grad_accum=8)
    (alone,) = activations(grad_accum=8)  # 8 layers of one micro-batch: it is fullest when it goes back into the last
    assert found[0] == held[0] * alone / 2
    norm = 512 * (64 * (2 + 2) + 4)  # the final norm's input, its output and root, per micro-batch on the last rank
    assert held[1] * alone / 2 <= found[1] <= held[1] * (alone / 2 + norm)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"])
def test_more_micro_batches_than_three_rounds_hold_no_more(schedule: Schedule) -> None:
    checked = 0
    for pp, vpp in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 3), (8, 2), (8, 1), (16, 1), (16, 2)):
        if vpp != {"1f1b": 1, "zbv": 2, "dualpipev": 2}.get(schedule, vpp) or (schedule == "interleaved" and vpp == 1):
            continue
        for m in (
            3 * pp,
            4 * pp,
            7 * pp,
            *((3 * pp + 1, 5 * pp - 1) if schedule in ("1f1b", "zbv", "dualpipev") else ()),
        ):
            short = in_flight_peaks(schedule, pp, vpp, m)
            for mine, walked in zip(short, walked_peaks(schedule, pp, vpp, m), strict=True):
                assert np.array_equal(mine, walked)
                checked += 1
    assert checked > 20
