"""The frameworks that can run a strategy, each as one table of what it takes."""

from trainplan.costmodel.backends import accelerate, deepspeed, megatron, native, torchtitan
from trainplan.costmodel.backends.rules import Backend, Broken, Rule
from trainplan.costmodel.errors import UsageError

__all__ = ["BACKENDS", "Backend", "Broken", "Rule", "backend"]

BACKENDS: dict[str, Backend] = {
    module.BACKEND.name: module.BACKEND for module in (native, megatron, torchtitan, deepspeed, accelerate)
}


def backend(name: str) -> Backend:
    """The backend of that name; UsageError with the known names otherwise."""
    try:
        return BACKENDS[name]
    except KeyError:
        raise UsageError(f"unknown backend {name!r}. Use one of {', '.join(BACKENDS)}.") from None
