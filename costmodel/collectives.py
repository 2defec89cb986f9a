"""Seconds of collectives: latency and bandwidth by tier, ring, tree and hierarchical.

A group of ``n`` ranks that are ``stride`` apart (in rank order) has ``local`` members in each scale-up domain and spans
``n / local`` of them. Sizes are bytes, per rank as each function says. Everything broadcasts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainplan.costmodel.rates import LinkRates, Rates, Value
from trainplan.costmodel.strategy import CHOICES

Column = np.ndarray
AUTO, RING, TREE, HIERARCHICAL = range(4)
assert CHOICES["collective_algo"] == ("auto", "ring", "tree", "hierarchical")


@dataclass(frozen=True, slots=True)
class Group:
    """Where the ranks of a collective sit: ``n`` in all, ``local`` in each scale-up domain."""

    n: Column
    local: Column

    @property
    def domains(self) -> Column:
        return np.asarray(np.ceil(self.n / self.local))

    @property
    def spans(self) -> Column:
        """Whether the group leaves a scale-up domain."""
        return self.domains > 1


def group(n: Column, stride: Column, rates: Rates) -> Group:
    """The placement of ``n`` ranks spaced ``stride`` apart, ranks filling one scale-up domain after the other."""
    return Group(np.asarray(n), np.clip(rates.scale_up_domain // np.maximum(stride, 1), 1, n))


def _bus(g: Group, kind: str, rates: Rates) -> Value:
    """Bus bandwidth of a ring over the group [bytes/s].

    Across domains every local rank drives its own network link, so the ring moves up to ``local`` times a link, and
    never more than the scale-up tier. Source: nccl-tests, doc/PERFORMANCE.md, on bus bandwidth; rail-aligned rings as
    in NCCL's topology search.
    """
    up, out = getattr(rates.scale_up, kind), getattr(rates.scale_out, kind)
    return np.asarray(np.where(g.spans, np.minimum(up, out * g.local), up))


def _ring_latency(g: Group, rates: Rates) -> Value:
    """One trip around the ring: a hop inside a domain for each local step, a network hop per domain."""
    inside = (g.n - g.domains) * rates.scale_up.latency
    return np.where(g.spans, inside + g.domains * rates.scale_out.latency, (g.n - 1) * rates.scale_up.latency)


RAMP_BYTES = 8e6
"""Message over which a network ring reaches half its bandwidth: an all-reduce over two nodes of eight H100 on
GPUDirect-TCPXO reaches half of its largest bus bandwidth near 16 MB and nine tenths near 128 MB (lessizzmore's
a3-mega table), latency taken off."""


def _ramp(message_bytes: Column, g: Group, rates: Rates) -> Value:
    """Slow-down of a network ring by the size of its message; only where the inside is measured by size, too."""
    if rates.curves is None:
        return 1.0
    return np.where(g.spans, 1 + RAMP_BYTES / np.maximum(message_bytes, 1.0), 1.0)


def _measured(operation: str, moved: Column, g: Group, rates: Rates, modelled: Column) -> Column:
    """The measured curve for groups inside one scale-up domain, where there is one; else what the model says."""
    if rates.curves is None or np.all(g.spans):
        return modelled
    inside = rates.curves.seconds(operation, moved, np.where(g.spans, 1, g.n)) * rates.scale_up.slower
    return np.asarray(np.where(g.spans, modelled, inside))


def all_gather_s(total_bytes: Column, g: Group, rates: Rates, operation: str = "all_gather") -> Column:
    """Seconds to give every rank the ``total_bytes`` that are spread over them.

    t = latency around the ring + (S / B) (n - 1) / n across domains or without a measured curve. Source: nccl-tests,
    doc/PERFORMANCE.md, AllGather.
    """
    S, B = total_bytes, _bus(g, "all_gather", rates)
    t = np.asarray(_ring_latency(g, rates) + S / B * (g.n - 1) / g.n * _ramp(S, g, rates))
    return np.where(g.n > 1, _measured(operation, S, g, rates, t), 0.0)


def reduce_scatter_s(total_bytes: Column, g: Group, rates: Rates) -> Column:
    """Seconds to sum ``total_bytes`` over the ranks and leave each its part: the traffic of an all-gather."""
    return all_gather_s(total_bytes, g, rates, "reduce_scatter")


def all_reduce_s(message_bytes: Column, g: Group, rates: Rates, algo: Column | int = AUTO) -> Column:
    """Seconds to reduce ``message_bytes`` over the group, the buffer of each rank.

    ring: 2 latency + (S / B) 2 (n - 1) / n. tree: 2 log2(domains) network hops (or log2(n) inside) and the ring's
    traffic. hierarchical: reduce-scatter inside, all-reduce of a 1/local share between domains, all-gather inside, cut
    into pieces so that the slower tier hides the other. auto: the fastest of them. Source: nccl-tests
    doc/PERFORMANCE.md; Sanders, Speck, Traeff 2009 (two-tree).
    """
    S = message_bytes
    traffic = S / _bus(g, "all_reduce", rates) * 2 * (g.n - 1) / g.n * _ramp(S, g, rates)
    ring = 2 * _ring_latency(g, rates) + traffic
    depth = np.where(
        g.spans,
        np.ceil(np.log2(g.domains)) * rates.scale_out.latency + (g.local - 1) * rates.scale_up.latency,
        np.ceil(np.log2(np.maximum(g.n, 1))) * rates.scale_up.latency,
    )
    tree = 2 * depth + traffic
    inside = Group(g.local, g.local)
    between = np.maximum(g.domains - 1, 0)
    ramp = _ramp(S / g.local, g, rates)
    outside = (
        2 * between * rates.scale_out.latency
        + S / g.local / rates.scale_out.all_reduce * 2 * between / g.domains * ramp
    )
    hierarchical = np.maximum(2 * all_gather_s(S, inside, rates), np.where(g.spans, outside, 0.0))
    chosen = np.asarray(algo)
    fastest = _measured("all_reduce", S, g, rates, np.minimum(ring, np.minimum(tree, hierarchical)))
    t = np.select([chosen == RING, chosen == TREE, chosen == HIERARCHICAL], [ring, tree, hierarchical], fastest)
    return np.where(g.n > 1, t, 0.0)


def all_to_all_s(send_bytes: Column, g: Group, rates: Rates, outside_share: Column | float = 1.0) -> Column:
    """Seconds to send ``send_bytes`` from each rank, an equal part to every rank of the group.

    The parts for other domains share the rank's network link, those inside its scale-up link; both run at once. Only
    ``outside_share`` of what is meant for other domains crosses the network, where copies are made on the other side.
    """
    up: LinkRates = rates.scale_up
    inside = send_bytes * (g.local - 1) / g.n / up.all_to_all + (g.local - 1) * up.latency
    outside = np.where(
        g.spans,
        outside_share * send_bytes * (g.n - g.local) / g.n / rates.scale_out.all_to_all
        + rates.scale_out.latency * (g.domains - 1),
        0.0,
    )
    inside = _measured("all_to_all", np.asarray(send_bytes), g, rates, inside)
    return np.where(g.n > 1, np.maximum(inside, outside), 0.0)


def p2p_s(message_bytes: Column, span: Column, rates: Rates) -> Column:
    """Seconds to send ``message_bytes`` to the next rank of a pipeline that spans ``span`` consecutive ranks.

    Where it leaves a scale-up domain, the slowest hop sets the pace.
    """
    near = np.asarray(span) <= rates.scale_up_domain
    latency = np.where(near, rates.scale_up.latency, rates.scale_out.latency)
    return np.asarray(latency + message_bytes / np.where(near, rates.scale_up.p2p, rates.scale_out.p2p))
