"""Small secret files: private to one user, written whole or not at all, overwritten before they are removed.

Everything here blocks and is meant for a worker thread. An `OSError` becomes `KeyUnavailable`; a file or folder that
others can reach becomes `KeyExposed`, with the command that repairs it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tenancy.errors import KeyDamaged, KeyExposed, KeyUnavailable

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600

_OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


def make_folder(folder: Path) -> None:
    """Create a private folder unless it is there; its parent must exist."""
    with _reported("create", folder):
        try:
            folder.mkdir(mode=FOLDER_MODE)
        except FileExistsError:
            return
        _sync_folder(folder.parent)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold `folder` against every other thread and process that changes it; checks that it is private."""
    with _reported("open", folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_private(folder, descriptor, FOLDER_MODE)
        with _reported("lock", folder):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def names(folder: Path) -> list[str]:
    """Names of what lies in `folder`; none if there is no such folder."""
    with _reported("list", folder):
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []


def exists(path: Path) -> bool:
    """Whether there is a file; raises `KeyUnavailable` if that cannot be told."""
    with _reported("look for", path):
        try:
            path.lstat()
        except FileNotFoundError:
            return False
        return True


def read(path: Path, length_max: int) -> bytes | None:
    """The whole file, or None if there is none.

    Raises `KeyDamaged` for more than `length_max` bytes or something that is not a plain file.
    """
    with _reported("read", path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _OPEN_FLAGS)  # a FIFO must not block the open
        except FileNotFoundError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise KeyDamaged(f"{path} is not a plain file; restore it from its backup")
            _check_private(path, descriptor, FILE_MODE)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(length_max + 1)
        finally:
            os.close(descriptor)
    if len(data) > length_max:
        raise KeyDamaged(
            f"{path} has more than {length_max} bytes and cannot be a key file; restore it from its backup"
        )
    return data


def create(path: Path, data: bytes) -> None:
    """Write a file that must not exist yet; it is durable on return. Call inside `exclusive`."""
    with _reported("create", path):
        draft = _write_draft(path, data)
        os.link(draft, path)  # unlike a rename, never replaces
        draft.unlink()
        _sync_folder(path.parent)


def replace(path: Path, data: bytes) -> None:
    """Replace a file: a crash leaves the old one or the new one. Then the old bytes are overwritten.

    Call inside `exclusive`.
    """
    with _reported("replace", path):
        draft = _write_draft(path, data)
        old = os.open(path, os.O_WRONLY | _OPEN_FLAGS)
        try:
            draft.replace(path)
            _sync_folder(path.parent)
            _overwrite(old)
        finally:
            os.close(old)


def erase(path: Path) -> None:
    """Overwrite and remove a file and what an interrupted write left of it; durable on return, repeatable.

    On media that write elsewhere (flash, copy-on-write file systems) the overwriting may not reach the old bytes.
    Call inside `exclusive`.
    """
    with _reported("erase", path):
        for victim in (path, _draft_of(path)):
            try:
                descriptor = os.open(victim, os.O_WRONLY | _OPEN_FLAGS)
            except FileNotFoundError:
                continue
            try:
                _overwrite(descriptor)
            finally:
                os.close(descriptor)
            victim.unlink()
        _sync_folder(path.parent)


def _draft_of(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _write_draft(path: Path, data: bytes) -> Path:
    draft = _draft_of(path)
    draft.unlink(missing_ok=True)  # left by a crash; the lock says that nobody is writing it
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    return draft


def _overwrite(descriptor: int) -> None:
    os.pwrite(descriptor, bytes(os.fstat(descriptor).st_size), 0)
    os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_private(path: Path, descriptor: int, mode: int) -> None:
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise KeyExposed(
            f"{path} belongs to user {status.st_uid}, but this process runs as user {os.geteuid()}; "
            f"run it as the owner, or: chown {os.geteuid()} {path}"
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyExposed(
            f"{path} has permissions {stat.S_IMODE(status.st_mode):04o}, which let others reach keys; "
            f"if nobody else could have read it: chmod {mode:04o} {path}"
        )


@contextmanager
def _reported(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KeyUnavailable(f"cannot {action} {path}: {error.strerror}; check the keys folder and its disk") from error
