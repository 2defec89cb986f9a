"""Every sharding level, alone and combined, trains as one process does; and communicates as its table says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from trainplan.costmodel.backends.native import BACKEND as NATIVE
from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.model_config import load_model
from trainplan.costmodel.strategy import Strategy
from trainplan.costmodel.workload import Workload
from trainplan.executor.metrics import read_metrics
from trainplan.executor.parallel import check_strategy
from trainplan.executor.tokens import open_cache
from trainplan.executor.train import Job, train

BATCH, STEPS, LAYERS = 8, 4, 3
SCRIPT = Path(__file__).parent / "ranks_train.py"
OPTIONS = {"steps": STEPS, "learning_rate": 3e-3, "max_grad_norm": 1.0, "data": "unused"}
Case = tuple[str, str, dict[str, Any], dict[str, Any]]  # name, model, strategy, workload

# Which values of the legality table a layout of n ranks may take; every layout and knob of the table is generated.
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    ranks: [
        {"dp_replicate": ranks // shard, "dp_shard": shard, "sharding": sharding, "reshard_after_forward": reshard}
        for shard in range(1, ranks + 1)
        if ranks % shard == 0
        for sharding in ("none", "optimizer", "gradients", "parameters")
        if (sharding == "none") == (shard == 1)
        for reshard in ((False, True) if sharding == "parameters" else (False,))
    ]
    for ranks in (2, 4)
}
KNOBS: dict[str, list[dict[str, Any]]] = {
    "grad_accum": [{"grad_accum": 1}, {"grad_accum": 2}],
    "recompute": [{"recompute": "none"}, {"recompute": "full"}, {"recompute": "full", "recompute_layers": (2,)}],
    "loss_chunk": [{"loss_chunk": 0}, {"loss_chunk": 50}],
    "packing": [{"packing": True}, {"packing": False}],
}


def case(values: dict[str, Any], family: str = "qwen3") -> Case:
    strategy = {"precision": "fp32", "grad_accum": 1, "dp_replicate": 1, "dp_shard": 1, **values}
    dp = strategy["dp_replicate"] * strategy["dp_shard"]
    strategy["micro_batch_size"] = BATCH // dp // strategy["grad_accum"]
    shown = {key: value for key, value in strategy.items() if key not in ("precision", "micro_batch_size")}
    name = ",".join(f"{key}={value}" for key, value in sorted(shown.items())).replace(" ", "")
    workload = {"seq_len": 64, "global_batch_size": BATCH, "precision": strategy["precision"]}
    return f"{family}:{name}", family, Strategy(**strategy).model_dump(mode="json"), workload


def all_cases(ranks: int) -> list[Case]:
    """The whole product of layouts and knobs."""
    knobs = [dict(itertools.chain(*(k.items() for k in choice))) for choice in itertools.product(*KNOBS.values())]
    prefetched = [{**layout, "prefetch_units": 2} for layout in LAYOUTS[ranks] if layout["sharding"] == "parameters"]
    return [case({**layout, **knob}) for layout in [*LAYOUTS[ranks], *prefetched] for knob in knobs]


def few_cases(ranks: int) -> list[Case]:
    """Two per layout, the knobs rotating so that every value of every knob is met with every sharding level."""
    chosen = []
    for i, layout in enumerate(LAYOUTS[ranks]):
        for accum in (0, 1):
            knobs = {
                **KNOBS["grad_accum"][accum],
                **KNOBS["recompute"][(i + accum) % 3],
                **KNOBS["loss_chunk"][(i // 2 + accum) % 2],
                **KNOBS["packing"][(i + accum) % 2],
            }
            if layout["sharding"] == "parameters" and accum:
                knobs["prefetch_units"] = 2
            chosen.append(case({**layout, **knobs}))
    most = LAYOUTS[ranks][-1]  # parameters over all ranks, freed after the forward pass
    replicas = LAYOUTS[ranks][0]
    chosen += [case({**most, "grad_accum": 2}, family) for family in ("qwen2-tied", "llama3", "odd")]
    return [*chosen, case({**replicas, "grad_accum": 2}, "odd")]


@pytest.fixture(scope="module")
def train_ranks(
    model_dirs: Callable[..., Path], token_cache: Path, tiny: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, Sequence[Case]], Path]:
    """Trains cases on so many ranks in one launch; gives the folder of their outputs."""

    def launch(ranks: int, cases: Sequence[Case]) -> Path:
        output = tmp_path_factory.mktemp(f"ranks{ranks}")
        job = {
            "cache": str(token_cache),
            "output": str(output),
            "options": OPTIONS,
            "cases": [(name, str(model_dirs(family)), *rest) for name, family, *rest in cases],
        }
        (output / "job.json").write_text(json.dumps(job))
        tiny.run_ranks(ranks, SCRIPT, str(output / "job.json"), timeout_s=550)
        return output

    return launch


@pytest.fixture(scope="module")
def alone(
    one_rank: None, model_dirs: Callable[..., Path], token_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[float]]:
    """Losses of one process for a strategy's values."""
    known: dict[str, list[float]] = {}

    def losses(family: str = "qwen3", **values: Any) -> list[float]:
        name, _, strategy, workload = case(values, family)
        if name not in known:
            from trainplan.executor.options import RunOptions

            output = tmp_path_factory.mktemp("alone")
            options = RunOptions(**OPTIONS, model_dir=model_dirs(family), output_dir=output)
            job = Job(load_model(str(model_dirs(family))), Workload(**workload), Strategy(**strategy), options)
            assert train(job, open_cache(token_cache), torch.device("cpu")) is not None
            known[name] = losses_of(output)
        return known[name]

    return losses


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]


def largest_gap(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected) == STEPS
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def check_parity(output: Path, cases: Sequence[Case], alone: Callable[..., list[float]]) -> float:
    """The largest gap to one process over all cases; fails above 1e-5, about 20 roundings of a loss near 6."""
    gaps = {
        name: largest_gap(losses_of(output / name), alone(family, packing=strategy["packing"]))
        for name, family, strategy, _ in cases
    }
    worst = max(gaps, key=lambda name: gaps[name])
    assert gaps[worst] <= 1e-5, {name: gap for name, gap in gaps.items() if gap > 1e-5}
    return gaps[worst]


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def trained(
    request: pytest.FixtureRequest, train_ranks: Callable[[int, Sequence[Case]], Path]
) -> tuple[int, list[Case], Path]:
    """The few cases, trained in one launch together with those in bf16."""
    ranks: int = request.param
    cases = few_cases(ranks)
    layouts = LAYOUTS[ranks]
    for layout, reduce_dtype, accum in zip(layouts, itertools.cycle(("fp32", "bf16")), itertools.cycle((1, 2, 2))):
        values = {**layout, "precision": "bf16", "reduce_dtype": reduce_dtype, "grad_accum": accum}
        cases.append(case(values))
    cases.append(case({**layouts[1], "reduce_dtype": "bf16", "grad_accum": 2}))
    cases = [(f"{i:02d}-{c[0]}"[:200], *c[1:]) for i, c in enumerate(cases)]
    return ranks, cases, train_ranks(ranks, cases)


def test_fp32_losses_equal_one_process(
    trained: tuple[int, list[Case], Path], alone: Callable[..., list[float]], record_property: Callable[..., None]
) -> None:
    _, cases, output = trained
    exact = [c for c in cases if c[2]["precision"] == "fp32" and c[2]["reduce_dtype"] == "fp32"]
    assert {family for _, family, _, _ in exact} == {"qwen3", "qwen2-tied", "llama3", "odd"}
    assert len(exact) >= 2 * 5
    record_property("largest_gap", check_parity(output, exact, alone))


def test_the_reference_itself_learns_and_knobs_do_not_change_it(alone: Callable[..., list[float]]) -> None:
    reference = alone(packing=True)
    assert reference[-1] < reference[0] - 0.5
    assert largest_gap(alone(packing=False), reference) > 1e-2  # parity above is not that of any two runs
    for knobs in itertools.product(KNOBS["grad_accum"], KNOBS["recompute"], KNOBS["loss_chunk"]):
        values = dict(itertools.chain(*(k.items() for k in knobs)))
        assert largest_gap(alone(packing=True, **values), reference) <= 1e-5, values


def test_bf16_losses_are_near_fp32_and_gradients_may_be_reduced_in_bf16(
    trained: tuple[int, list[Case], Path], alone: Callable[..., list[float]]
) -> None:
    """Within 2^-8 of the loss, one rounding of bf16; 1e-3 to 2e-3 were measured. Master weights stay fp32."""
    _, cases, output = trained
    rounded = [c for c in cases if "bf16" in (c[2]["precision"], c[2]["reduce_dtype"])]
    assert {(c[2]["precision"], c[2]["reduce_dtype"]) for c in rounded} == {
        ("bf16", "fp32"),
        ("bf16", "bf16"),
        ("fp32", "bf16"),
    }
    reference = alone(packing=True)
    for name, *_ in rounded:
        found = losses_of(output / name)
        assert 0 < largest_gap(found, reference) < 2**-8 * reference[0], name
        applied = json.loads((output / name / "applied.json").read_text())["applied"]
        assert applied["master_dtype"] == ["fp32"]


def test_bf16_on_one_rank_uses_the_same_mixed_precision(alone: Callable[..., list[float]]) -> None:
    gap = largest_gap(alone(precision="bf16", grad_accum=2), alone(packing=True))
    assert 0 < gap < 2**-8 * 6


def test_collectives_are_those_of_the_sharding_level(trained: tuple[int, list[Case], Path]) -> None:
    """Per step, by hand: units = layers + root; each level gathers and reduces as the table in parallel.py says."""
    ranks, cases, output = trained
    units = LAYERS + 1
    parameters = 188_032  # of the tiny model: counted by transformers, see test_decoder
    for name, family, s, _ in cases:
        if family != "qwen3":
            continue
        found = json.loads((output / name / "collectives.json").read_text())
        micro = s["grad_accum"]
        gathers = {
            "none": 0,
            "optimizer": units,
            "gradients": units,
            # Freed blocks are gathered again in the backward pass, the root never.
            "parameters": micro * (units + (LAYERS if s["reshard_after_forward"] else 0)),
        }[s["sharding"]]
        reduces = {"none": 0, "optimizer": units, "gradients": units * micro, "parameters": units * micro}[
            s["sharding"]
        ]
        replicas = units if s["dp_replicate"] > 1 else 0  # once per step at every level
        calls = found["calls"]
        assert calls.get("gather", 0) == gathers, (name, calls)
        assert calls.get("reduce_scatter", 0) == reduces, (name, calls)
        assert calls.get("allreduce", 0) == replicas, (name, calls)
        if s["sharding"] == "none":
            assert found["elements"]["allreduce"] == parameters, name  # each gradient once, whatever grad_accum
            assert found["elements"].get("gather", 0) == 0
        if s["sharding"] == "optimizer":
            assert found["elements"]["gather"] == parameters, name  # 384 rows and all widths divide by 2 and 4
    assert ranks in (2, 4)


def test_what_is_applied_is_written_down(trained: tuple[int, list[Case], Path]) -> None:
    _, cases, output = trained
    for name, _, s, _ in cases:
        content = json.loads((output / name / "applied.json").read_text())
        assert content["differs"] == []
        seen = content["applied"]
        assert seen["mesh"] == {"dp_replicate": s["dp_replicate"], "dp_shard": s["dp_shard"]}
        assert seen["units"] == [*(f"model.layers.{i}" for i in range(LAYERS)), "root"]
        assert seen["loss_chunk"] == s["loss_chunk"]
        count = 0 if s["recompute"] == "none" else (s["recompute_layers"] or [LAYERS])[0]
        assert seen["recomputed_layers"] == list(range(count))


def test_an_export_of_sharded_training_is_that_of_one_process(
    trained: tuple[int, list[Case], Path], alone: Callable[..., list[float]], one_rank: None
) -> None:
    """Transformers loads it, and its loss on fresh text is the same from every layout."""
    from transformers import AutoModelForCausalLM

    _, cases, output = trained
    ids = torch.arange(60)[None]
    losses = []
    for name, family, strategy, _ in cases:
        if (
            family == "qwen3"
            and strategy["precision"] == "fp32"
            and strategy["reduce_dtype"] == "fp32"
            and strategy["packing"]
        ):
            theirs = AutoModelForCausalLM.from_pretrained(output / name / "model")
            losses.append(theirs(ids, labels=ids).loss.item())
    assert len(losses) >= 4
    assert max(losses) - min(losses) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "part"), [(2, 0), (2, 1), *((4, part) for part in range(5))])
def test_the_whole_product_of_layouts_and_knobs_equals_one_process(
    ranks: int, part: int, train_ranks: Callable[[int, Sequence[Case]], Path], alone: Callable[..., list[float]]
) -> None:
    """In parts, so that none takes the ten minutes after which a test counts as hanging."""
    cases = all_cases(ranks)
    assert len(cases) == len({name for name, *_ in cases}) == {2: (5 + 2) * 24, 4: (9 + 4) * 24}[ranks]
    mine = cases[part :: 2 if ranks == 2 else 5]
    check_parity(train_ranks(ranks, mine), mine, alone)


@pytest.mark.slow
def test_compiled_blocks_train_the_same_on_two_ranks(
    train_ranks: Callable[[int, Sequence[Case]], Path], alone: Callable[..., list[float]]
) -> None:
    cases = [
        case({**layout, "compile": True, "grad_accum": 2, **KNOBS["recompute"][2 * (i % 2)]})
        for i, layout in enumerate(LAYOUTS[2])
    ]
    check_parity(train_ranks(2, cases), cases, alone)


REFUSED: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sp": {"sp": True},
    "pp": {"pp": 2},
    "vpp": {"vpp": 2},
    "schedule": {"schedule": "gpipe"},
    "stage_layers": {"stage_layers": (2, 1)},
    "cp": {"cp": 2},
    "cp_method": {"cp_method": "ulysses"},
    "ep": {"ep": 2},
    "etp": {"etp": 2},
    "rank_order": {"rank_order": "tp-cp-pp-dp"},
    "collective_algo": {"collective_algo": "ring"},
    "token_budget": {"token_budget": 4096},
    "recompute": {"recompute": "selective", "recompute_modules": ("attention",)},
    "recompute_modules": {"recompute_modules": ("attention",)},
    "recompute_layers": {"recompute": "full", "recompute_layers": (4,)},
    "activation_offload": {"activation_offload": True},
    "optimizer_offload": {"optimizer_offload": True},
    "reduce_dtype": {"reduce_dtype": "int8"},
    "precision": {"precision": "fp8"},
    "attention": {"attention": "flash"},
    "fused_kernels": {"fused_kernels": ("rms_norm",)},
    "overlap_grad_reduce": {"overlap_grad_reduce": False},
    "overlap_param_gather": {"overlap_param_gather": False},
    "overlap_tp": {"overlap_tp": True},
    "prefetch_units": {"prefetch_units": 3},
    "bucket_bytes": {"bucket_bytes": 1_000_000},
    "loader_workers": {"loader_workers": 1},
    "checkpoint_mode": {"checkpoint_mode": "async"},
    "sharding": {"sharding": "none", "dp_shard": 2},
    "reshard_after_forward": {"sharding": "gradients", "dp_shard": 2, "reshard_after_forward": True},
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_value_that_is_not_run_is_refused_by_name(field: str, model_dirs: Callable[..., Path]) -> None:
    spec = load_model(str(model_dirs("qwen3")))
    check_strategy(spec, Strategy())
    with pytest.raises(UsageError, match=rf"^{field}=") as caught:
        check_strategy(spec, Strategy(**REFUSED[field]))
    assert "\n" not in str(caught.value)


def test_every_field_of_the_legality_table_has_a_refused_value_here_and_every_other_field_is_tested() -> None:
    free = {"dp_replicate", "dp_shard", "micro_batch_size", "grad_accum", "loss_chunk", "compile", "packing"}
    assert set(NATIVE.values) | {"recompute_layers", "sharding", "reshard_after_forward"} == set(REFUSED)
    assert set(Strategy.model_fields) == set(REFUSED) | free
