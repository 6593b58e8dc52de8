"""How a model encodes positions, as the `positions` field of a `KVFormat`.

Everything that a config says about its rotary embedding is kept, under sorted names, numbers as floats. The layouts of
old and new configs (``rope_theta`` and ``rope_scaling`` beside each other, or ``rope_parameters``) give the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from kvgw.canonical import Value
from kvgw.errors import FormatError
from kvgw.hfconfig.fields import Fields
from kvgw.hfconfig.reading import Reading

Positions: TypeAlias = tuple[Value, ...]
PositionsRule: TypeAlias = Callable[[Reading], Positions]

FULL_LAYERS: Final = "full_attention"
WINDOW_LAYERS: Final = "sliding_attention"

PLAIN: Final[Mapping[str, Value]] = {"theta": 10_000.0}

_NESTED: Final = ("rope_parameters", "rope_scaling")
_NOT_POSITIONS: Final = ("qk_rope_head_dim", "qk_nope_head_dim")
_WITHOUT_ROPE_IN_NAME: Final = ("partial_rotary_factor", "original_max_position_embeddings", "mrope_section")
_THETA_NAMES: Final = ("rope_theta", "rotary_emb_base", "rotary_base")
_OLD_KINDS: Final = {"su": "longrope", "mrope": "default"}
"""Older names of kinds. What sets mrope apart is its section."""
_SCALED_BY_CONTEXT: Final = ("dynamic", "longrope")
_UNSCALED: Final = ("default", "linear", "proportional")
"""Kinds whose frequencies follow from their own fields alone."""


def no_positions(reading: Reading) -> Positions:
    """Models whose layers see no positions but the order of the tokens."""
    return ("kind", "none")


def learned(reading: Reading) -> Positions:
    """A table of learned embeddings, whose content belongs to the weights."""
    length = reading.fields.integer("n_positions", "max_position_embeddings")
    return ("kind", "learned", "length", float(length))


def alibi(reading: Reading) -> Positions:
    """Linear biases by distance, which the number of heads determines."""
    return ("kind", "alibi")


def alibi_or_rope(reading: Reading) -> Positions:
    """Falcon: one or the other."""
    return alibi(reading) if reading.fields.flag("alibi") else rope(PLAIN)(reading)


def rope_unless_nope(reading: Reading) -> Positions:
    """Kimi Linear: its attention may leave its rotary part unrotated."""
    return no_positions(reading) if reading.fields.flag("mla_use_nope") else rope(PLAIN)(reading)


def rope(defaults: Mapping[str, Value] | None = None) -> PositionsRule:
    """Rotary embedding; `defaults` is what transformers takes where a config of the family is silent (None: refuse)."""

    def rule(reading: Reading) -> Positions:
        by_layer = _collect(reading.fields)
        outer = by_layer.pop("", {})
        if not by_layer:
            return _encoded(reading, {"": _filled(reading, outer, defaults)})
        if "theta" not in outer:
            by_layer = {layer_type: _filled(reading, inner, defaults) for layer_type, inner in by_layer.items()}
        return _encoded(reading, {"": outer, **by_layer})

    return rule


def rope_by_layer(full: Mapping[str, Value], window: Mapping[str, Value]) -> PositionsRule:
    """Gemma: full and window layers differ; the arguments are what transformers takes where the config is silent."""

    def rule(reading: Reading) -> Positions:
        by_layer = _collect(reading.fields)
        outer = by_layer.pop("", {})
        if by_layer:
            by_layer = {layer_type: _filled(reading, inner, None) for layer_type, inner in by_layer.items()}
            return _encoded(reading, {"": outer, **by_layer})
        # Older configs: one set of fields for the full layers, and a lone base frequency for those with a window.
        local = {**window, "theta": outer.pop("rope_local_base_freq", window["theta"])}
        return _encoded(reading, {FULL_LAYERS: _filled(reading, outer, full), WINDOW_LAYERS: local})

    return rule


def _filled(reading: Reading, values: dict[str, Value], defaults: Mapping[str, Value] | None) -> dict[str, Value]:
    """`values` with the family's base frequency, and with all its defaults where no kind of scaling is stated."""
    if defaults is None:
        if "theta" not in values:
            raise reading.fields.missing("rope_theta")
        return values
    return {"theta": defaults["theta"], **values} if "type" in values else {**defaults, **values}


def _collect(fields: Fields) -> dict[str, dict[str, Value]]:
    """Everything about rotary embeddings by layer type; under "" what holds for all layers."""
    collected: dict[str, dict[str, Value]] = {}
    for name in fields:
        if name in _NESTED:
            nested = fields.mapping(name)
            for inner in nested:
                _check_name(nested, inner)
                if nested.nests(inner):
                    by_layer = nested.mapping(inner)
                    for key in by_layer:
                        _put(by_layer, collected.setdefault(inner, {}), key, by_layer.canonical(key))
                else:
                    _put(nested, collected.setdefault("", {}), inner, nested.canonical(inner))
        elif name not in _NOT_POSITIONS and ("rope" in name or "rotary" in name or name in _WITHOUT_ROPE_IN_NAME):
            _put(fields, collected.setdefault("", {}), name, fields.canonical(name))
    return collected


def _check_name(fields: Fields, name: str) -> None:
    if "." in name:
        raise FormatError(f"{fields.path} has a field name {name!r} with a dot, which could be mistaken for nesting")


def _put(fields: Fields, values: dict[str, Value], name: str, value: Value) -> None:
    """Keep one value under its modern name; refuses a second, different value."""
    _check_name(fields, name)
    if name in _THETA_NAMES:
        name = "theta"
    elif name in ("type", "rope_type"):
        if not isinstance(value, str):
            raise fields.wrong(name, "the name of a kind of rotary embedding")
        if value == "mrope" and not fields.states("mrope_section"):
            raise fields.missing("mrope_section")
        name, value = "type", _OLD_KINDS.get(value, value)
    elif name == "rotary_pct":
        name = "partial_rotary_factor"
    if values.setdefault(name, value) != value:
        raise FormatError(
            f"{fields.path} contradicts itself in its positions: {name} is {values[name]!r} and {value!r}"
        )


def _encoded(reading: Reading, by_layer: dict[str, dict[str, Value]]) -> Positions:
    flat: dict[str, Value] = {}
    for layer_type, values in by_layer.items():
        prefix = f"{layer_type}." if layer_type else ""
        for name, value in _completed(reading, values).items():
            flat[prefix + name] = value
    return ("kind", "rope", *(part for name in sorted(flat) for part in (name, flat[name])))


def _completed(reading: Reading, values: dict[str, Value]) -> dict[str, Value]:
    """Add what decides the frequencies from outside, and leave out the kind that means nothing special."""
    kind = values.get("type", "default")
    complete = {name: value for name, value in values.items() if (name, value) != ("type", "default")}
    if kind in _UNSCALED:
        return complete
    limit = reading.fields.integer_or_none("max_position_embeddings")
    if limit is not None:
        _put(reading.fields, complete, "max_position_embeddings", float(limit))
    if kind in _SCALED_BY_CONTEXT:
        _put(reading.fields, complete, *_by_context(reading, str(kind), complete))
    return complete


def _by_context(reading: Reading, kind: str, values: dict[str, Value]) -> tuple[str, Value]:
    """What the length that the engine is opened for decides: the set of factors, or the frequencies themselves."""
    context = reading.deployment.max_context
    if context is None:
        raise FormatError(
            f"a rotary embedding of kind {kind!r} depends on the length that the engine is opened for; state "
            "max_context in the Deployment"
        )
    if kind == "dynamic":
        return "max_context", float(context)
    original = values.get("original_max_position_embeddings")
    if not isinstance(original, float):
        raise reading.fields.missing("original_max_position_embeddings")
    return "factors", "long" if context > original else "short"
