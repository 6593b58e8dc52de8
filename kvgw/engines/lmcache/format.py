"""From LMCache's object keys and layouts to KV formats and engine keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from blake3 import blake3

from kvgw.canonical import length_prefixed
from kvgw.engines.lmcache.options import LmcacheOptions
from kvgw.errors import FormatError
from kvgw.kvformat import DTYPE_BYTES, KVFormat, LayerGroup

_TORCH_NAMES: Final = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


class ObjectKey(Protocol):
    """LMCache's name of a chunk's part."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Layout:
    """Shapes and element types of the tensors of one object, in their order."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    @classmethod
    def of(cls, shapes: Sequence[Any], dtypes: Sequence[Any]) -> Layout:
        """From torch's sizes and types."""
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        return cls(
            tuple(tuple(int(size) for size in shape) for shape in shapes),
            tuple(_TORCH_NAMES.get(name, name) for name in names),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of an object. Raises `FormatError` for element types that kvgw does not know."""
        unknown = [name for name in self.dtypes if name not in DTYPE_BYTES]
        if unknown or not self.shapes:
            raise FormatError(
                f"LMCache's objects have the types {list(self.dtypes)}, and kvgw knows {', '.join(DTYPE_BYTES)}"
            )
        return sum(math.prod(shape) * DTYPE_BYTES[name] for shape, name in zip(self.shapes, self.dtypes, strict=True))

    def __str__(self) -> str:
        parts = zip(self.shapes, self.dtypes, strict=True)
        return ";".join(f"[{','.join(map(str, shape))}]{name}" for shape, name in parts)


@dataclass(frozen=True, slots=True)
class Part:
    """What has one KV format: a rank's part of one object group of one model."""

    model: str
    kv_rank: int
    object_group: int


def part_of(key: ObjectKey) -> Part:
    return Part(key.model_name, key.kv_rank, key.object_group_id)


def format_of(part: Part, layout: Layout, options: LmcacheOptions, abi: str) -> KVFormat:
    """Everything that must be equal before an object may be reused. Raises `FormatError` with the reason for none."""
    identity = options.models.get(part.model)
    if identity is None:
        raise FormatError(
            f"the model {part.model!r} is not in 'models' of kvgw's adapter_params, so that its weights are unknown; "
            "its chunks are not kept"
        )
    return KVFormat(
        model=part.model,
        weights=identity.weights,
        tokenizer=identity.tokenizer,
        kv_dtype=layout.dtypes[0],
        kv_quantisation=None,
        adapter=None,  # LMCache's chunk hashes are the engine's business, adapters included
        adapter_digest=None,
        positions=("kind", "of the weights"),
        attention=(LayerGroup("state", 1, state_bytes=layout.nbytes),),  # LMCache does not say what is what inside
        layout=str(layout),
        tokens_per_chunk=options.tokens_per_chunk,
        engine="lmcache",
        engine_abi=abi,
        parallel=_parallel(part.kv_rank),
        multimodal=None,
        extra=(
            ("compatibility", identity.compatibility),
            ("kv_rank", part.kv_rank),
            ("object_group", part.object_group),
        ),
    )


def engine_key(chunk_hash: bytes, salt: bytes) -> bytes:
    """The engine key of a chunk; different wherever the salt is."""
    if not salt and len(chunk_hash) <= blake3.digest_size:
        return chunk_hash
    return blake3(length_prefixed(chunk_hash, salt)).digest()


def _parallel(kv_rank: int) -> tuple[int, int, int, int, int, int]:
    """Workers and the one of this rank, as LMCache packs them; it does not say how they divide the model."""
    size, rank = kv_rank >> 24 & 0xFF, kv_rank >> 16 & 0xFF
    return (size, rank, 1, 0, 1, 0) if rank < size else (1, 0, 1, 0, 1, 0)
