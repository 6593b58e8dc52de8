"""Descriptors that come along with bytes over a Unix socket."""

from __future__ import annotations

import socket
import struct
from typing import Final

_DESCRIPTORS_AT_ONCE: Final = 4
_DESCRIPTOR: Final = struct.Struct("i")


def receive_passed(sock: socket.socket, buffers: list[memoryview], passed: list[int]) -> int:
    """One system call: fill `buffers`, and add descriptors that came to `passed`; how many bytes. Raises `OSError`."""
    room = socket.CMSG_LEN(_DESCRIPTORS_AT_ONCE * _DESCRIPTOR.size)
    count, ancillary, _, _ = sock.recvmsg_into(buffers, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) // _DESCRIPTOR.size * _DESCRIPTOR.size
            passed += [number for (number,) in _DESCRIPTOR.iter_unpack(data[:whole])]
    return count
