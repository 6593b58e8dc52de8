"""Who is at the other end of a Unix socket: the kernel says."""

from __future__ import annotations

import socket
import struct
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")


def peer_uid(sock: socket.socket) -> int:
    """The user id of the process at the other end of a connected Unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return int(uid)
