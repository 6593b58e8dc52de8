"""``kvgw fsck`` on SQLite and NVMe, and on PostgreSQL and S3; and the command with its exit codes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kvgw.client import Client, ClientOptions
from kvgw.endpoint import UnixEndpoint
from kvgw.model import Durability
from kvgw.reports import Registered
from kvgw.transport import SocketTransport
from tests.kvgw.fsck_contract import ACT, FsckContract
from tests.kvgw.fsck_footings import OnPostgresAndS3, OnSqliteAndNvme, clock_now, spot_of
from tests.support.aio import aio, run
from tests.support.gateways import House, format_of, house, keys_of, payloads_of, read, take_up_backlog, until
from tests.support.postgres import Postgres
from tests.support.seaweed import S3Server
from tests.support.served import kvgw, served
from tests.support.several import Footing, on_footing
from tests.tenancy.statement_lint import linted_statements


class TestFsckOnSqliteAndNvme(OnSqliteAndNvme, FsckContract):
    pass


@pytest.mark.timeout(120)
class TestFsckOnPostgresAndS3(OnPostgresAndS3, FsckContract):
    pass


@pytest.mark.s3
@pytest.mark.postgres
@pytest.mark.timeout(120)
@pytest.mark.parametrize("label", ["nvme", "s3"])
def test_a_copy_that_is_gone_is_made_anew_from_the_other_tier(
    label: str, postgres: Postgres, seaweed: S3Server, tmp_path: Path
) -> None:
    async def main(shared: Footing) -> None:
        clock = clock_now()
        async with shared.gateway("a", clock=clock) as one:
            spot = await spot_of(one, clock, label, shared.as_superuser)
            await spot.put(4, durability="s3")
            await take_up_backlog(one.opened.crew)
            lost = (await spot.blobs())[0]
            await spot.lose(lost)
            await spot.check("dangling")
            await take_up_backlog(one.opened.crew)
            assert await spot.tier.stat([spot.name(lost)]), "written anew"
            ((count,),) = await shared.rows("SELECT count(*) FROM placement WHERE state = 'ok'")
            assert count == 8
            assert await spot.hits(4) == 4, "nothing was lost"
            await spot.check_clean()
            await shared.check_quota()

    shared = Footing(postgres, seaweed, tmp_path)
    shared.prepare()
    run(main(shared))


async def use(one: House, registered: Registered, name: str, rounds: int, durability: Durability) -> None:
    """PUT, GET and DELETE, over and over."""
    client = one.client(on_error="raise")
    for number in range(rounds):
        keys = keys_of(6, f"{name}{number}")
        await client.put(registered, keys, payloads_of(registered, 6, seed=number), durability=durability)
        _, found = await read(client, registered, keys)
        assert None not in found
        await client.delete(registered, keys[: 1 + number % 6])


async def check_under_traffic(one: House, durability: Durability, users: int, rounds: int) -> None:
    """No false alarm, looking and repairing, while the gateway is used and its jobs run; nothing is lost by it."""
    registered = await one.client().register(format_of())
    names = [f"{one.opened.rooms.catalog.node.node}{number}-" for number in range(users)]
    used = asyncio.gather(*(use(one, registered, name, rounds, durability) for name in names))
    checks, scrub = 0, one.opened.crew.scrub
    while not used.done() or checks < 6:
        with linted_statements():
            report = await one.opened.crew.fsck.run(ACT if checks % 2 else None)
        assert (report.verdict, report.findings) == ("clean", [])
        checks += 1
        await one.opened.crew.heartbeat()
        if scrub.report.state != "running":
            scrub.start(0, 1.0, ACT)
        assert sum(tier.damaged for tier in scrub.report.tiers.values()) == 0, "nor of the scrub"
    await used
    await until(lambda: scrub.report.state == "done")
    assert sum(tier.damaged for tier in scrub.report.tiers.values()) == 0


@pytest.mark.timeout(120)
@aio
async def test_no_false_alarm_under_traffic(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as one:
        await check_under_traffic(one, Durability.NVME, users=3, rounds=40)


@pytest.mark.s3
@pytest.mark.postgres
@pytest.mark.timeout(120)
@on_footing
async def test_no_false_alarm_under_traffic_of_two_gateways(shared: Footing) -> None:
    async with shared.gateway("a") as a, shared.gateway("b") as b:
        both = (check_under_traffic(a, Durability.S3, 2, 8), check_under_traffic(b, Durability.NVME, 2, 8))
        await asyncio.gather(*both)


async def store(folder: Path) -> None:
    client = Client(SocketTransport(UnixEndpoint(str(folder / "kvgw.sock")), None), ClientOptions(on_error="raise"))
    try:
        registered = await client.register(format_of())
        await client.put(registered, keys_of(4), payloads_of(registered, 4))
    finally:
        await client.aclose()


@pytest.mark.timeout(180)
def test_the_command_and_its_exit_codes(tmp_path: Path) -> None:
    folder = tmp_path / "gw"
    data = ("--data", str(folder))
    with served(folder) as running:
        run(store(folder))
        clean = kvgw("fsck", *data)
        assert clean.returncode == 0, clean.stdout + clean.stderr
        assert "everything agrees" in clean.stdout
        first, *others = sorted((folder / "nvme" / "v1").glob("*/??/*"))
        first.unlink()
        found = kvgw("fsck", "--json", *data)
        assert found.returncode == 1
        told = json.loads(found.stdout)
        assert (told["found"], told["left"], told["verdict"]) == ({"dangling": 1}, 1, "findings")
        assert told["findings"][0]["what"].endswith(first.name)
        assert kvgw("fsck", *data).returncode == 1, "looking changes nothing"
        mended = kvgw("fsck", "--repair", *data)
        assert mended.returncode == 0, mended.stdout + mended.stderr
        assert "everything agrees now" in mended.stdout
        assert running.stop() == 0
        assert "Traceback" not in running.complaints()
    assert kvgw("fsck", *data).returncode == 0, "without a gateway the data folder is opened"
    for file in others:
        file.unlink()
    refused = kvgw("fsck", "--repair", *data)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "is its disk mounted" in refused.stderr.replace("\n", " ")
