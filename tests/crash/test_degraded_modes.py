"""Every degraded mode: what shows it (a metric, ``kvgw status``, ``/readyz``), and where the runbook has it.

It is never wrong and never in the way, and the gateway gets out of it by itself once the cause is gone.

One gateway over seams that can be cut, on a clock that the test moves; its jobs run when they are called.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace

from kvgw.breaker import BreakerOptions
from kvgw.client import Client
from kvgw.errors import Outage
from kvgw.model import Durability, Outcome, PutOutcome, StatusReply, StatusRequest
from kvgw.reports import Registered
from kvgw.settings import LimitSettings, NvmeSettings, Settings, WriteBackSettings
from tests.support.admin import Admin
from tests.support.aio import run
from tests.support.gateways import MIB, House, format_of, keys_of, payloads_of, read, take_up_backlog
from tests.support.manual_clock import ManualClock
from tests.support.served import ROOT
from tests.torture.bench import SETTINGS, faulty
from tests.torture.faults import FolderTier, Kind

RUNBOOK = ROOT / "docs" / "operations.md"
CHUNK = 64 * 1024
CHOSEN: Settings = replace(
    SETTINGS,
    nvme=NvmeSettings(capacity_bytes=2 * MIB, min_free_bytes=0),
    writeback=WriteBackSettings(outbox_seconds=60.0),
    limits=LimitSettings(concurrent_requests=4),
)


class Cut:
    """A plan under which every call of the seams that are cut fails."""

    delay_s = 0.0

    def __init__(self) -> None:
        self.fired: Counter[str] = Counter()
        self.seams: set[str] = set()

    def next(self, call: str) -> Kind | None:
        return Kind.ERROR if call.partition(".")[0] in self.seams else None

    def cancel(self) -> None: ...


@dataclass
class Site:
    """The gateway, a client, and what can be done to it."""

    folder: Path
    cut: Cut
    clock: ManualClock
    house: House
    client: Client
    registered: Registered
    stack: ExitStack = field(default_factory=ExitStack)

    async def put(
        self, name: str, durability: Durability = Durability.S3, seed: int = 0, deadline_s: float = 20.0
    ) -> tuple[int, str]:
        """1 when it was stored, else 0, and the reason. Other seeds bring other bytes."""
        chunk = payloads_of(self.registered, 1, seed)
        keys = keys_of(1, name)
        report = await self.client.put(self.registered, keys, chunk, durability=durability, deadline_s=deadline_s)
        return int(report.outcomes[0] in (PutOutcome.STORED, PutOutcome.HAVE)), report.reason

    async def hits(self, name: str) -> int:
        """How much of a chunk that was stored is read: 1 or 0, and never wrong."""
        report, found = await read(self.client, self.registered, keys_of(1, name))
        assert found[0] in (None, payloads_of(self.registered, 1)[0]), "law 3"
        assert found[0] is not None or report.outcome in (Outcome.OK, Outcome.OUTAGE)
        return int(found[0] is not None)

    async def jobs(self) -> None:
        """A turn of every job that sees to it that what is wrong is known, or right again."""
        crew = self.house.opened.crew
        for job in (crew.heartbeat, crew.reach, crew.look_at_outbox, crew.drain_everywhere, crew.evict):
            await crew._attempt("test", job)

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await self.jobs()

    async def status(self) -> StatusReply:
        reply = await self.house.opened.gateway.answer(self.house.owner, StatusRequest())
        assert isinstance(reply, StatusReply)
        return reply

    async def notes(self) -> str:
        return "\n".join((await self.status()).notes)

    async def ready(self) -> int:
        return (await Admin(self.house.opened).ask("GET", "/readyz")).status_code

    def metric(self, name: str, **labels: str) -> float:
        """A value as it is scraped, or the sum over all labels that are not given."""
        self.house.opened.refresh_gauges()
        return sum(
            sample.value
            for family in self.house.opened.rooms.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@asynccontextmanager
async def site(folder: Path, clock: ManualClock | None = None, cut: Cut | None = None) -> AsyncIterator[Site]:
    """A gateway on `folder`, with a chunk named ``kept`` on its disk and in S3."""
    cut, clock = cut or Cut(), clock or ManualClock(1_900_000_000_000)
    async with faulty(CHOSEN, folder / "data", clock, cut, FolderTier(folder / "bucket")) as opened:
        house = House(opened, "embedded", None, "", clock)
        client = house.client(breaker=BreakerOptions(failures=2**62))
        one = Site(folder, cut, clock, house, client, await client.register(format_of(CHUNK)))
        try:
            await one.jobs()
            assert await one.put("kept") == (1, "")
            await take_up_backlog(opened.crew)
            forget_staging(one)
            yield one
        finally:
            cut.seams.clear()
            one.stack.close()
            await house.aclose()


def forget_staging(one: Site) -> None:
    staging = one.house.opened.rooms.staging
    for name in set(staging.names()) - set(staging.dirty_names()):
        staging.drop(name)


Act = Callable[[Site], Awaitable[None]]


@dataclass(frozen=True)
class Mode:
    """One degraded mode. `shown`: whether the metric says so."""

    paragraph: str
    begin: Act
    shown: Callable[[Site], bool]
    note: str
    end: Act
    ready: int = 200
    reads: int | None = 1
    """Hits of the chunk that is on the disk and in S3; None: either way."""
    counted: bool = False
    """The metric counts what was met, and stays."""
    lasts: bool = False
    """So does the note."""
    restarts: bool = False
    """It ends with the gateway's next start, as the runbook says."""


async def nothing(one: Site) -> None: ...


async def cut_s3(one: Site) -> None:
    one.cut.seams.add("s3")
    assert (await one.put("refused", seed=3))[0] == 0
    assert await one.put("accepted", Durability.NVME, seed=1) == (1, "")
    await one.jobs()


async def s3_is_slow(one: Site) -> None:
    """What write-back sees of it: nothing gets there for over a minute."""
    one.cut.seams.add("s3")
    assert await one.put("accepted", Durability.NVME, seed=1) == (1, "")
    await one.pass_time(61.0)
    stored, reason = await one.put("held", Durability.STAGED, seed=2, deadline_s=1.0)
    assert (stored, "behind" in reason) == (0, True)


async def cut_catalog(one: Site) -> None:
    one.cut.seams.add("catalog")
    one.house.opened.directory.forget(one.house.owner.tenant)
    stored, reason = await one.put("refused", seed=3)
    assert (stored, bool(reason)) == (0, True)
    with pytest.raises(Outage):  # law 2: a deletion never fails open
        await one.client.delete(one.registered, keys_of(1, "kept"))


async def heal(one: Site) -> None:
    one.cut.seams.clear()
    await one.pass_time(61.0)
    await one.pass_time(61.0)


async def take_away_the_root_key(one: Site) -> None:
    keys = one.house.opened.folder / "keys"
    hidden = keys.with_name("keys.hidden")
    keys.rename(hidden)
    one.stack.callback(lambda: hidden.rename(keys))
    assert await one.hits("kept") == 1, "keys in memory work for five minutes"
    one.clock.advance(301.0)
    one.cut.seams.add("keys")
    await one.put("refused", seed=3)


async def bring_back(one: Site) -> None:
    one.stack.close()
    await heal(one)


async def fill_the_disk(one: Site) -> None:
    for number in range(64):
        stored, reason = await one.put(f"fill-{number}", Durability.NVME, seed=number + 1)
        if not stored:
            assert "NVMe" in reason
            break
    else:
        raise AssertionError("the disk never filled up")
    assert await one.put("elsewhere", seed=99) == (1, ""), "S3 takes what the disk does not"
    await one.house.opened.crew.heartbeat()


async def make_room(one: Site) -> None:
    await one.client.delete(one.registered, [f"fill-{number}-0".encode() for number in range(64)])
    await one.house.opened.crew.sweep_everywhere()
    await one.pass_time(6.0)


async def fail_the_disk(one: Site) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with mock.patch.object(os, "fdatasync", fails), mock.patch.object(os, "fsync", fails):
        assert (await one.put("refused", Durability.NVME, seed=3))[0] == 0
    assert (await one.put("refused", Durability.NVME, seed=3))[0] == 0, "later successes prove nothing"
    await one.jobs()


async def damage(one: Site) -> None:
    (blob,) = (one.folder / "data" / "nvme" / "v1").glob("*/??/*")
    sealed = bytearray(blob.read_bytes())
    sealed[-40] ^= 1
    blob.write_bytes(sealed)
    assert await one.hits("kept") == 1, "the next tier has it"


async def repaired(one: Site) -> None:
    """It is on the disk again, and is read from there while S3 is away."""
    await take_up_backlog(one.house.opened.crew)
    await one.house.opened.crew.sweep_everywhere()
    await one.hits("kept")
    await take_up_backlog(one.house.opened.crew)
    forget_staging(one)
    one.cut.seams.add("s3")
    assert await one.hits("kept") == 1
    one.cut.seams.clear()


async def set_the_clock_back(one: Site) -> None:
    one.clock._start_ms -= 3_600_000
    await one.jobs()


async def set_it_right(one: Site) -> None:
    one.clock._start_ms += 3_600_000
    await one.jobs()


async def crowd(one: Site) -> None:
    """More at once than the limit: the rest is turned away with the time to come again."""
    limiter = one.house.opened.rooms.limiter
    place = await one.house.place()
    for _ in range(CHOSEN.limits.concurrent_requests):
        one.stack.enter_context(limiter.admitted(place))
    with pytest.raises(Outage) as refused:
        await one.client.match(one.registered, keys_of(1, "kept"), on_error="raise")
    assert refused.value.retry_after_s > 0


async def disperse(one: Site) -> None:
    one.stack.close()


def tier_down(tier: str) -> Callable[[Site], bool]:
    return lambda one: one.metric("kvgw_tier_up", tier=tier) == 0


MODES = {
    "S3 down": Mode("S3 is down or slow", cut_s3, tier_down("s3"), "the S3 tier is unreachable", heal),
    "S3 slow": Mode(
        "Write-back is behind", s3_is_slow, lambda one: one.metric("kvgw_outbox_seconds", tier="s3") > 60,
        "the s3 tier is behind", heal,
    ),
    "database down": Mode(
        "The catalog does not answer", cut_catalog,
        lambda one: one.metric("kvgw_requests_total", code="unavailable") > 0, "catalog", heal, ready=503, reads=0,
        counted=True,
    ),
    "key provider down": Mode(
        "The root key or the key store does not answer", take_away_the_root_key,
        lambda one: one.metric("kvgw_requests_total", code="unavailable") > 0, "key", bring_back, reads=None,
        counted=True,
    ),
    "NVMe full": Mode("The disk is full or fails", fill_the_disk, tier_down("nvme"), "takes no writes", make_room),
    "NVMe failing": Mode(
        "The disk is full or fails", fail_the_disk, tier_down("nvme"), "takes no writes.*suspect|synced", nothing,
        restarts=True,
    ),
    "corrupt blob": Mode(
        "Blobs are refused", damage, lambda one: one.metric("kvgw_refused_blobs_total", tier="nvme") == 1,
        "1 blob .*refused", repaired, counted=True, lasts=True,
    ),
    "clock jump": Mode(
        "A clock is wrong", set_the_clock_back, lambda one: one.metric("kvgw_clock_behind_seconds") > 3000,
        "the clock is 3600 s behind", set_it_right,
    ),
    "overload": Mode(
        "Too much is asked at once", crowd, lambda one: one.metric("kvgw_limited_total", limit="concurrency") == 1,
        "1 request .*turned away", disperse, reads=0, counted=True, lasts=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_a_degraded_mode_is_shown_everywhere_and_ends_by_itself(tmp_path: Path, name: str) -> None:
    mode = MODES[name]
    assert paragraph_of(mode.paragraph), "the runbook says what it is, what happens, what to do, and how it ends"

    async def body() -> None:
        clock = ManualClock(1_900_000_000_000)
        async with AsyncExitStack() as stack:
            one = await stack.enter_async_context(site(tmp_path, clock))
            assert not mode.shown(one)
            assert (await one.notes(), await one.ready()) == ("", 200)
            await mode.begin(one)
            assert mode.shown(one), "a metric"
            assert re.search(mode.note, await one.notes()), f"kvgw status: {await one.notes()!r}"
            assert await one.ready() == mode.ready, "/readyz"
            forget_staging(one)
            hits = await one.hits("kept")
            assert mode.reads in (None, hits), "never in the way"
            await mode.end(one)
            if mode.restarts:
                await stack.aclose()
                one = await stack.enter_async_context(site(tmp_path, clock))
            await check_healthy(one, mode)

    run(body(), timeout=120)


async def check_healthy(one: Site, mode: Mode) -> None:
    assert mode.counted or not mode.shown(one)
    assert mode.lasts or await one.notes() == ""
    assert await one.ready() == 200
    assert await one.hits("kept") == 1, "law 8"
    for seed, durability in enumerate(Durability, 200):
        assert await one.put(f"after-{durability}", durability, seed) == (1, ""), durability


def paragraph_of(heading: str) -> str:
    """A paragraph of the runbook that has all its parts."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## )", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{RUNBOOK.name} has no paragraph {heading!r}"
    text = found[1]
    for part in ("*Seen:*", "*Happens:*", "*Do:*"):
        assert part in text, f"{heading}: no {part}"
    return text
