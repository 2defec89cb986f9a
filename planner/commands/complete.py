"""What may a shell offer for an argument? Known names, read only when the shell asks."""

from __future__ import annotations


def model_names(incomplete: str) -> list[str]:
    """Known models that start with what was typed, the owner left out or not."""
    from trainplan.costmodel.model_presets import presets

    return [name for name in presets() if name.startswith(incomplete) or name.split("/")[-1].startswith(incomplete)]


def cluster_names(incomplete: str) -> list[str]:
    """``local``, node types and GPUs that start with what was typed."""
    from trainplan.costmodel.hardware_presets import ANY_GPU, gpu_facts, node_facts

    names = ["local", *(name for name in node_facts() if name != ANY_GPU), *gpu_facts()]
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def backend_names(incomplete: str) -> list[str]:
    """Backends that start with what was typed."""
    from trainplan.costmodel.backends import BACKENDS

    return [name for name in BACKENDS if name.startswith(incomplete)]
