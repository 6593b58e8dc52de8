"""A config and the caller's statements side by side: what the rules of the model families are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgw.errors import FormatError
from kvgw.hfconfig.deployment import AsModel, Deployment
from kvgw.hfconfig.fields import Fields
from kvgw.kvformat import DTYPE_BYTES

_MODEL_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Reading:
    """`fields` are those of the language model; `top` are those around it, the same where nothing is nested."""

    top: Fields
    fields: Fields
    model_type: str
    deployment: Deployment

    @classmethod
    def of(cls, config: Mapping[str, object], deployment: Deployment) -> Reading:
        """Find the language model in `config`; refuses a config without model type, or of an encoder-decoder."""
        top = Fields(config)
        fields = top.mapping_or_none("text_config") or top
        model_type = fields.text_or_none("model_type") or top.text_or_none("model_type")
        if model_type is None:
            raise top.missing("model_type")
        for part in (top, fields):
            if part.flag_or_none("is_encoder_decoder"):
                raise FormatError(
                    f"{part.path}.is_encoder_decoder is true: the cache of an encoder-decoder also depends on the "
                    "encoder's input, which no prefix of tokens names; only decoder models are supported"
                )
        return cls(top, fields, model_type, deployment)

    def context(self) -> int | None:
        """Most tokens that a sequence can have, or None where neither the caller nor the config says."""
        return self.deployment.max_context or self.fields.integer_or_none("max_position_embeddings")

    def model_dtype(self) -> str:
        """The config's element type. It stands inside or around the language model's part, under either name."""
        found: dict[str, str] = {}
        for part in (self.fields, self.top):
            text = part.text_or_none("dtype", "torch_dtype")
            if text is not None:
                found[part.path] = text.removeprefix("torch.")
        kinds = set(found.values())
        if not kinds:
            raise self.top.missing("dtype", "torch_dtype")
        if len(kinds) > 1:
            raise FormatError(
                f"the config states two element types, {found}; state the engine's own instead of AS_MODEL"
            )
        (kind,) = kinds
        if kind not in _MODEL_DTYPES:
            raise FormatError(f"the config's dtype {kind!r} is not the type of a cache; state the engine's own type")
        return kind

    def kv_dtype(self) -> str:
        """Resolved element type of the cache. A scheme for the cache in the config must be resolved by the caller."""
        stated = self.deployment.kv_dtype
        if not isinstance(stated, AsModel):
            if stated == "auto":
                raise FormatError("kv_dtype 'auto' is not resolved; state the type, or AS_MODEL for the config's dtype")
            return stated
        scheme = self._kv_scheme()
        if scheme is not None:
            raise FormatError(
                f"the config quantises the KV cache ({scheme}), so its dtype is not the cache's; state kv_dtype as the "
                "engine resolves it"
            )
        return self.model_dtype()

    def kv_quantisation(self) -> str | None:
        """The scheme of the cache. A checkpoint's scheme must not be left out where the cache is 8 bits wide."""
        stated = self.deployment.kv_quantisation
        scheme = self._kv_scheme()
        if isinstance(stated, AsModel):
            if scheme is None:
                raise FormatError(
                    "kv_quantisation is AS_MODEL, but the config has no kv_cache_scheme; state it or None"
                )
            return scheme
        if stated is None and scheme is not None and DTYPE_BYTES.get(self.kv_dtype()) == 1:
            raise FormatError(
                f"kv_quantisation is None, but the config quantises the KV cache ({scheme}); state it, or AS_MODEL"
            )
        return stated

    def _kv_scheme(self) -> str | None:
        """The config's scheme for the KV cache as canonical text; the quantisation of weights is not looked at."""
        found: set[str] = set()
        for part in (self.fields, self.top):
            quantisation = part.mapping_or_none("quantization_config")
            if quantisation is None:
                continue
            scheme = quantisation.mapping_or_none("kv_cache_scheme")
            if scheme is not None:
                found.add(scheme.as_json())
            algorithm = quantisation.text_or_none("kv_cache_quant_algo")
            if algorithm is not None:
                found.add(algorithm)
        if len(found) > 1:
            raise FormatError(f"the config states several schemes for the KV cache, {sorted(found)}; state one of them")
        return found.pop() if found else None

    def state_dtype(self) -> str:
        """Element type of recurrent states: the caller's statement, else the config's."""
        stated = self.deployment.state_dtype
        if stated is None:
            stated = self.fields.text_or_none("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
        return self._resolve("state_dtype", stated)

    def conv_dtype(self) -> str:
        """Element type of convolution states, which no config gives."""
        return self._resolve("conv_dtype", self.deployment.conv_dtype)

    def conv_columns(self, kernel: int) -> int:
        """Columns kept of a convolution state with a kernel of `kernel` columns."""
        columns = self.deployment.conv_columns
        if columns is None or columns not in (kernel, kernel - 1):
            raise FormatError(
                f"conv_columns must be {kernel - 1} or {kernel} for a convolution over {kernel} columns, not "
                f"{columns!r}; state how many the engine keeps"
            )
        return columns

    def _resolve(self, name: str, stated: str | AsModel | None) -> str:
        if stated is None:
            raise FormatError(
                f"the config does not say the {name} of its recurrent layers; state {name} in the Deployment"
            )
        if isinstance(stated, AsModel):
            return self.model_dtype()
        if stated not in DTYPE_BYTES:
            raise FormatError(f"{name} {stated!r} is unknown; resolve it to one of {', '.join(DTYPE_BYTES)}")
        return stated
