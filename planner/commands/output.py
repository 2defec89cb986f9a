"""Where do results go? One JSON document, or files that never replace what a person did not mean to lose."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
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
    _check_target(path, "plan", lambda found: {"schema_version", "strategy", "estimate"} <= _keys(found))


def check_cluster_target(path: Path) -> None:
    """The same for the file of a measured cluster.

    Raises:
        UsageError: As for a plan.
    """
    _check_target(path, "cluster", lambda found: {"device", "num_nodes", "gpus_per_node"} <= _keys(found))


def check_study_target(path: Path) -> None:
    """The same for the journal of a search, which is added to.

    Raises:
        UsageError: As for a plan.
    """
    from trainplan.planner.study import is_study

    _check_target(path, "study", is_study)


def _check_target(path: Path, what: str, is_one: Callable[[Path], bool]) -> None:
    from trainplan.costmodel.errors import UsageError

    if path.is_dir():
        raise UsageError(f"{path} is a folder. Give the name of a file in it.")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist. Make it, or give another path.")
    if path.exists() and not is_one(path):
        raise UsageError(f"{path} exists and is no {what} file, so it is left alone. Give another name.")


def _keys(path: Path) -> set[str]:
    """The fields of a YAML file, none where it can't be read."""
    from trainplan.costmodel.errors import UsageError
    from trainplan.costmodel.files import read_yaml_object

    try:
        return set(read_yaml_object(path))
    except UsageError:
        return set()


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
