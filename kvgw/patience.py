"""Waiting for a peer in a worker thread, which others need too: never for long."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable


def patiently(
    sock: socket.socket, step: Callable[[], bool], event: int, patience_s: float, now: Callable[[], float]
) -> float:
    """Take steps until one says that it was the last, each when the non-blocking `sock` is ready for `event` of poll.

    What is left of the patience, in seconds, by `now`; 0 when the peer took all of it. Raises what a step raises.
    """
    ready = select.poll()
    ready.register(sock, event)
    while True:
        try:
            if step():
                return max(0.0, patience_s)
        except BlockingIOError:
            began = now()
            if patience_s <= 0 or not ready.poll(patience_s * 1000):
                return 0.0
            patience_s -= now() - began
