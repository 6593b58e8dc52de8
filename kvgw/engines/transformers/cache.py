"""Between a transformers cache and the bytes of chunks: one copy in either direction, in the layout of `format`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Final

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvgw.device import copy_from_window, copy_to_window
from kvgw.errors import FormatError
from kvgw.kvformat import KVFormat

_CACHE_NAMES: Final = ("cache", "past_key_values")
"""What models call the parameter, the newer name first."""


def cache_argument(model: PreTrainedModel, cache: DynamicCache) -> dict[str, DynamicCache]:
    """`cache` under the name that this release of transformers gives the parameter.

    Raises `FormatError` for a model that takes none.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in _CACHE_NAMES:
        if name in parameters:
            return {name: cache}
    raise FormatError(f"{type(model).__qualname__}.forward has no parameter {' or '.join(_CACHE_NAMES)}")


def token_ids(input_ids: torch.Tensor | Sequence[int]) -> list[int]:
    """Token ids of one sequence: shape [n] or [1, n]. Raises `FormatError` for a batch."""
    if not isinstance(input_ids, torch.Tensor):
        return list(input_ids)
    shape = tuple(input_ids.shape)
    if len(shape) == 2 and shape[0] != 1:
        raise FormatError(f"input_ids has {shape[0]} sequences; give one at a time, without padding")
    if len(shape) not in (1, 2) or input_ids.is_floating_point():
        raise FormatError(f"input_ids must be integers of shape [n] or [1, n], not {input_ids.dtype} of {list(shape)}")
    ids: list[int] = input_ids.reshape(-1).tolist()
    return ids


def held_tokens(cache: Cache, kv_format: KVFormat) -> int:
    """Tokens whose KV `cache` holds whole, in every layer, in this format.

    Raises `FormatError` with the reason for a cache that holds something else.
    """
    if type(cache) is not DynamicCache:
        raise FormatError(f"a {type(cache).__qualname__} cannot be stored; use a DynamicCache")
    if getattr(cache, "offloading", False):
        raise FormatError("the cache moves its layers between devices (offloading), so they cannot be read at once")
    if cache.get_seq_length() == 0:
        return 0
    layers = kv_format.attention[0].layers
    if len(cache.layers) != layers:
        raise FormatError(f"the cache has {len(cache.layers)} layers, the model's format {layers}")
    tokens = int(cache.get_seq_length())
    for index, layer in enumerate(cache.layers):
        _check_layer(index, layer, tokens, kv_format)
    return tokens


def _check_layer(index: int, layer: DynamicLayer, tokens: int, kv_format: KVFormat) -> None:
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise FormatError(f"layer {index} of the cache is a {type(layer).__qualname__}, whose content is unknown here")
    kept = layer.keys.shape[-2]
    if kept < layer.get_seq_length():
        raise FormatError(
            f"layer {index} of the cache has dropped tokens: it keeps the last {kept} of {layer.get_seq_length()} "
            "(sliding window); create it as DynamicCache() without a config"
        )
    group = kv_format.attention[0]
    wanted = (1, group.kv_heads, tokens, group.head_dim)
    for name, tensor in (("keys", layer.keys), ("values", layer.values)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != wanted or dtype != kv_format.kv_dtype:
            raise FormatError(
                f"{name} of layer {index} are {dtype} of shape {list(tensor.shape)}, and the format says "
                f"{kv_format.kv_dtype} of {list(wanted)} (one sequence, KV heads, tokens, head size)"
            )


def copy_chunk_out(cache: DynamicCache, index: int, kv_format: KVFormat, window: memoryview) -> None:
    """Fill `window` (``chunk_bytes`` long) with chunk `index` of a cache that `held_tokens` has passed."""
    copy_to_window(_chunk(_pairs(cache), index, kv_format), window)


class RestoredLayers:
    """Room for the KV of `tokens` tokens in every layer, filled chunk by chunk."""

    def __init__(self, kv_format: KVFormat, tokens: int, model: PreTrainedModel) -> None:
        group = kv_format.attention[0]
        shape = (1, group.kv_heads or 0, tokens, group.head_dim or 0)
        self._format = kv_format
        self._pairs = [
            (
                torch.empty(shape, dtype=model.dtype, device=model.device),
                torch.empty(shape, dtype=model.dtype, device=model.device),
            )
            for _ in range(group.layers)
        ]

    def copy_chunk_in(self, index: int, window: memoryview) -> None:
        """Fill the tokens of chunk `index` from its bytes."""
        copy_from_window(window, _chunk(self._pairs, index, self._format))

    def cache(self, tokens: int) -> DynamicCache:
        """A cache of the first `tokens` tokens, which takes this room over without a copy."""
        cache = DynamicCache()
        for keys, values in self._pairs:
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            # `update` would concatenate with the empty tensors that it finds: another copy of everything.
            layer.keys, layer.values = keys[:, :, :tokens], values[:, :, :tokens]
            cache.layers.append(layer)
        return cache


def _pairs(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _chunk(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], index: int, kv_format: KVFormat) -> list[torch.Tensor]:
    """Views [kv_heads, tokens, head_dim] of the parts of one chunk, in the order of the layout."""
    start = index * kv_format.tokens_per_chunk
    return [part[0, :, start : start + kv_format.tokens_per_chunk] for pair in pairs for part in pair]
