"""Law 5 with several gateways on PostgreSQL that answer matches from memory: what one ends, none still has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvgw.client import Client
from kvgw.errors import RequestRefused
from kvgw.model import Durability, Label, Outcome
from kvgw.reports import Registered
from tenancy import postgres
from tenancy.schema import VERSION_MAX
from tests.kvgw.test_match_index import CLOSING, END
from tests.support.admin import Admin
from tests.support.gateways import House, format_of, keys_of, payloads_of
from tests.support.proxy import Proxy
from tests.support.several import Footing, on_footing

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.timeout(120)]

KEYS = keys_of(4)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy is no database that is away."""
    monkeypatch.setattr(postgres, "QUICK_SECONDS", 20.0)


@dataclass
class Pair:
    """Two gateways; `b` may answer from memory, and hears of `a` when it is told to look."""

    shared: Footing
    a: House
    b: House
    writer: Client
    reader: Client
    registered: Registered
    link: Proxy
    """Of `b` to the database."""
    asked: list[Any]
    """Look-ups of `b` in the catalog."""

    async def poll(self) -> None:
        await self.b.opened.crew.heartbeat()
        coherence = self.b.opened.rooms.coherence
        assert coherence is not None
        await coherence.poll()

    async def warm(self) -> None:
        """Let `b` answer from memory; on a machine that is busy a lease may be over before it is used."""
        for _ in range(50):
            await self.poll()
            for _ in range(3):
                before = len(self.asked)
                assert (await self.reader.match(self.registered, KEYS)).count == len(KEYS)
                if len(self.asked) == before:
                    return
        raise AssertionError("it never answered from memory")

    async def matched(self) -> int:
        return (await self.reader.match(self.registered, KEYS)).count


@asynccontextmanager
async def pair(shared: Footing) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(Proxy(shared.server.port))
        a = await stack.enter_async_context(shared.gateway("a"))
        b = await stack.enter_async_context(shared.gateway("b", settings=shared.settings(port=link.port)))
        writer, reader = a.client(), b.client(read_deadline_s=20.0)
        registered = await writer.register(format_of())
        labels = [Label("user", "u")]
        payloads = payloads_of(registered, len(KEYS))
        await writer.put(registered, KEYS, payloads, durability=Durability.S3, labels=labels, deadline_s=30)
        catalog, asked = b.opened.rooms.catalog, []
        looked_up = catalog.lookup

        async def lookup(*given: Any) -> Any:
            asked.append(given)
            return await looked_up(*given)

        catalog.lookup = lookup  # type: ignore[method-assign]
        yield Pair(shared, a, b, writer, reader, registered, link, asked)


async def waits(house: House) -> None:
    """Return when a transaction of that gateway is committed and waits to be acknowledged."""
    coherence = house.opened.rooms.coherence
    assert coherence is not None
    while not coherence._waiting:
        await asyncio.sleep(0.001)


@on_footing
async def test_law_5_a_delete_is_acknowledged_when_every_other_gateway_has_dropped_it(shared: Footing) -> None:
    async with pair(shared) as both:
        await both.warm()
        going = asyncio.create_task(both.writer.delete(both.registered, KEYS[2:]))
        await waits(both.a)
        assert not going.done(), "the other gateway still answers it from memory"
        await both.poll()
        assert await going == 2
        assert await both.matched() == 2, "law 5"
        # A second delete finds nothing, and still speaks for what the first one took.
        assert await both.writer.delete(both.registered, KEYS[2:]) == 0
        await both.poll()
        assert await both.matched() == 2


@on_footing
async def test_law_5_a_gateway_that_is_cut_off_answers_nothing_from_memory(shared: Footing) -> None:
    """N08: of the database."""
    async with pair(shared) as both:
        await both.warm()
        both.link.freeze()
        assert await both.writer.delete(both.registered, KEYS) == 4
        report = await both.reader.match(both.registered, KEYS, deadline_s=0.5)
        assert (report.outcome, report.count) == (Outcome.OUTAGE, 0), "law 5: its lease is over, and it cannot ask"
        assert await both.shared.rows("SELECT 1 FROM version_seen WHERE version = 0") == [], "nobody waits for it again"
        both.link.thaw()
        both.link.cut()
        both.link.heal()
        assert await both.matched() == 0, "law 5"


@pytest.mark.slow
@on_footing
async def test_law_5_versions_go_round(shared: Footing) -> None:
    async with pair(shared) as both:
        await both.warm()
        tenant = both.a.owner.tenant
        await both.shared.rows(
            f"INSERT INTO tenant_version VALUES ('{tenant}', {VERSION_MAX}) "
            f"ON CONFLICT (tenant_id) DO UPDATE SET version = {VERSION_MAX} RETURNING 1"
        )
        await both.shared.rows(f"UPDATE version_seen SET version = {VERSION_MAX} RETURNING 1")
        await both.warm()
        for left in (3, 2):
            going = asyncio.create_task(both.writer.delete(both.registered, [KEYS[left]]))
            await waits(both.a)
            await both.poll()
            assert await going == 1
            assert await both.matched() == left, "law 5"
        ((version,),) = await both.shared.rows("SELECT version FROM tenant_version")
        assert version < 1000, "it went round"


@on_footing
async def test_while_a_gateway_of_an_earlier_release_lives_nothing_is_answered_from_memory(shared: Footing) -> None:
    async with pair(shared) as both:
        await both.warm()
        now_ms = both.b.now_ms()
        await both.shared.rows(
            "INSERT INTO gateway_process (boot_id, node, version, started_ms, heartbeat_ms) "
            f"VALUES ('old', 'old', '0', {now_ms}, {now_ms}) RETURNING 1"
        )
        for _ in range(3):
            await both.poll()
            before = len(both.asked)
            assert await both.matched() == 4
            assert len(both.asked) == before + 1, "its deletions raise no version"
        await both.shared.rows("UPDATE gateway_process SET left_ms = 1 WHERE boot_id = 'old' RETURNING 1")
        await both.warm()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["label", "epochs", "suspend", "shred"])
def test_law_5_whatever_ends_it(end: str, request: pytest.FixtureRequest) -> None:
    """C11 among others."""

    async def body(shared: Footing) -> None:
        async with pair(shared) as both:
            await both.warm()
            going = asyncio.create_task(END[end](both.a, Admin(both.a.opened), both.writer, both.registered))
            while not going.done():
                await both.poll()
            await going
            try:
                assert await both.matched() == 0, f"law 5: {end}"
            except RequestRefused:
                assert end in CLOSING

    values = [request.getfixturevalue(name) for name in ("postgres", "seaweed", "tmp_path")]
    on_footing(body)(*values)
