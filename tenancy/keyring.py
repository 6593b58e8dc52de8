"""The keyring: a namespace's keys in memory, unwrapped on demand and for a bounded time.

root key → namespace key (key store, outside the catalog) → data keys, one an epoch, and the id key (both wrapped, in
the catalog). Without the namespace key the catalog's rows open nothing: that is what makes shredding possible.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from tenancy.errors import KeyUnavailable
from tenancy.keystore import KeyStore
from tenancy.model import Scope
from tenancy.naming import NameKeys
from tenancy.ports import RandomBytes
from tenancy.registry import KeyRow
from tenancy.rootkey import RootKey
from tenancy.secret import KEY_BYTES, SecretBytes
from tenancy.wrapping import KeyContext, Purpose, WrappingKey, unwrap, wrap

CACHE_SECONDS: Final = 300
CACHED_NAMESPACES_MAX: Final = 4096


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
        self._cache: OrderedDict[Scope, tuple[float, NamespaceKeys]] = OrderedDict()
        self._loading: dict[Scope, asyncio.Lock] = {}
        self._forgotten = 0

    async def create(self, scope: Scope) -> list[KeyRow]:
        """Make the keys of a new namespace: its own key goes to the store, the rows returned to the catalog."""
        secret = SecretBytes(self._random_bytes(KEY_BYTES))
        record = await self._root.wrap(secret, KeyContext(scope.tenant, scope.namespace, "namespace", 1))
        await self._store.create(scope.namespace, {1: record})
        namespace_key = WrappingKey(str(scope.namespace), 1, secret)
        return [self._wrap_new(namespace_key, scope, "data", 1), self._wrap_new(namespace_key, scope, "id", 0)]

    def _wrap_new(self, namespace_key: WrappingKey, scope: Scope, purpose: Purpose, epoch: int) -> KeyRow:
        context = KeyContext(scope.tenant, scope.namespace, purpose, epoch)
        key = SecretBytes(self._random_bytes(KEY_BYTES))
        return KeyRow(purpose, epoch, wrap(namespace_key, key, context, self._random_bytes))

    async def keys(self, scope: Scope) -> NamespaceKeys:
        """The namespace's keys. Raises `KeyGone`, `KeyUnavailable`, `KeyMismatch`, `KeyDamaged`, `NamespaceUnknown`."""
        cached = self._cached(scope)
        if cached is not None:
            return cached
        lock = self._loading.setdefault(scope, asyncio.Lock())
        try:
            async with lock:
                cached = self._cached(scope)
                if cached is not None:
                    return cached
                forgotten = self._forgotten
                keys = await self._open(scope)
                if forgotten != self._forgotten:
                    return keys  # something was forgotten meanwhile, perhaps these: not to be remembered
                self._cache[scope] = (self._clock.monotonic() + CACHE_SECONDS, keys)
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

    def _cached(self, scope: Scope) -> NamespaceKeys | None:
        found = self._cache.get(scope)
        if found is None or found[0] <= self._clock.monotonic():
            return None
        self._cache.move_to_end(scope)
        return found[1]

    async def _open(self, scope: Scope) -> NamespaceKeys:
        rows = await self._rows.wrapped_keys(scope)
        versions = await self._store.read(scope.namespace)
        context = KeyContext(scope.tenant, scope.namespace, "namespace", max(versions))
        secret = await self._root.unwrap(versions[max(versions)], context)
        namespace_key = WrappingKey(str(scope.namespace), max(versions), secret)
        data: dict[int, SecretBytes] = {}
        id_key: SecretBytes | None = None
        for row in rows:
            purpose: Purpose = "data" if row.purpose == "data" else "id"
            key = unwrap(namespace_key, row.wrapped, KeyContext(scope.tenant, scope.namespace, purpose, row.epoch))
            if purpose == "data":
                data[row.epoch] = key
            else:
                id_key = key
        if id_key is None or not data:
            raise KeyUnavailable(f"namespace {scope.namespace} lacks its id key or any data key in the catalog")
        return NamespaceKeys(data, NameKeys.derive(id_key))
