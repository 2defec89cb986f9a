"""Run by torchrun: trains every case of a JSON file, one after another, on all ranks.

The file holds ``cache``, ``output``, ``options`` and ``cases``: (name, model_dir, strategy, workload) each. Results are
what `train` writes to ``<output>/<name>``, and ``collectives.json`` with the collectives of the third step.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Workload
from trainplan.executor import train as training
from trainplan.executor.options import RunOptions
from trainplan.executor.tokens import open_cache

COUNTED_STEP = 2  # in the first, FSDP2 sets itself up


class Collectives(TorchDispatchMode):
    """Counts the collectives of forward and backward, and the elements that enter them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            kind = next(kind for kind in ("gather", "reduce_scatter", "allreduce", "") if kind in name)
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.calls[kind] += 1
            self.elements[kind] += max((x.numel() for x in tensors), default=0)
        return func(*args, **(kwargs or {}))


def count_collectives(results: dict[str, Any]) -> Callable[..., Any]:
    """Wraps the forward and backward pass of one step."""
    inner = training._forward_backward
    seen = 0

    def counted(*args: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen != COUNTED_STEP + 1:
            return inner(*args)
        with Collectives() as mode:
            loss = inner(*args)
        results.update(calls=dict(mode.calls), elements=dict(mode.elements))
        return loss

    return counted


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    cache = open_cache(Path(job["cache"]))
    original = training._forward_backward
    for name, model_dir, strategy, workload in job["cases"]:
        output = Path(job["output"]) / name
        output.mkdir(parents=True, exist_ok=True)
        options = RunOptions(**{**job["options"], "model_dir": model_dir, "output_dir": output})
        counts: dict[str, Any] = {}
        if not strategy["compile"]:  # the compiler refuses to work under a dispatch mode
            training._forward_backward = count_collectives(counts)
        spec = load_model(model_dir)
        parts = training.Job(spec, Workload(**workload), Strategy(**strategy), options)
        training.train(parts, cache, torch.device("cpu"))
        training._forward_backward = original
        if dist.get_rank() == 0:
            (output / "collectives.json").write_text(json.dumps(counts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
