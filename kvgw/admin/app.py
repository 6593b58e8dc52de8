"""The HTTP application of one gateway: every route but `OPEN_ROUTES` needs a credential."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

import kvgw
from kvgw.admin import namespaces, tenants, tokens
from kvgw.admin.seat import Seated
from kvgw.errors import Code, KvgwError
from kvgw.gateway.translate import translate
from kvgw.wiring import Opened
from storage.errors import StorageError
from tenancy.access import Permission
from tenancy.errors import PermissionMissing, TenancyError

OPEN_ROUTES: Final = frozenset({"/livez", "/readyz"})
"""The only routes that need no credential: they tell a prober nothing but yes or no."""

_STATUS: Final = {
    Code.UNAUTHENTICATED: 401,
    Code.NOT_FOUND: 404,
    Code.FORMAT_UNKNOWN: 404,
    Code.TOO_LARGE: 413,
    Code.TOO_MANY_KEYS: 413,
    Code.BUSY: 429,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE: 503,
    Code.INTERNAL: 500,
}
"""What is not named is the caller's mistake: 400."""


async def _livez() -> PlainTextResponse:
    return PlainTextResponse("ok\n")


async def _readyz(request: Request) -> JSONResponse:
    ready = await request.app.state.gateway.gateway.ready()
    return JSONResponse({"ready": ready}, status_code=200 if ready else 503)


async def _metrics(seat: Seated) -> Response:
    seat.require(Permission.METRICS)
    seat.opened.refresh_gauges()
    return Response(seat.opened.rooms.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _refused(_: Request, error: Exception) -> JSONResponse:
    """One of ours, as an answer: its code and its sentence."""
    if isinstance(error, PermissionMissing):  # says nothing about what there is: only about the credential
        return _answer(403, Code.NOT_FOUND, str(error), {})
    ours = translate(error) if isinstance(error, (StorageError, TenancyError)) else error
    assert isinstance(ours, KvgwError)
    headers = {"Retry-After": "1"} if ours.retryable else {}
    if ours.code is Code.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    return _answer(_STATUS.get(ours.code, 400), ours.code, str(ours), headers)


async def _malformed(_: Request, error: Exception) -> JSONResponse:
    """A body, path or query that does not fit: which field and why, without echoing its value."""
    assert isinstance(error, RequestValidationError)
    told = [
        f"{'.'.join(map(str, one['loc'][1:])) or 'body'}: {one['msg'].removeprefix('Value error, ')}"
        for one in error.errors()[:8]
    ]
    return _answer(422, Code.BAD_REQUEST, "; ".join(told), {})


async def _unserved(_: Request, error: Exception) -> JSONResponse:
    """No such route, or not with this method."""
    assert isinstance(error, HTTPException)
    code = Code.NOT_FOUND if error.status_code == 404 else Code.BAD_REQUEST
    return _answer(error.status_code, code, str(error.detail), dict(error.headers or {}))


def _answer(status: int, code: Code, sentence: str, headers: dict[str, str]) -> JSONResponse:
    return JSONResponse({"error": {"code": code.value, "message": sentence}}, status_code=status, headers=headers)


def build_app(gateway: Opened) -> FastAPI:
    """The application of one opened gateway."""
    app = FastAPI(title="kvgw", version=kvgw.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gateway = gateway
    for kind in (KvgwError, StorageError, TenancyError):
        app.add_exception_handler(kind, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _unserved)
    for path, route in (("/livez", _livez), ("/readyz", _readyz), ("/metrics", _metrics)):
        app.add_api_route(path, route, methods=["GET"], response_model=None)
    for subject in (tenants, namespaces, tokens):
        app.include_router(subject.router, prefix="/v1")
    return app
