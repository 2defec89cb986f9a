"""The figures of docs/accuracy.md: predictions of every row, targets, factors and what they belong to."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import re
import subprocess
import sys
from collections import defaultdict
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
from trainplan.planner.frameworks import FRAMEWORKS
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


def percent(value: float | None, sign: bool = False) -> str:
    """One decimal; "-" where there is nothing."""
    return "-" if value is None else f"{100 * value:{'+' if sign else ''}.1f}"


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
