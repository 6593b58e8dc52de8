"""The KV format of a loaded model, and the reasons why a model has none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import torch
import transformers
from blake3 import blake3
from transformers import PreTrainedModel

from kvgw.engines.transformers.identity import ModelIdentity
from kvgw.errors import FormatError
from kvgw.hfconfig import Deployment
from kvgw.kvformat import KVFormat

LAYOUT: Final = "layer,kv,head,token,dim"
"""A chunk: for each layer its keys, then its values, each [kv_heads, tokens, head_dim], row-major."""

_CONFIG_NOT_OF_BYTES: Final = ("transformers_version", "use_cache", "output_attentions", "output_hidden_states")
"""Fields of a config that change no byte of a cache, or stand in the engine's ABI already."""

_ROPE_BY_LENGTH: Final = ("dynamic", "longrope")


def format_of(model: PreTrainedModel, identity: ModelIdentity, tokens_per_chunk: int) -> KVFormat:
    """Everything that must be equal before this model may use a KV cache.

    Raises `FormatError` with the reason for a model whose cache cannot be reused by prefix, or not by this adapter.
    """
    _check_kind(model)
    _check_state(model, identity.adapter)
    config = model.config.to_dict()
    _check_positions(config)
    kv_format = KVFormat.from_hf_config(
        config,
        Deployment(
            model=identity.name,
            weights=identity.weights,
            tokenizer=identity.tokenizer,
            kv_dtype=_kv_dtype(model),
            kv_quantisation=None,
            adapter=identity.adapter,
            adapter_digest=identity.adapter_digest,
            layout=LAYOUT,
            tokens_per_chunk=tokens_per_chunk,
            engine="transformers",
            engine_abi=_engine_abi(model),
            parallel=(1, 0, 1, 0, 1, 0),
            multimodal=None,
            extra=(("config", _config_digest(config)), ("model_class", type(model).__qualname__)),
        ),
    )
    _check_groups(kv_format, config)
    return kv_format


def check_unchanged(model: PreTrainedModel, kv_format: KVFormat) -> None:
    """Raise `FormatError` when the model no longer computes what its format says: another dtype, mode or kernel."""
    _check_state(model, kv_format.adapter)
    for what, now, then in (
        ("kv_dtype", _kv_dtype(model), kv_format.kv_dtype),
        ("engine_abi", _engine_abi(model), kv_format.engine_abi),
    ):
        if now != then:
            raise FormatError(f"the model's {what} is now {now!r}, and was {then!r}; open another KVReuse for it")


def _check_kind(model: PreTrainedModel) -> None:
    """Whether a model of this kind has a cache that its token ids alone determine."""
    if not isinstance(model, PreTrainedModel):
        raise FormatError(f"{type(model).__qualname__} is not a transformers model; give the PreTrainedModel inside it")
    config = model.config
    if config.is_encoder_decoder:
        raise FormatError(
            f"{type(model).__qualname__} is an encoder-decoder: its cache also depends on the encoder's input, which "
            "no prefix of tokens names"
        )
    if config.get_text_config(decoder=True) is not config:
        raise FormatError(
            f"{type(model).__qualname__} takes more than text: its token ids do not name the images or sounds behind "
            "them; load the language model alone"
        )
    if not model.can_generate():
        raise FormatError(f"{type(model).__qualname__} cannot generate; load it as a model for causal language")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise FormatError(f"the model lies on {', '.join(devices)}; load the whole of it on one device")


def _check_state(model: PreTrainedModel, adapter: str | None) -> None:
    """What can change after the model was loaded."""
    if model.training:
        raise FormatError("the model is in training mode, where dropout changes its cache; call model.eval()")
    if getattr(model, "_hf_peft_config_loaded", False) and adapter is None:
        raise FormatError("an adapter is loaded into the model, and the identity has none; give its name and digest")


def _check_positions(config: Mapping[str, object]) -> None:
    kinds = _rope_types(config.get("rope_parameters")) | _rope_types(config.get("rope_scaling"))
    for kind in sorted(kinds.intersection(_ROPE_BY_LENGTH)):
        raise FormatError(
            f"the rotary embedding of kind {kind!r} changes its frequencies with the length of the sequence while "
            "transformers runs; the same prefix has more than one cache"
        )


def _rope_types(parameters: object) -> set[str]:
    """Kinds in rope parameters: one set for all layers, or one for each type of layer."""
    if not isinstance(parameters, Mapping):
        return set()
    kinds = {str(parameters[name]) for name in ("rope_type", "type") if name in parameters}
    return kinds.union(*map(_rope_types, parameters.values()))


def _check_groups(kv_format: KVFormat, config: Mapping[str, object]) -> None:
    groups = kv_format.attention
    first = groups[0]
    if len(groups) != 1 or first.kind != "mha" or first.v_head_dim is not None:
        kinds = ", ".join(f"{group.layers} × {group.kind}" for group in groups)
        raise FormatError(
            f"the layers of model_type {config.get('model_type')!r} keep {kinds}; only models whose layers all keep "
            "keys and values of every token, of one size, are supported"
        )
    if first.layers != config.get("num_hidden_layers", first.layers):
        raise FormatError(
            f"{first.layers} of {config['num_hidden_layers']} layers keep a cache of their own; models whose layers "
            "share caches are not supported"
        )


def _kv_dtype(model: PreTrainedModel) -> str:
    """The cache takes the element type in which the model computes."""
    return str(model.dtype).removeprefix("torch.")


def _engine_abi(model: PreTrainedModel) -> str:
    """Versions, kernels and hardware: whatever makes other bytes of the same weights and tokens."""
    if model.device.type == "cpu":
        isa = torch.backends.cpu.get_cpu_capability()
    elif model.device.type == "cuda":
        isa = torch.cuda.get_device_name(model.device)
    else:
        isa = ""
    return ";".join(
        (
            f"transformers={transformers.__version__}",
            f"torch={torch.__version__}",
            f"attention={model.config._attn_implementation}",
            f"device={model.device.type}",
            f"isa={isa}",
            f"matmul={torch.get_float32_matmul_precision()}",
        )
    )


def _config_digest(config: Mapping[str, object]) -> bytes:
    """Everything else that a config says: norms, activations, quantisation of weights, …

    Two configs that differ in a field of no effect do not share a cache: a doubt is a miss.
    """
    kept = {
        name: value for name, value in config.items() if not name.startswith("_") and name not in _CONFIG_NOT_OF_BYTES
    }
    return blake3(json.dumps(kept, sort_keys=True, default=str).encode()).digest()
