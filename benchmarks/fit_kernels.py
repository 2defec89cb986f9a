"""Fit the attention and the memory-bound kernel models to the published tables.

    python benchmarks/fit_kernels.py

Reads profiles/measurements/attention.json, memory.json and profiles/hardware, writes
profiles/measurements/kernel_fit.json:

- attention: per kernel and device the parameters of `trainplan.costmodel.attention_rates.Pass`, each direction apart;
- inference: the same of aiconfigurator's prefill kernel, forward only. It writes the KV cache besides and reaches less
  than the training kernels, so no plan is priced with it; its heads of 64 against 128 are the only such pairs there
  are, and give the prior of ``narrow``;
- memory: per architecture and kind of kernel the share of the sustained rate and the fixed time.

Least squares of log times with a soft loss, each parameter with a physical range and a weak prior.

Decisions on the tables:
- SimuMax (A100-PCIe, B200) gives efficiencies of 2 and 5 products over the whole square; its times match causal
  kernels: counted in full, its B200 would run at 120 % of the peak at 32K tokens (59 % with the causal half), its A100
  at 119 %. So half the square is counted, as everywhere.
- SimuMax's B200 forward takes 91 to 106 us for 4, 8 and 16 heads alike: the host's launch of a Transformer Engine
  module, not the kernel. Rows below HOST_BOUND_US are left out. So are its rows of 128K tokens, which reach 15 to 20 %
  less than those of 32K: passes of 30 ms and more at the power limit, back to back. From 32 heads on, each one more
  takes 3.3 to 3.8 us, and 40 us are left per call: other kernels of the module. With them a sequence length left out is
  missed by 6 % instead of 17 %, and the last wave costs what it does on the GB200; the backward pass has nothing such.
- cuDNN's deterministic backward is another kernel and left out, but for H200 at head_dim 192, where no other row is.
- FlashAttention-2 on the A100 is SimuMax's table of flash-attn on the PCIe card (one length, so its ramp leans on the
  prior). aiconfigurator's A100 prefill reaches 47 % of the peak where the paper has 60 to 73 % (arXiv:2307.08691).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from trainplan.costmodel.attention_rates import (
    BACKWARD_FLOPS,
    FIXED_S,
    SMS,
    TILE,
    Pass,
    attention_flops,
    keys_read,
)
from trainplan.costmodel.hardware_presets import device
from trainplan.costmodel.kernel_sets import EAGER_BF16, EAGER_FP32, FUSED, Kernel
from trainplan.profiles import read_json

OUT = Path(__file__).resolve().parent.parent / "profiles" / "measurements" / "kernel_fit.json"
HOST_BOUND_US = 120
LONGEST = 65536
SOFT = 0.05  # log error beyond which a row counts less
PRIOR_WEIGHT = 3.0  # a table's rows are far from independent
# Per parameter: lowest, usual, highest, and the prior's width in log.
PRIORS: Mapping[str, tuple[float, float, float, float]] = {
    "share": (0.05, 0.6, 1.0, 0.5),
    "start": (1, 100, 1500, 0.7),  # a tile or two of keys
    "diagonal": (16, 200, 2500, 0.7),  # half a tile of 128 queries, and of 128 or 256 keys, at least
    "tail": (0.05, 0.5, 3.0, 1.0),
    "narrow": (0.3, 0.75, 1.2, 0.05),
    "wide": (0.5, 0.95, 1.2, 0.3),
}
NARROW_FLASH2 = 0.93
"""FlashAttention-2's heads of 64, which its table lacks; a guess: that they lose little on Ampere."""
TABLES: Mapping[str, tuple[str, str]] = {
    # kernel/device: (source, inference table that gives the prior of narrow)
    "cudnn/H200-SXM-141GB": ("cudnn", "H200-SXM-141GB"),
    "cudnn/GB200-186GB": ("cudnn", "B200-SXM-180GB"),
    "cudnn/GB300-288GB": ("cudnn", "B200-SXM-180GB"),
    "cudnn/B200-SXM-180GB": ("simumax", "B200-SXM-180GB"),
    "flash2/A100-PCIe-80GB": ("simumax", ""),
}
INFERENCE = ("A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM-141GB", "B200-SXM-180GB")
CALL_S: Mapping[tuple[str, str], float] = {("B200-SXM-180GB", "forward"): 40e-6}
"""(device, direction) -> time per call of SimuMax's tables, where it is not FIXED_S."""
Row = dict[str, Any]
Rows = dict[str, np.ndarray]


def attention_rows() -> list[Row]:
    """Every bf16 row of the attention tables, in one vocabulary."""
    found = []
    for table in read_json("measurements", "attention.json")["tables"]:
        if table["dtype"] not in ("bf16", ""):
            continue
        op = table["op"]
        for values in table["rows"]:
            x = {**table["fixed"], **dict(zip(table["columns"], values, strict=True))}
            q_len = x.get("q_seq", x.get("seq", x.get("seq_len")))
            qk = x.get("head_dim_qk", x.get("qk_head_dim", x.get("head_dim")))
            found.append({
                "device": table["device"], "direction": "forward" if table["kind"].endswith("fwd") else "backward",
                "source": "cudnn" if "cudnn" in op else "simumax" if op.startswith("sdp") else "inference",
                "origin": table["source"], "batch": x["batch"], "heads": x.get("heads", x.get("head_num")),
                "kv_heads": x.get("kv_heads", x.get("kv_head_num")), "q_len": q_len, "kv_len": x.get("kv_seq", q_len),
                "qk": qk, "v": x.get("head_dim_v", x.get("v_head_dim", qk)), "causal": x.get("causal", True),
                "window": x.get("window") or 0, "deterministic": x.get("deterministic", False), "us": x["us"],
            })  # fmt: skip
    return found


def chosen(rows: list[Row], name: str, source: str, direction: str) -> list[Row]:
    """The rows that a fit uses."""
    return [
        r for r in rows
        if (r["device"], r["source"], r["direction"]) == (name, source, direction)
        and not (r["deterministic"] and direction == "backward" and not (name.startswith("H200") and r["qk"] == 192))
        and not (source == "simumax" and name.startswith("B200") and (r["us"] < HOST_BOUND_US or r["q_len"] > LONGEST))
    ]  # fmt: skip


def columns(rows: list[Row]) -> Rows:
    """Arrays of the numeric columns."""
    return {key: np.array([r[key] for r in rows], float) for key in rows[0] if not isinstance(rows[0][key], str)}


def predict_us(of: Pass, name: str, direction: str, x: Rows) -> np.ndarray:
    """Microseconds of rows; the product's formula, but for windows, which here differ from row to row."""
    part = device(name)
    keys = np.where(
        x["window"] > 0, keys_read(x["kv_len"], True, None), keys_read(x["kv_len"], x["causal"] > 0, None)
    )  # fmt: skip
    for w in np.unique(x["window"][x["window"] > 0]):
        keys = np.where(x["window"] == w, keys_read(x["kv_len"], True, int(w)), keys)
    full = attention_flops(x["batch"], x["heads"], x["q_len"], x["kv_len"], x["qk"], x["v"], False, None)
    flops = full * keys / x["kv_len"] * (BACKWARD_FLOPS if direction == "backward" else 1)
    tiles = x["batch"] * x["heads"] * np.ceil(x["q_len" if direction == "forward" else "kv_len"] / TILE)
    moved = 2 * x["batch"] * (x["q_len"] * x["heads"] + x["kv_len"] * x["kv_heads"]) * (x["qk"] + x["v"])
    traffic = moved * (2 if direction == "backward" else 1) / part.memory_bytes_per_s.value
    peak = part.peak_flops_per_s["bf16"].value
    busy = of.seconds(peak, SMS[name], flops, keys, tiles, x["qk"], x["v"], x["causal"] > 0)
    return np.asarray(1e6 * (of.fixed_s + np.maximum(busy, traffic)))


def fit_pass(name: str, direction: str, rows: list[Row], narrow: float | None) -> Pass:
    """The pass nearest to the rows. ``narrow``: centre of its prior, None where the rows have both widths."""
    low, usual, high, width = np.array(list(PRIORS.values())).T
    at = list(PRIORS).index("narrow")
    usual[at], width[at] = narrow or usual[at], width[at] if narrow else 1.0
    x, prior = columns(rows), np.log(usual)
    call_s = CALL_S.get((name, direction), FIXED_S) if rows[0]["source"] == "simumax" else FIXED_S

    def errors(p: np.ndarray) -> np.ndarray:
        of_rows = np.log(predict_us(Pass(*np.exp(p), fixed_s=call_s), name, direction, x) / x["us"])
        return np.concatenate([of_rows, SOFT * PRIOR_WEIGHT * (p - prior) / width])

    found = least_squares(errors, prior, bounds=(np.log(low), np.log(high)), loss="soft_l1", f_scale=SOFT)
    return Pass(*(float(f"{value:.4g}") for value in np.exp(found.x)), fixed_s=call_s)


def described(of: Pass, name: str, direction: str, rows: list[Row]) -> dict[str, Any]:
    """A fitted pass as the file has it."""
    x = columns(rows)
    errors = np.abs(predict_us(of, name, direction, x) / x["us"] - 1)
    return {
        "parameters": {key: getattr(of, key) for key in PRIORS},
        "fixed_s": of.fixed_s,
        "rows": len(rows),
        "median_error": round(float(np.median(errors)), 4),
        "p90_error": round(float(np.quantile(errors, 0.9)), 4),
    }


def narrow_prior(rows: list[Row], inference: str) -> float:
    """Rate of heads of 64 relative to 128 of the inference kernel; FlashAttention-2's without one."""
    if not inference:
        return NARROW_FLASH2
    return fit_pass(inference, "forward", chosen(rows, inference, "inference", "forward"), None).narrow


def attention() -> tuple[dict[str, Any], dict[str, Any]]:
    """(training kernels, inference kernels)."""
    rows = attention_rows()
    fits: dict[str, Any] = {}
    for key, (source, inference) in TABLES.items():
        name = key.split("/")[1]
        used = {d: chosen(rows, name, source, d) for d in ("forward", "backward")}
        origins = sorted({r["origin"].partition("@")[0] for d in used.values() for r in d})
        fits[key] = {"source": ", ".join(origins)}
        for direction, of in used.items():
            fitted = fit_pass(name, direction, of, narrow_prior(rows, inference))
            fits[key][direction] = described(fitted, name, direction, of)
    others = {}
    for name in INFERENCE:
        used_rows = chosen(rows, name, "inference", "forward")
        others[name] = described(fit_pass(name, "forward", used_rows, None), name, "forward", used_rows)
    return fits, others


LARGE_BYTES = 256e6  # of one launch for fused kernels, of all for eager ones: several times every L2
FUSED_BACKENDS = ("cudnn", "liger", "torch_compile", "liger_fused_add_rms_norm")
EAGER_BACKENDS = ("huggingface", "torch")


def _norm_and_add(norm: Kernel, add: Kernel) -> Kernel:
    def plus(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
        return a[0] + b[0], a[1] + b[1]

    return Kernel(
        plus(norm.forward, add.forward), plus(norm.backward, add.backward), (0, 0),
        norm.forward_launches + add.forward_launches, norm.backward_launches + add.backward_launches,
    )  # fmt: skip


def _kernel(op: str, backend: str, element: int) -> tuple[str, Kernel] | None:
    """(kind, bytes by hand) of a benchmarked operation; None: not a pair that the counts describe.

    torch's own layer_norm, and rms_norm as cuDNN's benchmark and Megatron call it, are single kernels: the eager
    counts would put them at several times the datasheet's bandwidth. They are no eager chain, nor of the fused sets.
    """
    if backend in FUSED_BACKENDS:
        kinds = {
            "rms_norm": FUSED.norm, "layer_norm": FUSED.norm, "megatron_rms_norm": FUSED.norm, "rope": FUSED.rope,
            "megatron_swiglu": FUSED.glu, "cross_entropy": FUSED.loss,
            # x and residual in, sum and norm out; the same backward
            "fused_add_rms_norm": Kernel((4, 0), (4, 0), (0, 0), 1, 2),
        }  # fmt: skip
        return ("fused", kinds[op]) if op in kinds else None
    eager = EAGER_FP32 if element == 4 else EAGER_BF16
    if backend in EAGER_BACKENDS:
        kinds = {
            "rms_norm": eager.norm, "rope": eager.rope, "megatron_swiglu": eager.glu, "cross_entropy": eager.loss,
            "fused_add_rms_norm": _norm_and_add(eager.norm, eager.residual),
        }  # fmt: skip
        return ("eager", kinds[op]) if op in kinds else None
    return None


def _elements(op: str, x: Mapping[str, Any]) -> float:
    """Elements that the counts multiply."""
    if "rows" in x:
        return float(x["rows"] * x["cols"])
    if op in ("rms_norm", "fused_add_rms_norm"):
        return float(x["M"] * x["H"])
    if op == "layer_norm":
        return float(x["M"] * x["N"])
    if op == "megatron_rms_norm":
        return float(x["S"] * x["B"] * x["H"])
    if op == "megatron_swiglu":
        return float(x["S"] * x["B"] * x["ffn_local"])
    if op == "cross_entropy":
        return float(x["B"] * x["T"] * x["V"])
    # rope: query heads fill the hidden size, key heads come on top
    hidden, tokens = x.get("H", x.get("hidden_size")), x.get("T", x.get("seq_len"))
    return float(hidden * tokens * (1 + x["num_kv_heads"] / x["num_q_heads"]))


def memory_rows() -> list[Row]:
    """Rows of memory-bound kernels that the byte counts describe: kind, device, direction, bytes, launches, us."""
    found = []
    for table in read_json("measurements", "memory.json")["tables"]:
        words = table["op"].replace(",", " ").split()
        op, direction, backend = words[0], words[1], words[-1].strip("()")
        for values in table["rows"]:
            x = {**table["fixed"], **dict(zip(table["columns"], values, strict=True))}
            # Liger's cross_entropy draws its logits in fp32 and states no type.
            element = 4 if "float32" in str(x.get("dtype")) or op == "cross_entropy" else 2
            match = _kernel(op, backend, element)
            # Megatron-style "backward" of Liger's tables takes as long as its "full": the forward is in it.
            if not match or (op.startswith("megatron") and direction == "backward"):
                continue
            kind, kernel = match
            if (kind, op, direction) == ("fused", "cross_entropy", "forward"):
                continue  # Liger's forward writes the gradient: only "full" is a pair of passes
            forward, backward = direction in ("forward", "fwd", "full"), direction in ("backward", "bwd", "full")
            per_element = sum(
                a * element + b
                for (a, b), used in ((kernel.forward, forward), (kernel.backward, backward)) if used
            )  # fmt: skip
            launches = forward * kernel.forward_launches + backward * kernel.backward_launches
            found.append({
                "kind": kind, "op": table["op"], "device": table["device"], "backend": backend, "direction": direction,
                "bytes": _elements(op, x) * per_element, "launches": launches, "us": x["us"],
            })  # fmt: skip
    return found


def share(rows: list[Row], name: str) -> float | None:
    """Median of the rate of large tensors over the sustained one; None without any."""
    rate = device(name).memory_bytes_per_s.value
    large = [r["bytes"] / (r["us"] * 1e-6) / rate for r in rows if r["bytes"] >= LARGE_BYTES]
    return median(large) if large else None


def ramp_s(rows: list[Row], name: str) -> float:
    """Fixed time of a launch, least squares of log times of tables whose own large-tensor share is known."""
    rate = device(name).memory_bytes_per_s.value
    by_table: dict[str, list[Row]] = {}
    for r in rows:
        by_table.setdefault(r["op"], []).append(r)
    terms = [(table, share(table, name)) for table in by_table.values()]
    launches, busy, us = np.array([
        (r["launches"], r["bytes"] / (rate * of) * 1e6, r["us"]) for table, of in terms if of for r in table
    ]).T  # fmt: skip
    error: Callable[[np.ndarray], np.ndarray] = lambda p: np.log((launches * p[0] + busy) / us)  # noqa: E731
    found = least_squares(error, [2.0], bounds=(0.1, 20), loss="soft_l1", f_scale=0.1)
    return float(found.x[0]) * 1e-6


def memory() -> dict[str, Any]:
    """Share and fixed time by architecture and kind; "elsewhere" is the median of all."""
    rows = memory_rows()
    fits: dict[str, Any] = {}
    for kind in ("fused", "eager"):
        for name in sorted({r["device"] for r in rows if r["kind"] == kind}):
            of = [r for r in rows if r["device"] == name and r["kind"] == kind]
            tables: dict[str, list[Row]] = {}
            for r in of:
                tables.setdefault(r["op"], []).append(r)
            shares = [s for table in tables.values() if (s := share(table, name))]
            # Liger's tables hold the host's launches too: autograd's 120 us, and several us of a lone kernel. Chains of
            # eager kernels hide theirs.
            timed = [r for r in of if r["direction"] == "fwd" and r["backend"] == "cudnn"]
            if kind == "eager":
                timed = [r for r in of if r["direction"] == "forward" and r["bytes"] > 1e8]
            fits.setdefault(device(name).arch, {}).setdefault(kind, []).append(
                {"shares": shares, "ramp_s": ramp_s(timed, name) if timed else None}
            )
    written: dict[str, Any] = {}
    for arch, kinds in fits.items():
        for kind, found in kinds.items():
            ramps = [f["ramp_s"] for f in found if f["ramp_s"]]
            written.setdefault(arch, {})[kind] = {
                "share": round(median(s for f in found for s in f["shares"]), 3),
                "ramp_s": median(ramps) if ramps else None,
                "tables": sum(len(f["shares"]) for f in found),
            }
    elsewhere: dict[str, Any] = {}
    for kind in ("fused", "eager"):
        all_of = [k[kind] for k in written.values() if kind in k]
        ramp = median(f["ramp_s"] for f in all_of if f["ramp_s"])
        elsewhere[kind] = {"share": round(median(f["share"] for f in all_of), 3), "ramp_s": ramp}
        for f in all_of:
            f["ramp_s"] = f["ramp_s"] or ramp
    written["elsewhere"] = elsewhere
    for kinds in written.values():
        for f in kinds.values():
            f["ramp_s"] = float(f"{f['ramp_s']:.3g}")
    return written


def main() -> None:
    """Fit and write."""
    fits, inference = attention()
    written = {"attention": fits, "inference": inference, "memory": memory()}
    OUT.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(written, indent=1))


if __name__ == "__main__":
    main()
