"""Naming a cluster: every form, every preset, files written and read back, and what is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainplan.costmodel.cluster_config import load_cluster, local_profile_path, preset_nodes, save_cluster
from trainplan.costmodel.errors import ProfileError, UsageError
from trainplan.costmodel.hardware_presets import gpu_facts, gpu_names, node_facts, node_names

# Names that people type for one node of eight GPUs.
TYPED = (
    *("dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "dgx-b300"),
    *("p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300"),
    *("a3-high", "a3-mega", "a3-ultra", "a4"),
    *("nd-h100-v5", "nd-h200-v5", "nd-mi300x-v5"),
)


def shape(ref: str) -> tuple[int, int, str, int]:
    cluster = load_cluster(ref)
    return cluster.num_nodes, cluster.gpus_per_node, cluster.device.name, cluster.scale_up_domain


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        ("8xH100", (1, 8, "H100-SXM5-80GB", 8)),
        ("8xh100", (1, 8, "H100-SXM5-80GB", 8)),
        (" 8 x H100 ", (1, 8, "H100-SXM5-80GB", 8)),
        ("3xH100", (1, 3, "H100-SXM5-80GB", 3)),
        ("16xH100", (2, 8, "H100-SXM5-80GB", 8)),
        ("4x8xH200", (4, 8, "H200-SXM-141GB", 8)),
        ("4x2xH200", (4, 2, "H200-SXM-141GB", 2)),
        ("4x1xH200", (4, 1, "H200-SXM-141GB", 1)),
        ("H100", (1, 1, "H100-SXM5-80GB", 1)),
        ("1xH100", (1, 1, "H100-SXM5-80GB", 1)),
        ("single-gpu:L4", (1, 1, "L4", 1)),
        ("8xL40S", (1, 8, "L40S", 8)),
        ("4x4090", (1, 4, "RTX-4090", 4)),
        ("8x4090", (1, 8, "RTX-4090", 8)),
        ("2x5090", (1, 2, "RTX-5090", 2)),
        ("8xMI325X", (1, 8, "MI325X", 8)),
        ("8xNVIDIA H100 80GB HBM3", (1, 8, "H100-SXM5-80GB", 8)),
        ("dgx-h100", (1, 8, "H100-SXM5-80GB", 8)),
        ("DGX_H100:16", (16, 8, "H100-SXM5-80GB", 8)),
        ("a4x:18", (18, 4, "GB200-186GB", 72)),
        ("gb200-nvl72", (18, 4, "GB200-186GB", 72)),
        ("gb300-nvl72:2", (36, 4, "GB300-288GB", 72)),
        ("8xGB200", (2, 4, "GB200-186GB", 72)),
        ("18x2xGB200", (18, 2, "GB200-186GB", 36)),
    ],
)
def test_forms(ref: str, expected: tuple[int, int, str, int]) -> None:
    assert shape(ref) == expected


def test_the_network_is_there_where_a_cluster_leaves_a_scale_up_domain() -> None:
    assert load_cluster("8xH100").scale_out is None
    assert load_cluster("1xH100").scale_up is None
    assert load_cluster("gb200-nvl72").scale_out is None
    assert load_cluster("gb200-nvl72:2").scale_out is not None
    out = load_cluster("16xH100").scale_out
    assert out is not None
    assert out == load_cluster("dgx-h100:2").scale_out
    assert out.kind == "InfiniBand NDR (ConnectX-7)"
    slow, fast = load_cluster("a3-high:2").scale_out, load_cluster("a3-mega:2").scale_out
    assert slow is not None
    assert fast is not None
    assert slow.all_gather_bytes_per_s.value == pytest.approx(fast.all_gather_bytes_per_s.value / 2)  # 4 NICs, not 8


@pytest.mark.parametrize("name", TYPED)
def test_a_name_that_people_type_is_a_node_of_eight(name: str) -> None:
    assert shape(name)[:2] == (1, 8)


def test_there_are_31_node_types_and_each_loads_under_every_name() -> None:
    assert len(node_facts()) == 31
    assert len(preset_nodes()) == 30  # single-gpu names no GPU
    for name, cluster, facts in preset_nodes():
        assert cluster.gpus_per_node == facts["gpus_per_node"]
        assert cluster.device.name == facts["gpu"]
        assert cluster.name == name
        for alias in facts["aliases"]:
            assert load_cluster(alias).device == cluster.device
    for alias in node_names():
        if alias != "single-gpu":
            assert load_cluster(alias).num_gpus % load_cluster(alias).gpus_per_node == 0


@pytest.mark.parametrize("gpu", gpu_facts())
def test_every_gpu_loads_alone_and_in_a_box(gpu: str) -> None:
    assert load_cluster(gpu) == load_cluster(f"1x{gpu}")
    assert load_cluster(f"4x{gpu}").num_gpus == 4


@pytest.mark.parametrize("ref", ["8xH100", "16xH100", "H100", "dgx-h100:16", "gb200-nvl72:2", "p5", "single-gpu:L4"])
def test_the_name_of_a_cluster_loads_it_again(ref: str) -> None:
    cluster = load_cluster(ref)
    assert load_cluster(cluster.name) == cluster


@pytest.mark.parametrize(
    ("ref", "told"),
    [
        ("8xH1000", ["'H1000' is not known", "Did you mean", "H100"]),
        ("8xTPU", ["'TPU' is not known", "H100-SXM5-80GB", "YAML"]),
        ("dgx-h101", ["'dgx-h101' is not known", "Did you mean dgx-h100", "8xH100"]),
        ("zzz", ["'zzz' is not known", "Write 8xH100"]),
        ("", ["not known"]),
        ("12xH100", ["do not fill nodes of 8", "1 to 8", "8 or 16", "2x6xH100"]),
        ("6xGB200", ["do not fill nodes of 4", "4 or 8"]),
        ("2x16xH100", ["dgx-h100 holds 8", "1 to 8", "YAML"]),
        ("9xRTX-4090", ["no node with a network", "1 to 8", "YAML"]),
        ("2x4xRTX-4090", ["no network between nodes", "YAML"]),
        ("pcie-4x-rtx4090:2", ["no network between nodes", "YAML"]),
        ("0xH100", ["'0'", "from 1"]),
        ("dgx-h100:0", ["'0'", "from 1"]),
        ("dgx-h100:many", ["'many'"]),
        ("dgx-h100:\N{SUPERSCRIPT TWO}", ["node count"]),
        ("99999999999xH100", ["from 1 to 1000000"]),
        ("dgx-h100:999999", ["more than 1000000"]),
        ("single-gpu", ["does not say which GPU", "1xH100"]),
        ("none.yaml", ["none.yaml", "no such file"]),
        ("folder/none", ["no such file"]),
    ],
)
def test_a_bad_name_is_told_in_one_line(ref: str, told: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        load_cluster(ref)
    message = str(caught.value)
    assert "\n" not in message
    for part in told:
        assert part in message


@pytest.mark.parametrize("ref", ["8xH100", "1xL4", "dgx-b300:4", "gb200-nvl72:2", "8xMI300X"])
def test_a_saved_cluster_reads_back_equal(ref: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    save_cluster(load_cluster(ref), path)
    assert load_cluster(str(path)) == load_cluster(path) == load_cluster(ref)
    assert path.read_text().isascii()


def test_saving_replaces_the_whole_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("x" * 10**6)
    save_cluster(load_cluster("8xH100"), path)
    assert load_cluster(path).num_gpus == 8
    assert os.listdir(tmp_path) == ["cluster.yaml"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444 & ~_umask()
    with pytest.raises(UsageError, match="cannot be written"):
        save_cluster(load_cluster("8xH100"), tmp_path / "none" / "cluster.yaml")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def dump(tmp_path: Path, **changes: Any) -> Path:
    """A file of an 8xH100 with some fields changed; None removes one."""
    data = {**load_cluster("8xH100").model_dump(mode="json"), **changes}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in data.items() if value != "remove"}))
    return path


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gpu_per_node": 8}, ["gpu_per_node: unknown key"]),
        ({"device": "remove"}, ["device: Field required"]),
        ({"num_nodes": 0}, ["num_nodes", "greater than or equal to 1"]),
        ({"num_nodes": "two"}, ["num_nodes", "integer"]),
        ({"num_nodes": 2}, ["scale_out of cluster", "missing"]),
        ({"scale_up": {"kind": "NVLink"}}, ["scale_up.all_reduce_bytes_per_s: Field required", "more"]),
        ({"price_per_gpu_hour": {"value": -1, "provenance": "datasheet", "source": "x"}}, ["price_per_gpu_hour.value"]),
        ({"price_per_gpu_hour": {"value": 1, "provenance": "guess", "source": "x"}}, ["price_per_gpu_hour.provenance"]),
    ],
)
def test_a_bad_field_of_a_file_is_named_with_its_path(tmp_path: Path, changes: dict[str, Any], told: list[str]) -> None:
    path = dump(tmp_path, **changes)
    with pytest.raises(UsageError) as caught:
        load_cluster(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for part in told:
        assert part in message


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "holds nothing"),
        (b"- 1\n", "holds a list"),
        (b"name: [1\n", "not usable YAML at line"),
        (b"a: &x 1\nb: *x\n", r"aliases \(\*name\) are not allowed"),
        (b"name: a\nname: b\n", "key 'name' is given twice"),
        (b"!!python/object/apply:os.system ['true']\n", "not usable YAML"),
        (b"1: 2\n", "key 1 is not text"),
        (b"a: " + b"[" * 5000, "not usable YAML"),
        (b"a: \xff\n", "not UTF-8"),
        (b"a: \x01\n", "not usable YAML"),
        (b"a: " + b"x" * 5_000_000, "larger than 5 MB"),
    ],
    ids=["empty", "list", "cut", "alias", "twice", "tag", "number key", "deep", "bytes", "control", "huge"],
)
def test_a_bad_file_is_told_in_one_line(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "c.yml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=told) as caught:
        load_cluster(str(path))
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="not a regular file"):
        load_cluster(tmp_path)


def test_local_is_the_profile_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINPLAN_CACHE", str(tmp_path))
    assert local_profile_path() == tmp_path / "local.yaml"
    with pytest.raises(ProfileError, match=r"planner profile") as caught:
        load_cluster("local")
    assert caught.value.exit_code == 4
    save_cluster(load_cluster("2xL4"), local_profile_path())
    assert load_cluster("local") == load_cluster("2xL4")
    local_profile_path().write_text("name: damaged\n")
    with pytest.raises(ProfileError, match=r"local\.yaml: .*Run `planner profile` again"):
        load_cluster("local")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINPLAN_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert local_profile_path() == tmp_path / "xdg" / "trainplan" / "local.yaml"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert local_profile_path() == tmp_path / ".cache" / "trainplan" / "local.yaml"


def test_more_gpus_have_more_of_everything_but_speed() -> None:
    small, large = load_cluster("dgx-h100:2"), load_cluster("dgx-h100:4")
    assert large.num_gpus == 2 * small.num_gpus
    assert (large.device, large.scale_up, large.scale_out) == (small.device, small.scale_up, small.scale_out)


def test_every_gpu_alias_loads() -> None:
    for alias, name in gpu_names().items():
        assert load_cluster(f"2x{alias}").device.name == name
