"""One host allocation taken at start, cut into size-classed slots.

An *arena* owns the memory; a *zone* hands out slots of a part of it. Staging splits its arena into a zone for windows
and a zone for residents, so that plaintext and sealed bytes never share an address.

Not thread-safe: slots are taken and freed by the event loop alone. Their bytes may be used by any thread.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from storage.extents import FreeExtents
from storage.host_memory import PAGE, HostMemory

_CLASSES_PER_DOUBLING = 16


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of address space, for those who page-lock it: first address and length in bytes."""

    address: int
    length: int


@dataclass(frozen=True, slots=True)
class ZoneStatistics:
    """How full a zone is, in bytes. ``capacity = used + free``."""

    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    wasted_bytes: int
    """Part of `used_bytes` that nobody asked for: rounding to size classes."""
    largest_free_bytes: int
    slots: int

    @property
    def fragmentation(self) -> float:
        """External fragmentation: the part of the free bytes outside the largest free extent, 0 … 1."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0


class Slot:
    """A piece of a zone: exactly `nbytes` usable bytes, of `reserved_bytes` taken from the zone."""

    __slots__ = ("_memory", "_view", "nbytes", "offset", "reserved_bytes")

    def __init__(self, memory: HostMemory, offset: int, nbytes: int, reserved_bytes: int) -> None:
        self._memory = memory
        self._view: memoryview | None = memory.view(offset, nbytes)
        self.offset = offset
        self.nbytes = nbytes
        self.reserved_bytes = reserved_bytes

    @property
    def view(self) -> memoryview:
        """The slot's bytes, writable; until the slot is freed."""
        assert self._view is not None, f"the slot at {self.offset} has been freed"
        return self._view

    @property
    def address(self) -> int:
        return self._memory.address + self.offset

    def exporter(self) -> ctypes.Array[ctypes.c_ubyte]:
        """A new object that exports the slot's bytes. It lives as long as any view or slice made from it."""
        assert self._view is not None, f"the slot at {self.offset} has been freed"
        return self._memory.export(self.offset, self.nbytes)

    def zero(self, start: int = 0, end: int | None = None) -> None:
        """Overwrite the bytes from `start` to `end` with zeros."""
        assert self._view is not None, f"the slot at {self.offset} has been freed"
        end = self.nbytes if end is None else min(end, self.nbytes)
        self._memory.zero(self.offset + start, end - start)

    def retire(self) -> None:
        """Take the view back; for the zone alone. Raises `BufferError` while a call uses it."""
        self.view.release()
        self._view = None


class Zone:
    """Slots of one contiguous part of an arena."""

    def __init__(self, memory: HostMemory, offset: int, capacity_bytes: int) -> None:
        """A zone over `capacity_bytes` of `memory` from `offset`; both are whole pages."""
        if capacity_bytes < PAGE or capacity_bytes % PAGE or offset % PAGE:
            raise ValueError(
                f"a zone starts at a multiple of {PAGE} bytes and has some of them, not {offset} and {capacity_bytes}"
            )
        self.offset = offset
        self.capacity_bytes = capacity_bytes
        self._memory = memory
        self._free = FreeExtents(capacity_bytes // PAGE)
        self._slots: dict[int, Slot] = {}
        self._wasted_bytes = 0

    @property
    def region(self) -> Region:
        """Where the zone lies in this process."""
        return Region(self._memory.address + self.offset, self.capacity_bytes)

    @property
    def free_bytes(self) -> int:
        return self._free.free_pages * PAGE

    def allocate(self, nbytes: int) -> Slot | None:
        """A slot of `nbytes` by best fit, or None when no free extent can hold it. Its content is undefined."""
        reserved = size_class(nbytes)
        page = self._free.take(reserved // PAGE)
        if page is None:
            return None
        slot = Slot(self._memory, self.offset + page * PAGE, nbytes, reserved)
        self._slots[slot.offset] = slot
        self._wasted_bytes += reserved - nbytes
        return slot

    def free(self, slot: Slot) -> None:
        """Give a slot back. Freeing it twice, or in another zone, is a bug and asserts.

        Raises `BufferError` while a call uses ``slot.view``; the slot then stays allocated.
        """
        assert self._slots.get(slot.offset) is slot, f"the slot at {slot.offset} is not allocated in this zone"
        slot.retire()
        del self._slots[slot.offset]
        self._wasted_bytes -= slot.reserved_bytes - slot.nbytes
        self._free.give((slot.offset - self.offset) // PAGE, slot.reserved_bytes // PAGE)

    def slots(self) -> list[Slot]:
        """All allocated slots by address."""
        return [self._slots[offset] for offset in sorted(self._slots)]

    def statistics(self) -> ZoneStatistics:
        free = self.free_bytes
        return ZoneStatistics(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.capacity_bytes - free,
            free_bytes=free,
            wasted_bytes=self._wasted_bytes,
            largest_free_bytes=self._free.largest * PAGE,
            slots=len(self._slots),
        )


class Arena(Zone):
    """The whole of a host allocation: a zone that owns its memory."""

    def __init__(self, capacity_bytes: int) -> None:
        """Raises `ValueError` for a capacity that is not whole pages, `MemoryError` when the kernel refuses it."""
        self.memory = HostMemory(capacity_bytes)
        super().__init__(self.memory, 0, capacity_bytes)

    def split(self, first_bytes: int) -> tuple[Zone, Zone]:
        """Hand the whole arena to two zones, the first of `first_bytes` (whole pages). The arena must be unused."""
        assert self.free_bytes == self.capacity_bytes, "only an unused arena can be split"
        if not 0 < first_bytes < self.capacity_bytes:
            raise ValueError(f"cannot split {first_bytes} bytes off an arena of {self.capacity_bytes}")
        first = Zone(self.memory, 0, first_bytes)
        second = Zone(self.memory, first_bytes, self.capacity_bytes - first_bytes)
        self._free.take(self.capacity_bytes // PAGE)
        return first, second

    def close(self) -> bool:
        """Unmap; True if done, False if views are left: then the memory goes with the last of them.

        Page-locks on the region must have been undone before.
        """
        return self.memory.close()


def size_class(nbytes: int) -> int:
    """Bytes reserved for a slot of `nbytes`: whole pages, 16 classes per doubling.

    The waste is less than a page up to 64 KiB and less than 1/17 of the reserved bytes above: sealed chunks are a
    power of two plus a few bytes, for which 8 classes would waste a ninth.
    """
    if nbytes < 1:
        raise ValueError(f"a slot has at least one byte, not {nbytes}")
    step = max(PAGE, (1 << (nbytes - 1).bit_length()) // (2 * _CLASSES_PER_DOUBLING))
    return -(-nbytes // step) * step
