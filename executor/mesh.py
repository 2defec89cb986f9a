"""Which rank stands where: from a strategy to torch's device mesh."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainplan.costmodel.errors import MachineMismatchError
from trainplan.costmodel.strategy import Strategy

AXES = ("dp_replicate", "dp_shard")


def build_mesh(strategy: Strategy, device_type: str) -> DeviceMesh:
    """The mesh (dp_replicate, dp_shard), the last axis varying fastest.

    Args:
        strategy: Its degrees.
        device_type: ``cuda`` or ``cpu``.

    Raises:
        MachineMismatchError: The job has another number of ranks than the plan.
    """
    world_size = dist.get_world_size()
    if world_size != strategy.world_size:
        raise MachineMismatchError(
            f"the plan is for {strategy.world_size} ranks, this job has {world_size}. "
            f"Start {strategy.world_size} processes, or tune a plan for {world_size}."
        )
    return init_device_mesh(device_type, (strategy.dp_replicate, strategy.dp_shard), mesh_dim_names=AXES)


def dp_rank(mesh: DeviceMesh) -> int:
    """This rank's place among those that see different data."""
    replicate, shard = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    return replicate * mesh.size(1) + shard
