"""Shared windows on loan to clients: so many bytes for a connection, a tenant and all together, and no more (law 9).

A window that is not lent is no error: whoever asked sends its bytes another way. All methods belong to one event
loop's thread; windows are made and unmapped in worker threads, since both take time.
"""

from __future__ import annotations

import asyncio
import mmap
from collections import Counter
from dataclasses import dataclass
from uuid import UUID

from storage.ports import Workers
from storage.shared_window import SharedWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingLimits:
    """In bytes."""

    total_bytes: int
    tenant_bytes: int
    connection_bytes: int


class Loan:
    """A window on loan to one connection of a tenant."""

    __slots__ = ("tenant", "window")

    def __init__(self, tenant: UUID, window: SharedWindow) -> None:
        self.tenant = tenant
        self.window = window


class Lending:
    """Who has which shared windows."""

    def __init__(self, limits: LendingLimits, workers: Workers, *, windows_max: int) -> None:
        self.windows_max = windows_max
        """How many at once: each takes a descriptor."""
        self._limits = limits
        self._workers = workers
        self._held: Counter[UUID] = Counter()
        self._count = 0
        self._lingering: list[Loan] = []
        self._making = asyncio.Lock()
        """One window is made at a time: whoever asks again and again takes one worker thread from the others."""

    @property
    def enabled(self) -> bool:
        """Whether windows are lent at all."""
        limits = self._limits
        return self.windows_max > 0 and min(limits.total_bytes, limits.tenant_bytes, limits.connection_bytes) > 0

    @property
    def lent_bytes(self) -> int:
        """Bytes of all windows that are mapped here."""
        return self._held.total()

    @property
    def count(self) -> int:
        """How many windows are mapped here."""
        return self._count

    def held(self, tenant: UUID) -> int:
        """Bytes of one tenant's windows."""
        return self._held[tenant]

    async def lend(self, tenant: UUID, least: int, most: int) -> Loan | None:
        """A window of at most `most` bytes, as large as the limits leave; None if that is less than `least`."""
        await self._collect()
        nbytes = min(_whole_pages(most), self._allowed(tenant))
        if nbytes < max(least, mmap.PAGESIZE):
            return None
        self._held[tenant] += nbytes  # before anything is awaited: nobody else gets these bytes
        self._count += 1
        made: list[SharedWindow] = []
        try:
            async with self._making:
                await self._workers.run(lambda: made.append(SharedWindow(nbytes)))
        except OSError:  # no memory or no descriptor is left for it
            self._forget(tenant, nbytes)
            return None
        except BaseException:
            if made:
                made[0].close()
            self._forget(tenant, nbytes)
            raise
        return Loan(tenant, made[0])

    async def give_back(self, loan: Loan) -> None:
        """The connection needs it no more, and no thread uses it. While a view of it is left it counts as lent."""
        self._lingering.append(loan)
        await self._collect()

    async def _collect(self) -> None:
        """Unmap what nobody sees any more."""
        for loan in list(self._lingering):
            if loan not in self._lingering:
                continue  # another one is at it
            self._lingering.remove(loan)
            try:
                await self._workers.run(loan.window.close)
            finally:  # also when cancelled meanwhile
                if loan.window.closed:
                    self._forget(loan.tenant, loan.window.nbytes)
                else:
                    self._lingering.append(loan)

    def _allowed(self, tenant: UUID) -> int:
        """Bytes of the largest window that the tenant may have now."""
        limits = self._limits
        left = min(
            limits.connection_bytes,
            limits.tenant_bytes - self._held[tenant],
            limits.total_bytes - self.lent_bytes,
        )
        return max(0, left) // mmap.PAGESIZE * mmap.PAGESIZE if self._count < self.windows_max else 0

    def _forget(self, tenant: UUID, nbytes: int) -> None:
        self._count -= 1
        self._held[tenant] -= nbytes
        if not self._held[tenant]:
            del self._held[tenant]


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
