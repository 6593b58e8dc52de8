"""The operator's side of the bench: namespaces for its clients, and waiting until the gateway is quiet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from kvgw.bench.gateway import GatewayUnderTest
from kvgw.errors import Outage
from kvgw.model import (
    AdminQuestion,
    Durability,
    NamespaceCreateRequest,
    NamespaceInfo,
    NamespacesReply,
    NamespacesRequest,
    StatusReply,
    StatusRequest,
)
from kvgw.transport import Answer, SocketTransport

ANSWER_SECONDS: Final = 30.0
POLL_SECONDS: Final = 0.1
QUIET_POLLS: Final = 3
"""So many equal answers in a row: the sweep deletes in pieces, and says nothing between them."""


class Operator:
    """Asks a gateway what only its operator may. Raises `Outage` and `RequestRefused`."""

    def __init__(self, transport: SocketTransport) -> None:
        self._transport = transport

    async def version(self) -> str:
        """The gateway's version."""
        return (await self._ask(StatusRequest(), StatusReply)).version

    async def namespaces(self, count: int, durability: Durability) -> list[str]:
        """Names of `count` namespaces for the bench alone, made where they are not there from an earlier run."""
        names = [f"bench-{durability}-{number}" for number in range(1, count + 1)]
        there = {one.name for one in (await self._ask(NamespacesRequest(), NamespacesReply)).namespaces}
        for name in names:
            if name not in there:
                await self._ask(NamespaceCreateRequest(name, durability=durability), NamespaceInfo)
        return names

    async def settle(self, limit_s: float) -> str:
        """Wait until nothing is due to be written and no tier's use changes; empty, or what was still going on."""
        deadline = time.monotonic() + limit_s
        previous: list[tuple[int, int]] = []
        equal = 0
        while True:
            status = await self._ask(StatusRequest(), StatusReply)
            now = [(one.outbox_blobs, one.used_bytes) for one in status.tiers]
            equal = equal + 1 if now == previous else 0
            due = sum(max(0, blobs) for blobs, _ in now)
            if not due and equal >= QUIET_POLLS - 1:
                return ""
            if time.monotonic() >= deadline:
                return f"{due} writes were due" if due else "a tier's use still changed"
            previous = now
            await asyncio.sleep(POLL_SECONDS)

    async def _ask(self, question: AdminQuestion, answer: type[Answer]) -> Answer:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._transport.ask(question, answer)
        except TimeoutError as error:
            raise Outage(f"the gateway did not answer within {ANSWER_SECONDS:g} s") from error


@asynccontextmanager
async def operator_of(gateway: GatewayUnderTest) -> AsyncIterator[Operator]:
    """An operator of the gateway, connected until this is left."""
    transport = SocketTransport(gateway.endpoint, gateway.token, connections=1)
    try:
        yield Operator(transport)
    finally:
        await transport.aclose()
