"""Endpoints: where a gateway listens, written as ``unix:/path``, ``tls:host:port`` or ``tcp:host:port``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgw.errors import RequestRefused

UNIX_PATH_BYTES_MAX: Final = 107
"""What the kernel takes for the path of a Unix socket, its final zero not counted."""


@dataclass(frozen=True, slots=True)
class UnixEndpoint:
    """A Unix socket of this host."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpEndpoint:
    """A TCP port."""

    host: str
    port: int
    encrypted: bool = False
    """Inside TLS."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.encrypted else 'tcp'}:{host}:{self.port}"


Endpoint = UnixEndpoint | TcpEndpoint


def parse_endpoint(text: str) -> Endpoint:
    """Read an endpoint. Raises `RequestRefused` naming what is wrong with it."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        return UnixEndpoint(check_socket_path(rest))
    if scheme in ("tcp", "tls"):
        host, _, port = rest.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if host and port.isascii() and port.isdigit() and 0 <= int(port) < 65536:
            return TcpEndpoint(host, int(port), encrypted=scheme == "tls")
    raise RequestRefused(f"{text!r} is not an endpoint: write unix:/path/to/kvgw.sock, tls:host:port or tcp:host:port")


def check_socket_path(path: str) -> str:
    """Return `path` if the kernel takes it for a Unix socket. Raises `RequestRefused` with its length and the limit."""
    length = len(path.encode())
    if "\0" in path or length > UNIX_PATH_BYTES_MAX:
        raise RequestRefused(
            f"the Unix socket path {path!r} has {length} bytes; the kernel takes at most {UNIX_PATH_BYTES_MAX}: "
            "choose a shorter one (setting server.socket)"
        )
    return path
