"""Prefill and decode apart: an engine that decodes waits for the chunks of a prompt that another one computes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from kvgw.calls import GATEWAY_SHARE
from kvgw.engines.counters import Counters
from kvgw.engines.options import EngineOptions
from kvgw.engines.remote import Remote
from kvgw.engines.tenants import TenantMap
from kvgw.errors import FormatError
from kvgw.kvformat import KVFormat
from kvgw.runtime import Clock

WAITS_AT_ONCE: Final = 64
"""Requests of one engine that wait at once, each on a connection of its own; more of them stand in line."""


def check_waits(options: EngineOptions) -> None:
    """Raise `FormatError` for an engine that would wait for what only itself can compute."""
    if options.wait_deadline_s and options.store:
        raise FormatError(
            f"wait_deadline_s is {options.wait_deadline_s:g}, and this engine stores: it would wait for chunks that "
            'nobody else computes; give "kv_role": "kv_consumer" or store=false, or leave wait_deadline_s out'
        )


class Handover:
    """Waits at the gateway, which says when chunks arrive; nothing is polled from here. Owned by one event loop."""

    def __init__(self, options: EngineOptions, tenants: TenantMap, counters: Counters, clock: Clock) -> None:
        self._options = options
        self._counters = counters
        self._clock = clock
        # Connections of its own: a wait keeps one for as long as it takes, and other requests' lookups must pass.
        self._remote = Remote(options, tenants, counters, clock, connections=WAITS_AT_ONCE)
        self._room = asyncio.Semaphore(WAITS_AT_ONCE)

    async def rest(self, tenant: str, formats: Sequence[KVFormat], keys: Sequence[bytes]) -> int:
        """How many leading ones of `keys` every one of `formats` has, when all are there or `wait_deadline_s` is over.

        Without an answer of the gateway: 0, at once.
        """
        self._counters.add("waits")
        until = self._clock.monotonic() + self._options.wait_deadline_s
        try:
            async with asyncio.timeout(self._options.wait_deadline_s * GATEWAY_SHARE):
                await self._room.acquire()
        except TimeoutError:
            self._counters.reason("waits_over", f"{WAITS_AT_ONCE} requests of this engine wait, and more stand in line")
            return 0
        try:
            found = await self._remote.match(tenant, formats, keys, until, wait=True)
        finally:
            self._room.release()
        if found.answered and found.count < len(keys):
            self._counters.reason(
                "waits_over",
                f"not all chunks of a prompt came within wait_deadline_s={self._options.wait_deadline_s:g}",
            )
        return found.count

    async def aclose(self) -> None:
        """Close every connection."""
        await self._remote.aclose()
