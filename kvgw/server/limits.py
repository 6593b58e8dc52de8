"""Bounds that the data plane sets to its peers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times in seconds."""

    connections: int
    hello_s: float = 5.0
    """Time for the first frame, and the head start of a payload."""
    idle_s: float = 3600.0
    """A connection without a request for so long is closed."""
    grace_s: float = 0.1
    """A request ends at its deadline plus this: the client has given up by then."""
    discard_s: float = 10.0
    bytes_per_second_min: float = 64 * 1024
    """Payloads that come slower than this lose their window."""
    owner_uid: int = field(default_factory=os.geteuid)
    """Unix user that needs no token on the Unix socket."""
