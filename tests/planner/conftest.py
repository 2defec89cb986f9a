"""The `planner` command called in this process, and a model, clusters and a plan that are quick to price."""

from __future__ import annotations

import io
import json
import platform
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trainplan.costmodel.cluster_config import save_cluster
from trainplan.costmodel.hardware import Cluster, Device, Link, Quantity
from trainplan.costmodel.plan import Plan
from trainplan.planner.cli import main

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document on standard output, which must be all of it."""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line of an error, on standard error alone."""
        (line,) = self.err.splitlines()
        assert line.startswith("error: ")
        assert self.out == ""
        return line.removeprefix("error: ")


def call(*arguments: str | Path) -> Done:
    """Runs ``planner`` with these arguments in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def planner() -> Callable[..., Done]:
    """Calls ``planner`` with its arguments."""
    return call


@pytest.fixture(autouse=True)
def _screen_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no terminal has 80 columns, unless the environment of whoever runs the tests says otherwise."""
    for name in ("COLUMNS", "FORCE_COLOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, with a cache of its own inside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINPLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path


def quantity(value: float) -> Quantity:
    return Quantity(value=value, provenance="measured", source="made up for a test")


def cpu_cluster(ranks: int) -> Cluster:
    """A machine of this one's processor architecture with ``ranks`` ranks of round numbers."""
    device = Device(
        name="test-cpu",
        kind="cpu",
        arch=platform.machine(),
        memory_bytes=quantity(8 * 2**30),
        memory_bytes_per_s=quantity(10e9),
        peak_flops_per_s={"fp32": quantity(100e9), "bf16": quantity(100e9)},
        matmul_flops_per_s={"fp32": quantity(80e9), "bf16": quantity(80e9)},
        attention_flops_per_s={"fp32": quantity(40e9), "bf16": quantity(40e9)},
        op_overhead_s=quantity(5e-6),
    )
    link = Link(
        kind="shared memory",
        all_reduce_bytes_per_s=quantity(1e9),
        all_gather_bytes_per_s=quantity(1e9),
        all_to_all_bytes_per_s=quantity(1e9),
        p2p_bytes_per_s=quantity(1e9),
        latency_s=quantity(20e-6),
    )
    return Cluster(
        name=f"{ranks}x test-cpu",
        device=device,
        num_nodes=1,
        gpus_per_node=ranks,
        scale_up=link if ranks > 1 else None,
        scale_up_domain=ranks,
    )


@dataclass(frozen=True)
class Small:
    """A tiny model, a cluster of one CPU rank, and a plan for them."""

    model: Path
    cluster: Path
    plan: Path

    @property
    def job(self) -> tuple[str | Path, ...]:
        """The arguments of ``planner tune`` for it."""
        batch = ("--seq-len", "64", "--global-batch-size", "4", "--precision", "fp32", "--compile", "false")
        return ("tune", self.model, "--cluster", self.cluster, *batch)

    @property
    def loaded(self) -> Plan:
        return Plan.load(self.plan)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Made once; tests that change the plan copy it."""
    root = tmp_path_factory.mktemp("small")
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text(json.dumps(TINY))
    save_cluster(cpu_cluster(1), root / "cpu.yaml")
    made = Small(root / "model", root / "cpu.yaml", root / "plan.yaml")
    done = call(*made.job, "-o", made.plan, "--json")
    assert done.code == 0, done.err
    return made
