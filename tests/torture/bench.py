"""A whole gateway over faulty seams, what it was told and what it acknowledged, and the laws that must hold after.

The gateway runs on a manual clock and its jobs run when they are called, so that the N-th call is the same one each
time. Its NVMe tier and its catalog are files, and so is what stands in for S3.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec.structs import replace as replace_fields

import kvgw.wiring
from kvgw.client import Client
from kvgw.errors import KvgwError, RequestRefused
from kvgw.maintenance.crew import Pace
from kvgw.model import Durability, Outcome, PutOutcome
from kvgw.reports import Registered
from kvgw.runtime import Clock, SystemRng
from kvgw.settings import DefaultSettings, Settings
from kvgw.wiring import Opened, World, opened
from kvgw.wiring.keys import Keys
from storage.errors import StorageError
from storage.tier import Tier
from tenancy.engine import Database
from tenancy.errors import TenancyError
from tenancy.model import Scope
from tests.support.gateways import SMALL, House, format_of, take_up_backlog
from tests.support.manual_clock import ManualClock
from tests.tenancy.catalog_bench import check_laws
from tests.torture.faults import FaultyDatabase, FaultyKeyStore, FaultyTier, FolderTier, Nth, Plan

CHUNK_BYTES = 1024
DEFAULT, SECOND = "default", "second"
NAMESPACES = (DEFAULT, SECOND)
GRACE_S = 50.0
PACE = Pace(nvme_orphan_grace=GRACE_S, s3_orphan_grace=GRACE_S)
LEASES_S = 130.0
"""After so long the lease of every reservation and of every write is over."""
LEAD_S = 4 * PACE.orphans
"""And after so long that of a process that looked for orphans for all, and has ended."""
MONTH_S = 30 * 86_400

SETTINGS: Settings = replace_fields(
    SMALL, defaults=DefaultSettings(durability="staged", ttl_seconds=MONTH_S, max_ttl_seconds=MONTH_S)
)
FORESEEN = (KvgwError, StorageError, TenancyError)
"""What a call may raise; anything else is a bug."""


def content_of(key: str) -> bytes:
    """What `key` holds: it follows from its name up to a dash, so that keys can share content."""
    return random.Random(key.partition("-")[0]).randbytes(CHUNK_BYTES)


@dataclass
class Ledger:
    """What was acknowledged, by namespace and key."""

    kept: set[tuple[str, str]] = field(default_factory=set)
    """On disk or in S3, and neither deleted nor expired: must be readable."""
    gone: set[tuple[str, str]] = field(default_factory=set)
    """Deleted, expired or shredded for certain: must never be read again."""
    seen: set[tuple[str, str]] = field(default_factory=set)
    """All that anybody ever tried to store."""

    def twin(self) -> Ledger:
        return Ledger(set(self.kept), set(self.gone), set(self.seen))

    def take(self, what: str, namespace: str, key: str) -> None:
        """`what`: ``seen``, ``kept``, ``gone``, or ``doubt`` when it may be there or not from now on."""
        self.seen.add((namespace, key))
        if what != "seen":
            self.kept.discard((namespace, key))
        if what in ("kept", "gone"):
            (self.kept if what == "kept" else self.gone).add((namespace, key))


@asynccontextmanager
async def faulty(
    settings: Settings, folder: Path, clock: Clock, plan: Plan, s3: Tier, pace: Pace = PACE
) -> AsyncIterator[Opened]:
    """A gateway whose catalog, tiers and key store are asked through `plan`."""
    real_database, real_layered, real_keys = (
        kvgw.wiring.open_database,
        kvgw.wiring.layered,
        kvgw.wiring.open_keys,
    )

    async def open_database(*given: Any) -> Database:
        return FaultyDatabase(await real_database(*given), plan)

    async def open_keys(*given: Any) -> Keys:
        keys = await real_keys(*given)
        return replace(keys, store=FaultyKeyStore(keys.store, plan))

    def layered(*given: Any) -> dict[str, Tier]:
        return {label: FaultyTier(tier, plan) for label, tier in {**real_layered(*given), "s3": s3}.items()}

    with (
        mock.patch.object(kvgw.wiring, "open_database", open_database),
        mock.patch.object(kvgw.wiring, "open_keys", open_keys),
        mock.patch.object(kvgw.wiring, "layered", layered),
    ):
        opening = opened(settings, folder, world=World(clock, SystemRng(), pace))
        gateway = await opening.__aenter__()
    try:
        yield gateway
    finally:
        await opening.__aexit__(None, None, None)


class Bench:
    """One gateway, opened again and again on the same folder, and what it told."""

    def __init__(
        self,
        folder: Path,
        clock: ManualClock,
        ledger: Ledger,
        *,
        plan: Nth | None = None,
        settings: Settings = SETTINGS,
    ) -> None:
        """`folder` holds the data folder and what stands for the bucket."""
        self.data = folder / "data"
        self.s3 = FolderTier(folder / "bucket")
        self.clock = clock
        self.ledger = ledger
        self.settings = settings
        self.plan = plan or Nth()
        self.diary: Callable[[str], None] = lambda line: None
        """Told of everything that `tell` is told, before anything else happens: for a process that is about to end."""
        self.scopes: dict[str, Scope] = {}
        self._house: House | None = None
        self._registered: dict[str, Registered] = {}
        self._clients: dict[str, Client] = {}

    @property
    def house(self) -> House:
        assert self._house is not None, "no gateway is open"
        return self._house

    @property
    def opened(self) -> Opened:
        return self.house.opened

    @asynccontextmanager
    async def open(self, *, armed: bool = False) -> AsyncIterator[None]:
        """Open the gateway; `armed`: its start meets the plan too."""
        self.plan.armed = armed
        async with faulty(self.settings, self.data, self.clock, self.plan, self.s3) as gateway:
            self.plan.armed = False
            async with self.reached(gateway) as self._house:
                try:
                    yield
                finally:
                    self.plan.armed = False
                    await self._house.aclose()
                    self._house = None
                    self._registered.clear()
                    self._clients.clear()

    @asynccontextmanager
    async def reached(self, gateway: Opened) -> AsyncIterator[House]:
        """How clients reach the gateway: in its own process, unless a bench says otherwise."""
        yield House(gateway, "embedded", None, gateway.first_token or "", self.clock)

    async def speak(self, namespace: str) -> tuple[Client, Registered]:
        """A client of a namespace that has registered its format."""
        if namespace not in self._registered:
            self._clients[namespace] = self.house.client(namespace)
            self._registered[namespace] = await self._clients[namespace].register(format_of(CHUNK_BYTES))
        return self._clients[namespace], self._registered[namespace]

    async def prepare(self) -> None:
        """Make the second namespace."""
        await self.house.namespace(SECOND)
        await self.ready()

    async def ready(self) -> None:
        """Know the namespaces and their formats, so that a scenario begins with what it is about."""
        for namespace in NAMESPACES:
            self.scopes[namespace] = (await self.house.place(namespace)).scope
            await self.speak(namespace)

    # What a scenario does

    def tell(self, what: str, namespace: str, keys: Iterable[str]) -> None:
        """Write down what is known of keys from now on; see `Ledger.take`."""
        for key in keys:
            self.diary(f"{what} {namespace} {key}")
            self.ledger.take(what, namespace, key)

    async def step(self, work: Awaitable[Any]) -> bool:
        """Do one thing that may meet the fault: whether it came to its end. Anything unforeseen is a bug."""

        async def body() -> None:
            await work

        before = sum(self.plan.fired.values())
        task = self.plan.victim = asyncio.ensure_future(body())
        try:
            await task
        except FORESEEN:
            assert sum(self.plan.fired.values()) > before, "it failed, and no fault had been planned"
            return False
        except asyncio.CancelledError:
            assert sum(self.plan.fired.values()) > before, "cancelled by nobody"
            return False
        finally:
            self.plan.victim = None
        return True

    async def put(
        self, keys: Sequence[str], durability: Durability, *, namespace: str = DEFAULT, ttl: float | None = None
    ) -> None:
        """Store; what is acknowledged as durable must be there from now on, unless it has a TTL."""
        self.tell("seen", namespace, keys)

        async def work() -> None:
            client, registered = await self.speak(namespace)
            report = await client.put(
                registered, [key.encode() for key in keys], [content_of(key) for key in keys],
                durability=durability, ttl=ttl, on_error="raise",
            )  # fmt: skip
            if durability is not Durability.STAGED and ttl is None:
                self.tell("kept", namespace, held_of(keys, report.outcomes))

        await self.step(work())

    async def get(self, keys: Sequence[str], namespace: str = DEFAULT) -> None:
        before = sum(self.plan.fired.values())

        async def work() -> None:
            await self._judge(namespace, keys, lambda: sum(self.plan.fired.values()) > before)

        await self.step(work())

    async def delete(self, keys: Sequence[str], namespace: str = DEFAULT) -> None:
        async def work() -> None:
            client, registered = await self.speak(namespace)
            self.tell("doubt", namespace, keys)
            await client.delete(registered, [key.encode() for key in keys])
            self.tell("gone", namespace, keys)

        await self.step(work())

    async def expire(self, seconds: float, keys: Sequence[str], namespace: str = DEFAULT) -> None:
        """Let a time pass after which these keys must be over."""
        self.clock.advance(seconds)
        self.tell("gone", namespace, keys)

    def forget_staging(self) -> None:
        """Empty staging of what is clean, as time would."""
        staging = self.opened.rooms.staging
        for name in set(staging.names()) - set(staging.dirty_names()):
            staging.drop(name)

    # What must hold

    async def check_held(self, within_s: float = 5.0) -> None:
        """Law 7, memory's part: what is held for longer than its bracket."""
        deadline = time.monotonic() + within_s
        while held := {what: count for what, count in (await self.house.held()).items() if what != "reservations"}:
            assert time.monotonic() < deadline, f"law 7: still held after {within_s} s: {held}"
            await asyncio.sleep(0.005)

    async def check_at_once(self) -> None:
        """Law 1, on a gateway that has just come back: whatever happened, rows and bytes differ by orphans at worst."""
        report = await self.opened.crew.fsck.run()
        worse = [one for one in report.findings if one.kind not in ("orphan", "reservation", "write")]
        assert worse == [], f"law 1: after a restart fsck finds {worse}"

    async def settle(self) -> None:
        """Let leases run out and every job have its turns."""
        crew = self.opened.crew
        await self.house.wait(LEASES_S)
        for _ in range(3):
            await crew.sweep_everywhere()
            await crew.drain_everywhere()
            await take_up_backlog(crew)
            await crew.tend_keys()
            await crew.go_on_deleting()
            await self.house.wait(LEASES_S)
        await self.house.wait(LEAD_S)
        for _ in range(2):
            await crew.look_for_orphans()
            await self.house.wait(LEASES_S)

    async def check(self) -> None:
        """Every law, on a gateway that has settled."""
        await self.check_held()
        await self._check_rows()
        report = await self.opened.crew.fsck.run()
        assert (report.verdict, report.findings) == ("clean", []), f"fsck: {report.findings} {report.unseen}"
        await self.check_reads()

    async def _check_rows(self) -> None:
        tenant = self.house.owner.tenant
        scopes = [one.scope for one in await self.opened.rooms.catalog.namespaces(tenant)]
        database = self.opened.rooms.catalog._database
        await database.read(lambda connection: check_laws(connection, scopes), self.house._sight)
        ((reservations,),) = await self.house.rows("SELECT count(*) FROM reservation")
        assert reservations == 0, f"law 7: {reservations} reservations outlived their lease"
        states = await self.house.rows("SELECT tier, state, count(*) FROM placement GROUP BY tier, state")
        assert {state for _, state, _ in states} <= {"ok"}, f"placements that are never done: {states}"
        rows = {tier: count for tier, _, count in states}
        files = sum(1 for _ in (self.data / "nvme" / "v1").glob("*/??/*"))
        there = {"nvme": files, "s3": len(self.s3.names)}
        assert there == {"nvme": 0, "s3": 0} | rows, f"law 1: blobs {there}, rows {rows}"
        left = [one.name for one in (self.data / "nvme" / "tmp").iterdir()]
        assert left == [], f"temporary files are left: {left}"

    async def check_reads(self) -> None:
        for namespace in NAMESPACES:
            keys = sorted(key for where, key in self.ledger.seen if where == namespace)
            if keys:
                await self._judge(namespace, keys, lambda: False)

    async def _judge(self, namespace: str, keys: Sequence[str], excused: Callable[[], bool]) -> None:
        """Laws 3, 5, 8: no wrong bytes, nothing that is gone, all that was acknowledged unless a fault excuses it."""
        buffers = [bytearray(b"\xee" * CHUNK_BYTES) for _ in keys]
        hits: set[int] = set()
        degraded = False
        try:
            client, registered = await self.speak(namespace)
            report = await client.get(registered, [key.encode() for key in keys], buffers)
        except RequestRefused:  # the namespace is gone
            pass
        else:
            hits, degraded = {hit.index for hit in report.hits}, report.outcome is Outcome.OUTAGE
        for index, key in enumerate(keys):
            which = f"{namespace}/{key}"
            if index in hits:
                assert bytes(buffers[index]) == content_of(key), f"law 3: wrong bytes under {which}"
                assert (namespace, key) not in self.ledger.gone, f"law 5: {which} was read after its end"
            elif (namespace, key) in self.ledger.kept and not excused():
                raise AssertionError(f"law 8: {which} was acknowledged and is {'out' if degraded else 'lost'}")


def held_of(keys: Sequence[str], outcomes: Sequence[PutOutcome]) -> list[str]:
    """The keys of which a PUT said that they are there now."""
    return [key for key, outcome in zip(keys, outcomes, strict=True) if outcome in (PutOutcome.STORED, PutOutcome.HAVE)]


def open_files() -> set[str]:
    """What this process has open, apart from what the loop and the test runner have."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue
    return {one for one in found if one.startswith("/") and not one.startswith(("/dev/null", "/proc"))}
