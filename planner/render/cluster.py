"""What is known of a cluster? Its numbers, each with where it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from trainplan.costmodel.hardware import Cluster, Device, Link
from trainplan.planner.provenance import Sourced, provenance_counts, quantities
from trainplan.planner.render.console import heading, line, table
from trainplan.planner.render.format import by_unit, bytes_per_s, flops_per_s, size


def print_quantities(to: Console, cluster: Cluster) -> None:
    """Every number of a cluster, its kind, and the sources, each written once."""
    counts = ", ".join(f"{n} {kind}" for kind, n in provenance_counts(cluster).items())
    heading(to, f"Numbers behind the prediction ({counts})")
    found = quantities(cluster)
    numbers = source_numbers(found)
    table(
        to,
        [(q.path, by_unit(q.field, q.value), q.provenance, f"[{numbers[q.source]}]") for q in found],
        headers=("number", "value", "kind", "source"),
        right=(1,),
    )
    heading(to, "Sources")
    table(to, [(f"[{number}]", source) for source, number in numbers.items()])


def source_numbers(found: Sequence[Sourced]) -> dict[str, int]:
    """Source -> its number in a list without repeats, in the order of appearance, from 1."""
    return {source: number for number, source in enumerate(dict.fromkeys(q.source for q in found), 1)}


def print_cluster(to: Console, cluster: Cluster) -> None:
    """The shape of a cluster, its software, and its numbers."""
    device = cluster.device
    line(to, f"{cluster.name}: {cluster.num_nodes} x {cluster.gpus_per_node} x {device.name} ({device.arch})")
    rows = [
        ("scale-up", _link(cluster.scale_up, f"{cluster.scale_up_domain} devices")),
        ("scale-out", _link(cluster.scale_out, "between domains")),
    ]
    rows += [(name, version) for name, version in cluster.software.items()]
    table(to, rows)
    print_quantities(to, cluster)


def _link(link: Link | None, reach: str) -> str:
    return "none" if link is None else f"{link.kind}, {reach}"


def print_devices(to: Console, devices: Sequence[Device]) -> None:
    """One line per GPU; the kind is that of the matrix products' rate."""
    heading(to, "GPUs (what large copies and bf16 matrix products sustain)")
    rows = []
    for device in devices:
        sustained = device.matmul_flops_per_s["bf16"]
        rows.append(
            (
                device.name,
                size(device.memory_bytes.value),
                bytes_per_s(device.memory_bytes_per_s.value),
                flops_per_s(sustained.value),
                sustained.provenance,
            )
        )
    table(to, rows, headers=("GPU", "memory", "bandwidth", "products", "kind"), right=(1, 2, 3))


def print_nodes(to: Console, nodes: Sequence[tuple[str, Cluster, Mapping[str, Any]]]) -> None:
    """One line per node type: its GPUs, and the names it also goes by."""
    heading(to, "Nodes")
    rows = [
        (
            name,
            f"{cluster.gpus_per_node} x {cluster.device.name}",
            ", ".join(facts["aliases"]),
        )
        for name, cluster, facts in nodes
    ]
    table(to, rows, headers=("node", "GPUs", "also"))
