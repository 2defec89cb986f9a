"""Where do results go? One JSON document, or files that never replace what a person did not mean to lose."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trainplan import __version__

if TYPE_CHECKING:
    from trainplan.costmodel.plan import Plan, Provenance, SearchRecord


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person typed, kept for the command that runs."""

    command: tuple[str, ...] = ("planner",)
    debug: bool = False


def asked(context: typer.Context) -> Asked:
    """What was typed to start this command."""
    return context.find_object(Asked) or Asked()


def print_json(document: Any) -> None:
    """The one document of ``--json`` on standard output. A number that JSON lacks is an error of ours, so it raises."""
    print(json.dumps(document, indent=2, allow_nan=False))


def check_plan_target(path: Path) -> None:
    """Returns if a plan may be written to ``path``: nothing is there, or an older plan.

    Raises:
        UsageError: A folder or another file is there, or the folder of ``path`` does not exist.
    """
    from trainplan.costmodel.errors import UsageError

    if path.is_dir():
        raise UsageError(f"{path} is a folder. Give the name of a file, as in -o {path / 'plan.yaml'}.")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist. Make it, or give another path.")
    if path.exists() and not _is_plan(path):
        raise UsageError(f"{path} exists and is no plan file, so it is left alone. Give another name with -o.")


def _is_plan(path: Path) -> bool:
    from trainplan.costmodel.errors import UsageError
    from trainplan.costmodel.files import read_yaml_object

    try:
        content = read_yaml_object(path)
    except UsageError:
        return False
    return {"schema_version", "strategy", "estimate"} <= content.keys()


def plan_document(plan: Plan) -> dict[str, Any]:
    """A plan as it is in its file."""
    return {**plan.model_dump(mode="json"), "plan_hash": plan.plan_hash}


def provenance(context: typer.Context, search: SearchRecord | None) -> Provenance:
    """How a plan was made now, by the command that runs."""
    from trainplan.costmodel.plan import Provenance

    return Provenance(
        trainplan_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(asked(context).command),
        search=search,
    )
