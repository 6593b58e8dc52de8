"""What callers want changed on the disk: one blob written, or some removed, each with an end of its own."""

from __future__ import annotations

from collections.abc import Sequence

from storage.errors import TierUnavailable
from storage.nvme.listing import Directory, split_name
from storage.nvme.space import Claim


class Change:
    """One caller's wish. It failed unless a worker thread has said that it is durable."""

    __slots__ = ("act", "error", "nbytes")

    def __init__(self, act: str, nbytes: int) -> None:
        self.act = act
        """What was wanted, for sentences: ``write blob … to``."""
        self.nbytes = nbytes
        """Bytes to move."""
        self.error: Exception | None = TierUnavailable("the worker thread gave up before it began")

    def succeed(self) -> None:
        """It is done, and durable."""
        self.error = None

    def result(self) -> None:
        """Raise what went wrong, if anything did."""
        error, self.error = self.error, None  # its traceback leads back here, and no cycle may keep the caller's memory
        if error is not None:
            try:
                raise error
            finally:
                del error


class Write(Change):
    """One blob to be written, and how far that got."""

    __slots__ = ("claim", "directory", "fd", "leaf", "sealed", "temporary")

    def __init__(self, name: str, sealed: memoryview) -> None:
        super().__init__(f"write blob {name} to", len(sealed))
        self.directory, self.leaf = split_name(name)
        self.sealed = sealed
        self.claim: Claim | None = None
        self.temporary = ""
        """Name of the file that has the bytes, until it is the blob's."""
        self.fd = -1
        """The file, while it is open."""


class Removal(Change):
    """Some blobs to be removed."""

    __slots__ = ("names",)

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"delete all {len(names)} blobs from", 0)
        self.names = names


def by_directory(names: Sequence[str]) -> dict[Directory, list[str]]:
    """File names by directory, of blob names."""
    grouped: dict[Directory, list[str]] = {}
    for name in names:
        directory, leaf = split_name(name)
        grouped.setdefault(directory, []).append(leaf)
    return grouped
