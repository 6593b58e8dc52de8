"""The root key: the one key that wraps every namespace key, kept by a provider.

A provider is a class that satisfies `RootKey`; ``docs/formats.md``, "Root-key providers", says what it promises.
`FileRootKey` keeps it in ``<keys>/root.key``: ``"KVRK" ‖ u8 version = 1 ‖ 3 zero bytes ‖ key id[16] ‖ key[32]``. The
key id is a hash of the key: it names the key in every record that it wraps, so that a wrong or damaged key file is
recognised before it does harm. Root keys that were replaced lie beside it, as ``root-<key id>.key``: they open what
they wrapped until it is wrapped anew.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Final, Protocol

from tenancy.errors import KeyDamaged, KeyMismatch, KeyUnavailable
from tenancy.keys import keyfiles
from tenancy.keys.secret import KEY_BYTES, SecretBytes
from tenancy.keys.wrapping import KeyContext, WrappingKey, unwrap, wrap, wrapped_by
from tenancy.ports import RandomBytes, Workers

FILE_NAME: Final = "root.key"
NAMESPACES_FOLDER: Final = "namespaces"
"""Folder beside the root key with the namespace keys that it wraps."""
OLD_PREFIX, OLD_SUFFIX = "root-", ".key"

_ID_BYTES = 16
_FILE = struct.Struct(f">4sB3s{_ID_BYTES}s{KEY_BYTES}s")
_MAGIC, _VERSION, _RESERVED = b"KVRK", 1, bytes(3)


class RootKey(Protocol):
    """Wraps and unwraps namespace keys; the root key itself never leaves its provider."""

    @property
    def provider(self) -> str:
        """Which kind it is: the value of ``keys.provider``."""
        ...

    @property
    def key_id(self) -> str:
        """Name of the root key that wraps now, for people and records; not secret."""
        ...

    async def wrap(self, key: SecretBytes, context: KeyContext) -> bytes:
        """The record of `key`, bound to `context`. Raises `KeyUnavailable` or `KeyRefused`."""
        ...

    async def unwrap(self, record: bytes, context: KeyContext) -> SecretBytes:
        """The key inside `record`, whichever root key that this provider still has wrapped it.

        Raises `KeyUnavailable` (no answer), `KeyGone` (the provider destroyed the root key), `KeyMismatch` or
        `KeyDamaged`.
        """
        ...

    async def check(self) -> None:
        """Return if the provider can still give this root key to a new process; else raise what is wrong."""
        ...

    async def rotate(self) -> str:
        """Make a root key that wraps from now on, and keep the others for opening; its key id.

        Raises `KeyRefused` where that is done outside of kvgw; the sentence says how.
        """
        ...

    async def retire(self, needed: Collection[str]) -> list[str]:
        """Destroy the kept root keys that are not `needed` (key ids); those destroyed. The one that wraps stays."""
        ...


class HeldRootKeys:
    """Root keys in this process's memory: the first wraps, all of them open."""

    def __init__(self, secrets: list[SecretBytes], random_bytes: RandomBytes) -> None:
        keys = [WrappingKey(key_id_of(secret).hex(), 1, secret) for secret in secrets]
        self.current = keys[0]
        self._by_ref = {key.ref: key for key in keys}
        self._random_bytes = random_bytes

    def __contains__(self, ref: str) -> bool:
        return ref in self._by_ref

    def wrap(self, key: SecretBytes, context: KeyContext) -> bytes:
        return wrap(self.current, key, context, self._random_bytes)

    def unwrap(self, record: bytes, context: KeyContext) -> SecretBytes:
        """Raises `KeyMismatch`, naming the key that is needed, if it is none of these."""
        return unwrap(self._by_ref.get(wrapped_by(record), self.current), record, context)


class FileRootKey:
    """Root key in a file of mode 0600 inside a folder of mode 0700, both owned by this process's user."""

    provider = "file"

    def __init__(self, path: Path, held: HeldRootKeys, workers: Workers, random_bytes: RandomBytes) -> None:
        self._path = path
        self._held = held
        self._workers = workers
        self._random_bytes = random_bytes

    @classmethod
    async def open(cls, keys: Path, workers: Workers, random_bytes: RandomBytes) -> FileRootKey:
        """Open the root key of the folder `keys`.

        Raises `KeyUnavailable` if there is none, `KeyExposed` or `KeyDamaged` if it must not be used.
        """
        path = keys / FILE_NAME
        secrets = await workers.run(lambda: _load(path))
        return cls(path, HeldRootKeys(secrets, random_bytes), workers, random_bytes)

    @classmethod
    async def open_or_create(cls, keys: Path, workers: Workers, random_bytes: RandomBytes) -> FileRootKey:
        """As `open`, but makes a root key, and the folder, for a fresh start.

        A folder that already holds namespace keys has lost its root key: `KeyUnavailable`, not a new one.
        """
        path = keys / FILE_NAME
        secrets = await workers.run(lambda: _load_or_create(path, random_bytes))
        return cls(path, HeldRootKeys(secrets, random_bytes), workers, random_bytes)

    @property
    def key_id(self) -> str:
        return self._held.current.ref

    async def wrap(self, key: SecretBytes, context: KeyContext) -> bytes:
        # Another process, or a copied folder, may have brought a new root key: nothing new is wrapped by an old one.
        await self._look_again()
        return self._held.wrap(key, context)

    async def unwrap(self, record: bytes, context: KeyContext) -> SecretBytes:
        if wrapped_by(record) not in self._held:
            await self._look_again()
        return self._held.unwrap(record, context)

    async def check(self) -> None:
        await self._look_again()

    async def rotate(self) -> str:
        secrets = await self._workers.run(lambda: _rotate(self._path, self._random_bytes))
        self._held = HeldRootKeys(secrets, self._random_bytes)
        return self.key_id

    async def retire(self, needed: Collection[str]) -> list[str]:
        gone = await self._workers.run(lambda: _retire(self._path, needed))
        await self._look_again()
        return gone

    async def _look_again(self) -> None:
        """Take over what the folder holds now, if it still has the key in use.

        Raises `KeyMismatch` for a folder that belongs to something else, and what `open` raises.
        """
        found = HeldRootKeys(await self._workers.run(lambda: _load(self._path)), self._random_bytes)
        if self.key_id not in found:
            raise KeyMismatch(
                f"{self._path} holds root key {found.current.ref}, but the running process uses root key "
                f"{self.key_id}; put that one back before a restart, or its data cannot be read"
            )
        self._held = found


def key_id_of(secret: SecretBytes) -> bytes:
    """The id of a root key: 16 bytes that name it and tell nothing of it."""
    return hmac.digest(secret.reveal(), b"kvgw/v1/root-key-id\0", "sha256")[:_ID_BYTES]


def _load(path: Path) -> list[SecretBytes]:
    with keyfiles.exclusive(path.parent):
        return _read_all(path)


def _load_or_create(path: Path, random_bytes: RandomBytes) -> list[SecretBytes]:
    keyfiles.make_folder(path.parent)
    with keyfiles.exclusive(path.parent):
        if not keyfiles.exists(path):
            namespaces = path.parent / NAMESPACES_FOLDER
            if any(name.endswith(".key") for name in keyfiles.names(namespaces)):
                raise KeyUnavailable(
                    f"{path} is missing, but {namespaces} holds keys that it wrapped; restore it from its backup. "
                    "A new root key could not open them"
                )
            if _old_paths(path):
                raise KeyUnavailable(f"{path} is missing, but keys before it are there; restore it from its backup")
            keyfiles.create(path, _encode(SecretBytes(random_bytes(KEY_BYTES))))
        return _read_all(path)


def _rotate(path: Path, random_bytes: RandomBytes) -> list[SecretBytes]:
    with keyfiles.exclusive(path.parent):
        old = _read(path)
        kept = _old_path(path, key_id_of(old).hex())
        # A crash after this leaves the key in both places, and still in use; after the next line, the new one in use.
        if not keyfiles.exists(kept):
            keyfiles.create(kept, _encode(old))
        keyfiles.replace(path, _encode(SecretBytes(random_bytes(KEY_BYTES))))
        return _read_all(path)


def _retire(path: Path, needed: Collection[str]) -> list[str]:
    gone = []
    with keyfiles.exclusive(path.parent):
        current = key_id_of(_read(path)).hex()
        for old in _old_paths(path):
            key_id = key_id_of(_read(old)).hex()
            if key_id not in needed:
                keyfiles.erase(old)
                gone += [key_id] if key_id != current else []  # of an interrupted rotation: it is in root.key too
    return gone


def _read_all(path: Path) -> list[SecretBytes]:
    return [_read(path), *(_read(old) for old in _old_paths(path))]


def _old_path(path: Path, key_id: str) -> Path:
    return path.parent / f"{OLD_PREFIX}{key_id}{OLD_SUFFIX}"


def _old_paths(path: Path) -> list[Path]:
    found = sorted(keyfiles.names(path.parent))
    return [path.parent / name for name in found if name.startswith(OLD_PREFIX) and name.endswith(OLD_SUFFIX)]


def _encode(secret: SecretBytes) -> bytes:
    return _FILE.pack(_MAGIC, _VERSION, _RESERVED, key_id_of(secret), secret.reveal())


def _read(path: Path) -> SecretBytes:
    data = keyfiles.read(path, _FILE.size)
    if data is None:
        raise KeyUnavailable(f"there is no root key {path}; restore it from its backup, or name the right keys folder")
    if len(data) != _FILE.size:
        raise KeyDamaged(f"{path} has {len(data)} bytes, a root key file has {_FILE.size}; restore it from its backup")
    magic, version, reserved, key_id, key = _FILE.unpack(data)
    if (magic, version, reserved) != (_MAGIC, _VERSION, _RESERVED):
        raise KeyDamaged(f"{path} is not a root key file of version {_VERSION}; restore it from its backup")
    secret = SecretBytes(key)
    if not hmac.compare_digest(key_id, key_id_of(secret)):
        raise KeyDamaged(f"{path} is damaged: its key is not the one that its key id names; restore it from its backup")
    return secret
