"""Between a transformers cache and the bytes of chunks: one copy in either direction, in the layout of `format`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvgw.device import copy_from_window, copy_to_window
from kvgw.errors import FormatError
from kvgw.kvformat import KVFormat

_CACHE_NAMES: Final = ("cache", "past_key_values")
"""What models call the parameter, the newer name first."""

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [1, kv_heads, tokens, head_dim]."""


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


class Layers:
    """Keys and values of a run of tokens in every layer of a model: those of a cache, or room for those of one."""

    def __init__(self, kv_format: KVFormat, tokens: int, pairs: Sequence[Pair]) -> None:
        self.tokens = tokens
        self._format = kv_format
        self._pairs = pairs

    @classmethod
    def of(cls, cache: Cache, kv_format: KVFormat) -> Layers:
        """What `cache` holds, seen in place.

        Raises `FormatError` with the reason for a cache that does not hold every token of one sequence in this format.
        """
        if type(cache) is not DynamicCache:
            raise FormatError(f"a {type(cache).__qualname__} cannot be stored; use a DynamicCache")
        if getattr(cache, "offloading", False):
            raise FormatError("the cache moves its layers between devices (offloading); create it without")
        tokens = int(cache.get_seq_length())
        if tokens == 0:
            return cls(kv_format, 0, ())
        layers = kv_format.attention[0].layers
        if len(cache.layers) != layers:
            raise FormatError(f"the cache has {len(cache.layers)} layers, and the model's format says {layers}")
        pairs = [_read_layer(index, layer, tokens, kv_format) for index, layer in enumerate(cache.layers)]
        return cls(kv_format, tokens, pairs)

    @classmethod
    def empty(cls, kv_format: KVFormat, tokens: int, model: PreTrainedModel) -> Layers:
        """Room for the KV of `tokens` tokens on the model's device, not initialised."""
        shape = _shape(kv_format, tokens)
        tensors = [
            torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(2 * kv_format.attention[0].layers)
        ]
        return cls(kv_format, tokens, list(zip(tensors[::2], tensors[1::2], strict=True)))

    def copy_chunk_out(self, index: int, window: memoryview) -> None:
        """Fill `window`, of exactly ``chunk_bytes`` bytes, with chunk `index`."""
        copy_to_window(self._chunk(index), window)

    def copy_chunk_in(self, index: int, window: memoryview) -> None:
        """Fill chunk `index` from its bytes."""
        copy_from_window(window, self._chunk(index))

    def as_cache(self, tokens: int) -> DynamicCache:
        """A cache of the first `tokens` tokens, which takes this memory over without a copy."""
        cache = DynamicCache()
        for keys, values in self._pairs:
            layer = DynamicLayer()  # type: ignore[no-untyped-call]
            layer.lazy_initialization(keys, values)
            # `update` would concatenate with the empty tensors that it finds: another copy of everything.
            layer.keys, layer.values = keys[:, :, :tokens], values[:, :, :tokens]
            cache.layers.append(layer)
        return cache

    def _chunk(self, index: int) -> list[torch.Tensor]:
        """Views [kv_heads, tokens, head_dim] of the parts of a chunk, in the order of the layout."""
        start = index * self._format.tokens_per_chunk
        end = start + self._format.tokens_per_chunk
        return [part[0, :, start:end] for pair in self._pairs for part in pair]


def _read_layer(index: int, layer: object, tokens: int, kv_format: KVFormat) -> Pair:
    """Keys and values of layer `index`, which must hold `tokens` tokens."""
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise FormatError(f"layer {index} of the cache is a {type(layer).__qualname__}, whose content is unknown here")
    assert isinstance(layer, DynamicLayer)
    keys, values = layer.keys, layer.values
    if keys is None or values is None:
        raise FormatError(f"layer {index} of the cache is empty, and layer 0 holds {tokens} tokens")
    if keys.shape[-2] < layer.get_seq_length():
        raise FormatError(
            f"layer {index} of the cache has dropped tokens: it keeps the last {keys.shape[-2]} of "
            f"{layer.get_seq_length()} (sliding window); create it as DynamicCache() without a config"
        )
    wanted = _shape(kv_format, tokens)
    for name, tensor in (("keys", keys), ("values", values)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != wanted or dtype != kv_format.kv_dtype:
            raise FormatError(
                f"{name} of layer {index} are {dtype} of shape {list(tensor.shape)}, and the format says "
                f"{kv_format.kv_dtype} of {list(wanted)} (one sequence, KV heads, tokens, head size)"
            )
    return keys, values


def _shape(kv_format: KVFormat, tokens: int) -> tuple[int, int, int, int]:
    group = kv_format.attention[0]
    assert group.kv_heads is not None
    assert group.head_dim is not None
    return 1, group.kv_heads, tokens, group.head_dim
