"""`planner models`: the models known by name, and the numbers of one."""

from __future__ import annotations

from typing import Annotated

import typer

from trainplan.planner.commands.complete import model_names

EXAMPLES = ("planner models", "planner models Qwen/Qwen3-8B", "planner models ./my-model --json")


def models(
    name: Annotated[
        str | None, typer.Argument(autocompletion=model_names, help="A known name, config.json or model folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """List known models, or show the architecture of one."""
    from trainplan.costmodel.model_config import load_model, preset_models
    from trainplan.planner.commands.output import print_json
    from trainplan.planner.render import model as screen
    from trainplan.planner.render.console import console

    if name is None:
        known = [spec for _, spec, _ in preset_models()]
        if as_json:
            print_json({"models": [screen.document(spec) for spec in known]})
        else:
            screen.print_models(console(), known)
        return
    spec = load_model(name)
    facts = next((facts for known, preset, facts in preset_models() if known == spec.name and preset == spec), {})
    if as_json:
        print_json({**screen.document(spec), "facts": facts})
    else:
        screen.print_model(console(), spec, facts)
