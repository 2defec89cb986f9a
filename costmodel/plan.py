"""A plan file: the job, the strategy chosen for it, what it is predicted to cost, and where all that came from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainplan.costmodel.backends import backend
from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.estimate import Estimate
from trainplan.costmodel.files import explain, read_yaml_object, write_yaml
from trainplan.costmodel.hardware import Cluster
from trainplan.costmodel.job import Job
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Workload

SCHEMA_VERSION = "1.1"
"""major.minor: a reader takes its own major version; a minor version only adds fields."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SearchRecord(_Frozen):
    """What the search looked at before it chose."""

    engine: str
    covered: int = Field(ge=0, description="Strategies considered, legal or not.")
    illegal: dict[str, int] = Field(default_factory=dict, description="Rule -> strategies it was the first to refuse.")
    infeasible: int = Field(ge=0, description="Legal strategies that do not fit in memory.")
    feasible: int = Field(ge=0, description="Strategies that were found to fit.")
    dropped: int = Field(0, ge=0, description="Strategies that a bound excluded before it was seen whether they fit.")
    simulated: int = Field(0, ge=0, description="Strategies whose step was simulated.")
    gap_frac: float = Field(ge=0, description="The step time is proven within this share of the best; 0 = exact.")
    proven: bool = Field(description="Whether every feasible strategy was priced or bounded.")


class Provenance(_Frozen):
    """How the plan was made."""

    trainplan_version: str
    created: str = Field(description="UTC, ISO 8601.")
    command: str
    search: SearchRecord | None = None


class Plan(_Frozen):
    """One strategy for one job, priced. Saved as YAML; `load` refuses a file that contradicts itself."""

    schema_version: str = SCHEMA_VERSION
    model: ModelSpec
    cluster: Cluster
    workload: Workload
    backend: str
    strategy: Strategy
    estimate: Estimate
    provenance: Provenance

    @property
    def job(self) -> Job:
        return Job(self.model, self.cluster, self.workload)

    @property
    def plan_hash(self) -> str:
        """SHA-256 of what the plan says (canonical JSON of everything but its provenance), first 16 digits."""
        content = self.model_dump(mode="json", exclude={"provenance"})
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, path: Path | str) -> None:
        """Write the plan as YAML, whole or not at all."""
        write_yaml({**self.model_dump(mode="json"), "plan_hash": self.plan_hash}, Path(path))

    @classmethod
    def load(cls, path: Path | str, *, edited: bool = False) -> Plan:
        """Read a plan file.

        Args:
            path: YAML as `save` writes it.
            edited: Accept a strategy or job that a person changed after the estimate was made (its hash differs), as
                long as it is legal; the estimate is then stale and must be made anew.

        Raises:
            UsageError: Not a plan, another major version, an unknown or missing key, or a contradiction.
        """
        path = Path(path)
        content = read_yaml_object(path)
        _check_version(path, content)
        stated = content.pop("plan_hash", None)
        try:
            plan = cls.model_validate(content)
        except ValidationError as exc:
            raise UsageError(f"{path}: not a usable plan: {explain(exc)}") from None
        plan.check(str(path))
        if stated != plan.plan_hash and not edited:
            raise UsageError(
                f"{path}: plan_hash is {stated}, but its content hashes to {plan.plan_hash}: it was edited after it "
                "was priced. Price it anew with `planner explain --reprice`, or tune again."
            )
        return plan

    def check(self, where: str) -> None:
        """UsageError if the strategy is not legal for the job on the plan's backend, naming the first broken rule."""
        broken = backend(self.backend).legal(self.job, self.strategy)
        if broken:
            more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
            raise UsageError(f"{where}: the plan contradicts itself: {broken[0].reason}{more}")


def _check_version(path: Path, content: dict[str, Any]) -> None:
    version = content.get("schema_version")
    if not isinstance(version, str) or version.count(".") != 1:
        raise UsageError(
            f"{path}: schema_version is {version!r}, so this is no plan file. Make one with `planner tune`."
        )
    if version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise UsageError(
            f"{path}: schema_version {version} is not readable by this version, which reads {SCHEMA_VERSION}. "
            "Tune again, or install the trainplan that wrote it."
        )


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a plan file."""
    schema = Plan.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "trainplan plan"
    schema["properties"]["plan_hash"] = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
    schema["properties"]["schema_version"]["pattern"] = f"^{SCHEMA_VERSION.split('.')[0]}\\.[0-9]+$"
    return schema
