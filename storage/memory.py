"""The reference tier: blobs in this process's memory. Defines by example what every other tier has to do."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from storage.errors import BlobDamaged, BlobMissing
from storage.tier import BlobInfo, check_name


@dataclass(frozen=True, slots=True)
class _Blob:
    sealed: bytes
    modified_ms: int


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryTier:
    """Keeps a copy of each blob until `delete` or `aclose`; unbounded, for tests and trials."""

    def __init__(self, label: str = "memory", *, now_ms: Callable[[], int] = _wall_ms) -> None:
        self.label = label
        self._now_ms = now_ms
        self._blobs: dict[str, _Blob] = {}

    async def put(self, name: str, sealed: memoryview) -> None:
        self._blobs[check_name(name)] = _Blob(bytes(sealed), self._now_ms())

    async def get_into(self, name: str, target: memoryview) -> None:
        blob = self._blobs.get(check_name(name))
        if blob is None:
            raise BlobMissing(f"{self.label} has no blob {name}")
        if len(blob.sealed) != len(target):
            raise BlobDamaged(f"blob {name} in {self.label} has {len(blob.sealed)} bytes, not {len(target)}")
        target[:] = blob.sealed

    async def stat(self, names: Sequence[str]) -> dict[str, int]:
        wanted = [check_name(name) for name in names]
        return {name: len(self._blobs[name].sealed) for name in wanted if name in self._blobs}

    async def delete(self, names: Sequence[str]) -> None:
        for name in [check_name(name) for name in names]:
            self._blobs.pop(name, None)

    async def scan(self) -> AsyncIterator[BlobInfo]:
        for name, blob in list(self._blobs.items()):
            yield BlobInfo(name, len(blob.sealed), blob.modified_ms)

    async def aclose(self) -> None:
        self._blobs.clear()
