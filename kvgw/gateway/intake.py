"""How chunks of a PUT become sealed blobs: in worker threads, from a window of ours.

Chunks that travel are received by the threads that hash and seal them: the event loop has no part in it, and what was
received is still in a cache. A client that pauses gives the threads back: then the event loop waits for what comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Final

from kvgw.copying import copy
from kvgw.gateway.payloads import Incoming, Part
from kvgw.runtime import Workers
from storage.access import Draft, Window
from storage.together import Together
from tenancy.keys.secret import SecretBytes
from tenancy.sealing import SEG_LOG2_DEFAULT, BlobAddress, Sealed, Sealer, seal

PIECE_BYTES: Final = 4 * 1024 * 1024
"""What a thread receives at most before it seals it."""
THREADS: Final = 2
"""That work at once on one PUT whose chunks have at least a segment: with shorter ones they wait for each other."""
TURN_SECONDS: Final = 0.005
"""A thread waits so long for its turn to receive, then it is of more use elsewhere."""


@dataclass(slots=True)
class Birth:
    """One chunk on its way into the catalog."""

    index: int
    blob_id: bytes
    name: str
    salt: bytes
    at: int
    """Its place in the group."""


@dataclass(slots=True)
class Sealing:
    """Keys and address: what is the same for all chunks of a run."""

    data_key: SecretBytes
    chunk_id_key: SecretBytes
    address: BlobAddress

    def sealer(self, one: Birth, target: memoryview) -> Sealer:
        return Sealer(self.data_key, self.chunk_id_key, self.address, one.salt, target)

    def seal(self, one: Birth, plaintext: memoryview, target: memoryview) -> Sealed:
        return seal(self.data_key, self.chunk_id_key, self.address, one.salt, plaintext, target)

    def seal_shared(self, one: Birth, shared: memoryview, scratch: memoryview, target: memoryview) -> Sealed:
        """Each byte of `shared` is read once; what is hashed and sealed is the copy in `scratch`."""
        sealer = self.sealer(one, target)
        for index in range(self.address.segments):
            span = self.address.plain_span(index)
            with scratch[: span.stop - span.start] as segment:
                copy(segment, shared[span])
                sealer.update(segment)
        return sealer.finish()


@dataclass(slots=True)
class _Coming:
    """The chunk that comes."""

    at: int
    """Its place in the run."""
    sealer: Sealer
    start: int = 0
    """Of its bytes, the first that is not sealed: what comes is received from there."""
    came: int = 0
    """So many bytes behind that have come."""


@dataclass(slots=True)
class Intake:
    """Chunks that worker threads receive and seal: while one seals what it has, another receives what comes next."""

    incoming: Incoming
    sealing: Sealing
    run: Sequence[Birth]
    drafts: Sequence[Draft]
    window: Window
    """As many pieces as threads; each receives into its own."""
    piece_bytes: int
    """Whole segments, or a whole chunk."""
    last: bool
    """Nothing is received into the window after this: when all has come, the last thread zeroes it."""
    sealed: dict[int, Sealed] = field(default_factory=dict)
    """By place in the run."""
    _turn: Lock = field(default_factory=Lock)
    """To receive; of all that follows."""
    _next: int = 0
    """Place in the run of the chunk that comes after those that came or are coming."""
    _coming: _Coming | None = None
    """What has begun to come, and not come whole."""
    _piece: int = 0
    """Where that is received."""
    _working: int = 0
    """Threads that are not done."""

    async def take_in(self, workers: Workers, threads: int) -> list[Sealed]:
        """Receive and seal all of the run. Raises what `incoming` raises, when no thread uses the memory any more."""
        threads = min(threads, len(self.run))
        while True:
            self._working = threads
            if threads == 1:
                await workers.run(lambda: self._work(0))
            else:
                async with Together() as hands:
                    for piece in range(threads):
                        hands.create_task(workers.run(partial(self._work, piece)))
            coming = self._coming
            if coming is None:
                return [self.sealed[at] for at in range(len(self.run))]
            with self._room(coming, self._piece) as target:
                await self.incoming.receive_part(self._part(coming, target))
                coming.came += len(target)

    def _work(self, piece: int) -> None:
        """In a worker thread: receive and seal in turn with others, until all has come or the client pauses."""
        while (whole := self._receive(piece)) is not None:
            self._seal(whole, piece)
            self.sealed[whole.at] = whole.sealer.finish()
        with self._turn:
            self._working -= 1
            if self.last and not self._working and self._coming is None:
                self.window.wipe()

    def _receive(self, piece: int) -> _Coming | None:
        """The next chunk, of which all has come and the end is still to be sealed; None when there is none now."""
        if not self._turn.acquire(timeout=TURN_SECONDS):
            return None  # whoever receives goes on alone
        try:
            if self._coming is None:
                if self._next == len(self.run):
                    return None
                at, self._next = self._next, self._next + 1
                sealer = self.sealing.sealer(self.run[at], self.drafts[at].view)
                self._coming, self._piece = _Coming(at, sealer), piece
            elif self._piece != piece:
                return None  # the client paused, or is out of step
            return self._fill(self._coming, piece)
        finally:
            self._turn.release()

    def _fill(self, coming: _Coming, piece: int) -> _Coming | None:
        """Receive to the end of the chunk, and seal what another piece of it comes behind; None if it does not come."""
        while True:
            with self._room(coming, piece) as target:
                if target:
                    coming.came += self.incoming.pull(self._part(coming, target))
            if coming.came < self._size(coming):
                return None
            if coming.start + coming.came == self.sealing.address.length:
                self._coming = None
                return coming
            self._seal(coming, piece)

    def _seal(self, coming: _Coming, piece: int) -> None:
        """Seal what has come."""
        with self.window.view[piece * self.piece_bytes :][: coming.came] as plaintext:
            for start in range(0, coming.came, 1 << SEG_LOG2_DEFAULT):
                with plaintext[start : start + (1 << SEG_LOG2_DEFAULT)] as segment:
                    coming.sealer.update(segment)
        coming.start, coming.came = coming.start + coming.came, 0

    def _size(self, coming: _Coming) -> int:
        """What is received before it is sealed."""
        return min(self.piece_bytes, self.sealing.address.length - coming.start)

    def _room(self, coming: _Coming, piece: int) -> memoryview:
        """Where the rest of that is received."""
        start = piece * self.piece_bytes
        return self.window.view[start + coming.came : start + self._size(coming)]

    def _part(self, coming: _Coming, target: memoryview) -> Part:
        return Part(self.run[coming.at].index, self.sealing.address.length, coming.start + coming.came, target)


def pieces(chunk_bytes: int, window_share: int) -> tuple[int, int]:
    """Length of a piece, and how many threads have one, in a window; `window_share` is that of `Staging`."""
    segment = min(chunk_bytes, 1 << SEG_LOG2_DEFAULT)
    piece = min(chunk_bytes, PIECE_BYTES)
    if chunk_bytes < 1 << SEG_LOG2_DEFAULT or THREADS * piece > window_share:
        return segment, 1
    return piece, THREADS
