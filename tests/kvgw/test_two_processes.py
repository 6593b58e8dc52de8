"""S19: one process owns a SQLite catalog; whoever else comes is refused, or only reads, and the file stays whole."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from kvgw.client import connect
from kvgw.model import PutOutcome
from tests.support.gateways import format_of, keys_of, payloads_of
from tests.support.served import answer, kvgw, served

WRITERS = ("serve", "migrate", "restore", "wipe")


def stored(endpoint: str, name: str, count: int = 20) -> int:
    """PUTs through the gateway, as an engine makes them; how many chunks it took."""

    async def body() -> int:
        async with connect(endpoint) as client:
            registered = await client.register(format_of())
            report = await client.put(
                registered, keys_of(count, name), payloads_of(registered, count, seed=ord(name[-1]))
            )
            return list(report.outcomes).count(PutOutcome.STORED)

    return asyncio.run(body())


@pytest.mark.timeout(180)
def test_S19_a_second_process_is_refused_or_only_reads(tmp_path: Path) -> None:
    folder = tmp_path / "gw"
    data = ("--data", str(folder))
    with served(folder) as running:
        endpoint = f"unix:{folder / 'kvgw.sock'}"
        copy = tmp_path / "copy"
        for number in range(3):
            assert stored(endpoint, f"round-{number}") == 20
            for verb in WRITERS:
                extra = {"restore": [str(copy)], "wipe": ["--yes"]}.get(verb, [])
                refused = kvgw(verb, *extra, *data)
                assert refused.returncode != 0, f"{verb} ran beside the gateway"
                assert "Traceback" not in refused.stderr
            assert answer("audit", "verify", *data)["finding"] == "whole", "read beside the gateway"
            copy.unlink(missing_ok=True)
            assert kvgw("backup", str(copy), *data).returncode == 0
            assert answer("namespace", "list", *data)[0]["chunks"] == 20 * (number + 1), "asked of the gateway"
        assert running.stop() == 0
    with sqlite3.connect(folder / "catalog.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute("SELECT count(*) FROM chunk").fetchone() == (60,)
    connection.close()
