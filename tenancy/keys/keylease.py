"""Who changes keys is alone in it, among the tasks of this gateway and among all gateways of a catalog.

The lease is looked at again inside every transaction that writes wrapped keys, and made longer before every write to
the key store: a gateway that lost it in its sleep overwrites nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from sqlalchemy import Connection

from tenancy import processes
from tenancy.catalog import Catalog
from tenancy.errors import CatalogUnavailable, RegistryRefused

JOB: Final = "keys"
LEASE_MS: Final = 120_000
"""Above what one write to the key store may take: with all its retries it ends within a minute."""


class KeyLease:
    """One gateway's part in the lease."""

    def __init__(self, catalog: Catalog, now_ms: Callable[[], int]) -> None:
        self._catalog = catalog
        self._now_ms = now_ms
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Raises `RegistryRefused` while another gateway has it."""
        async with self._turn:
            await self.keep()
            try:
                yield
            finally:
                with contextlib.suppress(CatalogUnavailable):  # then it ends by itself
                    await self._catalog.lead(JOB, 0, self._now_ms())  # long ago, for clocks that are behind too

    async def keep(self) -> None:
        """Have it for another `LEASE_MS`. Raises `RegistryRefused`."""
        now_ms = self._now_ms()
        if not await self._catalog.lead(JOB, now_ms + LEASE_MS, now_ms):
            raise RegistryRefused("another gateway is changing keys now; try again in a few minutes")

    def hold(self, connection: Connection) -> None:
        """As `keep`, inside a transaction: nobody else began to change keys before it."""
        now_ms = self._now_ms()
        if not processes.lead(connection, JOB, self._catalog.node, now_ms + LEASE_MS, now_ms):
            raise RegistryRefused("another gateway has begun to change keys; nothing was changed, try again later")
