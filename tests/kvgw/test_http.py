"""Health and metrics over HTTP: open to probers, closed to everybody else, and readable by Prometheus."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from kvgw.admin.app import OPEN_ROUTES, build_app
from kvgw.endpoint import TcpEndpoint, UnixEndpoint
from kvgw.server.serve import Serving, serving
from kvgw.settings import ServerSettings, SettingsError
from tenancy.access import Permission
from tenancy.errors import CatalogUnavailable
from tests.support.aio import aio, run
from tests.support.gateways import SMALL, House, format_of, keys_of, payloads_of, read, world_of
from tests.support.manual_clock import ManualClock

WITH_HTTP = replace(SMALL, server=ServerSettings(http="127.0.0.1:0"))


@dataclass
class Answered:
    status: int
    headers: dict[str, str]
    body: str


async def ask(served: Serving, path: str, token: str | None = None, method: str = "GET", raw: bytes = b"") -> Answered:
    assert isinstance(served.http, TcpEndpoint)
    reader, writer = await asyncio.open_connection(served.http.host, served.http.port)
    bearer = f"Authorization: Bearer {token}\r\n" if token is not None else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{bearer}Connection: close\r\n\r\n"
    writer.write(raw or head.encode("latin-1"))
    head_text, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    status, *lines = head_text.split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Answered(int(status.split()[1]), headers, body)


@asynccontextmanager
async def gateway(folder: Path, clock: ManualClock | None = None) -> AsyncIterator[tuple[Serving, House]]:
    async with serving(WITH_HTTP, folder, world=world_of(clock)) as served:
        endpoint = next(one for one in served.endpoints if isinstance(one, UnixEndpoint))
        house = House(served.gateway, "unix", endpoint, served.gateway.first_token or "", clock)
        try:
            yield served, house
        finally:
            await house.aclose()


@aio
async def test_probes_are_answered_to_anybody_and_tell_nothing(tmp_path: Path) -> None:
    async with gateway(tmp_path / "gw") as (served, _):
        for path, body in (("/livez", "ok\n"), ("/readyz", '{"ready":true}')):
            answer = await ask(served, path)
            assert (answer.status, answer.body) == (200, body)
        catalog = type(served.gateway.rooms.catalog)
        with mock.patch.object(catalog, "high_water_ms", side_effect=CatalogUnavailable("secret reason")):
            answer = await ask(served, "/readyz")
            assert answer.status == 503
            assert "secret" not in answer.body
            assert (await ask(served, "/livez")).status == 200, "alive, though not ready"


@aio
async def test_I02_every_other_route_needs_a_token_with_its_permission(tmp_path: Path) -> None:
    clock = ManualClock()
    async with gateway(tmp_path / "gw", clock) as (served, house):
        paths = set(build_app(served.gateway).openapi()["paths"])
        assert paths >= OPEN_ROUTES | {"/metrics"}
        routes = {path for path in paths if not path.startswith("/v1/")}  # those: tests/kvgw/test_admin_access.py
        blind, _ = await house.new_token(frozenset(Permission) - {Permission.METRICS})
        seeing, seeing_id = await house.new_token(frozenset({Permission.METRICS}))
        expired, _ = await house.new_token(expires_ms=clock.now_ms())
        mistyped = seeing[:-1] + ("y" if seeing.endswith("x") else "x")
        for path in routes - OPEN_ROUTES:
            for token in (None, "", "kvgw_", "x" * 4096, mistyped, expired):
                answer = await ask(served, path, token)
                assert answer.status == 401, f"{path} with {token!r:.20}"
                assert answer.headers["www-authenticate"] == "Bearer"
            assert (await ask(served, path, blind)).status == 403
            assert (await ask(served, path, seeing)).status == 200
        await served.gateway.rooms.catalog.revoke_token(house.owner.tenant, seeing_id, clock.now_ms())
        clock.advance(5)
        assert (await ask(served, "/metrics", seeing)).status == 401, "I18"
        with mock.patch.object(type(served.gateway.rooms.catalog), "token", side_effect=CatalogUnavailable("away")):
            answer = await ask(served, "/metrics", blind)
            assert (answer.status, "retry-after" in answer.headers) == (503, True), "Q12"


@aio
async def test_what_is_not_served_is_not_found(tmp_path: Path) -> None:
    async with gateway(tmp_path / "gw") as (served, _):
        for path in (
            "/",
            "/docs",
            "/redoc",
            "/openapi.json",
            "/metrics/",
            "/livez/../metrics",
            "/%2e%2e/keys/root.key",
        ):
            assert (await ask(served, path)).status in (401, 404, 307), path
        for method in ("POST", "DELETE", "PUT"):
            assert (await ask(served, "/metrics", method=method)).status in (401, 405)
        assert (await ask(served, "", raw=b"\x00\x01garbage\r\n\r\n")).status == 400
        assert (await ask(served, "/livez")).status == 200


@aio
async def test_metrics_are_valid_and_say_what_happened(tmp_path: Path) -> None:
    async with gateway(tmp_path / "gw") as (served, house):
        client = house.client()
        registered = await client.register(format_of())
        await client.put(registered, keys_of(3), payloads_of(registered, 3))
        await read(client, registered, keys_of(4))
        await client.match(registered, keys_of(4))
        answer = await ask(served, "/metrics", house.token)
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        samples = lint(answer.body)
        assert samples["kvgw_requests_total", (("code", "ok"), ("op", "put"))] == 1
        assert samples["kvgw_get_chunks_total", (("outcome", "hit"),)] == 3
        assert samples["kvgw_get_chunks_total", (("outcome", "miss"),)] == 1
        assert samples["kvgw_match_keys_total", (("outcome", "hit"),)] == 3
        assert samples["kvgw_put_bytes_total", ()] == 3 * 4096
        assert samples["kvgw_connections", ()] == 1
        assert sum(value for (name, _), value in samples.items() if name == "kvgw_staging_bytes") > 10 * 2**20


@aio
async def test_F10_no_name_of_a_client_becomes_a_series(tmp_path: Path) -> None:
    async with gateway(tmp_path / "gw") as (served, house):
        lint((await ask(served, "/metrics", house.token)).body)

        async def series() -> int:
            return len(lint((await ask(served, "/metrics", house.token)).body))

        async def traffic(start: int) -> None:
            for number in range(start, start + 30):
                with_name = house.client(f"n{number}\n\u202e")
                report = await asyncio.gather(with_name.register(format_of()), return_exceptions=True)
                assert isinstance(report[0], Exception)
                await house.namespace(f"n{number}")
                await house.client(f"n{number}").register(format_of())

        await traffic(0)
        crew = served.gateway.crew
        for job in (crew.heartbeat, crew.drain_everywhere, crew.sweep_everywhere, crew.evict, crew.look_for_orphans):
            await job()  # series of maintenance are there from its first turn
        before = await series()
        await traffic(30)
        assert await series() == before, "R69: the number of series does not grow with names"


def lint(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Parse an exposition as Prometheus does, and look for what its linter complains about."""
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    families = list(text_string_to_metric_families(text))
    assert text.endswith("\n")
    assert [name for name, count in Counter(one.name for one in families).items() if count > 1] == []
    for family in families:
        assert family.name.startswith("kvgw_"), family.name
        assert family.documentation.endswith("."), f"{family.name} has no sentence"
        assert family.type != "unknown", family.name
        for sample in family.samples:
            identity = (sample.name, tuple(sorted(sample.labels.items())))
            assert identity not in samples, f"{identity} comes twice"
            assert not math.isnan(sample.value)
            samples[identity] = sample.value
    return samples


@aio
async def test_F07_listeners_after_start(tmp_path: Path) -> None:
    def listeners() -> set[tuple[str, int]]:
        found = psutil.Process(os.getpid()).net_connections("inet")
        return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}

    def unix_paths() -> set[str]:
        return {one.laddr for one in psutil.Process(os.getpid()).net_connections("unix") if one.laddr}

    before, paths = listeners(), unix_paths()
    server = ServerSettings(http="127.0.0.1:0", listen="127.0.0.1:0")
    async with serving(replace(SMALL, server=server), tmp_path / "gw") as served:
        assert isinstance(served.http, TcpEndpoint)
        configured = {(one.host, one.port) for one in (*served.endpoints, served.http) if isinstance(one, TcpEndpoint)}
        assert len(configured) == 2
        assert listeners() - before == configured, "F07: what is configured, and nothing else"
        assert unix_paths() - paths == {str(tmp_path / "gw" / name) for name in ("kvgw.sock", "admin.sock")}
        assert not [address for address, _ in listeners() - before if address in ("0.0.0.0", "::")]
    assert listeners() <= before
    async with serving(SMALL, tmp_path / "gw"):
        assert listeners() <= before, "with no TCP address configured there is no TCP listener"


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        async def start(server: ServerSettings) -> None:
            async with serving(replace(SMALL, server=server), tmp_path / "gw"):
                pytest.fail("it started")

        for server in (ServerSettings(http=address), ServerSettings(http="", listen=address)):
            with pytest.raises(SettingsError, match=address):
                run(start(server))
