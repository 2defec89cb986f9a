"""A cluster of round numbers, so that expected times can be counted by hand."""

from collections.abc import Callable

import pytest

from trainplan.costmodel.hardware import Cluster, Device, Link, Provenance, Quantity

MakeCluster = Callable[..., Cluster]


@pytest.fixture
def round_cluster() -> MakeCluster:
    """``round_cluster(gpus, memory_gb=80, ...)``: 1 PFLOP/s, 1 TB/s, links of 100 and 10 GB/s, no latency."""

    def make(gpus: int = 1, memory_gb: float = 80, provenance: Provenance = "measured", kind: str = "gpu") -> Cluster:
        def of(value: float) -> Quantity:
            return Quantity(value=value, provenance=provenance, source="round number")

        def link(rate: float) -> Link:
            return Link(
                kind="round",
                all_reduce_bytes_per_s=of(rate),
                all_gather_bytes_per_s=of(rate),
                all_to_all_bytes_per_s=of(rate),
                p2p_bytes_per_s=of(rate),
                latency_s=of(0),
            )

        rate = {"bf16": of(1e15), "fp32": of(1e15)}
        device = Device(
            name="round",
            kind=kind,  # type: ignore[arg-type]
            arch="sm_90",
            memory_bytes=of(memory_gb * 1e9),
            memory_bytes_per_s=of(1e12),
            peak_flops_per_s=rate,  # type: ignore[arg-type]
            matmul_flops_per_s=rate,  # type: ignore[arg-type]
            attention_flops_per_s=rate,  # type: ignore[arg-type]
            op_overhead_s=of(0),
        )
        return Cluster(
            name=f"{gpus}xround",
            device=device,
            num_nodes=max(1, gpus // 8),
            gpus_per_node=min(gpus, 8),
            scale_up=link(1e11),
            scale_up_domain=8,
            scale_out=link(1e10),
        )

    return make
