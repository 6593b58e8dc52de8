"""A window that one client process maps too: an anonymous file whose length nobody can change any more.

All of its pages are there before anybody sees it, so that no access can fail later (SIGBUS), and no mount's size limits
it. It is made for one client and never given to another: its pages go back to the kernel, which zeroes them.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; not named by Python's mmap module
_start = itemgetter(0)
_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the interpreter lock


class SharedWindow:
    """`nbytes` of memory shared with one client, and which parts of it are claimed by the operation that runs.

    Its bytes may change at any time: whoever must have them as they are copies them first.
    """

    def __init__(self, nbytes: int) -> None:
        """Whole pages. Blocks while the kernel finds and zeroes them. Raises `OSError` when it does not."""
        if nbytes < mmap.PAGESIZE or nbytes % mmap.PAGESIZE:
            raise ValueError(f"a shared window is whole pages of {mmap.PAGESIZE} bytes, not {nbytes} bytes")
        self.nbytes = nbytes
        self._descriptor: int | None = os.memfd_create("kvgw-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._descriptor, 0, nbytes)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._map: mmap.mmap | None = mmap.mmap(self._descriptor, nbytes)
        except BaseException:
            self.close_descriptor()
            raise
        self._claimed: list[tuple[int, int]] = []
        self._views: list[memoryview] = []
        self._prepare()

    def _prepare(self) -> None:
        """Map every page now, locked where the process may; either refusal costs speed only."""
        assert self._map is not None
        start = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._map))
        address, length = ctypes.c_void_p(start), ctypes.c_size_t(self.nbytes)
        _libc.madvise(address, length, mmap.MADV_DONTDUMP)
        if _libc.mlock(address, length):
            _libc.madvise(address, length, _POPULATE_WRITE)

    @property
    def descriptor(self) -> int:
        """The file, to be handed to the client; until `close_descriptor`."""
        assert self._descriptor is not None, "the descriptor has been closed"
        return self._descriptor

    def close_descriptor(self) -> None:
        """The client has the file, or will not get it; the mapping stays. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def claim(self, offset: int, nbytes: int) -> memoryview:
        """A part for the operation that runs, until `unclaim`.

        Raises `ValueError` for one that is not inside the window, or overlaps another that is claimed.
        """
        assert self._map is not None, "the window has been unmapped"
        if nbytes < 1 or offset < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} are not inside a window of {self.nbytes}")
        at = bisect_right(self._claimed, offset, key=_start)
        for start, end in self._claimed[max(0, at - 1) : at + 1]:
            if start < offset + nbytes and offset < end:
                raise ValueError(
                    f"bytes {offset} to {offset + nbytes} overlap bytes {start} to {end}, which are in use"
                )
        self._claimed.insert(at, (offset, offset + nbytes))
        view = memoryview(self._map)[offset : offset + nbytes]
        self._views.append(view)
        return view

    def claim_all(self, offsets: Sequence[int], nbytes: int) -> list[memoryview]:
        """Several parts of the same length, as `claim` each."""
        end = -1
        for offset in offsets:
            if offset < end or self._claimed:
                return [self.claim(offset, nbytes) for offset in offsets]
            end = offset + nbytes
        if not offsets or nbytes < 1 or offsets[0] < 0 or end > self.nbytes:
            return [self.claim(offset, nbytes) for offset in offsets]
        assert self._map is not None, "the window has been unmapped"
        whole = memoryview(self._map)
        views = [whole[offset : offset + nbytes] for offset in offsets]
        self._claimed = [(offset, offset + nbytes) for offset in offsets]
        self._views += views
        whole.release()
        return views

    def unclaim(self) -> None:
        """The operation has ended, and with it every thread that used what it had claimed: those views end here.

        A slice of one does not, and keeps the window mapped as long as it lives.
        """
        self._claimed.clear()
        views, self._views = self._views, []
        for view in views:
            view.release()

    def close(self) -> None:
        """Unmap. While a view is left nothing happens: call it again later."""
        self.close_descriptor()
        if self._map is not None:
            self.unclaim()
            try:
                self._map.close()
            except BufferError:
                return
            self._map = None

    @property
    def closed(self) -> bool:
        """Whether it is unmapped."""
        return self._map is None
