"""Plan files: round trip, JSON Schema, and what a reader refuses."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from trainplan.costmodel.cluster_config import load_cluster
from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.job import Job
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.plan import Plan, Provenance, SearchRecord, json_schema
from trainplan.costmodel.step import estimate
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Lora, Workload

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "docs" / "plan.schema.json"


@pytest.fixture(scope="module")
def plan() -> Plan:
    job = Job(load_model("Qwen/Qwen3-8B"), load_cluster("8xH100"), Workload(seq_len=4096, global_batch_size=256))
    strategy = Strategy(dp_shard=8, sharding="parameters", reshard_after_forward=True, grad_accum=32)
    record = SearchRecord(
        engine="enumerate", covered=2, illegal={"heads": 1}, infeasible=0, feasible=1, gap_frac=0, proven=True
    )
    return Plan(
        model=job.model,
        cluster=job.cluster,
        workload=job.workload,
        backend="native",
        strategy=strategy,
        estimate=estimate(job, "native", strategy),
        provenance=Provenance(
            trainplan_version="0.1.0", created="2026-12-01T00:00:00+00:00", command="planner tune", search=record
        ),
    )


def edited(plan: Plan, path: Path, change: dict[str, Any]) -> Path:
    """The plan's file with some values replaced: {"strategy.tp": 2}."""
    plan.save(path)
    content = yaml.safe_load(path.read_text())
    for place, value in change.items():
        *outer, last = place.split(".")
        target = content
        for key in outer:
            target = target[key]
        target[last] = value
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_plan_comes_back_as_it_was_saved(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan
    plan.save(tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == (tmp_path / "plan.yaml").read_text()


def test_the_hash_covers_what_the_plan_says_and_not_how_it_was_made(plan: Plan) -> None:
    other = Plan(**{**dict(plan), "provenance": Provenance(trainplan_version="9", created="now", command="else")})
    assert other.plan_hash == plan.plan_hash
    moved = Plan(**{**dict(plan), "workload": Workload(seq_len=2048, global_batch_size=256)})
    assert moved.plan_hash != plan.plan_hash


def test_a_saved_plan_is_valid_under_the_published_schema(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.yaml")
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    content = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    jsonschema.validate(content, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "unheard_of": 1}, schema)


def test_the_published_schema_is_that_of_the_code() -> None:
    assert json.loads(SCHEMA.read_text()) == json_schema(), "run: make schema"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"strategy.tpp": 2}, "strategy.tpp: unknown key"),
        ({"schema_version": "2.0"}, "schema_version 2.0 is not readable"),
        ({"schema_version": 3}, "this is no plan file"),
        ({"strategy.grad_accum": 16}, "use micro_batch_size in [1, 2, 4, 8, 16, 32]"),
        ({"strategy.dp_shard": 4}, "4 ranks"),
        ({"strategy.tp": 8, "strategy.dp_shard": 1, "strategy.sharding": "none"}, "contradicts itself"),
        ({"workload.global_batch_size": 252}, "not divisible by dp=8"),
        ({"cluster.gpus_per_node": 4}, "4 devices"),
        ({"estimate.tokens_per_s": 1.0}, "edited after it was priced"),
        ({"strategy.recompute": "full"}, "planner explain --reprice"),
        ({"strategy.recompute": "sometimes"}, "strategy.recompute"),
        ({"estimate.step_time_s.mid": 1e9}, "not in increasing order"),
    ],
)
def test_what_a_reader_refuses(plan: Plan, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Plan.load(edited(plan, tmp_path / "plan.yaml", change))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_legal_edit_can_be_read_to_be_priced_anew(plan: Plan, tmp_path: Path) -> None:
    path = edited(plan, tmp_path / "plan.yaml", {"strategy.recompute": "full"})
    assert Plan.load(path, edited=True).strategy.recompute == "full"
    with pytest.raises(UsageError, match="contradicts itself"):
        Plan.load(edited(plan, path, {"strategy.dp_shard": 4}), edited=True)


def test_what_is_no_plan_at_all(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    for text, words in (("just text", "holds a str"), ("a: [1", "not usable YAML"), ("", "holds nothing")):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            Plan.load(path)
    with pytest.raises(UsageError, match="no such file"):
        Plan.load(tmp_path / "missing.yaml")


def test_a_backend_that_trains_no_adapters_refuses_a_plan_with_them(plan: Plan, tmp_path: Path) -> None:
    with_adapters = Plan(
        **{**dict(plan), "workload": Workload(seq_len=4096, global_batch_size=256, lora=Lora(rank=8, alpha=16))}
    )
    with_adapters.save(tmp_path / "plan.yaml")
    with pytest.raises(UsageError, match="does not train LoRA"):
        Plan.load(tmp_path / "plan.yaml")
