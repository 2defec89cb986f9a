"""Starts a plan on this machine: first all checks, then torchrun with one process per rank. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from trainplan.costmodel.errors import MachineMismatchError, NoPlanError, ProfileError, TrainplanError, UsageError
from trainplan.costmodel.plan import Plan
from trainplan.executor.files import ERROR_FILE, LOCK_FILE, lock, write_json
from trainplan.executor.options import RunOptions
from trainplan.executor.preflight import check_run
from trainplan.executor.stop import LAUNCHER_PID, STOP_FILE

LOG_FILE = "stderr.log"
_LAST_LINES = 30  # of the log, shown with ``debug``


def run_plan(plan_path: Path, options: RunOptions, *, debug: bool = False) -> int:
    """Trains the plan in ``plan_path`` on this machine and waits for it.

    Progress goes to standard output. What the processes write to standard error (warnings of libraries, tracebacks) is
    kept in ``<output>/stderr.log``. The first SIGINT or SIGTERM lets the run end its step and save; the second ends it
    at once.

    Args:
        plan_path: A plan file for the native backend, on one node.
        options: The run.
        debug: On failure, print the end of the log.

    Returns:
        0, or 128 + the number of the signal that ended the run after it was saved.

    Raises:
        TrainplanError: What a rank, or a check before the start, found wrong; its ``exit_code`` is the documented one.
    """
    plan = Plan.load(plan_path)
    options = _absolute(options)
    if plan.cluster.num_nodes > 1:
        raise MachineMismatchError(
            f"the plan is for {plan.cluster.num_nodes} nodes of {plan.cluster.name}; planner run starts one machine. "
            f"Tune for one node."
        )
    check_run(plan, options)
    if find_spec("torch") is None:
        raise UsageError("running a plan needs PyTorch, which is not installed. Run: pip install 'trainplan[train]'.")
    output = options.output_dir
    _make(output)
    with lock(output / LOCK_FILE):  # before touching the files of a run that may be going on
        for name in (ERROR_FILE, STOP_FILE):
            (output / name).unlink(missing_ok=True)
        if not (output / "plan.yaml").exists() or not (output / "plan.yaml").samefile(plan_path):
            shutil.copyfile(plan_path, output / "plan.yaml")
        write_json(output / "options.json", options.model_dump(mode="json"))
    ranks = plan.strategy.world_size
    command = torchrun(
        ranks,
        *("-m", "trainplan.executor.worker"),
        *("--plan", str(output / "plan.yaml"), "--options", str(output / "options.json")),
    )
    with (output / LOG_FILE).open("ab") as log:
        # A session of its own: Ctrl-C on the terminal reaches only this process, which passes it on as a request.
        process = subprocess.Popen(command, env=environment(ranks), stderr=log, start_new_session=True)
        with _signals_passed_on(process, output):
            code = process.wait()
    return _outcome(code, output, debug)


def _absolute(options: RunOptions) -> RunOptions:
    paths = {name: getattr(options, name).expanduser().resolve() for name in ("model_dir", "data", "output_dir")}
    return RunOptions(**{**options.model_dump(), **paths})


def _make(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"the output folder {output} can't be written ({error.strerror or error}). Give a folder you own."
        ) from None


def torchrun(ranks: int, *target: str) -> list[str]:
    """The command that starts ``target`` on so many ranks of this machine, meeting at a port that is free.

    ``-P`` keeps the working directory off the path of imports: a folder there may share a package's name.
    """
    return [
        *(sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost", "--max-restarts=0"),
        *target,
    ]


def environment(ranks: int) -> Mapping[str, str]:
    """The environment of ``ranks`` processes: each gets an equal part of the cores unless OMP_NUM_THREADS is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // ranks))}
    forced = {"PYTHONSAFEPATH": "1", LAUNCHER_PID: str(os.getpid())}
    return {**defaults, **os.environ, **forced}


@contextmanager
def _signals_passed_on(process: subprocess.Popen[Any], output: Path) -> Iterator[None]:
    """While inside, SIGINT and SIGTERM become a request file that the ranks obey after their step."""
    seen = 0

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            write_json(output / STOP_FILE, {"signal": number})
            print("stopping after this step and saving; once more to stop at once", file=sys.stderr, flush=True)
        else:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM if seen == 2 else signal.SIGKILL)

    old = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _outcome(code: int, output: Path, debug: bool) -> int:
    """What the run ended with, as a return value or an error."""
    if code == 0:
        return 0
    log = output / LOG_FILE
    if debug and log.is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(lines[-_LAST_LINES:]), file=sys.stderr, flush=True)
    try:
        error = json.loads((output / ERROR_FILE).read_text(encoding="utf-8"))
        message, exit_code, details = str(error["message"]), int(error["exit_code"]), bool(error["details"])
    except (OSError, ValueError, KeyError, TypeError):
        raise TrainplanError(
            f"the training processes ended with code {code} and left no message: they were killed, perhaps for lack of "
            f"memory. Their last words are in {log}; continue with --resume."
        ) from None
    if exit_code > 128:
        print(message, file=sys.stderr, flush=True)
        return exit_code
    kinds = (UsageError, NoPlanError, ProfileError, MachineMismatchError)
    kind = next((known for known in kinds if known.exit_code == exit_code), TrainplanError)
    raise kind(f"{message} Details are in {log}." if details else message)
