"""A gateway reached over TLS, as the contract's suites take it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvgw.client import Client
from kvgw.endpoint import TcpEndpoint
from kvgw.settings import Settings
from kvgw.tls import client_context
from kvgw.transport import SocketTransport
from tests.support.gateways import SMALL, House, house
from tests.support.tls import Authority


@dataclass
class TlsHouse(House):
    """Its clients trust the authority that issued its certificate, and no other."""

    authority: str = ""

    def client(self, namespace: str = "", *, token: str | None = None, **options: Any) -> Client:
        made = super().client(namespace, token=token, **options)
        assert isinstance(made._transport, SocketTransport)
        made._transport._tls = client_context(self.authority)
        return made


def encrypted(settings: Settings, files: tuple[Path, Path]) -> Settings:
    """The same with a TLS port."""
    certificate, key = map(str, files)
    return replace(
        settings,
        server=replace(settings.server, listen="127.0.0.1:0", tls_cert_file=certificate, tls_key_file=key),
    )


@asynccontextmanager
async def tls_house(folder: Path, *, settings: Settings = SMALL, **options: Any) -> AsyncIterator[TlsHouse]:
    """A gateway with a certificate of its own authority beside its folder, for 127.0.0.1."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    authority = Authority(folder.parent)
    async with house("tcp", folder, settings=encrypted(settings, authority.issue("gateway")), **options) as plain:
        assert isinstance(plain.endpoint, TcpEndpoint)
        assert plain.endpoint.encrypted
        made = TlsHouse(
            plain.opened, plain.kind, plain.endpoint, plain.token, plain.clock, authority=str(authority.file)
        )
        made._clients = plain._clients  # which ends them, and looks at what they hold
        yield made
