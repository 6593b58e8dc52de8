"""KV format: everything that must be equal before KV bytes may be reused.

`KVFormat` is a frozen value whose canonical form (``docs/formats.md``, "Canonical KV format") is hashed
by the gateway into a fingerprint. Every field is required and "none" is said explicitly, so that a field that
was forgotten is an error and never a wrong hit. The layer groups also fix the exact length of a chunk.

Raises `FormatError` for a value that cannot be part of a format, naming the field and the value.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from kvgw import canonical
from kvgw.canonical import Value
from kvgw.errors import FormatError

if TYPE_CHECKING:
    from kvgw.hfconfig import Deployment

CHUNK_BYTES_MAX: Final = 256 * 1024 * 1024
"""Largest chunk in bytes that the gateway stores."""

CANONICAL_BYTES_MAX: Final = 256 * 1024
"""Largest canonical form that the gateway reads."""

DTYPE_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element of each resolved KV dtype."""

GROUP_KINDS: Final = ("mha", "mla", "window", "state")

_NAME_LENGTH_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same kind of cache. A field that does not apply to the kind is None.

    kind ``mha`` (also GQA and MQA): kv_heads, head_dim, v_head_dim (None: as head_dim; 0: K and V stored once).
    kind ``mla``: latent_dim, rope_dim. kind ``window``: as ``mha``, and window in tokens.
    kind ``state``: state_bytes, the bytes of one layer's recurrent state.
    """

    kind: str
    layers: int
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    latent_dim: int | None = None
    rope_dim: int | None = None
    window: int | None = None
    state_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in GROUP_KINDS:
            raise FormatError(f"attention kind {self.kind!r} is unknown; use one of {', '.join(GROUP_KINDS)}")
        needed = {
            "mha": {"kv_heads", "head_dim"},
            "mla": {"latent_dim", "rope_dim"},
            "window": {"kv_heads", "head_dim", "window"},
            "state": {"state_bytes"},
        }[self.kind]
        optional = {"v_head_dim"} if self.kind in ("mha", "window") else set()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "kind":
                continue
            wanted = field.name == "layers" or field.name in needed
            if wanted and value is None:
                raise FormatError(f"attention group {self.kind!r} needs {field.name}")
            if not wanted and field.name not in optional and value is not None:
                raise FormatError(f"attention group {self.kind!r} has no {field.name}; it must be None, not {value!r}")
            least = 0 if field.name in ("v_head_dim", "rope_dim") else 1
            if value is not None and not (type(value) is int and least <= value < 2**32):
                raise FormatError(f"attention {field.name} must be an integer from {least} to 2**32-1, not {value!r}")

    def token_bytes(self, dtype_bytes: int) -> int:
        """Bytes that one token adds to this group (0 for ``state``)."""
        if self.kind == "state":
            return 0
        if self.kind == "mla":
            return self.layers * ((self.latent_dim or 0) + (self.rope_dim or 0)) * dtype_bytes
        head_dim = self.head_dim or 0
        v_head_dim = head_dim if self.v_head_dim is None else self.v_head_dim
        return self.layers * (self.kv_heads or 0) * (head_dim + v_head_dim) * dtype_bytes

    def run_bytes(self, tokens: int, dtype_bytes: int) -> int:
        """Bytes that this group keeps for a run of `tokens`: a window keeps its last tokens, a state one snapshot."""
        if self.kind == "state":
            return self.layers * (self.state_bytes or 0)
        kept = min(tokens, self.window) if self.window is not None else tokens
        return kept * self.token_bytes(dtype_bytes)

    def values(self) -> tuple[Value, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """All that decides the bytes of a chunk and whether they may be reused; field numbers as in the format page."""

    model: str
    weights: str | bytes
    """Digest of the weights (bytes) or an immutable revision (text)."""
    tokenizer: str | bytes
    kv_dtype: str
    """Resolved element type of the cache, a key of `DTYPE_BYTES`: never "auto"."""
    kv_quantisation: str | None
    adapter: str | None
    adapter_digest: bytes | None
    positions: tuple[Value, ...]
    """Alternating name and value: ``("kind", "rope", "theta", 100000.0)``; names sorted after the leading kind."""
    attention: tuple[LayerGroup, ...]
    layout: str
    """Order of the dimensions in memory, or the engine's page encoding."""
    tokens_per_chunk: int
    engine: str
    engine_abi: str
    """Whatever of the engine changes bytes: version, attention backend, instruction set."""
    parallel: tuple[int, int, int, int, int, int]
    """tp_size, tp_rank, pp_size, pp_rank, cp_size, cp_rank."""
    multimodal: str | bytes | None
    extra: tuple[tuple[str, Value], ...]
    """Further name/value pairs, sorted by name."""

    def __post_init__(self) -> None:
        for field in ("model", "kv_dtype", "layout", "engine", "engine_abi"):
            _check_text(field, getattr(self, field))
        for field in ("kv_quantisation", "adapter"):
            if getattr(self, field) is not None:
                _check_text(field, getattr(self, field))
        for field in ("weights", "tokenizer"):
            _check_identity(field, getattr(self, field))
        if self.multimodal is not None:
            _check_identity("multimodal", self.multimodal)
        if self.kv_dtype not in DTYPE_BYTES:
            raise FormatError(f"kv_dtype {self.kv_dtype!r} is unknown; resolve it to one of {', '.join(DTYPE_BYTES)}")
        if (self.adapter is None) != (self.adapter_digest is None):
            raise FormatError("adapter and adapter_digest go together: give both, or None for both")
        if self.adapter_digest is not None and not (isinstance(self.adapter_digest, bytes) and self.adapter_digest):
            raise FormatError("adapter_digest must be non-empty bytes")
        if not self.attention or not all(isinstance(group, LayerGroup) for group in self.attention):
            raise FormatError("attention needs at least one LayerGroup")
        _check_positions(self.positions)
        _check_extra(self.extra)
        _check_parallel(self.parallel)
        self._check_chunk_length()
        self.canonical()  # refuses values inside positions and extra that have no canonical form

    def _check_chunk_length(self) -> None:
        tokens = self.tokens_per_chunk
        if type(tokens) is not int or not 1 <= tokens < 2**32:
            raise FormatError(f"tokens_per_chunk must be a positive integer, not {tokens!r}")
        if self.run_bytes(tokens) <= CHUNK_BYTES_MAX:
            return
        low, high = 0, tokens
        while high - low > 1:  # run_bytes grows with the tokens, so the largest fitting count is found by bisection
            middle = (low + high) // 2
            low, high = (middle, high) if self.run_bytes(middle) <= CHUNK_BYTES_MAX else (low, middle)
        advice = f"the largest that fits is {low}" if low else "not even one token fits"
        raise FormatError(
            f"a chunk of {tokens} tokens is {self.run_bytes(tokens)} bytes, over the limit of {CHUNK_BYTES_MAX}; "
            f"lower tokens_per_chunk: {advice}"
        )

    @classmethod
    def from_hf_config(cls, config: Mapping[str, object], deployment: Deployment) -> KVFormat:
        """The format of a model's ``config.json`` under a `Deployment`; see `kvgw.hfconfig`."""
        from kvgw.hfconfig import format_from_hf_config  # hfconfig builds on this module

        return format_from_hf_config(config, deployment)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token adds in the layers with full attention (windows and states not counted)."""
        size = DTYPE_BYTES[self.kv_dtype]
        return sum(group.token_bytes(size) for group in self.attention if group.kind in ("mha", "mla"))

    @property
    def chunk_bytes(self) -> int:
        """Exact length in bytes of every chunk of this format."""
        return self.run_bytes(self.tokens_per_chunk)

    def run_bytes(self, tokens: int) -> int:
        """Bytes of KV kept for a run of `tokens` tokens over all layer groups, as an engine's cache holds them."""
        size = DTYPE_BYTES[self.kv_dtype]
        return sum(group.run_bytes(tokens, size) for group in self.attention)

    def canonical(self) -> bytes:
        """The canonical form: magic, then every field once in ascending number."""
        return canonical.encode(
            (
                self.model,
                self.weights,
                self.tokenizer,
                self.kv_dtype,
                self.kv_quantisation,
                self.adapter,
                self.adapter_digest,
                self.positions,
                tuple(group.values() for group in self.attention),
                self.layout,
                self.tokens_per_chunk,
                self.engine,
                self.engine_abi,
                self.parallel,
                self.multimodal,
                tuple(part for pair in self.extra for part in pair),
            )
        )

    @classmethod
    def from_canonical(cls, data: bytes) -> KVFormat:
        """Read a canonical form; refuses any byte string that this module would not have written itself."""
        if len(data) > CANONICAL_BYTES_MAX:
            raise FormatError(f"canonical KV format of {len(data)} bytes is over the limit of {CANONICAL_BYTES_MAX}")
        values = canonical.decode(data)
        try:
            format_ = cls._from_values(values)
        except (TypeError, ValueError) as error:
            raise FormatError(f"canonical KV format has a field of the wrong type: {error}") from error
        if format_.canonical() != data:
            raise FormatError("canonical KV format is not in its canonical encoding")
        return format_

    @classmethod
    def _from_values(cls, values: Sequence[Value]) -> KVFormat:
        extra = _as_tuple(values[15])
        return cls(
            model=values[0],  # type: ignore[arg-type]  # __post_init__ checks the type of every field
            weights=values[1],  # type: ignore[arg-type]
            tokenizer=values[2],  # type: ignore[arg-type]
            kv_dtype=values[3],  # type: ignore[arg-type]
            kv_quantisation=values[4],  # type: ignore[arg-type]
            adapter=values[5],  # type: ignore[arg-type]
            adapter_digest=values[6],  # type: ignore[arg-type]
            positions=_as_tuple(values[7]),
            attention=tuple(LayerGroup(*_as_tuple(group)) for group in _as_tuple(values[8])),  # type: ignore[arg-type]
            layout=values[9],  # type: ignore[arg-type]
            tokens_per_chunk=values[10],  # type: ignore[arg-type]
            engine=values[11],  # type: ignore[arg-type]
            engine_abi=values[12],  # type: ignore[arg-type]
            parallel=_as_tuple(values[13]),  # type: ignore[arg-type]
            multimodal=values[14],  # type: ignore[arg-type]
            extra=tuple(zip(extra[::2], extra[1::2], strict=True)),  # type: ignore[arg-type]
        )


def _as_tuple(value: Value) -> tuple[Value, ...]:
    if not isinstance(value, tuple):
        raise FormatError(f"canonical KV format has {value!r} where a list belongs")
    return value


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise FormatError(f"{field} must be non-empty text, not {value!r}")
    if len(value) > _NAME_LENGTH_MAX:
        raise FormatError(f"{field} has {len(value)} characters, over the limit of {_NAME_LENGTH_MAX}")
    if not unicodedata.is_normalized("NFC", value):
        # Normalising silently would make two names equal that their owner may hold for different.
        raise FormatError(f"{field} {value!r} is not in Unicode NFC; normalise it before use")


def _check_identity(field: str, value: object) -> None:
    if isinstance(value, bytes):
        if not 16 <= len(value) <= 64:
            raise FormatError(f"{field} digest must have 16 to 64 bytes, not {len(value)}")
        return
    _check_text(field, value)


def _check_positions(positions: tuple[Value, ...]) -> None:
    if len(positions) < 2 or len(positions) % 2 or positions[0] != "kind":
        raise FormatError("positions must be ('kind', value, name, value, …)")
    _check_text("positions kind", positions[1])
    _check_sorted_names("positions", positions[2::2])


def _check_extra(extra: tuple[tuple[str, Value], ...]) -> None:
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in extra):
        raise FormatError(f"extra must be pairs of name and value, not {extra!r}")
    _check_sorted_names("extra", [name for name, _ in extra])


def _check_sorted_names(field: str, names: Sequence[Value]) -> None:
    for name in names:
        _check_text(f"{field} name", name)
    texts = [str(name) for name in names]
    if texts != sorted(set(texts)):
        raise FormatError(f"{field} names must be sorted and unique, not {texts}")


def _check_parallel(parallel: tuple[int, ...]) -> None:
    if len(parallel) != 6 or not all(type(number) is int and 0 <= number < 2**32 for number in parallel):
        raise FormatError(f"parallel must be six integers (tp, pp, cp: size and rank each), not {parallel!r}")
    for size, rank in zip(parallel[::2], parallel[1::2], strict=True):
        if not rank < size:
            raise FormatError(f"parallel rank {rank} is not below its size {size}")
