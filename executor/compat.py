"""Every private or version-dependent torch symbol that the executor uses, in one place.

Written against torch 2.11 to 2.13. A test imports and exercises all of it, so a new release of torch breaks here first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = ["FsdpUnit", "fsdp_unit", "local_slices"]


@dataclass(frozen=True, slots=True)
class FsdpUnit:
    """What one `fully_shard` call on a module really set up."""

    reshard_after_forward: bool
    param_dtype: torch.dtype | None  # None: the dtype of the parameters
    reduce_dtype: torch.dtype | None  # None: the dtype of the gradients
    gradient_divide_factor: float | None
    sum_reduction: bool
    forward_prefetch: int  # units named explicitly; 0: FSDP2's own order
    backward_prefetch: int


def fsdp_unit(module: FSDPModule) -> FsdpUnit:
    """Reads the state that `fully_shard` keeps for ``module``; it has no public accessor in torch 2.13."""
    state: Any = module._get_fsdp_state()
    # 2.11 and 2.12 keep one group per module, 2.13 a list of them.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    group = groups[0]
    return FsdpUnit(
        reshard_after_forward=group.post_forward_mesh_info is not None,
        param_dtype=group.mp_policy.param_dtype,
        reduce_dtype=group.mp_policy.reduce_dtype,
        gradient_divide_factor=group.gradient_divide_factor,
        sum_reduction=group.force_sum_reduction_for_comms,
        forward_prefetch=len(state._states_to_forward_prefetch),
        backward_prefetch=len(state._states_to_backward_prefetch),
    )


def local_slices(parameter: nn.Parameter | torch.Tensor) -> tuple[slice, ...]:
    """The part of the full tensor that this rank holds, one slice per dim; everything for a plain tensor."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
