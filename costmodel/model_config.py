"""Which architecture does a name, a folder or a ``config.json`` mean? Always as one `ModelSpec`.

Every error is a `UsageError` of one line that names the file, the field and how to mend it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from trainplan.costmodel.errors import UsageError
from trainplan.costmodel.files import explain, read_json_object
from trainplan.costmodel.model import MLA, AttentionKind, LinearAttention, MlpKind, ModelSpec, MoE
from trainplan.costmodel.model_families import FAMILIES, SPELLINGS, WRAPPERS, Family
from trainplan.costmodel.model_presets import preset_models, preset_name, presets
from trainplan.costmodel.names import did_you_mean

__all__ = ["from_hf_config", "load_model", "preset_models"]

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_LAYER_TYPES: Mapping[str, AttentionKind] = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
}
Kind = TypeVar("Kind")
_MAX_LAYERS = 10_000  # the deepest published model has 126; a larger number is a damaged file
_MAX_SIZE = 2**31 - 1  # so that no product of two sizes leaves 64 bits


def from_hf_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The architecture described by a Hugging Face ``config.json``.

    Old and new spellings give equal specs, and a field left out gets the default of the architecture's own
    configuration class. What changes no weight and no cost (dropout, token ids, initialisation) is not read.

    Args:
        config: The parsed file. A multimodal model is reduced to its language model (``text_config``).
        name: What the spec is called.

    Raises:
        UsageError: for an unsupported ``model_type`` or rope type, a missing or malformed field, or fields that
            contradict each other.
    """
    return _from_config(config, name, f"config of {name}")


def load_model(ref: str) -> ModelSpec:
    """The model that ``ref`` means: a ``config.json``, a folder that holds one, or the name of a preset.

    A preset is named in full (``Qwen/Qwen3-8B``) or by what follows the slash, in any case. A path that exists wins
    over a preset of the same name, unless it is a folder without a ``config.json``.

    Raises:
        UsageError: if nothing fits (near names are given), or the file is malformed.
    """
    path, preset = Path(ref).expanduser(), preset_name(ref)
    try:
        is_dir, exists = path.is_dir(), path.exists()
    except (OSError, ValueError):  # too long for a path, or holds a NUL
        is_dir = exists = False
    if is_dir and not (path / "config.json").exists():
        if preset is None:
            raise UsageError(
                f"{ref}: a folder without config.json. Give the folder of a Hugging Face model, or a name."
            )
    elif exists:
        return _load_file(path / "config.json" if is_dir else path)
    if preset is not None:
        return presets()[preset]
    if ref.endswith(".json") or ref.startswith((".", "/", "~")):
        raise UsageError(f"{ref}: no such file or folder. Check the path, or give a name from `planner models`.")
    raise UsageError(
        f"model {ref!r} is neither a path nor a known name.{did_you_mean(ref, presets())} "
        "Give the path of its config.json, or a name from `planner models`."
    )


def _load_file(path: Path) -> ModelSpec:
    config = read_json_object(path)
    resolved = path.resolve()
    name = resolved.parent.name if resolved.name == "config.json" else resolved.stem
    return _from_config(config, name or "model", str(path))


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to a config: a field by any of its spellings, else the family's default."""

    config: Mapping[str, Any]
    family: Family
    where: str

    def fail(self, field: str, why: str) -> UsageError:
        return UsageError(f"{self.where}: {field} {why}")

    def value(self, field: str) -> tuple[str, Any]:
        """(spelling found, value); null in the file is None, which is not the same as a field left out."""
        spellings = SPELLINGS.get(field, (field,))
        for spelling in spellings:
            if self.config.get(spelling) is not None:
                return spelling, self.config[spelling]
        for spelling in spellings:
            if spelling in self.config:
                return spelling, None
        for spelling in spellings:
            if spelling in self.family.defaults:
                return spelling, self.family.defaults[spelling]
        return spellings[0], None

    def optional_integer(self, field: str, *, least: int = 1, most: int = _MAX_SIZE) -> int | None:
        spelling, value = self.value(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(spelling, f"is {_shown(value)}, but must be an integer. Correct it.")
        if not least <= value <= most:
            raise self.fail(spelling, f"is {value}, but must be from {least} to {most}. Correct it.")
        return value

    def integer(self, field: str, *, least: int = 1, most: int = _MAX_SIZE) -> int:
        value = self.optional_integer(field, least=least, most=most)
        if value is None:
            state = "is null" if field in self.config else "is missing"
            raise self.fail(field, f"{state}, but model_type {self.family.name} needs it. Add it to the config.")
        return value

    def optional_number(self, field: str) -> float | None:
        spelling, value = self.value(field)
        return None if value is None else self.positive(spelling, value)

    def positive(self, field: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(field, f"is {_shown(value)}, but must be a number. Correct it.")
        if not (0 < value < math.inf):
            raise self.fail(field, f"is {_shown(value)}, but must be a positive number. Correct it.")
        return float(value)

    def number(self, field: str) -> float:
        value = self.optional_number(field)
        return float(self.family.defaults[field]) if value is None else value

    def flag(self, field: str) -> bool:
        spelling, value = self.value(field)
        if value is None:
            value = self.family.defaults.get(spelling, False) or False
        if not isinstance(value, bool):
            raise self.fail(spelling, f"is {_shown(value)}, but must be true or false. Correct it.")
        return value

    def text(self, field: str) -> str:
        spelling, value = self.value(field)
        if not isinstance(value, str):
            raise self.fail(spelling, f"is {_shown(value)}, but must be text. Correct it.")
        return value

    def sequence(self, field: str) -> Sequence[Any] | None:
        spelling, value = self.value(field)
        if value is not None and not isinstance(value, list | tuple):
            raise self.fail(spelling, f"is {_shown(value)}, but must be a list. Correct it.")
        return value


def _shown(value: object) -> str:
    """The value as JSON, cut to fit a line."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."


def _language_model(config: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], Family]:
    """The fields of the language model, and its family."""
    supported = f"Supported: {', '.join(sorted(FAMILIES))}."
    model_type = config.get("model_type")
    if model_type is None:
        raise UsageError(f"{where}: model_type is missing, so the architecture is unknown. {supported}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        hint = did_you_mean(model_type, FAMILIES) if isinstance(model_type, str) else ""
        raise UsageError(f"{where}: model_type is {_shown(model_type)}, which is not supported.{hint} {supported}")
    family = FAMILIES[model_type]
    text = config.get("text_config")
    if model_type not in WRAPPERS or text is None:
        return config, family
    if not isinstance(text, Mapping):
        raise UsageError(f"{where}: text_config is {_shown(text)}, but must be an object. Correct it.")
    inner = text.get("model_type")
    if inner is not None and (not isinstance(inner, str) or FAMILIES.get(inner) is not family):
        raise UsageError(
            f"{where}: text_config.model_type is {_shown(inner)}, which is not the language model of {model_type}. "
            f"{supported}"
        )
    outer = config.get("tie_word_embeddings")  # where stated, it is what the multimodal class goes by
    return (text if outer is None else {**text, "tie_word_embeddings": outer}), family


def _from_config(config: Mapping[str, Any], name: str, where: str) -> ModelSpec:
    config, family = _language_model(config, where)
    fields = _Fields(config, family, where)
    for field in family.required:
        if config.get(field) is None:
            raise fields.fail(field, f"is missing, but model_type {family.name} needs it. Add it to the config.")
    layers = fields.integer("num_hidden_layers", most=_MAX_LAYERS)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    positions = fields.integer("max_position_embeddings")
    window = _window(fields, positions)
    attention = _attention_kinds(fields, layers, window)
    mlp = _mlp_kinds(fields, layers)
    theta, scaling, partial = _rope(fields, positions)
    mla = _mla(fields)
    if fields.value("use_bidirectional_attention")[1]:
        raise fields.fail(
            "use_bidirectional_attention", "is true, but only causal language models can be trained here."
        )
    try:
        return ModelSpec(
            name=name,
            family=family.name,
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=fields.integer("intermediate_size") if "dense" in mlp else None,
            num_heads=heads,
            num_kv_heads=fields.optional_integer("num_key_value_heads") or heads,
            head_dim=_head_dim(fields, hidden, heads) if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim,
            vocab_size=fields.integer("vocab_size"),
            max_position_embeddings=positions,
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=_bias(fields),
            mlp_bias="mlp_bias" in family.defaults and fields.flag("mlp_bias"),
            qk_norm=family.qk_norm,
            hidden_act=fields.text("hidden_act"),
            norm_eps=fields.number("rms_norm_eps"),
            norms_per_layer=family.norms_per_layer,
            rope_theta=theta,
            rope_scaling=scaling,
            partial_rotary_factor=partial,
            attention_pattern=_shortest(attention),
            sliding_window=window if "sliding" in attention else None,
            mlp_pattern=_shortest(mlp),
            moe=_moe(fields) if "moe" in mlp else None,
            linear_attention=_linear(fields) if "linear" in attention else None,
            mla=mla,
            attn_output_gate=family.output_gate,
            attention_sinks=family.sinks,
            attn_softcap=fields.optional_number("attn_logit_softcapping"),
            logit_softcap=fields.optional_number("final_logit_softcapping"),
        )
    except ValidationError as exc:
        raise UsageError(f"{where}: {explain(exc)} Correct the config.") from None


def _shortest(kinds: Sequence[Kind]) -> tuple[Kind, ...]:
    """The shortest pattern that gives ``kinds`` when layer i takes entry i modulo its length."""
    n = len(kinds)
    period = next(p for p in range(1, n + 1) if all(kinds[i] == kinds[i % p] for i in range(p, n)))
    return tuple(kinds[:period])


def _head_dim(fields: _Fields, hidden: int, heads: int) -> int:
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None and hidden % heads:
        why = f"is missing, and num_attention_heads={heads} does not divide hidden_size={hidden}. Add it to the config."
        raise fields.fail("head_dim", why)
    return hidden // heads if head_dim is None else head_dim


def _bias(fields: _Fields) -> str:
    match fields.family.bias:
        case "attention_bias":
            return "qkvo" if fields.flag("attention_bias") else "none"
        case "qkv_bias":
            return "qkv" if fields.flag("qkv_bias") else "none"
        case fixed:
            return fixed


def _window(fields: _Fields, positions: int) -> int | None:
    """The sliding window, or None where no position of a full context ever leaves it."""
    family = fields.family
    if "use_sliding_window" in family.defaults and not fields.flag("use_sliding_window"):
        return None
    window = fields.optional_integer("sliding_window", least=0) if "sliding_window" in family.defaults else None
    return window if window and window < positions else None


def _attention_kinds(fields: _Fields, layers: int, window: int | None) -> list[AttentionKind]:
    """The kind of attention of each layer, by layer_types where the architecture reads it, else by its own rule."""
    rule = fields.family.attention
    types = fields.sequence("layer_types") if fields.family.reads_layer_types else None
    if types is not None:
        kinds = _listed_kinds(fields, types, layers)
    elif rule == "linear":
        interval = fields.optional_integer("full_attention_interval") or fields.family.period
        kinds = ["full" if (i + 1) % interval == 0 else "linear" for i in range(layers)]
    elif rule == "local_global":
        period = fields.optional_integer("sliding_window_pattern") or fields.family.period
        kinds = ["full" if (i + 1) % period == 0 else "sliding" for i in range(layers)]
    elif rule == "alternate":
        kinds = ["full" if i % 2 else "sliding" for i in range(layers)]
    elif rule in ("window_last", "window_even"):
        limit = fields.integer("max_window_layers", least=0)
        local = [i >= limit if rule == "window_last" else i % 2 == 0 and i < limit for i in range(layers)]
        kinds = ["sliding" if is_local else "full" for is_local in local]
    else:
        kinds = ["full" if rule == "full" else "sliding"] * layers
    return ["full" if kind == "sliding" and window is None else kind for kind in kinds]


def _listed_kinds(fields: _Fields, types: Sequence[Any], layers: int) -> list[AttentionKind]:
    other = "linear_attention" if fields.family.attention == "linear" else "sliding_attention"
    legal = ("full_attention", other)
    if len(types) != layers:
        raise fields.fail(
            "layer_types", f"has {len(types)} entries for num_hidden_layers={layers}. Give one per layer."
        )
    for entry in types:
        if entry not in legal:
            why = f"holds {_shown(entry)}, which {fields.family.name} does not have. Use {' or '.join(legal)}."
            raise fields.fail("layer_types", why)
    return [_LAYER_TYPES[entry] for entry in types]


def _mlp_kinds(fields: _Fields, layers: int) -> list[MlpKind]:
    match fields.family.moe:
        case "none":
            return ["dense"] * layers
        case "all":
            return ["moe"] * layers
        case "after_dense":
            dense = fields.integer("first_k_dense_replace", least=0)
            return ["dense" if i < dense else "moe" for i in range(layers)]
        case "step":
            step, dense_layers = fields.integer("decoder_sparse_step"), fields.sequence("mlp_only_layers") or ()
            if any(isinstance(i, bool) or not isinstance(i, int) for i in dense_layers):
                raise fields.fail("mlp_only_layers", f"is {_shown(list(dense_layers))}, but must list layer numbers.")
            if fields.integer("num_experts", least=0) == 0:
                return ["dense"] * layers
            return ["moe" if (i + 1) % step == 0 and i not in dense_layers else "dense" for i in range(layers)]


def _moe(fields: _Fields) -> MoE:
    family = fields.family
    width = fields.integer(family.expert_width)
    shared = fields.optional_integer("shared_expert_intermediate_size", least=0) or 0
    if family.moe == "after_dense":
        shared = width * (fields.optional_integer("n_shared_experts", least=0) or 0)
    return MoE(
        num_experts=fields.integer("num_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=shared,
        shared_gate=family.shared_gate and shared > 0,
        router_bias=family.router_bias,
        expert_bias=family.expert_bias,
        norm_topk_prob=fields.flag("norm_topk_prob") if "norm_topk_prob" in family.defaults else True,
    )


def _linear(fields: _Fields) -> LinearAttention:
    return LinearAttention(
        num_key_heads=fields.integer("linear_num_key_heads"),
        num_value_heads=fields.integer("linear_num_value_heads"),
        key_head_dim=fields.integer("linear_key_head_dim"),
        value_head_dim=fields.integer("linear_value_head_dim"),
        conv_kernel_size=fields.integer("linear_conv_kernel_dim"),
    )


def _mla(fields: _Fields) -> MLA | None:
    if not fields.family.mla:
        return None
    return MLA(
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )


def _rope(fields: _Fields, positions: int) -> tuple[float, dict[str, Any] | None, float]:
    """(theta, scaling block without theta or None, rotary fraction of a head) of the full-attention layers."""
    config, family = fields.config, fields.family
    spelling = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    block = config.get(spelling)
    if block is None and family.rope_scaling is not None:
        block = family.rope_scaling
    block = {} if block is None else block
    if isinstance(block, Mapping) and "full_attention" in block:  # one block per kind of layer
        spelling, block = f"{spelling}.full_attention", block["full_attention"] or {}
    if not isinstance(block, Mapping):
        raise fields.fail(spelling, f"is {_shown(block)}, but must be an object. Correct it.")

    def given(field: str, default: float) -> float:
        for place, source in ((f"{spelling}.{field}", block), (field, config)):
            if source.get(field) is not None:
                return fields.positive(place, source[field])
        return default

    theta = given("rope_theta", family.rope_theta)
    partial = given("partial_rotary_factor", family.partial_rotary_factor)
    kind = block.get("rope_type") or block.get("type") or "default"
    kind = family.rope_renames.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in ROPE_TYPES:
        why = f"is {_shown(kind)}, which is not supported. Supported: {', '.join(ROPE_TYPES)}."
        raise fields.fail(f"{spelling}.{'rope_type' if 'rope_type' in block else 'type'}", why)
    if kind == "default":
        return theta, None, partial
    left_out = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    scaling = {"rope_type": kind, **{key: value for key, value in block.items() if key not in left_out}}
    if kind in ("llama3", "yarn", "longrope"):  # transformers' own rule for the length before scaling
        scaling.setdefault(
            "original_max_position_embeddings", config.get("original_max_position_embeddings") or positions
        )
    return theta, scaling, partial
