"""A gateway without room in its staging: clients hold all of it that begin to store and never send."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvgw.client import connect
from kvgw.endpoint import parse_endpoint
from kvgw.model import Outcome, PutRequest
from kvgw.reports import Registered
from kvgw.wire import Kind
from tests.engines.vllm_engine import endpoint
from tests.support.gateways import MIB, format_of, keys_of, payloads_of
from tests.support.raw_peer import RawPeer
from tests.support.served import Served

_PEERS: Final = 32
"""Each waits for 2 MiB; when the gateway loses patience with one, the next in line has its room."""


@contextmanager
def full_staging(gateway: Served) -> Iterator[None]:
    """Inside, the gateway has no window for a chunk of half a MiB."""
    full, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_hold(gateway, full, done)))
    thread.start()
    try:
        assert full.wait(60), "there is room all the same"
        yield
    finally:
        done.set()
        thread.join()


async def _hold(gateway: Served, full: threading.Event, done: threading.Event) -> None:
    async with connect(endpoint(gateway)) as client:
        registered = await client.register(format_of(MIB // 2))
        peers = [asyncio.create_task(_begin_to_store(gateway, registered, number)) for number in range(_PEERS)]
        tried = 0
        while not full.is_set() and not done.is_set():
            tried += 1
            keys = keys_of(1, f"probe-{tried}")
            report = await client.put(registered, keys, payloads_of(registered, 1, tried), deadline_s=0.5)
            if report.outcome is Outcome.OUTAGE:
                full.set()
        await asyncio.to_thread(done.wait)
        for peer in peers:
            peer.cancel()
        await asyncio.gather(*peers, return_exceptions=True)


async def _begin_to_store(gateway: Served, registered: Registered, number: int) -> None:
    for turn in range(1_000_000):
        peer = await RawPeer.connect(parse_endpoint(endpoint(gateway)))
        with contextlib.closing(peer):
            await peer.hello()
            keys = keys_of(4, f"held-{number}-{turn}")
            await peer.send(Kind.REQUEST, 1, PutRequest(registered.fingerprint, keys, deadline_ms=200_000))
            await peer.receive()  # it is told what is wanted
            await peer.ended()
