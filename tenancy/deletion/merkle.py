"""Merkle tree hashes of RFC 6962: SHA-256 over leaves in their order, with leaves and nodes told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

_LEAF, _NODE = b"\x00", b"\x01"


def merkle_root(leaves: Iterable[bytes]) -> bytes:
    """The root (32 bytes) of any number of leaves; of none, the hash of nothing.

    Holds one hash for each level of the tree, however many leaves there are.
    """
    peaks: list[tuple[int, bytes]] = []  # roots of whole subtrees, each with its number of leaves, falling
    for leaf in leaves:
        size, root = 1, hashlib.sha256(_LEAF + leaf).digest()
        while peaks and peaks[-1][0] == size:
            size, root = 2 * size, _parent(peaks.pop()[1], root)
        peaks.append((size, root))
    if not peaks:
        return hashlib.sha256(b"").digest()
    root = peaks.pop()[1]
    while peaks:
        root = _parent(peaks.pop()[1], root)
    return root


def _parent(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()
