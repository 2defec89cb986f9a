"""One rank of a run: ``python -P -m trainplan.executor.worker --plan plan.yaml --options options.json``.

Started by torchrun, which `trainplan.executor.launch` starts. It ends with the documented exit code and leaves what
went wrong in ``error.json``, because torchrun passes no exit code on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import ValidationError

from trainplan.costmodel.errors import MachineMismatchError, TrainplanError, UsageError
from trainplan.costmodel.files import explain, read_text
from trainplan.costmodel.plan import Plan
from trainplan.executor.files import ERROR_FILE, LOCK_FILE, lock
from trainplan.executor.options import RunOptions
from trainplan.executor.preflight import check_model
from trainplan.executor.stop import StopWatch
from trainplan.executor.tokens import ProgressLine, TokenSource, build_cache, open_cache
from trainplan.executor.train import Job, train

TOKENS_FOLDER = "tokens"
_POLL_S = 0.1  # between two looks at whether the one rank that tokenizes is done


def main(arguments: list[str] | None = None) -> int:
    """Runs this rank; returns its exit code."""
    parser = argparse.ArgumentParser(prog="trainplan.executor.worker", description="One rank of a training run.")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--options", type=Path, required=True)
    parsed = parser.parse_args(arguments)
    output_dir: Path = parsed.options.parent
    try:
        options = _read_options(parsed.options)
        output_dir = options.output_dir
        watch = StopWatch(output_dir)
        restore = watch.install()
        try:
            _run(Plan.load(parsed.plan), options, watch)
        finally:
            restore()
    except TrainplanError as error:
        return report(output_dir, str(error), error.exit_code)
    except torch.OutOfMemoryError as error:
        first = " ".join(str(error).split(". ")[:2])
        return report(
            output_dir,
            f"rank {_rank()} ran out of GPU memory ({first}). Tune again with a smaller micro-batch, full recompute or "
            f"more sharding, or free the memory that other programs hold.",
            1,
        )
    except Exception as error:  # the last resort: whatever it is, the launcher must be able to show it
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        return report(output_dir, f"rank {_rank()} failed: {reason}", 1, traceback.format_exc())
    return 0


def report(output_dir: Path, message: str, exit_code: int, details: str = "") -> int:
    """Leaves the first error of the run in ``error.json``, whole; returns ``exit_code``.

    Later errors of other ranks usually follow from the first, so they are not kept.
    """
    content = {"exit_code": exit_code, "message": message, "rank": _rank(), "details": details}
    if details:
        print(details, file=sys.stderr, flush=True)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=output_dir, prefix=".error-", delete=False) as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(file.name, output_dir / ERROR_FILE)  # fails if another rank was first
        except FileExistsError:
            pass
        finally:
            os.unlink(file.name)
    except OSError as error:
        print(f"{message} ({output_dir / ERROR_FILE} could not be written: {error})", file=sys.stderr, flush=True)
    return exit_code


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _read_options(path: Path) -> RunOptions:
    try:
        return RunOptions.model_validate_json(read_text(path))
    except ValidationError as error:
        raise UsageError(f"{path} is not a set of run options: {explain(error)} Let planner run write it.") from None


def _run(plan: Plan, options: RunOptions, watch: StopWatch) -> None:
    check_model(plan.model, options.model_dir)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    device = pick_device(plan.cluster.device.kind, plan.cluster.device.arch)
    with lock(options.output_dir / LOCK_FILE, when=_rank() == 0):
        store = _store()
        # gloo beside NCCL: what the host needs to know is agreed on without stopping the GPU.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=_rank(), world_size=int(os.environ["WORLD_SIZE"]))
        try:
            folder = tokenize_once(options, store, watch.raise_if_stopped)
            job = Job(plan.model, plan.workload, plan.strategy, options, plan.plan_hash)
            train(job, open_cache(folder), device, stop_signal=watch.signal_number)
        finally:
            dist.destroy_process_group()


def pick_device(kind: str, arch: str) -> torch.device:
    """This rank's device, of the kind the plan is for.

    Raises:
        MachineMismatchError: The machine has none, too few, or another architecture.
    """
    if kind == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local >= count:
        raise MachineMismatchError(
            f"the plan needs GPU {local} on this machine, which has {count or 'none'}. "
            f"Run it on the machine it was made for, or tune with --cluster local."
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    if arch.startswith("sm_") and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if arch != f"sm_{major}{minor}":
            raise MachineMismatchError(
                f"the plan is for {arch}, this GPU ({torch.cuda.get_device_name(device)}) is sm_{major}{minor}. "
                f"Tune a plan for this machine: its best plan is another."
            )
    return device


def _store() -> dist.Store:
    """The rendezvous store that torchrun keeps, with a prefix of its own for every restart.

    Keys of a failed attempt would lead the next one to dead ranks.
    """
    base = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", base)


def tokenize_once(options: RunOptions, store: dist.Store, check: Callable[[], None]) -> Path:
    """The token cache of the run: rank 0 builds it, the others wait.

    Args:
        options: Name the data and the tokenizer.
        store: Rank 0 tells the others through it.
        check: Called often meanwhile; raises to stop.
    """
    key = "trainplan/token-cache"
    if _rank() != 0:
        while not store.check([key]):  # a wait inside the store could not be stopped
            check()
            time.sleep(_POLL_S)
        return Path(store.get(key).decode())
    bar = ProgressLine(f"tokenizing {options.data.name}")

    def progress(done: int, total: int) -> None:
        check()
        bar(done, total)

    source = TokenSource(options.data, options.model_dir, options.text_field, options.skip_bad_lines)
    try:
        folder = build_cache(source, options.output_dir / TOKENS_FOLDER, progress)
    finally:
        bar.close()
    meta = open_cache(folder).meta
    if meta.skipped_lines:
        first = ", ".join(map(str, meta.first_skipped))
        print(f"{options.data}: {meta.skipped_lines} malformed lines skipped (first: {first})", flush=True)
    store.set(key, str(folder))
    return folder


if __name__ == "__main__":
    sys.exit(main())
