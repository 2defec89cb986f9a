"""How accurate is the cost model? Writes docs/accuracy.md: targets, every block, every factor, and what is still wrong.

    python benchmarks/accuracy.py training.jsonl [--json]

One fit of the physical factors gives the zero-shot figures (each block under factors of the other blocks) and those
after calibration. ``--json`` prints the figures as one document instead of writing the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import collective_accuracy
import gemm_accuracy
import kernel_accuracy

from trainplan.costmodel.factors import FittedFactors
from trainplan.costmodel.stacks import STACKS, Stack
from trainplan.planner.comparisons import Comparison, compare, complete, memory_interval
from trainplan.planner.fitting import Fit, as_factors, fit_all, log_seconds
from trainplan.planner.frameworks import FRAMEWORKS, REVISIONS
from trainplan.planner.rows import Row, read_rows
from trainplan.planner.scores import (
    choose_calibration,
    constant_mfu_errors,
    error_figures,
    macro_average,
    over_draws,
    predicted,
    regret,
    summarise,
)
from trainplan.planner.validate import calibrated, zero_shot

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "accuracy.md"
K, DRAWS = 5, 10
TIMES = ("step_time_s", "tokens_per_s_per_gpu")
MEMORY = ("peak_mem_gib",)
ENOUGH = 20
"""Rows from which a block's intervals and its control are targets."""
COVERED = (0.85, 0.97)
WIDEST = 0.12
PREDICTED_SHARE = 0.95
NO_CONTROL = ("bloom_a100",)
"""Blocks whose layouts differ by less than a repeated run does, so that nothing can halve the control's error."""

WRONG = (
    "Layer costs of vtrain_single are not smooth in (hidden, tp, micro-batch): a layer with twice the work is "
    "sometimes faster. Jobs on 2, 4 and 8 GPUs agree on them, so they are no noise. The cause is unknown. With these "
    "costs taken from the rows little is left (section 2).",
    "Mixtures of experts on older containers of Megatron-Bridge: one layout differs by a factor of two from one "
    "container to the next. No stack here says which kernels each of them had.",
    "Rowwise fp8 scaling in torchtitan: it costs more than scaling per tensor, and one fp8 rate prices both.",
    "LoRA on several GPUs takes 1.7 times as long as on one at every sequence length, with hardly any bytes to reduce: "
    "not understood.",
    "ZeRO-3 on experts: modules are fetched expert by expert, which is many times slower than the formulas say.",
    "NVFP4 and the V100 have no tables: their products run at the share of the datasheet's peak that fp8 products, or "
    "other GPUs, sustain. NVFP4 rows come out 14 to 22 % too fast, as the fp8 rows of the same model do.",
    "The rows of korthikanti are 12 % faster than other A100 jobs let expect: their products run at the speed of the "
    "tables, everybody else's a sixth slower. The cause is unknown; GPT-3 175B on 64 GPUs is one of them.",
    "Memory has no factor that calibration could move, so its error stays what it was.",
    "bloom_a100 is mostly noise: its layouts differ by little more than one layout does when run twice.",
    "One machine's tables differ from another's: matrix products of two B200 machines by a quarter. No formula mends "
    "that; measure your own.",
)
"""What is still wrong and why; written by hand."""


# Parts of blocks


def recipe(precision: str | None) -> str:
    """Precision recipe by its meaning; publications write each in several ways."""
    text = (precision or "").lower()
    if "nvfp4" in text:
        return "nvfp4"
    if "fp8" not in text:
        return "bf16"
    return "fp8 in blocks" if "mx" in text or "block" in text else "fp8 per tensor"


def version(container: str) -> tuple[int, ...]:
    """A container's version as numbers, so that 26.10 is newer than 26.9."""
    return tuple(int(part) for part in re.findall(r"\d+", container))


def older(rows: Iterable[Row]) -> set[str]:
    """Rows of a container that is not the newest of their model, GPU, number of GPUs, task and precision recipe."""
    groups: dict[tuple[Any, ...], list[tuple[tuple[int, ...], str]]] = defaultdict(list)
    for row in rows:
        if container := (row.extra or {}).get("container"):
            key = (row.block, row.model.name, row.gpu, row.n_gpus, row.task, recipe(row.precision))
            groups[key].append((version(str(container)), row.id))
    return {name for group in groups.values() for found, name in group if found != max(group)[0]}


def parts(rows: Sequence[Row]) -> dict[str, str]:
    """Id -> the part of its block that a row counts to."""
    old = older(rows)
    named = {}
    for row in rows:
        kind = "MoE" if row.model.moe else "dense"
        task = row.task or ""
        if row.block == "qwen1_ft":
            kind = "QLoRA" if "qlora" in task else "LoRA" if "lora" in task else "full"
            kind += ", one GPU" if row.n_gpus == 1 else ", several GPUs"
        named[row.id] = f"{row.block}: {kind}{', older container' if row.id in old else ''}"
    return named


@dataclass(frozen=True)
class Named(Comparison):
    """A comparison that is summed up under the name of its part, and calibrated with its whole group."""

    of: str = ""

    @property
    def group(self) -> tuple[str, str, str]:
        """Of the whole block."""
        _, device, stack = super().group
        return self.of, device, stack


def by_part(comparisons: Iterable[Comparison], part_of: Mapping[str, str]) -> list[Comparison]:
    """The comparisons with their parts for blocks."""
    return [
        Named(
            c.row.model_copy(update={"block": part_of[c.row.id]}), c.run, c.metric, c.measured, c.as_step_s, c.row.block
        )
        for c in comparisons
    ]


# Predictions


@dataclass(frozen=True)
class Predictions:
    """Everything that the tables are made of.

    Attributes:
        rows: All of the file.
        comparisons: What is predicted.
        fitted: The one fit.
        zero: Results: zero-shot times, memory, and what is skipped.
        drawn: A summary by block per draw of calibration rows.
        drawn_parts: The same by part.
        left_out: Id -> absolute error after calibration with all other rows of its hardware, stack and part.
    """

    rows: list[Row]
    comparisons: list[Comparison]
    fitted: Fit
    zero: list[dict[str, Any]]
    drawn: list[list[dict[str, Any]]]
    drawn_parts: list[list[dict[str, Any]]]
    left_out: dict[str, float]
    part_of: dict[str, str]

    def others(self, block: str) -> FittedFactors:
        """The factors that all other blocks give."""
        return as_factors(self.fitted.without_block(block), self.fitted.names)


LEFT_OUT = ("torchtitan: dense", "mbridge: dense", "swift_qwen: dense", "mbridge: MoE", "swift_qwen: MoE")
"""Parts with too few rows of one hardware and stack for K of them: calibrated by all others of these instead."""


def predict(path: Path, draws: int = DRAWS, say: Callable[[str], None] = lambda text: None) -> Predictions:
    """All predictions of a file of rows, from one fit."""
    rows = list(read_rows(path))
    part_of = parts(rows)
    comparisons, skipped = compare(rows)
    timed = [c for c in comparisons if c.as_step_s is not None]
    say(f"fitting factors to {len(timed)} step times")
    fitted = fit_all([c.timed() for c in timed])
    zero = [*skipped, *(c.result(memory_interval(c)) for c in comparisons if c.as_step_s is None)]
    made = Predictions(
        rows, comparisons, fitted, zero, [[] for _ in range(draws)], [[] for _ in range(draws)], {}, part_of
    )
    for block in dict.fromkeys(c.row.block for c in timed):
        say(f"predicting {block}")
        mine = [c for c in timed if c.row.block == block]
        others = made.others(block)
        zero += zero_shot(mine, others)
        drawn = calibrated(mine, others, K, draws)
        add(made.drawn, drawn)
        named_parts = {part_of[c.row.id] for c in mine}
        if len(named_parts) > 1:
            drawn = calibrated(by_part(mine, part_of), others, K, draws)
        else:  # the block is the part
            drawn = [[line | {"block": part} for line in lines] for lines in drawn for part in named_parts]
        add(made.drawn_parts, drawn)
        for part in LEFT_OUT:
            made.left_out.update(leave_one_out([c for c in mine if part_of[c.row.id] == part], others))
    return made


def add(to: list[list[dict[str, Any]]], found: list[list[dict[str, Any]]]) -> None:
    """Extend each draw."""
    for lines, more in zip(to, found, strict=True):
        lines += more


MOST_DRAWS = 10_000


def leave_one_out(mine: Sequence[Comparison], factors: FittedFactors) -> dict[str, float]:
    """Id -> absolute error of a row when all others of its hardware and stack are calibration rows.

    Draws of all rows but one, as many as it takes for each to be the one. A row that is alone is predicted zero-shot.
    """
    groups: dict[tuple[str, str, str], list[Comparison]] = defaultdict(list)
    for c in mine:
        groups[c.group].append(c)
    errors: dict[str, float] = {}
    for group in groups.values():
        ids = {c.row.id for c in group}
        if len(ids) == 1:
            errors |= {r["id"]: abs(r["error_frac"]) for r in zero_shot(group, factors)}
            continue
        alone: list[str] = []
        while set(alone) != ids and len(alone) < MOST_DRAWS:
            (left,) = ids - set(choose_calibration(ids, len(ids) - 1, len(alone)))
            alone.append(left)
        for name, (line,) in zip(alone, calibrated(group, factors, len(ids) - 1, len(alone)), strict=True):
            errors[name] = line["mape"]
    return errors


# Targets


@dataclass(frozen=True)
class Target:
    """A target of some parts' errors, of rows that are complete: those that are skipped count as 100 %."""

    what: str
    parts: tuple[str, ...]
    zero: float | None
    calibrated: float | None
    metrics: tuple[str, ...] = TIMES


def dense(*blocks: str) -> tuple[str, ...]:
    """Their dense parts."""
    return tuple(f"{block}: dense" for block in blocks)


EXPERTS = ("mbridge: MoE", "simumax_b200: MoE", "swift_qwen: MoE")
SMALL = dense("torchtitan", "mbridge", "swift_qwen")
TARGETS = (
    Target("llmfoundry, internevo, korthikanti pooled", dense("llmfoundry", "internevo", "korthikanti"), 0.08, 0.045),
    Target("bloom_a100", dense("bloom_a100"), 0.10, 0.09),
    Target("vtrain_single", dense("vtrain_single"), 0.12, 0.08),
    Target("simumax_b200 dense and MoE", ("simumax_b200: dense", "simumax_b200: MoE"), 0.12, 0.05),
    Target("qwen1_ft LoRA, one GPU", ("qwen1_ft: LoRA, one GPU",), 0.12, 0.065),
    Target("qwen1_ft LoRA, several GPUs", ("qwen1_ft: LoRA, several GPUs",), 0.12, 0.065),
    Target("torchtitan, mbridge dense (newest container), swift_qwen dense pooled *", SMALL, 0.13, 0.09),
    *(Target(f"of these, {part.split(':')[0]} *", (part,), 0.13, 0.09) for part in SMALL),
    Target("MoE: mbridge (newest container) *, simumax_b200, swift_qwen * pooled", EXPERTS, 0.22, 0.12),
    *(
        Target(f"of these, {part.split(':')[0]}{' *' if part in LEFT_OUT else ''}", (part,), 0.22, 0.12)
        for part in EXPERTS
    ),
    Target("memory: simumax_b200", ("simumax_b200: dense", "simumax_b200: MoE"), 0.025, 0.012, MEMORY),
    Target("memory: torchtitan, swift_qwen dense", dense("torchtitan", "swift_qwen"), 0.09, 0.06, MEMORY),
    Target(
        "memory: MoE of simumax_b200, swift_qwen, reported",
        ("simumax_b200: MoE", "swift_qwen: MoE"),
        None,
        None,
        MEMORY,
    ),
    Target("memory: bloom_a100, reported", dense("bloom_a100"), None, None, MEMORY),
)
RANKING = (
    ("mean regret", "regret_mean", 0.05, 0.04),
    ("top-3 regret", "regret_top3_mean", 0.015, 0.013),
    ("tau within a workload", "tau_within", 0.85, 0.87),
)
"""vtrain_single: figure, its name, targets zero-shot and calibrated."""


def met(value: float | None, limit: float | None, at_least: bool = False) -> bool | None:
    """Whether a figure reaches its target; None without either."""
    if value is None or limit is None:
        return None
    return value >= limit if at_least else value <= limit


def pooled(errors: Iterable[float], lost: int = 0) -> float | None:
    """Mean absolute error, each row counting once and each lost one as 100 %."""
    return error_figures([*errors, *[1.0] * lost])["mape"]


def chosen(target: Target, results: Iterable[Mapping[str, Any]], part_of: Mapping[str, str]) -> list[Any]:
    """The results that a target is about."""
    return [r for r in results if part_of[r["id"]] in target.parts and r["metric"] in target.metrics]


def calibrated_figures(
    target: Target, drawn_parts: Sequence[Sequence[Mapping[str, Any]]], left_out: Mapping[str, float], lost: int
) -> dict[str, Any]:
    """Mean and worst over draws of the pooled error after calibration, and the control's mean.

    A part's errors are those of a draw's rows, or, where ``left_out`` has them, those of rows left out one at a time.
    """
    values, controls = [], []
    for lines in drawn_parts:
        mine = [line for line in lines if line["block"] in target.parts and line["block"] not in LEFT_OUT]
        mine = [line for line in mine if line["rows"] and line["metric"] in target.metrics]
        total = sum(left_out.values()) + sum(line["rows"] * line["mape"] for line in mine) + lost
        count = len(left_out) + sum(line["rows"] for line in mine) + lost
        if count:
            values.append(total / count)
        if mine and all(line["control_mape"] is not None for line in mine):
            weights = [line["rows"] for line in mine]
            controls.append(float(np.average([line["control_mape"] for line in mine], weights=weights)))
    return {
        "calibrated": fmean(values) if values else None,
        "worst": max(values) if values else None,
        "calibrated_control": fmean(controls) if controls and not left_out else None,
    }


def target_line(target: Target, made: Predictions) -> dict[str, Any]:
    """A target and our figures."""
    mine = chosen(target, made.zero, made.part_of)
    found = predicted(mine)
    lost = sum(bool(r.get("complete")) for r in mine if "skipped" in r)
    zero = pooled((r["error_frac"] for r in found), lost)
    if target.metrics == MEMORY:  # nothing of memory is fitted
        after: dict[str, Any] = {"calibrated": zero, "worst": zero, "calibrated_control": None}
    else:
        ids = {r["id"] for r in found}
        left_out = {name: error for name, error in made.left_out.items() if name in ids}
        after = calibrated_figures(target, made.drawn_parts, left_out, lost)
    control = [
        error
        for block in dict.fromkeys(r["block"] for r in found)
        for error in constant_mfu_errors([r for r in found if r["block"] == block])
    ]
    what = f"{target.what}: MAPE"
    if lost and found:
        what += f" ({percent(pooled(r['error_frac'] for r in found))} zero-shot without the skipped)"
    return line_of(what, len(found), lost, zero, target.zero, target.calibrated, after) | {
        "control": pooled(control),
    }


def line_of(
    what: str,
    rows: int,
    lost: int,
    zero: float | None,
    zero_target: float | None,
    calibrated_target: float | None,
    after: Mapping[str, Any],
    at_least: bool = False,
) -> dict[str, Any]:
    """A line of the table of targets."""
    return {
        "what": what, "rows": rows, "lost": lost, "at_least": at_least,
        "zero_target": zero_target, "zero": zero, "zero_met": met(zero, zero_target, at_least),
        "calibrated_target": calibrated_target, **after,
        "calibrated_met": met(after.get("calibrated"), calibrated_target, at_least),
    }  # fmt: skip


def targets(made: Predictions, zero: Sequence[Mapping[str, Any]], drawn: Sequence[Mapping[str, Any]]) -> list[Any]:
    """All targets of errors and ranking; ``zero`` and ``drawn`` are the summaries by block."""
    lines = [target_line(target, made) for target in TARGETS]
    lines = [line for line in lines if line["rows"] or line["lost"]]
    before = next((line for line in zero if line["block"] == "vtrain_single"), None)
    after = next((line for line in drawn if line["block"] == "vtrain_single"), None)
    if before and after:
        for title, key, *limits in RANKING:
            figures = {"calibrated": after[key], "worst": after[f"{key}_worst"], "calibrated_control": None}
            control = {"control": before.get(f"control_{key}")}
            if key == "tau_within":
                figures["calibrated_control"] = after["control_tau_within"]
            elif key == "regret_mean":
                figures["calibrated_control"] = after["control_regret_mean"]
            name = f"vtrain_single: {title}"
            tau = key == "tau_within"
            lines.append(line_of(name, before["rows"], 0, before[key], *limits, figures, tau) | control)
        lines += given_layer_times(made)
    return lines + published_example(made)


def published_example(made: Predictions) -> list[dict[str, Any]]:
    """GPT-3 175B on 64 A100, 13.75 s: Korthikanti et al. 2022, arXiv:2205.05198, table 5."""
    rows = {c.row.id: c.row for c in made.comparisons}
    lines = []
    for r in predicted(made.zero):
        row = rows[r["id"]]
        layout = (row.n_gpus, row.tp, row.pp, r["measured"])
        if row.block == "korthikanti" and layout == (64, 8, 8, 13.75):
            what = f"GPT-3 175B, 64 A100, TP8 PP8, selective recompute: measured 13.75 s, ours {r['predicted']:.2f} s"
            after = {"calibrated": None, "worst": None, "calibrated_control": None}
            lines.append(line_of(what, 1, 0, abs(r["error_frac"]), 0.05, None, after) | {"control": None})
    return lines


COMPUTED = ("matmul", "attention", "memory", "host")
"""Kinds of seconds that a layer's time is made of, besides its messages."""
SHIFTS = np.linspace(-0.5, 0.5, 21)
"""Log multipliers that are tried."""


def given_layer_times(made: Predictions) -> list[dict[str, Any]]:
    """vtrain_single with the layer time of each (hidden, tp, micro-batch) taken from the rows: what is left.

    One multiplier per key of the seconds of computation (products, attention, memory-bound kernels, host), and, as a
    simpler form, of the whole step; each fitted to all rows of the key, the rest of the model zero-shot.
    """
    mine = [c for c in made.comparisons if c.row.block == "vtrain_single" and c.as_step_s is not None]
    factors = made.others("vtrain_single")
    results = {r["id"]: r for r in predicted(made.zero) if r["block"] == "vtrain_single"}
    keys: dict[tuple[Any, ...], list[Comparison]] = defaultdict(list)
    for c in mine:
        keys[c.row.model.hidden, c.row.tp, c.row.mbs].append(c)
    layers, steps = [], []
    for of in keys.values():
        logs = np.log([c.as_step_s for c in of])
        tried = np.array([shifted(c, factors) for c in of])  # [rows, shifts]
        fine = np.linspace(SHIFTS[0], SHIFTS[-1], 501)
        dense_grid = np.array([np.interp(fine, SHIFTS, row) for row in tried])
        best = dense_grid[:, int(np.argmin(((dense_grid - logs[:, None]) ** 2).sum(axis=0)))]
        zero = np.log([results[c.row.id]["predicted"] for c in of])
        for to, log_steps in ((layers, best), (steps, zero + np.median(logs - zero))):
            for c, log_step in zip(of, log_steps, strict=True):
                step = float(np.exp(log_step))
                to.append(results[c.row.id] | {"predicted": step, "error_frac": step / c.measured - 1})
    lines = []
    for form, found in (("computation", layers), ("the whole step", steps)):
        figures = {
            "MAPE": (pooled(r["error_frac"] for r in found), 0.04, False),
            "mean regret": (regret(found)["mean"], 0.015, False),
        }
        for title, (value, limit, at_least) in figures.items():
            after = {"calibrated": value, "worst": None, "calibrated_control": None}
            what = f"vtrain_single, one multiplier of {form} per (hidden, tp, mbs), {len(keys)} from the rows: {title}"
            lines.append(line_of(what, len(found), 0, None, None, limit, after, at_least) | {"control": None})
    return lines


def shifted(c: Comparison, factors: FittedFactors) -> np.ndarray:
    """Log step times with all computation slower by each of ``SHIFTS``."""
    timed = c.timed()
    theta = np.tile(factors.theta, (len(SHIFTS), 1))
    for kind in COMPUTED:
        known = [factors.index[name] for name in timed.names[kind] if name in factors.index]
        if known:
            theta[:, known[-1]] += SHIFTS
    return log_seconds(timed, factors.index, theta)


def block_targets(zero: Sequence[Mapping[str, Any]], drawn: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per block of times with enough rows and way: intervals and control against their targets."""
    large = {line["block"] for line in zero if line["rows"] >= ENOUGH and line["metric"] in TIMES}
    lines = []
    for way, summary in (("zero-shot", zero), ("calibrated", drawn)):
        for line in summary:
            if line["block"] not in large or line["metric"] not in TIMES or line["mape"] is None:
                continue
            control = line["control_mape"]
            lines.append(
                {
                    "block": line["block"], "way": way, "coverage": line["coverage"],
                    "coverage_met": COVERED[0] <= line["coverage"] <= COVERED[1],
                    "half_width": line["half_width"],
                    "half_width_met": met(line["half_width"], WIDEST) if way == "calibrated" else None,
                    "score": line["interval_score"], "constant_score": line["constant_interval_score"],
                    "score_met": met(line["interval_score"], line["constant_interval_score"])
                    if way == "calibrated" else None,
                    "mape": line["mape"], "control": control,
                    "control_met": None if line["block"] in NO_CONTROL else met(line["mape"], control / 2),
                }
            )  # fmt: skip
    return lines


def shares(zero: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per block and metric: predicted rows of those whose row is complete."""
    found = []
    for line in zero:
        whole = line["rows"] + line["complete_skipped"]
        if whole:
            share = line["rows"] / whole
            found.append(
                {
                    "block": line["block"],
                    "metric": line["metric"],
                    "rows": line["rows"],
                    "of": whole,
                    "share": share,
                    "met": share >= PREDICTED_SHARE,
                }
            )
    return found


# Factors and stacks


def factor_lines(fitted: Fit) -> list[dict[str, Any]]:
    """Every factor after a fit to all rows, and who saw it."""
    lines = []
    for f in fitted.without_block(None).factors:
        saw = [t.block for t in fitted.runs if f.factor.name in t.flat_names]
        lines.append(
            {
                "name": f.factor.name, "value": f.value, "log_sd": f.log_sd, "unit": f.factor.unit,
                "width_ratio": f.width_ratio, "learned": f.learned, "at_limit": f.at_limit,
                "meaning": f.factor.meaning, "blocks": sorted(set(saw)), "rows": len(saw),
            }
        )  # fmt: skip
    return lines


def stack_constants(comparisons: Iterable[Comparison]) -> list[dict[str, Any]]:
    """Numbers of stacks that differ from the default: value, the frameworks of the stack and the blocks that use it."""
    blocks: dict[str, set[str]] = defaultdict(set)
    for c in comparisons:
        blocks[c.run.stack].add(c.row.block)
    numbers = [f for f in dataclasses.fields(Stack) if isinstance(f.default, float)]
    return [
        {
            "stack": name,
            "constant": field.name,
            "value": getattr(stack, field.name),
            "default": field.default,
            "frameworks": sorted({entry.name for entry in FRAMEWORKS if entry.stack == name}),
            "blocks": sorted(blocks[name]),
        }
        for name, stack in STACKS.items()
        for field in numbers
        if getattr(stack, field.name) != field.default
    ]


def of_stack(name: str) -> bool:
    """Whether a factor is of a software stack or of its attention kernel, not of a die or fabric."""
    kind, *scope = name.split("/")
    return bool(scope) and (kind == "attention" or scope[0] in STACKS)


def alone(factors: Iterable[Mapping[str, Any]], constants: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Block -> factors and stack constants that no other block exercises.

    It is ``fitted`` if one of them is of a software stack.
    """
    found: dict[str, dict[str, Any]] = defaultdict(lambda: {"factors": [], "constants": [], "fitted": False})
    for line in factors:
        if len(line["blocks"]) == 1:
            of = found[line["blocks"][0]]
            of["factors"].append(line["name"])
            of["fitted"] |= of_stack(line["name"])
    for line in constants:
        if len(line["blocks"]) == 1:
            of = found[line["blocks"][0]]
            of["constants"].append(f"{line['constant']} of {line['stack']}")
            of["fitted"] = True
    return dict(sorted(found.items()))


# The report


def figures(path: Path, draws: int = DRAWS, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Everything in the document, but the kernels, as one JSON document."""
    made = predict(path, draws, say)
    zero, drawn = summarise(made.zero), over_draws(made.drawn)
    order = {line["block"]: i for i, line in enumerate(sorted(zero, key=lambda line: line["block"]))}
    zero.sort(key=lambda line: (order[line["block"]], line["metric"]))
    drawn.sort(key=lambda line: (order[line["block"]], line["metric"]))
    factors, constants = factor_lines(made.fitted), stack_constants(made.comparisons)
    say("targets")
    return {
        "about": about(path, made),
        "targets": targets(made, zero, drawn),
        "block_targets": block_targets(zero, drawn),
        "shares": shares(zero),
        "zero_shot": zero,
        "calibrated": drawn,
        "skipped": skipped_lines(made.zero),
        "macro": {"zero-shot": macro_average(zero), "calibrated": macro_average([d for d in drawn if d["rows"]])},
        "factors": factors,
        "constants": constants,
        "alone": alone(factors, constants),
    }


def skipped_lines(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per block and reason: ids, and whether their rows were complete."""
    found: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for r in results:
        if "skipped" in r:
            reason = re.sub(r"^same configuration as .*", "the same configuration is there, newer", r["skipped"])
            found[r["block"], r["metric"], reason, bool(r.get("complete"))].append(r["id"])
    keys = ("block", "metric", "reason", "complete")
    return [dict(zip(keys, key, strict=True)) | {"ids": ids} for key, ids in sorted(found.items())]


def about(path: Path, made: Predictions) -> dict[str, Any]:
    """What was run, on what."""
    cpu = re.search(r"model name\s*: (.*)", proc("cpuinfo"))
    memory = re.search(r"MemTotal:\s*(\d+) kB", proc("meminfo"))
    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{OUT.relative_to(ROOT)}")
    return {
        "commit": commit + (" + uncommitted" if changed else ""),
        "date": datetime.date.today().isoformat(),
        "cpu": cpu.group(1).strip() if cpu else "unknown",
        "cores": len(re.findall(r"^processor", proc("cpuinfo"), re.MULTILINE)),
        "memory_gib": round(int(memory.group(1)) / 2**20) if memory else 0,
        "command": f"python benchmarks/accuracy.py {path.name}",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:12],
        "rows": len(made.rows),
        "complete": sum(map(complete, made.rows)),
        "blocks": len({row.block for row in made.rows}),
        "timed": len(made.fitted.runs),
        "draws": len(made.drawn),
        "residual": made.fitted.without_block(None).residual_log_sd,
    }


def proc(name: str) -> str:
    """A file of /proc; empty where there is none."""
    path = Path("/proc") / name
    return path.read_text() if path.exists() else ""


def git(*arguments: str) -> str:
    """The output of a git command here; empty where there is no repository."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def kernels() -> dict[str, list[dict[str, Any]]]:
    """The reports of the three benchmarks of kernel models."""
    return {
        "gemm": gemm_accuracy.report(),
        "collectives": collective_accuracy.report(),
        "kernels": [
            *kernel_accuracy.attention_report(),
            *kernel_accuracy.memory_report(),
            *kernel_accuracy.grouped_report(),
        ],
    }


# The document


def percent(value: float | None, sign: bool = False) -> str:
    """One decimal; "-" where there is nothing."""
    return "-" if value is None else f"{100 * value:{'+' if sign else ''}.1f}"


def number(value: float | None) -> str:
    """Two decimals."""
    return "-" if value is None else f"{value:.2f}"


def verdict(reached: bool | None) -> str:
    """In a word."""
    return {None: "-", True: "met", False: "missed"}[reached]


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], left: int = 1) -> list[str]:
    """A Markdown table; the first ``left`` columns are text."""
    lines = ["| " + " | ".join(headers) + " |"]
    lines.append("|" + "|".join("---" if i < left else "---:" for i in range(len(headers))) + "|")
    lines += ["| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in rows]
    return [*lines, ""]


def document(found: Mapping[str, Any], kernel_reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """docs/accuracy.md."""
    lines = [
        *about_section(found),
        *targets_section(found),
        *blocks_section(found),
        *macro_section(found),
        *kernels_section(kernel_reports),
        *factors_section(found),
        *assumptions_section(),
        "## 8. What is still wrong and why",
        "",
        *(f"- {line}" for line in WRONG),
    ]
    return "\n".join(lines).rstrip() + "\n"


def about_section(found: Mapping[str, Any]) -> list[str]:
    """What was run, and the words of the tables."""
    of = found["about"]
    return [
        "# Accuracy of the cost model",
        "",
        f"Written by `{of['command']}`. Change the script, not this file.",
        "",
        "## 1. What this is",
        "",
        f"Commit {of['commit']}, {of['date']}, {of['cpu']}, {of['cores']} cores, {of['memory_gib']} GiB. "
        f"The file has {of['rows']} rows of {of['blocks']} blocks (publications), {of['complete']} with a complete "
        f"layout, sha256 {of['sha256']}. {of['timed']} step times can be predicted. Nobody ran these jobs for us: all "
        "are published.",
        "",
        "- **Zero-shot**: leave one block out. Every fitted factor comes from microbenchmarks and the other blocks. "
        "The formulas are linearised once, around the factors of all blocks.",
        f"- **Calibrated**: {K} rows per hardware and stack, chosen by hash, refine these factors and are not scored. "
        f"{of['draws']} draws; the mean, and the worst draw.",
        "- **Constant MFU**, the control: model FLOPs, recomputation and the pipeline's bubble at one MFU per block. "
        "Zero-shot its one factor comes from all scored rows; calibrated from the calibration rows.",
        "- Errors are |predicted / measured - 1| in percent. A block whose rows give tokens per second is scored on "
        "these. Rows that ran the same count once. A complete row that is skipped counts as 100 % in section 2.",
        "- **(fitted)** beside a block: no other block exercises some parameter of its software stack (section 6).",
        "",
    ]


def named(block: str, found: Mapping[str, Any]) -> str:
    """A block with its mark."""
    return f"{block} (fitted)" if found["alone"].get(block, {}).get("fitted") else block


def targets_section(found: Mapping[str, Any]) -> list[str]:
    """Errors, ranking, intervals, control and shares against their targets."""
    lines = ["## 2. Targets", ""]
    said = [line[key] for line in found["targets"] for key in ("zero_met", "calibrated_met") if line[key] is not None]
    keys = ("coverage_met", "half_width_met", "score_met", "control_met")
    said_blocks = [line[key] for line in found["block_targets"] for key in keys if line[key] is not None]
    lines += [
        f"{sum(said)} of {len(said)} targets of errors and ranking are met, {sum(said_blocks)} of {len(said_blocks)} "
        "of intervals and control.",
        "",
        "Errors are pooled: each row counts once. Percent, but for tau. `*`: too few rows of one hardware and stack; "
        "calibrated means that each row is predicted after the others of its hardware, stack and part (leave one out; "
        "a row that is alone, zero-shot). No factor of memory is fitted, so its two columns are equal.",
        "",
    ]
    rows = []
    for line in found["targets"]:
        shown = number if line["what"].endswith("workload") else percent
        least = ">=" if line["at_least"] else "<="
        limits = [
            "-" if line[key] is None else f"{least} {shown(line[key])}" for key in ("zero_target", "calibrated_target")
        ]
        rows.append(
            (
                marked(line["what"], found), line["rows"], line["lost"],
                limits[0], shown(line["zero"]), verdict(line["zero_met"]), shown(line["control"]),
                limits[1], shown(line["calibrated"]), shown(line["worst"]), verdict(line["calibrated_met"]),
                shown(line["calibrated_control"]),
            )
        )  # fmt: skip
    headers = (
        "what", "rows", "complete, skipped", "target", "zero-shot", "", "control", "target", "calibrated", "worst", "",
        "control",
    )  # fmt: skip
    lines += table(headers, rows)
    lines += [
        f"Blocks with at least {ENOUGH} step times. Targets: {percent(COVERED[0])} to {percent(COVERED[1])} % of "
        f"measured values inside the 90 % interval; calibrated, a median half width of at most {percent(WIDEST)} % and "
        "an interval score (log space, lower is better) no worse than the best constant width, chosen in hindsight; "
        f"an error of at most half the control's ({', '.join(NO_CONTROL)} excepted).",
        "",
    ]
    lines += table(
        ("block", "way", "inside %", "", "half width %", "", "score", "constant width", "", "MAPE %", "control %", ""),
        (
            (
                named(line["block"], found), line["way"], percent(line["coverage"]), verdict(line["coverage_met"]),
                percent(line["half_width"]), verdict(line["half_width_met"]),
                number(line["score"]), number(line["constant_score"]), verdict(line["score_met"]),
                percent(line["mape"]), percent(line["control"]), verdict(line["control_met"]),
            )
            for line in found["block_targets"]
        ),
        left=2,
    )  # fmt: skip
    short = [of for of in found["shares"] if of["share"] < 1]
    predicted = f"Complete rows that are predicted; target {percent(PREDICTED_SHARE)} % of each block."
    if not short:
        return [*lines, f"{predicted} All are.", ""]
    lines += [f"{predicted} Blocks with fewer than all:", ""]
    lines += table(
        ("block", "metric", "predicted", "complete", "share %", ""),
        (
            (named(of["block"], found), of["metric"], of["rows"], of["of"], percent(of["share"]), verdict(of["met"]))
            for of in short
        ),
        left=2,
    )
    return lines


def marked(what: str, found: Mapping[str, Any]) -> str:
    """A target's words with the mark of every block that they name."""
    for block in found["alone"]:
        what = re.sub(rf"\b{re.escape(block)}\b", named(block, found), what)
    return what


FIGURES = (
    ("MAPE", "mape", percent), ("median", "median", percent), ("p90", "p90", percent),
    ("bias", "bias", lambda value: percent(value, sign=True)), ("tau within", "tau_within", number),
    ("regret", "regret_mean", percent), ("worst regret", "regret_max", percent),
    ("top-3 regret", "regret_top3_mean", percent), ("inside", "coverage", percent),
    ("half width", "half_width", percent), ("score", "interval_score", number),
    ("constant width", "constant_interval_score", number), ("control", "control_mape", percent),
)  # fmt: skip
SHORT = {"step_time_s": "step time", "tokens_per_s_per_gpu": "tokens/s", "peak_mem_gib": "memory"}


def blocks_section(found: Mapping[str, Any]) -> list[str]:
    """Every figure of every block."""
    headers = [header for header, _, _ in FIGURES]
    lines = [
        "## 3. Every block",
        "",
        "Percent, but for tau and scores. Tau and regret are within workloads (the same work on the same GPUs) of at "
        "least three layouts: regret is the measured time of the layout we would pick over the best one's, less 1.",
        "",
        "Zero-shot:",
        "",
    ]
    lines += table(
        ("block", "metric", "rows", "skipped", *headers),
        (
            (
                named(of["block"], found), SHORT[of["metric"]], of["rows"], of["skipped"],
                *(f(of[k]) for _, k, f in FIGURES),
            )
            for of in found["zero_shot"]
            if of["rows"]
        ),
        left=2,
    )  # fmt: skip
    lines += ["Calibrated, mean over draws; blocks without a row left to score are not there:", ""]
    worst = (
        ("worst MAPE", "mape_worst", percent),
        ("worst tau", "tau_within_worst", number),
        ("worst mean regret", "regret_mean_worst", percent),
        ("worst top-3", "regret_top3_mean_worst", percent),
    )
    lines += table(
        ("block", "metric", "rows scored", *headers, *(header for header, _, _ in worst)),
        (
            (
                named(of["block"], found), SHORT[of["metric"]], f"{of['rows']:g}",
                *(f(of[k]) for _, k, f in (*FIGURES, *worst)),
            )
            for of in found["calibrated"]
            if of["mape"] is not None
        ),
        left=2,
    )  # fmt: skip
    lines += ["Complete rows that are skipped:", ""]
    lines += table(
        ("block", "metric", "why", "ids"),
        (
            (of["block"], SHORT[of["metric"]], of["reason"], ", ".join(of["ids"]))
            for of in found["skipped"]
            if of["complete"]
        ),
        left=4,
    )
    reasons: dict[str, list[str]] = defaultdict(list)
    for of in found["skipped"]:
        if not of["complete"]:
            reasons[of["reason"]].append(f"{of['block']} ({SHORT[of['metric']]}) {len(of['ids'])}")
    lines += ["Others that are skipped; they leave something open or are there already:", ""]
    lines += [f"- {reason}: {', '.join(blocks)}." for reason, blocks in reasons.items()]
    lines += [""]
    return lines


def macro_section(found: Mapping[str, Any]) -> list[str]:
    """Means over blocks."""
    lines = ["## 4. Averages over blocks", "", "Each block that has the figure counts once.", ""]
    return lines + table(
        ("way", "metric", "blocks", "rows", *(header for header, _, _ in FIGURES)),
        (
            (way, SHORT[of["metric"]], of["blocks"], f"{of['rows']:g}", *(f(of.get(k)) for _, k, f in FIGURES))
            for way, averages in found["macro"].items()
            for of in averages
        ),
        left=2,
    )


GROUPED = ("SimuMax, all", "aiconfigurator, balanced")


def kernels_section(reports: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Errors of the models of kernels."""
    lines = [
        "## 5. Kernel models",
        "",
        "Errors on microbenchmarks in percent. All devices and tables: `python benchmarks/gemm_accuracy.py`, "
        "`collective_accuracy.py`, `kernel_accuracy.py`.",
        "",
    ]
    if gemm := [of for of in reports.get("gemm", ()) if of["device"] == "all" or not of["left_out"].startswith("one ")]:
        gemm = [of for of in gemm if of["device"] == "all" or of["left_out"] not in ("smallest m", "largest m")]
        lines += [
            "Matrix products, tables less a slab at a time (one whole k, one whole n, the smallest m, the largest m); "
            "target median <= 7.0, p90 <= 18.0. Apart, another source of the same GPU, as it is and after one factor:",
            "",
        ]
        lines += error_table("left out", gemm, ("device", "dtype", "left_out"))
    if of_all := [of for of in reports.get("collectives", ()) if of["device"] == "all" or ", all" in of["left_out"]]:
        lines += ["Collectives, tables less a range of sizes or a group size; target median <= 10.0:", ""]
        lines += error_table("left out", of_all, ("device", "op", "left_out"))
    rest = [of for of in reports.get("kernels", ()) if of["of"] != "imbalance"]
    rest = [of for of in rest if of["device"] == "all" or of["what"] in GROUPED or "another" in of["what"]]
    if rest:
        lines += ["Attention (causal), memory-bound kernels (counted bytes) and grouped products:", ""]
        lines += error_table("what", rest, ("of", "device", "what"))
    if skew := [of for of in reports.get("kernels", ()) if of["of"] == "imbalance"]:
        lines += ["Time of an expert layer with skewed over balanced tokens (power law 1.2), median:", ""]
        lines += imbalance_table(skew)
    return lines


def error_table(what: str, lines: Iterable[Mapping[str, Any]], keys: tuple[str, str, str]) -> list[str]:
    """Errors of kernel models."""
    headers = (keys[0] if keys[0] != "of" else "kernel", keys[1], what, "n", "median", "p90", "worst", "bias")
    return table(
        headers,
        (
            (
                *(of[key] for key in keys), of["n"], percent(of["median"]), percent(of["p90"]), percent(of["worst"]),
                percent(of["bias"], sign=True),
            )
            for of in lines
        ),
        left=3,
    )  # fmt: skip


def imbalance_table(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Tokens by expert-parallel ranks."""
    cells: dict[tuple[int, int], float] = {}
    for of in lines:
        tokens, ep = (int(value) for value in re.findall(r"(\d+) tokens, ep (\d+)", of["what"])[0])
        cells[tokens, ep] = of["median"]
    ranks = sorted({ep for _, ep in cells})
    rows = [(tokens, *(number(cells.get((tokens, ep))) for ep in ranks)) for tokens in sorted({t for t, _ in cells})]
    return table(("tokens", *(f"ep {ep}" for ep in ranks)), rows)


SHARED_SCOPES = ("matmul", "memory", "host", "step")
"""Kinds of factors that share their scopes, so that they share a table."""


def factor_cell(of: Mapping[str, Any]) -> str:
    """Value, width, and its marks."""
    return (
        f"{of['value']:.3f} +- {percent(of['log_sd'])}{' *' if of['learned'] else ''}{' !' if of['at_limit'] else ''}"
    )


def seen_by(of: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The blocks of a factor."""
    return "all" if of["rows"] == found["about"]["timed"] else ", ".join(of["blocks"])


def factors_section(found: Mapping[str, Any]) -> list[str]:
    """Factors, constants of stacks, and what only one block exercises."""
    lines = [
        "## 6. Fitted factors",
        "",
        f"A fit to all {found['about']['timed']} step times, each block counting as at most 20; "
        f"it leaves {percent(found['about']['residual'])} % (log standard deviation). A product of scopes "
        "multiplies the seconds of a kind: everywhere, a die or fabric, a stack. The value, +- its width in percent; "
        "`*` learned (the width is below 70 % of the prior's), otherwise not learned; `!` at a limit. No factor "
        "belongs to a row, a model or a publication.",
        "",
    ]
    wide = [of for of in found["factors"] if of["name"].split("/")[0] in SHARED_SCOPES]
    scopes: dict[tuple[Any, ...], dict[str, str]] = defaultdict(dict)
    for of in sorted(wide, key=lambda of: -of["rows"]):
        kind, _, scope = of["name"].partition("/")
        scopes[scope or "everywhere", of["rows"], seen_by(of, found)][kind] = factor_cell(of)
    lines += table(
        ("scope", "blocks", "rows", *SHARED_SCOPES),
        (
            (scope, blocks, rows, *(cells.get(kind, "-") for kind in SHARED_SCOPES))
            for (scope, rows, blocks), cells in scopes.items()
        ),
        left=2,
    )
    lines += table(
        ("factor", "blocks", "rows", "value"),
        (
            (f"`{of['name']}`", seen_by(of, found), of["rows"], factor_cell(of))
            for of in found["factors"]
            if of not in wide
        ),
        left=2,
    )
    meanings = {(of["name"].split("/")[0], of["unit"], of["meaning"]) for of in found["factors"]}
    lines += ["What each kind multiplies:", ""]
    lines += [f"- `{kind}` [{unit}]: {meaning}." for kind, unit, meaning in sorted(meanings)]
    lines += [
        "",
        "Numbers of software stacks that differ from the default. They are set by hand from documentation or from "
        "rows (section 7 counts the changes) and stay when a block is left out:",
        "",
    ]
    lines += table(
        ("stack", "constant", "value", "default", "frameworks", "blocks"),
        (
            (
                of["stack"], f"`{of['constant']}`", f"{of['value']:g}", f"{of['default']:g}",
                "; ".join(of["frameworks"]), ", ".join(of["blocks"]),
            )
            for of in found["constants"]
        ),
        left=6,
    )  # fmt: skip
    lines += [
        "Parameters that only one block exercises. The factors are 1 with their prior's width when that block is "
        "predicted zero-shot. The constants stay as they are, so such a figure is not blind:",
        "",
    ]
    lines += table(
        ("block", "factors", "constants"),
        (
            (block, ", ".join(f"`{name}`" for name in of["factors"]) or "-", ", ".join(of["constants"]) or "-")
            for block, of in found["alone"].items()
        ),
        left=3,
    )
    return lines


def assumptions_section() -> list[str]:
    """What each framework is taken to run, and how often that was changed."""
    counts = Counter(entry.name for entry in FRAMEWORKS)
    lines = [
        "## 7. Assumptions about software",
        "",
        "What a framework runs where a row is silent. It never depends on a row's model, sizes or result.",
        "",
    ]
    lines += table(
        ("framework", "stack", "why"),
        (
            (
                entry.name + (f" ({entry.source or entry.task or 'other'})" if counts[entry.name] > 1 else ""),
                entry.stack,
                entry.why,
            )
            for entry in FRAMEWORKS
        ),
        left=3,
    )
    lines += [
        f"How often an assumption was changed after its rows were seen, which is the real degree of freedom: "
        f"{len(REVISIONS)} times.",
        "",
        *(f"- {change}." for change in REVISIONS),
        "",
    ]
    return lines


def main() -> None:
    """Write the document, or print its figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    found = figures(given.rows, say=say)
    say("kernel models")
    reports = kernels()
    if given.json:
        print(json.dumps({**found, "kernels": reports}, indent=1, allow_nan=False))
        return
    text = document(found, reports)
    text.encode("ascii")  # raises on a letter that is none
    OUT.write_text(text, encoding="utf-8")
    say(f"{OUT.relative_to(ROOT)}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
