"""Wrapped namespace keys in S3, for several gateways: the key store outside the catalog and its backups.

``<prefix><namespace uuid>.key`` holds the wrapped versions as a key file does (``docs/formats.md``); a destroyed
namespace leaves an empty ``<namespace uuid>.gone``. The records are wrapped by the root key: S3 alone opens nothing.
"""

from __future__ import annotations

from uuid import UUID

from storage.errors import StorageError
from storage.s3 import S3Objects
from tenancy.errors import KeyGone, KeyUnavailable
from tenancy.keys.keystore import GENERATION_FILE, KeyVersions, encode_versions, parse_generation, parse_versions


class S3KeyStore:
    """A `tenancy.keys.keystore.KeyStore` over S3 objects. An S3 that does not answer is `KeyUnavailable`."""

    def __init__(self, objects: S3Objects) -> None:
        self._objects = objects

    async def read(self, namespace: UUID) -> KeyVersions:
        await self._check_not_gone(namespace)
        data = await self._get(f"{namespace}.key")
        if data is None:
            raise KeyUnavailable(
                f"there is no key of namespace {namespace} in {self._objects.place}, and no mark that it was "
                "destroyed; restore the key store"
            )
        return parse_versions(f"the key of namespace {namespace} in {self._objects.place}", data)

    async def create(self, namespace: UUID, versions: KeyVersions) -> KeyVersions:
        await self._check_not_gone(namespace)
        try:
            await self._objects.put_first(f"{namespace}.key", encode_versions(versions))
        except StorageError as error:
            raise KeyUnavailable(f"the key store did not take a key: {error}") from error
        await self._erase_if_gone(namespace)
        return await self.read(namespace)

    async def replace(self, namespace: UUID, versions: KeyVersions) -> None:
        await self.read(namespace)
        try:
            await self._objects.put(f"{namespace}.key", encode_versions(versions))
        except StorageError as error:
            raise KeyUnavailable(f"the key store did not take a key: {error}") from error
        await self._erase_if_gone(namespace)

    async def destroy(self, namespace: UUID) -> None:
        try:
            # The tombstone comes first: a crash in between leaves a key that nobody gets any more, to be erased again.
            await self._objects.put(f"{namespace}.gone", b"")
            await self._objects.delete(f"{namespace}.key")
        except StorageError as error:
            raise KeyUnavailable(f"the key of namespace {namespace} may still be there: {error}") from error

    async def _erase_if_gone(self, namespace: UUID) -> None:
        """After a write: another gateway's `destroy` may have been here in between, and must not have been in vain."""
        try:
            await self._check_not_gone(namespace)
        except KeyGone:
            await self.destroy(namespace)
            raise

    async def _check_not_gone(self, namespace: UUID) -> None:
        if await self._get(f"{namespace}.gone") is not None:
            raise KeyGone(f"the key of namespace {namespace} was destroyed; its data cannot be read again")

    async def generation(self) -> int:
        place = f"{GENERATION_FILE!r} in {self._objects.place}"
        return parse_generation(place, await self._get(GENERATION_FILE))

    async def advance(self, generation: int) -> None:
        if generation <= await self.generation():
            return
        try:
            await self._objects.put(GENERATION_FILE, str(generation).encode())
        except StorageError as error:
            raise KeyUnavailable(f"the key store did not take the catalog's generation: {error}") from error

    async def _get(self, name: str) -> bytes | None:
        try:
            return await self._objects.get(name)
        except StorageError as error:
            raise KeyUnavailable(f"the key store did not answer: {error}") from error
