"""The blocking file operations of an NVMe tier, run in worker threads.

Order of a write (law 1 and 8): temporary file, reserve space, bytes, data sync, rename, directory sync. Whatever
goes wrong before the rename leaves nothing; whatever goes wrong after it leaves at worst a whole blob nobody asked
for. A file is never changed in place. Several blobs take each step together, so that one commit of the file system's
journal serves them all.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

from storage.errors import BlobDamaged, TierFull
from storage.nvme.blocks import BLOCK, write_whole
from storage.nvme.changes import Removal, Write, by_directory
from storage.nvme.listing import Directory, blob_directories, blobs_in, length_of, split_name
from storage.nvme.opening import NO_SPACE, Opened
from storage.nvme.reading import BlobReader
from storage.nvme.recycled import OldFile, Readers, Recycled
from storage.nvme.space import PLENTY, Space
from storage.nvme.spares import Spares
from storage.nvme.tree import SyncFailed, Tree, sync_data, sync_directory
from storage.tier import BlobInfo

_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_FOLDERS_AT_ONCE: Final = 32
"""Directories that one removal holds open."""
_LISTED_AT_ONCE: Final = 64
"""Blobs after which a listing lets others have its thread."""
_LISTED_FOLDERS: Final = 16
"""Directories after which it does so too."""


class BlobFiles:
    """Reads and writes blobs below one folder. Every method blocks; all are safe for use by several threads."""

    def __init__(self, opened: Opened, space: Space) -> None:
        self._tree = Tree(opened.root_fd)
        self._temporary_fd = opened.temporary_fd
        self._file_system = opened.file_system
        self._space = space
        self._readers = Readers()
        self._reader = BlobReader(self._tree, self._readers, direct=self._file_system.direct)
        able = self._file_system.direct and self._file_system.preallocates
        self.recycled = Recycled(opened.temporary_fd, space, able=able)
        self.spares = Spares(opened.temporary_fd, space, self._has_plenty, able=able)
        self._serial = itertools.count()
        # Looking at what a name holds, changing it and counting is one step, so that the count stays exact.
        self._changing = threading.Lock()
        self._used = dict(opened.census.used)

    def write(self, writes: Sequence[Write]) -> None:
        """Store blobs durably, each whole or not at all. Raises nothing: each has its own end, a success or an error.

        Errors are `OSError`, `SyncFailed`, `TierFull`, `TierUnavailable`. One that fails keeps no other; but names that
        their directory could not make durable fail together.
        """
        staged = [one for one in writes if self._attempt(one, self._write_temporary)]
        synced = [one for one in staged if self._attempt(one, self._sync)]
        with ExitStack() as folders:
            published = list(self._publish(synced, folders))  # all of them before the first directory is synced
            for fd, named in published:
                self._sync_names(fd, named)

    def remove(self, removals: Sequence[Removal]) -> None:
        """Remove blobs durably, as many as possible. Raises nothing: the error of each is the first that resisted.

        Errors are `OSError` and `SyncFailed`. A directory is synced even if the blob is not there: an earlier removal
        may not have got that far.
        """
        folders: dict[Directory, list[tuple[Removal, str]]] = {}
        for removal in removals:
            removal.succeed()
            for directory, leaves in by_directory(removal.names).items():
                folders.setdefault(directory, []).extend((removal, leaf) for leaf in leaves)
        rest = iter(folders.items())
        while run := list(itertools.islice(rest, _FOLDERS_AT_ONCE)):
            self._remove_from(run)

    def read_into(self, name: str, target: memoryview) -> None:
        """Fill `target` with one blob. Raises `BlobMissing`, `BlobDamaged` or `OSError`."""
        try:
            self._reader.read_into(name, target)
        except BlobDamaged:
            self._recount(split_name(name)[0])
            raise

    def lengths(self, names: Sequence[str]) -> dict[str, int]:
        """Lengths of those blobs that exist. Raises `OSError`."""
        found: dict[str, int] = {}
        for directory, leaves in by_directory(names).items():
            try:
                with self._tree.open(*directory) as fd:
                    for leaf in leaves:
                        length = length_of(fd, leaf)
                        if length is not None:
                            found["/".join((*directory, leaf))] = length
            except (FileNotFoundError, NotADirectoryError):
                continue
        return found

    def directories(self) -> list[Directory]:
        """All directories that may hold blobs. Raises `OSError`."""
        return blob_directories(self._tree)

    def next_blobs(self, directories: deque[Directory]) -> list[BlobInfo]:
        """Blobs in the first few of `directories`, which it takes away. Raises `OSError`."""
        found: list[BlobInfo] = []
        for _ in range(min(len(directories), _LISTED_FOLDERS)):
            if len(found) < _LISTED_AT_ONCE:
                found += blobs_in(self._tree, directories.popleft())
        return found

    def _attempt(self, one: Write, step: Callable[[Write], None]) -> bool:
        """Take a blob a step further; what fails ends here and leaves nothing."""
        try:
            step(one)
        except Exception as error:  # noqa: BLE001  # goes to whoever wants this blob; the others go on
            self._fail(one, error)
            return False
        return True

    def _write_temporary(self, one: Write) -> None:
        temporary = f"{one.leaf}.{next(self._serial)}"
        direct = self._file_system.direct and one.nbytes >= BLOCK
        recycled = self.recycled.take(one.nbytes)
        if recycled is not None:
            one.fd, one.temporary = recycled
        elif (spare := self.spares.take(one.nbytes, temporary)) is not None:
            one.fd, one.temporary = spare, temporary
        self._claim(one, 0 if one.temporary else one.nbytes)
        if not one.temporary:
            one.fd = os.open(temporary, _CREATE | (os.O_DIRECT if direct else 0), 0o600, dir_fd=self._temporary_fd)
            one.temporary = temporary
            if self._file_system.preallocates and one.nbytes > 0:
                os.posix_fallocate(one.fd, 0, one.nbytes)
        write_whole(one.fd, one.sealed, direct=direct)

    def _claim(self, one: Write, to_reserve: int) -> None:
        """Claim room for a blob, of which the disk has yet `to_reserve` bytes to find; spares give way to it."""
        while True:
            try:
                one.claim = self._space.claim(one.nbytes)
                self._check_free(to_reserve)
            except TierFull:
                if one.claim is not None:
                    one.claim.release()
                if not self._give_way():
                    raise
            else:
                return

    def _sync(self, one: Write) -> None:
        sync_data(one.fd)
        _close(one)

    def _publish(self, synced: Sequence[Write], folders: ExitStack) -> Iterator[tuple[int, list[Write]]]:
        """Give blobs their names, directory by directory; those that have them, with their directory's descriptor."""
        grouped: dict[Directory, list[Write]] = {}
        for one in synced:
            grouped.setdefault(one.directory, []).append(one)
        for directory, members in grouped.items():
            try:
                fd = folders.enter_context(self._tree.open_or_create(*directory))
            except (OSError, SyncFailed) as error:
                for one in members:
                    self._fail(one, error)
            else:
                named = [one for one in members if self._attempt(one, partial(self._rename, fd))]
                if named:
                    yield fd, named

    def _rename(self, fd: int, one: Write) -> None:
        assert one.claim is not None, "what is renamed was written under a claim"
        with self._changing:
            replaced = length_of(fd, one.leaf) or 0
            os.rename(one.temporary, one.leaf, src_dir_fd=self._temporary_fd, dst_dir_fd=fd)
            one.temporary = ""
            one.claim.publish(replaced)
            self._used[one.directory] = self._used.get(one.directory, 0) + one.nbytes - replaced

    def _sync_names(self, fd: int, named: Sequence[Write]) -> None:
        try:
            sync_directory(fd)
        except SyncFailed as error:
            for one in named:
                with suppress(OSError):  # what stays is a whole blob that nobody asked for
                    self._remove_one(fd, one.directory, one.leaf, None)
                self._fail(one, error)
        else:
            for one in named:
                one.succeed()

    def _fail(self, one: Write, error: Exception) -> None:
        one.error = error
        _close(one)
        if one.temporary:
            with suppress(OSError):  # what stays is removed at the next opening
                os.unlink(one.temporary, dir_fd=self._temporary_fd)
            one.temporary = ""
        if one.claim is not None:
            one.claim.release()
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            self._give_way()

    def _give_way(self) -> bool:
        """Files without blobs leave their room to these; whether there were any."""
        return any([self.recycled.drop(), self.spares.drop()])

    def _has_plenty(self, length: int) -> bool:
        return _free_bytes(self._temporary_fd) - PLENTY * length >= self._file_system.free_bytes_min

    def _check_free(self, length: int) -> None:
        free = _free_bytes(self._temporary_fd)
        free_min = self._file_system.free_bytes_min
        if free - length < free_min:
            reason = (
                f"{free} bytes are free on its disk, of which {free_min} are to stay free, {length} more do not fit"
            )
            self._space.mark_full(reason)
            raise TierFull(reason)

    def _remove_from(self, folders: Sequence[tuple[Directory, Sequence[tuple[Removal, str]]]]) -> None:
        """Remove files from some directories, and then sync these."""
        with ExitStack() as stack:
            changed: list[tuple[int, Sequence[tuple[Removal, str]]]] = []
            aside: list[OldFile] = []
            for directory, doomed in folders:
                try:
                    fd = stack.enter_context(self._tree.open(*directory))
                except FileNotFoundError:
                    self._recount(directory)
                except OSError as error:
                    _resist(doomed, error)
                else:
                    aside += self._remove_all(fd, directory, doomed)
                    changed.append((fd, doomed))
            nameless = True
            for fd, doomed in changed:
                try:
                    sync_directory(fd)
                except SyncFailed as error:
                    _resist(doomed, error)
                    nameless = False
        self.recycled.keep(aside, nameless=nameless)

    def _remove_all(self, fd: int, directory: Directory, doomed: Sequence[tuple[Removal, str]]) -> list[OldFile]:
        """Take blobs' names from a directory; the files that are worth keeping."""
        all_there = True
        aside: list[OldFile] = []
        for removal, leaf in doomed:
            try:
                all_there &= self._remove_one(fd, directory, leaf, aside)
            except OSError as error:
                _resist([(removal, leaf)], error)
        if not all_there:
            self._recount(directory)
        return aside

    def _remove_one(self, directory_fd: int, directory: Directory, leaf: str, aside: list[OldFile] | None) -> bool:
        """Remove one blob's file, or set it `aside`; whether it was there."""
        with self._changing, self._readers.held_off(directory, leaf) as unread:
            length = length_of(directory_fd, leaf) or 0
            try:
                old = self.recycled.set_aside(directory_fd, leaf, length) if unread and aside is not None else None
                if old is None:
                    os.unlink(leaf, dir_fd=directory_fd)
            except FileNotFoundError:
                return False
            self._used[directory] = self._used.get(directory, 0) - length
            self._space.freed(length)
        if old is not None and aside is not None:
            aside.append(old)
        return True

    def _recount(self, directory: Directory) -> None:
        """Count one directory anew: a blob was gone or had another length, so others may be too."""
        with self._changing:
            used = sum(blob.length for blob in blobs_in(self._tree, directory))
            self._space.freed(self._used.get(directory, 0) - used)
            self._used[directory] = used


def _close(one: Write) -> None:
    if one.fd >= 0:
        fd, one.fd = one.fd, -1
        os.close(fd)


def _resist(doomed: Sequence[tuple[Removal, str]], error: Exception) -> None:
    """Removals fail, unless one of their blobs has resisted before."""
    for removal, _ in doomed:
        removal.error = removal.error or error


def _free_bytes(fd: int) -> int:
    """Bytes that this process may still write to the file system of `fd`."""
    found = os.fstatvfs(fd)
    return found.f_bavail * found.f_frsize
