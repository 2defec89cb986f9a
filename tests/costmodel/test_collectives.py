"""Collectives against hand counts and published measurements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainplan.costmodel.collectives import (
    HIERARCHICAL,
    RING,
    TREE,
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    group,
    p2p_s,
)
from trainplan.costmodel.rates import LinkRates, Rates

UP = LinkRates(all_reduce=450e9, all_gather=400e9, all_to_all=300e9, p2p=450e9, latency=0.0)
OUT = LinkRates(all_reduce=50e9, all_gather=50e9, all_to_all=40e9, p2p=50e9, latency=0.0)


def rates(up: LinkRates = UP, out: LinkRates = OUT, domain: int = 8) -> Rates:
    return Rates({}, {}, 1.0, 0.0, 1.0, up, out, domain, False, "measured")


def ranks(n: int, stride: int = 1, of: Rates | None = None) -> Group:
    return group(np.asarray(n), np.asarray(stride), of or rates())


def test_all_reduce_in_one_domain_matches_a_hand_count() -> None:
    assert all_reduce_s(np.asarray(8e9), ranks(8), rates(), RING) == pytest.approx(
        14 / 450
    )  # 7/8 of 8 GB, there and back


def test_all_gather_moves_what_others_hold() -> None:
    assert all_gather_s(np.asarray(8e9), ranks(8), rates()) == pytest.approx(7 / 400)


def test_a_group_with_one_rank_per_domain_is_limited_by_its_network_link() -> None:
    assert all_gather_s(np.asarray(4e9), ranks(4, stride=8), rates()) == pytest.approx(3 / 50)


def test_a_ring_over_full_domains_uses_every_link_of_a_domain() -> None:
    """Two domains of 8: 8 links of 50 GB/s carry the ring at 400 GB/s, the scale-up tier's own speed."""
    assert all_gather_s(np.asarray(16e9), ranks(16), rates()) == pytest.approx(15 / 400)


def test_hierarchical_is_paced_by_its_slower_tier() -> None:
    """8 GiB on two nodes of eight H100: 47.5 ms measured (nccl-tests on GCP a3-mega), where a link gives 22.6 GB/s."""
    out = LinkRates(22.59e9, 22.59e9, 22.59e9, 22.59e9, 0.0)
    t = all_reduce_s(np.asarray(8 * 2.0**30), ranks(16), rates(out=out), HIERARCHICAL)
    assert float(t) == pytest.approx(47.5e-3, rel=0.02)


def test_a_tree_beats_a_ring_on_small_messages_over_many_domains() -> None:
    slow = LinkRates(50e9, 50e9, 50e9, 50e9, latency=10e-6)
    of = rates(out=slow)
    ring, tree = (all_reduce_s(np.asarray(1024.0), ranks(64, 8, of), of, algo) for algo in (RING, TREE))
    assert float(ring) == pytest.approx(2 * 64 * 10e-6, rel=0.01)
    assert float(tree) == pytest.approx(2 * 6 * 10e-6, rel=0.01)  # log2(64) levels up and down


def test_all_to_all_runs_both_tiers_at_once() -> None:
    """16 ranks, 16 GB each: 7 GB stay inside at 300 GB/s, 8 GB leave at 40 GB/s."""
    assert all_to_all_s(np.asarray(16e9), ranks(16), rates()) == pytest.approx(8 / 40)


def test_a_pipeline_inside_a_domain_uses_scale_up() -> None:
    assert p2p_s(np.asarray(4.5e9), np.asarray(8), rates()) == pytest.approx(0.01)
    assert p2p_s(np.asarray(4.5e9), np.asarray(16), rates()) == pytest.approx(0.09)


@given(st.floats(1, 1e11), st.sampled_from([1, 2, 4, 8, 16, 64]), st.sampled_from([1, 2, 8]), st.floats(1.1, 10))
def test_more_bandwidth_is_never_slower(size: float, n: int, stride: int, factor: float) -> None:
    def scaled(link: LinkRates) -> LinkRates:
        return LinkRates(
            link.all_reduce * factor,
            link.all_gather * factor,
            link.all_to_all * factor,
            link.p2p * factor,
            link.latency,
        )

    slow, fast = rates(), rates(scaled(UP), scaled(OUT))
    for cost in (all_reduce_s, all_gather_s, all_to_all_s):
        assert float(cost(np.asarray(size), ranks(n, stride), fast)) <= float(
            cost(np.asarray(size), ranks(n, stride), slow)
        )


def test_one_rank_sends_nothing() -> None:
    for cost in (all_reduce_s, all_gather_s, all_to_all_s):
        assert float(cost(np.asarray(1e9), ranks(1), rates())) == 0
