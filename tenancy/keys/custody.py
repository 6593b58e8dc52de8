"""Custody: the life of keys after they were made. Rotation, re-wrapping, and destruction.

Whoever changes keys is alone in it: a lease in the catalog, looked at again by every transaction that writes wrapped
keys, keeps other gateways out. Each step leaves everything that opened before openable, so that what was interrupted
anywhere is right, and run again ends where it should:

    a new version of a wrapping key enters its store  →  everything is wrapped by it  →  it all opens, read back from
    where it is kept  →  versions that wrap nothing leave the store

Data is never touched: only keys are wrapped anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final
from uuid import UUID

from sqlalchemy import Connection

from tenancy.audit.chain import Act, Detail
from tenancy.catalog import Catalog
from tenancy.errors import (
    KeyGone,
    KeyMismatch,
    KeyRefused,
    KeyUnavailable,
    NamespaceUnknown,
    RegistryRefused,
)
from tenancy.keys import epochs
from tenancy.keys.epochs import Epoch, EpochPolicy
from tenancy.keys.keylease import KeyLease
from tenancy.keys.keyring import Keyring, new_row, open_row, open_versions, versions_used, wrapped_anew
from tenancy.keys.keystore import KeyStore, KeyVersions
from tenancy.keys.rootkey import RootKey
from tenancy.keys.secret import KEY_BYTES, SecretBytes
from tenancy.keys.wrapping import KeyContext, WrappedKey, WrappingKey, wrapped_by
from tenancy.model import Namespace, Scope
from tenancy.ports import RandomBytes
from tenancy.registry import KeyRow

FAILURES_MAX: Final = 16
"""So many namespaces may fail in one run before it gives up: then it is not theirs, but the provider's or store's."""

GATEWAYS: Final = UUID(int=0)
"""In the key store, the name of the secret that belongs to the gateways and to no namespace."""


@dataclass(slots=True)
class Rewrapped:
    """What a run of `Custodian.rewrap` did."""

    root_key: str
    namespaces: int = 0
    """Namespaces whose keys are now wrapped by the newest keys, changed or not."""
    versions: int = 0
    """Namespace keys that the root key wrapped anew."""
    rows: int = 0
    """Data and id keys that a namespace key wrapped anew."""
    gone: int = 0
    """Namespaces that were shredded, and have nothing to wrap."""
    failed: dict[str, str] = field(default_factory=dict)
    """By namespace id what is wrong with its keys; they stay as they are."""
    retired: list[str] = field(default_factory=list)
    """Ids of root keys that were destroyed, since nothing is wrapped by them."""


@dataclass(frozen=True, slots=True)
class KeyStatus:
    """The keys of one namespace, without a key."""

    namespace: Namespace
    destroyed: bool
    versions: Mapping[int, str]
    """Versions of its own key, and the id of the root key that wrapped each."""
    epochs: list[Epoch]


class Custodian:
    """Rotates, re-wraps and destroys keys, for one gateway.

    Raises what the keyring raises, and `RegistryRefused` while another gateway is at it.
    """

    def __init__(
        self,
        catalog: Catalog,
        keyring: Keyring,
        root: RootKey,
        store: KeyStore,
        random_bytes: RandomBytes,
        now_ms: Callable[[], int],
    ) -> None:
        self._catalog = catalog
        self._keyring = keyring
        self._root = root
        self._store = store
        self._random_bytes = random_bytes
        self._now_ms = now_ms
        self._lease = KeyLease(catalog, now_ms)

    # Rotation

    async def rotate_data_key(self, scope: Scope, act: Act) -> int:
        """Seal with a new data key from now on; its epoch. What the keys before it sealed stays readable."""
        async with self._lease.alone():
            versions = await self._store.read(scope.namespace)
            newest = max(versions)
            namespace_key = (await open_versions(self._root, scope, versions, [newest]))[newest]

            def make(epoch: int) -> KeyRow:
                return new_row(namespace_key, scope, "data", epoch, self._random_bytes)

            now_ms = self._now_ms()
            epoch = await self._change(scope, act, lambda connection: epochs.rotate(connection, scope, make, now_ms))
        self._keyring.forget(scope)
        return epoch

    async def rotate_namespace_key(self, scope: Scope, act: Act) -> int:
        """Wrap the namespace's data and id keys by a new version of its own key, and drop the old ones; its version."""
        async with self._lease.alone():
            versions = await self._store.read(scope.namespace)
            version = max(versions) + 1
            context = KeyContext(scope.tenant, scope.namespace, "namespace", version)
            record = await self._root.wrap(SecretBytes(self._random_bytes(KEY_BYTES)), context)
            await self._replace(scope.namespace, {**versions, version: record})
            await self._rewrap_rows(scope, act, always=True)
            await self._drop_versions(scope)
            return version

    async def rotate_root_key(self, act: Act, tenant: UUID) -> str:
        """Make a root key that wraps from now on; its id. `rewrap` brings everything under it."""
        async with self._lease.alone():
            key_id = await self._root.rotate()
            act = replace(act, target=key_id)
            await self._catalog.act(act, self._lease.hold, tenant, self._now_ms())
            return key_id

    async def rewrap(self, act: Act, tenant: UUID, *, retire: bool = False) -> Rewrapped:
        """Wrap every namespace key by the newest root key, and every row by the newest namespace key.

        With `retire` the root keys that then wrap nothing are destroyed where they can be. What cannot be opened is
        reported and left. The act is recorded with the tenant of who asked.
        """
        async with self._lease.alone():
            await self._root.check()
            done = Rewrapped(self._root.key_id)
            await self._rewrap_pepper(done)
            for namespace in await self._namespaces():
                await self._lease.keep()
                await self._rewrap_one(namespace.scope, act, done)
            if retire:
                done.retired = await self._retire(done)
            summary: Detail = {
                "root_key": done.root_key,
                "versions": done.versions,
                "rows": done.rows,
                "failed": len(done.failed),
                "retired": " ".join(done.retired),
            }
            await self._catalog.act(replace(act, detail=summary), self._lease.hold, tenant, self._now_ms())
            return done

    async def change_epochs(self, scope: Scope, wanted: EpochPolicy, act: Act) -> None:
        """Change what may be opened, sealed and destroyed; on every gateway as soon as this returns."""
        await self._catalog.act(act, partial(epochs.change, scope=scope, wanted=wanted), scope.tenant, self._now_ms())

    # The end of keys

    async def shred(self, scope: Scope, act: Act) -> None:
        """Destroy a namespace's key: nothing that was sealed in it opens again, in whatever copy. Repeatable.

        Raises `RegistryRefused` for a protected namespace. Until it returned, it may not be complete: run it again.
        """
        await self._catalog.check_deletable(scope)
        await self._store.destroy(scope.namespace)
        self._keyring.destroy(scope)
        generation = await self._catalog.act(act, partial(epochs.bury, scope=scope), scope.tenant, self._now_ms())
        # Before it is acknowledged: an older catalog, which still lists the namespace, is refused from now on.
        await self._keyring.advance(generation)

    # What there is

    async def status(self, namespace: Namespace) -> KeyStatus:
        """The keys of a namespace: versions, root keys, epochs."""
        try:
            versions: KeyVersions = await self._store.read(namespace.scope.namespace)
        except KeyGone:
            return KeyStatus(namespace, True, {}, [])
        named = {version: wrapped_by(record) for version, record in versions.items()}
        return KeyStatus(namespace, False, named, await self._catalog.epochs(namespace.scope))

    async def root_status(self) -> tuple[str, str, dict[str, int]]:
        """Provider, id of the root key that wraps now, and how many keys in the store each root key wrapped."""
        await self._root.check()
        counts: dict[str, int] = {}
        for refs in (await self._refs()).values():
            for ref in refs:
                counts[ref] = counts.get(ref, 0) + 1
        return self._root.provider, self._root.key_id, counts

    # Steps

    async def _rewrap_one(self, scope: Scope, act: Act, done: Rewrapped) -> None:
        try:
            done.versions += await self._rewrap_versions(scope)
            done.rows += await self._rewrap_rows(scope, act)
            await self._drop_versions(scope)
        except (KeyGone, NamespaceUnknown):
            done.gone += 1
        except (KeyUnavailable, KeyRefused) as error:
            done.failed[str(scope.namespace)] = str(error)
            if len(done.failed) >= FAILURES_MAX:
                raise
        else:
            done.namespaces += 1

    async def _rewrap_versions(self, scope: Scope) -> int:
        """Bring the namespace's own key, in all its versions, under the newest root key; how many were not."""

        def context(version: int) -> KeyContext:
            return KeyContext(scope.tenant, scope.namespace, "namespace", version)

        return await self._rewrap_store(scope.namespace, context)

    async def _rewrap_pepper(self, done: Rewrapped) -> None:
        done.versions += await self._rewrap_store(
            GATEWAYS, lambda version: KeyContext(GATEWAYS, GATEWAYS, "token", version)
        )

    async def _rewrap_store(self, name: UUID, context: Callable[[int], KeyContext]) -> int:
        versions = await self._store.read(name)
        stale = [version for version, record in versions.items() if wrapped_by(record) != self._root.key_id]
        fresh = dict(versions)
        for version in stale:
            key = await self._root.unwrap(versions[version], context(version))
            fresh[version] = await self._root.wrap(key, context(version))
        if stale:
            await self._replace(name, fresh)
        return len(stale)

    async def _rewrap_rows(self, scope: Scope, act: Act, *, always: bool = False) -> int:
        """Bring the rows under the newest version of the namespace's key; how many were not.

        `always`: record the act even if there is nothing to do.
        """
        versions = await self._store.read(scope.namespace)
        newest = max(versions)
        used = versions_used(scope, await self._catalog.wrapped_keys(scope))
        if not used <= set(versions):
            raise KeyMismatch(
                f"keys of namespace {scope.namespace} are wrapped by versions of its key that the key store does not "
                "have; restore the newest copy of the key store"
            )
        if used == {newest} and not always:
            return 0
        wrapping = await open_versions(self._root, scope, versions, used | {newest})
        rows = await self._change(
            scope, act, partial(epochs.rewrap, scope=scope, anew=partial(self._anew, scope, wrapping))
        )
        self._keyring.forget(scope)
        return rows

    def _anew(self, scope: Scope, wrapping: Mapping[int, WrappingKey], row: KeyRow) -> KeyRow | None:
        newest = max(wrapping)
        if WrappedKey.parse(row.wrapped).version == newest:
            return None
        return wrapped_anew(wrapping[newest], scope, row, open_row(wrapping, scope, row), self._random_bytes)

    async def _drop_versions(self, scope: Scope) -> None:
        """Drop the versions that wrap no row, once all rows open with what the store says that it keeps."""
        versions = await self._store.read(scope.namespace)
        rows = await self._catalog.wrapped_keys(scope)
        needed = versions_used(scope, rows) | {max(versions)}
        if needed == set(versions):
            return
        wrapping = await open_versions(self._root, scope, versions, needed)
        for row in rows:
            open_row(wrapping, scope, row)
        await self._replace(scope.namespace, {version: versions[version] for version in needed})

    async def _retire(self, done: Rewrapped) -> list[str]:
        if done.failed:
            raise RegistryRefused(
                f"the keys of {len(done.failed)} namespaces could not be wrapped anew, and old root keys may be "
                f"needed for them, so none was destroyed; first: {next(iter(done.failed.values()))}"
            )
        refs = await self._refs()
        return await self._root.retire({ref for each in refs.values() for ref in each})

    async def _refs(self) -> dict[UUID, list[str]]:
        """For everything in the key store the root keys that wrapped it."""
        found = {}
        for name in (GATEWAYS, *(one.scope.namespace for one in await self._namespaces())):
            with contextlib.suppress(KeyGone):
                found[name] = [wrapped_by(record) for record in (await self._store.read(name)).values()]
        return found

    async def _namespaces(self) -> list[Namespace]:
        catalog = self._catalog
        return [one for tenant, _ in await catalog.tenants() for one in await catalog.namespaces(tenant)]

    async def _change(self, scope: Scope, act: Act, body: Callable[[Connection], int]) -> int:
        def held(connection: Connection) -> int:
            self._lease.hold(connection)
            return body(connection)

        return await self._catalog.act(act, held, scope.tenant, self._now_ms())

    async def _replace(self, name: UUID, versions: KeyVersions) -> None:
        await self._lease.keep()
        await self._store.replace(name, versions)
