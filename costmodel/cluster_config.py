"""Which cluster does a person mean? ``8xH100``, ``dgx-h100:16``, a YAML file or ``local``, always as one `Cluster`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainplan.costmodel.errors import ProfileError, TrainplanError, UsageError
from trainplan.costmodel.files import explain, read_yaml_object, write_yaml
from trainplan.costmodel.hardware import Cluster
from trainplan.costmodel.hardware_presets import (
    ANY_GPU,
    default_node,
    device,
    gpu_facts,
    gpu_names,
    node_aliases,
    node_facts,
    node_names,
    node_shape,
    normal,
    preset_devices,
    scale_up_link,
    software,
)
from trainplan.costmodel.names import did_you_mean

__all__ = ["load_cluster", "local_profile_path", "preset_devices", "preset_nodes", "save_cluster"]

FORMS = (
    "Write 8xH100 (GPUs x type), 4x8xH200 (nodes x GPUs x type), dgx-h100:16 (node type : nodes), "
    "the path of a YAML file, or local."
)
_MAX_GPUS = 1_000_000  # ten times the largest cluster reported; more is a typing mistake
_MOST_WITHOUT_NODE = 8  # GPUs that a single box of a type without a known node may hold
_SUFFIXES = (".yaml", ".yml")


def load_cluster(ref: str | Path) -> Cluster:
    """The cluster that ``ref`` means.

    * ``8xH100``: that many GPUs, in nodes of the type's usual size; fewer than a node are a part of one.
    * ``4x8xH200``: nodes x GPUs per node x type.
    * ``dgx-h100``, ``dgx-h100:16``: nodes of a known type; short names such as ``p5`` or ``a3-mega`` too.
    * ``gb200-nvl72``, ``gb200-nvl72:2``: whole racks.
    * ``H100`` or ``single-gpu:H100``: one GPU.
    * a path ending in .yaml or .yml, or holding a slash: a file as `save_cluster` writes it.
    * ``local``: the profile that ``planner profile`` measured on this machine.

    Raises:
        UsageError: for an unknown name (near ones are given), an impossible size, or a malformed file.
        ProfileError: for ``local`` where nothing was measured yet, or its file is damaged.
    """
    text = str(ref).strip()
    if text.lower() == "local":
        return _load_local()
    if isinstance(ref, Path) or text.lower().endswith(_SUFFIXES) or "/" in text or os.sep in text:
        return _load_file(Path(text).expanduser(), UsageError, "`planner profile -o FILE` writes a whole one.")
    return _named(text)


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write ``cluster`` as YAML that `load_cluster` reads back equal.

    Raises:
        UsageError: if the file cannot be written.
    """
    write_yaml(cluster.model_dump(mode="json"), Path(path))


def local_profile_path() -> Path:
    """Where the measured profile of this machine is kept: local.yaml in the user's cache.

    The folder is ``$TRAINPLAN_CACHE``, else ``$XDG_CACHE_HOME/trainplan``, else ``~/.cache/trainplan``.
    """
    if own := os.environ.get("TRAINPLAN_CACHE"):
        return Path(own).expanduser() / "local.yaml"
    base = os.environ.get("XDG_CACHE_HOME", "")  # a relative one is to be ignored: XDG Base Directory, section 2
    folder = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return folder / "trainplan" / "local.yaml"


def preset_nodes() -> list[tuple[str, Cluster, dict[str, Any]]]:
    """(name, cluster of one node, facts) of every known node type but the GPU-less ``single-gpu``.

    The facts hold the published network and, under ``aliases``, the node's other names.
    """
    return [
        (name, load_cluster(name), {**facts, "aliases": node_aliases(name)})
        for name, facts in node_facts().items()
        if name != ANY_GPU
    ]


def _load_local() -> Cluster:
    path = local_profile_path()
    if not path.exists():
        raise ProfileError(
            f"local: this machine has no profile yet ({path} is missing). Run `planner profile`, or name a cluster "
            "such as 8xH100."
        )
    return _load_file(path, ProfileError, "Run `planner profile` again.")


def _load_file(path: Path, error: type[TrainplanError], mend: str) -> Cluster:
    data = read_yaml_object(path, error=error)
    try:
        return Cluster.model_validate(data)
    except ValidationError as exc:
        raise error(f"{path}: {explain(exc)} {mend}") from None


def _named(text: str) -> Cluster:
    head, colon, tail = text.rpartition(":") if ":" in text else (text, "", "")
    if normal(head) == ANY_GPU:
        if not tail:
            raise UsageError(f"{text}: does not say which GPU. Write single-gpu:H100, or 1xH100.")
        return _of_gpus(_gpu(tail, text), 1, None)
    if normal(head) in node_names():
        return _of_nodes(head, _count(tail, "node count", text) if colon else 1)
    if found := re.fullmatch(r"(\d+)\s*[xX*]\s*(\d+)\s*[xX*]\s*(.+)", text):
        nodes, per_node = _count(found[1], "node count", text), _count(found[2], "GPU count", text)
        return _of_gpus(_gpu(found[3], text), per_node, nodes)
    if found := re.fullmatch(r"(\d+)\s*[xX*]\s*(.+)", text):
        return _of_gpus(_gpu(found[2], text), _count(found[1], "GPU count", text), None)
    if normal(text) in gpu_names():
        return _of_gpus(_gpu(text, text), 1, None)
    hint = did_you_mean(text, [*node_facts(), *node_names(), *gpu_facts(), *gpu_names()])
    raise UsageError(f"cluster {text!r} is not known.{hint} {FORMS}")


def _count(digits: str, what: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", digits) or not 1 <= int(digits) <= _MAX_GPUS:
        raise UsageError(f"{text}: the {what} {digits!r} must be a number from 1 to {_MAX_GPUS}. {FORMS}")
    return int(digits)


def _gpu(name: str, text: str) -> str:
    """The GPU's name in the facts."""
    found = gpu_names().get(normal(name))
    if found is None:
        hint = did_you_mean(name, [*gpu_facts(), *gpu_names()]) or f" Known: {', '.join(gpu_facts())}."
        raise UsageError(f"{text}: GPU {name!r} is not known.{hint} Or give the path of a YAML file.")
    return found


def _of_nodes(name: str, count: int) -> Cluster:
    node, times = node_names()[normal(name)]
    shape = node_shape(node)
    canonical = normal(name) if times > 1 else node
    return _build(
        name=canonical if count == 1 else f"{canonical}:{count}",
        gpu=shape.gpu,
        num_nodes=_at_most(count * times, shape.gpus_per_node, name),
        gpus_per_node=shape.gpus_per_node,
        node=node,
    )


def _at_most(num_nodes: int, per_node: int, text: str) -> int:
    if num_nodes * per_node > _MAX_GPUS:
        raise UsageError(f"{text}: {num_nodes * per_node} GPUs are more than {_MAX_GPUS}. Give a smaller count.")
    return num_nodes


def _of_gpus(gpu: str, count: int, nodes: int | None) -> Cluster:
    """``count`` GPUs in all, or in each of ``nodes`` nodes."""
    shape = default_node(gpu)
    size = shape.gpus_per_node if shape else _MOST_WITHOUT_NODE
    per_node, num_nodes = (count, 1) if nodes is None else (count, nodes)
    if nodes is None and count > size and shape:
        if count % size:
            below, above = count // size * size, (count // size + 1) * size
            part = next(n for n in range(size, 0, -1) if count % n == 0)
            raise UsageError(
                f"{count}x{gpu}: {count} GPUs do not fill nodes of {size} ({shape.name}). Use 1 to {size} GPUs, a "
                f"multiple of {size} such as {below} or {above}, or say the nodes, as in {count // part}x{part}x{gpu}."
            )
        per_node, num_nodes = size, count // size
    if per_node > size:
        mend = f"Use 1 to {size} per node" if shape else f"Use 1 to {size} of them"
        why = f"{shape.name} holds {size}" if shape else "no node with a network is known for it"
        raise UsageError(f"{per_node} x {gpu} in a node: {why}. {mend}, or describe the machine in a YAML file.")
    name = f"{per_node}x{gpu}" if num_nodes == 1 else f"{num_nodes}x{per_node}x{gpu}"
    if num_nodes > 1 and shape is None:
        raise UsageError(f"{name}: no network between nodes of {gpu} is known. Describe the fabric in a YAML file.")
    _at_most(num_nodes, per_node, name)
    return _build(name=name, gpu=gpu, num_nodes=num_nodes, gpus_per_node=per_node, node=shape.name if shape else None)


def _build(*, name: str, gpu: str, num_nodes: int, gpus_per_node: int, node: str | None) -> Cluster:
    """The cluster from its parts; the network is left out where nothing leaves the scale-up domain."""
    shape = node_shape(node) if node else None
    num_gpus = num_nodes * gpus_per_node
    nodes_in_domain = shape.scale_up_domain // shape.gpus_per_node if shape and num_gpus > 1 else 1
    domain = nodes_in_domain * gpus_per_node
    leaves = num_gpus > domain
    if leaves and (shape is None or shape.scale_out is None):
        raise UsageError(f"{name}: no network between nodes of {gpu} is known. Describe the fabric in a YAML file.")
    return Cluster(
        name=name,
        device=device(gpu),
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        scale_up=scale_up_link(gpu) if domain > 1 else None,
        scale_up_domain=domain,
        scale_out=shape.scale_out if shape and leaves else None,
        software=software(gpu),
    )
