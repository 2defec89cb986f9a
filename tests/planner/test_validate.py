"""Measurements: what a row is read as, what is skipped and why, and the figures of the report."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.factors import shipped
from trainplan.planner.comparisons import compare, memory_interval
from trainplan.planner.rows import Row, Skip, interpret, read_rows
from trainplan.planner.validate import validate_rows, zero_shot

GPT3: dict[str, Any] = {
    "id": "a",
    "block": "published",
    "model": {
        "name": "GPT-3 175B", "layers": 96, "hidden": 12288, "heads": 96, "kv_heads": 96, "head_dim": 128, "ffn": 49152,
        "vocab": 51200, "gated_mlp": False, "moe": None,
    },
    "gpu": "A100-80GB", "n_gpus": 64, "gpus_per_node": 8, "seq": 2048, "gbs": 64, "mbs": 1, "tp": 8, "sp": True,
    "pp": 8, "vpp": 3, "dp": 1, "cp": 1, "ep": None, "etp": None, "zero_or_fsdp": "none (dp=1)",
    "recompute": "selective attention + sequence parallel", "precision": "fp16", "framework": "Megatron-LM",
    "task": "pretrain", "measured": {"step_time_s": 13.75},
}  # fmt: skip
"""Korthikanti et al. 2022, arXiv:2205.05198, table 5: 13.75 s per iteration with sequence parallelism and selective
recompute."""


def row(**changes: Any) -> Row:
    content = {**GPT3, "model": dict(GPT3["model"]), "measured": dict(GPT3["measured"])}
    for place, value in changes.items():
        *outer, last = place.split("__")
        target: Any = content
        for key in outer:
            target = target[key]
        target[last] = value
    return Row.model_validate(content)


def predict(of: Row) -> list[dict[str, Any]]:
    """The results of one row under the shipped factors."""
    found, skipped = compare([of])
    timed = [c for c in found if c.as_step_s is not None]
    memory = [c.result(memory_interval(c)) for c in found if c.as_step_s is None]
    return [*zero_shot(timed, shipped()), *memory, *skipped]


def test_a_published_row_becomes_the_run_it_describes() -> None:
    run = interpret(row())
    s = run.strategy
    assert run.stack == "megatron-lm-2022"
    assert (s.tp, s.pp, s.vpp, s.schedule, s.sp, s.grad_accum) == (8, 8, 3, "interleaved", True, 64)
    assert (s.recompute, s.recompute_modules) == ("selective", ("core_attn",))
    assert run.job.cluster.num_gpus == 64
    layers = 96 * (12 * 12288**2 + 2 * 2 * 12288)  # weights, and the two layer norms' scale and shift
    edges = 51200 * 12288 + 2048 * 12288 + 2 * 12288  # tied embedding, positions, last norm
    assert run.job.model.parameters() == layers + edges


def test_a_published_step_is_predicted_within_a_factor_of_two() -> None:
    (result,) = predict(row())
    assert result["metric"] == "step_time_s"
    assert 0.5 < result["predicted"] / 13.75 < 2
    assert result["error_frac"] == pytest.approx(result["predicted"] / 13.75 - 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mbs": None}, "mbs is not published"),
        ({"tp": 4}, "tp*pp*cp*dp is 32, n_gpus 64"),
        ({"gbs": 65, "mbs": 2}, "mbs*dp does not divide gbs"),
        ({"recompute": None}, "recompute is not published"),
        ({"recompute": 'selective modules ["shared_experts"]'}, "is not priced"),
        ({"precision": None}, "precision is not published"),
        ({"precision": "int4 GPTQ"}, "is not priced"),
        ({"gpu": "P100-16GB"}, "'P100-16GB' is not in the hardware profiles"),
        ({"framework": "Homemade"}, "has no software stack"),
        ({"model__vocab": None}, "model.vocab is not published"),
        ({"model__kv_heads": 7}, "does not divide num_heads"),
        ({"model__extra": {"attention": "hybrid"}}, "hybrid is not determined"),
        ({"extra": {"duplicate_of": "b"}}, "duplicate"),
        ({"extra": {"exclude_from_scoring": True}}, "contradicts itself"),
        ({"pp": 4, "dp": 2, "zero_or_fsdp": None}, "zero_or_fsdp is not published"),
        ({"pp": 4, "dp": 2, "zero_or_fsdp": "magic"}, "not a level known"),
        ({"vpp": 24}, "pp*vpp is more than layers"),
    ],
)
def test_what_is_not_determined_is_skipped_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Skip) as caught:
        interpret(row(**changes))
    assert reason in str(caught.value)
    (result,) = predict(row(**changes))
    assert reason in result["skipped"]


@pytest.mark.parametrize(
    ("name", "source", "gpu"),
    [
        ("NeMo 24.12", "github:NVIDIA/NeMo/docs/performance.md", "H100-SXM-80GB"),
        ("Megatron-Core", "github:yanring/Megatron-MoE-ModelZoo/README.md", "GB300"),
        ("Megatron-LM", "github:NVIDIA/Megatron-LM/examples/llama/README.md", "H100"),
        ("NeMo AutoModel", "github:NVIDIA-NeMo/Automodel/docs/performance-summary.md", "B300"),
        ("torchtitan + torchao", "github:pytorch/ao/torchao/float8/README.md", "MI300X"),
        ("nanotron", "github:huggingface/nanotron/docs/benchmark_summary.svg", "H100-SXM-80GB"),
        ("FSDP", "github:foundation-model-stack/fms-fsdp/README.md", "A100-SXM-80GB"),
        ("torchtune", "github:pytorch/torchtune/README.md", "RTX 4090"),
    ],
)
def test_rows_of_known_sources_are_predicted(name: str, source: str, gpu: str) -> None:
    """Llama-3-8B on eight GPUs of a kind, data parallel, where the source leaves recomputation and sharding open."""
    llama = {
        "name": "Llama-3-8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 14336,
        "vocab": 128256, "gated_mlp": True, "moe": None,
    }  # fmt: skip
    (result,) = predict(
        row(
            model=llama,
            framework=name,
            source_url_or_repo_path=source,
            gpu=gpu,
            n_gpus=8,
            tp=1,
            pp=1,
            vpp=None,
            dp=8,
            seq=4096,
            gbs=32,
            mbs=1,
            sp=None,
            precision="bf16",
            recompute=None,
            zero_or_fsdp=None,
        )
    )
    assert "skipped" not in result, result
    assert 0.2 < result["predicted"] < 60


@pytest.mark.parametrize(
    ("network", "gbit_per_s_and_gpu"),
    [
        ("DGX-A100 cluster, 8x HDR IB (Selene class)", 200),  # InfiniBand HDR: 200 Gbit/s an adapter, one for each GPU
        ("4 x 100Gb RoCE per node", 50),
        ("Jean Zay: 8x A100-80GB NVLink, 4x Omni-Path 100 per node", 50),
        ("8x H100 per host NVLink; 400 Gb/s RDMA per GPU", 400),
    ],
)
def test_a_stated_network_replaces_the_presets(network: str, gbit_per_s_and_gpu: float) -> None:
    stated, preset = interpret(row(network=network)).job.cluster.scale_out, interpret(row()).job.cluster.scale_out
    assert stated is not None
    assert preset is not None
    of_preset = 200  # the DGX A100: one HDR adapter for each GPU
    ratio = stated.all_reduce_bytes_per_s.value / preset.all_reduce_bytes_per_s.value
    assert ratio == pytest.approx(gbit_per_s_and_gpu / of_preset)


def test_throughput_is_compared_where_no_step_time_is_published() -> None:
    (result,) = predict(row(measured={"step_time_s": None, "tokens_per_s_per_gpu": 149.0}))
    (step,) = predict(row())
    assert result["metric"] == "tokens_per_s_per_gpu"
    assert result["predicted"] == pytest.approx(64 * 2048 / 64 / step["predicted"])
    assert result["low"] < result["predicted"] < result["high"]


def test_memory_is_compared_with_the_number_it_is() -> None:
    def memory(definition: str) -> dict[str, Any]:
        (result,) = predict(row(measured={"peak_mem_gib": 60.0, "peak_mem_definition": definition}))
        return result

    allocated = memory("max over ranks of torch max_memory_allocated (GiB)")["predicted"]
    device = memory("nvidia-smi max of first/last node, includes CUDA context")["predicted"]
    assert allocated < device
    assert "none of allocated" in memory("GB as published (unit and tool not defined)")["skipped"]


def test_a_file_is_reported_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GPT3) + "\n\n" + json.dumps({**GPT3, "id": "b", "mbs": None}) + "\n")
    report = validate_rows(path)
    assert [r["id"] for r in report.rows] == ["a", "b"]
    assert report.summary[0]["rows"] == report.summary[0]["skipped"] == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "no rows"), ("{}\n", "line 1: id"), (json.dumps(GPT3) + "\n{\n", "line 2: not JSON"), ("[1]\n", "line 1")],
)
def test_malformed_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        list(read_rows(path))
    with pytest.raises(UsageError, match="no such file"):
        list(read_rows(tmp_path / "missing.jsonl"))


LLAMA70B = {
    "layers": 12, "hidden": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128, "ffn": 28672, "vocab": 128256,
    "gated_mlp": True, "moe": None,
}  # fmt: skip
DEEPSEEK_V3 = {
    "layers": 4, "hidden": 7168, "heads": 128, "kv_heads": 128, "ffn": 18432, "vocab": 129280, "gated_mlp": True,
    "moe": {"experts": 256, "top_k": 8, "expert_ffn": 2048, "shared": 1, "shared_ffn": 2048, "first_dense_layers": 1},
    "extra": {
        "attention": "MLA", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "layout", "peak_gib"),
    [
        # MooreThreads/SimuMax docs/b200/b200_release_v1.2_summary.json @4dcaae5: max_memory_allocated over ranks
        (LLAMA70B, {"tp": 2, "dp": 4, "gbs": 16}, 60.68),
        (LLAMA70B, {"tp": 4, "dp": 2, "gbs": 8}, 39.07),
        (LLAMA70B, {"tp": 1, "pp": 2, "dp": 4, "gbs": 16}, 66.55),
        (LLAMA70B, {"tp": 2, "dp": 1, "cp": 4, "gbs": 4, "seq": 32768}, 68.43),
        (DEEPSEEK_V3, {"tp": 1, "dp": 8, "ep": 8, "gbs": 32}, 104.3),
    ],
)
def test_published_peaks_are_met_within_three_percent(
    model: dict[str, Any], layout: dict[str, Any], peak_gib: float
) -> None:
    values = {
        **GPT3, "framework": "Megatron-LM 23e00ed + TE 2.11", "gpu": "B200-SXM", "n_gpus": 8, "seq": 4096, "mbs": 1,
        "pp": 1, "cp": 1, "vpp": None, "sp": layout["tp"] > 1, "precision": "bf16", "recompute": "none",
        "zero_or_fsdp": "Megatron distributed optimizer (ZeRO-1)", "model": {"name": "published", **model}, **layout,
        "measured": {
            "peak_mem_gib": peak_gib,
            "peak_mem_definition": "max over ranks of torch max_memory_allocated (GiB)",
        },
    }  # fmt: skip
    (result,) = predict(Row.model_validate(values))
    assert result["predicted"] == pytest.approx(peak_gib, rel=0.03)
