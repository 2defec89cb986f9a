"""Reading a model: presets, old and new spellings, and every way a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.model import ModelSpec
from trainplan.costmodel.model_config import from_hf_config, load_model, preset_models
from trainplan.profiles import read_json

QWEN3: dict[str, Any] = {  # the published shape of Qwen3-8B
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
MOE: dict[str, Any] = {**SMALL, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
FACTS = read_json("models", "facts.json")


def spec(model_type: str, **fields: Any) -> ModelSpec:
    return from_hf_config({"model_type": model_type, **SMALL, **fields}, "m")


def kinds(model: ModelSpec) -> str:
    """The layers as letters: f full, s sliding, l linear."""
    return "".join(attention[0] for attention, _ in model.layer_kinds())


def test_there_are_56_models() -> None:
    assert len(preset_models()) == len({name for name, _, _ in preset_models()}) == len(FACTS) == 56


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: str(facts["name"]))
def test_counts_of_a_preset_are_the_published_facts(facts: dict[str, Any]) -> None:
    model = load_model(facts["name"])
    assert model.name == facts["name"]
    assert model.parameters() == facts["computed_parameters"]
    assert model.active_parameters() == facts["computed_active_parameters"]
    assert model.embedding_parameters() == facts["computed_embedding_parameters"]


def test_a_preset_equals_its_published_config() -> None:
    assert from_hf_config(QWEN3, "Qwen/Qwen3-8B") == load_model("Qwen/Qwen3-8B")
    assert ModelSpec.from_hf_config(QWEN3, "Qwen/Qwen3-8B") == load_model("Qwen/Qwen3-8B")


@pytest.mark.parametrize("ref", ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "Qwen3-8B", "qwen3-8B"])
def test_a_preset_by_any_of_its_names(ref: str) -> None:
    assert load_model(ref).name == "Qwen/Qwen3-8B"


def test_layer_patterns_of_presets() -> None:
    assert kinds(load_model("gemma-2-2b")) == "sf" * 13
    assert kinds(load_model("gemma-3-1b-pt")) == "sssssf" * 4 + "ss"
    assert kinds(load_model("gpt-oss-20b")) == "sf" * 12
    assert kinds(load_model("Qwen3.5-0.8B")) == "lllf" * 6
    assert kinds(load_model("Phi-4-mini-instruct")) == "f" * 32  # its window is longer than its context
    deepseek = [mlp for _, mlp in load_model("DeepSeek-V3").layer_kinds()]
    assert deepseek == ["dense"] * 3 + ["moe"] * 58


def test_old_and_new_rope_spellings() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = spec("llama", rope_theta=500000.0, rope_scaling={"type": "llama3", **scaling})
    middle = spec("llama", rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **scaling})
    new = spec("llama", rope_parameters={"rope_theta": 500000.0, "rope_type": "llama3", **scaling})
    assert old == middle == new
    assert new.rope_theta == 500000.0
    assert new.rope_scaling == {"rope_type": "llama3", **scaling}
    assert spec("phi3", rope_scaling={"type": "su", "factor": 2}).rope_scaling == {
        "rope_type": "longrope",
        "factor": 2,
        "original_max_position_embeddings": 512,
    }


def test_rope_per_kind_of_layer() -> None:
    nested = {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    assert spec("gemma3_text", rope_parameters=nested).rope_theta == 2e6
    assert spec("gemma3_text", rope_theta=2e6, rope_local_base_freq=1e4) == spec("gemma3_text", rope_parameters=nested)


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_spellings_of_the_number_of_experts(spelling: str) -> None:
    model = from_hf_config({"model_type": "qwen3_moe", **MOE, spelling: 6}, "m")
    assert model.moe is not None
    assert model.moe.num_experts == 6


def test_spellings_of_the_layer_pattern() -> None:
    letters = {"s": "sliding_attention", "f": "full_attention", "l": "linear_attention"}
    types = [letters[c] for c in "ssfssf"]
    gemma = spec("gemma3_text", sliding_window=64, layer_types=types)
    assert gemma == spec("gemma3_text", sliding_window=64, sliding_window_pattern=3)
    assert gemma.attention_pattern == ("sliding", "sliding", "full")
    delta = spec("qwen3_5_text", layer_types=[letters[c] for c in "llflls".replace("s", "f")])
    assert delta == spec("qwen3_5_text", full_attention_interval=3)


def test_which_layers_are_experts() -> None:
    def layers(model_type: str, **fields: Any) -> str:
        model = from_hf_config({"model_type": model_type, **MOE, "num_experts": 4, **fields}, "m")
        return "".join(mlp[0] for _, mlp in model.layer_kinds())

    assert layers("qwen3_moe") == "mmmmmm"
    assert layers("qwen3_moe", decoder_sparse_step=2) == "dmdmdm"
    assert layers("qwen3_moe", mlp_only_layers=[0, 5]) == "dmmmmd"
    assert layers("deepseek_v3", first_k_dense_replace=2) == "ddmmmm"
    assert layers("qwen2_moe", num_experts=0) == "dddddd"


def test_a_window_that_is_switched_off_or_longer_than_the_context_is_none() -> None:
    assert kinds(spec("qwen2", sliding_window=64, use_sliding_window=False, max_window_layers=0)) == "ffffff"
    assert kinds(spec("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=4)) == "ffffss"
    assert kinds(spec("mistral", sliding_window=64)) == "ssssss"
    assert kinds(spec("mistral", sliding_window=None)) == "ffffff"
    assert kinds(spec("mistral", sliding_window=512)) == "ffffff"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "qwen4"}, ['model_type is "qwen4"', "Did you mean", "qwen3", "Supported: deepseek_v3"]),
        ({"model_type": None}, ["model_type is missing", "llama"]),
        ({"model_type": 3}, ["model_type is 3"]),
        ({"hidden_size": None}, ["hidden_size is null", "Add it"]),
        ({"hidden_size": "4096"}, ['hidden_size is "4096"', "integer"]),
        ({"hidden_size": True}, ["hidden_size is true", "integer"]),
        ({"hidden_size": 64.5}, ["hidden_size is 64.5", "integer"]),
        ({"hidden_size": -1}, ["hidden_size is -1", "from 1"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers is 1000000000", "10000"]),
        ({"num_attention_heads": None}, ["num_attention_heads is missing"]),
        ({"vocab_size": None}, ["vocab_size is missing"]),
        ({"num_key_value_heads": 3}, ["num_kv_heads", "does not divide num_heads=32"]),
        ({"tie_word_embeddings": "yes"}, ['tie_word_embeddings is "yes"', "true or false"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps", "number"]),
        ({"rope_theta": float("inf")}, ["rope_theta", "positive number"]),
        ({"rope_scaling": {"rope_type": "spiral"}}, ['rope_scaling.rope_type is "spiral"', "llama3", "yarn"]),
        ({"rope_scaling": {"type": "spiral"}}, ['rope_scaling.type is "spiral"']),
        ({"rope_scaling": "llama3"}, ["rope_scaling", "object"]),
        ({"layer_types": ["full_attention"]}, ["layer_types has 1 entries", "num_hidden_layers=36"]),
        ({"layer_types": ["odd_attention"] * 36}, ["odd_attention", "full_attention or sliding_attention"]),
        ({"layer_types": [["full_attention"]] * 36}, ["layer_types holds"]),
        ({"layer_types": "full_attention"}, ["layer_types", "list"]),
        ({"hidden_act": 3}, ["hidden_act", "text"]),
    ],
)
def test_a_bad_field_is_named_in_one_line(changes: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        from_hf_config({**QWEN3, **changes}, "my-model")
    message = str(caught.value)
    assert "\n" not in message
    assert "my-model" in message
    for part in told:
        assert part in message


def test_other_contradictions() -> None:
    with pytest.raises(UsageError, match="head_dim is missing, and num_attention_heads=5"):
        spec("llama", num_attention_heads=5)
    with pytest.raises(UsageError, match="top_k=9 is more than num_experts=4"):
        from_hf_config({"model_type": "qwen3_moe", **MOE, "num_experts": 4, "num_experts_per_tok": 9}, "m")
    with pytest.raises(UsageError, match=r"text_config.model_type is \"llama\""):
        from_hf_config({"model_type": "gemma3", "text_config": {"model_type": "llama"}}, "m")
    with pytest.raises(UsageError, match="text_config is 3"):
        from_hf_config({"model_type": "gemma3", "text_config": 3}, "m")
    with pytest.raises(UsageError, match="use_bidirectional_attention is true"):
        spec("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(UsageError, match="mlp_only_layers"):
        from_hf_config({"model_type": "qwen3_moe", **MOE, "num_experts": 4, "mlp_only_layers": ["1"]}, "m")


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_field_is_never_filled_in_with_another_model_s_number(field: str) -> None:
    config = {key: value for key, value in QWEN3.items() if key != field}
    with pytest.raises(UsageError, match=f"{field} is missing.*Add it"):
        from_hf_config(config, "m")


def test_an_unknown_name_gets_near_names() -> None:
    with pytest.raises(UsageError, match=r"Did you mean .*Qwen/Qwen3-8B") as caught:
        load_model("Qwen/Qwen3-8b-chat")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="neither a path nor a known name"):
        load_model("zzz")
    with pytest.raises(UsageError, match="neither a path nor a known name"):
        load_model("a\0b")


def write(folder: Path, text: str | bytes, name: str = "config.json") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_file_or_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-qwen"
    folder.mkdir()
    path = write(folder, json.dumps(QWEN3))
    assert load_model(str(folder)) == load_model(str(path)) == from_hf_config(QWEN3, "my-qwen")
    assert load_model(str(write(tmp_path, json.dumps(QWEN3), "other.json"))).name == "other"


def test_a_folder_wins_over_a_preset_only_with_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    assert load_model("Qwen/Qwen3-8B").num_layers == 36
    write(folder, json.dumps({**QWEN3, "num_hidden_layers": 2}))
    assert load_model("Qwen/Qwen3-8B").num_layers == 2


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (json.dumps(QWEN3)[:200], ["not valid JSON at line 1 column", "truncated"]),
        ("", ["not valid JSON", "truncated"]),
        ('{"a": 1,, "b": 2}', ["not valid JSON at line 1 column 9"]),
        ("hidden_size: 4096\n", ["not valid JSON at line 1 column 1"]),
        ("[1, 2]", ["holds a list", "object"]),
        ("null", ["holds nothing"]),
        ("[" * 100000, ["not"]),
        ('{"hidden_size": ' + "9" * 5000 + "}", ["too many digits"]),
        (b"\xff\xfe\x00{", ["not UTF-8"]),
        (b"{" + b" " * 5_000_001 + b"}", ["larger than 5 MB"]),
        (json.dumps({**QWEN3, "model_type": "bert"}), ['model_type is "bert"', "not supported", "qwen3"]),
        (json.dumps({**QWEN3, "hidden_size": "big"}), ['hidden_size is "big"']),
    ],
    ids=["cut", "empty", "comma", "yaml", "list", "null", "deep", "digits", "bytes", "huge", "architecture", "type"],
)
def test_a_bad_file_is_told_in_one_line_with_its_path(tmp_path: Path, content: str | bytes, told: list[str]) -> None:
    path = write(tmp_path, content)
    with pytest.raises(UsageError) as caught:
        load_model(str(path))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    for part in told:
        assert part in message


def test_a_missing_path_or_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        load_model(str(tmp_path / "none" / "config.json"))
    with pytest.raises(UsageError, match=r"a folder without config.json"):
        load_model(str(tmp_path))
