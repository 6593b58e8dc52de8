"""Requests whose end could be understood in two ways."""

from __future__ import annotations

from typing import Final

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvgw.errors import Code

_BOTH: Final = frozenset({b"content-length", b"transfer-encoding"})
_SENTENCE: Final = "a request gives its length or comes in chunks, not both: two readers would see two ends of it"


class OneEnd:
    """Refuses a request with both a Content-Length and a Transfer-Encoding, and ends its connection.

    The HTTP server behind this reads its chunks; a proxy before it may believe the length. What the one takes for the
    next request would be the rest of this one for the other.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and {name.lower() for name, _ in scope["headers"]} >= _BOTH:
            error = {"error": {"code": Code.BAD_REQUEST.value, "message": _SENTENCE}}
            refusal = JSONResponse(error, status_code=400, headers={"Connection": "close"})
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)
