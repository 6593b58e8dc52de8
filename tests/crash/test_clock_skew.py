"""R59: S3 refuses requests whose date is too far from its own: that is said, costs little, and heals with the clock."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kvgw.model import Durability, Outcome, PutOutcome
from tests.crash.test_s3_outage import running, settings
from tests.support.aio import run
from tests.support.fake_s3 import HEAD_END, FakeS3, Request, error

SKEW_MOST_S = 900.0
WRITERS = 16
TRIES_MOST = 3
"""Requests of one write, whatever becomes of it."""


class StrictS3(FakeS3):
    """Compares the date of what it is asked with its own time, which is `ahead_s` from this machine's."""

    def __init__(self, ahead_s: float) -> None:
        super().__init__()
        self.ahead_s = ahead_s
        self.refused = 0

    def _behave(self, request: Request) -> bytes:
        own = datetime.now(UTC) + timedelta(seconds=self.ahead_s)
        asked = request.headers["x-amz-date"]
        said = datetime.strptime(asked, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        if abs((own - said).total_seconds()) <= SKEW_MOST_S:
            return super()._behave(request)
        self.refused += 1
        document = error("RequestTimeTooSkewed", RequestTime=asked, ServerTime=own.strftime("%Y-%m-%dT%H:%M:%SZ"))
        body = b"" if request.method == "HEAD" else document
        return f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(document)}".encode() + HEAD_END + body


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("ahead_s", [1200.0, -1200.0])
def test_R59_a_clock_that_S3_does_not_accept_is_said_to_be_wrong_and_all_drains_when_it_is_right(
    tmp_path: Path, ahead_s: float
) -> None:
    async def body() -> None:
        async with StrictS3(ahead_s) as server, running(settings(tmp_path, server.endpoint), tmp_path / "data") as one:
            asked = server.refused
            puts = [one.put(f"s3-{number:02}", Durability.S3, 1) for number in range(WRITERS)]
            answers = await asyncio.gather(*puts)
            assert [outcomes for outcomes, _, _ in answers] == [{PutOutcome.FAILED}] * WRITERS
            assert {outcome for _, outcome, _ in answers} == {Outcome.OUTAGE}
            assert server.refused - asked <= TRIES_MOST * WRITERS + 20, "law 9: bounded, the probes' own apart"
            for _, _, reason in answers:
                assert "clocks of this machine" in reason, "with both times, and not taken for a wrong key"
            assert await one.put("meanwhile", Durability.NVME, 2) == ({PutOutcome.STORED}, Outcome.OK, "")
            assert await one.outbox() == 2, "it waits for S3 on the disk"
            server.ahead_s = 0.0
            await one.drained(120.0)
            assert await one.put("after", Durability.S3, 1) == ({PutOutcome.STORED}, Outcome.OK, "")
            assert (await one.get("meanwhile", 2))[1] is Outcome.OK

    run(body(), timeout=200)
