"""What the suites of the life of keys work with: real keys and files, a catalog, and processes that end anywhere.

Only time stands still. `Setup.opens` asks a new process what it can open.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from tenancy.audit.chain import Act
from tenancy.catalog import Catalog
from tenancy.errors import KeyGone, NamespaceUnknown
from tenancy.keys.custody import GATEWAYS, Custodian
from tenancy.keys.keyring import Keyring
from tenancy.keys.keystore import FileKeyStore
from tenancy.keys.rootkey import FileRootKey
from tenancy.keys.secret import SecretBytes
from tenancy.keys.wrapping import KeyContext, wrapped_by
from tenancy.model import Node, Scope
from tenancy.policy import Policy
from tenancy.registry import KeyRow
from tenancy.schema import audit_record
from tests.support.manual_clock import ManualClock
from tests.tenancy.catalog_bench import Backend
from tests.tenancy.samples import InlineWorkers

TENANTS = (UUID(int=0xA), UUID(int=0xB))
SCOPES = tuple(Scope(tenant, UUID(int=1 + index)) for index, tenant in enumerate((TENANTS[0], TENANTS[0], TENANTS[1])))
ONE, TWO, THREE = SCOPES
ACT = Act(actor="owner", action="key.test")


class Interrupted(Exception):
    """The process ended here."""


@dataclass
class Trip:
    """Ends the process before its `at`-th call."""

    at: int = 0
    calls: int = 0

    def guard(self, target: Any, *names: str) -> Any:
        """`target` with these coroutine methods counted."""
        trip = self

        class Guarded:
            def __getattr__(self, called: str) -> Any:
                method = getattr(target, called)
                return partial(trip.run, method) if called in names else method

        return Guarded()

    async def run(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise Interrupted(method.__name__)
        return await method(*arguments, **named)


@dataclass
class Setup:
    """A catalog, a keys folder, and as many processes as a test likes over them."""

    backend: Backend
    folder: Path
    clock: ManualClock = field(default_factory=ManualClock)
    expected: dict[Scope, Any] = field(default_factory=dict)

    async def process(self, node: str = "node-a", trip: Trip | None = None) -> tuple[Custodian, Keyring, Catalog]:
        catalog: Any = self.backend.catalog(Node(node, f"boot-{node}"))
        root: Any = await FileRootKey.open_or_create(self.folder, InlineWorkers(), os.urandom)
        store: Any = await FileKeyStore.open(self.folder, InlineWorkers())
        if trip is not None:
            catalog = trip.guard(catalog, "act", "wrapped_keys", "lead", "namespaces")
            root = trip.guard(root, "wrap", "unwrap", "rotate", "retire")
            store = trip.guard(store, "read", "replace", "destroy", "advance")
        keyring = Keyring(root, store, catalog, self.clock, os.urandom)
        return Custodian(catalog, keyring, root, store, os.urandom, self.clock.now_ms), keyring, catalog

    async def fill(self) -> None:
        """Two tenants, three namespaces, the third of which has two epochs; and the gateways' own secret."""
        custodian, keyring, catalog = await self.process()
        for number, tenant in enumerate(TENANTS):
            await catalog.create_tenant(tenant, f"tenant-{number}", self.clock.now_ms())
        for number, scope in enumerate(SCOPES):
            rows = await keyring.create(scope)
            await catalog.create_namespace(scope, f"ns-{number}", Policy(), rows, self.clock.now_ms())
        await custodian.rotate_data_key(THREE, ACT)
        root = await FileRootKey.open(self.folder, InlineWorkers(), os.urandom)
        store = await FileKeyStore.open(self.folder, InlineWorkers())
        pepper = await root.wrap(SecretBytes(b"p" * 32), KeyContext(GATEWAYS, GATEWAYS, "token", 1))
        await store.create(GATEWAYS, {1: pepper})
        self.expected = await self.opens()

    async def opens(self) -> dict[Scope, Any]:
        """What a new process opens: every secret by its place."""
        _, keyring, catalog = await self.process("reader")
        found: dict[Scope, Any] = {}
        for tenant, _ in await catalog.tenants():
            for namespace in await catalog.namespaces(tenant):
                try:
                    keys = await keyring.keys(namespace.scope)
                except (KeyGone, NamespaceUnknown):
                    continue
                found[namespace.scope] = (
                    {epoch: key.reveal() for epoch, key in keys.data.items()},
                    keys.names.entry.reveal(),
                )
        return found

    async def versions(self, scope: Scope) -> dict[int, str]:
        store = await FileKeyStore.open(self.folder, InlineWorkers())
        return {version: wrapped_by(record) for version, record in (await store.read(scope.namespace)).items()}

    async def rows(self, scope: Scope) -> dict[tuple[str, int], bytes]:
        catalog = self.backend.catalog(Node("reader", "boot-reader"))
        return {(row.purpose, row.epoch): row.wrapped for row in await catalog.wrapped_keys(scope)}

    async def actions(self) -> list[str]:
        found = await self.backend.transact(
            lambda connection: connection.execute(audit_record.select().order_by(audit_record.c.seq)).all()
        )
        return [row.action for row in found]

    @property
    def root_files(self) -> list[str]:
        return sorted(name for name in os.listdir(self.folder) if name.startswith("root"))


class CustodySuite:
    """Say how an empty catalog is opened (`backend`)."""

    def backend(self) -> AbstractAsyncContextManager[Backend]:
        raise NotImplementedError

    @asynccontextmanager
    async def setup(self, tmp_path: Path) -> AsyncIterator[Setup]:
        async with self.backend() as backend:
            made = Setup(backend, tmp_path / "keys")
            await made.fill()
            yield made


def row_of(epoch: int) -> KeyRow:
    return KeyRow("data", epoch, b"k")
