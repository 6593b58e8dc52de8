"""One client in one event loop after the other, as scripts with several ``asyncio.run`` have it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import kvgw
from tests.support.gateways import format_of, keys_of, payloads_of, read
from tests.support.served import served


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_client_goes_on_in_the_next_event_loop(tmp_path: Path, shared_memory: bool) -> None:
    with served(tmp_path / "data") as gateway:
        options = kvgw.ClientOptions(shared_memory=shared_memory)
        client = kvgw.connect(f"unix:{gateway.folder / 'kvgw.sock'}", options=options)

        async def store() -> list[bytes]:
            registered = await client.register(format_of(256 * 1024))
            payloads = payloads_of(registered, 4)
            assert (await client.put(registered, keys_of(4), payloads)).stored == 4
            return payloads

        async def crowd() -> list[list[bytes | None]]:
            registered = await client.register(format_of(256 * 1024))
            return [
                found for _, found in await asyncio.gather(*(read(client, registered, keys_of(4)) for _ in range(9)))
            ]

        payloads = asyncio.run(store())
        for _ in range(2):
            assert asyncio.run(crowd()) == [payloads] * 9
        asyncio.run(client.aclose())
