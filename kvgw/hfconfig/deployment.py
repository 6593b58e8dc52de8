"""What a model's config does not say about its KV cache, stated by the caller."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvgw.canonical import Value
from kvgw.errors import FormatError


class AsModel(Enum):
    """The caller's statement that the engine takes a value from the model's config."""

    AS_MODEL = "as the model"


AS_MODEL: Final = AsModel.AS_MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One engine's use of a model, as one of its ranks sees it.

    The first fields are those of `KVFormat` and always required; the others decide only some models, where None means
    "not stated" and is refused as soon as it would decide the geometry. Raises `FormatError` for a malformed field.
    """

    model: str
    weights: str | bytes
    tokenizer: str | bytes
    kv_dtype: str | AsModel
    """Resolved element type, or `AS_MODEL`: the config's ``dtype``. The quantisation of weights says nothing of it."""
    kv_quantisation: str | AsModel | None
    """Scheme with its parameters, None for none, or `AS_MODEL`: the config's scheme for the KV cache."""
    adapter: str | None
    adapter_digest: bytes | None
    layout: str
    tokens_per_chunk: int
    engine: str
    engine_abi: str
    parallel: tuple[int, int, int, int, int, int]
    multimodal: str | bytes | None
    extra: tuple[tuple[str, Value], ...]

    max_context: int | None = None
    """Most tokens of a sequence that the engine is opened for. Decides which frequencies a length-dependent rope uses,
    and whether a window can ever be filled. An engine that switches frequencies while it runs needs one format for
    each side of the switch."""
    state_dtype: str | AsModel | None = None
    """Element type of recurrent states; None: as the config says, where it does."""
    conv_dtype: str | AsModel | None = None
    """Element type of the convolution states of recurrent layers."""
    conv_columns: int | None = None
    """Columns kept of a convolution state: its kernel's length, or one less. Engines differ."""
    k_eq_v_stored_once: bool | None = None
    """For layers whose values are their keys: whether the engine stores them once."""
    count_mtp_layers: bool = False
    """Whether the multi-token prediction layers keep a cache too; they do only where they are used for drafts."""
    pp_layers: tuple[int, int] | None = None
    """First layer of this pipeline rank and the one after its last, counted from 0 with prediction layers at the end;
    needed exactly when pp_size is above 1."""

    def __post_init__(self) -> None:
        _check_parallel(self.parallel)
        for name in ("max_context", "conv_columns"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and 1 <= value < 2**32):
                raise FormatError(f"{name} must be a positive integer or None, not {value!r}")
        if self.k_eq_v_stored_once is not None and type(self.k_eq_v_stored_once) is not bool:
            raise FormatError(f"k_eq_v_stored_once must be True, False or None, not {self.k_eq_v_stored_once!r}")
        if type(self.count_mtp_layers) is not bool:
            raise FormatError(f"count_mtp_layers must be True or False, not {self.count_mtp_layers!r}")
        if (self.pp_layers is None) != (self.pp_size == 1):
            raise FormatError(
                f"pp_layers must name this rank's layers exactly when pp_size is above 1: pp_size is {self.pp_size}, "
                f"pp_layers {self.pp_layers!r}"
            )

    @property
    def tp_size(self) -> int:
        return self.parallel[0]

    @property
    def pp_size(self) -> int:
        return self.parallel[2]


def _check_parallel(parallel: tuple[int, ...]) -> None:
    numbers = isinstance(parallel, tuple) and len(parallel) == 6 and all(type(number) is int for number in parallel)
    if not numbers or min(parallel[::2]) < 1:
        raise FormatError(f"parallel must be tp, pp and cp with size (from 1) and rank each, not {parallel!r}")
    if parallel[4] > 1:
        raise FormatError(
            f"cp_size {parallel[4]} is not supported: which tokens of a chunk a context-parallel rank keeps does not "
            "follow from the config; build the KVFormat of the rank with its own LayerGroups"
        )
