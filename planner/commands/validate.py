"""`planner validate`: predicted beside measured for rows of published or own measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = ("planner validate training.jsonl", "planner validate training.jsonl --json")


def validate(
    rows: Annotated[Path, typer.Argument(help="JSONL, one measured training configuration per line.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Set predicted beside measured for a file of measurements."""
    from trainplan.planner.commands.output import print_json
    from trainplan.planner.render.console import console
    from trainplan.planner.render.validation import print_report
    from trainplan.planner.validate import validate_rows

    report = validate_rows(rows)
    if as_json:
        print_json({"rows": report.rows, "summary": report.summary})
    else:
        print_report(console(), report)
