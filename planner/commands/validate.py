"""`planner validate`: predicted beside measured for rows of published or own measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = (
    "planner validate training.jsonl",
    "planner validate training.jsonl --leave-one-block-out",
    "planner validate training.jsonl --calibrate 5 --draws 10 --json",
)


def validate(
    rows: Annotated[Path, typer.Argument(help="JSONL, one measured training configuration per line.")],
    leave_one_block_out: Annotated[
        bool,
        typer.Option(
            "--leave-one-block-out", help="Predict each block with factors fitted to the file's other blocks."
        ),
    ] = False,
    calibrate: Annotated[
        int,
        typer.Option(
            "--calibrate", min=0, metavar="K", help="Rows per hardware and stack that refine the factors, unscored."
        ),
    ] = 0,
    draws: Annotated[
        int, typer.Option("--draws", min=1, metavar="N", help="Choices of these rows; figures are means over them.")
    ] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Set predicted beside measured for a file of measurements."""
    from trainplan.planner.commands.output import print_json
    from trainplan.planner.render.console import console
    from trainplan.planner.render.progress import fitting
    from trainplan.planner.render.validation import print_report
    from trainplan.planner.validate import validate_rows

    with fitting() as report_progress:
        report = validate_rows(rows, leave_one_block_out, calibrate, draws, report_progress)
    if as_json:
        print_json({"rows": report.rows, "summary": report.summary, "factors": report.factors})
    else:
        print_report(console(), report)
