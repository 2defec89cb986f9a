"""How fast the cluster is: the numbers of a `Cluster` as plain floats, or as draws of what they might be.

The width of the draws is a prior: how far a number of each provenance is taken to be from the truth of one machine.
Calibration narrows it. The same draws price every strategy, so differences between strategies are meaningful.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from trainplan.costmodel.errors import ProfileError
from trainplan.costmodel.gemm import has_table
from trainplan.costmodel.hardware import Cluster, Link, Precision, Provenance, Quantity
from trainplan.costmodel.hardware_presets import gpu_facts, scale_up_link
from trainplan.costmodel.link_curves import LinkCurves, link_curves

Value = np.ndarray | float
DRAWS = 64
PRIOR_LOG_SD: dict[Provenance, float] = {"measured": 0.05, "fitted": 0.12, "datasheet": 0.25}
"""Standard deviation of log(true / stated). A measured rate repeats within some percent on another part; the measured
over datasheet ratio of large matrix products spans 0.51 to 0.87 (stas00/ml-engineering, MAMF table), about +-25 %."""
RESIDUAL_LOG_SD = 0.06
"""What the formulas leave out even with exact rates: kernel selection, clocks, jitter."""
ORDER: tuple[Provenance, ...] = ("measured", "fitted", "datasheet")


@dataclass(frozen=True)
class LinkRates:
    """One tier of the network: bus bandwidths [bytes/s] and the time of a hop [s]."""

    all_reduce: Value
    all_gather: Value
    all_to_all: Value
    p2p: Value
    latency: Value
    slower: Value = 1.0
    """Ratio of seconds to those of measured curves."""


@dataclass(frozen=True)
class Multipliers:
    """Ratios of seconds to the stated ones by kind of work; floats, or arrays [draws, 1]."""

    matmul: Value = 1.0
    attention: Value = 1.0
    memory: Value = 1.0
    scale_up: Value = 1.0
    scale_out: Value = 1.0
    host: Value = 1.0
    step: Value = 1.0
    contention: Value = 1.0


CONTENTION = 0.3
"""Share of a second that a second of communication costs the computation beside it. A prior: NCCL's kernels hold 16 to
24 of about 132 processors and move every byte through memory twice."""


@dataclass(frozen=True)
class Rates:
    """What prices a strategy; scalars, or arrays of shape [draws, 1] that broadcast against rows.

    ``scale_up_domain`` is a count, ``sequential_issue`` says that an operation's issue time adds to it (CPU) instead
    of hiding behind the device's queue (GPU).
    """

    matmul: dict[Precision, Value]
    attention: dict[Precision, Value]
    memory: Value
    op_overhead: Value
    host_link: Value
    scale_up: LinkRates
    scale_out: LinkRates
    scale_up_domain: int
    sequential_issue: bool
    weakest: Provenance
    host: Value = 1.0
    step: Value = 1.0
    contention: Value = CONTENTION
    curves: LinkCurves | None = None
    """Measured times of collectives inside a scale-up domain, where its links are the preset's."""

    def slowed(self, by: Multipliers) -> Rates:
        """The rates of a cluster whose work takes ``by`` times as long."""
        return replace(
            self,
            matmul={precision: rate / by.matmul for precision, rate in self.matmul.items()},
            attention={precision: rate / by.attention for precision, rate in self.attention.items()},
            memory=self.memory / by.memory,
            scale_up=_slower(self.scale_up, by.scale_up),
            scale_out=_slower(self.scale_out, by.scale_out),
            host=self.host * by.host,
            step=self.step * by.step,
            contention=self.contention * by.contention,
        )


def _slower(link: LinkRates, by: Value) -> LinkRates:
    values = {name: getattr(link, name) / by for name in ("all_reduce", "all_gather", "all_to_all", "p2p")}
    return replace(link, **values, latency=link.latency * by, slower=link.slower * by)


def rates(cluster: Cluster, precision: Precision, draws: int = 0, seed: int = 0) -> Rates:
    """The rates of a cluster; with ``draws`` each becomes an array [draws, 1] around its stated value.

    Raises:
        ProfileError: The device has no number for this precision.
    """
    device = cluster.device
    generator = np.random.default_rng(seed)
    used: list[Provenance] = []
    measured = device.name not in gpu_facts() or has_table(device)  # a machine of the user's own was measured

    def draw(quantity: Quantity, note: bool = True) -> Value:
        # What is carried over from other GPUs to one that has no table of its own is as good as its datasheet.
        known = quantity.provenance if measured or quantity.provenance == "measured" else "datasheet"
        if note:
            used.append(known)
        if not draws:
            return quantity.value
        spread = PRIOR_LOG_SD[known]
        return quantity.value * np.exp(spread * generator.standard_normal((draws, 1)))

    def link(of: Link | None, note: bool) -> LinkRates:
        if of is None:
            return LinkRates(np.inf, np.inf, np.inf, np.inf, 0.0)
        latency = draw(of.latency_s, note)
        collectives = ("all_reduce_bytes_per_s", "all_gather_bytes_per_s", "all_to_all_bytes_per_s")
        bus = [draw(getattr(of, name), note) for name in collectives]
        p2p = draw(of.p2p_bytes_per_s, False)  # matters to pipelines only
        return LinkRates(bus[0], bus[1], bus[2], p2p, latency, of.all_reduce_bytes_per_s.value / bus[0])

    missing = [p for p in (precision,) if p not in device.matmul_flops_per_s or p not in device.attention_flops_per_s]
    if missing:
        known = ", ".join(device.matmul_flops_per_s)
        raise ProfileError(
            f"{device.name} has no {missing[0]} rate in its profile (it has {known}). Choose one of those, or run "
            "`planner profile`."
        )
    host = device.host_link_bytes_per_s
    memory, overhead = draw(device.memory_bytes_per_s), draw(device.op_overhead_s)
    matmul = {p: draw(q, p == precision) for p, q in sorted(device.matmul_flops_per_s.items())}
    attention = {p: draw(q, p == precision) for p, q in sorted(device.attention_flops_per_s.items())}
    several = cluster.num_gpus > 1
    return Rates(
        matmul=matmul,
        attention=attention,
        memory=memory,
        op_overhead=overhead,
        host_link=draw(host, False) if host else 1.0,
        scale_up=link(cluster.scale_up, several),
        scale_out=link(cluster.scale_out, cluster.num_gpus > cluster.scale_up_domain),
        scale_up_domain=cluster.scale_up_domain,
        sequential_issue=device.kind == "cpu",
        weakest=max(used, key=ORDER.index),
        curves=_curves(cluster),
    )


def _curves(cluster: Cluster) -> LinkCurves | None:
    """The curves of the device's links, unless the cluster states links of its own (measured on the user's machine)."""
    name = cluster.device.name
    if name not in gpu_facts() or cluster.scale_up != scale_up_link(name):
        return None
    return link_curves(name)
