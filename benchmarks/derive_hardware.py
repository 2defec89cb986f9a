"""Derive sustained rates of every known GPU and node from published microbenchmarks.

    python benchmarks/derive_hardware.py microbench.jsonl

Reads published kernel and collective measurements (one JSON object a line) and profiles/hardware/facts.json, and writes
profiles/hardware/derived.json, the only one of the two that the product reads. Datasheet numbers stay in the facts.

Every number says where it came from. ``measured`` is used only for a table taken on that very GPU (or node);
everything carried over from another one is ``fitted`` and names it. Carrying over always goes through a ratio to the
datasheet (or to another measured rate), and takes the median over the nearest GPUs that have one: those of the same
architecture, else of the same generation, else of the same vendor, else all.

Rates [FLOP/s, bytes/s] and what they are read from:
  matmul      the best large matrix product found (measured_max_matmul_tflops in the facts)
  attention   cuDNN fused attention, causal half counted, head_dim 128, bf16, at least 8192 tokens; forward is 1 and
              backward 2.5 of 3.5 parts of the work, so the rate of both is 3.5 / (1 / forward + 2.5 / backward)
  memory      cuDNN RMSNorm forward and backward on tensors of at least 64 MiB
  link        NCCL bus bandwidth of the largest message over the most ranks; a hop takes t / (n - 1), with t the time
              of the smallest all-gather
  network     one all-reduce table over two nodes: what each network link must carry, S / 8 links * 2 (k - 1) / k for
              k = 2 nodes, over the time; a hop takes half of what the smallest all-reduce needs beyond one node
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

Row = Mapping[str, Any]
Quantity = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
# The device name in a published table -> our name of the same part.
NAMES = {
    "NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB",
    "NVIDIA H200": "H200-SXM-141GB",
    "NVIDIA B200": "B200-SXM-180GB",
    "NVIDIA B300 SXM6 AC": "B300-SXM-288GB",
    "NVIDIA GB200": "GB200-186GB",
    "NVIDIA GB300": "GB300-288GB",
}
GENERATION = {
    "sm_70": "Volta", "sm_80": "Ampere", "sm_89": "Ada", "sm_90": "Hopper",
    "sm_100": "Blackwell", "sm_103": "Blackwell",
    "sm_120": "Blackwell", "gfx942": "CDNA3", "gfx950": "CDNA4",
}  # fmt: skip
LARGE_TENSOR_BYTES = 64 * 2**20  # above the 50 MB L2 of an H200, so that the norm reads from memory
LONG_SEQUENCE = 8192  # from here on the attention tables are flat to 10 %
RDMA_HOP_S = 10e-6  # p2p_latency of the system files of aiconfigurator, see `network_hop`


def quantity(value: float, provenance: str, source: str) -> Quantity:
    """A number as the product reads it, to six significant digits: no published table has more."""
    return {"value": float(f"{value:.6g}"), "provenance": provenance, "source": source}


def origin(row: Row) -> str:
    """Repository, file and commit of a published row, without the path between them."""
    path, _, commit = row["source_url_or_repo_path"].removeprefix("github:").partition("@")
    parts = path.split("/")
    return f"{parts[0]}/{parts[1]} {parts[-1]}" + (f" @{commit[:7]}" if commit else "")


class Nearest:
    """Carries a ratio over from the GPUs that have one to a GPU that has none."""

    def __init__(self, gpus: Mapping[str, Row], ratios: Mapping[str, float]) -> None:
        """Ratios by GPU name; ``gpus`` are the facts of all."""
        self.gpus, self.ratios = gpus, ratios

    def __call__(self, name: str) -> tuple[float, str]:
        """(median ratio, which GPUs it is from) for GPU ``name``."""

        def vendor(gpu: Row) -> str:
            return "AMD" if gpu["arch"].startswith("gfx") else "NVIDIA"

        keys: list[Callable[[Row], str]] = [lambda g: g["arch"], lambda g: GENERATION[g["arch"]], vendor, lambda g: ""]
        for key in keys:
            near = [n for n in self.ratios if n != name and key(self.gpus[n]) == key(self.gpus[name])]
            if near:
                return median(self.ratios[n] for n in near), _names(near)
        raise SystemExit(f"no GPU to carry a ratio to {name} over from")


def _names(gpus: Iterable[str]) -> str:
    names = sorted(gpus)
    return names[0] if len(names) == 1 else f"the median of {', '.join(names)}"


def matmul(gpus: Mapping[str, Row]) -> dict[str, dict[str, Quantity]]:
    """Sustained matrix products by GPU and precision."""
    rates: dict[str, dict[str, Quantity]] = defaultdict(dict)
    for precision in ("bf16", "fp8"):
        best = {n: g.get("measured_max_matmul_tflops", {}).get(precision) for n, g in gpus.items()}
        peaks = {n: g["peak_dense_tflops"][precision] for n, g in gpus.items()}
        near = Nearest(gpus, {n: best[n] / peaks[n] for n in gpus if best[n]})
        for name in gpus:
            if best[name]:
                source = f"best {precision} matrix product of a shape sweep, ml-engineering MAMF table"
                note = gpus[name].get("note", "")
                other_part = "MAMF row measured on" in note  # not this very part, so not its own measurement
                source += f" ({note})" if other_part else ""
                rates[name][precision] = quantity(best[name] * 1e12, "fitted" if other_part else "measured", source)
            elif peaks[name]:
                ratio, of = near(name)
                own = rates[name].get("bf16")
                if gpus[name]["arch"].startswith("gfx") and precision == "fp8" and own:
                    # no AMD part has a measured fp8 product; its own bf16 ratio is nearer than another vendor's
                    ratio, of = own["value"] / (gpus[name]["peak_dense_tflops"]["bf16"] * 1e12), "its own bf16 products"
                source = f"datasheet {precision} peak times {ratio:.3f}, the measured share of peak of {of}"
                rates[name][precision] = quantity(peaks[name] * ratio * 1e12, "fitted", source)
    for name, gpu in gpus.items():
        peak = gpu["peak_dense_tflops"]
        if fp4 := gpu.get("peak_dense_fp4_tflops"):
            share = rates[name]["fp8"]["value"] / (peak["fp8"] * 1e12)
            source = f"datasheet fp4 peak times {share:.3f}, the sustained share of the fp8 peak"
            rates[name]["nvfp4"] = quantity(fp4 * share * 1e12, "fitted", source)
        share = rates[name]["bf16"]["value"] / (peak["bf16"] * 1e12)
        fp32, what = (peak["bf16"] / 2, "half the bf16 peak")
        for kind in ("tf32", "fp32"):
            if peak.get(kind):
                fp32, what = peak[kind], f"{kind} peak"
                break
        source = f"datasheet {what} times {share:.3f}, the sustained share of the bf16 peak"
        rates[name]["fp32"] = quantity(fp32 * share * 1e12, "fitted", source)
    return rates


def attention(
    gpus: Mapping[str, Row], blocks: Mapping[str, list[Row]], products: Mapping[str, dict[str, Quantity]]
) -> dict[str, dict[str, Quantity]]:
    """Sustained fused attention, forward and backward together, by GPU and precision."""
    both: dict[str, dict[tuple[Any, ...], dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    sources: dict[str, str] = {}
    for row in blocks["cudnn_sdpa"]:
        s = row["shape"]
        wanted = s["head_dim_qk"] == s["head_dim_v"] == 128 and s["causal"] and not s["window"]
        if wanted and row["dtype"] == "bfloat16" and not s["deterministic"] and s["q_seq"] >= LONG_SEQUENCE:
            shape = (s["q_seq"], s["batch"], s["heads"], s["kv_heads"])
            both[NAMES[row["gpu"]]][shape]["fwd" if "fwd" in row["op"] else "bwd"] = row["tflops"]
            sources[NAMES[row["gpu"]]] = origin(row)
    measured = {
        name: median(3.5 / (1 / t["fwd"] + 2.5 / t["bwd"]) for t in shapes.values() if len(t) == 2)
        for name, shapes in both.items()
    }
    forward: dict[str, list[Row]] = defaultdict(list)
    for row in blocks["aic_attn"]:
        if row["shape"]["head_dim"] == 128 and row["shape"]["seq"] >= LONG_SEQUENCE:
            forward[NAMES[row["gpu"]]].append(row)
    inference = {name: median(r["tflops"] for r in rows) for name, rows in forward.items()}
    in_both = [n for n in measured if n in inference]
    total_over_forward = median(measured[n] / inference[n] for n in in_both)
    known = {**{n: inference[n] * total_over_forward for n in inference}, **measured}
    near = Nearest(gpus, {n: known[n] * 1e12 / products[n]["bf16"]["value"] for n in known})

    rates: dict[str, dict[str, Quantity]] = {}
    for name in gpus:
        if name in measured:
            bf16 = quantity(
                measured[name] * 1e12,
                "measured",
                f"cuDNN attention, causal, head_dim 128, 64 query and 8 key-value heads, 8192 to 32768 tokens, forward "
                f"and backward combined; {sources[name]}",
            )
        elif name in inference:
            bf16 = quantity(
                known[name] * 1e12,
                "fitted",
                f"an inference kernel's forward rate ({inference[name]:.4g} TFLOP/s, {origin(forward[name][0])}) times "
                f"{total_over_forward:.3f}, training attention over that kernel on {_names(in_both)}",
            )
        else:
            ratio, of = near(name)
            source = f"sustained bf16 matrix products times {ratio:.3f}, attention over matrix products of {of}"
            bf16 = quantity(products[name]["bf16"]["value"] * ratio, "fitted", source)
        scale = products[name]["fp32"]["value"] / products[name]["bf16"]["value"]
        rates[name] = {
            "bf16": bf16,
            "fp32": quantity(bf16["value"] * scale, "fitted", "bf16 attention scaled as fp32 to bf16 matrix products"),
        }
        for low in ("fp8", "nvfp4"):
            if low in products[name]:
                source = f"attention stays in bf16 under {low} training: {bf16['source']}"
                rates[name][low] = quantity(bf16["value"], bf16["provenance"], source)
    return rates


def memory_and_issue(gpus: Mapping[str, Row], blocks: Mapping[str, list[Row]]) -> dict[str, dict[str, Quantity]]:
    """Sustained memory bandwidth, and the least time of one operation, by GPU."""
    large: dict[str, list[float]] = defaultdict(list)
    smallest: dict[str, float] = {}
    source: dict[str, str] = {}
    for row in blocks["cudnn_norm"]:
        name = NAMES[row["gpu"]]
        if not row["op"].startswith("rms_norm"):
            continue
        source[name] = origin(row)
        smallest[name] = min(smallest.get(name, 1.0), row["time_us"] * 1e-6)
        if "backend cudnn" in row["op"] and 2 * row["shape"]["rows"] * row["shape"]["cols"] >= LARGE_TENSOR_BYTES:
            large[name].append(row["mem_gbps"] * 1e9)
    measured = {name: median(values) for name, values in large.items()}
    near = Nearest(gpus, {n: rate / (gpus[n]["memory_gbps"] * 1e9) for n, rate in measured.items()})
    rates: dict[str, dict[str, Quantity]] = {}
    for name, gpu in gpus.items():
        if name in measured:
            what = f"median of cuDNN RMSNorm forward and backward on tensors of 64 MiB and more, {source[name]}"
            sustained = quantity(measured[name], "measured", what)
            what = f"fastest RMSNorm kernel of 1 MiB (1 us resolution), device side, {source[name]}"
            issue = quantity(smallest[name], "measured", what)
        else:
            ratio, of = near(name)
            what = f"datasheet bandwidth times {ratio:.3f}, the measured share of it of {of}"
            sustained = quantity(gpu["memory_gbps"] * 1e9 * ratio, "fitted", what)
            what = f"fastest small RMSNorm kernel, device side, of {_names(smallest)}"
            issue = quantity(median(smallest.values()), "fitted", what)
        rates[name] = {"memory_bytes_per_s": sustained, "op_overhead_s": issue}
    return rates


COLLECTIVES = {
    "all_reduce_bytes_per_s": "all_reduce",
    "all_gather_bytes_per_s": "all_gather",
    "all_to_all_bytes_per_s": "alltoall",
}


def nvlink_tables(blocks: Mapping[str, list[Row]]) -> dict[str, dict[str, Quantity]]:
    """The scale-up link of every GPU with an NCCL table, each number from its most ranks."""
    tables: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in blocks["aic_nccl"]:
        tables[NAMES[row["gpu"]], row["op"]].append(row)
    links: dict[str, dict[str, Quantity]] = defaultdict(dict)
    for (name, op), rows in tables.items():
        ranks = max(r["n_ranks"] for r in rows)
        most = sorted((r for r in rows if r["n_ranks"] == ranks), key=lambda r: r["size_bytes"])
        version = f"NCCL {nccl_version(blocks, name)['nccl']}"
        for field, collective in COLLECTIVES.items():
            if op == collective:
                what = f"{version} {op} of {most[-1]['size_bytes'] >> 20} MiB over {ranks} GPUs, {origin(most[-1])}"
                links[name][field] = quantity(most[-1]["busbw_gbps"] * 1e9, "measured", what)
        if op == "all_gather":
            what = f"{version} all_gather of {most[0]['size_bytes']} B over {ranks} GPUs, a hop of {ranks - 1}"
            what = f"{what}, {origin(most[0])}"
            links[name]["latency_s"] = quantity(most[0]["time_us"] * 1e-6 / (ranks - 1), "measured", what)
    return links


def nccl_version(blocks: Mapping[str, list[Row]], name: str) -> dict[str, str]:
    """The NCCL release of a GPU's own table; empty without one."""
    paths = (r["source_url_or_repo_path"] for r in blocks["aic_nccl"] if NAMES[r["gpu"]] == name)
    found = re.search(r"/nccl/([\d.]+)/", next(paths, ""))
    return {"nccl": found[1]} if found else {}


def pcie_ratios(blocks: Mapping[str, list[Row]]) -> tuple[dict[str, float], float, str]:
    """(bus bandwidth over the 32 GB/s of PCIe 4 x16 by field, seconds of a hop, origin) of eight A100-PCIe."""
    rows = {r["op"]: r for r in blocks["simumax_comm"] if str(r.get("network", "")).startswith("intra_node_pcie_8x")}
    nominal = 30.0  # GB/s, stated in the row's network: the unit of its efficiency
    ops = {**COLLECTIVES, "all_to_all_bytes_per_s": "all2all"}
    latency = re.search(r"latency_us=([\d.]+)", rows["all_gather"]["notes"])
    if latency is None:
        raise SystemExit("the PCIe rows state no latency")
    ratios = {field: rows[op]["efficiency"] * nominal / 32 for field, op in ops.items()}
    return ratios, float(latency[1]) * 1e-6, origin(rows["all_gather"])


def scale_up(gpus: Mapping[str, Row], blocks: Mapping[str, list[Row]]) -> dict[str, dict[str, Any]]:
    """The link between the GPUs of one scale-up domain, by GPU."""
    tables, (pcie, pcie_hop, pcie_source) = nvlink_tables(blocks), pcie_ratios(blocks)
    sendrecv = max(blocks["p2p_a100"], key=lambda r: r["size_bytes"])
    links: dict[str, dict[str, Any]] = {}
    for name, gpu in gpus.items():
        unidirectional, technology = gpu["scaleup_unidirectional_gbps"] * 1e9, gpu["scaleup"]
        link: dict[str, Any] = {"kind": technology, **tables.get(name, {})}
        pair = gpu.get("note", "").split("; tdp")[0]
        note = f" ({pair})" if "pair" in pair else ""
        if name == "A100-SXM4-80GB":
            what = f"NCCL sendrecv of {sendrecv['size_bytes'] >> 20} MiB around 8 GPUs, {origin(sendrecv)}"
            link["p2p_bytes_per_s"] = quantity(sendrecv["busbw_gbps"] * 1e9, "measured", what)
        elif "xGMI" in technology:
            what = f"datasheet, one of the 7 links of the mesh: a pair has no other path{note}"
            link["p2p_bytes_per_s"] = quantity(unidirectional / 7, "datasheet", what)
        else:
            link["p2p_bytes_per_s"] = quantity(unidirectional, "datasheet", f"datasheet, one direction of {technology}")
        if name not in tables:
            same = [n for n in tables if gpus[n]["scaleup"].split("/")[0] == technology.split(" ")[0].split("/")[0]]
            for field in COLLECTIVES:
                if technology.startswith("PCIe"):
                    ratio, of = pcie[field], f"eight A100-PCIe of {pcie_source}"
                else:
                    near = same or list(tables)
                    ratio = median(
                        tables[n][field]["value"] / (gpus[n]["scaleup_unidirectional_gbps"] * 1e9) for n in near
                    )
                    of = _names(near)
                what = f"datasheet bandwidth times {ratio:.3f}, bus over link bandwidth of {of}{note}"
                link[field] = quantity(unidirectional * ratio, "fitted", what)
            if technology.startswith("PCIe"):
                link["latency_s"] = quantity(pcie_hop, "fitted", f"a hop between eight A100-PCIe, {pcie_source}")
            else:
                near = same or list(tables)
                hop = median(tables[n]["latency_s"]["value"] for n in near)
                link["latency_s"] = quantity(hop, "fitted", f"a hop of {_names(near)}")
        links[name] = link
    return links


def network_hop(fabric: str, measured_s: float, where: str) -> Quantity:
    """Seconds of a hop between nodes. The only table is of a TCP fabric; RDMA fabrics take a published constant."""
    if "TCPX" in fabric:
        return quantity(measured_s, "fitted", f"half of the smallest all-reduce beyond one node on {where}")
    what = "p2p_latency of ai-dynamo/aiconfigurator systems/<name>.yaml @095f58a, for RDMA fabrics"
    return quantity(RDMA_HOP_S, "fitted", what)


def scale_out(
    nodes: Iterable[Row], blocks: Mapping[str, list[Row]], links: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The network between nodes, per GPU, by node; nodes without one are left out."""
    table = sorted(blocks["gcp_a3mega"], key=lambda r: r["size_bytes"])
    first, last, measured_node = table[0], table[-1], "gcp-a3-megagpu-8g"
    line_rate = 25e9  # 200 Gbit/s per GPU on that node
    rate = last["size_bytes"] / 8 / (last["time_us"] * 1e-6)  # 2 (k - 1) / k = 1 for the two nodes
    one_node_s = 2 * 7 * links["H100-SXM5-80GB"]["latency_s"]["value"]
    hop_s = (first["time_us"] * 1e-6 - one_node_s) / 2
    where = f"two {measured_node} (16 GPUs), {origin(last)}"
    exchange = [r for r in blocks["deepep"] if r["n_ranks"] == 16 and r["network"] == "RDMA CX7 400Gb"]
    exchange = [r for r in exchange if "low-latency" not in r["op"]]
    exchanged = f"expert dispatch over 16 GPUs, {origin(exchange[0])}"
    exchange_share = min(r["algbw_gbps"] for r in exchange) / 50  # ConnectX-7: 400 Gbit/s
    fabrics: dict[str, dict[str, Any]] = {}
    for node in nodes:
        per_gpu = node["scaleout_unidirectional_gbytes_per_s_per_gpu"]
        if not per_gpu:
            continue
        share = rate / line_rate
        note = f" ({node['note']})" if "placeholder" in node.get("note", "") else ""
        carried = quantity(
            per_gpu * 1e9 * share,
            "fitted",
            f"datasheet per GPU times {share:.3f}, an 8 GiB all-reduce on {where}{note}",
        )
        link = {
            "kind": node["fabric"],
            "all_reduce_bytes_per_s": carried,
            "all_gather_bytes_per_s": carried,
            "all_to_all_bytes_per_s": quantity(
                per_gpu * 1e9 * exchange_share,
                "fitted",
                f"datasheet per GPU times {exchange_share:.3f}, {exchanged}{note}",
            ),
            "p2p_bytes_per_s": carried,
            "latency_s": network_hop(node["fabric"], hop_s, where),
        }
        if node["name"] == measured_node:
            what = f"NCCL all_reduce of 8 GiB on {where}: bytes each network link carries over the time"
            link["all_reduce_bytes_per_s"] = quantity(rate, "measured", what)
            what = f"half of the smallest all_reduce beyond one node on {where}"
            link["latency_s"] = quantity(hop_s, "measured", what)
        fabrics[node["name"]] = link
    return fabrics


def derive(facts: Mapping[str, Any], rows: Iterable[Row]) -> dict[str, Any]:
    """Everything that profiles/hardware/derived.json holds."""
    gpus = {gpu["name"]: gpu for gpu in facts["gpus"]}
    blocks: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        blocks[row["block"]].append(row)
    products, other, links = matmul(gpus), memory_and_issue(gpus, blocks), scale_up(gpus, blocks)
    fused = attention(gpus, blocks, products)
    software = {name: nccl_version(blocks, name) for name in gpus}
    return {
        "schema": "hardware_derived/1",
        "made_by": "benchmarks/derive_hardware.py",
        "gpus": {
            name: {
                "matmul_flops_per_s": products[name],
                "attention_flops_per_s": fused[name],
                **other[name],
                "software": software[name],
                "scale_up": links[name],
            }
            for name in gpus
        },
        "nodes": scale_out(facts["nodes"], blocks, links),
    }


def main() -> None:
    """Read the rows named on the command line and write derived.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path, help="published microbenchmarks, one JSON object a line")
    folder = ROOT / "profiles" / "hardware"
    parser.add_argument("-o", "--output", type=Path, default=folder / "derived.json")
    arguments = parser.parse_args()
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    with arguments.rows.open(encoding="utf-8") as file:
        derived = derive(facts, (json.loads(line) for line in file if line.strip()))
    text = json.dumps(derived, indent=1)
    one_line = re.compile(
        r'{\s+("value": [^\n]+)\s+("provenance": [^\n]+)\s+("source": [^\n]+)\s+}'
    )  # a quantity a line
    arguments.output.write_text(one_line.sub(r"{\1 \2 \3}", text) + "\n", encoding="utf-8")
    print(f"{arguments.output}: {len(derived['gpus'])} GPUs, {len(derived['nodes'])} networks")


if __name__ == "__main__":
    main()
