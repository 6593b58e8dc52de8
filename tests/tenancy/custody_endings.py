"""The suite of the end of keys, on every database: places where they do not open, and their destruction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tenancy.errors import KeyMismatch, NamespaceUnknown, RegistryRefused
from tenancy.keys.epochs import EpochPolicy
from tenancy.keys.keystore import FileKeyStore
from tenancy.model import Scope
from tenancy.schema import namespace_key, owned
from tests.support.aio import aio
from tests.tenancy.custody_bench import ACT, ONE, TENANTS, THREE, TWO, CustodySuite, Interrupted, Setup, Trip
from tests.tenancy.samples import InlineWorkers


class CustodyEndings(CustodySuite):
    """Moved keys, and shredding."""

    # Places

    @aio
    async def test_C14_a_wrapped_key_opens_nowhere_else(self, tmp_path: Path) -> None:
        """Moved to another namespace, tenant, epoch or purpose in the catalog itself, or in the key store."""
        async with self.setup(tmp_path) as here:
            rows = await here.rows(THREE)
            for purpose, epoch in (("data", 1), ("id", 0)):
                stranger = (await here.rows(ONE))[purpose, epoch]
                await self.put_row(here, THREE, purpose, epoch, stranger)
                await self.refuses(here, THREE)
                await self.put_row(here, THREE, purpose, epoch, rows[purpose, epoch])
            for from_, to in ((("data", 1), ("data", 2)), (("data", 1), ("id", 0)), (("id", 0), ("data", 1))):
                await self.put_row(here, THREE, *to, rows[from_])
                await self.refuses(here, THREE)
                await self.put_row(here, THREE, *to, rows[to])
            store = await FileKeyStore.open(here.folder, InlineWorkers())
            mine, theirs = await store.read(THREE.namespace), await store.read(ONE.namespace)
            await store.replace(THREE.namespace, theirs)
            await self.refuses(here, THREE)
            await store.replace(THREE.namespace, mine)
            assert await here.opens() == here.expected

    async def put_row(self, here: Setup, scope: Scope, purpose: str, epoch: int, wrapped: bytes) -> None:
        statement = (
            namespace_key.update()
            .where(*owned(namespace_key, scope), namespace_key.c.purpose == purpose, namespace_key.c.epoch == epoch)
            .values(wrapped=wrapped)
        )
        await here.backend.transact(lambda connection: connection.execute(statement))

    async def refuses(self, here: Setup, scope: Scope) -> None:
        _, keyring, _ = await here.process("reader")
        with pytest.raises(KeyMismatch):
            await keyring.keys(scope)

    # The end

    @aio
    async def test_C13_a_shredded_namespace_has_no_key_left_and_its_state_says_so(self, tmp_path: Path) -> None:
        async with self.setup(tmp_path) as here:
            custodian, keyring, catalog = await here.process()
            held = await keyring.keys(ONE)
            old = await here.rows(ONE)
            await custodian.shred(ONE, ACT)
            assert len(held.data[1]) == 0, "zeroed, for requests that are under way"
            assert (await catalog.namespace(ONE.tenant, "ns-0")).state == "deleting"
            with pytest.raises(NamespaceUnknown):
                await here.rows(ONE)
            assert (await here.opens()).keys() == {TWO, THREE}
            await custodian.shred(ONE, ACT)  # again
            assert (await custodian.status(await catalog.namespace(ONE.tenant, "ns-0"))).destroyed
            done = await custodian.rewrap(ACT, TENANTS[0])
            assert (done.namespaces, done.gone) == (2, 1)
            for (purpose, epoch), record in old.items():  # an older catalog brings the rows back, but no key
                await here.backend.transact(partial(restore, scope=ONE, row=(purpose, epoch, record)))
            assert (await here.opens()).keys() == {TWO, THREE}

    @aio
    async def test_C13_a_shred_that_was_interrupted_is_run_again(self, tmp_path: Path) -> None:
        async with self.setup(tmp_path) as here:
            for number in range(1, 20):
                trip = Trip(at=number)
                custodian, _, catalog = await here.process("node-a", trip)
                try:
                    await custodian.shred(TWO, ACT)
                except Interrupted:
                    continue
                assert number > 2
                break
            assert (await here.opens()).keys() == {ONE, THREE}
            assert (await catalog.namespace(TWO.tenant, "ns-1")).state == "deleting"

    @aio
    async def test_a_protected_namespace_is_neither_shredded_nor_deleted(self, tmp_path: Path) -> None:
        async with self.setup(tmp_path) as here:
            custodian, _, catalog = await here.process()
            await custodian.change_epochs(ONE, EpochPolicy(deletion_allowed=False), ACT)
            now = here.clock.now_ms()
            for attempt in (
                custodian.shred(ONE, ACT),
                catalog.set_namespace_state(ONE, "deleting", ACT, now),
                catalog.set_tenant_state(ONE.tenant, "deleting", ACT, now),
            ):
                with pytest.raises(RegistryRefused, match="'ns-0' is protected"):
                    await attempt
            assert await here.opens() == here.expected
            await catalog.set_namespace_state(ONE, "suspended", ACT, now)
            await custodian.change_epochs(ONE, EpochPolicy(deletion_allowed=True), ACT)
            await custodian.shred(ONE, ACT)
            assert (await here.opens()).keys() == {TWO, THREE}


def restore(connection: Any, scope: Scope, row: Sequence[Any]) -> None:
    purpose, epoch, wrapped = row
    values = {
        "tenant_id": scope.tenant,
        "namespace_id": scope.namespace,
        "purpose": purpose,
        "epoch": epoch,
        "wrapped": wrapped,
        "created_ms": 1,
    }
    connection.execute(namespace_key.insert(), values)
