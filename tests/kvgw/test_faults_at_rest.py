"""What lies in a tier is torn, exchanged, old, dropped, listed wrongly, or poison: a miss, never other bytes.

S09–S11, N04, N06, N07, F04; law 2 in all of them.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from kvgw.maintenance.orphans import OrphanReport
from kvgw.model import Durability, PutOutcome
from storage.errors import TierUnavailable
from storage.tier import BlobInfo, blob_name
from tenancy.sight import Sight
from tests.kvgw.maintenance_bench import CHUNK, FlakyTier, Works, works
from tests.support.aio import aio
from tests.support.gateways import keys_of, read, take_up_backlog

PAGE = 4096
STATES = "SELECT tier, state, count(*) FROM placement GROUP BY tier, state"


class CountingTier(FlakyTier):
    """An S3 tier that counts what is read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    async def get_into(self, name: str, target: memoryview) -> None:
        self.reads.append(name)
        await super().get_into(name, target)


async def states(one: Works) -> dict[tuple[str, str], int]:
    found = await one.rooms.catalog._database.read(
        lambda connection: connection.exec_driver_sql(STATES).all(), Sight(one.scope.tenant)
    )
    return {(tier, state): count for tier, state, count in found}


def torn(content: bytes, at: int, how: str) -> bytes:
    """A file of which only the first `at` bytes were written."""
    return content[:at] if how == "short" else content[:at] + bytes(len(content) - at)


@aio
async def test_S09_a_file_torn_at_any_page_is_a_miss_and_quarantined(tmp_path: Path) -> None:
    async with works(tmp_path) as one:
        await one.put(1, "whole")
        (whole,) = one.blob_files()
        length = whole.stat().st_size
        cases = [(at, how) for at in range(0, length, PAGE) for how in ("short", "zeros", "hole")]
        assert await one.put(len(cases)) == [PutOutcome.STORED] * len(cases)
        for file, (at, how) in zip(sorted(set(one.blob_files()) - {whole}), cases, strict=True):
            content = file.read_bytes()
            assert content != torn(content, at, how), "it is another file"
            file.write_bytes(torn(content, at, "short" if how == "hole" else how))
            if how == "hole":
                os.truncate(file, length)  # the rest is a hole, which reads as zeros
        one.forget_staging()
        assert await one.hits(len(cases)) == [], "law 2: each of them is a miss"
        assert await one.hits(1, "whole") == [0], "and their neighbour a hit"
        assert (await states(one)).get(("nvme", "ok")) == 1, "nothing that was torn is read again"
        await one.check()


@aio
async def test_S10_exchanged_blobs_are_noticed_and_made_good_from_s3(tmp_path: Path) -> None:
    """The read that finds it is served by S3, and brings the good bytes back to NVMe."""
    s3 = CountingTier()
    async with works(tmp_path, s3=s3) as one:
        await one.put(4, durability=Durability.S3)
        await take_up_backlog(one.crew)
        files = one.blob_files()
        contents = [file.read_bytes() for file in files]
        assert len({len(content) for content in contents}) == 1, "of the same size, each of them whole and valid"
        for file, content in zip(files, [*contents[1:], contents[0]], strict=True):
            file.write_bytes(content)
        for _ in range(2):
            one.forget_staging()
            assert await one.hits(4) == [0, 1, 2, 3], "`hits` fails on wrong bytes"
            assert len(s3.reads) == 4, "one read of S3 for each chunk, and none when NVMe is good again"
            await take_up_backlog(one.crew)
        assert sorted(file.read_bytes() for file in one.blob_files()) == sorted(contents)
        assert (await states(one))[("nvme", "ok")] == 4


@aio
async def test_S11_an_older_blob_under_a_newer_row_is_refused(tmp_path: Path) -> None:
    """The same key and the same content, sealed anew: only the salt, the tags and the commitment are other ones."""
    async with works(tmp_path) as one:
        await one.put(1)
        (file,) = one.blob_files()
        old = file.read_bytes()
        assert await one.client.delete(one.registered, keys_of(1)) == 1
        await one.crew.sweep_everywhere()
        await one.wait(120.0)
        await one.crew.sweep_everywhere()
        assert one.blob_files() == []
        assert await one.put(1) == [PutOutcome.STORED]
        (now,) = one.blob_files()
        assert len(now.read_bytes()) == len(old)
        now.write_bytes(old)
        one.forget_staging()
        assert await one.hits(1) == [], "law 2"
        assert ("nvme", "ok") not in await states(one)


@aio
async def test_N04_an_object_that_s3_acknowledged_and_dropped_is_a_miss_and_stored_anew(tmp_path: Path) -> None:
    s3 = CountingTier()
    async with works(tmp_path, s3=s3) as one:
        await one.put(3, durability=Durability.S3)
        dropped = min(s3.names)
        s3._blobs.pop(dropped)
        for file in one.blob_files():
            file.unlink()
        one.forget_staging()
        for name in [*s3.names, dropped]:
            one.rooms.staging.drop(name)
        hits = await one.hits(3)
        assert len(hits) == 2, "what S3 still has"
        (lost,) = set(range(3)) - set(hits)
        outcomes = await one.put(3, durability=Durability.S3)
        assert outcomes[lost] is PutOutcome.STORED, "it is taken again"
        assert await one.hits(3) == [0, 1, 2]
        await one.check()


class LostAnswers(CountingTier):
    """Stores what it is given, and the answer gets lost, as often as it is told."""

    lost = 0

    async def put(self, name: str, sealed: memoryview) -> None:
        await super().put(name, sealed)
        if self.lost:
            self.lost -= 1
            raise TierUnavailable("the answer got lost")


@aio
async def test_N06_a_put_into_s3_whose_answer_was_lost_is_live_once(tmp_path: Path) -> None:
    s3 = LostAnswers()
    async with works(tmp_path, s3=s3) as one:
        s3.lost = 2
        await one.put(4)
        for _ in range(4):
            await one.crew.drain_everywhere()
            await one.wait(60.0)
        assert len(s3.puts) > 4, "it was tried again"
        assert (await states(one))[("s3", "ok")] == 4
        for _ in range(3):
            await one.crew.look_for_orphans()
            await one.wait(2000.0)
        assert len(s3.names) == 4, "whatever was stored besides is gone"
        assert await one.hits(4) == [0, 1, 2, 3]
        await one.check()


class StaleLists(CountingTier):
    """Lists what is no more and leaves out what is new; twice, and in no order."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: list[BlobInfo] = []
        self.hidden: set[str] = set()

    async def scan(self) -> AsyncIterator[BlobInfo]:
        now = [info async for info in super().scan() if info.name not in self.hidden]
        self.listed.extend(now)
        for info in sorted([*now, *self.listed], key=lambda info: hash(info.name)):
            yield info


async def look(one: Works) -> OrphanReport:
    await one.crew.look_for_orphans()
    return one.crew.orphan_reports["s3"]


@aio
async def test_N07_a_listing_that_is_stale_double_and_unsorted_deletes_nothing_live(tmp_path: Path) -> None:
    s3 = StaleLists()
    async with works(tmp_path, s3=s3) as one:
        await one.put(6, "gone", durability=Durability.S3)
        await look(one)
        assert await one.client.delete(one.registered, keys_of(6, "gone")) == 6
        await one.crew.sweep_everywhere()
        await one.put(6, durability=Durability.S3)
        live = set(s3.names)
        s3.hidden = set(sorted(live)[:2])
        orphan = blob_name(one.scope.namespace, bytes(16))
        await FlakyTier.put(s3, orphan, memoryview(b"orphan"))
        for _ in range(4):
            await look(one)
            await one.wait(2000.0)
            s3.hidden = set()
        assert live <= s3.names, "nothing that is live was deleted"
        assert orphan not in s3.names, "and the orphan was"
        for file in one.blob_files():
            file.unlink()
        assert await one.hits(6) == list(range(6))


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def poison(canary: Path) -> Sequence[bytes]:
    """Bytes that do something to whoever takes them for more than bytes."""
    zeros = io.BytesIO()
    with zipfile.ZipFile(zeros, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb", bytes(32 * 1024 * 1024))
    return (
        pickle.dumps(_Bomb(canary)),
        zeros.getvalue(),
        b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1099511627776,), }",
        b"KVGW\x01" + b"\xff" * 300,  # what a blob of ours begins with
        bytes(CHUNK),
    )


@aio
async def test_F04_poison_is_stored_and_given_back_as_the_bytes_that_it_is(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    async with works(tmp_path / "gw") as one:
        for number, bomb in enumerate(poison(canary)):
            payload = bomb[:CHUNK].ljust(CHUNK, b"\0")
            key = [b"poison-%d" % number]
            assert (await one.client.put(one.registered, key, [payload])).outcomes == (PutOutcome.STORED,)
            one.forget_staging()
            assert (await read(one.client, one.registered, key))[1] == [payload]
    assert not canary.exists()
