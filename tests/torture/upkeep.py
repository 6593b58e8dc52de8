"""Upkeep beside traffic: what a tenant's reads cost while keys rotate and everything is looked through (L06).

    python -m tests.torture.upkeep [--rounds 5] [--seconds 3]

The gateway has one half of the processors, those who ask it the other. One client reads at a quarter of what it gets
when it reads as fast as it can, alone and beside an operator who gives an order every quarter of a second: rotate the
root key and wrap all keys anew, rotate a namespace's data key, look through everything (`fsck`), open everything again
(`scrub`, at its ordinary rate), and delete chunks of another tenant, which are then swept.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import httpx2

from kvgw.client import Client, ClientOptions
from kvgw.endpoint import UnixEndpoint
from kvgw.model import Durability
from kvgw.transport import SocketTransport
from tests.support.gateways import format_of, keys_of, payloads_of
from tests.support.served import served
from tests.torture.asking import CHUNK_BYTES, Asker, Stretch, Who, apart, asking
from tests.torture.neighbours import SETTINGS, Pair, tenant

EVERY_S: Final = 0.25
SHARE: Final = 0.25
"""Of what the client gets when it reads as fast as it can."""
BATCH: Final = 32
"""Chunks that are deleted by one order."""
BATCHES: Final = 40
"""Such batches lie on NVMe for all this to look at."""


class Operator:
    """Gives one order after the other."""

    def __init__(self, folder: Path, token: str) -> None:
        self._socket = UnixEndpoint(str(folder / "kvgw.sock"))
        self._admin = httpx2.Client(
            transport=httpx2.HTTPTransport(uds=str(folder / "admin.sock")), base_url="http://kvgw/v1", timeout=30
        )
        self._token = token
        self._turn = 0
        self._deleted = 0

    def close(self) -> None:
        self._admin.close()

    def prepare(self) -> None:
        """Store something to look through, and give each order once: what is slow once is over."""
        asyncio.run(self._store())
        for _ in self._orders:
            self._next()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Orders are given while the block runs. Raises what the last one raised."""
        over = threading.Event()
        failed: list[BaseException] = []

        def work() -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # the client, beside it, is what is measured
            try:
                while not over.is_set():
                    self._next()
                    over.wait(EVERY_S)
            except BaseException as error:
                failed.append(error)
                raise

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        assert not failed, failed

    def _next(self) -> None:
        self._orders[self._turn % len(self._orders)]()
        self._turn += 1

    @property
    def _orders(self) -> Sequence[Callable[[], object]]:
        return (
            lambda: self._post("/keys/rotate"),
            lambda: self._post("/keys/rewrap"),
            lambda: self._post("/tenants/ballast/namespaces/default/keys/rotate", {"key": "data"}),
            lambda: self._post("/fsck", {}),
            lambda: asyncio.run(self._delete()),
            self._scrub,
        )

    def _scrub(self) -> None:
        if self._admin.get("/scrub").raise_for_status().json()["state"] != "running":
            self._post("/scrub", {})

    def _post(self, path: str, body: object = None) -> None:
        self._admin.post(path, json=body).raise_for_status()

    async def _store(self) -> None:
        async with self._client() as client:
            part = await client.register(format_of(CHUNK_BYTES))
            for number in range(BATCHES):
                chunks = payloads_of(part, BATCH, seed=number * BATCH)
                await client.put(part, keys_of(BATCH, f"{number}"), chunks, durability=Durability.NVME)

    async def _delete(self) -> None:
        async with self._client() as client:
            part = await client.register(format_of(CHUNK_BYTES))
            self._deleted += 1
            assert await client.delete(part, keys_of(BATCH, f"{self._deleted % BATCHES}")) in (0, BATCH)

    def _client(self) -> Client:
        return Client(SocketTransport(self._socket, self._token), ClientOptions(on_error="raise"))


def measure(rounds: int, seconds: float, tell: Callable[[str], None]) -> list[Pair]:
    """Start a gateway, and measure `rounds` pairs of stretches of `seconds` each, alone and beside the operator."""
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgw-upkeep-"))) / "data"
        to_those_who_ask = stack.enter_context(apart())
        stack.enter_context(served(data, settings=SETTINGS))
        to_those_who_ask()
        quiet = stack.enter_context(asking(Who(str(data / "kvgw.sock"), tenant(data, "quiet"))))
        operator = stack.enter_context(closing(Operator(data, tenant(data, "ballast"))))
        operator.prepare()
        quiet.during(Stretch(seconds))  # what is slow once is over
        alone = len(quiet.during(Stretch(seconds)).took) / seconds
        paced = Stretch(seconds, 1 / (SHARE * alone))
        tell(f"alone {alone:.0f} reads a second; paced: one in {paced.every_s * 1e3:.1f} ms")
        pairs = [_pair(quiet, operator, paced) for _ in range(rounds)]
        for pair in pairs:
            tell(f"p99 × {pair.p99_ratio:.2f}: {pair}")
        tell(f"p99 × {median(pair.p99_ratio for pair in pairs):.2f} (median)")
        return pairs


def _pair(quiet: Asker, operator: Operator, stretch: Stretch) -> Pair:
    alone = quiet.during(stretch).took
    with operator.at_work():
        beside = quiet.during(stretch).took
    return Pair(alone, beside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    measure(arguments.rounds, arguments.seconds, print)


if __name__ == "__main__":
    main()
