"""The cache of one attention layer on one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgw.errors import FormatError
from kvgw.hfconfig.fields import Fields
from kvgw.hfconfig.reading import Reading
from kvgw.kvformat import LayerGroup


@dataclass(frozen=True, slots=True)
class HeadNames:
    """Under which names a family's config gives the heads of its attention."""

    query: tuple[str, ...] = ("num_attention_heads",)
    kv: tuple[str, ...] = ("num_key_value_heads",)
    """Empty: the family has as many KV heads as query heads."""
    hidden: tuple[str, ...] = ("hidden_size",)
    head_dim: tuple[str, ...] = ("head_dim",)
    derive_head_dim: bool = False
    """Whether a missing head_dim means hidden size / query heads. Many families have another default."""


STANDARD = HeadNames()
DERIVED = HeadNames(derive_head_dim=True)


def attention_layer(reading: Reading, names: HeadNames = STANDARD) -> LayerGroup:
    """One layer of MHA, GQA or MQA."""
    query = reading.fields.integer(*names.query)
    kv_heads = reading.fields.integer(*names.kv) if names.kv else query
    return kv_layer(reading, kv_heads, query, head_dim(reading.fields, names))


def kv_layer(reading: Reading, kv_heads: int, query_heads: int, head_dim: int) -> LayerGroup:
    """One layer with `kv_heads` heads over all ranks, shared by `query_heads`."""
    if query_heads % kv_heads:
        raise FormatError(
            f"{reading.fields.path} has {query_heads} query heads, which {kv_heads} KV heads do not divide; "
            "one of the two is wrong"
        )
    return LayerGroup(
        "mha", 1, kv_heads=rank_heads("KV heads", kv_heads, reading.deployment.tp_size), head_dim=head_dim
    )


def head_dim(fields: Fields, names: HeadNames) -> int:
    stated = fields.integer_or_none(*names.head_dim)
    if stated is not None:
        return stated
    if not names.derive_head_dim:
        raise fields.missing(*names.head_dim)
    hidden, query = fields.integer(*names.hidden), fields.integer(*names.query)
    if hidden % query:
        raise FormatError(
            f"{fields.path} has no head_dim, and {query} heads do not divide its hidden size {hidden}; add head_dim"
        )
    return hidden // query


def latent_layer(reading: Reading) -> LayerGroup:
    """One layer of multi-head latent attention; each tensor-parallel rank keeps the whole latent vector."""
    if reading.fields.integer_or_none("index_head_dim") is not None:
        raise FormatError(
            f"{reading.fields.path}.index_head_dim: the layers' indexers keep keys of their own, whose element type "
            "and scales the config does not say; build the KVFormats of both with their own LayerGroups"
        )
    latent, rope = reading.fields.integer("kv_lora_rank"), reading.fields.integer("qk_rope_head_dim", least=0)
    return LayerGroup("mla", 1, latent_dim=latent, rope_dim=rope)


def windowed(reading: Reading, layer: LayerGroup) -> LayerGroup:
    """`layer` with the config's sliding window; one that no sequence can fill is full attention."""
    window = reading.fields.integer("sliding_window")
    context = reading.context()
    if context is not None and window >= context:
        return layer
    return replace(layer, kind="window", window=window)


def rank_heads(name: str, heads: int, tp_size: int) -> int:
    """Heads of one tensor-parallel rank: an equal part, or one that several ranks repeat."""
    if heads % tp_size == 0:
        return heads // tp_size
    if tp_size % heads == 0:
        return 1
    raise FormatError(
        f"{heads} {name} neither divide among nor repeat evenly over tp_size {tp_size}; which of them a rank keeps "
        "is the engine's choice: build the KVFormat of the rank with its own LayerGroups"
    )


def rank_part(name: str, count: int, tp_size: int) -> int:
    """Equal part of `count` for one tensor-parallel rank."""
    if count % tp_size:
        raise FormatError(f"{name} {count} does not divide among tp_size {tp_size}")
    return count // tp_size
