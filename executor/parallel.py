"""Applies a strategy to a model: recomputation, compilation, then sharding, in this order.

One mechanism shards, FSDP2. The four levels differ only in when it gathers and reduces; `SyncPolicy` says so:

| sharding   | parameters gathered                          | gradients reduced    | gradients accumulate |
|------------|----------------------------------------------|----------------------|----------------------|
| none       | never (each rank has all)                    | once per step        | unsharded            |
| optimizer  | once per step                                | once per step        | unsharded            |
| gradients  | once per step                                | every micro-batch    | sharded              |
| parameters | every micro-batch, twice where they are freed after the forward pass | every micro-batch | sharded |

``none`` is FSDP2 over a shard axis of size 1: its all-gather and reduce-scatter are local copies, and only the
all-reduce over the replicas is left. With dp_replicate > 1 the replicas are reduced once per step at every level.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainplan.costmodel.backends.native import BACKEND as NATIVE
from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.strategy import Strategy
from trainplan.executor.decoder import CausalLm

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check_strategy(spec: ModelSpec, strategy: Strategy) -> None:
    """Returns if the native executor runs ``strategy`` exactly as it is written; nothing is ever ignored.

    The values come from the table that the search reads, `trainplan.costmodel.backends.native`.

    Raises:
        UsageError: It does not; the message names the field and the values it runs.
    """

    def refuse(field: str, mend: str) -> None:
        raise UsageError(f"{field}={getattr(strategy, field)!r} is not run by the native executor. {mend}")

    for field, values in NATIVE.values.items():
        if getattr(strategy, field) not in values:
            options = " or ".join(f"{field}={value!r}" for value in sorted(values, key=repr))
            refuse(field, f"Use {options}, or export the plan to a backend that has it.")
    layers = strategy.recompute_layers
    if layers and (strategy.recompute == "none" or len(layers) != 1 or not 0 <= layers[0] <= spec.num_layers):
        refuse("recompute_layers", f"Use one count of at most {spec.num_layers}, with recompute='full'.")
    if (strategy.sharding == "none") != (strategy.dp_shard == 1):
        refuse("sharding", f"It goes with dp_shard={strategy.dp_shard} only if both are off: 'none' with dp_shard=1.")
    if strategy.sharding != "parameters" and strategy.reshard_after_forward:
        refuse("reshard_after_forward", "Only gathered parameters can be freed: use sharding='parameters'.")


@dataclass(frozen=True, slots=True)
class SyncPolicy:
    """When parameters are gathered and gradients reduced within one optimizer step."""

    reduce_every_micro_batch: bool
    keep_gathered: bool  # parameters stay gathered from the first micro-batch of a step to its last
    reshard_after_forward: bool

    @classmethod
    def of(cls, strategy: Strategy) -> SyncPolicy:
        """The policy of a sharding level."""
        return cls(
            reduce_every_micro_batch=strategy.sharding in ("gradients", "parameters"),
            keep_gathered=strategy.sharding != "parameters",
            reshard_after_forward=strategy.reshard_after_forward,
        )

    def enter_micro_batch(self, model: CausalLm, *, last: bool) -> None:
        """Sets what the next backward pass communicates; ``last``: it is the last of the optimizer step."""
        if not isinstance(model, FSDPModule):
            return
        model.set_requires_gradient_sync(last or self.reduce_every_micro_batch)
        if self.reduce_every_micro_batch:
            model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or not self.keep_gathered)
        model.set_is_last_backward(last)


def recomputed_layers(spec: ModelSpec, strategy: Strategy) -> int:
    """How many layers, counted from the first, are computed again in the backward pass."""
    if strategy.recompute == "none":
        return 0
    return strategy.recompute_layers[0] if strategy.recompute_layers else spec.num_layers


def parallelize(model: CausalLm, strategy: Strategy, mesh: DeviceMesh) -> SyncPolicy:
    """Turns ``model``, still on the meta device, into what ``strategy`` says, in place.

    Gradients are summed over ranks, not averaged: the loss is already divided by the step's number of tokens.

    Returns:
        What `SyncPolicy.enter_micro_batch` must be called on before each micro-batch.
    """
    model.loss_chunk = strategy.loss_chunk
    for block in model.blocks[: recomputed_layers(model.spec, strategy)]:
        block.recompute = True
    if strategy.compile:
        for block in model.blocks:
            block.compile_body()
    if needs_fsdp(strategy):
        _shard(model, strategy, mesh)
    return SyncPolicy.of(strategy)


def needs_fsdp(strategy: Strategy) -> bool:
    """False for one rank in fp32: there is nothing to gather, reduce or cast, and a plain module costs least."""
    return strategy.world_size > 1 or strategy.precision != "fp32"


def mixed_precision(strategy: Strategy) -> MixedPrecisionPolicy:
    """Master weights are fp32; ``precision`` is what is gathered and computed with, ``reduce_dtype`` what is summed."""
    return MixedPrecisionPolicy(
        param_dtype=None if strategy.precision == "fp32" else DTYPES[strategy.precision],
        reduce_dtype=DTYPES[strategy.reduce_dtype],
    )


def _shard(model: CausalLm, strategy: Strategy, mesh: DeviceMesh) -> None:
    policy = mixed_precision(strategy)
    # Without replicas the one-dimensional mesh: over the other, FSDP2 would all-reduce in groups of one rank.
    mesh = mesh if strategy.dp_replicate > 1 else mesh["dp_shard"]
    blocks = model.blocks
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=strategy.reshard_after_forward)
    # The root holds the embeddings and the final norm. They are needed first in the backward pass, so not freed.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A plain sum. Gloo has no pre-multiplied sum, so FSDP2 is told to use none.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    n = strategy.prefetch_units
    if n > 1:  # 1 is what FSDP2 does unasked
        units: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + n])
            unit.set_modules_to_backward_prefetch(units[max(0, i - n) : i][::-1])
