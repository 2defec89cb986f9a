"""How far are the models of attention, memory-bound kernels and grouped products from measurements?

    python benchmarks/kernel_accuracy.py [--json]

Attention: the shipped model on every causal bf16 row, then the numbers of a table fitted again (fit_kernels.py) without
one sequence length or one head width and scored on it, and the model on another kernel of the same GPU. Memory-bound
kernels: counted bytes. Grouped products: SimuMax's tables and, as another source, aiconfigurator's fused forward of
experts. Last, the routing imbalance that skewed tables show, a ratio of times.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fit_kernels import (
    INFERENCE,
    TABLES,
    Row,
    attention_rows,
    chosen,
    columns,
    fit_pass,
    memory_rows,
    narrow_prior,
    predict_us,
)

from trainplan.costmodel.attention_rates import Kernel, attention_model
from trainplan.costmodel.gemm import gemm_model
from trainplan.costmodel.grouped import grouped_gemm_s, grouped_weight_grad_s
from trainplan.costmodel.hardware_presets import device
from trainplan.costmodel.memory_rates import memory_model
from trainplan.profiles import read_json

LARGE_BYTES = 64e6
"""Traffic from which a kernel's time says more about memory than about its launch."""
DIRECTIONS = ("forward", "backward")


def table_rows(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a table by name, its fixed values among them."""
    for row in table["rows"]:
        yield {**table["fixed"], **dict(zip(table["columns"], row, strict=True))}


def line(of: str, device_name: str, what: str, errors: Sequence[float]) -> dict[str, Any]:
    """A row of the report."""
    absolute = np.abs(errors)
    return {
        "of": of, "device": device_name, "what": what, "n": len(errors),
        "median": float(np.median(absolute)), "p90": float(np.quantile(absolute, 0.9)),
        "worst": float(absolute.max()), "bias": float(np.median(errors)),
    }  # fmt: skip


def attention_errors(name: str, kernel: Kernel, rows: Sequence[Row]) -> list[float]:
    """Errors of the shipped model, predicted over measured less 1."""
    model = attention_model(device(name), kernel)
    errors = []
    for r in rows:
        run = model.forward_s if r["direction"] == "forward" else model.backward_s
        sizes = (r["batch"], r["heads"], r["kv_heads"], r["q_len"], r["kv_len"], r["qk"], r["v"])
        errors.append(float(run(*sizes, bool(r["causal"]), r["window"] or None)) / (r["us"] * 1e-6) - 1)
    return errors


def held_out(key: str, direction: str) -> dict[str, list[float]]:
    """What was left out (one sequence length, one head width) -> errors of its rows by a fit to the others.

    A width that is left out is priced with the fit's prior of it.
    """
    rows, name = attention_rows(), key.split("/")[1]
    source, inference = TABLES[key]
    fitted = chosen(rows, name, source, direction)
    narrow = narrow_prior(rows, inference)
    found: dict[str, list[float]] = {}
    for what, column in (("one sequence length", "q_len"), ("one head width", "qk")):
        values = sorted({r[column] for r in fitted})
        for value in values if len(values) > 1 else ():
            of = fit_pass(name, direction, [r for r in fitted if r[column] != value], narrow)
            out = [r for r in fitted if r[column] == value and r["causal"]]
            if out:
                x = columns(out)
                found.setdefault(what, []).extend(predict_us(of, name, direction, x) / x["us"] - 1)
    return found


def attention_report() -> list[dict[str, Any]]:
    """In sample, held out and pooled, and another kernel."""
    rows = [r for r in attention_rows() if r["causal"]]
    lines: list[dict[str, Any]] = []
    pooled: dict[tuple[str, str], list[float]] = {}
    for key, (source, _) in TABLES.items():
        kernel, name = key.split("/")
        for direction in DIRECTIONS:
            every = [r for r in rows if (r["device"], r["source"], r["direction"]) == (name, source, direction)]
            fitted = chosen(every, name, source, direction)
            left = [r for r in every if r not in fitted and not (r["deterministic"] and direction == "backward")]
            for what, of in (("in sample", fitted), ("not fitted: host-bound, or 128K tokens", left)):
                if of:
                    errors = attention_errors(name, kernel, of)  # type: ignore[arg-type]
                    lines.append(line(f"attention {direction}", name, f"{source}, {what}", errors))
                    pooled.setdefault((f"attention {direction}", what), []).extend(errors)
            for what, errors in held_out(key, direction).items():
                lines.append(line(f"attention {direction}", name, f"{source}, without {what}", errors))
                pooled.setdefault((f"attention {direction}", f"without {what}"), []).extend(errors)
    lines.extend(line(of, "all", what, errors) for (of, what), errors in pooled.items())
    for name in INFERENCE:
        other = [r for r in rows if (r["device"], r["source"]) == (name, "inference")]
        errors = attention_errors(name, "cudnn", other)
        lines.append(line("attention forward", name, "aiconfigurator, another kernel", errors))
    return lines


def memory_report() -> list[dict[str, Any]]:
    """By device and table, and pooled by kind; small tensors and lone backward passes wait for the host there."""
    found: dict[tuple[str, str], list[float]] = {}
    pooled: dict[str, list[float]] = {}
    for r in memory_rows():
        model = memory_model(device(r["device"]))
        seconds = r["launches"] * float(model.seconds(r["bytes"] / r["launches"], r["kind"]))
        error = seconds / (r["us"] * 1e-6) - 1
        size = "large" if r["bytes"] >= LARGE_BYTES else "small"
        way = "forward" if r["direction"] in ("forward", "fwd") else "with backward"
        found.setdefault((r["device"], f"{r['op']}, {size}"), []).append(error)
        pooled.setdefault(f"{r['kind']} {way}, {size}", []).append(error)
    lines = [line("memory", name, title, errors) for (name, title), errors in sorted(found.items())]
    return lines + [line("memory", "all", what, errors) for what, errors in sorted(pooled.items())]


def grouped_report() -> list[dict[str, Any]]:
    """SimuMax's grouped tables by stage; aiconfigurator's experts, balanced; the imbalance of skewed routing."""
    lines: list[dict[str, Any]] = []
    imbalance: dict[tuple[int, int], list[float]] = {}
    for table in read_json("measurements", "moe.json")["tables"]:
        name = table["device"]
        if table["kind"] == "grouped_gemm":
            lines.extend(_grouped_lines(table))
            continue
        model = gemm_model(device(name), "bf16", "torch")
        errors, times = [], {}
        for row in table_rows(table):
            times[tuple(v for k, v in row.items() if k not in ("us", "distribution")), row["distribution"]] = row
            if row["distribution"] != "balanced":
                continue
            tokens, groups = row["tokens"] * row["top_k"] / row["ep"], row["experts"] / row["ep"]
            up = grouped_gemm_s(model, tokens, 2 * row["expert_ffn"], row["hidden"], groups)
            down = grouped_gemm_s(model, tokens, row["hidden"], row["expert_ffn"], groups)
            errors.append(float(up + down) / (row["us"] * 1e-6) - 1)
        if errors:
            lines.append(line("grouped", name, "aiconfigurator, balanced", errors))
        for (shape, distribution), row in times.items():
            if distribution != "balanced" and (shape, "balanced") in times:
                ratio = row["us"] / times[shape, "balanced"]["us"]
                imbalance.setdefault((row["tokens"], row["ep"]), []).append(ratio)
    for (tokens, ep), ratios in sorted(imbalance.items()):
        lines.append({
            "of": "imbalance", "device": "all", "what": f"{tokens} tokens, ep {ep}: power_law_1.2 over balanced",
            "n": len(ratios), "median": float(np.median(ratios)), "p90": float(np.quantile(ratios, 0.9)),
        })  # fmt: skip
    return lines


def _grouped_lines(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Errors of one of SimuMax's grouped tables, by stage; M rows per group, N columns and K summed going forward."""
    name = table["device"]
    model = gemm_model(device(name), "bf16", "transformer_engine")
    stages: dict[str, list[float]] = {}
    for row in table_rows(table):
        tokens, n, k, groups = row["ng"] * row["M"], row["N"], row["K"], row["ng"]
        if row["stage"] == "bwd_grad_w":
            seconds = grouped_weight_grad_s(model, tokens, n, k, groups, row["main_grad_dtype"] == "fp32")
        elif row["stage"] == "fwd":
            seconds = grouped_gemm_s(model, tokens, n, k, groups)
        else:
            seconds = grouped_gemm_s(model, tokens, k, n, groups)
        stages.setdefault(row["stage"], []).append(float(seconds) / (row["us"] * 1e-6) - 1)
    for stage, errors in sorted(stages.items()):
        yield line("grouped", name, f"SimuMax, {stage}", errors)
    yield line("grouped", name, "SimuMax, all", [e for errors in stages.values() for e in errors])


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    lines = attention_report() + memory_report() + grouped_report()
    if as_json:
        print(json.dumps(lines, indent=1))
        return
    for of in lines:
        what = f"{of['of']:18} {of['device']:16} {of['what']:58} n={of['n']:4}"
        if of["of"] == "imbalance":
            print(f"{what}  median {of['median']:6.2f}  p90 {of['p90']:6.2f}")
            continue
        print(
            f"{what}  median {of['median']:6.1%}  p90 {of['p90']:6.1%}  worst {of['worst']:6.1%}  "
            f"bias {of['bias']:+6.1%}"
        )


if __name__ == "__main__":
    main()
