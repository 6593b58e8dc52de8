"""A gateway is restarted between two calls of one client: the next call finds what was stored, and is no outage."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvgw.client import Client, ClientOptions, connect
from kvgw.endpoint import TcpEndpoint, UnixEndpoint
from kvgw.model import Outcome
from kvgw.server.serve import serving
from kvgw.settings import ServerSettings, Settings
from tests.support.aio import aio
from tests.support.encrypted import encrypted
from tests.support.gateways import SMALL, format_of, keys_of, payloads_of, read
from tests.support.tls import Authority

KINDS = ("unix", "shm", "tcp", "tls")


@dataclass(frozen=True)
class Footing:
    settings: Settings
    ca_file: str | None = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def footing(kind: str, folder: Path) -> Footing:
    """Settings whose endpoint is the same after a restart."""
    listen = "" if kind in ("unix", "shm") else f"127.0.0.1:{free_port()}"
    plain = replace(SMALL, server=ServerSettings(http="", listen=listen))
    if kind != "tls":
        return Footing(plain)
    authority = Authority(folder)
    secured = encrypted(SMALL, authority.issue("gateway"))
    return Footing(replace(secured, server=replace(secured.server, listen=listen)), str(authority.file))


@pytest.mark.parametrize("kind", KINDS)
@aio
async def test_a_connection_that_a_restart_ended_is_replaced_before_it_is_used(tmp_path: Path, kind: str) -> None:
    given = footing(kind, tmp_path)
    kept: tuple[Client, str] | None = None
    keys = keys_of(4)
    for _ in range(3):
        async with serving(given.settings, tmp_path / "gw") as served:
            wanted = UnixEndpoint if kind in ("unix", "shm") else TcpEndpoint
            endpoint = next(one for one in served.endpoints if isinstance(one, wanted))
            if kept is None:
                options = ClientOptions(shared_memory=kind == "shm")
                client = connect(
                    str(endpoint), token=served.gateway.first_token, ca_file=given.ca_file, options=options
                )
                registered = await client.register(format_of())
                await client.put(registered, keys, payloads_of(registered, 4), durability="nvme")
                kept = client, str(endpoint)
            client, known = kept
            assert str(endpoint) == known
            match = await client.match(registered, keys)
            assert (match.outcome, match.count) == (Outcome.OK, 4), match.reason
            report, found = await read(client, registered, keys)
            assert (report.outcome, found) == (Outcome.OK, payloads_of(registered, 4)), report.reason
    assert kept is not None
    await kept[0].aclose()
