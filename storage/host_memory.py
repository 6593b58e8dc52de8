"""One anonymous private mapping: huge pages asked for, kept out of core dumps, touched and locked bit by bit.

Anonymous memory, not a shared-memory file: no mount's size limits it and no access to it can raise SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import lru_cache

PAGE = 4096
"""Granularity of slots in bytes. The kernel's pages may be larger, never smaller."""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; not named by Python's mmap module
_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the interpreter lock; mmap.madvise does not


class HostMemory:
    """`capacity_bytes` of page-aligned, zeroed memory, reserved now and backed by pages when prepared or first used."""

    def __init__(self, capacity_bytes: int) -> None:
        """Raises `ValueError` for a capacity that is not whole pages, `MemoryError` when the kernel refuses it."""
        if capacity_bytes < PAGE or capacity_bytes % PAGE:
            raise ValueError(f"a capacity is a positive multiple of {PAGE} bytes, not {capacity_bytes}")
        try:
            mapping = mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(
                f"the kernel refuses {capacity_bytes} bytes of staging memory ({error.strerror}): "
                "lower the staging capacity or raise the memory limit of this process"
            ) from error
        self.capacity_bytes = capacity_bytes
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping))
        self._map: mmap.mmap | None = mapping
        self.prepared_bytes = 0
        """Bytes that have been given their pages ahead of use."""
        self.locked_bytes = 0
        """Bytes that cannot be swapped out."""
        self.refusals: dict[str, str] = {}
        """Advice, locking or touching that the kernel refused, with its reason; the memory works without."""
        self._advise("huge pages", mmap.MADV_HUGEPAGE)
        self._advise("no core dump", mmap.MADV_DONTDUMP)

    def prepare_next(self, piece_bytes: int = 64 << 20) -> bool:
        """Lock, or else touch, the next `piece_bytes`; True while more is left.

        Meant for a background worker thread, one call at a time: first touch costs about 0.4 s/GiB. Contents are not
        changed, so that slots may be in use meanwhile. A refusal is noted in `refusals` and never tried again. The last
        call must have returned before `close`.
        """
        assert self._map is not None, "this memory has been unmapped"
        length = min(piece_bytes, self.capacity_bytes - self.prepared_bytes)
        if length <= 0:
            return False
        start = ctypes.c_void_p(self.address + self.prepared_bytes)
        if "lock" not in self.refusals and self._call("lock", _libc.mlock(start, ctypes.c_size_t(length))):
            self.locked_bytes += length  # locking touches as well
        elif "touch" in self.refusals or not self._call(
            "touch", _libc.madvise(start, ctypes.c_size_t(length), _POPULATE_WRITE)
        ):
            return False
        self.prepared_bytes += length
        return self.prepared_bytes < self.capacity_bytes

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A writable view of a part."""
        assert self._map is not None, "this memory has been unmapped"
        return memoryview(self._map)[offset : offset + nbytes]

    def export(self, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_ubyte]:
        """A new object that exports a part. It lives as long as any view or slice made from it."""
        assert self._map is not None, "this memory has been unmapped"
        return _array(nbytes).from_buffer(self._map, offset)

    def zero(self, offset: int, nbytes: int) -> None:
        """Overwrite with zeros; about 0.1 ms/MiB."""
        assert self._map is not None, "this memory has been unmapped"
        assert offset >= 0, f"offset {offset} is outside the memory"
        assert offset + nbytes <= self.capacity_bytes, f"[{offset}, +{nbytes}) is outside the memory"
        ctypes.memset(self.address + offset, 0, nbytes)

    def close(self) -> bool:
        """Unmap now and return True; while views are left, return False: then the last of them unmaps as it goes."""
        mapping, self._map = self._map, None
        try:
            if mapping is not None:
                mapping.close()
        except BufferError:
            return False  # the views keep the mapping alive, and nothing else does any more
        return True

    def _advise(self, what: str, advice: int) -> None:
        start, length = ctypes.c_void_p(self.address), ctypes.c_size_t(self.capacity_bytes)
        self._call(what, _libc.madvise(start, length, advice))

    def _call(self, what: str, status: int) -> bool:
        if status == 0:
            return True
        number = ctypes.get_errno()
        self.refusals[what] = f"{errno.errorcode.get(number, number)}: {os.strerror(number)}"
        return False


@lru_cache(maxsize=256)
def _array(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """To make such a type takes longer than to seal a small chunk, and slots have few different lengths."""
    return ctypes.c_ubyte * nbytes
