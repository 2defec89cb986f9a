"""Which GPUs and nodes are known, and how fast is each? profiles/hardware as `Device`, `Link` and node shapes.

Datasheet numbers come from facts.json, sustained rates from derived.json (made by benchmarks/derive_hardware.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainplan.costmodel.hardware import Device, Link, Precision, Quantity
from trainplan.profiles import read_json

ANY_GPU = "single-gpu"  # the one node preset that fits every GPU


@dataclass(frozen=True, slots=True)
class NodeShape:
    """A node type: how many GPUs of what kind it holds and what connects it to others."""

    name: str
    gpu: str
    gpus_per_node: int
    scale_up_domain: int
    scale_out: Link | None  # None: no known network


@functools.cache
def _facts() -> Mapping[str, Any]:
    facts: Mapping[str, Any] = read_json("hardware", "facts.json")
    return facts


@functools.cache
def _derived() -> Mapping[str, Any]:
    derived: Mapping[str, Any] = read_json("hardware", "derived.json")
    return derived


@functools.cache
def _aliases() -> Mapping[str, Any]:
    aliases: Mapping[str, Any] = read_json("hardware", "aliases.json")
    return aliases


def gpu_facts() -> Mapping[str, Mapping[str, Any]]:
    """Datasheet facts of every GPU by name, as published: vendor GB, GB/s and TFLOP/s."""
    return {gpu["name"]: gpu for gpu in _facts()["gpus"]}


def node_facts() -> Mapping[str, Mapping[str, Any]]:
    """Facts of every node type by name."""
    return {node["name"]: node for node in _facts()["nodes"]}


def normal(name: str) -> str:
    """How names are compared: lower case, hyphens for blanks and underscores, no vendor in front."""
    text = "-".join(name.strip().lower().replace("_", " ").split())
    for vendor in ("nvidia-", "amd-", "instinct-"):
        text = text.removeprefix(vendor)
    return text


@functools.cache
def gpu_names() -> Mapping[str, str]:
    """Normal name or alias -> name in the facts, of every GPU."""
    return {**_aliases()["gpus"], **{normal(name): name for name in gpu_facts()}}


@functools.cache
def node_names() -> Mapping[str, tuple[str, int]]:
    """Normal name or alias -> (name in the facts, nodes): a rack is one name for several nodes."""
    racks = {name: (rack["node"], rack["nodes"]) for name, rack in _aliases()["racks"].items()}
    aliases = {name: (node, 1) for name, node in _aliases()["nodes"].items()}
    return {**aliases, **racks, **{normal(name): (name, 1) for name in node_facts()}}


@functools.cache
def device(gpu: str) -> Device:
    """The GPU of this exact name in the facts."""
    facts, derived = gpu_facts()[gpu], _derived()["gpus"][gpu]
    names = _facts()["sources"]
    source = f"datasheet: {'; '.join(names[s] for s in facts['sources'])}"

    def datasheet(value: float, note: str = "") -> Quantity:
        return Quantity(value=value, provenance="datasheet", source=f"{source}{note}")

    peaks = facts["peak_dense_tflops"]
    peak: dict[Precision, Quantity] = {"bf16": datasheet(peaks["bf16"] * 1e12)}
    if peaks["tf32"]:
        peak["fp32"] = datasheet(peaks["tf32"] * 1e12, "; fp32 matrix products run as tf32")
    elif peaks.get("fp32"):
        peak["fp32"] = datasheet(peaks["fp32"] * 1e12, "; no tf32 units")
    else:
        half = "half the bf16 peak, as tf32 is on other parts; no tf32 figure is published for this one"
        peak["fp32"] = Quantity(value=peaks["bf16"] * 1e12 / 2, provenance="fitted", source=half)
    if peaks["fp8"]:
        peak["fp8"] = datasheet(peaks["fp8"] * 1e12)
    if fp4 := facts.get("peak_dense_fp4_tflops"):
        peak["nvfp4"] = datasheet(fp4 * 1e12)
    usable, host = facts.get("usable_mib"), facts.get("pcie_unidirectional_gbps")
    return Device(
        name=gpu,
        kind="gpu",
        arch=facts["arch"],
        memory_bytes=datasheet(usable * 2**20, "; usable part") if usable else datasheet(facts["memory_gb"] * 1e9),
        memory_bytes_per_s=_quantity(derived["memory_bytes_per_s"]),
        peak_flops_per_s=peak,
        matmul_flops_per_s=_rates(derived["matmul_flops_per_s"]),
        attention_flops_per_s=_rates(derived["attention_flops_per_s"]),
        op_overhead_s=_quantity(derived["op_overhead_s"]),
        host_link_bytes_per_s=datasheet(host * 1e9) if host else None,
    )


def scale_up_link(gpu: str) -> Link:
    """What connects GPUs of this exact name inside one scale-up domain."""
    return _link(_derived()["gpus"][gpu]["scale_up"])


def software(gpu: str) -> dict[str, str]:
    """Versions that this GPU's measured link numbers belong to; empty where none was measured."""
    return dict(_derived()["gpus"][gpu]["software"])


def node_shape(name: str, gpu: str | None = None) -> NodeShape:
    """The node of this exact name in the facts; `ANY_GPU` takes its GPU from ``gpu``."""
    facts, link = node_facts()[name], _derived()["nodes"].get(name)
    return NodeShape(
        name=name,
        gpu=gpu or facts["gpu"],
        gpus_per_node=facts["gpus_per_node"],
        scale_up_domain=facts.get("nvlink_domain_gpus", facts["gpus_per_node"]),
        scale_out=_link(link) if link else None,
    )


def default_node(gpu: str) -> NodeShape | None:
    """The first node type of the facts that holds this GPU and has a network; None where no such node is known."""
    for name, facts in node_facts().items():
        if facts["gpu"] == gpu and name in _derived()["nodes"]:
            return node_shape(name)
    return None


def preset_devices() -> list[tuple[str, Device, dict[str, Any]]]:
    """(name, device, facts) of every known GPU; the facts hold the raw datasheet values and ``aliases``."""
    return [(name, device(name), {**facts, "aliases": _gpu_aliases(name)}) for name, facts in gpu_facts().items()]


def _gpu_aliases(name: str) -> list[str]:
    return sorted(alias for alias, gpu in _aliases()["gpus"].items() if gpu == name)


def node_aliases(name: str) -> list[str]:
    """Other names of a node type, racks of it included."""
    racks = [alias for alias, rack in _aliases()["racks"].items() if rack["node"] == name]
    return sorted([alias for alias, node in _aliases()["nodes"].items() if node == name] + racks)


def _quantity(entry: Mapping[str, Any]) -> Quantity:
    return Quantity(**entry)


def _rates(entries: Mapping[Precision, Mapping[str, Any]]) -> dict[Precision, Quantity]:
    return {precision: _quantity(entry) for precision, entry in entries.items()}


def _link(entry: Mapping[str, Any]) -> Link:
    return Link(**{key: value if key == "kind" else _quantity(value) for key, value in entry.items()})
