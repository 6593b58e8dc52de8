"""What lies in a tier's folder. Blocking; tolerates that entries vanish while it looks."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from storage.nvme.tree import Tree
from storage.tier import BlobInfo, check_name

BLOBS: Final = "v1"

Directory: TypeAlias = tuple[str, str, str]
"""Where blobs lie: `BLOBS`, the namespace, two hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Census:
    """Bytes in blobs by directory, and the number of things where blobs belong that are none."""

    used: dict[Directory, int]
    foreign: int


def blob_directories(tree: Tree) -> list[Directory]:
    """All directories that may hold blobs. Raises `OSError`."""
    return [(BLOBS, space, digits) for space in _names(tree, BLOBS) for digits in _names(tree, BLOBS, space)]


def blobs_in(tree: Tree, directory: Directory) -> list[BlobInfo]:
    """The blobs in one directory; what is none is left out. Raises `OSError`."""
    try:
        with tree.open(*directory) as fd, os.scandir(fd) as entries:
            return list(_blobs_among(entries, directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def take_census(tree: Tree) -> Census:
    """Count blobs and strangers, and drop empty directories. Only while nobody else uses the folder."""
    used: dict[Directory, int] = {}
    foreign = 0
    for directory in blob_directories(tree):
        entries = _names(tree, *directory)
        lengths = [blob.length for blob in blobs_in(tree, directory)]
        foreign += len(entries) - len(lengths)
        if lengths:
            used[directory] = sum(lengths)
        if not entries:
            foreign += _drop_empty(tree, directory)
    return Census(used, foreign)


def split_name(name: str) -> tuple[Directory, str]:
    """Directory and file name of a blob name that `check_name` has passed."""
    version, namespace, digits, leaf = name.split("/")
    return (version, namespace, digits), leaf


def length_of(directory_fd: int, leaf: str) -> int | None:
    """Length in bytes of a regular file; none for anything else. Raises `OSError`."""
    try:
        found = os.stat(leaf, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _drop_empty(tree: Tree, directory: Directory) -> int:
    """Remove a directory that showed no entries; 1 if it is no directory but a stranger, else 0."""
    *parent, digits = directory
    with tree.open(*parent) as fd:
        try:
            os.rmdir(digits, dir_fd=fd)
        except NotADirectoryError:
            return 1
    return 0


def _blobs_among(entries: Iterator[os.DirEntry[str]], directory: Directory) -> Iterator[BlobInfo]:
    for entry in entries:
        name = "/".join((*directory, entry.name))
        try:
            check_name(name)
            found = entry.stat(follow_symlinks=False)
        except (ValueError, FileNotFoundError):
            continue
        if stat.S_ISREG(found.st_mode):
            yield BlobInfo(name, found.st_size, found.st_mtime_ns // 1_000_000)


def _names(tree: Tree, *directory: str) -> list[str]:
    """Names in a directory; none where it is missing or a symbolic link. Raises `OSError`."""
    try:
        with tree.open(*directory) as fd:
            return os.listdir(fd)
    except (FileNotFoundError, NotADirectoryError):
        return []
