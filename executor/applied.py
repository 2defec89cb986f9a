"""Is what was set up what the plan says? Read off the live objects and compared before the first step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainplan.costmodel.errors import MachineMismatchError
from trainplan.costmodel.strategy import Strategy
from trainplan.executor.compat import fsdp_unit
from trainplan.executor.data import StepData, StepShare
from trainplan.executor.decoder import CausalLm
from trainplan.executor.files import write_json
from trainplan.executor.parallel import DTYPES, SyncPolicy, needs_fsdp, recomputed_layers

FILE = "applied.json"


def observed(
    model: CausalLm,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    policy: SyncPolicy,
    data: StepData,
    share: StepShare,
) -> dict[str, Any]:
    """What the running objects are, as plain JSON values; ``share`` is this rank's part of any step."""
    blocks = model.blocks
    units = {name or "root": fsdp_unit(m) for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    block_units = [unit for name, unit in units.items() if name != "root"]
    parameters = list(model.parameters())
    layouts = Counter(_layout(p) for p in parameters)
    precisions = {
        (_name(unit.param_dtype or parameters[0].dtype), _name(unit.reduce_dtype or parameters[0].dtype))
        for unit in units.values()
    }
    return {
        "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
        "device": mesh.device_type,
        "units": sorted(units),
        "layouts": dict(sorted(layouts.items())),
        "master_dtype": sorted({_name(p.dtype) for p in parameters}),
        "precision_and_reduce_dtype": sorted(list(pair) for pair in precisions),
        "reshard_after_forward": sorted({unit.reshard_after_forward for unit in block_units}),
        "gradient_sum": all(unit.sum_reduction and unit.gradient_divide_factor == 1.0 for unit in units.values()),
        "forward_prefetch": max((unit.forward_prefetch for unit in units.values()), default=0),
        "backward_prefetch": max((unit.backward_prefetch for unit in units.values()), default=0),
        "parameters_gathered": _gathered(policy),
        "gradients_reduced": "every micro-batch" if policy.reduce_every_micro_batch else "once per step",
        "recomputed_layers": [i for i, block in enumerate(blocks) if block.recompute],
        "compiled_layers": [i for i, block in enumerate(blocks) if block.is_compiled],
        "loss_chunk": model.loss_chunk,
        "attention": sorted({type(block.self_attn.sdpa).__name__.lower() for block in blocks}),
        "optimizer": type(optimizer).__name__.lower(),
        "optimizer_parameters": sum(p.numel() for group in optimizer.param_groups for p in group["params"]),
        "micro_batches": [list(batch.input_ids.shape) for batch in share.micro_batches],
        "packing": data.packing,
        "global_batch_size": data.global_batch_size,
    }


def expected(model: CausalLm, strategy: Strategy, device_type: str, seq_len: int) -> dict[str, Any]:
    """What `observed` must give for a plan, from the plan alone."""
    spec = model.spec
    layers = [f"model.layers.{i}" for i in range(spec.num_layers)]
    sharded = needs_fsdp(strategy)
    names = len(list(model.parameters()))
    mesh_layout = (["replicate"] if strategy.dp_replicate > 1 else []) + ["shard(0)"]
    prefetch = min(strategy.prefetch_units, spec.num_layers - 1) if sharded and strategy.prefetch_units > 1 else 0
    level = strategy.sharding
    per_micro_batch = level in ("gradients", "parameters")
    return {
        "mesh": {"dp_replicate": strategy.dp_replicate, "dp_shard": strategy.dp_shard},
        "device": device_type,
        "units": sorted([*layers, "root"]) if sharded else [],
        "layouts": {" ".join(mesh_layout) if sharded else "whole": names},
        "master_dtype": ["fp32"],
        "precision_and_reduce_dtype": [[strategy.precision, strategy.reduce_dtype]] if sharded else [],
        "reshard_after_forward": [strategy.reshard_after_forward] if sharded else [],
        "gradient_sum": True,
        "forward_prefetch": prefetch,
        "backward_prefetch": prefetch,
        "parameters_gathered": {
            "none": "once per step",
            "optimizer": "once per step",
            "gradients": "once per step",
            "parameters": "before forward and before backward"
            if strategy.reshard_after_forward
            else "once per micro-batch",
        }[level],
        "gradients_reduced": "every micro-batch" if per_micro_batch else "once per step",
        "recomputed_layers": list(range(recomputed_layers(spec, strategy))),
        "compiled_layers": list(range(spec.num_layers)) if strategy.compile else [],
        "loss_chunk": strategy.loss_chunk,
        "attention": [strategy.attention],
        "optimizer": "adamw",
        "optimizer_parameters": spec.parameters(),
        "micro_batches": [[strategy.micro_batch_size, seq_len]] * strategy.grad_accum,
        "packing": strategy.packing,
        "global_batch_size": strategy.global_batch_size,
    }


def verify(seen: dict[str, Any], wanted: dict[str, Any], output_dir: Path, *, writes: bool) -> None:
    """Saves what was applied as ``applied.json`` and returns if it is what the plan says.

    Raises:
        MachineMismatchError: It is not; the message names each difference.
    """
    different = {key: (seen[key], value) for key, value in wanted.items() if seen[key] != value}
    if writes:
        write_json(output_dir / FILE, {"applied": seen, "differs": sorted(different)})
    if different:
        listed = "; ".join(f"{key} is {is_!r}, the plan says {should!r}" for key, (is_, should) in different.items())
        raise MachineMismatchError(
            f"what was set up is not the plan: {listed}. Tune the plan again with this version, or report this fault."
        )


def _gathered(policy: SyncPolicy) -> str:
    if policy.keep_gathered:
        return "once per step"
    return "before forward and before backward" if policy.reshard_after_forward else "once per micro-batch"


def _layout(parameter: torch.Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return "whole"
    return " ".join(
        "replicate" if p.is_replicate() else f"shard({getattr(p, 'dim', '?')})" for p in parameter.placements
    )


def _name(dtype: torch.dtype) -> str:
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))
