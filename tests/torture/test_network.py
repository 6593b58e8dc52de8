"""N01, N02, N03: toxics between a gateway and its S3 and PostgreSQL, met by GET, PUT and DELETE."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import pytest
from msgspec.structs import replace

from kvgw.breaker import BreakerOptions
from kvgw.client import Client
from kvgw.errors import KvgwError
from kvgw.model import Durability, Outcome, PutOutcome
from kvgw.reports import Registered
from tenancy.errors import TenancyError
from tests.support.aio import run
from tests.support.gateways import House, format_of, payloads_of, read
from tests.support.postgres import Postgres
from tests.support.seaweed import S3Server
from tests.support.several import Footing
from tests.torture.toxics import Toxic, ToxicProxy

pytestmark = [pytest.mark.s3, pytest.mark.postgres, pytest.mark.timeout(600)]

Result = TypeVar("Result")

READ_S, WRITE_S = 2.0, 3.0
RECOVERY_S: Final = 10.0
OVER_S: Final = 0.25
"""What a call may take beyond its deadline, on a machine that has time for it."""
CHECKED: Final = (Toxic.CORRUPT, Toxic.DUPLICATE)
"""Not for PostgreSQL, whose protocol has no checks of its own: there TLS has them. What S3 gives is checked by us."""


@dataclass
class Link:
    """A gateway whose S3 and PostgreSQL are behind proxies, and what it acknowledged."""

    shared: Footing
    house: House
    client: Client
    registered: Registered
    proxies: dict[str, ToxicProxy]
    kept: dict[bytes, bytes] = field(default_factory=dict)
    doubtful: dict[bytes, bytes] = field(default_factory=dict)
    """Asked to be deleted, and nobody said whether it was."""
    gone: set[bytes] = field(default_factory=set)
    count: int = 0

    async def put(self) -> Outcome:
        """One new chunk into S3."""
        self.count += 1
        key, (payload,) = b"key-%d" % self.count, payloads_of(self.registered, 1, seed=self.count)
        report = await self._timed(
            WRITE_S,
            self.client.put(self.registered, [key], [payload], durability=Durability.S3, deadline_s=WRITE_S),
        )
        if report.outcomes == (PutOutcome.STORED,):
            self.kept[key] = payload
        return report.outcome

    async def get(self, keys: list[bytes]) -> Outcome:
        """Read without help from staging: right bytes, or none; a miss without a reason is a loss."""
        staging = self.house.opened.rooms.staging
        for name in set(staging.names()) - set(staging.dirty_names()):
            staging.drop(name)
        report, found = await self._timed(READ_S, read(self.client, self.registered, keys))
        for key, chunk in zip(keys, found, strict=True):
            assert chunk is None or key not in self.gone, f"law 5: {key!r} was read after its end"
            assert chunk in (None, self.kept.get(key), self.doubtful.get(key)), f"law 3: wrong bytes under {key!r}"
            lost = chunk is None and key in self.kept and report.outcome is Outcome.OK
            assert not lost, f"law 8: {key!r} is lost"
        return report.outcome

    async def delete(self, key: bytes) -> bool:
        payload = self.kept.pop(key)
        try:
            await self._timed(WRITE_S, self.client.delete(self.registered, [key], deadline_s=WRITE_S))
        except KvgwError:
            self.doubtful[key] = payload
            return False
        self.gone.add(key)
        return True

    async def well(self) -> None:
        """All of it works again, and soon."""
        deadline = time.monotonic() + RECOVERY_S * busy()
        while True:
            put = await self.put()
            keys = list(self.kept)[-3:]
            if put is Outcome.OK and await self.get([*keys, *sorted(self.gone)[-3:]]) is Outcome.OK:
                return
            assert time.monotonic() < deadline, f"not well long after the toxic is gone: {put}"
            await asyncio.sleep(0.1)

    @staticmethod
    async def _timed(limit_s: float, call: Awaitable[Result]) -> Result:
        started = time.monotonic()
        try:
            return await call
        finally:
            over_s = time.monotonic() - started - limit_s
            assert over_s < OVER_S * busy(), f"law 9: a call took {over_s:.2f} s more than its deadline"


def busy() -> float:
    """How many times longer things take here than on a quiet machine: processes in the queue of each CPU."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@asynccontextmanager
async def linked(shared: Footing, chunk_bytes: int) -> AsyncIterator[Link]:
    s3_port = int(shared.s3.endpoint.rpartition(":")[2])
    async with ToxicProxy(s3_port) as s3, ToxicProxy(shared.server.port) as database:
        plain = shared.settings(port=database.port)
        through = replace(plain.s3, endpoint=f"http://127.0.0.1:{s3.port}", request_seconds=1.5)
        chosen = replace(
            plain,
            s3=through,
            nvme=replace(plain.nvme, enabled=False),
            defaults=replace(plain.defaults, durability="s3"),
        )
        async with shared.gateway("a", settings=chosen) as house:
            client = house.client(read_deadline_s=READ_S, breaker=BreakerOptions(failures=2**62))
            registered = await client.register(format_of(chunk_bytes))
            beating = asyncio.create_task(beat(house))
            try:
                yield Link(shared, house, client, registered, {"S3": s3, "PostgreSQL": database})
            finally:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)


async def beat(house: House) -> None:
    """Say that the gateway lives, as its crew would: without that it stores nothing."""
    while True:
        with suppress(TenancyError):
            await house.opened.crew.heartbeat()
        await asyncio.sleep(1.0)


def footing(postgres: Postgres, seaweed: S3Server, folder: Path) -> Footing:
    shared = Footing(postgres, seaweed, folder)
    shared.prepare()
    return shared


HURTS: Final = [
    (link, toxic) for link in ("S3", "PostgreSQL") for toxic in Toxic if link == "S3" or toxic not in CHECKED
]


@pytest.mark.slow
def test_N01_every_toxic_makes_outages_and_never_wrong_bytes(
    postgres: Postgres, seaweed: S3Server, tmp_path: Path
) -> None:
    shared = footing(postgres, seaweed, tmp_path)

    async def main() -> None:
        async with linked(shared, 16 * 1024) as one:
            await one.well()
            for link, toxic in HURTS:
                await one.put()
                await one.well()
                before = list(one.kept)[-2:]
                proxy = one.proxies[link]
                proxy.poison(toxic)
                try:
                    if toxic not in CHECKED:  # what came damaged is never read from there again
                        await one.get(before)
                    await one.put()
                    await one.delete(before[0])
                    await one.get([before[0]])
                    assert proxy.met[toxic] > 0, f"{toxic} met nothing on the way to {link}"
                except AssertionError as error:
                    error.add_note(f"while {link} had {toxic}")
                    raise
                finally:
                    proxy.heal()
                await one.well()
            await one.shared.check_clean(one.house)

    run(main(), timeout=550)


def test_N02_a_body_that_ends_early_is_an_outage_and_is_read_whole_afterwards(
    postgres: Postgres, seaweed: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut after every 256 KiB of 1 MiB: nothing of it is delivered, and the blob is not given up for it."""

    shared = footing(postgres, seaweed, tmp_path)

    async def main() -> None:
        async with linked(shared, 1024 * 1024) as one:
            await one.put()
            for kept in range(0, 1024 * 1024 + 1, 256 * 1024):
                monkeypatch.setattr("tests.torture.toxics.KEPT_BYTES", max(600, kept))
                one.proxies["S3"].poison(Toxic.TRUNCATE)
                assert await one.get(list(one.kept)) is Outcome.OUTAGE, f"after {kept} bytes"
                one.proxies["S3"].heal()
                assert await one.get(list(one.kept)) is Outcome.OK, f"after {kept} bytes, when it is over"

    run(main(), timeout=100)


def test_N03_a_bit_that_is_flipped_under_way_is_never_delivered(
    postgres: Postgres, seaweed: S3Server, tmp_path: Path
) -> None:
    """Law 3. Without TLS nothing but the seal can tell: what came damaged is not read from there again."""

    shared = footing(postgres, seaweed, tmp_path)

    async def main() -> None:
        async with linked(shared, 16 * 1024) as one:
            for _ in range(20):
                await one.put()
            assert len(one.kept) >= 5
            one.proxies["S3"].poison(Toxic.CORRUPT)
            hits = 0
            for key in one.kept:
                one.house.opened.rooms.staging.drop(next(iter(one.house.opened.rooms.staging.names()), ""))
                _, (chunk,) = await read(one.client, one.registered, [key])
                assert chunk in (None, one.kept[key]), f"law 3: wrong bytes under {key!r}"
                hits += chunk is not None
            assert one.proxies["S3"].met[Toxic.CORRUPT] > 0

    run(main(), timeout=100)
