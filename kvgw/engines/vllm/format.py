"""The KV format of a running vLLM worker: from what the engine itself says, down to its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from blake3 import blake3

from kvgw.canonical import Value, length_prefixed
from kvgw.engines.identity import ADAPTER, folder_digest
from kvgw.errors import FormatError
from kvgw.hfconfig import Deployment
from kvgw.kvformat import KVFormat, LayerGroup

_CONFIG_NOT_OF_BYTES: Final = ("transformers_version", "use_cache", "output_attentions", "output_hidden_states")
"""Fields of a config that change no byte of a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What one worker says of itself. Two workers whose facts differ share nothing."""

    config: Mapping[str, object]
    """The model's config, with the operator's overrides."""
    model: str
    weights: str | bytes
    tokenizer: str | bytes
    kv_dtype: str
    """Element type of the tensors that hold the cache."""
    cache_dtype: str
    """What the engine was told about it: ``auto``, ``fp8_e4m3``, …"""
    quantisation: str | None
    """Of the weights."""
    group: LayerGroup
    layers: tuple[str, ...]
    """Names of the layers of this worker, in the order of a chunk."""
    block_tokens: int
    block_shape: tuple[int, ...]
    """Shape of one block of one layer, in the engine's elements."""
    cache_layout: str
    """The engine's name for the order of dimensions in memory."""
    abi: tuple[tuple[str, str], ...]
    """Versions, kernels, instruction set: whatever makes other bytes of the same weights and tokens."""
    parallel: tuple[int, int, int, int, int, int]
    """tp_size, tp_rank, pp_size, pp_rank, cp_size, cp_rank."""
    pp_layers: tuple[int, int] | None
    max_context: int
    lora: str | None
    """How the engine computes adapters; None where it takes none."""
    media: bytes | None = None
    """Digest of how it makes the model's input from images and sounds; None where it takes text alone."""


def format_of(facts: EngineFacts, tokens_per_chunk: int) -> KVFormat:
    """Everything that must be equal before this worker may use a chunk.

    Raises `FormatError` with the reason for an engine whose cache cannot be reused.
    """
    if tokens_per_chunk % facts.block_tokens:
        raise FormatError(
            f"tokens_per_chunk is {tokens_per_chunk}, and the engine's blocks have {facts.block_tokens} tokens; "
            "give a multiple of that"
        )
    extra: dict[str, Value] = {
        "block_tokens": facts.block_tokens,
        "cache_dtype": facts.cache_dtype,
        "config": _config_digest(facts.config),
        "layers": blake3(length_prefixed(*(name.encode() for name in facts.layers))).digest(),
    }
    if facts.quantisation is not None:
        extra["weight_quantisation"] = facts.quantisation
    if facts.lora is not None:
        extra["lora"] = facts.lora
    shape = ",".join(map(str, facts.block_shape))
    stated = KVFormat.from_hf_config(
        facts.config,
        Deployment(
            model=facts.model,
            weights=facts.weights,
            tokenizer=facts.tokenizer,
            kv_dtype=facts.kv_dtype,
            kv_quantisation=None if facts.cache_dtype == "auto" else facts.cache_dtype,
            adapter=None,
            adapter_digest=None,
            layout=f"layer,block,[{shape}];{facts.cache_layout}",
            tokens_per_chunk=tokens_per_chunk,
            engine="vllm",
            engine_abi=";".join(f"{name}={value}" for name, value in facts.abi),
            parallel=facts.parallel,
            multimodal=facts.media,
            extra=tuple(extra.items()),
            max_context=facts.max_context,
            pp_layers=facts.pp_layers,
        ),
    )
    # The engine allocates for all tokens also where the config says that a layer looks back over a window only.
    return replace(stated, attention=(facts.group,))


def with_adapter(kv_format: KVFormat, name: str | None, digest: bytes | None) -> KVFormat:
    """The format of the same engine under an adapter; as it is for None."""
    return kv_format if name is None else replace(kv_format, adapter=name, adapter_digest=digest)


def adapter_digest(folder: str, digest_dir: Path | None) -> bytes:
    """Digest of the content of a LoRA adapter. Raises `FormatError` for one that is no folder of files."""
    path = Path(folder)
    if not path.is_dir():
        raise FormatError(f"the adapter {folder} is no local folder; its content cannot be told from another's")
    return folder_digest(path, ADAPTER, digest_dir)


def _config_digest(config: Mapping[str, object]) -> bytes:
    """Everything that a config says; two that differ in a field of no effect share nothing: a doubt is a miss."""
    kept = {
        name: value for name, value in config.items() if not name.startswith("_") and name not in _CONFIG_NOT_OF_BYTES
    }
    return blake3(json.dumps(kept, sort_keys=True, default=str).encode()).digest()
