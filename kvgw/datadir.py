"""The data folder of a gateway: private, owned by one process at a time, and with a name for its node.

<data>/kvgw.lock     held by the running gateway; its text names the holder
<data>/node          name of this node, made once
<data>/catalog.db    the catalog (SQLite)
<data>/keys/         root key and wrapped namespace keys: never part of a backup of the rest
<data>/nvme/         sealed blobs
<data>/audit/        copies of the audit log's checkpoints
<data>/kvgw.sock     the Unix socket
<data>/admin.sock    the same for admin verbs
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import stat
import time
from pathlib import Path
from typing import Final

from kvgw.errors import Code, KvgwError
from kvgw.runtime import Rng
from kvgw.settings import SettingsError

log = logging.getLogger("kvgw.server")

ADMIN_SOCKET: Final = "admin.sock"
"""In the data folder: admin verbs for the gateway's own user, who needs no token there."""

LOCK_POLL_SECONDS: Final = 0.1


class FolderLocked(KvgwError):
    """Another process owns the data folder; the sentence names it."""

    code = Code.BUSY


class DataFolder:
    """An opened and locked data folder. Its look-ups are short and blocking; used before anybody is served."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    async def open_within(cls, path: Path, wait_s: float) -> DataFolder:
        """Like `open`, but waits up to `wait_s` seconds for another process to let go of the folder."""
        deadline = time.monotonic() + wait_s
        told = False
        while True:
            try:
                return cls.open(path)
            except FolderLocked as error:
                if time.monotonic() >= deadline:
                    raise
                if not told:
                    told = True
                    log.info("waiting up to %g s: %s", wait_s, error)
            await asyncio.sleep(LOCK_POLL_SECONDS)

    @classmethod
    def open(cls, path: Path) -> DataFolder:
        """Open and lock the folder, creating it if it is missing.

        Raises `SettingsError` for a folder that cannot be used, `FolderLocked` if another process owns it.
        """
        _prepare(path)
        lock = _open_lock(path / "kvgw.lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = _named(lock)
            os.close(lock)
            raise FolderLocked(
                f"the data folder {path} is in use by {owner}; stop it first, or give this gateway a "
                "folder of its own (on Kubernetes: update strategy Recreate, or one volume for each pod)"
            ) from error
        except OSError as error:
            os.close(lock)
            raise SettingsError(f"the data folder {path} cannot be locked: {error.strerror}") from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()}\n".encode(), 0)
        return cls(path, lock)

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    def node_name(self, given: str, rng: Rng) -> str:
        """The name of this node: `given`, or one made at the first start and kept in the folder."""
        if given:
            return given
        file = self.path / "node"
        try:
            return file.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            name = f"node-{rng.token(8).hex()}"
            file.write_text(f"{name}\n", encoding="ascii")
            return name

    def close(self) -> None:
        """Let go of the folder; the lock file stays."""
        os.ftruncate(self._lock, 0)
        os.close(self._lock)


def holder(path: Path) -> str | None:
    """Who owns the data folder now, or None when nobody does."""
    try:
        lock = os.open(path / "kvgw.lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _named(lock)
    else:
        return None
    finally:
        os.close(lock)


def _named(lock: int) -> str:
    return os.pread(lock, 200, 0).decode(errors="replace").strip() or "an unnamed process"


def check_folder(path: Path) -> None:
    """Raises `SettingsError` unless the folder is this user's and nobody else's."""
    uid = os.geteuid()
    try:
        status = path.stat()
    except OSError as error:
        raise SettingsError(f"the data folder {path} cannot be read by uid {uid}: {error.strerror}") from error
    if status.st_uid != uid:
        raise SettingsError(
            f"the data folder {path} belongs to uid {status.st_uid}, but this process runs as uid {uid}; "
            f"run as its owner, or chown it"
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(
            f"the data folder {path} is open to others (mode {stat.S_IMODE(status.st_mode):04o}); chmod 700 it"
        )


def _prepare(path: Path) -> None:
    if not path.is_absolute():
        raise SettingsError(f"the data folder {path} is not an absolute path")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"the data folder {path} cannot be made by uid {os.geteuid()}: {error.strerror}; "
            "make it, or name another with --data"
        ) from error
    check_folder(path)


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written by uid {os.geteuid()}: {error.strerror}") from error
