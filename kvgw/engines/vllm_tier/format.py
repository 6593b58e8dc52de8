"""From vLLM's offloading configuration to the KV format of the primary tier's chunks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from blake3 import blake3

from kvgw.canonical import Value, length_prefixed
from kvgw.engines.identity import TOKENIZER, WEIGHTS, default_digest_dir, folder_digest
from kvgw.engines.vllm_tier.options import TierOptions
from kvgw.errors import FormatError
from kvgw.kvformat import CHUNK_BYTES_MAX, DTYPE_BYTES, KVFormat, LayerGroup

_ALIASES: Final = {"fp8": "fp8_e4m3"}
"""vLLM's other names of element types."""


class Group(Protocol):
    """Layers that share blocks, as vLLM describes them."""

    tokens_per_block: int
    layer_names: tuple[str, ...]
    group_id: int
    sliding_window_size_in_chunks: int | None


class Model(Protocol):
    name: str
    dtype: str
    max_model_len: int


class Cache(Protocol):
    tokens_per_hash: int
    blocks_per_chunk: int


class Parallel(Protocol):
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int


class Offloading(Protocol):
    """What is used of vLLM's ``OffloadingConfig``."""

    @property
    def groups(self) -> Sequence[Group]: ...

    @property
    def model(self) -> Model: ...

    @property
    def cache(self) -> Cache: ...

    @property
    def parallel(self) -> Parallel: ...

    worker_kv_bytes_per_block: int
    canonical_layout: bool
    kv_cache_layout: str | None


def format_of(
    config: Offloading, row_bytes: int, *, replicated: bool, options: TierOptions, abi: Sequence[tuple[str, str]]
) -> KVFormat:
    """Everything that must be equal before a chunk may be reused.

    `row_bytes`: bytes of one chunk in the primary tier, of all workers and with vLLM's padding. `replicated`: the
    workers hold the same bytes, and the primary tier one copy. `abi`: versions. Raises `FormatError` with the reason
    for an engine whose chunks are not kept.
    """
    group = _one_group(config)
    if row_bytes > CHUNK_BYTES_MAX:
        raise FormatError(
            f"a chunk of the primary tier has {row_bytes} bytes, over the limit of {CHUNK_BYTES_MAX}; set a smaller "
            "'block_size' in kv_connector_extra_config"
        )
    parallel = config.parallel
    dtype = _ALIASES.get(config.model.dtype, config.model.dtype)
    extra: dict[str, Value] = {
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "compatibility": options.compatibility,
        "dcp": parallel.dcp_size,
        "group": group.group_id,
        "layers": blake3(length_prefixed(*(name.encode() for name in group.layer_names))).digest(),
        "max_model_len": config.model.max_model_len,
        "pcp": parallel.pcp_size,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "worker_bytes": config.worker_kv_bytes_per_block,
        "world_size": parallel.world_size,
    }
    return KVFormat(
        model=options.model or config.model.name.rstrip("/").rsplit("/", 1)[-1],
        weights=options.weights or _digest(config.model.name, WEIGHTS, "weights", options),
        tokenizer=options.tokenizer or _digest(config.model.name, TOKENIZER, "tokenizer", options),
        kv_dtype=dtype if dtype in DTYPE_BYTES else "uint8",
        kv_quantisation=None if config.model.dtype in DTYPE_BYTES else config.model.dtype,
        adapter=None,  # the adapter's name is in the keys, which are vLLM's block hashes
        adapter_digest=None,
        positions=("kind", "of the weights"),
        # vLLM does not say what is what inside a row.
        attention=(LayerGroup("state", 1, state_bytes=row_bytes),),
        layout=f"worker,layer,block;{config.kv_cache_layout};canonical={config.canonical_layout};single={replicated}",
        tokens_per_chunk=group.tokens_per_block * config.cache.blocks_per_chunk,
        engine="vllm-tier",
        engine_abi=";".join(f"{part}={value}" for part, value in abi),
        parallel=(parallel.tp_size, 0, parallel.pp_size, 0, 1, 0),  # a row holds all ranks
        multimodal=None,
        extra=tuple(extra.items()),
    )


def engine_key(key: bytes, salt: bytes) -> bytes:
    """The engine key of a chunk that vLLM calls `key`; different wherever the salt is."""
    return blake3(length_prefixed(key, salt)).digest() if salt else key


def _one_group(config: Offloading) -> Group:
    """The only group of layers. Raises `FormatError` where there are others, or where it only looks back so far."""
    if len(config.groups) != 1:
        # Groups share the primary tier's rows, and each fills its part of one: the rest would be another tenant's.
        raise FormatError(
            f"the engine keeps {len(config.groups)} groups of KV caches, and kvgw's tier serves models with one; for a "
            "model with windowed layers start with --disable-hybrid-kv-cache-manager, others cannot be served"
        )
    (group,) = config.groups
    if group.sliding_window_size_in_chunks is not None:
        raise FormatError(
            "the layers of this model look back over a window or keep a state, and kvgw's tier serves full attention "
            "and MLA"
        )
    return group


def _digest(place: str, patterns: Sequence[str], setting: str, options: TierOptions) -> bytes:
    folder = Path(place)
    if not folder.is_dir():
        raise FormatError(
            f"kvgw's tier needs {setting!r}: {place} is no local folder whose files could be read, and vLLM does not "
            "tell a tier the revision; give the commit"
        )
    digests = default_digest_dir() if options.digest_dir is None else Path(options.digest_dir)
    return folder_digest(folder, patterns, digests)
