"""`planner hardware`: the GPUs and nodes known by name, and the numbers of one cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from trainplan.planner.commands.complete import cluster_names

EXAMPLES = ("planner hardware", "planner hardware H100", "planner hardware 4x8xH200", "planner hardware local --json")


def hardware(
    name: Annotated[
        str | None,
        typer.Argument(autocompletion=cluster_names, help="A GPU, node or cluster as --cluster takes it, or local."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """List known GPUs and nodes, or show the numbers of one."""
    from trainplan.costmodel.cluster_config import load_cluster, preset_devices, preset_nodes
    from trainplan.planner.commands.output import print_json
    from trainplan.planner.render.cluster import print_cluster, print_devices, print_nodes
    from trainplan.planner.render.console import console, line

    if name is not None:
        cluster = load_cluster(name)
        if as_json:
            print_json(cluster.model_dump(mode="json"))
        else:
            print_cluster(console(), cluster)
        return
    if as_json:
        print_json(
            {
                "gpus": [{"name": n, **d.model_dump(mode="json"), "facts": facts} for n, d, facts in preset_devices()],
                "nodes": [{"name": n, **c.model_dump(mode="json"), "facts": facts} for n, c, facts in preset_nodes()],
            }
        )
        return
    to = console()
    print_devices(to, [device for _, device, _ in preset_devices()])
    print_nodes(to, preset_nodes())
    to.print()
    line(to, "Sources of one: planner hardware NAME. This machine: planner profile, then planner hardware local.")
