"""Small chunks are read and stored in groups; each of them is still a hit or a miss of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from unittest import mock
from uuid import UUID

import pytest
from msgspec.structs import replace

from kvgw.channel import PlainChannel
from kvgw.gateway.payloads import VISIT_BYTES_MIN, group_size, groups, visit_size
from kvgw.model import Outcome
from kvgw.reports import Registered
from kvgw.settings import GIB, SharedMemorySettings, StagingSettings
from storage.errors import StagingBusy
from storage.resident import Resident
from storage.tier import blob_name
from tests.support.aio import aio
from tests.support.gateways import MIB, SMALL, House, Kind, format_of, house, keys_of, payloads_of, read

CHUNK = 16 * 1024
ANOTHER = UUID(int=0xA)


def test_groups_are_cut_by_bytes_and_by_what_a_tenant_may_hold() -> None:
    assert [len(group) for group in groups(range(100), group_size(64 * 1024, 1 << 30))] == [16] * 6 + [4]
    assert [len(group) for group in groups(range(3), group_size(64 * MIB, 1 << 30))] == [1, 1, 1]
    assert [len(group) for group in groups(range(4), group_size(64 * 1024, 128 * 1024))] == [2, 2]
    assert list(groups([], 1)) == []
    assert [visit_size(16, 64 * 1024, GIB), visit_size(1, 4 * MIB, GIB), visit_size(1, 96 * MIB, GIB)] == [256, 16, 1]
    assert [visit_size(256, 4096, GIB), visit_size(300, 1024, GIB)] == [256, 300], (
        "no more than are worth it, or a piece"
    )
    assert [visit_size(1, 4 * MIB, 20 * MIB), visit_size(16, 64 * 1024, MIB - 1)] == [5, 16], "no more than the share"


async def names_of(gateway: House, keys: list[bytes]) -> list[str]:
    """Names of the blobs, in the order in which they were stored."""
    scope = (await gateway.place()).scope
    rows = await gateway.opened.rooms.catalog._database.read(
        lambda connection: connection.exec_driver_sql("SELECT blob_id FROM entry ORDER BY depth").scalars().all()
    )
    assert len(rows) == len(keys)
    return [blob_name(scope.namespace, bytes(row)) for row in rows]


def damage_resident(gateway: House, name: str) -> None:
    resident = gateway.opened.rooms.staging._pool.residents.find(name)
    assert resident is not None
    resident.slot.view[1000] ^= 1


def damage_file(folder: Path, name: str) -> None:
    file = folder / "nvme" / name
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["unix", "shm", "tcp", "embedded"])
@aio
async def test_a_broken_chunk_costs_its_group_nothing(tmp_path: Path, kind: Kind) -> None:
    async with house(kind, tmp_path / "gw") as gateway:
        client = gateway.client()
        registered = await client.register(format_of(CHUNK))
        keys, payloads = keys_of(24), payloads_of(registered, 24)
        assert (await client.put(registered, keys, payloads)).stored == 24
        await gateway.opened.crew.drain_everywhere()
        names = await names_of(gateway, keys)
        staging = gateway.opened.rooms.staging
        for index in (0, 5, 6, 23):
            damage_resident(gateway, names[index])
        damage_file(gateway.opened.folder, names[6])
        staging.drop(names[9])
        staging.drop(names[10])
        damage_file(gateway.opened.folder, names[10])
        report, found = await read(client, registered, keys)
        expected: list[bytes | None] = [*payloads]
        expected[6] = expected[10] = None
        assert found == expected, "law 2: a miss for what opens nowhere, right bytes for everything else"
        tiers = {hit.index: hit.tier for hit in report.hits}
        assert [index for index, tier in sorted(tiers.items()) if tier == "nvme"] == [0, 5, 9, 23]
        await gateway.check_clean()
        report, found = await read(client, registered, keys)
        assert found == expected, "and again"
        assert report.outcome is Outcome.OK


@pytest.mark.parametrize("kind", ["unix", "shm", "embedded"])
@aio
async def test_readers_with_little_memory_all_get_everything(tmp_path: Path, kind: Kind) -> None:
    settings = replace(SMALL, staging=StagingSettings(bytes=4 * MIB, tenants=1))
    async with house(kind, tmp_path / "gw", settings=settings) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(CHUNK))
        keys, payloads = keys_of(256), payloads_of(registered, 256)
        for start in range(0, 256, 32):
            part = slice(start, start + 32)
            assert (await client.put(registered, keys[part], payloads[part])).stored == 32
            await gateway.opened.crew.drain_everywhere()
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(read(gateway.client(), registered, keys) for _ in range(3)))
        for report, found in answers:
            assert report.outcome is Outcome.OK
            assert found == payloads


@aio
async def test_what_is_pushed_and_what_is_not_arrives_alike(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        client = gateway.client()
        registered = await client.register(format_of(256 * 1024))
        keys, payloads = keys_of(8), payloads_of(registered, 8)
        await client.put(registered, keys, payloads)
        for patience in (0.0, 1e-9, 1.0):
            with (
                mock.patch("kvgw.server.exchange.PATIENCE_SECONDS", patience),
                mock.patch("kvgw.server.exchange.PATIENCE_BYTES_PER_SECOND", 1e18),
            ):
                assert (await read(client, registered, keys))[1] == payloads
        await gateway.check_clean()


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("patience", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["unix", "tcp"])
@aio
async def test_law_6_the_groups_of_a_get_take_turns_in_two_windows_that_are_zero_in_the_end(
    tmp_path: Path, kind: Kind, patience: float, *, cold: bool
) -> None:
    """What is in staging leaves in two visits, each with a quarter of what it may hold, whose pieces share a window."""
    async with house(kind, tmp_path / "gw") as gateway:
        client = gateway.client()
        registered = await client.register(format_of(256 * 1024))
        keys, payloads = keys_of(26), payloads_of(registered, 26)
        await client.put(registered, keys, payloads)
        await gateway.opened.crew.drain_everywhere()
        names = await names_of(gateway, keys)
        damage_resident(gateway, names[9])
        damage_file(gateway.opened.folder, names[9])
        staging = gateway.opened.rooms.staging
        for name in names if cold else ():
            staging.drop(name)
        with (
            mock.patch.object(type(staging), "window", autospec=True, side_effect=type(staging).window) as taken,
            mock.patch("kvgw.server.exchange.PATIENCE_SECONDS", patience),
        ):
            _, found = await read(client, registered, keys)
        assert found == [*payloads[:9], None, *payloads[10:]], "law 2: whoever had the window before"
        assert [call.args[2] for call in taken.call_args_list] == 2 * [3 * 256 * 1024], "nine of them"
        region = staging.window_region
        memory, start = gateway.opened.arena.memory, region.address - gateway.opened.arena.region.address
        assert not any(bytes(memory.view(start, region.length)))
        await gateway.check_clean()


@asynccontextmanager
async def stored(
    folder: Path, nbytes: int, count: int, kind: Kind = "unix"
) -> AsyncIterator[tuple[House, Registered, list[bytes], list[bytes]]]:
    """A roomy gateway that has so many chunks of `nbytes` in staging and on its disk."""
    settings = replace(SMALL, staging=StagingSettings(bytes=96 * MIB, tenants=1))
    async with house(kind, folder, settings=settings) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(nbytes))
        keys, payloads = keys_of(count), payloads_of(registered, count)
        assert (await client.put(registered, keys, payloads)).stored == count
        await gateway.opened.crew.drain_everywhere()
        yield gateway, registered, keys, payloads


@aio
async def test_a_visit_that_is_made_in_pieces_loses_nothing(tmp_path: Path) -> None:
    async with stored(tmp_path / "gw", 64 * 1024, 128) as (gateway, registered, keys, payloads):
        names = await names_of(gateway, keys)
        for name in names:
            gateway.opened.rooms.staging.drop(name)
        for index in (20, 127):
            damage_file(gateway.opened.folder, names[index])
        expected: list[bytes | None] = [*payloads]
        expected[20] = expected[127] = None
        for tier in ("nvme", "staging"):
            report, found = await read(gateway.client(), registered, keys)
            assert found == expected, "law 2"
            assert {hit.tier for hit in report.hits} == {tier}
        await gateway.check_clean()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@aio
async def test_law_6_a_group_fits_what_is_guaranteed_while_another_has_borrowed_the_rest(
    tmp_path: Path, kind: Kind
) -> None:
    settings = replace(
        SMALL, staging=StagingSettings(bytes=16 * MIB, tenants=4), shared_memory=SharedMemorySettings(bytes=0)
    )
    async with house(kind, tmp_path / "gw", settings=settings) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(64 * 1024))
        keys, payloads = keys_of(64), payloads_of(registered, 64)
        async with AsyncExitStack() as stack:
            with pytest.raises(StagingBusy):
                while True:
                    await stack.enter_async_context(gateway.opened.rooms.staging.window(ANOTHER, MIB // 4, 0.0))
            assert (await client.put(registered, keys, payloads)).stored == 64
            report, found = await read(client, registered, keys)
            assert (report.outcome, found) == (Outcome.OK, payloads)


@pytest.mark.parametrize(("nbytes", "count", "visits"), [(64 * 1024, 64, 1), (MIB, 24, 2), (4 * MIB, 6, 2)])
@aio
async def test_what_staging_has_leaves_in_few_visits_to_a_thread(
    tmp_path: Path, nbytes: int, count: int, visits: int
) -> None:
    async with stored(tmp_path / "gw", nbytes, count) as (gateway, registered, keys, payloads):
        workers = gateway.opened.rooms.workers
        with (
            mock.patch.object(workers, "run", side_effect=workers.run) as made,
            mock.patch("kvgw.server.exchange.PATIENCE_SECONDS", 10.0),
        ):
            assert (await read(gateway.client(), registered, keys))[1] == payloads
        assert made.call_count == visits
        await gateway.check_clean()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@aio
async def test_a_visit_gives_way_to_other_work_that_waits_for_its_thread(tmp_path: Path, kind: Kind) -> None:
    async with stored(tmp_path / "gw", MIB, 12, kind) as (gateway, registered, keys, payloads):
        workers, pool = gateway.opened.rooms.workers, gateway.opened.rooms.staging._pool
        with (
            mock.patch.object(workers, "wanted", return_value=True),
            mock.patch.object(workers, "run", side_effect=workers.run) as made,
            mock.patch.object(pool, "hold_now", side_effect=pool.hold_now) as held,
            mock.patch("kvgw.server.exchange.PATIENCE_SECONDS", 10.0),
        ):
            assert (await read(gateway.client(), registered, keys))[1] == payloads
        assert made.call_count == 12 * MIB // VISIT_BYTES_MIN
        assert [len(call.args[1]) for call in held.call_args_list] == [12, 4, 4], (
            "no more than it comes to, from then on"
        )
        await gateway.check_clean()


@aio
async def test_law_9_a_slow_client_has_no_more_held_for_it_than_it_is_sent(tmp_path: Path) -> None:
    """Each chunk is held once: what is held for each piece of a visit is the square of what it is worth."""
    async with stored(tmp_path / "gw", 64 * 1024, 128) as (gateway, registered, keys, payloads):
        staging = gateway.opened.rooms.staging
        held: list[int] = []

        def hold(tenant: UUID, blobs: Sequence[tuple[str, int]]) -> list[Resident]:
            run = hold_now(tenant, blobs)
            held.append(len(run))
            return run

        hold_now = staging._pool.hold_now
        with (
            mock.patch.object(staging._pool, "hold_now", hold),
            mock.patch.object(PlainChannel, "push", lambda *_: 0.0),  # as if the client took nothing meanwhile
        ):
            assert (await read(gateway.client(), registered, keys))[1] == payloads
        assert held == [128] + [16] * 7
        await gateway.check_clean()
