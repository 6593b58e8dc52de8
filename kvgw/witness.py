"""Copies of the audit log's checkpoints outside the database: whoever can change the log cannot change them too.

``<data>/audit/checkpoints``: one JSON line a checkpoint, synced to disk. ``<s3.prefix>audit/<number>-<random>``: one
object a checkpoint, where there is S3. A copy that could not be written is owed: the newest one is tried again.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvgw.runtime import Rng, Workers
from kvgw.settings import SettingsError
from storage.s3 import S3Objects
from tenancy.audit.checkpoints import NOTE_CHARACTERS_MAX, Checkpoint
from tenancy.errors import CheckpointNotKept

FOLDER: Final = "audit"
FILE: Final = "checkpoints"
OBJECTS_READ_MAX: Final = 500
"""Checkpoints that a verification reads from S3: the newest. Each is a request of its own."""

_LINE_BYTES_MAX: Final = 4 * NOTE_CHARACTERS_MAX


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file."""

    seq: int
    note: str


_DECODER: Final = msgspec.json.Decoder(Line)


class Witness:
    """Keeps copies of checkpoints in a file and, where there is one, in S3."""

    def __init__(self, data: Path, objects: S3Objects | None, workers: Workers, rng: Rng) -> None:
        self._file = data / FOLDER / FILE
        self._objects = objects
        self._workers = workers
        self._rng = rng
        self._owed: Checkpoint | None = None

    async def keep(self, one: Checkpoint) -> None:
        """Write a checkpoint to the file; its copy in S3 is owed (`settle`). Raises `CheckpointNotKept`."""
        await self._workers.run(lambda: append(self._file, one))
        self._owed = one

    async def settle(self) -> None:
        """Write to S3 what is owed. Raises `StorageError`."""
        if self._owed is None or self._objects is None:
            return
        one = self._owed
        await self._objects.put(f"{one.seq:019d}-{self._rng.token(8).hex()}", one.note.encode())
        self._owed = None


def append(file: Path, one: Checkpoint) -> None:
    """Add a line and sync it. A line that a crash left torn is cut off first. Raises `CheckpointNotKept`."""
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        new = not file.exists()
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _cut_torn_line(descriptor)
            _write_all(descriptor, msgspec.json.encode(Line(one.seq, one.note)) + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if new:
            _sync_folders(file)
    except OSError as error:
        raise CheckpointNotKept(f"the checkpoint could not be written to {file}: {error.strerror}") from error


def notes_in(file: Path) -> Iterator[str]:
    """The notes of a file, in their order; none when there is no file. Raises `SettingsError` naming a bad line."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(_LINE_BYTES_MAX), b""), start=1):
                if not line.endswith(b"\n") and len(line) < _LINE_BYTES_MAX:
                    return  # torn by a crash: never acknowledged
                try:
                    yield _DECODER.decode(line).note
                except msgspec.DecodeError as error:
                    raise SettingsError(f"line {number} of {file} is no checkpoint: {error}") from error
    except FileNotFoundError:
        return
    except OSError as error:
        raise SettingsError(f"the checkpoints in {file} cannot be read: {error.strerror}") from error


async def notes_from(objects: S3Objects) -> AsyncIterator[str]:
    """The newest notes in S3, in the order of their numbers. Raises `StorageError`."""
    newest: deque[str] = deque(maxlen=OBJECTS_READ_MAX)
    async for name in objects.names():
        newest.append(name)
    for name in newest:
        data = await objects.get(name)
        yield "" if data is None else data.decode(errors="replace")


def _cut_torn_line(descriptor: int) -> None:
    length = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, _LINE_BYTES_MAX, max(0, length - _LINE_BYTES_MAX))
    whole = tail.rfind(b"\n") + 1
    if whole < len(tail):
        os.ftruncate(descriptor, length - len(tail) + whole)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _sync_folders(file: Path) -> None:
    for folder in (file.parent, file.parent.parent):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
