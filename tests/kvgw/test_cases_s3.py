"""A gateway over an S3 that misbehaves: broken bodies (R57), errors in a success (R65), locks (R63); proxies (R39)."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvgw.breaker import BreakerOptions
from kvgw.examine import Verdict, examine
from kvgw.kms import KmsOptions, KmsRootKey
from kvgw.model import Durability, Outcome, PutOutcome
from kvgw.settings import S3Settings
from storage.errors import TierUnavailable
from storage.tier import blob_name
from tenancy.keys.secret import SecretBytes
from tests.kvgw.maintenance_bench import FlakyTier, settings, works
from tests.kvgw.test_kms import CONTEXT
from tests.kvgw.test_writeback import SlowTier
from tests.support.aio import aio
from tests.support.deletions import ALICE, delete, job_of, put
from tests.support.fake_kms import FakeKms
from tests.support.fake_s3 import FakeS3, error, reply
from tests.support.gateways import SMALL, House, format_of, house, keys_of, payloads_of, read, take_up_backlog
from tests.support.manual_clock import ManualClock

BINARY = {"Content_Type": "application/octet-stream"}
NEVER_OPENS = BreakerOptions(failures=2**62)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore pauses for seconds between attempts."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)


@asynccontextmanager
async def over_fake(folder: Path) -> AsyncIterator[tuple[FakeS3, House]]:
    """A gateway on a manual clock whose jobs run when they are called, over a server that does as it is told."""
    folder.mkdir()
    (folder / "secret").write_text("key")
    async with FakeS3() as server:
        s3 = S3Settings(
            bucket="b", endpoint=server.endpoint, addressing="path", access_key_id="id",
            secret_access_key_file=str(folder / "secret"),
        )  # fmt: skip
        async with house("embedded", folder / "gw", clock=ManualClock(), settings=replace(SMALL, s3=s3)) as gateway:
            yield server, gateway


async def only_in_s3(gateway: House) -> None:
    """Staging and the disk forget every chunk."""
    namespace = (await gateway.place()).scope.namespace
    for (blob_id,) in await gateway.rows("SELECT blob_id FROM chunk"):
        name = blob_name(namespace, bytes(blob_id))
        gateway.opened.rooms.staging.drop(name)
        (gateway.opened.folder / "nvme" / name).unlink(missing_ok=True)


async def placements(gateway: House) -> dict[str, str]:
    return dict(await gateway.rows("SELECT tier, state FROM placement"))


@aio
async def test_R57_a_body_that_the_network_broke_is_read_again_later_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    async with over_fake(tmp_path / "made") as (server, gateway):
        client = gateway.client(breaker=NEVER_OPENS)
        part = await client.register(format_of())
        payloads = payloads_of(part, 1)
        assert (await client.put(part, [b"k"], payloads, durability=Durability.S3)).stored == 1
        await only_in_s3(gateway)
        (blob,) = [body for name, body in server.objects.items() if "/v1/" in name or name.startswith("v1/")]
        for broken in (
            reply(200, blob[:-100], length=len(blob), **BINARY),
            reply(206, blob, Content_Range=f"bytes 10-{len(blob) + 9}/100000", **BINARY),
            reply(200, blob, Content_Encoding="gzip", **BINARY),
        ):
            server.faults.extend([broken] * 9)
            report, found = await read(client, part, [b"k"])
            assert found == [None], "never a short or a wrong chunk"
            server.faults.clear()
            assert (await placements(gateway))["s3"] == "ok", "the network is not the object"
            await only_in_s3(gateway)
            report, found = await read(client, part, [b"k"])
            assert found == payloads, f"and it is there afterwards: {report}"
            await only_in_s3(gateway)
        name = next(name for name, body in server.objects.items() if body == blob)
        server.objects[name] = blob[:300] + bytes([blob[300] ^ 1]) + blob[301:]
        assert (await read(client, part, [b"k"]))[1] == [None]
        assert (await placements(gateway)).get("s3") != "ok", "law 2: wrong content is quarantined"


def uploads(server: FakeS3) -> int:
    return sum(one.method == "PUT" and "/v1/" in one.target for one in server.requests)


@aio
async def test_R65_an_error_inside_a_success_stays_due_and_drains(tmp_path: Path) -> None:
    slow_down = reply(200, b" " * 4096 + error("SlowDown"), ETag='"x"')
    async with over_fake(tmp_path / "made") as (server, gateway):
        client = gateway.client(breaker=NEVER_OPENS)
        part = await client.register(format_of())
        server.faults.extend([slow_down] * 12)
        report = await client.put(part, [b"durable"], payloads_of(part, 1), durability=Durability.S3)
        assert (report.outcomes, report.outcome) == ((PutOutcome.FAILED,), Outcome.OUTAGE), "read as a failure"
        assert uploads(server) <= 3, "and not asked for ever"
        server.faults.clear()
        server.faults.extend([slow_down] * 12)
        assert (await client.put(part, [b"k"], payloads_of(part, 1), durability=Durability.NVME)).stored == 1
        await take_up_backlog(gateway.opened.crew)
        assert await placements(gateway) == {"nvme": "ok", "s3": "due"}
        assert uploads(server) <= 2 * 3
        server.faults.clear()
        await gateway.wait(120.0)
        await gateway.opened.crew.drain_everywhere()
        assert await placements(gateway) == {"nvme": "ok", "s3": "ok"}
        await only_in_s3(gateway)
        assert (await read(client, part, [b"k"]))[1] == payloads_of(part, 1)
        assert not [one for one in server.requests if "uploads" in one.target], "no multipart upload was begun"


@aio
async def test_R63_while_a_lock_keeps_the_bytes_the_deletion_is_open_and_has_no_receipt(tmp_path: Path) -> None:
    s3 = FlakyTier()
    async with works(tmp_path, s3=s3) as one:
        whole = dataclasses.replace(one.gateway, rooms=one.rooms, crew=one.crew)
        gateway, client, part = House(whole, "embedded", None, "", one.clock), one.client, one.registered
        payloads = await put(client, part, keys_of(2), user="alice")
        await one.crew.drain_everywhere()
        assert len(s3.names) == 2
        assert (await read(client, part, keys_of(2)))[1] == payloads
        s3.failure = TierUnavailable("2 deletions were refused in bucket 'b': AccessDenied, an object lock until 2031")
        job = await delete(gateway, ALICE)
        assert (await read(client, part, keys_of(2)))[1] == [None, None], "law 5: what was acknowledged is not read"
        for _ in range(6):
            await one.wait(3600.0)
            await one.crew.go_on_deleting()
        now = await job_of(gateway, job)
        assert now["state"] != "done", "R63: the job stays open"
        assert not now.get("receipt"), "and nobody is told that all of it is gone"
        assert "2 chunks are still to be erased; the s3 tier does not delete" in now["sentence"], now
        assert "object lock until 2031" in now["sentence"], "and whoever asks why is told"
        assert len(s3.names) == 2
        s3.failure = None
        for _ in range(6):
            await one.wait(3600.0)
            await one.crew.go_on_deleting()
        now = await job_of(gateway, job)
        assert now["state"] == "done"
        assert now["receipt"]
        assert s3.names == set()


@pytest.mark.timeout(180)
@aio
async def test_R27_while_s3_stands_still_and_staging_is_dirty_reads_end_in_time(tmp_path: Path) -> None:
    s3, deadline_s = SlowTier(), 5.0
    async with works(tmp_path, chosen=settings(durability="staged"), s3=s3, chunk=256 * 1024) as one:
        assert await one.put(16, "cold", durability=Durability.NVME) == [PutOutcome.STORED] * 16
        await one.crew.drain_everywhere()
        one.forget_staging()
        s3.flowing.clear()
        stalled = asyncio.create_task(one.crew.drain_everywhere())
        dirty = 0
        while dirty < 1000:
            content = payloads_of(one.registered, 1, seed=dirty)
            report = await one.client.put(one.registered, [b"dirty-%d" % dirty], content, deadline_s=0.3)
            if not report.stored:
                break
            dirty += 1
        assert 8 <= dirty < 1000, "what cannot be written back holds puts up"
        started = time.monotonic()

        async def cold(index: int) -> bool:
            buffer = bytearray(one.registered.chunk_bytes)
            keys = keys_of(16, "cold")[index : index + 1]
            got = await one.client.get(one.registered, keys, [buffer], deadline_s=deadline_s)
            expected = payloads_of(one.registered, 16, seed=hash("cold") % 10**8)[index]
            assert bytes(buffer) == expected if got.leading else got.outcome is Outcome.OUTAGE, got
            return bool(got.leading)

        found = await asyncio.gather(*(cold(index) for index in range(16)))
        assert time.monotonic() - started < deadline_s + 1, "law 9: no deadlock"
        assert any(found), "reads have windows of their own"
        s3.flowing.set()
        await stalled
        await one.wait(120.0)
        await one.crew.drain_everywhere()
        assert one.rooms.staging.dirty_names() == [], "all drains"
        assert await one.put(1, "after") == [PutOutcome.STORED]
        await one.check()


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@aio
async def test_R39_nothing_that_goes_to_kms_goes_to_a_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for cleared in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(cleared, raising=False)
    async with FakeS3() as proxy, FakeKms() as server:
        monkeypatch.setenv(variable, proxy.endpoint)
        root = KmsRootKey(KmsOptions(server.add_key(), (), server.endpoint, "id", "secret"))
        try:
            key = SecretBytes(b"\x5a" * 32)
            assert await root.unwrap(await root.wrap(key, CONTEXT), CONTEXT) == key
        finally:
            await root.aclose()
        assert proxy.requests == []
        assert server.calls


@pytest.mark.parametrize(
    ("variables", "use_proxy", "said"),
    [
        ({}, False, None),
        ({"https_proxy": "http://me:hush@proxy.example:3128"}, False, "https_proxy is set and not used"),
        ({"HTTPS_PROXY": "http://me:hush@proxy.example:3128"}, True, "S3 is reached as HTTPS_PROXY says"),
    ],
)
@aio
async def test_R39_the_doctor_says_which_proxy_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], use_proxy: bool, said: str | None
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    chosen = replace(SMALL, s3=S3Settings(use_proxy=use_proxy))
    found = [one for one in await examine(chosen, tmp_path / "gw") if one.subject == "proxy"]
    assert [one.verdict for one in found] == ([Verdict.NOTE] if said else [])
    assert said is None or said in found[0].what
    assert "hush" not in str(found)
