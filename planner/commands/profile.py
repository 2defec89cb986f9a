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
    seconds: Annotated[float, typer.Option(min=1, help="About how long to measure.")] = 20.0,
) -> None:
    """Measure this machine, for --cluster local."""
    from trainplan.costmodel.cluster_config import local_profile_path, save_cluster
    from trainplan.costmodel.errors import UsageError
    from trainplan.planner.interrupt import Interrupted
    from trainplan.planner.render.cluster import print_cluster
    from trainplan.planner.render.console import console, line
    from trainplan.planner.render.progress import measuring

    target = local_profile_path()
    for path in (target, output):
        if path is not None:
            _check_folder(path, make=path == target)
    try:
        from trainplan.executor.measure import measure_machine
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("trainplan"):
            raise
        raise UsageError(
            f"measuring needs {error.name}, which is not installed here. Run: pip install 'trainplan[train]'"
        ) from None
    try:
        with measuring() as report:
            cluster = measure_machine(nproc, seconds, report)
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


def _check_folder(path: Path, *, make: bool) -> None:
    """Returns if a file can be put in the folder of ``path``, before minutes go into measuring.

    Raises:
        UsageError: The folder is missing or can't be made, or ``path`` is a folder.
    """
    from trainplan.costmodel.errors import UsageError

    try:
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{path.parent} can't be made ({error.strerror or error}). Set TRAINPLAN_CACHE to a folder you own."
        ) from None
    if path.is_dir():
        raise UsageError(f"{path} is a folder. Give the name of a file, as in -o {path / 'cluster.yaml'}.")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist. Make it, or give another path.")
