"""What a gateway in another process has, by its own word."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvgw.client import Client, connect
from tests.engines.vllm_engine import endpoint
from tests.support.served import Served


def entries(gateway: Served) -> int:
    """Entries of the default namespace."""
    return reach(gateway, lambda _: True)


def reach(gateway: Served, enough: Callable[[int], bool], within_s: float = 60.0) -> int:
    """Ask again and again until there are `enough` entries; how many there are. Fails after `within_s` seconds."""

    async def look() -> int:
        async with connect(endpoint(gateway)) as client:
            return await _reached(client, enough, within_s)

    return asyncio.run(look())


async def _reached(client: Client, enough: Callable[[int], bool], within_s: float) -> int:
    until = time.monotonic() + within_s
    while True:
        found = (await client.stat()).entries
        if enough(found):
            return found
        assert time.monotonic() < until, f"{found} entries after {within_s:g} s"
        await asyncio.sleep(0.002)
