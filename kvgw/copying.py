"""Copying memory while other threads go on: an assignment to a slice keeps the interpreter's lock for all of it."""

from __future__ import annotations

import ctypes
from typing import Final

_SHORT_BYTES: Final = 128 * 1024
"""Less is copied, at 10 GB/s, before giving the lock up and taking it back would have paid."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy `source` into `target`; both plain bytes of the same length. Raises `ValueError` if they are not.

    The source's bytes may change meanwhile: each is read once. A long source that is read-only is copied as a slice.
    """
    nbytes = source.nbytes
    if nbytes < _SHORT_BYTES or source.readonly:
        target[:] = source
        return
    for one in (target, source):
        if one.shape != (nbytes,) or one.format != "B" or not one.contiguous:
            raise ValueError(f"{nbytes} plain bytes are copied, not format {one.format!r} and shape {one.shape}")
    to, of = ctypes.c_ubyte.from_buffer(target), ctypes.c_ubyte.from_buffer(source)  # they keep the memory in place
    ctypes.memmove(ctypes.addressof(to), ctypes.addressof(of), nbytes)
