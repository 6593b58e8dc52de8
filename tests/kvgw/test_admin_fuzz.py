"""Whatever is sent to the admin API, it answers as its description says, and never with an error of its own (F01)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as hypothesis_settings
from msgspec.structs import replace
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kvgw.admin.app import build_app
from kvgw.endpoint import TcpEndpoint
from kvgw.server.serve import Serving, serving
from kvgw.settings import ServerSettings, Settings
from tests.support.admin import Admin
from tests.support.gateways import SMALL
from tests.support.postgres import Postgres
from tests.support.seaweed import S3Server
from tests.support.several import Footing

QUICK, THOROUGH = 8, 170
"""Cases of each route: in every run, and for the 5,000 of F01."""
POWERS = ["ns:read", "ns:admin", "tenant:admin", "audit:read", "metrics:read", "key:rotate", "shred", "operator"]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]


@dataclass(frozen=True)
class Target:
    """A gateway that listens, the description of its API, and a token that may ask for anything but chunks."""

    url: str
    token: str
    description: dict[str, Any]


@contextmanager
def listening_gateway(settings: Settings, folder: Path) -> Iterator[Target]:
    """A gateway in a thread of its own, so that a synchronous client can ask it."""
    ready, stop, found = threading.Event(), asyncio.Event(), []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        chosen = replace(settings, server=ServerSettings(http="127.0.0.1:0"))
        async with serving(chosen, folder) as served:
            found.append(await target_of(served))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


async def target_of(served: Serving) -> Target:
    admin = Admin(served.gateway)
    made = await admin.own("POST", "/tenants/-/tokens", {"name": "all", "permissions": POWERS})
    assert isinstance(served.http, TcpEndpoint)
    address = f"http://{served.http.host}:{served.http.port}"
    return Target(address, made["token"], build_app(served.gateway).openapi())


def fuzz(target: Target, cases: int) -> int:
    """Ask every operation with generated cases, right and wrong ones; how many there were."""
    schema = schemathesis.openapi.from_dict(target.description)
    count = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @seed(20261129)
        @hypothesis_settings(
            max_examples=cases,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            nonlocal count
            count += 1
            headers = {"Authorization": f"Bearer {target.token}"}
            case.call_and_validate(base_url=target.url, headers=headers, checks=CHECKS)

        ask()
    return count


# The fuzzer's own way of drawing, which Hypothesis frowns upon.
unusual_draws = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


@unusual_draws
@pytest.mark.timeout(300)
def test_F01_a_few_cases(tmp_path: Path) -> None:
    with listening_gateway(SMALL, tmp_path / "gw") as target:
        print(f"F01: {fuzz(target, QUICK)} cases")


@pytest.mark.slow
@unusual_draws
@pytest.mark.timeout(1500)
def test_F01_on_sqlite(tmp_path: Path) -> None:
    with listening_gateway(SMALL, tmp_path / "gw") as target:
        count = fuzz(target, THOROUGH)
    print(f"F01: {count} cases")
    assert count >= 5000


@pytest.mark.slow
@unusual_draws
@pytest.mark.postgres
@pytest.mark.s3
@pytest.mark.timeout(1500)
def test_F01_on_postgresql(postgres: Postgres, seaweed: S3Server, tmp_path: Path) -> None:
    footing = Footing(postgres, seaweed, tmp_path)
    footing.prepare()
    with listening_gateway(footing.settings(), tmp_path / "gw") as target:
        count = fuzz(target, THOROUGH)
    print(f"F01: {count} cases")
    assert count >= 5000
