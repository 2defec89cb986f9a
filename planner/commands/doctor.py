"""`planner doctor`: what this machine has and lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = ("planner doctor", "planner doctor --json")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Show what this machine has and lacks, and how to mend it."""
    from dataclasses import asdict

    from trainplan.planner.checkup import checkup
    from trainplan.planner.commands.output import print_json
    from trainplan.planner.render.console import console, table

    checks = checkup(Path.cwd())
    if as_json:
        print_json({"checks": [asdict(check) for check in checks]})
        return
    rows: list[tuple[str, str, str]] = []
    for check in checks:
        rows.append((check.state, check.name, check.found))
        if check.mend:
            rows.append(("", "", check.mend))
    table(console(), rows)
