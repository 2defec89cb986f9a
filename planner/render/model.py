"""What is known of a model? Its size and architecture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from rich.console import Console

from trainplan.costmodel.model import ModelSpec
from trainplan.planner.render.console import heading, line, table
from trainplan.planner.render.format import count, percent, whole, words
from trainplan.planner.summary import embedding_frac

FACTS = ("published_parameters", "published_source", "source", "note")


def document(spec: ModelSpec) -> dict[str, Any]:
    """A model for ``--json``: its fields and the counts that follow from them."""
    return {
        **spec.model_dump(mode="json"),
        "parameters": spec.parameters(),
        "active_parameters": spec.active_parameters(),
        "embedding_parameters": spec.embedding_parameters(),
    }


def print_models(to: Console, specs: Sequence[ModelSpec]) -> None:
    """One line per model."""
    rows = [
        (
            spec.name,
            count(spec.parameters()),
            count(spec.active_parameters()) if spec.moe else "",
            str(spec.num_layers),
            str(spec.hidden_size),
            whole(spec.max_position_embeddings),
        )
        for spec in specs
    ]
    table(to, rows, headers=("model", "size", "active", "layers", "hidden", "positions"), right=range(1, 6))
    to.print()
    line(to, "Any other config.json of a supported architecture works too: give its path.")


def print_model(to: Console, spec: ModelSpec, facts: Mapping[str, Any]) -> None:
    """All that is known of one model."""
    rows = [("parameters", f"{whole(spec.parameters())} ({count(spec.parameters())})")]
    if spec.moe:
        rows.append(("active per token", f"{whole(spec.active_parameters())} ({count(spec.active_parameters())})"))
    share = percent(embedding_frac(spec))
    rows.append(("embeddings", f"{whole(spec.embedding_parameters())} ({share})"))
    rows.append(("layers", layers(spec.layer_kinds())))
    shown = {"name", "num_layers", "attention_pattern", "mlp_pattern"}
    rows += [(name, _value(value)) for name, value in spec if name not in shown and value is not None]
    line(to, spec.name)
    table(to, rows)
    if known := [(words(key), str(facts[key])) for key in FACTS if facts.get(key)]:
        heading(to, "Published")
        table(to, known)


def layers(kinds: Iterable[tuple[str, str]]) -> str:
    """``36 full attention with dense MLP``: how many layers there are of each kind."""
    counts: dict[tuple[str, str], int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    names = {"dense": "dense MLP", "moe": "experts"}
    return ", ".join(f"{n} {attention} attention with {names[mlp]}" for (attention, mlp), n in counts.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_value(entry)}" for key, entry in value.items())
    return ", ".join(f"{key}={_value(entry)}" for key, entry in value) if isinstance(value, BaseModel) else str(value)
