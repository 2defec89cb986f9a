"""How many bytes does data parallelism move in a step? What each rank gathers, scatters and reduces, without time.

The counterpart in seconds is `trainplan.costmodel.units` played by `trainplan.costmodel.graph`; tests hold both against
what torch issues.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Volume:
    """Bytes of a step's messages on one rank, summed over its collectives; what a wire carries is less by (n - 1) / n.

    Attributes:
        gathered: Outputs of all-gathers, the whole unit each time.
        scattered: Inputs of reduce-scatters, the whole unit's gradients.
        replicated: Buffers of all-reduces over the replicas, a rank's own shard.
    """

    gathered: int
    scattered: int
    replicated: int


def data_parallel_volume(model: ModelSpec, strategy: Strategy) -> Volume:
    """The volume under FSDP2, one unit per layer and a root unit for the rest, as the native executor runs it.

    Per step, with m micro-batches: parameters are gathered once (``optimizer``, ``gradients``), m times
    (``parameters``), or 2 m times but for the root, which stays (freed after forward). Gradients are scattered once, or
    m times from ``gradients`` on. Replicas are reduced once, in the type of the reduction.

    Args:
        model: Dense; its parameters must divide by dp_shard (FSDP2 pads the first dimension of each).
        strategy: Data parallelism alone.

    Raises:
        UsageError: The strategy splits the model in another way too.
    """
    if strategy.tp * strategy.pp * strategy.cp * strategy.ep != 1:
        raise UsageError("Only data parallelism is counted. Use tp=pp=cp=ep=1.")
    whole = model.parameters()
    layers = sum(model.layer_parameters(*kind) for kind in model.layer_kinds())
    element, width = (2 if value == "bf16" else 4 for value in (strategy.precision, strategy.reduce_dtype))
    m, level = strategy.grad_accum, strategy.sharding
    gathered = scattered = 0
    if strategy.dp_shard > 1:
        times = m if level == "parameters" else 1
        gathered = element * times * (whole + (layers if strategy.reshard_after_forward else 0))
        scattered = width * (m if level in ("gradients", "parameters") else 1) * whole
    replicated = width * whole // strategy.dp_shard if strategy.dp_replicate > 1 else 0
    return Volume(gathered, scattered, replicated)
