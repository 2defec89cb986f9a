"""Carry published microbenchmarks into profiles/measurements, compactly and with their sources.

    python benchmarks/import_measurements.py microbench.jsonl

Reads one JSON object a line and writes one file per kind (gemm, attention, moe, memory, collectives). Rows that share
device, operation, type, source and shape keys become one table: what is constant stands in ``fixed``, the rest are
columns, and the last column is microseconds. Nothing is fitted, averaged or filled in: a row that publishes a rate
instead of a time is turned back by the source's own FLOP count.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "profiles" / "measurements"
DEVICES = {
    "NVIDIA A100-SXM4-80GB": "A100-SXM4-80GB",
    "A100-SXM4": "A100-SXM4-80GB",
    "A100": "A100-SXM4-80GB",
    "A100-PCIe": "A100-PCIe-80GB",
    "NVIDIA H100 80GB HBM3": "H100-SXM5-80GB",
    "H100-80GB": "H100-SXM5-80GB",
    "NVIDIA H200": "H200-SXM-141GB",
    "NVIDIA B200": "B200-SXM-180GB",
    "B200": "B200-SXM-180GB",
    "NVIDIA B300 SXM6 AC": "B300-SXM-288GB",
    "NVIDIA GB200": "GB200-186GB",
    "NVIDIA GB300": "GB300-288GB",
    "H800": "H800",
    "V100": "V100-SXM2-32GB",
}
"""The device name of a publication -> ours of the same part."""
FILES = {
    "aic_gemm": "gemm",
    "cudnn_sdpa": "attention",
    "aic_attn": "attention",
    "aic_moe": "moe",
    "cudnn_norm": "memory",
    "liger": "memory",
    "aic_nccl": "collectives",
    "vtrain_nccl": "collectives",
    "gcp_a3mega": "collectives",
    "p2p_a100": "collectives",
    "deepep": "collectives",
    "simumax_comm": "collectives",
}
SIMUMAX = {"gemm": "gemm", "grouped_gemm": "moe", "attention_fwd": "attention", "attention_bwd": "attention"}
DTYPES = {"bfloat16": "bf16", "half": "fp16", "float": "fp32"}
ATTENTION_FLOP = {"sdp_fwd": 2, "sdp_bwd": 5}
"""Matrix products of a pass, for the one source that publishes rates; its causal half is not counted."""


def flat(shape: dict[str, Any] | None) -> dict[str, Any]:
    """Shape keys, a nested ``config`` lifted into the shape."""
    out: dict[str, Any] = {}
    for key, value in (shape or {}).items():
        out.update(value if key == "config" and isinstance(value, dict) else {key: value})
    return out


def microseconds(row: dict[str, Any], shape: dict[str, Any]) -> float | None:
    """The time of a row; from the rate and the source's FLOP count where only a rate is published."""
    if row.get("time_us") is not None:
        return float(row["time_us"])
    if row["block"] != "simumax_eff" or not row.get("tflops"):
        return None
    if row["kind"] == "gemm":
        flop = 2 * shape["b"] * shape["m"] * shape["n"] * shape["k"]
    elif row["kind"] == "grouped_gemm":
        flop = 2 * shape["ng"] * shape["M"] * shape["N"] * shape["K"]
    else:
        width = shape["qk_head_dim"] + shape["v_head_dim"]
        flop = ATTENTION_FLOP[row["op"]] * shape["batch"] * shape["head_num"] * shape["seq_len"] ** 2 * width
    return float(f"{flop / row['tflops'] / 1e6:.6g}")


def entries(path: Path) -> Iterator[tuple[str, tuple[str, ...], dict[str, Any], float]]:
    """(file, identity of the table, shape, microseconds or published number) of every row that is carried."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        name = SIMUMAX.get(row["kind"]) if row["block"] == "simumax_eff" else FILES.get(row["block"])
        if name is None or row["kind"] == "kernel_memory" or row["gpu"] not in DEVICES:
            continue
        shape = flat(row.get("shape"))
        value = microseconds(row, shape)
        for key in ("n_ranks", "size_bytes"):
            if row.get(key) is not None:
                shape[key] = row[key]
        unit = "us"
        if value is None:
            unit = "gb_per_s" if row.get("algbw_gbps") else "efficiency"
            value = row.get("algbw_gbps") or row.get("efficiency")
        if value is None:
            continue
        note = row.get("notes", "") if row["block"] in ("deepep", "simumax_comm") else ""
        identity = (
            row["kind"], row["op"], DEVICES[row["gpu"]], DTYPES.get(row.get("dtype", ""), row.get("dtype", "")),
            row["source_url_or_repo_path"].removeprefix("github:"), row.get("network", ""), note, unit,
            ",".join(shape),
        )  # fmt: skip
        yield name, identity, shape, value


def tables(path: Path) -> dict[str, list[dict[str, Any]]]:
    """File -> its tables."""
    grouped: dict[tuple[str, tuple[str, ...]], list[tuple[dict[str, Any], float]]] = defaultdict(list)
    for name, identity, shape, value in entries(path):
        grouped[name, identity].append((shape, value))
    files: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (name, identity), rows in grouped.items():
        kind, op, device, dtype, source, network, note, unit, keys = identity
        names = keys.split(",") if keys else []
        fixed = {k: rows[0][0][k] for k in names if all(shape[k] == rows[0][0][k] for shape, _ in rows)}
        columns = [k for k in names if k not in fixed]
        table: dict[str, Any] = {"kind": kind, "op": op, "device": device, "dtype": dtype, "source": source}
        table |= {key: text for key, text in (("network", network), ("note", note)) if text}
        body = sorted(([*(shape[k] for k in columns), value] for shape, value in rows), key=str)
        files[name].append({**table, "fixed": fixed, "columns": [*columns, unit], "rows": body})
    return files


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("microbench", type=Path)
    OUT.mkdir(exist_ok=True)
    for name, found in tables(parser.parse_args().microbench).items():
        lines = ",\n".join(json.dumps(table, separators=(",", ":")) for table in found)
        (OUT / f"{name}.json").write_text(f'{{"schema_version":1,"tables":[\n{lines}\n]}}\n', encoding="utf-8")
        print(f"{name}.json: {len(found)} tables, {sum(len(table['rows']) for table in found)} rows")


if __name__ == "__main__":
    main()
