"""A client's end of a shared window: memory that a gateway of this host made, mapped here; and what lies where."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from kvgw.wire import broken

ALIGN: Final = 64
"""Places of chunks that are copied into a window begin at multiples of this."""

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedWindow:
    """A mapped window. The memory goes when it is closed and no view of it is left."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Maps the file, and closes `descriptor` in any case.

        Raises `Outage` for a file that could shrink under the mapping, or has another length.
        """
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            length = os.fstat(descriptor).st_size
            if seals & _SEALS != _SEALS or length != nbytes:
                raise broken(f"lent a window of {length} bytes as one of {nbytes}, with seals {seals:#x}")
            self._map = mmap.mmap(descriptor, nbytes)
        except OSError as error:
            raise broken(f"lent a window that cannot be mapped: {error.strerror}") from error
        finally:
            os.close(descriptor)
        self.nbytes = nbytes
        self.view = memoryview(self._map)
        self._address = address_of(self.view)

    def offset_of(self, buffer: memoryview) -> int | None:
        """Where `buffer`, which is not empty, begins in the window; None if it does not lie inside."""
        offset = address_of(buffer) - self._address
        return offset if 0 <= offset <= self.nbytes - len(buffer) else None

    def places_of(self, buffers: Sequence[memoryview]) -> list[int]:
        """Offsets of the leading run of `buffers`, all of one length, that lies in the window without overlapping."""
        offsets: list[int] = []
        ascending: list[int] = []
        for buffer in buffers:
            offset = self.offset_of(buffer)
            if offset is None:
                break
            at = bisect_left(ascending, offset - len(buffer) + 1)
            if at < len(ascending) and ascending[at] < offset + len(buffer):
                break
            ascending.insert(at, offset)
            offsets.append(offset)
        return offsets

    def places_for(self, lengths: Sequence[int]) -> list[int]:
        """Offsets for the leading run of chunks of these lengths that the window has room for, one behind the other."""
        offsets: list[int] = []
        at = 0
        for length in lengths:
            if at + length > self.nbytes:
                break
            offsets.append(at)
            at += -(-length // ALIGN) * ALIGN
        return offsets

    def close(self) -> None:
        """Let go of the memory; views that are left keep it."""
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            return  # it goes with the last of them


class _Buffer(ctypes.Structure):
    """``Py_buffer`` of the stable ABI: the only way to the address of memory that is read-only here."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(buffer: memoryview) -> int:
    """Where the bytes of a buffer, which is not empty, begin in this process."""
    if not buffer.readonly:
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer))
    seen = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(seen), 0)
    try:
        return int(seen.buf)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(seen))
