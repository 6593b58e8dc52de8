"""From a config and a `Deployment` to layer groups and the `KVFormat`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from kvgw.canonical import Value
from kvgw.errors import FormatError
from kvgw.hfconfig.deployment import Deployment
from kvgw.hfconfig.families import family_of
from kvgw.hfconfig.patterns import layer_count
from kvgw.hfconfig.reading import Reading
from kvgw.kvformat import KVFormat, LayerGroup


def layer_groups(config: Mapping[str, object], deployment: Deployment) -> tuple[LayerGroup, ...]:
    """What one rank keeps, alike layers together in the order of their first layer.

    The sum of their `run_bytes` is the capacity that a sequence needs, also where a chunk would be too large to store.
    Raises `FormatError` naming what the config leaves open or contradicts.
    """
    return _grouped(Reading.of(config, deployment))


def format_from_hf_config(config: Mapping[str, object], deployment: Deployment) -> KVFormat:
    """The KV format of `deployment` for the model whose ``config.json`` (or ``config.to_dict()``) is `config`.

    Raises `FormatError` naming what the config leaves open or contradicts, or what the deployment must state.
    """
    reading = Reading.of(config, deployment)
    groups = _grouped(reading)
    kv_format = KVFormat(
        model=deployment.model,
        weights=deployment.weights,
        tokenizer=deployment.tokenizer,
        kv_dtype=reading.kv_dtype(),
        kv_quantisation=reading.kv_quantisation(),
        adapter=deployment.adapter,
        adapter_digest=deployment.adapter_digest,
        positions=family_of(reading.model_type).positions(reading),
        attention=groups,
        layout=deployment.layout,
        tokens_per_chunk=deployment.tokens_per_chunk,
        engine=deployment.engine,
        engine_abi=deployment.engine_abi,
        parallel=deployment.parallel,
        multimodal=deployment.multimodal,
        extra=_extra(reading, groups),
    )
    kv_format.canonical()  # refuses texts of the config that have no canonical form here, not at their first use
    return kv_format


def _grouped(reading: Reading) -> tuple[LayerGroup, ...]:
    layers = family_of(reading.model_type).layers(reading)
    layers = [*layers, *_mtp_layers(reading, layers)]
    if reading.deployment.pp_layers is not None:
        layers = _of_pipeline_rank(layers, reading.deployment.pp_layers)
    counts = Counter(layer for layer in layers if layer is not None)
    if not counts:
        raise FormatError(f"none of the {len(layers)} layers of this rank keeps a cache; there is nothing to store")
    return tuple(replace(layer, layers=count) for layer, count in counts.items())


def _mtp_layers(reading: Reading, layers: list[LayerGroup | None]) -> list[LayerGroup | None]:
    """The layers for multi-token prediction, where asked for; they are like the model's own attention layers."""
    if not reading.deployment.count_mtp_layers:
        return []
    count = layer_count(reading.fields, "num_nextn_predict_layers", "mtp_num_hidden_layers")
    kinds = {layer for layer in layers if layer is not None}
    if len(kinds) != 1 or None in layers:
        raise FormatError(
            f"the {count} prediction layers of model_type {reading.model_type!r} keep an unknown cache, as its layers "
            "are not all alike; build the KVFormat with its own LayerGroups"
        )
    return [kinds.pop()] * count


def _of_pipeline_rank(layers: list[LayerGroup | None], bounds: tuple[int, int]) -> list[LayerGroup | None]:
    whole = isinstance(bounds, tuple) and len(bounds) == 2 and all(type(bound) is int for bound in bounds)
    if not whole or not 0 <= bounds[0] < bounds[1] <= len(layers):
        raise FormatError(
            f"pp_layers must be a non-empty part of the {len(layers)} layers as (first, one after last), not {bounds!r}"
        )
    return layers[bounds[0] : bounds[1]]


def _extra(reading: Reading, groups: tuple[LayerGroup, ...]) -> tuple[tuple[str, Value], ...]:
    """The caller's pairs, and those statements that change bytes but not, or not always, their number."""
    pairs = list(reading.deployment.extra)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and type(pair[0]) is str for pair in pairs):
        raise FormatError(f"extra must be pairs of a name and a value, not {reading.deployment.extra!r:.200}")
    if reading.deployment.pp_layers is not None:
        pairs.append(("pp_layers", reading.deployment.pp_layers))
    if any(group.kind == "state" for group in groups):
        pairs.append(("conv_columns", reading.deployment.conv_columns))
        pairs.append(("conv_dtype", reading.conv_dtype()))
        pairs.append(("state_dtype", reading.state_dtype()))
    return tuple(sorted(pairs, key=lambda pair: pair[0]))
