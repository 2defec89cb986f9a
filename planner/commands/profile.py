"""`planner profile`: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = ("planner profile", "planner profile -o cluster.yaml --nproc 2 --seconds 60")


def profile(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Also write the measured cluster to this YAML file.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes to measure with: all GPUs, or 1 on a CPU, if left out.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="About how long to measure.")] = 20.0,
) -> None:
    """Measure this machine, for --cluster local."""
    from trainplan.costmodel.cluster_config import local_profile_path, save_cluster
    from trainplan.costmodel.errors import UsageError
    from trainplan.executor.measure import measure_machine
    from trainplan.planner.commands.output import check_cluster_target
    from trainplan.planner.interrupt import Interrupted
    from trainplan.planner.render.cluster import print_cluster
    from trainplan.planner.render.console import console, line
    from trainplan.planner.render.progress import measuring

    target = local_profile_path()
    _make_folder(target)
    if output is not None:
        check_cluster_target(output)  # before minutes go into measuring
    try:
        with measuring() as report:
            cluster = measure_machine(nproc, seconds, report)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            "measuring needs torch, which is not installed here. Run: pip install 'trainplan[train]'"
        ) from None
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the profile was left as it was. Run `planner profile` again.") from None
    save_cluster(cluster, target)
    if output is not None:
        save_cluster(cluster, output)
    to = console()
    print_cluster(to, cluster)
    to.print()
    line(to, f"Written to {target}" + (f" and {output}" if output is not None else ""))
    line(to, "Plan for this machine: planner tune MODEL --cluster local ...")


def _make_folder(path: Path) -> None:
    """Makes the folder that the profile is kept in.

    Raises:
        UsageError: It can't be made, or ``path`` is itself a folder.
    """
    from trainplan.costmodel.errors import UsageError

    mend = "Set TRAINPLAN_CACHE to a folder you own."
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path.parent} can't be made ({error.strerror or error}). {mend}") from None
    if path.is_dir():
        raise UsageError(f"{path} is a folder, but the profile of this machine is kept there. Move it away.")
