"""Bodies of uploads: the sealed bytes where they lie, or handed out as copies, piece by piece."""

from __future__ import annotations

import os
from typing import Final

PIECE_BYTES: Final = 256 * 1024


def body_of(sealed: memoryview) -> bytes | UploadBody:
    """The cheapest body for `sealed`: a copy where one piece is enough."""
    return bytes(sealed) if len(sealed) <= PIECE_BYTES else UploadBody(sealed)


class UploadBody:
    """A body over `sealed`, sent from where it lies by `BulkHttp`, or iterated by aiohttp.

    Pieces for aiohttp are copies: what it has not sent yet may outlive the request, and the buffer may not be used then
    (law 7). Pieces of this size are also cheaper to send than one large body, whose rest the transport copies again
    and again. After `release` nothing reads the buffer any more.
    """

    def __init__(self, sealed: memoryview) -> None:
        self._sealed: memoryview | None = sealed
        self._length = len(sealed)
        self._at = 0

    def release(self) -> None:
        """Forget the buffer; a request that still runs breaks off."""
        self._sealed = None

    @property
    def view(self) -> memoryview:
        """The bytes themselves, for who has finished with them before `release`. Raises as `piece`."""
        if self._sealed is None:
            raise ConnectionAbortedError("the upload is over")
        return self._sealed

    def __len__(self) -> int:
        return self._length

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """The next `size` bytes, or all that are left."""
        end = self._length if size < 0 else min(self._at + size, self._length)
        piece = self.piece(self._at, end)
        self._at = end
        return piece

    def piece(self, start: int, end: int) -> bytes:
        """A copy of some bytes. Raises `ConnectionAbortedError` after `release`."""
        return bytes(self.view[start:end])

    def __aiter__(self) -> _Pieces:
        return _Pieces(self)


class _Pieces:
    """One walk over a body; each attempt of a request has its own."""

    def __init__(self, body: UploadBody) -> None:
        self._body = body
        self._at = 0

    def __aiter__(self) -> _Pieces:
        return self

    async def __anext__(self) -> bytes:
        if self._at >= len(self._body):
            raise StopAsyncIteration
        start, self._at = self._at, min(self._at + PIECE_BYTES, len(self._body))
        return self._body.piece(start, self._at)
