"""The buffer pool as the gateway sees it: brackets that wait their turn and give back what they took.

This layer only waits and wakes; what happens is decided in `storage.pool`. A bracket's memory is free again when its
block has ended *and* no call uses its view any more (law 7). Take a window before a draft or a read, never the
other way round: then who holds residents never waits for windows, and the two cannot wait for each other in a circle.

All methods belong to one event loop's thread. Views may be used by any thread inside their block.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TypeVar
from uuid import UUID

from storage.access import Access, Draft, Reading, Window
from storage.arena import Arena, Region, Slot
from storage.errors import BlobDamaged, StagingBusy, StorageError
from storage.line import Ask, Line
from storage.policy import EvictionPolicy
from storage.pool import Pool
from storage.ports import Clock
from storage.resident import Grip, Part, Resident
from storage.shares import Shares
from storage.staging_statistics import StagingStatistics, gather

Grant = TypeVar("Grant")
Fill = Callable[[memoryview], Awaitable[None]]

_ZERO_PIECE = 4 << 20  # bytes zeroed between two turns of the event loop: about 0.4 ms


class Staging:
    """Windows and residents in one arena."""

    def __init__(self, arena: Arena, policy: EvictionPolicy, clock: Clock, *, shares: Shares) -> None:
        """Takes the whole of a fresh arena. Raises `ValueError` when the shares do not fit into it."""
        windows, residents = arena.split(shares.window_bytes)
        self.window_region: Region = windows.region
        """Where plaintext lies: what is worth page-locking for a GPU."""
        self._pool = Pool(windows, residents, policy, shares)
        self._clock = clock
        self._wakes: dict[object, asyncio.Future[None]] = {}  # by the ask or grip that waits
        self._lingering: dict[Access, Callable[[], None]] = {}

    @asynccontextmanager
    async def window(self, tenant: UUID, nbytes: int, timeout_s: float) -> AsyncIterator[Window]:
        """`nbytes` of zeroed memory for plaintext. Raises `StagingBusy` when there is none within `timeout_s`."""
        give_back = partial(self._pool.release_window, tenant)
        slot = await self._granted(self._pool.windows, self._ask(tenant, nbytes, ""), timeout_s, give_back)
        access = Access(slot)
        try:
            access.thaw()
            yield Window(access)
        finally:
            await self._end_window(access, tenant, slot)

    @asynccontextmanager
    async def draft(self, tenant: UUID, name: str, nbytes: int, timeout_s: float) -> AsyncIterator[Draft]:
        """A slot to seal blob `name` into. Left without `publish` it was never there.

        Raises `StagingBusy` when there is no room within `timeout_s`.
        """
        ask: Ask[Grip] = self._ask(tenant, nbytes, name)
        grip = await self._granted(self._pool.drafts, ask, timeout_s, self._leave)
        access = Access(grip.slot)
        try:
            access.thaw()
            yield self._draft(access, grip)
        finally:
            self._end(access, partial(self._leave, grip))

    @asynccontextmanager
    async def drafts(
        self, tenant: UUID, names: Sequence[str], nbytes: int, timeout_s: float
    ) -> AsyncIterator[list[Draft]]:
        """Drafts for the first of `names` and, as far as there is room without waiting, for those that follow it.

        Only the first is waited for: a bracket that has some memory and waits for more could wait for its like.
        """
        grips = self._pool.drafts_now(tenant, names, nbytes)
        if not grips:
            first = await self._granted(self._pool.drafts, self._ask(tenant, nbytes, names[0]), timeout_s, self._leave)
            grips = [first, *self._pool.drafts_now(tenant, names[1:], nbytes)]
        opened = [(Access(grip.slot), grip) for grip in grips]
        try:
            for access, _ in opened:
                access.thaw()
            yield [self._draft(access, grip) for access, grip in opened]
        finally:
            self._end_all(opened)

    @contextmanager
    def residents(self, tenant: UUID, blobs: Sequence[tuple[str, int]]) -> Iterator[list[Reading]]:
        """Readings of the leading run of `blobs`, by name and length, that are here and can be read without waiting."""
        held = self._pool.hold_now(tenant, blobs)  # of one of another length, `read` says what is wrong
        accesses = [Access(resident.slot) for resident in held]
        try:
            for access in accesses:
                access.read_only()
            yield [Reading(access, was_resident=True) for access in accesses]
        finally:
            self._let_go(tenant, held, accesses)

    @asynccontextmanager
    async def read(self, tenant: UUID, name: str, nbytes: int, timeout_s: float, fill: Fill) -> AsyncIterator[Reading]:
        """The sealed bytes of blob `name`, `nbytes` long; `fill` gets them when they are not resident.

        Of several readers one fills and the others wait for it. `fill` returns, or raises, only when nothing writes
        into its view any more. If it raises a `StorageError`, all of them fail with it: it is an answer about an
        immutable blob, true for whoever asked while it was sought, and asking a failing tier once per reader would
        make an outage worse. If the filling reader is cancelled or fails otherwise, that is its own affair: the next
        one fills the same slot with its own `fill`.

        `timeout_s` bounds the wait for memory, not for the tier: that is up to `fill`, and to the caller's deadline.
        Raises `StagingBusy`, whatever `fill` raises, and `BlobDamaged` when the resident has another length.
        """
        ask: Ask[Grip] = self._ask(tenant, nbytes, name)
        grip = await self._granted(self._pool.reads, ask, timeout_s, self._leave)
        access = Access(grip.slot)
        try:
            if grip.slot.nbytes != nbytes:
                raise BlobDamaged(f"{name} has {grip.slot.nbytes} bytes in staging, not {nbytes} as its record says")
            await self._whole(grip, access, fill)
            access.read_only()
            yield Reading(access, was_resident=grip.was_resident)
        finally:
            self._end(access, partial(self._leave, grip))

    async def fetch(self, tenant: UUID, name: str, nbytes: int, fill: Fill) -> bool:
        """Bring a blob in for a reader who comes soon; whether it was not here. Nothing is held for him.

        As `read`, but nothing is waited for except `fill`: raises `StagingBusy` when there is no room at once.
        """
        if self.holds(name):
            return False
        async with self.read(tenant, name, nbytes, 0.0, fill) as reading:
            if not reading.was_resident:
                self._pool.expect(name)
            return not reading.was_resident

    def settle(self, name: str) -> None:
        """All due placements of the blob are made: it may be evicted. An unknown name is no error."""
        self._pool.settle(name)
        self._advance()

    def soil(self, name: str) -> bool:
        """A placement of a resident blob is due: it may not be evicted until `settle`. False if it is not resident.

        Call it inside a `read` of the blob: outside, it can take the owner beyond its share.
        """
        was_resident = self._pool.soil(name)
        self._advance()  # the owner may have come into its guarantee by the charge
        return was_resident

    def drop(self, name: str) -> None:
        """No new reader finds the blob; its slot is free when the last reader leaves. An unknown name is no error."""
        self._pool.drop(name)
        self._advance()

    @property
    def window_share(self) -> int:
        """The most bytes of windows that one operation should take, where fewer will do."""
        return self._pool.window_ledger.share

    @property
    def resident_limit(self) -> int:
        """The most bytes of residents that one tenant can have in use."""
        return self._pool.used_ledger.limit

    def holds(self, name: str) -> bool:
        """Whether the whole blob is resident."""
        resident = self._pool.residents.find(name)
        return resident is not None and resident.is_whole

    @property
    def changes(self) -> int:
        """A number that changes before `holds` may answer otherwise."""
        return self._pool.residents.changes

    def names(self) -> list[str]:
        """Names of all blobs of which staging holds bytes: found by name, being sealed, or dropped but still in use."""
        return self._pool.residents.names()

    def dirty_names(self) -> list[str]:
        """Names of blobs that wait for `settle`, the longest waiting first."""
        return self._pool.residents.dirty_names()

    def statistics(self) -> StagingStatistics:
        """The state of the pool now."""
        self._advance()
        return gather(self._pool, now_s=self._clock.monotonic(), lingering=len(self._lingering))

    async def aclose(self) -> None:
        """Refuse all requests, waiting and new, with `StagingBusy`. Open brackets go on to their end."""
        self._wake(self._pool.close("staging is closing"))

    def _ask(self, tenant: UUID, nbytes: int, name: str) -> Ask[Grant]:
        return Ask(tenant, nbytes, name, self._clock.monotonic())

    async def _granted(
        self, line: Line[Grant], ask: Ask[Grant], timeout_s: float, give_back: Callable[[Grant], None]
    ) -> Grant:
        line.join(ask)
        self._advance()
        if ask.grant is None:
            await self._wait(line, ask, timeout_s, give_back)
        if ask.grant is None:
            raise StagingBusy(ask.refusal or f"{line.shortage(ask)}; waited {timeout_s} s")
        return ask.grant

    async def _wait(
        self, line: Line[Grant], ask: Ask[Grant], timeout_s: float, give_back: Callable[[Grant], None]
    ) -> None:
        """Wait in line; what is granted to a request in the moment of its cancellation goes back."""
        wake = self._wakes[ask] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait((wake,), timeout=timeout_s)  # unlike wait_for, keeps a grant of the last moment
        except asyncio.CancelledError:
            if ask.grant is not None:
                give_back(ask.grant)
            raise
        finally:
            del self._wakes[ask]
            line.leave(ask)
            self._advance()  # others may have waited behind this one

    async def _whole(self, grip: Grip, access: Access, fill: Fill) -> None:
        """Return when the grip's slot holds the whole blob."""
        if grip.part is Part.WAIT:
            wake = self._wakes[grip] = asyncio.get_running_loop().create_future()
            try:
                await wake
            finally:
                del self._wakes[grip]
        if grip.part is Part.FILL:
            try:
                await fill(access.thaw())
                access.read_only()
            except StorageError as error:
                self._wake(self._pool.fill_failed(grip, error))
                raise
            self._wake(self._pool.filled(grip))
        elif grip.error is not None:
            raise type(grip.error)(*grip.error.args) from grip.error  # one object raised twice mixes up tracebacks

    def _draft(self, access: Access, grip: Grip) -> Draft:
        return Draft(access, lambda dirty: self._pool.publish(grip, dirty=dirty))

    def _leave(self, grip: Grip) -> None:
        self._wake(self._pool.leave(grip))

    def _end(self, access: Access, give_back: Callable[[], None]) -> None:
        if self._closed(access, give_back):
            give_back()
        self._advance()

    def _let_go(self, tenant: UUID, held: Sequence[Resident], accesses: Sequence[Access]) -> None:
        free = []
        for resident, access in zip(held, accesses, strict=True):
            if self._closed(access, partial(self._pool.let_go, tenant, (resident,))):
                free.append(resident)
        self._pool.let_go(tenant, free)
        self._advance()

    def _end_all(self, grips: Iterable[tuple[Access, Grip]]) -> None:
        for access, grip in grips:
            give_back = partial(self._leave, grip)
            if self._closed(access, give_back):
                give_back()
        self._advance()

    def _closed(self, access: Access, give_back: Callable[[], None]) -> bool:
        """Close a bracket's view. While a call uses it, its memory lingers: False, `give_back` comes later."""
        try:
            access.close()
        except BufferError:
            self._lingering[access] = give_back
            return False
        return True

    async def _end_window(self, access: Access, tenant: UUID, slot: Slot) -> None:
        if access.is_zero:
            self._end(access, partial(self._pool.release_window, tenant, slot))
        elif self._closed(access, partial(self._zero_and_release, tenant, slot)):
            await self._zero_gently(tenant, slot)

    async def _zero_gently(self, tenant: UUID, slot: Slot) -> None:
        """Zero piece by piece, so that a large window does not hold up the event loop; then release."""
        zeroed = 0
        try:
            while zeroed + _ZERO_PIECE < slot.nbytes:
                slot.zero(zeroed, zeroed + _ZERO_PIECE)
                zeroed += _ZERO_PIECE
                await asyncio.sleep(0)
        finally:  # also when cancelled meanwhile
            self._zero_and_release(tenant, slot, zeroed)
            self._advance()

    def _zero_and_release(self, tenant: UUID, slot: Slot, zeroed: int = 0) -> None:
        slot.zero(zeroed)
        self._pool.release_window(tenant, slot)

    def _advance(self) -> None:
        """Take back what lingered and is free now, then grant what can be granted."""
        if self._lingering:
            lingering, self._lingering = self._lingering, {}
            for access, give_back in lingering.items():
                if self._closed(access, give_back):
                    give_back()
        self._wake(self._pool.advance())

    def _wake(self, waiters: Iterable[object]) -> None:
        for waiter in waiters:
            wake = self._wakes.get(waiter)
            if wake is not None and not wake.done():  # none: granted on the spot, or about to look for itself
                wake.set_result(None)
