"""The families of models: for each model_type, which layers keep what, and how positions are encoded."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from kvgw.errors import FormatError
from kvgw.hfconfig import patterns, positions, states
from kvgw.hfconfig.fields import Fields
from kvgw.hfconfig.layers import (
    DERIVED,
    STANDARD,
    HeadNames,
    attention_layer,
    head_dim,
    kv_layer,
    latent_layer,
    windowed,
)
from kvgw.hfconfig.patterns import Kind, KindsRule
from kvgw.hfconfig.positions import PLAIN, PositionsRule, rope
from kvgw.hfconfig.reading import Reading
from kvgw.kvformat import LayerGroup

LayerRule: TypeAlias = Callable[[Reading], LayerGroup]
LayersRule: TypeAlias = Callable[[Reading], list[LayerGroup | None]]


@dataclass(frozen=True, slots=True)
class Family:
    """How to read one family's configs."""

    layers: LayersRule
    """One group of one layer for each layer, None for a layer without cache."""
    positions: PositionsRule


def family_of(model_type: str) -> Family:
    """The family of a model_type; for an unknown one, the reading that accepts only unmistakable configs."""
    return _FAMILIES.get(model_type, _UNKNOWN)


def _by_kind(kinds: KindsRule, full: LayerRule, state: LayerRule | None = None) -> LayersRule:
    def rule(reading: Reading) -> list[LayerGroup | None]:
        order = patterns.shared_tail(reading.fields, kinds(reading))
        used = set(order)
        groups: dict[Kind, LayerGroup | None] = {Kind.NOTHING: None}
        if used & {Kind.FULL, Kind.WINDOW}:
            groups[Kind.FULL] = full(reading)
        if Kind.WINDOW in used:
            groups[Kind.WINDOW] = windowed(reading, full(reading))
        if Kind.STATE in used:
            if state is None:
                raise FormatError(
                    f"{reading.fields.path} lists layers with a recurrent state, whose size is not known for "
                    f"model_type {reading.model_type!r}; build the KVFormat with its own LayerGroups"
                )
            groups[Kind.STATE] = state(reading)
        return [groups[kind] for kind in order]

    return rule


def _heads(names: HeadNames) -> LayerRule:
    return lambda reading: attention_layer(reading, names)


def _falcon_layer(reading: Reading) -> LayerGroup:
    """Falcon in its old and new naming; multi_query means one KV head, except in the new decoder architecture."""
    fields = reading.fields
    query = fields.integer("num_attention_heads", "n_head")
    grouped = reading.model_type == "RefinedWeb" or fields.flag_or_none("new_decoder_architecture") is True
    if grouped:
        kv_heads = fields.integer("num_kv_heads", "n_head_kv")
    elif fields.flag("multi_query"):
        kv_heads = 1
    else:
        kv_heads = query if reading.model_type == "RefinedWebModel" else fields.integer("num_kv_heads")
    names = HeadNames(query=("num_attention_heads", "n_head"), derive_head_dim=True)
    return kv_layer(reading, kv_heads, query, head_dim(fields, names))


def _bigcode_layer(reading: Reading) -> LayerGroup:
    query = reading.fields.integer("n_head")
    return kv_layer(reading, 1 if reading.fields.flag("multi_query") else query, query, head_dim(reading.fields, _GPT2))


def _gemma4_layers(reading: Reading) -> list[LayerGroup | None]:
    """Full layers have heads of their own, and may use their keys as values."""
    fields = reading.fields
    kinds = patterns.listed(reading)
    overrides = fields.mapping_or_none("per_layer_config")
    query, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    window = windowed(reading, kv_layer(reading, kv_heads, query, fields.integer("head_dim")))
    groups: list[LayerGroup | None] = []
    for index, kind in enumerate(patterns.shared_tail(fields, kinds)):
        if kind is Kind.FULL:
            heads, size = _gemma4_full_heads(fields, overrides, index)
            groups.append(_keys_as_values(reading, kv_layer(reading, heads, query, size)))
        else:
            groups.append(window if kind is Kind.WINDOW else None)
    return groups


def _gemma4_full_heads(fields: Fields, overrides: Fields | None, index: int) -> tuple[int, int]:
    """KV heads and head size of a full layer: as config.json says it, or as transformers writes it per layer."""
    kv_heads = fields.integer("num_key_value_heads")
    if overrides is None:
        if fields.flag("attention_k_eq_v"):
            kv_heads = fields.integer("num_global_key_value_heads")
        return kv_heads, fields.integer("global_head_dim")
    name = next((name for name in overrides if name.isdecimal() and int(name) == index), None)
    if name is None:
        return kv_heads, fields.integer("head_dim")
    layer = overrides.mapping(name)
    unknown = sorted(set(layer) - {"head_dim", "num_key_value_heads"})
    if unknown:
        raise FormatError(
            f"{layer.path} overrides {', '.join(unknown)}; only head_dim and num_key_value_heads are known"
        )
    return (
        layer.integer_or_none("num_key_value_heads") or kv_heads,
        layer.integer_or_none("head_dim") or fields.integer("head_dim"),
    )


def _keys_as_values(reading: Reading, layer: LayerGroup) -> LayerGroup:
    once = reading.deployment.k_eq_v_stored_once
    if not reading.fields.flag("attention_k_eq_v"):
        if once:
            raise reading.fields.wrong("attention_k_eq_v", "true where the Deployment states k_eq_v_stored_once")
        return layer
    if once is None:
        raise FormatError(
            f"{reading.fields.path}.attention_k_eq_v: whether keys that are also values are stored once or twice is "
            "the engine's; state k_eq_v_stored_once in the Deployment"
        )
    return replace(layer, v_head_dim=0) if once else layer


def _block_layers(reading: Reading) -> list[LayerGroup | None]:
    """Nemotron-NAS: every block says its own number of query heads per KV head, or that it has no attention."""
    fields = reading.fields
    blocks = fields.mappings("block_configs")
    if len(blocks) != patterns.layer_count(fields):
        raise FormatError(f"{fields.path}.block_configs has {len(blocks)} blocks, not one for each hidden layer")
    return [_block_layer(reading, block.mapping("attention")) for block in blocks]


def _block_layer(reading: Reading, attention: Fields) -> LayerGroup | None:
    if attention.flag_or_none("no_op") or attention.flag_or_none("replace_with_linear"):
        return None
    known = {"n_heads_in_group", "no_op", "replace_with_linear"}
    unknown = sorted(
        name for name in attention if name not in known and attention.canonical(name) not in ("false", 0.0)
    )
    if unknown:
        raise FormatError(f"{attention.path} sets {', '.join(unknown)}, whose effect on the cache is not known")
    query, shared = reading.fields.integer("num_attention_heads"), attention.integer("n_heads_in_group")
    if query % shared:
        raise attention.wrong("n_heads_in_group", f"a divisor of the {query} query heads")
    return kv_layer(reading, query // shared, query, head_dim(reading.fields, DERIVED))


_HINT_OF_MORE: Final = re.compile(
    "lora_rank|v_head_dim|latent|mamba|ssm|conv|linear_|swa_|window|pattern|interval|period|block_|kv_shared|shared_kv|"
    "cross_|global_|index_|compress|attention_chunk|per_layer|k_eq_v|multi_query|alibi|recurrent|retention|rwkv|encoder"
)
"""Parts of field names that go with something else than keys and values of every token in every layer."""


def _unmistakable_layers(reading: Reading) -> list[LayerGroup | None]:
    """An unknown model_type: plain attention on every layer, and no field that hints at anything else."""
    for name in reading.fields:
        if _HINT_OF_MORE.search(name) and reading.fields.says_more_than_off(name):
            raise FormatError(
                f"model_type {reading.model_type!r} is unknown, and {reading.fields.path}.{name} says that its cache "
                "is not plain attention; build the KVFormat with its own LayerGroups"
            )
    return _by_kind(patterns.all_full, _heads(STANDARD))(reading)


_GPT2 = HeadNames(query=("n_head",), kv=(), hidden=("n_embd",), derive_head_dim=True)
_GPT_NEOX = HeadNames(kv=(), derive_head_dim=True)
_BLOOM = HeadNames(
    query=("n_head", "num_attention_heads"), kv=(), hidden=("hidden_size", "n_embed"), derive_head_dim=True
)
_NEMOTRON_H = HeadNames(head_dim=("head_dim", "attention_head_dim"))
_GEMMA3_POSITIONS = positions.rope_by_layer({"theta": 1_000_000.0}, {"theta": 10_000.0})
_GEMMA4_POSITIONS = positions.rope_by_layer(
    {"partial_rotary_factor": 0.25, "theta": 1_000_000.0, "type": "proportional"}, {"theta": 10_000.0}
)
_GPT_OSS_POSITIONS = rope(
    {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096.0,
        "theta": 150_000.0,
        "truncate": "false",
        "type": "yarn",
    }
)


def _plain(names: HeadNames, theta: float = 10_000.0, kinds: KindsRule = patterns.all_full) -> Family:
    return Family(_by_kind(kinds, _heads(names)), rope({"theta": theta}))


_UNKNOWN = Family(_unmistakable_layers, rope())
_LATENT = Family(_by_kind(patterns.all_full, latent_layer), rope(PLAIN))
_FALCON = Family(_by_kind(patterns.all_full, _falcon_layer), positions.alibi_or_rope)
_GEMMA3 = Family(_by_kind(patterns.every_nth_full, _heads(STANDARD)), _GEMMA3_POSITIONS)
_GEMMA4 = Family(_gemma4_layers, _GEMMA4_POSITIONS)
_KIMI = Family(_by_kind(patterns.kimi_lists, latent_layer, states.kimi_delta_layer), positions.rope_unless_nope)
_QWEN3_5 = Family(_by_kind(patterns.interval, _heads(STANDARD), states.gated_delta_layer), rope(PLAIN))
_QWEN2_VL = _plain(DERIVED, 1_000_000.0, patterns.window_when_used)
_QWEN3_VL = _plain(STANDARD, 500_000.0)

_FAMILIES: Final[dict[str, Family]] = {
    "bloom": Family(_by_kind(patterns.all_full, _heads(_BLOOM)), positions.alibi),
    "cohere": _plain(DERIVED, 500_000.0),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "falcon": _FALCON,
    "RefinedWeb": _FALCON,
    "RefinedWebModel": _FALCON,
    "gemma": _plain(STANDARD),
    "gemma2": _plain(STANDARD, kinds=patterns.alternating),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": Family(_by_kind(patterns.listed, _heads(STANDARD)), _GEMMA3_POSITIONS),
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm4_moe": _plain(STANDARD),
    "gpt2": Family(_by_kind(patterns.all_full, _heads(_GPT2)), positions.learned),
    "gpt_bigcode": Family(_by_kind(patterns.all_full, _bigcode_layer), positions.learned),
    "gpt_neox": _plain(_GPT_NEOX),
    "gpt_oss": Family(_by_kind(patterns.listed, _heads(STANDARD)), _GPT_OSS_POSITIONS),
    "granite": _plain(DERIVED),
    "jamba": Family(_by_kind(patterns.period, _heads(DERIVED), states.mamba1_layer), positions.no_positions),
    "kimi_k2": _LATENT,
    "kimi_k3": _KIMI,
    "kimi_linear": _KIMI,
    "llama": _plain(DERIVED),
    "mistral": _plain(DERIVED, kinds=patterns.window_must_be_said),
    "mixtral": _plain(DERIVED, 1_000_000.0, patterns.window_on_all),
    "nemotron-nas": Family(_block_layers, rope(PLAIN)),
    "nemotron_h": Family(
        _by_kind(patterns.nemotron_letters, _heads(_NEMOTRON_H), states.mamba2_layer), positions.no_positions
    ),
    "olmo2": _plain(DERIVED),
    "opt": Family(_by_kind(patterns.all_full, _heads(_GPT_NEOX)), positions.learned),
    "phi3": _plain(DERIVED, kinds=patterns.window_on_all),
    "qwen2": _plain(DERIVED, kinds=patterns.window_when_used),
    "qwen2_moe": _plain(DERIVED, kinds=patterns.window_unless_used),
    "qwen2_vl": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": _plain(STANDARD, kinds=patterns.window_when_used),
    "qwen3_moe": _plain(STANDARD, kinds=patterns.window_unless_used),
    "qwen3_next": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_text": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_vl_moe_text": _QWEN3_VL,
    "starcoder2": _plain(DERIVED, kinds=patterns.window_on_all),
}
