"""The admin API of a gateway in this process, asked as whoever a test wants to be."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from kvgw.admin.app import build_app
from kvgw.admin.seat import PEER_UID
from kvgw.wiring import Opened

FILLED_IN = {"tenant": "-", "namespace": "default", "token_id": "a" * 16}
"""What stands for a path's parameters unless a test says otherwise."""


@dataclass
class Admin:
    """Asks as the gateway's own user, or with a token."""

    opened: Opened
    application: Any = field(init=False)

    def __post_init__(self) -> None:
        self.application = build_app(self.opened)

    def routes(self) -> list[tuple[str, str]]:
        """Every route that the application serves: method and path."""
        paths = self.application.openapi()["paths"]
        return [(method.upper(), path) for path, methods in sorted(paths.items()) for method in sorted(methods)]

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = None,
        peer: int | None = None,
        raw: bytes | None = None,
        query: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx2.Response:
        """One answer; `peer` None is a connection that is no Unix socket."""

        async def application(scope: Any, receive: Any, send: Any) -> None:
            state = {} if peer is None else {PEER_UID: peer}
            await self.application({**scope, "state": state}, receive, send)

        sent = dict(headers or {})
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        transport = httpx2.ASGITransport(application, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://kvgw") as client:
            given: dict[str, Any] = {"content": raw} if raw is not None else {"json": body}
            if raw is None and body is None:
                given = {}
            return await client.request(method, path, params=query, headers=sent, **given)

    async def own(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        """The decoded answer to the gateway's own user, which must be a success."""
        answer = await self.ask(method, f"/v1{path}", body, peer=os.geteuid(), **more)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json()


@asynccontextmanager
async def asking(opened: Opened) -> AsyncIterator[Admin]:
    """The admin API of an opened gateway."""
    yield Admin(opened)
