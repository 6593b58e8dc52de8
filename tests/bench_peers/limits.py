"""What the machine can do, measured by a process of its own: ``python -m tests.bench_peers.limits``.

Blocks in memory and sockets are measured as in `kvgw bench`; the disk past the page cache, and a question with a short
answer through a socket, here.
"""

from __future__ import annotations

import mmap
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from kvgw.bench.content import randomize
from kvgw.bench.limits import Yardstick
from kvgw.bench.plan import MATCH_CALLS, MIB, Limit
from kvgw.bench.protocol import Failed
from tests.bench_peers.protocol import Machine, MeasureMachine

DISK_BYTES: Final = 256 * MIB
DISK_PIECE_BYTES: Final = 4 * MIB
DISK_THREADS: Final = 4
QUESTION_BYTES: Final = 64 * 32
ANSWER_BYTES: Final = 64


class Disk:
    """A file that is written and read with O_DIRECT in pieces of 4 MiB by four threads, again and again."""

    def __init__(self, folder: Path) -> None:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="limit-", delete=False) as file:
            self._path = Path(file.name)
        self._fd = os.open(self._path, os.O_RDWR | os.O_DIRECT)
        self._path.unlink()
        os.posix_fallocate(self._fd, 0, DISK_BYTES)
        # Aligned to a page, as O_DIRECT wants it. A disk takes less from scattered pages, and staging has huge ones.
        memory = mmap.mmap(-1, DISK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(memory)
        randomize(self._memory)
        self._threads = ThreadPoolExecutor(DISK_THREADS)
        self.write()  # the first pass over a fresh file is slower than those that follow

    def write(self) -> Limit:
        """Write the file over, and sync it once."""
        return self._timed(lambda at: os.pwrite(self._fd, self._piece(at), at), sync=True)

    def write_new(self) -> Limit:
        """Write as many new files whose space is reserved, and sync each: nothing of them has ever been written."""
        files = [self._new() for _ in range(DISK_BYTES // DISK_PIECE_BYTES)]

        def write(at: int) -> int:
            file = files[at // DISK_PIECE_BYTES]
            moved = os.write(file, self._piece(at))
            os.fdatasync(file)
            return moved

        try:
            return self._timed(write, sync=False)
        finally:
            for file in files:
                os.close(file)

    def _new(self) -> int:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        self._path.unlink()
        os.posix_fallocate(fd, 0, DISK_PIECE_BYTES)
        return fd

    def read(self) -> Limit:
        """Read the file."""
        return self._timed(lambda at: os.preadv(self._fd, [self._piece(at)], at), sync=False)

    def _piece(self, at: int) -> memoryview:
        return self._memory[at : at + DISK_PIECE_BYTES]

    def _timed(self, move: Callable[[int], int], *, sync: bool) -> Limit:
        wall, cpu = time.perf_counter(), time.process_time()
        for moved in self._threads.map(move, range(0, DISK_BYTES, DISK_PIECE_BYTES)):
            if moved != DISK_PIECE_BYTES:
                raise OSError(f"the disk moved {moved} of {DISK_PIECE_BYTES} bytes")
        if sync:
            os.fdatasync(self._fd)
        seconds, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        return Limit(DISK_BYTES / 1e9 / seconds, DISK_BYTES / 1e9 / cpu_s)


def round_trip_us(pair: tuple[socket.socket, socket.socket]) -> float:
    """Median of sending what asks for 64 keys and receiving a short answer, both ends waiting in the kernel."""
    asking, answering = pair
    durations = []

    def answer() -> None:
        while answering.recv(QUESTION_BYTES, socket.MSG_WAITALL):
            answering.sendall(bytes(ANSWER_BYTES))

    with asking, answering:
        thread = threading.Thread(target=answer)
        thread.start()
        for _ in range(MATCH_CALLS):
            before = time.perf_counter()
            asking.sendall(bytes(QUESTION_BYTES))
            asking.recv(ANSWER_BYTES, socket.MSG_WAITALL)
            durations.append((time.perf_counter() - before) * 1e6)
        asking.shutdown(socket.SHUT_WR)
        thread.join()
    return statistics.median(durations)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asking = socket.create_connection(listener.getsockname())
        answering, _ = listener.accept()
    for end in (asking, answering):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return asking, answering


class Measuring:
    """Memory and the file are taken once."""

    def __init__(self, folder: Path) -> None:
        self._yardstick = Yardstick()
        try:
            self._disk: Disk | None = Disk(folder)
        except OSError:
            self._disk = None  # a file system without O_DIRECT has no such limit: rows there are without a share

    def measure(self) -> Machine:
        limits = self._yardstick.measure("tcp") | self._yardstick.measure("unix")
        if self._disk is not None:
            limits |= {"odirect_write": self._disk.write(), "odirect_read": self._disk.read()}
            limits |= {"odirect_write_new_files": self._disk.write_new()}
        trips = {"unix": round_trip_us(socket.socketpair(socket.AF_UNIX)), "tcp": round_trip_us(tcp_pair())}
        return Machine(limits, trips)


def main() -> None:
    """Entry point of the process: ends with its standard input."""
    measuring: Measuring | None = None
    for line in sys.stdin.buffer:
        try:
            command = msgspec.json.decode(line, type=MeasureMachine)
            measuring = measuring or Measuring(Path(command.folder))
            answer: Machine | Failed = measuring.measure()
        except OSError as error:
            answer = Failed(f"measuring the machine failed: {error}")
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
