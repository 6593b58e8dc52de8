"""TLS on the data plane: who is believed, what others are told, certificates that are renewed; and plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
import stat
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from kvgw.client import Client, ClientOptions, connect
from kvgw.endpoint import TcpEndpoint
from kvgw.errors import FormatError, Outage
from kvgw.model import PutOutcome
from kvgw.server.listeners import tcp_endpoint
from kvgw.server.serve import serving
from kvgw.settings import ServerSettings, SettingsError, StagingSettings
from kvgw.tls import ServerCertificate, client_context
from tests.support.aio import aio
from tests.support.encrypted import encrypted, tls_house
from tests.support.gateways import MIB, SMALL, format_of, house, keys_of, payloads_of, read, until
from tests.support.tls import Authority

BOUND_S = 5.0
"""No refusal may take longer."""


def client_of(endpoint: str, authority: Authority | None, token: str = "", deadline_s: float = 20.0) -> Client:
    options = ClientOptions(read_deadline_s=deadline_s, write_deadline_s=deadline_s)
    return connect(endpoint, token=token or None, ca_file=str(authority.file) if authority else None, options=options)


async def refusal(client: Client) -> str:
    """The sentence of the outage that a call ends in, in bounded time."""
    started = time.monotonic()
    async with client:
        with pytest.raises(Outage) as outage:
            await client.stat()
    assert time.monotonic() - started < BOUND_S
    return str(outage.value)


@aio
async def test_large_chunks_go_round_and_many_at_once(tmp_path: Path) -> None:
    roomy = replace(SMALL, staging=StagingSettings(bytes=96 * MIB, tenants=1))
    async with tls_house(tmp_path / "gw", settings=roomy) as gateway:
        client = gateway.client()
        registered = await client.register(format_of(5 * MIB))
        keys, payloads = keys_of(3), payloads_of(registered, 3)
        payloads[1] = bytes(range(256)) * (5 * MIB // 256)
        assert (await client.put(registered, keys[:2], payloads[:2])).outcomes == (PutOutcome.STORED,) * 2
        results = await asyncio.gather(*(read(gateway.client(), registered, keys) for _ in range(4)))
        assert all(found == [*payloads[:2], None] for _, found in results), "law 3: exactly what was put"
        with socket.create_connection(("127.0.0.1", gateway.endpoint.port)) as raw:  # type: ignore[union-attr]
            trusting = client_context(gateway.authority)
            with await asyncio.to_thread(trusting.wrap_socket, raw, server_hostname="127.0.0.1") as inside:
                assert inside.version() == "TLSv1.3"


# N12


@contextlib.asynccontextmanager
async def gateway_with(folder: Path, files: tuple[Path, Path]) -> AsyncIterator[tuple[TcpEndpoint, str]]:
    async with serving(encrypted(SMALL, files), folder / "gw") as served:
        endpoint = next(one for one in served.endpoints if isinstance(one, TcpEndpoint))
        yield endpoint, served.gateway.first_token or ""


@aio
async def test_N12_a_gateway_that_is_not_who_it_should_be_is_refused_with_the_reason(tmp_path: Path) -> None:
    authority, foreign = Authority(tmp_path), Authority(tmp_path, "foreign")
    for files, trusted, reason in (
        (authority.issue("expired", expired=True), authority, "certificate has expired"),
        (authority.issue("other-address", addresses=("127.0.0.2",)), authority, "IP address mismatch"),
        (authority.issue("other-name", addresses=(), hosts=("kvgw.example",)), authority, "mismatch"),
        (foreign.issue("unknown"), authority, "unable to get local issuer certificate"),
        (authority.issue("good"), None, "unable to get local issuer certificate"),
    ):
        async with gateway_with(tmp_path / files[0].stem, files) as (endpoint, token):
            said = await refusal(client_of(str(endpoint), trusted, token))
            assert reason in said, said
            assert str(endpoint) in said


@aio
async def test_N12_a_host_name_is_checked_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with gateway_with(tmp_path, authority.issue("named", addresses=(), hosts=("localhost",))) as (
        endpoint,
        token,
    ):
        by_name = f"tls:localhost:{endpoint.port}"
        async with client_of(by_name, authority, token) as client:
            assert (await client.stat()).entries == 0
        assert "mismatch" in await refusal(client_of(str(endpoint), authority, token))


@aio
async def test_every_address_of_a_name_is_tried(tmp_path: Path) -> None:
    """A name often stands for ::1 too, where no gateway listens."""
    async with house("tcp", tmp_path / "gw") as gateway:
        assert isinstance(gateway.endpoint, TcpEndpoint)
        port = gateway.endpoint.port
        stream = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        found: list[Any] = [(socket.AF_INET, *stream, (address, port)) for address in ("127.0.0.9", "127.0.0.1")]

        async def resolve(*_: object, **__: object) -> list[Any]:
            return found

        with mock.patch.object(asyncio.get_running_loop(), "getaddrinfo", resolve):
            async with client_of(f"tcp:both.example:{port}", None, gateway.token) as client:
                assert (await client.stat()).entries == 0
            found.pop()
            assert "no gateway answers at tcp:both.example" in await refusal(
                client_of(f"tcp:both.example:{port}", None)
            )


@contextlib.contextmanager
def old_peer(files: tuple[Path, Path]) -> Iterator[int]:
    """A server that speaks TLS 1.1 at most; its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with contextlib.suppress(OSError), context.wrap_socket(peer, server_side=True) as inside:
                    inside.recv(1)
                peer.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


@aio
async def test_N12_tls_1_1_is_refused_by_both_sides(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("gateway")
    with old_peer(files) as port:
        said = await refusal(client_of(f"tls:127.0.0.1:{port}", authority))
        assert "TLS handshake" in said
        assert "VERSION" in said.upper()
    async with gateway_with(tmp_path, files) as (endpoint, token):
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(authority.file)
        old.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1

        def try_old() -> None:
            with socket.create_connection((endpoint.host, endpoint.port), timeout=BOUND_S) as raw:
                old.wrap_socket(raw, server_hostname="127.0.0.1")

        with pytest.raises(ssl.SSLError, match=r"(?i)version|protocol|alert"):
            await asyncio.to_thread(try_old)
        async with client_of(str(endpoint), authority, token) as client:
            await client.stat()


@aio
async def test_peers_that_disagree_about_encryption_part_at_once_and_say_why(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with gateway_with(tmp_path, authority.issue("gateway")) as (endpoint, token):
        said = await refusal(client_of(f"tcp:{endpoint.host}:{endpoint.port}", None, token))
        assert "tls" in said.lower() or "welcome" in said, said
        async with client_of(str(endpoint), authority, token) as client:
            await client.stat()
    async with house("tcp", tmp_path / "plain") as plain:
        assert isinstance(plain.endpoint, TcpEndpoint)
        said = await refusal(client_of(f"tls:127.0.0.1:{plain.endpoint.port}", authority, plain.token))
        assert "failed in the TLS handshake" in said
        assert (await plain.client().stat()).entries == 0, "and the gateway goes on"


@aio
async def test_a_peer_that_never_finishes_its_handshake_costs_the_caller_its_deadline(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = client_of(f"tls:127.0.0.1:{silent.getsockname()[1]}", authority, deadline_s=0.3)
        assert "deadline of 0.3 s" in await refusal(client)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert "no gateway answers at tls:127.0.0.1" in await refusal(client_of(f"tls:127.0.0.1:{port}", authority))


@aio
async def test_a_connection_that_is_cut_inside_tls_is_an_outage(tmp_path: Path) -> None:
    async with tls_house(tmp_path / "gw", check=False) as gateway:
        client = gateway.client()
        registered = await client.register(format_of())
        stream = client._transport._free[0].stream  # type: ignore[attr-defined]
        call = asyncio.create_task(client.wait(registered, keys_of(1), deadline_s=BOUND_S))
        await until(lambda: not client._transport._free)  # type: ignore[attr-defined]
        stream._channel._plain._socket.shutdown(socket.SHUT_RDWR)
        match = await call
        assert (match.count, match.outcome.value) == (0, "outage")
        assert (await client.match(registered, keys_of(1))).outcome.value == "ok", "the next connection is a new one"


# Renewal


def serial_of(endpoint: TcpEndpoint, authority: Authority) -> int:
    context = client_context(str(authority.file))
    with (
        socket.create_connection((endpoint.host, endpoint.port), timeout=BOUND_S) as raw,
        context.wrap_socket(raw, server_hostname=endpoint.host) as inside,
    ):
        certificate = inside.getpeercert()
    assert certificate is not None
    return int(str(certificate["serialNumber"]), 16)


@aio
async def test_a_renewed_certificate_is_used_by_the_next_connection_and_broken_files_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("in-use")
    async with gateway_with(tmp_path, (certificate, key)) as (endpoint, token):
        async with client_of(str(endpoint), authority, token) as lasting:
            await lasting.stat()
            first = await asyncio.to_thread(serial_of, endpoint, authority)
            newer = authority.issue("newer")
            with caplog.at_level(logging.WARNING, "kvgw.tls"):
                shutil.copy(newer[0], certificate)  # half way: the new certificate with the old key
                assert await asyncio.to_thread(serial_of, endpoint, authority) == first
                for broken in (b"", b"-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n"):
                    certificate.write_bytes(broken)
                    assert await asyncio.to_thread(serial_of, endpoint, authority) == first
                certificate.unlink()
                assert await asyncio.to_thread(serial_of, endpoint, authority) == first
                told = len(caplog.records)
                assert told >= 3
                assert await asyncio.to_thread(serial_of, endpoint, authority) == first
                assert len(caplog.records) == told, "a state is told once, not for every connection"
            assert all("the one before stays" in record.message for record in caplog.records)
            shutil.copy(newer[0], certificate)
            shutil.copy(newer[1], key)
            second = await asyncio.to_thread(serial_of, endpoint, authority)
            assert second != first
            await lasting.stat()
        async with client_of(str(endpoint), authority, token) as client:
            await client.stat()


def test_files_that_are_no_pair_stop_the_start_with_their_settings(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")
    locked = authority.issue("locked", passphrase=b"secret")
    for files in ((one[0], other[1]), (one[0], tmp_path / "missing"), (one[1], one[0]), locked):
        with pytest.raises(FormatError, match=r"no usable certificate and key.*server\.tls_cert_file"):
            ServerCertificate(*files)
    with pytest.raises(FormatError, match="authority file '/nowhere' cannot be used"):
        client_context("/nowhere")


@aio
async def test_a_certificate_without_its_key_stops_the_start(tmp_path: Path) -> None:
    certificate, key = map(str, Authority(tmp_path).issue("gateway"))
    for half in (ServerSettings(http="", tls_cert_file=certificate), ServerSettings(http="", tls_key_file=key)):
        with pytest.raises(SettingsError, match=r"tls_cert_file and server\.tls_key_file go together"):
            async with serving(replace(SMALL, server=half), tmp_path / "gw"):
                pass


# In the clear


def test_no_plaintext_beyond_this_host_unless_it_was_said() -> None:
    for address in ("0.0.0.0:0", "[::]:0", "10.0.0.1:8470", "kvgw.example:8470", "127.0.0.1.example:1"):
        with pytest.raises(SettingsError, match=r"in the clear; set server\.tls_cert_file.*allow_plaintext = true"):
            tcp_endpoint(address, allow_plaintext=False)
        assert not tcp_endpoint(address, allow_plaintext=True).encrypted
        assert tcp_endpoint(address, allow_plaintext=False, encrypted=True).encrypted
    for address in ("127.0.0.1:0", "127.9.9.9:1", "[::1]:8470", "localhost:8470"):
        assert not tcp_endpoint(address, allow_plaintext=False).encrypted


@aio
async def test_a_gateway_told_to_listen_everywhere_in_the_clear_does_not_start(tmp_path: Path) -> None:
    for address in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(SettingsError, match="in the clear"):
            async with serving(replace(SMALL, server=ServerSettings(http="", listen=address)), tmp_path / "gw"):
                pass


@aio
async def test_the_unix_socket_is_its_users_alone(tmp_path: Path) -> None:
    async with house("unix", tmp_path / "gw") as gateway:
        await gateway.client().stat()
        path = tmp_path / "gw" / "kvgw.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert not path.exists(), "it goes with its gateway"
