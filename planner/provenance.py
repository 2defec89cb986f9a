"""Where does each number behind a prediction come from? The quantities of a cluster, and what a prediction assumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from trainplan.costmodel.estimate import MFU_DEFINITION
from trainplan.costmodel.hardware import Cluster, Provenance, Quantity
from trainplan.costmodel.plan import Plan
from trainplan.costmodel.rates import PRIOR_LOG_SD, RESIDUAL_LOG_SD


@dataclass(frozen=True, slots=True)
class Sourced:
    """A number of a cluster: its dotted path, the field that names its unit, and where it came from."""

    path: str
    field: str
    value: float
    provenance: Provenance
    source: str


def quantities(part: BaseModel, prefix: str = "") -> list[Sourced]:
    """Every quantity inside a cluster, device or link, in the order of the fields."""
    return [
        Sourced(f"{prefix}{path}", field, found.value, found.provenance, found.source)
        for path, field, found in _walk(part)
    ]


def _walk(part: BaseModel) -> Iterator[tuple[str, str, Quantity]]:
    for field, value in part:
        entries = value.items() if isinstance(value, dict) else [("", value)]
        for key, entry in entries:
            path = f"{field}.{key}" if key else field
            if isinstance(entry, Quantity):
                yield path, field, entry
            elif isinstance(entry, BaseModel):
                yield from ((f"{path}.{below}", name, found) for below, name, found in _walk(entry))


def provenance_counts(cluster: Cluster) -> dict[Provenance, int]:
    """How many of a cluster's numbers are of each kind, the most certain kind first."""
    counts = Counter(found.provenance for found in quantities(cluster))
    return {kind: counts[kind] for kind in PRIOR_LOG_SD if counts[kind]}


def assumptions(plan: Plan) -> list[str]:
    """What the prediction takes for granted, one sentence each."""
    strategy, workload = plan.strategy, plan.workload
    spreads = ", ".join(f"{100 * PRIOR_LOG_SD[kind]:.0f} % {kind}" for kind in provenance_counts(plan.cluster))
    found = [
        f"The interval is the 5 to 95 % range when every rate is off by a standard deviation of {spreads}, and the "
        f"formulas by {100 * RESIDUAL_LOG_SD:.0f} %.",
        "A plan fits when the 95 % point of the memory of its fullest rank is inside the limit.",
        f"MFU counts {MFU_DEFINITION}.",
    ]
    if not workload.length_histogram:
        found.append("Every sequence is full: no padding is counted. Give --lengths for documents of other lengths.")
    elif strategy.packing:
        found.append("Documents are packed best-fit; what stays free in a sequence is padding.")
    else:
        found.append("Every document has a sequence of its own, padded to seq_len.")
    if plan.model.moe is not None:
        found.append("Tokens are spread evenly over the experts.")
    if not plan.cluster.software:
        found.append("The cluster names no software versions: its rates were not measured on one machine.")
    return found
