"""Where wrapped namespace keys live: outside the catalog and its backups, so that destroying them is enough.

`FileKeyStore` keeps ``<keys>/namespaces/<namespace uuid>.key``: ``"KVNK" ‖ u8 version = 1 ‖ u8 zero ‖ u16 count ‖``
then for each key version, ascending, ``u32 version ‖ u16 length ‖ record``. A destroyed namespace leaves an empty
``<namespace uuid>.gone``: destroyed and lost are different answers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol, TypeAlias
from uuid import UUID

from tenancy.errors import KeyDamaged, KeyGone, KeyUnavailable
from tenancy.keys import keyfiles
from tenancy.keys.rootkey import NAMESPACES_FOLDER
from tenancy.keys.wrapping import RECORD_BYTES_MAX
from tenancy.ports import Workers

KeyVersions: TypeAlias = Mapping[int, bytes]
"""Wrapped records of a namespace's key by version, 1 … 2**32 - 1."""

VERSIONS_MAX: Final = 1024
"""Most versions that a namespace keeps; rotation re-wraps, so that old ones need not pile up."""

GENERATION_FILE: Final = "generation"
GENERATION_BYTES_MAX: Final = 18

_HEAD = struct.Struct(">4sBBH")
_ITEM = struct.Struct(">IH")
_MAGIC, _VERSION = b"KVNK", 1
KEY_FILE_BYTES_MAX = _HEAD.size + VERSIONS_MAX * (_ITEM.size + RECORD_BYTES_MAX)


class KeyStore(Protocol):
    """Keeps wrapped namespace keys. Every change is durable on return."""

    async def read(self, namespace: UUID) -> KeyVersions:
        """Raises `KeyGone` (destroyed), `KeyUnavailable` (not there, or no answer) or `KeyDamaged`."""
        ...

    async def create(self, namespace: UUID, versions: KeyVersions) -> KeyVersions:
        """Store the first key of a namespace; the versions that stand, which are others' if they were first.

        Raises `KeyGone` if the namespace's key was destroyed.
        """
        ...

    async def replace(self, namespace: UUID, versions: KeyVersions) -> None:
        """Replace all versions of a key that exists. Raises as `read`."""
        ...

    async def destroy(self, namespace: UUID) -> None:
        """Destroy all versions for good. Repeatable: until it returned, destruction is not complete."""
        ...

    async def generation(self) -> int:
        """The highest catalog generation that was written down here; 0 when none was."""
        ...

    async def advance(self, generation: int) -> None:
        """Write down a catalog generation; one that is not higher than what stands changes nothing."""
        ...


class FileKeyStore:
    """Key store in a folder of one host; safe against a second process that uses the same folder."""

    def __init__(self, folder: Path, workers: Workers) -> None:
        self._folder = folder
        self._workers = workers

    @classmethod
    async def open(cls, keys: Path, workers: Workers) -> FileKeyStore:
        """Open the store inside the folder `keys`, which must exist; makes its own folder there."""
        folder = keys / NAMESPACES_FOLDER
        await workers.run(lambda: keyfiles.make_folder(folder))
        return cls(folder, workers)

    async def read(self, namespace: UUID) -> KeyVersions:
        return await self._workers.run(lambda: self._read(namespace))

    async def create(self, namespace: UUID, versions: KeyVersions) -> KeyVersions:
        return await self._workers.run(lambda: self._create(namespace, versions))

    async def replace(self, namespace: UUID, versions: KeyVersions) -> None:
        await self._workers.run(lambda: self._replace(namespace, versions))

    async def destroy(self, namespace: UUID) -> None:
        await self._workers.run(lambda: self._destroy(namespace))

    async def generation(self) -> int:
        return await self._workers.run(self._generation)

    async def advance(self, generation: int) -> None:
        await self._workers.run(lambda: self._advance(generation))

    def _generation(self) -> int:
        with keyfiles.exclusive(self._folder):
            return self._generation_held()

    def _generation_held(self) -> int:
        path = self._folder / GENERATION_FILE
        return parse_generation(path, keyfiles.read(path, GENERATION_BYTES_MAX))

    def _advance(self, generation: int) -> None:
        path = self._folder / GENERATION_FILE
        with keyfiles.exclusive(self._folder):
            if generation <= self._generation_held():
                return
            encoded = str(generation).encode()
            if keyfiles.exists(path):
                keyfiles.replace(path, encoded)
            else:
                keyfiles.create(path, encoded)

    def _key_path(self, namespace: UUID) -> Path:
        return self._folder / f"{namespace}.key"

    def _tombstone_path(self, namespace: UUID) -> Path:
        return self._folder / f"{namespace}.gone"

    def _read(self, namespace: UUID) -> KeyVersions:
        with keyfiles.exclusive(self._folder):
            return self._read_held(namespace)

    def _create(self, namespace: UUID, versions: KeyVersions) -> KeyVersions:
        encoded = encode_versions(versions)
        with keyfiles.exclusive(self._folder):
            self._check_not_gone(namespace)
            if not keyfiles.exists(self._key_path(namespace)):
                keyfiles.create(self._key_path(namespace), encoded)
            return self._read_held(namespace)

    def _replace(self, namespace: UUID, versions: KeyVersions) -> None:
        encoded = encode_versions(versions)
        with keyfiles.exclusive(self._folder):
            self._read_held(namespace)
            keyfiles.replace(self._key_path(namespace), encoded)

    def _destroy(self, namespace: UUID) -> None:
        with keyfiles.exclusive(self._folder):
            # The tombstone comes first: a crash in between leaves a key that nobody gets any more, to be erased again.
            if not keyfiles.exists(self._tombstone_path(namespace)):
                keyfiles.create(self._tombstone_path(namespace), b"")
            keyfiles.erase(self._key_path(namespace))

    def _check_not_gone(self, namespace: UUID) -> None:
        if keyfiles.exists(self._tombstone_path(namespace)):
            raise KeyGone(f"the key of namespace {namespace} was destroyed; its data cannot be read again")

    def _read_held(self, namespace: UUID) -> KeyVersions:
        self._check_not_gone(namespace)
        path = self._key_path(namespace)
        data = keyfiles.read(path, KEY_FILE_BYTES_MAX)
        if data is None:
            raise KeyUnavailable(
                f"there is no key file {path}, and no mark that it was destroyed; restore the keys folder"
            )
        return parse_versions(path, data)


def parse_generation(where: object, data: bytes | None) -> int:
    """The catalog generation in a store's file. Raises `KeyDamaged` for anything that is not a number."""
    if data is None:
        return 0
    if not data.isdigit() or len(data) > GENERATION_BYTES_MAX:
        raise KeyDamaged(f"{where} holds no catalog generation; restore the keys folder")
    return int(data)


def encode_versions(versions: KeyVersions) -> bytes:
    """A key file's bytes."""
    if not 1 <= len(versions) <= VERSIONS_MAX:
        raise ValueError(f"a namespace has 1 to {VERSIONS_MAX} key versions, not {len(versions)}")
    parts = [_HEAD.pack(_MAGIC, _VERSION, 0, len(versions))]
    for version, record in sorted(versions.items()):
        if not 1 <= version < 2**32:
            raise ValueError(f"a key version must be from 1 to 2**32-1, not {version}")
        if not 1 <= len(record) <= RECORD_BYTES_MAX:
            raise ValueError(f"a wrapped key has 1 to {RECORD_BYTES_MAX} bytes, not {len(record)}")
        parts += (_ITEM.pack(version, len(record)), record)
    return b"".join(parts)


def parse_versions(where: object, data: bytes) -> KeyVersions:
    """The versions in a key file; raises `KeyDamaged` for any byte string that `encode_versions` would not write."""
    versions: dict[int, bytes] = {}
    if len(data) >= _HEAD.size:
        at = _HEAD.size
        while len(data) - at >= _ITEM.size:
            version, length = _ITEM.unpack_from(data, at)
            at += _ITEM.size + length
            versions[version] = data[at - length : at]
    try:
        whole = encode_versions(versions) == data
    except ValueError:
        whole = False
    if not whole:
        raise KeyDamaged(f"{where} is not a whole namespace key file of version {_VERSION}; restore the keys folder")
    return versions
