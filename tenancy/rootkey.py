"""The root key: the one key that wraps every namespace key, kept by a provider.

`FileRootKey` keeps it in ``<keys>/root.key``: ``"KVRK" ‖ u8 version = 1 ‖ 3 zero bytes ‖ key id[16] ‖ key[32]``. The
key id is a hash of the key: it names the key in every record that it wraps, so that a wrong or damaged key file is
recognised before it does harm.
"""

from __future__ import annotations

import hmac
import struct
from pathlib import Path
from typing import Final, Protocol

from tenancy import keyfiles
from tenancy.errors import KeyDamaged, KeyMismatch, KeyUnavailable
from tenancy.ports import RandomBytes, Workers
from tenancy.secret import KEY_BYTES, SecretBytes
from tenancy.wrapping import KeyContext, WrappingKey, unwrap, wrap

FILE_NAME: Final = "root.key"
NAMESPACES_FOLDER: Final = "namespaces"
"""Folder beside the root key with the namespace keys that it wraps."""

_ID_BYTES = 16
_FILE = struct.Struct(f">4sB3s{_ID_BYTES}s{KEY_BYTES}s")
_MAGIC, _VERSION, _RESERVED = b"KVRK", 1, bytes(3)


class RootKey(Protocol):
    """Wraps and unwraps namespace keys; the root key itself never leaves its provider."""

    @property
    def key_id(self) -> str:
        """Name of the root key, for people and records; not secret."""
        ...

    async def wrap(self, key: SecretBytes, context: KeyContext) -> bytes:
        """The record of `key`, bound to `context`. Raises `KeyUnavailable`."""
        ...

    async def unwrap(self, record: bytes, context: KeyContext) -> SecretBytes:
        """The key inside `record`.

        Raises `KeyUnavailable` (no answer), `KeyGone` (the provider destroyed the root key), `KeyMismatch` or
        `KeyDamaged`.
        """
        ...

    async def check(self) -> None:
        """Return if the provider can still give this root key to a new process; else raise what is wrong."""
        ...


class FileRootKey:
    """Root key in a file of mode 0600 inside a folder of mode 0700, both owned by this process's user."""

    def __init__(self, path: Path, secret: SecretBytes, workers: Workers, random_bytes: RandomBytes) -> None:
        self._path = path
        self._key = WrappingKey(_key_id(secret).hex(), 1, secret)
        self._workers = workers
        self._random_bytes = random_bytes

    @classmethod
    async def open(cls, keys: Path, workers: Workers, random_bytes: RandomBytes) -> FileRootKey:
        """Open the root key of the folder `keys`.

        Raises `KeyUnavailable` if there is none, `KeyExposed` or `KeyDamaged` if it must not be used.
        """
        path = keys / FILE_NAME
        return cls(path, await workers.run(lambda: _load(path)), workers, random_bytes)

    @classmethod
    async def open_or_create(cls, keys: Path, workers: Workers, random_bytes: RandomBytes) -> FileRootKey:
        """As `open`, but makes a root key, and the folder, for a fresh start.

        A folder that already holds namespace keys has lost its root key: `KeyUnavailable`, not a new one.
        """
        path = keys / FILE_NAME
        return cls(path, await workers.run(lambda: _load_or_create(path, random_bytes)), workers, random_bytes)

    @property
    def key_id(self) -> str:
        return self._key.ref

    async def wrap(self, key: SecretBytes, context: KeyContext) -> bytes:
        return wrap(self._key, key, context, self._random_bytes)

    async def unwrap(self, record: bytes, context: KeyContext) -> SecretBytes:
        return unwrap(self._key, record, context)

    async def check(self) -> None:
        stored = await self._workers.run(lambda: _load(self._path))
        if stored != self._key.secret:
            raise KeyMismatch(
                f"{self._path} holds root key {_key_id(stored).hex()}, but the running process uses root key "
                f"{self.key_id}; put that one back before a restart, or its data cannot be read"
            )


def _load(path: Path) -> SecretBytes:
    with keyfiles.exclusive(path.parent):
        return _read(path)


def _load_or_create(path: Path, random_bytes: RandomBytes) -> SecretBytes:
    keyfiles.make_folder(path.parent)
    with keyfiles.exclusive(path.parent):
        if not keyfiles.exists(path):
            namespaces = path.parent / NAMESPACES_FOLDER
            if any(name.endswith(".key") for name in keyfiles.names(namespaces)):
                raise KeyUnavailable(
                    f"{path} is missing, but {namespaces} holds keys that it wrapped; restore it from its backup. "
                    "A new root key could not open them"
                )
            secret = SecretBytes(random_bytes(KEY_BYTES))
            keyfiles.create(path, _FILE.pack(_MAGIC, _VERSION, _RESERVED, _key_id(secret), secret.reveal()))
        return _read(path)


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
    if not hmac.compare_digest(key_id, _key_id(secret)):
        raise KeyDamaged(f"{path} is damaged: its key is not the one that its key id names; restore it from its backup")
    return secret


def _key_id(secret: SecretBytes) -> bytes:
    return hmac.digest(secret.reveal(), b"kvgw/v1/root-key-id\0", "sha256")[:_ID_BYTES]
