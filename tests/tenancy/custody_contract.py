"""The suite of the life of keys, on every database: rotation, re-wrapping, and interruptions of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tenancy.errors import RegistryRefused, ReservationExpired
from tenancy.keys import epochs
from tenancy.keys.custody import Custodian
from tenancy.keys.epochs import EpochPolicy
from tenancy.keys.keylease import LEASE_MS
from tenancy.keys.keystore import FileKeyStore
from tenancy.keys.rootkey import FileRootKey
from tenancy.keys.wrapping import WrappedKey
from tenancy.model import Node, Scope
from tenancy.schema import namespace, owned
from tests.support.aio import aio
from tests.tenancy.catalog_bench import Backend, Bench
from tests.tenancy.custody_bench import (
    ACT,
    ONE,
    SCOPES,
    TENANTS,
    THREE,
    TWO,
    CustodySuite,
    Interrupted,
    Setup,
    Trip,
    row_of,
)
from tests.tenancy.samples import InlineWorkers


class CustodyContract(CustodySuite):
    """Rotation and re-wrapping."""

    # Data keys

    @aio
    async def test_C10_a_rotation_adds_a_key_and_takes_none(self, tmp_path: Path) -> None:
        async with self.setup(tmp_path) as here:
            custodian, keyring, catalog = await here.process()
            before = await keyring.keys(ONE)
            assert await custodian.rotate_data_key(ONE, ACT) == 2
            after = await keyring.keys(ONE)
            assert after.data[1] == before.data[1]
            assert after.data[2] != before.data[1]
            assert after.names.entry == before.names.entry, "names stay: nothing goes cold"
            found = await catalog.namespace(ONE.tenant, "ns-0")
            assert (found.epoch, found.min_encrypt_epoch, found.min_decrypt_epoch) == (2, 1, 1)
            assert (await here.actions())[-1] == "key.test"

    @aio
    async def test_C10_a_process_that_meets_a_new_epoch_opens_it_at_once(self, tmp_path: Path) -> None:
        async with self.setup(tmp_path) as here:
            custodian, _, _ = await here.process()
            _, elsewhere, _ = await here.process("node-b")
            held = await elsewhere.keys(ONE)
            await custodian.rotate_data_key(ONE, ACT)
            assert await elsewhere.keys(ONE) is held, "in memory"
            assert sorted((await elsewhere.keys(ONE, (2,))).data) == [1, 2]
            absent = await elsewhere.keys(ONE, (2, 9))
            assert await elsewhere.keys(ONE, (9,)) is absent, "what is not there is looked for once"

    @aio
    async def test_C10_what_was_sealed_before_a_rotation_is_announced_with_its_epoch(self, tmp_path: Path) -> None:
        """And what was sealed with a key that is gone, or no more to be used, is not: it would open nowhere."""
        async with self.backend() as backend:
            bench = await bench_in_epoch_2(backend)
            batch = bench.batch(["a"])
            await bench.catalog.reserve(batch, b"r" * 16, bench.now + 1000, bench.now)
            await self.act(bench, lambda connection: epochs.rotate(connection, bench.scope, row_of, bench.now))
            chunk = bench.new_chunk(0, "a", epoch=1, written=frozenset({"nvme"}))
            await bench.catalog.commit(batch, b"r" * 16, [chunk], bench.now)
            assert (await bench.see("a"))["a"].epoch == 1
            for number, wanted in enumerate((EpochPolicy(min_encrypt_epoch=2), EpochPolicy(min_decrypt_epoch=2))):
                key = f"b{number}"
                batch, reservation = bench.batch([key]), bytes([number]) * 16
                await bench.catalog.reserve(batch, reservation, bench.now + 1000, bench.now)
                await self.act(bench, partial(epochs.change, scope=bench.scope, wanted=wanted))
                chunk = bench.new_chunk(0, key, epoch=1, written=frozenset({"nvme"}))
                with pytest.raises(ReservationExpired, match="not used any more"):
                    await bench.catalog.commit(batch, reservation, [chunk], bench.now)
                await bench.catalog.abort(bench.scope, reservation)

    @aio
    async def test_a_key_goes_when_no_live_chunk_needs_it_and_no_request_can(self, tmp_path: Path) -> None:
        async with self.backend() as backend:
            bench = await bench_in_epoch_2(backend)
            scope, later = bench.scope, bench.now + 10
            put = await bench.put("old", epoch=1)
            await self.act(bench, lambda connection: epochs.rotate(connection, scope, row_of, later))
            for before, wanted in ((later, []), (later + 1, [2])):
                assert await bench.catalog.unused_epochs(scope, before) == wanted, "the bench's keys 1 and 2 are old"
            assert put.blobs
            assert await self.act(bench, partial(epochs.prune, scope=scope, superseded_before_ms=later + 1)) == [2]
            await bench.catalog.delete_keys(scope, 1, bench.batch(["old"]).entry_keys, bench.now)
            assert await self.act(bench, partial(epochs.prune, scope=scope, superseded_before_ms=later + 1)) == [1]
            assert [one.epoch for one in await bench.catalog.epochs(scope)] == [3]
            batch = bench.batch(["late"])
            await bench.catalog.reserve(batch, b"l" * 16, bench.now + 1000, bench.now)
            chunk = bench.new_chunk(0, "late", epoch=1, written=frozenset({"nvme"}))
            with pytest.raises(ReservationExpired):
                await bench.catalog.commit(batch, b"l" * 16, [chunk], bench.now)
            await bench.catalog.abort(scope, b"l" * 16)

    async def act(self, bench: Bench, body: Callable[[Any], Any]) -> Any:
        return await bench.backend.catalog(Node("node-a", "boot-1")).act(ACT, body, bench.scope.tenant, bench.now)

    # Epochs that may be used

    @pytest.mark.parametrize(
        ("wanted", "becomes"),
        [
            (EpochPolicy(min_decrypt_epoch=2), (2, 2)),
            (EpochPolicy(min_encrypt_epoch=2), (1, 2)),
            (EpochPolicy(min_decrypt_epoch=2, min_encrypt_epoch=2), (2, 2)),
            (EpochPolicy(min_decrypt_epoch=3), None),
            (EpochPolicy(min_encrypt_epoch=3), None),
            (EpochPolicy(min_decrypt_epoch=2, min_encrypt_epoch=1), None),
            (EpochPolicy(min_decrypt_epoch=0), None),
        ],
    )
    @aio
    async def test_C11_the_knobs_are_those_of_vault(
        self, tmp_path: Path, wanted: EpochPolicy, becomes: tuple[int, int] | None
    ) -> None:
        async with self.setup(tmp_path) as here:
            custodian, _, catalog = await here.process()
            if becomes is None:
                with pytest.raises(RegistryRefused, match="min_decrypt_epoch"):
                    await custodian.change_epochs(THREE, wanted, ACT)
                becomes = (1, 1)
            else:
                await custodian.change_epochs(THREE, wanted, ACT)
            found = await catalog.namespace(THREE.tenant, "ns-2")
            assert (found.min_decrypt_epoch, found.min_encrypt_epoch) == becomes

    @aio
    async def test_C11_entries_of_epochs_that_are_too_low_end(self, tmp_path: Path) -> None:
        async with self.backend() as backend:
            bench = await bench_in_epoch_2(backend)
            await bench.put("old", epoch=1)
            await self.act(bench, lambda connection: epochs.rotate(connection, bench.scope, row_of, bench.now))
            await bench.put("new", epoch=3)
            await self.act(bench, partial(epochs.change, scope=bench.scope, wanted=EpochPolicy(min_decrypt_epoch=3)))
            assert set(await bench.see("old", "new")) == {"new"}, "at once, by every statement"
            count, dead = await bench.catalog.end_unreadable(bench.scope, bench.now, 100)
            assert (count, len(dead)) == (1, 1)
            assert set(await bench.see("new")) == {"new"}
            assert await bench.catalog.end_unreadable(bench.scope, bench.now, 100) == (0, [])

    # Wrapping keys

    @aio
    async def test_a_namespace_key_rotates_by_wrapping_rows_alone(self, tmp_path: Path) -> None:
        async with self.setup(tmp_path) as here:
            custodian, _, _ = await here.process()
            before = await here.rows(THREE)
            assert await custodian.rotate_namespace_key(THREE, ACT) == 2
            after = await here.rows(THREE)
            assert {WrappedKey.parse(record).version for record in after.values()} == {2}
            assert before.keys() == after.keys()
            assert list(await here.versions(THREE)) == [2], "the old version is gone"
            assert await here.opens() == here.expected

    @aio
    async def test_what_is_read_between_the_two_halves_of_a_rotation_is_read_again(self, tmp_path: Path) -> None:
        async with self.setup(tmp_path) as here:
            custodian, _, _ = await here.process()
            _, reader, catalog = await here.process("node-b")
            real, asked = catalog.wrapped_keys, 0

            async def slow(scope: Scope) -> Any:
                nonlocal asked
                asked += 1
                rows = await real(scope)
                if asked == 1:
                    await custodian.rotate_namespace_key(ONE, ACT)  # and drops the version that wrapped these rows
                return rows

            catalog.wrapped_keys = slow
            assert (await reader.keys(ONE)).data[1].reveal() == here.expected[ONE][0][1]
            assert asked == 2

    @aio
    async def test_a_root_key_rotates_by_wrapping_namespace_keys_alone(self, tmp_path: Path) -> None:
        async with self.setup(tmp_path) as here:
            custodian, _, _ = await here.process()
            rows = [await here.rows(scope) for scope in SCOPES]
            (old,) = set((await here.versions(ONE)).values())
            new = await custodian.rotate_root_key(ACT, TENANTS[0])
            assert await here.opens() == here.expected, "the old one still opens"
            done = await custodian.rewrap(ACT, TENANTS[0])
            assert (done.root_key, done.namespaces, done.versions, done.rows, done.failed) == (new, 3, 4, 0, {})
            assert [await here.rows(scope) for scope in SCOPES] == rows, "the catalog's rows were not touched"
            assert {ref for scope in SCOPES for ref in (await here.versions(scope)).values()} == {new}
            assert here.root_files == [f"root-{old}.key", "root.key"]
            assert (await custodian.rewrap(ACT, TENANTS[0], retire=True)).retired == [old]
            assert here.root_files == ["root.key"]
            assert await here.opens() == here.expected
            assert (await custodian.root_status()) == ("file", new, {new: 4})

    @aio
    async def test_no_root_key_is_destroyed_while_anything_may_need_it(self, tmp_path: Path) -> None:
        async with self.setup(tmp_path) as here:
            custodian, _, _ = await here.process()
            await custodian.rotate_root_key(ACT, TENANTS[0])
            store = await FileKeyStore.open(here.folder, InlineWorkers())
            moved = await store.read(TWO.namespace)
            await store.replace(ONE.namespace, moved)  # a key that belongs to another namespace opens nothing here
            with pytest.raises(RegistryRefused, match="none was destroyed"):
                await custodian.rewrap(ACT, TENANTS[0], retire=True)
            assert len(here.root_files) == 2
            done = await custodian.rewrap(ACT, TENANTS[0])
            assert (done.namespaces, list(done.failed)) == (2, [str(ONE.namespace)])

    @pytest.mark.parametrize("what", ["namespace", "root"])
    @aio
    async def test_C12_interrupted_anywhere_and_run_again_it_ends_right(self, tmp_path: Path, what: str) -> None:
        async with self.setup(tmp_path) as here:
            for number in range(1, 200):
                trip = Trip(at=number)
                custodian, _, _ = await here.process("node-a", trip)
                try:
                    await run(custodian, what)
                except Interrupted:
                    assert await here.opens() == here.expected, f"call {number}"
                    here.clock.advance(LEASE_MS / 1000 + 1)
                    again, _, _ = await here.process("node-b")
                    await run(again, what)
                    await self.check_tidy(here, what)
                    assert await here.opens() == here.expected, f"call {number}, run again"
                    here.clock.advance(LEASE_MS / 1000 + 1)
                    continue
                assert number > 8, "it made calls to be interrupted at"
                return
            raise AssertionError("it never ended")

    async def check_tidy(self, here: Setup, what: str) -> None:
        if what == "namespace":
            assert len(await here.versions(TWO)) == 1
            return
        current = (await FileRootKey.open(here.folder, InlineWorkers(), os.urandom)).key_id
        for scope in SCOPES:
            assert set((await here.versions(scope)).values()) == {current}
        assert here.root_files == ["root.key"]

    @aio
    async def test_two_gateways_do_not_change_keys_at_once(self, tmp_path: Path) -> None:
        async with self.setup(tmp_path) as here:
            custodian, _, catalog = await here.process()
            other, _, _ = await here.process("node-b")
            real = catalog.wrapped_keys
            refused: list[Exception] = []

            async def meanwhile(scope: Scope) -> Any:
                try:
                    await other.rotate_namespace_key(TWO, ACT)
                except RegistryRefused as error:
                    refused.append(error)
                return await real(scope)

            catalog.wrapped_keys = meanwhile
            await custodian.rotate_namespace_key(ONE, ACT)
            assert refused
            await other.rotate_namespace_key(TWO, ACT)
            assert await here.opens() == here.expected

    @aio
    async def test_a_gateway_that_overslept_its_lease_changes_no_row(self, tmp_path: Path) -> None:
        async with self.setup(tmp_path) as here:
            custodian, _, catalog = await here.process()
            other, _, _ = await here.process("node-b")
            real = catalog.wrapped_keys

            async def oversleep(scope: Scope) -> Any:
                catalog.wrapped_keys = real
                rows = await real(scope)
                here.clock.advance(LEASE_MS / 1000 + 1)
                other_lease = other._lease
                await other_lease.keep()
                return rows

            catalog.wrapped_keys = oversleep
            before = await here.rows(ONE)
            with pytest.raises(RegistryRefused, match="begun to change keys"):
                await custodian.rotate_namespace_key(ONE, ACT)
            assert await here.rows(ONE) == before
            assert await here.opens() == here.expected


async def bench_in_epoch_2(backend: Backend) -> Bench:
    """The catalog suite's bench, in which the keys of epochs 1 and 2 are there."""
    bench = await Bench.make(backend)
    await bench.run(namespace.update().where(*owned(namespace, bench.scope)).values(epoch=2))
    return bench


async def run(custodian: Custodian, what: str) -> None:
    if what == "namespace":
        await custodian.rotate_namespace_key(TWO, ACT)
        return
    await custodian.rotate_root_key(ACT, TENANTS[0])
    done = await custodian.rewrap(ACT, TENANTS[0], retire=True)
    assert not done.failed
