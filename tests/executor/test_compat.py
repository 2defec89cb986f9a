"""Every private torch symbol that the executor uses: a new torch release breaks here first."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainplan.executor import compat


def test_every_name_imports() -> None:
    assert compat.__all__
    for name in compat.__all__:
        assert callable(getattr(compat, name))


@pytest.mark.usefixtures("one_rank")
def test_fsdp_state_can_be_read() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    units: list[FSDPModule] = [layer for layer in model if isinstance(layer, FSDPModule)]
    first, others = units[0], units[1:]
    assert len(others) == 2
    first.set_gradient_divide_factor(1.0)
    first.set_force_sum_reduction_for_comms(True)
    first.set_modules_to_forward_prefetch(others)
    unit = compat.fsdp_unit(first)
    assert unit == compat.FsdpUnit(
        reshard_after_forward=True,
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        gradient_divide_factor=1.0,
        sum_reduction=True,
        forward_prefetch=2,
        backward_prefetch=0,
    )
    assert not compat.fsdp_unit(others[0]).sum_reduction


@pytest.mark.usefixtures("one_rank")
def test_the_local_part_of_a_tensor_is_known() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    layer = nn.Linear(3, 5)
    assert compat.local_slices(layer.weight) == (slice(0, 5), slice(0, 3))
    fully_shard(layer, mesh=mesh)
    assert compat.local_slices(layer.weight) == (slice(0, 5), slice(0, 3))
