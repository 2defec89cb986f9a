"""`planner validate`: its two outputs, and what it says to a file that is none. test_validate.py holds the figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.planner.conftest import Done

# Korthikanti et al. 2022, arXiv:2205.05198, table 5: GPT-3 175B takes 13.75 s per step on 64 A100.
GPT3 = {
    "id": "gpt3-175b", "block": "published",
    "model": {
        "name": "GPT-3 175B", "layers": 96, "hidden": 12288, "heads": 96, "kv_heads": 96, "head_dim": 128, "ffn": 49152,
        "vocab": 51200, "gated_mlp": False, "moe": None,
    },
    "gpu": "A100-80GB", "n_gpus": 64, "gpus_per_node": 8, "seq": 2048, "gbs": 64, "mbs": 1, "tp": 8, "sp": True,
    "pp": 8, "vpp": 3, "dp": 1, "cp": 1, "zero_or_fsdp": "none (dp=1)",
    "recompute": "selective attention + sequence parallel", "precision": "fp16", "framework": "Megatron-LM",
    "task": "pretrain", "measured": {"step_time_s": 13.75},
}  # fmt: skip


@pytest.fixture
def rows(folder: Path) -> Path:
    """One row that can be predicted and one that does not say its micro-batch."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (GPT3, {**GPT3, "id": "b", "mbs": None})))
    return path


def test_the_screen_has_the_errors_and_why_rows_were_left_out(planner: Callable[..., Done], rows: Path) -> None:
    done = planner("validate", rows)
    assert (done.code, done.err) == (0, "")
    line, ranked = (line for line in done.out.splitlines() if line.startswith("published"))
    assert "%" in ranked
    assert line.split()[:4] == ["published", "step_time_s", "1", "1"]
    assert "mbs is not published" in done.out


def test_json_is_one_document_with_every_row(planner: Callable[..., Done], rows: Path) -> None:
    found = planner("validate", rows, "--json").json
    predicted, skipped = found["rows"]
    assert (predicted["id"], predicted["measured"]) == ("gpt3-175b", 13.75)
    assert predicted["error_frac"] == pytest.approx(predicted["predicted"] / 13.75 - 1)
    assert "mbs is not published" in skipped["skipped"]
    assert [(line["rows"], line["skipped"]) for line in found["summary"]] == [(1, 1)]
    assert found["factors"] == []


def table_5(block: str, seconds: float) -> list[dict[str, object]]:
    """A block of five rows: GPT-3 175B with 8 to 128 sequences, each micro-batch in the same time."""
    return [
        {
            **GPT3,
            "id": f"{block}-{gbs}",
            "block": block,
            "gbs": gbs,
            "measured": {"step_time_s": seconds * (gbs + 7 / 3)},
        }
        for gbs in (8, 16, 32, 64, 128)
    ]


def test_a_block_is_predicted_by_the_others_and_by_rows_of_its_own(planner: Callable[..., Done], folder: Path) -> None:
    """Two blocks of the same runs, one 20 % slower: rows of its own bring its predictions nearer."""
    rows = [*table_5("fast", 13.75 / 66.3), *table_5("slow", 1.2 * 13.75 / 66.3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    zero_shot = planner("validate", "rows.jsonl", "--leave-one-block-out", "--json").json
    calibrated = planner("validate", "rows.jsonl", "--calibrate", 2, "--draws", 3, "--json").json
    before, after = ({line["block"]: line for line in found["summary"]} for found in (zero_shot, calibrated))
    assert before["slow"]["bias"] < before["fast"]["bias"]
    assert after["slow"]["mape"] < before["slow"]["mape"]
    assert after["slow"]["rows"] == 3
    assert {"matmul", "matmul/A100"} <= {factor["name"] for factor in zero_shot["factors"]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "rows.jsonl: no such file"),
        ("", "no rows"),
        (json.dumps(GPT3) + "\n{\n", "line 2: not JSON"),
        ("[1]\n", "line 1"),
        ('{"id": "a"}\n', "line 1"),
    ],
)
def test_what_is_no_file_of_rows_exits_2(
    planner: Callable[..., Done], folder: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (folder / "rows.jsonl").write_text(content)
    done = planner("validate", "rows.jsonl")
    assert (done.code, words in done.error) == (2, True)
