"""Starting gateways on the production footing: what is refused, with which sentence; and the database's failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from kvgw.datadir import FolderLocked
from kvgw.fence import LEASE_SECONDS
from kvgw.model import Durability, Outcome, PutOutcome
from kvgw.settings import CatalogSettings, KeySettings, NvmeSettings, S3Settings
from kvgw.wiring.catalog import open_database
from storage.errors import StorageError
from tenancy import migrate
from tenancy.errors import CatalogMisconfigured, CatalogTooNew, CatalogUnavailable, NodeTaken
from tenancy.postgres import PostgresDatabase, parse_url
from tenancy.timekeeping import CatalogTime
from tests.support.aio import aio
from tests.support.catalogs import APP_ROLE, OWNER_ROLE
from tests.support.gateways import MIB, format_of, keys_of, payloads_of, read
from tests.support.manual_clock import ManualClock
from tests.support.postgres import Postgres
from tests.support.proxy import Proxy
from tests.support.seaweed import S3Server
from tests.support.served import kvgw
from tests.support.several import Footing, crash, on_footing, pass_time

pytestmark = [pytest.mark.s3, pytest.mark.postgres, pytest.mark.timeout(120)]

STORED, HAVE = PutOutcome.STORED, PutOutcome.HAVE


# Company


@on_footing
async def test_two_gateways_of_one_name_are_refused_until_the_lease_is_over(shared: Footing) -> None:
    named = replace(shared.settings(), node="twin")
    late = ManualClock()
    async with shared.gateway("a", settings=named, clock=ManualClock()) as a:
        with pytest.raises(NodeTaken, match=r"node 'twin' is run by another .*a name, of its own"):
            async with shared.gateway("b", settings=named, clock=late):
                pass
        assert await shared.rows("SELECT count(*) FROM gateway_process WHERE left_ms IS NULL") == [(1,)]
        await a.opened.crew.heartbeat()
        await crash(a)
    with pytest.raises(NodeTaken, match="15 s later"):
        async with shared.gateway("b", settings=named, clock=late):
            pass
    age = f"UPDATE gateway_process SET heartbeat_ms = heartbeat_ms - {int(LEASE_SECONDS * 1000)} RETURNING 1"
    assert await shared.rows(age) == [(1,)]
    async with shared.gateway("b", settings=named, clock=late):
        pass
    async with shared.gateway("c", settings=named, clock=late):
        assert True, "who left in good order keeps nobody waiting"


@on_footing
async def test_R21_one_folder_is_one_gateways(shared: Footing) -> None:
    disk = NvmeSettings(dir=str(shared.folder / "disk"), capacity_bytes=64 * MIB, min_free_bytes=0)
    async with shared.gateway("a", settings=shared.settings(nvme=disk)) as a:
        with pytest.raises(FolderLocked, match=r"data folder .*/a is in use by process \d+"):
            async with shared.gateway("a"):
                pass
        with pytest.raises(StorageError, match=r"the gateway with data folder .*/a"):
            async with shared.gateway("b", settings=shared.settings(nvme=disk)):
                pass
        registered = await a.client().register(format_of())
        assert (await a.client().put(registered, [b"k"], payloads_of(registered, 1))).outcomes == (STORED,)


def alone_without_s3(shared: Footing) -> Any:
    return shared.settings(s3=S3Settings(), keys=KeySettings(dir=str(shared.folder / "file-keys")))


def alone_with_key_files(shared: Footing) -> Any:
    return shared.settings(keys=KeySettings(dir=str(shared.folder / "file-keys")))


ALONE = pytest.mark.parametrize(
    ("alone", "reason"), [(alone_without_s3, "has no s3.bucket"), (alone_with_key_files, "keys.store is file")]
)


@ALONE
def test_nobody_joins_a_gateway_that_cannot_share(
    postgres: Postgres, seaweed: S3Server, tmp_path: Path, alone: Any, reason: str
) -> None:
    async def body(shared: Footing) -> None:
        async with shared.gateway("a", settings=alone(shared)):
            for other in (shared.settings(), alone(shared)):
                with pytest.raises(CatalogMisconfigured, match=rf"only be alone on it: .*{reason}.* keys.store = s3"):
                    async with shared.gateway("b", settings=other):
                        pass
        async with shared.gateway("a", settings=alone(shared)):
            assert reason in (await shared.rows("SELECT alone FROM gateway_process"))[0][0]

    on_footing(body)(postgres, seaweed, tmp_path)


@ALONE
def test_a_gateway_that_cannot_share_joins_nobody(
    postgres: Postgres, seaweed: S3Server, tmp_path: Path, alone: Any, reason: str
) -> None:
    async def body(shared: Footing) -> None:
        async with shared.gateway("c", clock=ManualClock()) as c:
            for _ in range(2):
                with pytest.raises(CatalogMisconfigured, match=reason):
                    async with shared.gateway("a", settings=alone(shared)):
                        pass
            await crash(c)
        with pytest.raises(CatalogMisconfigured, match=reason):
            async with shared.gateway("a", settings=alone(shared)):
                pass
        assert await shared.rows("SELECT count(*) FROM gateway_process") == [(1,)], "who was refused left no trace"

    on_footing(body)(postgres, seaweed, tmp_path)


@on_footing
async def test_gateways_that_start_together_agree_on_one_first_token(shared: Footing) -> None:
    names = ("a", "b", "c", "d")
    async with AsyncExitStack() as stack:
        started = await asyncio.gather(*(stack.enter_async_context(shared.gateway(name)) for name in names))
        assert sum(one.opened.first_token is not None for one in started) == 1
        assert await shared.rows("SELECT count(*) FROM tenant UNION ALL SELECT count(*) FROM namespace") == [(1,), (1,)]
        registered = await started[0].client().register(format_of())
        await started[0].client().put(registered, [b"k"], payloads_of(registered, 1), durability=Durability.S3)
        for one in started:
            assert (await one.client().match(registered, [b"k"])).count == 1, "all of them have the same keys"


# The database refuses, or is not there


@contextlib.asynccontextmanager
async def database_of(url: str, password: str | None = None) -> AsyncIterator[PostgresDatabase]:
    database = PostgresDatabase(parse_url(url, password), pool=1)
    try:
        yield database
    finally:
        await database.aclose()


@on_footing
async def test_roles_that_see_or_could_do_too_much_are_refused(shared: Footing) -> None:
    server = shared.server
    for name, powers in (("mighty", "SUPERUSER"), ("bypassing", "BYPASSRLS")):
        server.sql(f"DROP ROLE IF EXISTS {name}; CREATE ROLE {name} LOGIN {powers}")
    server.sql(f"DROP ROLE IF EXISTS heir; CREATE ROLE heir LOGIN; GRANT {OWNER_ROLE} TO heir")
    for role, sentence in (
        ("mighty", "'mighty' is a superuser: it would see every tenant's rows"),
        ("bypassing", "'bypassing' may bypass row-level security"),
        (OWNER_ROLE, f"'{OWNER_ROLE}' owns the catalog's tables: it could switch row-level security off"),
        ("heir", "'heir' owns the catalog's tables"),
    ):
        with pytest.raises(CatalogMisconfigured, match=rf"{sentence}.*CREATE ROLE kvgw_app LOGIN.*catalog.owner_url"):
            async with shared.gateway(
                "a", settings=shared.settings(catalog=CatalogSettings(url=shared.url(user=role)))
            ):
                pass
    async with database_of(shared.url(user=APP_ROLE)) as database:
        await database.check_role()


@on_footing
async def test_a_refusal_of_the_server_is_passed_on_in_its_words(shared: Footing) -> None:
    server = shared.server
    server.sql("DROP ROLE IF EXISTS locked; CREATE ROLE locked LOGIN PASSWORD 'right'")
    rules = server.data / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text("host all locked 127.0.0.1/32 scram-sha-256\n" + before)
    server.sql("SELECT pg_reload_conf()")
    try:
        for url, password, sentence in (
            (shared.url(user="locked"), "wrong", 'password authentication failed for user "locked"'),
            (shared.url(user="nobody_at_all"), None, 'role "nobody_at_all" does not exist'),
            (shared.url().replace(shared.database, "no_such_database"), None, 'database "no_such_database" does not'),
        ):
            async with database_of(url, password) as database:
                with pytest.raises(CatalogUnavailable, match=f"the catalog database failed: {sentence}") as refusal:
                    await database.check_role()
            assert "wrong" not in str(refusal.value)
        async with database_of(shared.url(user="locked"), "right") as database:
            await database.check_role()
    finally:
        rules.write_text(before)
        server.sql("SELECT pg_reload_conf()")


@on_footing
async def test_an_old_schema_is_refused_with_the_command_and_a_newer_one_by_name(shared: Footing) -> None:
    for revision, error, sentence in (
        (
            "0001",
            CatalogMisconfigured,
            f"revision 0001, this release needs {migrate.newest_revision()}: run kvgw migrate",
        ),
        ("9999", CatalogTooNew, "revision 9999, which this release does not know"),
    ):
        await shared.rows(f"UPDATE alembic_version SET version_num = '{revision}' RETURNING 1")
        async with AsyncExitStack() as stack:
            with pytest.raises(error, match=sentence):
                await open_database(stack, shared.settings().catalog, shared.folder)
    shared.server.create_database(f"{shared.database}_empty")
    async with AsyncExitStack() as stack:
        settings = CatalogSettings(url=f"{shared.url()}_empty")
        with pytest.raises(CatalogMisconfigured, match=r"revision none.*kvgw migrate"):
            await open_database(stack, settings, shared.folder)


def test_serve_without_its_database_ends_with_a_sentence(tmp_path: Path) -> None:
    settings = {
        "KVGW__CATALOG__URL": "postgresql://kvgw_app@127.0.0.1:1/kvgw",
        "KVGW__SERVER__HTTP": "",
        "KVGW__STAGING__BYTES": "16777216",
    }
    run = kvgw("serve", "--data", str(tmp_path / "data"), **settings)
    assert run.returncode == 1
    assert "the catalog database does not answer" in run.stderr
    assert "Traceback" not in run.stdout + run.stderr


# The database fails later


@on_footing
async def test_a_database_that_breaks_off_in_a_put_costs_that_put_alone(shared: Footing) -> None:
    here = ManualClock()
    async with (
        Proxy(shared.server.port) as proxy,
        shared.gateway("a", settings=shared.settings(port=proxy.port), clock=here) as a,
    ):
        catalog = a.opened.rooms.catalog
        registered = await a.client().register(format_of())
        keys, payloads = keys_of(3), payloads_of(registered, 3)
        for step in ("reserve", "commit"):
            real = getattr(catalog, step)

            async def cut(*arguments: Any, real: Any = real) -> Any:
                proxy.cut()
                return await real(*arguments)

            with mock.patch.object(catalog, step, cut):
                report = await a.client().put(registered, keys, payloads)
            assert (report.outcome, report.stored) == (Outcome.OUTAGE, 0), step
            assert "database" in report.reason
            assert (await a.client().match(registered, keys)).outcome is Outcome.OUTAGE
            proxy.heal()
            assert (await a.client().match(registered, keys)).outcome is Outcome.OK, "the pool recovers by itself"
            await shared.check_quota()
        assert await shared.rows("SELECT count(*) FROM reservation") == [(1,)], (
            "the aborted one could not be given back"
        )
        await pass_time(a, 60.0)
        await a.opened.crew.sweep_everywhere()
        assert await shared.rows("SELECT count(*) FROM reservation") == [(0,)]
        assert (await a.client().stat()).stored_bytes == 0
        assert (await a.client().put(registered, keys, payloads)).outcomes == (STORED,) * 3
        await shared.check_clean(a)


@on_footing
async def test_S17_a_commit_whose_answer_was_lost_is_whole_or_heals(shared: Footing) -> None:
    async with shared.gateway("a", clock=ManualClock()) as a:
        catalog = a.opened.rooms.catalog
        await a.namespace("fast", durability=Durability.STAGED)
        safe, fast = a.client(), a.client("fast")
        on_disk, staged = await safe.register(format_of()), await fast.register(format_of())
        payloads = payloads_of(on_disk, 2)
        real = catalog.commit

        async def unheard(*arguments: Any) -> Any:
            await real(*arguments)
            raise CatalogUnavailable("the connection broke after COMMIT was sent")

        with mock.patch.object(catalog, "commit", unheard):
            assert (await safe.put(on_disk, [b"k"], payloads[:1])).outcome is Outcome.OUTAGE
            assert (await fast.put(staged, [b"k"], payloads[1:])).outcome is Outcome.OUTAGE
        assert (await read(safe, on_disk, [b"k"]))[1] == payloads[:1], "it was committed, and is whole"
        assert (await safe.put(on_disk, [b"k"], payloads[:1])).outcomes == (HAVE,)
        assert (await read(fast, staged, [b"k"]))[1] == [None], "its staging was given up: a miss, never wrong bytes"
        await a.opened.crew.drain_everywhere()
        assert (await fast.put(staged, [b"k"], payloads[1:])).outcomes == (STORED,), (
            "nothing claims to have it any more"
        )
        assert (await read(fast, staged, [b"k"]))[1] == payloads[1:]
        await a.opened.crew.sweep_everywhere()
        await shared.check_clean(a)


@on_footing
async def test_N09_connections_that_are_killed_again_and_again_come_back(shared: Footing) -> None:
    async with shared.gateway("a") as a:
        client = a.client()
        registered = await client.register(format_of())
        keys, payloads = keys_of(2), payloads_of(registered, 2)
        await client.put(registered, keys, payloads)
        answered = 0
        kill = (
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            f"WHERE datname = '{shared.database}' AND pid <> pg_backend_pid()"
        )
        for _ in range(30):
            await shared.rows(kill)
            report, found = await read(client, registered, keys)
            assert found in ([None, None], payloads), "law 3"
            answered += report.outcome is Outcome.OK
        assert answered >= 27, "N09: nine of ten reads are answered"
        async with asyncio.timeout(10):
            while (await client.match(registered, keys)).outcome is not Outcome.OK:
                await asyncio.sleep(0.05)
        await shared.check_clean(a)


@on_footing
async def test_R07_requests_behind_a_frozen_database_end_in_time_and_leave_nothing(shared: Footing) -> None:
    async with (
        Proxy(shared.server.port) as proxy,
        shared.gateway("a", settings=shared.settings(port=proxy.port)) as a,
    ):
        client = a.client()
        registered = await client.register(format_of())
        keys, payloads = keys_of(2), payloads_of(registered, 2)
        await client.put(registered, keys, payloads)
        proxy.freeze()
        started = asyncio.get_running_loop().time()
        impatient = a.client(read_deadline_s=0.3, write_deadline_s=0.3)
        answers = await asyncio.gather(*(impatient.match(registered, keys) for _ in range(6)))
        report = await impatient.put(registered, [b"new"], payloads[:1])
        assert asyncio.get_running_loop().time() - started < 3.0
        assert {one.outcome for one in answers} | {report.outcome} == {Outcome.OUTAGE}
        proxy.thaw()
        assert (await a.client().match(registered, keys)).count == 2
        await shared.check_clean(a, 30.0)


# Time


@pytest.mark.parametrize("wrong_by_ms", [1_200_000, -1_200_000])
def test_R59_a_gateways_wrong_wall_clock_changes_no_expiry(
    postgres: Postgres, seaweed: S3Server, tmp_path: Path, wrong_by_ms: int
) -> None:
    async def body(shared: Footing) -> None:
        database_ms = (await shared.rows("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"))[0][0]
        async with shared.gateway("a", clock=ManualClock(database_ms + wrong_by_ms)) as gateway:
            client = gateway.client()
            registered = await client.register(format_of())
            report = await client.put(registered, [b"k"], payloads_of(registered, 1), ttl=60)
            assert database_ms + 60_000 <= report.expires_ms <= database_ms + 120_000, "the database's time counts"
            assert (await client.match(registered, [b"k"])).count == 1
            skew_ms = gateway.opened.rooms.time.skew_ms
            assert wrong_by_ms - 60_000 < skew_ms < wrong_by_ms + 60_000
            await pass_time(gateway, 61)
            assert (await client.match(registered, [b"k"])).count == 0

    on_footing(body)(postgres, seaweed, tmp_path)


@aio
async def test_time_follows_the_database_and_never_runs_backward() -> None:
    clock = ManualClock(5_000)
    time = CatalogTime(clock, 0)
    assert time.now_ms() == 5_000
    time.adopt(1_000_000, clock.monotonic(), clock.monotonic())
    assert abs(time.now_ms() - 1_000_000) <= 1
    clock.advance(10)
    assert abs(time.now_ms() - 1_010_000) <= 1, "carried on by the monotonic clock"
    time.adopt(1_004_000, clock.monotonic(), clock.monotonic())
    assert abs(time.now_ms() - 1_010_000) <= 1, "not backward"
    assert 5_990 <= time.behind_ms <= 6_010
    clock.advance(7)
    assert abs(time.now_ms() - 1_013_500) <= 1, "at half its pace: it does not stand still"
    clock.advance(7)
    assert abs(time.now_ms() - 1_018_000) <= 1, "until the database's clock has caught up"
    assert time.behind_ms == 0


@aio
async def test_an_answer_that_took_long_does_not_move_time_further_than_it_proves() -> None:
    clock = ManualClock(0)
    time = CatalogTime(clock, 0)
    time.adopt(1_000_000, 0.0, 0.0)
    asked_at = clock.monotonic()
    clock.advance(20)
    time.adopt(1_020_000, asked_at, clock.monotonic())  # frozen for 20 s, its clock read at the very end
    assert abs(time.now_ms() - 1_020_000) <= 1, "the middle of those 20 s would have put it 10 s ahead"
    asked_at = clock.monotonic()
    clock.advance(2)
    time.adopt(1_030_000, asked_at, clock.monotonic())
    assert abs(time.now_ms() - 1_030_000) <= 1, "as far as it proves: it was at least this late when it answered"
