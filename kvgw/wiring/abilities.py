"""What the file system under the blobs cannot do. All works without; who runs it should know why it is slower."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Final

_UNABLE: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR, errno.ENOSYS})
NAMELESS: Final = "files without a name"
DIRECT: Final = "transfers past the page cache"
RESERVED: Final = "space that is reserved for a file"


def missing_abilities(folder: Path) -> list[str]:
    """What the folder's file system cannot do, looked at on a file that never has a name. Raises `OSError`.

    A full file system is able. Where files without a name cannot be, nothing else is looked at.
    """
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return _if_unable(error, NAMELESS)
    os.close(fd)
    return [*_direct(folder), *_reserved(folder)]


def _direct(folder: Path) -> list[str]:
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError as error:
        return _if_unable(error, DIRECT)
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.write(fd, page)
    except OSError as error:
        return _if_unable(error, DIRECT)
    finally:
        os.close(fd)
    return []


def _reserved(folder: Path) -> list[str]:
    fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
    except OSError as error:
        return _if_unable(error, RESERVED)
    finally:
        os.close(fd)
    return []


def _if_unable(error: OSError, ability: str) -> list[str]:
    if error.errno in _UNABLE:
        return [ability]
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return []
    raise error
