"""``kvgw scrub`` on SQLite and NVMe, and on PostgreSQL and S3: what it proves, how fast, and what becomes of damage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

import pytest

from kvgw.errors import RequestRefused
from kvgw.maintenance import scrub
from kvgw.maintenance.scrub import ScrubReport, State
from storage.errors import TierUnavailable
from storage.staging import Staging
from tests.kvgw.fsck_contract import ACT, Spot
from tests.kvgw.fsck_footings import OnPostgresAndS3, OnSqliteAndNvme, clock_now, spot_of
from tests.kvgw.test_fsck import store
from tests.support.aio import aio, run
from tests.support.gateways import take_up_backlog, until
from tests.support.postgres import Postgres
from tests.support.seaweed import S3Server
from tests.support.served import answer, kvgw, served
from tests.support.several import Footing


@asynccontextmanager
async def serving(one: Spot) -> AsyncIterator[None]:
    """The crew's part, where the footing's gateway has no crew at work."""
    if one.crew.scrub._serving:
        yield
        return
    task = asyncio.create_task(one.crew.scrub.serve())
    await until(lambda: one.crew.scrub._serving)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def scrubbed(one: Spot, state: State = "done", *, rate: int = 0, sample: float = 1.0) -> ScrubReport:
    async with serving(one):
        one.crew.scrub.start(rate, sample, ACT)
        await until(lambda: one.crew.scrub.report.state != "running")
    assert one.crew.scrub.report.state == state, one.crew.scrub.report.sentence
    return one.crew.scrub.report


async def damage(one: Spot, blob_id: bytes, at: int) -> None:
    """Change one bit of a blob behind the catalog's back."""
    name = one.name(blob_id)
    length = (await one.tier.stat([name]))[name]
    blob = bytearray(length)
    await one.tier.get_into(name, memoryview(blob))
    blob[at % length] ^= 1
    await one.lose(blob_id)
    await one.tier.put(name, memoryview(blob))


class ScrubContract:
    def spot(self) -> AbstractAsyncContextManager[Spot]:
        raise NotImplementedError

    @aio
    async def test_what_is_whole_is_proved_to_be(self) -> None:
        async with self.spot() as one:
            await one.put(4)
            ((length,), *_) = {tuple((await one.tier.stat([one.name(blob)])).values()) for blob in await one.blobs()}
            progress = (await scrubbed(one)).tiers[one.label]
            assert (progress.blobs, progress.nbytes, progress.damaged, progress.skipped) == (4, 4 * length, 0, 0)
            value = one.opened.rooms.metrics.registry.get_sample_value
            assert value("kvgw_scrubbed_bytes_total", {"tier": one.label}) == 4 * length
            assert one.opened.rooms.staging.statistics().windows.used_bytes == 0, "law 7"
            assert await one.hits(4) == 4

    @aio
    async def test_small_blobs_are_opened_together_within_a_tenants_share(self) -> None:
        async with self.spot() as one:
            await one.put(6)
            sealed = (await one.tier.stat([one.name((await one.blobs())[0])])).popitem()[1]
            asked: list[int] = []
            plain = Staging.window

            def window(staging: Staging, tenant: UUID, nbytes: int, timeout_s: float) -> Any:
                asked.append(nbytes)
                return plain(staging, tenant, nbytes, timeout_s)

            for share, windows in ((2**30, 1), (2 * sealed, 3), (sealed // 4, 6)):
                asked.clear()
                with (
                    mock.patch.object(Staging, "window", window),
                    mock.patch.object(Staging, "window_share", share),
                ):
                    progress = (await scrubbed(one)).tiers[one.label]
                assert (progress.blobs, progress.skipped, progress.damaged) == (6, 0, 0)
                assert len(asked) == windows and len({*asked}) == 1

    @aio
    async def test_N04_each_damage_is_found_and_quarantined(self) -> None:
        """Law 2: a bit of the header, the commitment, a segment and the last tag; a blob that is short; one gone."""
        async with self.spot() as one:
            await one.put(7)
            header, commitment, segment, tag, short, gone, _ = await one.blobs()
            for blob_id, at in ((header, 5), (commitment, 150), (segment, 2000), (tag, -1)):
                await damage(one, blob_id, at)
            await one.lose(short, gone)
            await one.tier.put(one.name(short), memoryview(b"short"))
            report = await scrubbed(one)
            assert (report.tiers[one.label].damaged, report.tiers[one.label].blobs) == (6, 7)
            value = one.opened.rooms.metrics.registry.get_sample_value
            assert value("kvgw_scrub_damaged_blobs_total", {"tier": one.label}) == 6
            assert await one.hits(7) == 1
            await one.check_clean()
            assert (await scrubbed(one)).tiers[one.label].damaged == 0

    @aio
    async def test_a_row_that_changed_meanwhile_is_not_touched(self) -> None:
        async with self.spot() as one:
            await one.put(2)
            await one.lose((await one.blobs())[0])
            with mock.patch.object(type(one.opened.rooms.catalog), "sealings", _written_anew(one)):
                assert (await scrubbed(one)).tiers[one.label].damaged == 0
            assert (await one.look()).found["dangling"] == 1

    @aio
    async def test_it_goes_no_faster_than_told(self) -> None:
        async with self.spot() as one:
            await one.put(3)
            name = one.name((await one.blobs())[0])
            length = (await one.tier.stat([name]))[name]
            async with serving(one):
                one.crew.scrub.start(length, 1.0, ACT)
                progress = one.crew.scrub.report.tiers[one.label]
                for blobs in (1, 2, 3):
                    await until(lambda blobs=blobs: progress.blobs == blobs)  # type: ignore[misc]
                    await asyncio.sleep(0.05)
                    assert progress.blobs == blobs, "it waits for the clock, which stands still"
                    one.clock.advance(1.0)
                await until(lambda: one.crew.scrub.report.state == "done")

    @aio
    async def test_a_sample_is_a_part(self) -> None:
        async with self.spot() as one:
            await one.put(80)
            assert 10 < (await scrubbed(one, sample=0.5)).tiers[one.label].blobs < 70

    @aio
    async def test_it_can_be_stopped_and_ends_with_the_gateway(self) -> None:
        async with self.spot() as one:
            await one.put(2)
            async with serving(one):
                one.crew.scrub.start(1, 1.0, ACT)
                await until(lambda: one.crew.scrub.report.tiers[one.label].blobs == 1)
                with pytest.raises(RequestRefused, match="under way"):
                    one.crew.scrub.start(1, 1.0, ACT)
                one.crew.scrub.stop()
                await asyncio.sleep(0)
                one.crew.scrub.stop()  # it is ending already
                await until(lambda: one.crew.scrub.report.state == "stopped")
                one.crew.scrub.start(1, 1.0, ACT)
                await until(lambda: one.crew.scrub.report.tiers[one.label].blobs == 1)
        assert (one.crew.scrub.report.state, one.crew.scrub.report.sentence) == ("stopped", "the gateway stopped")
        with pytest.raises(RequestRefused, match="none runs here"):
            one.crew.scrub.start(1, 1.0, ACT)

    @aio
    async def test_a_tier_that_does_not_answer_ends_it(self) -> None:
        async with self.spot() as one:
            await one.put(2)
            with mock.patch.object(type(one.tier), "get_into", mock.AsyncMock(side_effect=TierUnavailable("planted"))):
                assert "planted" in (await scrubbed(one, "failed")).sentence
            await one.check_clean()

    @aio
    async def test_a_mass_of_damage_is_not_believed(self) -> None:
        async with self.spot() as one:
            await one.put(6)
            await one.lose(*await one.blobs())
            with mock.patch.object(scrub, "IMPLAUSIBLE_COUNT", 2):
                report = await scrubbed(one, "refused")
            assert report.tiers[one.label].damaged == 2
            assert (await one.look()).found["dangling"] == 4, "the others were not touched"


def _written_anew(one: Spot) -> object:
    sealings = type(one.opened.rooms.catalog).sealings

    async def patched(self: object, *arguments: object) -> object:
        found = await sealings(self, *arguments)  # type: ignore[arg-type]
        await one.transact(
            lambda connection: connection.exec_driver_sql("UPDATE placement SET updated_ms = updated_ms + 1") and None
        )
        return found

    return patched


class TestScrubOnSqliteAndNvme(OnSqliteAndNvme, ScrubContract):
    pass


@pytest.mark.timeout(120)
class TestScrubOnPostgresAndS3(OnPostgresAndS3, ScrubContract):
    pass


@pytest.mark.s3
@pytest.mark.postgres
@pytest.mark.timeout(120)
@pytest.mark.parametrize("label", ["nvme", "s3"])
def test_a_damaged_copy_is_made_anew_from_the_other_tier(
    label: str, postgres: Postgres, seaweed: S3Server, tmp_path: Path
) -> None:
    async def main(shared: Footing) -> None:
        clock = clock_now()
        async with shared.gateway("a", clock=clock) as house:
            one = await spot_of(house, clock, label, shared.as_superuser)
            await one.put(4, durability="s3")
            await take_up_backlog(one.crew)
            await damage(one, (await one.blobs())[0], 2000)
            report = await scrubbed(one)
            assert {tier: (at.blobs, at.damaged) for tier, at in report.tiers.items()} == {
                "nvme": (4, int(label == "nvme")),
                "s3": (4, int(label == "s3")),
            }
            one.forget(*await one.blobs())
            await take_up_backlog(one.crew)
            assert sum(at.damaged for at in (await scrubbed(one)).tiers.values()) == 0, "written anew"
            assert await one.hits(4) == 4, "nothing was lost"
            await one.check_clean()

    shared = Footing(postgres, seaweed, tmp_path)
    shared.prepare()
    run(main(shared), timeout=100)


@pytest.mark.timeout(180)
def test_the_command_its_progress_and_its_exit_codes(tmp_path: Path) -> None:
    folder = tmp_path / "gw"
    data = ("--data", str(folder))

    with served(folder) as running:
        assert "nothing was scrubbed" in kvgw("scrub", "--status", *data).stdout
        run(store(folder))
        begun = kvgw("scrub", "--rate", "0", *data)
        assert begun.returncode == 0, begun.stdout + begun.stderr
        _until_done(*data)
        seen = answer("scrub", "--status", *data)
        assert (seen["state"], seen["tiers"]["nvme"]["blobs"], seen["tiers"]["nvme"]["damaged"]) == ("done", 4, 0)
        first = min((folder / "nvme" / "v1").glob("*/??/*"))
        content = first.read_bytes()
        first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        kvgw("scrub", *data)
        _until_done(*data)
        seen = kvgw("scrub", "--status", *data)
        assert seen.returncode == 1, "damage was found"
        assert "done" in seen.stdout
        assert kvgw("fsck", *data).returncode == 0, "what was damaged is quarantined"
        assert kvgw("scrub", "--stop", *data).returncode == 1
        assert running.stop() == 0
        assert "Traceback" not in running.complaints()
    alone = kvgw("scrub", *data)
    assert alone.returncode == 1
    assert "none runs here" in alone.stderr.replace("\n", " ")


def _until_done(*data: str) -> None:
    for _ in range(100):
        if "running" not in kvgw("scrub", "--status", *data).stdout:
            return
    raise AssertionError("the scrub did not end")
