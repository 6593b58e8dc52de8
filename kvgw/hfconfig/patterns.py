"""Which layer of a model keeps what: one `Kind` per layer, in order."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, TypeAlias

from kvgw.errors import FormatError
from kvgw.hfconfig.fields import Fields
from kvgw.hfconfig.reading import Reading


class Kind(Enum):
    """What a layer keeps."""

    FULL = "keys and values of every token"
    WINDOW = "keys and values of the last tokens"
    STATE = "a state of fixed size"
    NOTHING = "no cache: a feed-forward layer, or one that reads another layer's"


KindsRule: TypeAlias = Callable[[Reading], list[Kind]]

LAYERS_MAX: Final = 10_000
"""More layers than any model has; what a config claims beyond would be memory spent on a typing error."""

_LAYER_COUNT: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

_LAYER_TYPES: Final = {
    "full_attention": Kind.FULL,
    "attention": Kind.FULL,
    "sliding_attention": Kind.WINDOW,
    "linear_attention": Kind.STATE,
    "mamba": Kind.STATE,
    "mlp": Kind.NOTHING,
    "moe": Kind.NOTHING,
}
_NEMOTRON_LETTERS: Final = {"*": Kind.FULL, "M": Kind.STATE, "E": Kind.NOTHING, "-": Kind.NOTHING}


def layer_count(fields: Fields, *names: str) -> int:
    """The number of layers under one of `names`, or else its usual names."""
    count = fields.integer(*(names or _LAYER_COUNT))
    if count > LAYERS_MAX:
        raise FormatError(f"{fields.path} claims {count} layers; a model has at most {LAYERS_MAX}")
    return count


def stated(reading: Reading, name: str = "layer_types") -> list[Kind] | None:
    """The kinds of an explicit list with one entry per layer, which wins over every rule of a family."""
    fields = reading.fields
    texts = fields.texts_or_none(name)
    if texts is None:
        return None
    count = fields.integer_or_none(*_LAYER_COUNT)
    if count is not None and count != len(texts):
        raise FormatError(f"{fields.path}.{name} lists {len(texts)} layers, but the model has {count}")
    return [_stated_kind(reading, name, text) for text in texts]


def listed(reading: Reading) -> list[Kind]:
    """Families whose config must list its layers."""
    kinds = stated(reading)
    if kinds is None:
        raise reading.fields.missing("layer_types")
    return kinds


def all_full(reading: Reading) -> list[Kind]:
    """Families without windows; a window in their config would be of unknown reach."""
    kinds = stated(reading)
    if kinds is None and reading.fields.integer_or_none("sliding_window") is not None:
        raise reading.fields.wrong(
            "sliding_window", f"null, as {reading.model_type!r} does not say which layers would use it (layer_types)"
        )
    return kinds or [Kind.FULL] * layer_count(reading.fields)


def window_on_all(reading: Reading) -> list[Kind]:
    """Every layer has the window, if there is one."""
    window = reading.fields.integer_or_none("sliding_window")
    return stated(reading) or [Kind.FULL if window is None else Kind.WINDOW] * layer_count(reading.fields)


def window_must_be_said(reading: Reading) -> list[Kind]:
    """As `window_on_all`, for families where a config without the field has a window all the same."""
    if not reading.fields.states("sliding_window"):
        raise reading.fields.missing("sliding_window (null for none)")
    return window_on_all(reading)


def window_when_used(reading: Reading) -> list[Kind]:
    """Qwen: the window counts only with use_sliding_window, and from layer max_window_layers on."""
    kinds = stated(reading)
    if kinds is not None:
        return kinds
    count = layer_count(reading.fields)
    if not reading.fields.flag_or_none("use_sliding_window"):
        return [Kind.FULL] * count
    first = reading.fields.integer("max_window_layers", least=0)
    return [Kind.WINDOW if index >= first else Kind.FULL for index in range(count)]


def window_unless_used(reading: Reading) -> list[Kind]:
    """Mixtures of the Qwen family: without use_sliding_window all is full; with it, releases differ in the layers."""
    if reading.fields.flag_or_none("use_sliding_window"):
        return listed(reading)
    return window_when_used(reading)


def alternating(reading: Reading) -> list[Kind]:
    """Gemma 2: window, full, window, full, …"""
    return stated(reading) or _every(reading, 2, Kind.WINDOW)


def every_nth_full(reading: Reading) -> list[Kind]:
    """The last of every sliding_window_pattern layers is full, the others have the window; a rest is all windows."""
    kinds = stated(reading)
    if kinds is not None:
        return kinds
    return _every(reading, reading.fields.integer("sliding_window_pattern", "_sliding_window_pattern"), Kind.WINDOW)


def interval(reading: Reading) -> list[Kind]:
    """The last of every full_attention_interval layers is full, the others keep a state."""
    kinds = stated(reading)
    return kinds or _every(reading, reading.fields.integer("full_attention_interval"), Kind.STATE)


def period(reading: Reading) -> list[Kind]:
    """Jamba: full attention where index % attn_layer_period == attn_layer_offset, counted from 0, else a state."""
    fields = reading.fields
    length, offset = fields.integer("attn_layer_period"), fields.integer("attn_layer_offset", least=0)
    if offset >= length:
        raise fields.wrong("attn_layer_offset", f"below attn_layer_period {length}")
    count = layer_count(fields)
    return [Kind.FULL if index % length == offset else Kind.STATE for index in range(count)]


def nemotron_letters(reading: Reading) -> list[Kind]:
    """Nemotron-H: a list of names, or the older pattern with a letter per layer."""
    fields = reading.fields
    kinds = stated(reading, "layers_block_type") or stated(reading)
    if kinds is not None:
        return kinds
    pattern = fields.text_or_none("hybrid_override_pattern")
    if pattern is None:
        raise fields.missing("layers_block_type", "hybrid_override_pattern")
    unknown = sorted(set(pattern) - _NEMOTRON_LETTERS.keys())
    if unknown:
        raise fields.wrong("hybrid_override_pattern", f"made of the letters {''.join(_NEMOTRON_LETTERS)}")
    count = layer_count(fields)
    if len(pattern) != count:
        raise FormatError(f"{fields.path}.hybrid_override_pattern has {len(pattern)} layers, but the model has {count}")
    return [_NEMOTRON_LETTERS[letter] for letter in pattern]


def kimi_lists(reading: Reading) -> list[Kind]:
    """Kimi Linear: two lists of layer numbers, counted from 1, that must name every layer once."""
    kinds = stated(reading)
    if kinds is not None:
        return kinds
    count = layer_count(reading.fields)
    linear = reading.fields.mapping("linear_attn_config")
    full, states = linear.integers("full_attn_layers"), linear.integers("kda_layers")
    if sorted(full + states) != list(range(1, count + 1)):
        raise FormatError(
            f"{linear.path}: full_attn_layers and kda_layers must name each of the layers 1 to {count} once; "
            f"they have {len(full)} and {len(states)} entries"
        )
    numbers = set(full)
    return [Kind.FULL if number in numbers else Kind.STATE for number in range(1, count + 1)]


def shared_tail(fields: Fields, kinds: list[Kind]) -> list[Kind]:
    """The last num_kv_shared_layers layers read the cache of an earlier one and keep none themselves."""
    shared = fields.integer_or_none("num_kv_shared_layers", least=0) or 0
    if shared >= len(kinds):
        raise fields.wrong("num_kv_shared_layers", f"below the number of layers {len(kinds)}")
    return kinds[: len(kinds) - shared] + [Kind.NOTHING] * shared


def _every(reading: Reading, length: int, others: Kind) -> list[Kind]:
    count = layer_count(reading.fields)
    return [others if number % length else Kind.FULL for number in range(1, count + 1)]


def _stated_kind(reading: Reading, name: str, text: str) -> Kind:
    fields = reading.fields
    if text == "chunked_attention":
        # Its chunks start at fixed positions, so that what a layer keeps is no window of the last tokens.
        chunk, context = fields.integer("attention_chunk_size"), reading.context()
        if context is not None and context <= chunk:
            return Kind.FULL
        raise FormatError(
            f"{fields.path}.{name} has chunked attention over {chunk} tokens, and the context is {context}; state a "
            "max_context up to the chunk, where it is full attention"
        )
    if text not in _LAYER_TYPES:
        raise FormatError(f"{fields.path}.{name} has the unknown entry {text!r}; known are {', '.join(_LAYER_TYPES)}")
    return _LAYER_TYPES[text]
