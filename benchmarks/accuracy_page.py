"""docs/accuracy.md as Markdown: the sections, tables and cells of figures that `accuracy_figures` made."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accuracy_figures import COVERED, ENOUGH, NO_CONTROL, PREDICTED_SHARE, WIDEST, K, percent

from trainplan.planner.frameworks import FRAMEWORKS, REVISIONS

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
