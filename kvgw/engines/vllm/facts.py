"""Reads a worker's facts out of vLLM's own configuration and tensors, and refuses what cannot be served right."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import vllm
from blake3 import blake3
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvgw.canonical import length_prefixed
from kvgw.engines.identity import MEDIA, TOKENIZER, WEIGHTS, default_digest_dir, folder_digest
from kvgw.engines.options import EngineOptions
from kvgw.engines.vllm.format import EngineFacts
from kvgw.errors import FormatError
from kvgw.kvformat import LayerGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_TORCH_NAMES: Final = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise `FormatError` for an engine whose KV cannot be reused by prefix, or not by this adapter."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise FormatError(
            f"the engine keeps {len(groups)} groups of KV caches ({kinds}), and kvgw serves models with one; for a "
            "model with windowed layers start with --disable-hybrid-kv-cache-manager, others cannot be served"
        )
    spec = groups[0].kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise FormatError(f"the engine's KV cache is a {type(spec).__name__}, and kvgw serves full attention and MLA")
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise FormatError("context parallelism spreads the tokens of a chunk over workers; kvgw does not serve it")
    if vllm_config.speculative_config is not None:
        raise FormatError("speculative decoding keeps the cache of a second model; kvgw does not serve it yet")


def read_facts(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    caches: Mapping[str, torch.Tensor],
    options: EngineOptions,
) -> EngineFacts:
    """The facts of this worker, whose caches are `caches`. Raises `FormatError` for what does not fit together."""
    model = vllm_config.model_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    layers = tuple(kv_cache_config.kv_cache_groups[0].layer_names)
    if set(layers) != set(caches):
        raise FormatError(f"the engine names {len(layers)} layers with a KV cache and registered {len(caches)} others")
    tp, pp = get_tp_group(), get_pp_group()
    first = caches[layers[0]]
    for name in layers:
        if caches[name].dtype != first.dtype or caches[name].shape != first.shape:
            raise FormatError(f"the KV cache of {name} is not like that of {layers[0]}; kvgw serves equal layers")
    parallel_config = vllm_config.parallel_config
    return EngineFacts(
        config=model.hf_config.to_dict(),
        model=options.model or model.model.rstrip("/").rsplit("/", 1)[-1],
        weights=options.weights or _identity(model.model, model.revision, WEIGHTS, options),
        tokenizer=options.tokenizer or _tokenizer(model, options),
        kv_dtype=dtype_name(first.dtype),
        cache_dtype=vllm_config.cache_config.cache_dtype,
        quantisation=model.quantization,
        group=layer_group(spec, len(layers), first.element_size()),
        layers=layers,
        block_tokens=spec.block_size,
        block_shape=tuple(first.shape[1:]),
        cache_layout=str(vllm_config.cache_config.kv_cache_layout),
        abi=_abi(vllm_config, layers, first.device),
        parallel=(tp.world_size, tp.rank_in_group, pp.world_size, pp.rank_in_group, 1, 0),
        pp_layers=model.get_layers_start_end_indices(parallel_config) if pp.world_size > 1 else None,
        max_context=model.max_model_len,
        lora=_lora(vllm_config.lora_config),
        media=_media(model, options),
    )


def layer_group(spec: FullAttentionSpec, layers: int, element_size: int) -> LayerGroup:
    """What a worker keeps in its layers, checked against the bytes that the engine gives a block."""
    per_token, rest = divmod(spec.page_size_bytes, spec.block_size * element_size)
    if isinstance(spec, MLAAttentionSpec):
        group = LayerGroup("mla", layers, latent_dim=per_token, rope_dim=0)
    else:
        heads, size, v_size = spec.num_kv_heads, spec.head_size, spec.head_size_v
        group = LayerGroup("mha", layers, kv_heads=heads, head_dim=size, v_head_dim=None if v_size == size else v_size)
    if rest or group.token_bytes(element_size) != layers * per_token * element_size:
        raise FormatError(
            f"the engine's blocks have {spec.page_size_bytes} bytes, which do not follow from {spec}; kvgw does not "
            "serve caches with paddings or scales beside them"
        )
    return group


def dtype_name(dtype: torch.dtype) -> str:
    """kvgw's name of a torch dtype."""
    name = str(dtype).removeprefix("torch.")
    return _TORCH_NAMES.get(name, name)


def digest_dir_of(options: EngineOptions) -> Path:
    """Where this machine remembers digests of files."""
    return default_digest_dir() if options.digest_dir is None else Path(options.digest_dir)


def _tokenizer(model: Any, options: EngineOptions) -> str | bytes:
    if model.skip_tokenizer_init:
        return "none: requests bring token ids"
    return _identity(model.tokenizer, model.tokenizer_revision, TOKENIZER, options)


def _identity(place: str, revision: str | None, patterns: Sequence[str], options: EngineOptions) -> str | bytes:
    """A digest of the files in a local folder, or the commit that vLLM resolved a repository's revision to."""
    if Path(place).is_dir():
        return folder_digest(Path(place), patterns, digest_dir_of(options))
    if revision is None or len(revision) != 40 or set(revision) - set("0123456789abcdef"):
        raise FormatError(
            f"{place} is no local folder, and its revision {revision!r} is no commit that would name its content; "
            "give --revision a commit, or set weights and tokenizer in kvgw's settings"
        )
    return revision


def _abi(vllm_config: VllmConfig, layers: Sequence[str], device: torch.device) -> tuple[tuple[str, str], ...]:
    modules = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layers)
    backends = sorted({module.get_attn_backend().get_name() for module in modules.values()})
    isas = sorted({str(getattr(module, "isa", "")) for module in modules.values()})
    hardware = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return (
        ("vllm", vllm.__version__),
        ("torch", torch.__version__),
        ("attention", ",".join(backends)),
        ("device", device.type),
        ("isa", ",".join(isas)),
        ("hardware", hardware),
        ("dtype", dtype_name(vllm_config.model_config.dtype)),
    )


def _media(model: Any, options: EngineOptions) -> bytes | None:
    """Digest of all that makes the model's input from an image or sound; None for a model that takes text alone."""
    config = model.multimodal_config
    if config is None:
        return None
    files = options.weights or _identity(model.model, model.revision, MEDIA, options)
    settings = json.dumps([config.mm_processor_kwargs, config.media_io_kwargs], sort_keys=True, default=str)
    parts = (settings.encode(), version("transformers").encode())
    return blake3(length_prefixed(files.encode() if isinstance(files, str) else files, *parts)).digest()


def _lora(config: Any) -> str | None:
    return None if config is None else f"dtype={config.lora_dtype};max_rank={config.max_lora_rank}"
