"""PostgreSQL keeps tenants apart by itself: row-level security, few grants; and quotas hold against many processes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from tenancy.errors import CatalogUnavailable
from tenancy.model import Scope
from tenancy.policy import Policy
from tenancy.postgres import PostgresDatabase, parse_url
from tenancy.registry import KeyRow
from tenancy.schema import metadata
from tenancy.sight import NO_TENANT, Sight
from tenancy.tokens import TokenRow
from tests.support.aio import aio
from tests.support.catalogs import APP_ROLE, OWNER_ROLE
from tests.tenancy.catalog_bench import ELSEWHERE, HERE, NOW, Bench
from tests.tenancy.races import race, reserve_until_full
from tests.tenancy.test_catalog_postgres import OnPostgres

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(120)]

OURS, THEIRS = UUID(int=0xA), UUID(int=0xB)
TENANTS_OWN = sorted(table.name for table in metadata.tables.values() if "tenant_id" in table.c)
PROTECTED = sorted(set(TENANTS_OWN) - {"tenant"})
COPIED = (
    "kv_format",
    "chunk",
    "entry",
    "entry_label",
    "placement",
    "tombstone",
    "reservation",
    "usage_hour",
    "deletion_job",
    "deletion_blob",
)
ADDED_ONLY = {"audit_record"}
"""Of these a gateway's role changes no row at all."""
RACE_SECONDS = 60.0


def token_row(tenant: UUID, token_id: str) -> TokenRow:
    return TokenRow(tenant, token_id, b"d" * 32, "chunk:get", "*", "default", NOW + 1000, None)


async def fill(backend: Any) -> Bench:
    """Two tenants with a row in every table each."""
    bench = await Bench.make(backend)
    await bench.put("a", "b", label_macs=(b"m" * 32,))
    await bench.delete("b")
    catalog = bench.backend.catalog(HERE)
    await catalog.create_tenant(THEIRS, "theirs", NOW)
    theirs = Scope(THEIRS, UUID(int=9))
    await catalog.create_namespace(theirs, "one", Policy(), [KeyRow("data", 1, b"k")], NOW)
    for tenant, token_id in ((OURS, "a" * 16), (THEIRS, "b" * 16)):
        await catalog.add_token(token_row(tenant, token_id), NOW)

    ours = bench.scope.namespace

    def copy(connection: Connection) -> None:
        """What the other tenant has is a copy of ours."""
        for name in COPIED:
            columns = [column.name for column in metadata.tables[name].c]
            chosen = [
                f"'{THEIRS}'"
                if one == "tenant_id"
                else f"'{theirs.namespace}'"
                if one == "namespace_id"
                else f'"{one}"'
                for one in columns
            ]
            names = ", ".join(f'"{one}"' for one in columns)
            connection.execute(
                text(
                    f"INSERT INTO {name} ({names}) SELECT {', '.join(chosen)} FROM {name} WHERE namespace_id = '{ours}'"
                )
            )

    await catalog.reserve(bench.batch(["c"]), b"r" * 16, NOW + 1000, NOW)
    for statement in (
        f"INSERT INTO usage_hour VALUES ('{OURS}', '{ours}', 0, 'lookups', 1)",
        "INSERT INTO deletion_job (tenant_id, namespace_id, job_id, kind, selector, state, requested_by, requested_ms, "
        f"entries, chunks, bytes, retained, note) VALUES ('{OURS}', '{ours}', 'job', 'keys', '', 'done', 'owner', 1, "
        "0, 0, 0, 0, '')",
        f"INSERT INTO deletion_blob VALUES ('{OURS}', '{ours}', 'job', 'blob')",
        f"INSERT INTO tenant_version VALUES ('{THEIRS}', 1)",
        f"INSERT INTO version_seen VALUES ('{OURS}', 'boot', 1), ('{THEIRS}', 'boot', 1)",
    ):
        await bench.backend.transact(runs(statement))
    await bench.backend.transact(copy)
    return bench


class TestRowLevelSecurity(OnPostgres):
    @asynccontextmanager
    async def filled(self, pool: int = 2, role: str = APP_ROLE) -> Any:
        """A database with two tenants' rows, reached as `role`."""
        async with self.backend() as backend:
            await fill(backend)
        database = PostgresDatabase(parse_url(self.server.url(self.database, role), None), pool=pool)
        try:
            yield database
        finally:
            await database.aclose()

    def sql(self, statement: str, role: str = APP_ROLE) -> str:
        return self.server.sql(statement, self.database, role)

    @aio
    async def test_I09_without_a_sight_no_row_of_any_tenant_is_seen(self) -> None:
        async with self.filled() as database:
            for name in PROTECTED:
                both = self.sql(f"SELECT count(DISTINCT tenant_id) FROM {name}", "postgres")
                assert both == "2", f"{name} must have rows of both, or this test says nothing"
                for sight, seen in ((NO_TENANT, []), (Sight(OURS), [OURS]), (Sight(THEIRS), [THEIRS])):
                    found = await database.read(tenants_in(name), sight)
                    assert found == seen, f"{name} under {sight}"
                assert self.sql(f"SELECT count(*) FROM {name}") == "0", "a session that set nothing"
                assert self.sql(f"SELECT count(*) FROM {name}", OWNER_ROLE) == "0", "I09: forced for the owner too"
                assert self.sql(f"SET kvgw.tenant = ''; SELECT count(*) FROM {name}") == "0"

    def test_every_table_of_tenants_is_protected_and_forced(self) -> None:
        rows = self.sql(
            "SELECT relname, relrowsecurity, relforcerowsecurity, "
            "(SELECT count(*) FROM pg_policy WHERE polrelid = c.oid) "
            "FROM pg_class c WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace ORDER BY 1",
            "postgres",
        ).splitlines()
        protected = [row.partition("|")[0] for row in rows if row.endswith("|t|t|1")]
        assert protected == PROTECTED, "a new table with a tenant needs its policy in the migration that makes it"
        assert {row.partition("|")[0] for row in rows if row.endswith("|f|f|0")} == {
            *(set(metadata.tables) - set(PROTECTED)),
            "alembic_version",
        }

    @aio
    async def test_I09_a_pooled_connection_carries_no_tenant_to_the_next(self) -> None:
        async with self.filled(pool=1) as database:
            ends = time.monotonic() + 10.0
            turns = 0
            see = tenants_in("entry")
            for turns in itertools.count():
                if turns == 10_000 or time.monotonic() > ends:
                    break
                match turns % 6:
                    case 0:
                        assert await database.read(see, Sight(OURS)) == [OURS]
                    case 1:
                        async with database._engine.begin() as connection:  # one that forgets to look
                            assert await connection.run_sync(see) == []
                    case 5:
                        assert await database.read(see, Sight(THEIRS)) == [THEIRS]
                    case 2:
                        assert await database.read(see, NO_TENANT) == []
                    case 3:
                        with pytest.raises(CatalogUnavailable, match="division by zero"):
                            await database.write(fails, Sight(THEIRS))
                    case 4:
                        assert await database.read(tenants_in("api_token"), Sight(token_id="a" * 16)) == [OURS]
            assert turns >= 500, f"only {turns} turns: too few to say anything"
            slow = asyncio.create_task(database.read(sleeps, Sight(OURS)))
            await asyncio.sleep(0.1)
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow
            assert await database.read(see, NO_TENANT) == [], "nor one whose transaction was cancelled"

    @aio
    async def test_a_tokens_look_up_sees_its_own_row_and_changes_none(self) -> None:
        async with self.filled() as database:
            for token_id, tenant in (("a" * 16, OURS), ("b" * 16, THEIRS)):
                assert await database.read(tenants_in("api_token"), Sight(token_id=token_id)) == [tenant]
            assert await database.read(tenants_in("api_token"), Sight(token_id="c" * 16)) == []
            assert await database.read(tenants_in("entry"), Sight(token_id="a" * 16)) == []
            for change in (
                "UPDATE api_token SET permissions = 'chunk:put'",
                f"UPDATE api_token SET tenant_id = '{THEIRS}'",
            ):
                with pytest.raises(CatalogUnavailable, match="row-level security"):
                    await database.write(runs(change), Sight(token_id="a" * 16))

    @aio
    async def test_nothing_of_another_tenant_can_be_written(self) -> None:
        async with self.filled() as database:
            for name in PROTECTED:
                taking = f"UPDATE {name} SET tenant_id = '{OURS}'"
                giving = f"UPDATE {name} SET tenant_id = '{THEIRS}' WHERE tenant_id = '{OURS}'"
                theirs = f"UPDATE {name} SET tenant_id = tenant_id WHERE tenant_id = '{THEIRS}'"
                if name in ADDED_ONLY:
                    for change in (taking, giving, theirs, f"DELETE FROM {name}", f"TRUNCATE {name}"):
                        with pytest.raises(CatalogUnavailable, match="permission denied"):
                            await database.write(runs(change), Sight(OURS))
                    continue
                assert await database.write(counts(theirs), Sight(OURS)) == 0
                assert (
                    await database.write(counts(f"DELETE FROM {name} WHERE tenant_id = '{THEIRS}'"), Sight(OURS)) == 0
                )
                with pytest.raises((CatalogUnavailable, IntegrityError), match="row-level security"):
                    await database.write(runs(giving), Sight(OURS))
                assert await database.write(counts(taking), Sight(OURS)) > 0, "its own rows, and no other's"
            whole = self.sql("SELECT count(*) FROM entry", "postgres")
            assert whole == "2"
            smuggled = f"INSERT INTO quota SELECT '{THEIRS}', '{UUID(int=77)}', 1, 1, 1, 0, 0, 0"
            with pytest.raises(CatalogUnavailable, match="row-level security"):
                await database.write(runs(smuggled), Sight(OURS))

    @pytest.mark.parametrize(
        "forbidden",
        [
            "ALTER TABLE chunk DISABLE ROW LEVEL SECURITY",
            "ALTER TABLE chunk NO FORCE ROW LEVEL SECURITY",
            "DROP POLICY tenant_rows ON chunk",
            "CREATE POLICY mine ON chunk USING (true)",
            "SET row_security = off; SELECT count(*) FROM chunk",
            f"SET ROLE {OWNER_ROLE}",
            "SET SESSION AUTHORIZATION postgres",
            f"ALTER ROLE {APP_ROLE} BYPASSRLS",
            "CREATE TABLE mine (n int)",
            "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
            "CREATE TRIGGER t BEFORE UPDATE ON chunk EXECUTE FUNCTION suppress_redundant_updates_trigger()",
            "DROP TABLE entry",
            "TRUNCATE entry",
            "ALTER TABLE entry ADD COLUMN mine int",
            "UPDATE alembic_version SET version_num = '0001'",
            "DELETE FROM alembic_version",
            "COPY chunk TO PROGRAM 'cat'",
        ],
    )
    def test_the_gateways_role_cannot_help_itself(self, forbidden: str) -> None:
        refusals = r"permission denied|must be owner|query would be affected|must be superuser|Only roles with"
        with pytest.raises(AssertionError, match=refusals):
            self.sql(forbidden)

    def test_its_grants_are_rows_and_nothing_else(self) -> None:
        rows = self.sql(
            "SELECT table_name, string_agg(privilege_type, ' ' ORDER BY privilege_type) "
            f"FROM information_schema.role_table_grants WHERE grantee = '{APP_ROLE}' GROUP BY 1",
            "postgres",
        ).splitlines()
        granted = dict(row.split("|") for row in rows)
        assert granted.pop("alembic_version") == "SELECT"
        append_only = {
            "audit_record": "INSERT SELECT",
            "audit_checkpoint": "INSERT SELECT",
            "audit_head": "SELECT UPDATE",
        }
        assert granted == dict.fromkeys(metadata.tables, "DELETE INSERT SELECT UPDATE") | append_only


def tenants_in(name: str) -> Callable[[Connection], list[UUID]]:
    statement = text(f"SELECT DISTINCT tenant_id FROM {name}")
    return lambda connection: list(connection.scalars(statement))


def runs(statement: str) -> Callable[[Connection], None]:
    def body(connection: Connection) -> None:
        connection.execute(text(statement))

    return body


def counts(statement: str) -> Callable[[Connection], int]:
    return lambda connection: connection.execute(text(statement)).rowcount


def fails(connection: Connection) -> None:
    connection.execute(text("SELECT 1 / 0"))


def sleeps(connection: Connection) -> None:
    connection.execute(text("SELECT pg_sleep(30)"))


class TestRaces(OnPostgres):
    @aio
    async def test_C11_after_the_epochs_floor_is_raised_every_older_chunk_is_a_miss_at_once(self) -> None:
        async with self.backend() as backend:
            bench = await Bench.make(backend)
            await bench.put("a", "b", durability="s3")
            assert len(await bench.see("a", "b")) == len(await bench.see("a", "b", node=ELSEWHERE)) == 2
            scope = bench.scope
            raise_floor = text(
                "UPDATE namespace SET epoch = 2, min_encrypt_epoch = 2, min_decrypt_epoch = 2 "
                "WHERE tenant_id = :t AND namespace_id = :n"
            )
            await backend.transact(
                lambda connection: connection.execute(raise_floor, {"t": scope.tenant, "n": scope.namespace})
            )
            assert await bench.see("a", "b") == await bench.see("a", "b", node=ELSEWHERE) == {}
            again = await bench.put("a", "b", durability="s3", epoch=2)
            assert again.reserved.wanted == (0, 1), "C11: nothing of the old epoch is taken for had"
            assert {found.epoch for found in (await bench.see("a", "b", node=ELSEWHERE)).values()} == {2}

    def limits(self, tenant: int, one: int, two: int) -> Bench:
        """A bench with limits of objects; made and left to the processes of a race."""
        made: list[Bench] = []

        async def make() -> None:
            async with self.backend() as backend:
                bench = await Bench.make(backend, tenant_limits=Policy(limit_objects=tenant))
                for scope, limit in ((bench.scope, one), (bench.other, two)):
                    await backend.transact(
                        runs(f"UPDATE quota SET limit_objects = {limit} WHERE scope_id = '{scope.namespace}'")
                    )
                made.append(bench)

        asyncio.run(make())
        return made[0]

    def counters(self) -> dict[str, str]:
        rows = self.server.sql("SELECT scope_id, objects, stored_bytes FROM quota", self.database).splitlines()
        return {scope: f"{objects} {stored}" for scope, objects, stored in (row.split("|") for row in rows)}

    def deadlocks(self) -> int:
        return int(self.server.sql(f"SELECT deadlocks FROM pg_stat_database WHERE datname = '{self.database}'"))

    def test_Q01_sixteen_processes_are_granted_the_limit_exactly(self) -> None:
        bench = self.limits(10**9, 1_000, 1)
        url = self.server.url(self.database, APP_ROLE)
        granted = race(16, reserve_until_full, [(url, n, [bench.scope]) for n in range(16)], RACE_SECONDS)
        assert sum(one[bench.scope] for one in granted) == 1_000, "Q01: law 4"
        assert self.counters()[str(bench.scope.namespace)] == f"1000 {1000 * 200}"
        reserved = self.server.sql("SELECT sum(objects), sum(bytes) FROM reservation", self.database)
        assert reserved == f"1000|{1000 * 200}", "counters = rows"

    def test_Q09_namespaces_in_crossing_order_do_not_wait_for_each_other(self) -> None:
        bench = self.limits(500, 300, 350)
        url = self.server.url(self.database, APP_ROLE)
        orders = ([bench.scope, bench.other], [bench.other, bench.scope])
        granted = race(8, reserve_until_full, [(url, n, orders[n % 2]) for n in range(8)], RACE_SECONDS)
        of = {scope: sum(one[scope] for one in granted) for scope in orders[0]}
        assert of[bench.scope] <= 300
        assert of[bench.other] <= 350
        assert sum(of.values()) == 500, "Q09: the tenant's limit, exactly"
        counters = self.counters()
        assert {counters[str(scope.namespace)] for scope in of} == {f"{count} {count * 200}" for count in of.values()}
        assert self.deadlocks() == 0
