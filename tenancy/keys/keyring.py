"""The keyring: a namespace's keys in memory, unwrapped on demand and for a bounded time.

root key → namespace key (key store, outside the catalog) → data keys, one an epoch, and the id key (both wrapped, in
the catalog). Without the namespace key the catalog's rows open nothing: that is what makes shredding possible.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from tenancy.errors import KeyGone, KeyMismatch, KeyUnavailable
from tenancy.keys.keystore import KeyStore, KeyVersions
from tenancy.keys.rootkey import RootKey
from tenancy.keys.secret import KEY_BYTES, SecretBytes
from tenancy.keys.wrapping import KeyContext, Purpose, WrappedKey, WrappingKey, unwrap, wrap
from tenancy.model import Scope
from tenancy.naming import NameKeys
from tenancy.ports import RandomBytes
from tenancy.registry import KeyRow

CACHE_SECONDS: Final = 300
CACHED_NAMESPACES_MAX: Final = 4096
OPEN_ATTEMPTS: Final = 3
"""Between reading the rows and reading the store a rotation may have been finished: then both are read again."""


class MonotonicClock(Protocol):
    """Seconds that never go backward."""

    def monotonic(self) -> float: ...


class KeyRows(Protocol):
    """Where wrapped keys are kept: the catalog."""

    async def wrapped_keys(self, scope: Scope) -> list[KeyRow]: ...


@dataclass(frozen=True, slots=True)
class NamespaceKeys:
    """The open keys of one namespace."""

    data: Mapping[int, SecretBytes]
    """Data keys by epoch."""
    names: NameKeys

    def data_key(self, epoch: int) -> SecretBytes:
        """The data key of an epoch. Raises `KeyUnavailable` for one that this namespace does not have."""
        try:
            return self.data[epoch]
        except KeyError:
            raise KeyUnavailable(f"the namespace has no data key of epoch {epoch}") from None

    def wipe(self) -> None:
        """Zero these keys: whoever still holds this object gets `KeyUnavailable`."""
        names = self.names
        for secret in (*self.data.values(), names.chunk_id, names.fingerprint, names.entry, names.label):
            secret.wipe()


@dataclass(frozen=True, slots=True)
class _Remembered:
    keys: NamespaceKeys
    until: float
    absent: frozenset[int]
    """Epochs that were asked for when these were opened, and did not exist. A key is there before its epoch is used."""

    def suffices(self, epochs: Collection[int], now: float) -> bool:
        return self.until > now and all(epoch in self.keys.data or epoch in self.absent for epoch in epochs)


class Keyring:
    """Makes, opens and caches the keys of namespaces. The only holder of data keys."""

    def __init__(
        self, root: RootKey, store: KeyStore, rows: KeyRows, clock: MonotonicClock, random_bytes: RandomBytes
    ) -> None:
        self._root = root
        self._store = store
        self._rows = rows
        self._clock = clock
        self._random_bytes = random_bytes
        self._cache: OrderedDict[Scope, _Remembered] = OrderedDict()
        self._loading: dict[Scope, asyncio.Lock] = {}
        self._forgotten = 0

    async def create(self, scope: Scope) -> list[KeyRow]:
        """Make the keys of a new namespace: its own key goes to the store, the rows returned to the catalog."""
        secret = SecretBytes(self._random_bytes(KEY_BYTES))
        record = await self._root.wrap(secret, KeyContext(scope.tenant, scope.namespace, "namespace", 1))
        await self._store.create(scope.namespace, {1: record})
        namespace_key = WrappingKey(str(scope.namespace), 1, secret)
        return [
            new_row(namespace_key, scope, purpose, epoch, self._random_bytes)
            for purpose, epoch in (("data", 1), ("id", 0))
        ]

    async def keys(self, scope: Scope, epochs: Collection[int] = ()) -> NamespaceKeys:
        """The namespace's keys, opened anew at once if those in memory lack one of `epochs` that exists.

        Raises `KeyGone`, `KeyUnavailable`, `KeyMismatch`, `KeyDamaged`, `NamespaceUnknown`.
        """
        cached = self.at_hand(scope, epochs)
        if cached is not None:
            return cached
        lock = self._loading.setdefault(scope, asyncio.Lock())
        try:
            async with lock:
                cached = self.at_hand(scope, epochs)
                if cached is not None:
                    return cached
                forgotten = self._forgotten
                keys = await self._open(scope)
                if forgotten != self._forgotten:
                    return keys  # something was forgotten meanwhile, perhaps these: not to be remembered
                absent = frozenset(epoch for epoch in epochs if epoch not in keys.data)
                self._cache[scope] = _Remembered(keys, self._clock.monotonic() + CACHE_SECONDS, absent)
                self._cache.move_to_end(scope)
                while len(self._cache) > CACHED_NAMESPACES_MAX:
                    self._cache.popitem(last=False)
                return keys
        finally:
            if not lock.locked():
                self._loading.pop(scope, None)

    async def advance(self, generation: int) -> None:
        """Write the catalog's generation down beside the keys. Raises `KeyUnavailable`."""
        await self._store.advance(generation)

    def forget(self, scope: Scope) -> None:
        """Drop the namespace's keys from memory; the next use opens them anew."""
        self._cache.pop(scope, None)
        self._forgotten += 1

    def destroy(self, scope: Scope) -> None:
        """As `forget`, and zero them: requests that are using them open and seal nothing more."""
        remembered = self._cache.get(scope)
        self.forget(scope)
        if remembered is not None:
            remembered.keys.wipe()

    async def destroy_for_good(self, scope: Scope) -> None:
        """Destroy the namespace's own key where it is kept, and in memory. Repeatable. Raises `KeyUnavailable`."""
        await self._store.destroy(scope.namespace)
        self.destroy(scope)

    async def is_gone(self, scope: Scope) -> bool:
        """Whether the key store says that the namespace's key was destroyed. Raises `KeyUnavailable`."""
        try:
            await self._store.read(scope.namespace)
        except KeyGone:
            return True
        return False

    def held(self) -> list[Scope]:
        """The namespaces whose keys are in memory."""
        return list(self._cache)

    def at_hand(self, scope: Scope, epochs: Collection[int] = ()) -> NamespaceKeys | None:
        """As `keys`, if nothing has to be opened for it."""
        found = self._cache.get(scope)
        if found is None or not found.suffices(epochs, self._clock.monotonic()):
            return None
        self._cache.move_to_end(scope)
        return found.keys

    async def _open(self, scope: Scope) -> NamespaceKeys:
        for _ in range(OPEN_ATTEMPTS):
            rows = await self._rows.wrapped_keys(scope)
            versions = await self._store.read(scope.namespace)
            wanted = versions_used(scope, rows)
            if wanted <= set(versions):
                break
        else:
            raise KeyMismatch(
                f"keys of namespace {scope.namespace} are wrapped by version {max(wanted - set(versions))} of its key, "
                "which the key store does not have; restore the newest copy of the key store"
            )
        wrapping = await open_versions(self._root, scope, versions, wanted or {max(versions)})
        data: dict[int, SecretBytes] = {}
        id_key: SecretBytes | None = None
        for row in rows:
            key = open_row(wrapping, scope, row)
            if row.purpose == "data":
                data[row.epoch] = key
            else:
                id_key = key
        if id_key is None or not data:
            raise KeyUnavailable(f"namespace {scope.namespace} lacks its id key or any data key in the catalog")
        return NamespaceKeys(data, NameKeys.derive(id_key))


def versions_used(scope: Scope, rows: Iterable[KeyRow]) -> set[int]:
    """Versions of the namespace's own key that wrapped `rows`. Raises `KeyDamaged`."""
    parsed = [WrappedKey.parse(row.wrapped) for row in rows]
    return {one.version for one in parsed if one.ref == str(scope.namespace)}


async def open_versions(
    root: RootKey, scope: Scope, versions: KeyVersions, wanted: Iterable[int]
) -> dict[int, WrappingKey]:
    """The namespace's key in each of the `wanted` versions, which must be among `versions`. Raises as `RootKey`."""
    opened = {}
    for version in sorted(wanted):
        context = KeyContext(scope.tenant, scope.namespace, "namespace", version)
        opened[version] = WrappingKey(str(scope.namespace), version, await root.unwrap(versions[version], context))
    return opened


def open_row(wrapping: Mapping[int, WrappingKey], scope: Scope, row: KeyRow) -> SecretBytes:
    """The key in a row. Raises `KeyMismatch` or `KeyDamaged`: a row that was moved does not open."""
    version = WrappedKey.parse(row.wrapped).version
    namespace_key = wrapping.get(version) or wrapping[max(wrapping)]  # a foreign row: unwrap says whose it is
    return unwrap(namespace_key, row.wrapped, _context(scope, row))


def wrapped_anew(
    namespace_key: WrappingKey, scope: Scope, row: KeyRow, key: SecretBytes, chance: RandomBytes
) -> KeyRow:
    """The row with the same `key`, wrapped by `namespace_key`."""
    return KeyRow(row.purpose, row.epoch, wrap(namespace_key, key, _context(scope, row), chance))


def new_row(namespace_key: WrappingKey, scope: Scope, purpose: str, epoch: int, chance: RandomBytes) -> KeyRow:
    """A row with a fresh key."""
    empty = KeyRow(purpose, epoch, b"")
    return wrapped_anew(namespace_key, scope, empty, SecretBytes(chance(KEY_BYTES)), chance)


def _context(scope: Scope, row: KeyRow) -> KeyContext:
    purpose: Purpose = "data" if row.purpose == "data" else "id"
    return KeyContext(scope.tenant, scope.namespace, purpose, row.epoch)
