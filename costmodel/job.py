"""A job: the model, the cluster and the workload that a strategy is chosen for."""

from __future__ import annotations

from dataclasses import dataclass

from trainplan.costmodel.hardware import Cluster
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.workload import Workload


@dataclass(frozen=True)
class Job:
    """What stays fixed while strategies are compared."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
