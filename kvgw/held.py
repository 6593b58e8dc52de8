"""Windows in the hands of callers: memory of a gateway of this host, in which payloads lie without being copied."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from kvgw.connection import Connection
from kvgw.errors import Outage
from kvgw.sharedmemory import SharedWindow


class HeldWindow:
    """A window in the hands of a caller, and the connection that it belongs to while that lives."""

    def __init__(self, connection: Connection, window: SharedWindow, nbytes: int, windows: HeldWindows) -> None:
        self.view = window.view[:nbytes]
        self.connection: Connection | None = connection
        self.lock = asyncio.Lock()
        """Held by the exchange that uses the connection."""
        self.lost = False
        """A GET into it was given up: the gateway may still write to it."""
        self._window = window
        self._windows = windows
        connection.copies = False
        windows.add(self)

    def has(self, buffer: memoryview) -> bool:
        """Whether `buffer` lies in the window."""
        return self._window.offset_of(buffer) is not None

    async def aclose(self) -> None:
        """Give the window back, once the exchange that uses it has ended. Its memory is not to be used afterwards."""
        async with self.lock:
            self.end()
            self._windows.remove(self)
            with contextlib.suppress(BufferError):  # an array over it is left: the memory goes with that
                self.view.release()
            self._window.close()

    def end(self) -> None:
        """End the connection; the memory is like any other from then on, unless it is lost."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def leave_to_parent(self) -> None:
        """In a forked child: the window and its connection are the parent's, which goes on to use them."""
        connection, self.connection = self.connection, None
        self.lost = True
        if connection is not None:
            connection.abandon()


class HeldWindows:
    """The windows in the hands of a client's callers, lent by any of its gateways: which buffer lies where."""

    def __init__(self) -> None:
        self._held: list[HeldWindow] = []

    def add(self, held: HeldWindow) -> None:
        self._held.append(held)

    def remove(self, held: HeldWindow) -> None:
        self._held.remove(held)

    def check(self, buffers: Sequence[memoryview]) -> None:
        """Raises `Outage` when any of `buffers` lies in a window that is lost."""
        for held in self._held:
            if held.lost and any(held.has(buffer) for buffer in buffers):
                error = Outage(
                    "a read into this window was given up, and the gateway may still write to it: leave it, and take "
                    "another"
                )
                error.answered = True  # it says nothing about the gateway
                raise error

    def holding(self, buffers: Sequence[memoryview]) -> HeldWindow | None:
        """The window that the first of `buffers` lies in. Raises as `check` does."""
        self.check(buffers)
        return next((held for held in self._held if buffers and held.has(buffers[0])), None)
