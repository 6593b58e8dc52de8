"""A channel inside TLS. It runs over memory buffers, one copy in each direction, and passes no descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from contextlib import AbstractContextManager, nullcontext
from typing import Final, cast

from kvgw.channel import ConnectionEnded, Outgoing, PlainChannel, Sift

TLS_PIECE_BYTES: Final = 256 * 1024
"""Bytes encrypted, or received, between two turns of the event loop."""


class TlsChannel:
    """TLS over a socket. Use `handshake` first; nothing else is sent or received before it has succeeded."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_hostname: str | None = None) -> None:
        """Without `server_hostname` this is the server's end."""
        self._plain = PlainChannel(sock)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
        )
        self._scratch = memoryview(bytearray(TLS_PIECE_BYTES))
        self._flushing = asyncio.Lock()

    async def handshake(self) -> None:
        """Agree on keys and check the peer's certificate. Raises `ConnectionEnded` with TLS's own reason."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    await self._flush()
                    if not await self._fill():
                        raise ConnectionEnded("ended in the TLS handshake") from None
                else:
                    await self._flush()
                    return
        except ssl.SSLError as error:
            with contextlib.suppress(ConnectionEnded):
                await self._flush()  # the alert that tells the peer
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            raise ConnectionEnded(f"failed in the TLS handshake: {reason}") from error

    async def receive(self, target: memoryview, spare: memoryview, sift: Sift | None = None) -> int:
        at = 0
        while at < len(target):
            count = await self._receive_some(target[at:])
            if count == 0:
                raise ConnectionEnded("ended in the middle of a frame" if at else "ended")
            at += count
        return 0

    async def _receive_some(self, target: memoryview) -> int:
        while True:
            try:
                # With a buffer to fill it answers how much it filled, and takes any writable one.
                return cast("int", self._tls.read(len(target), cast("bytearray", target)))
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill():
                    raise ConnectionEnded("ended without saying so inside TLS") from None
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLError as error:
                raise ConnectionEnded(f"broke TLS: {error.reason or error}") from error

    async def send(self, outgoing: Outgoing) -> None:
        try:
            while outgoing:
                gathered = 0
                while outgoing and gathered < TLS_PIECE_BYTES:
                    gathered += self._write(outgoing, TLS_PIECE_BYTES - gathered)
                await self._flush()
        except ssl.SSLError as error:
            raise ConnectionEnded(f"broke TLS: {error.reason or error}") from error

    async def send_small(self, data: bytes) -> None:
        await self.send(Outgoing((data,)))

    def _write(self, outgoing: Outgoing, most: int) -> int:
        count = self._tls.write(outgoing.first()[:most])
        outgoing.sent(count)
        return count

    def pull(self, target: memoryview, spare: memoryview, patience_s: float) -> tuple[int, float]:
        return 0, 0.0  # its state belongs to the event loop

    def push(self, outgoing: Outgoing, patience_s: float) -> float:
        return 0.0  # its state belongs to the event loop

    async def send_passing(self, data: bytes, descriptor: int) -> None:
        raise ConnectionEnded("cannot pass a descriptor through TLS")

    def accepting(self) -> AbstractContextManager[list[int]]:
        return nullcontext([])

    def over(self) -> bool:
        while data := self._plain.receive_at_once(TLS_PIECE_BYTES):  # what TLS says to itself, as session tickets
            self._incoming.write(data)
        try:
            return data is not None or bool(self._tls.read(1))
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError:
            return True

    async def _fill(self) -> bool:
        """Receive some of what the peer sent; False when it has ended."""
        count = await self._plain.receive_some(self._scratch)
        self._incoming.write(self._scratch[:count])
        return count > 0

    async def _flush(self) -> None:
        """Send what TLS has to say."""
        async with self._flushing:
            data = self._outgoing.read()
            if data:
                await self._plain.send(Outgoing([data]))

    def close(self) -> None:
        self._plain.close()

    def abandon(self) -> None:
        self._plain.abandon()
