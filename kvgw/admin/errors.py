"""Errors as answers over HTTP: a status, a code and a sentence; never a trace, never a value that was sent."""

from __future__ import annotations

import logging
import math
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from kvgw.errors import Code, KvgwError
from kvgw.gateway.translate import translate
from storage.errors import StorageError
from tenancy.errors import PermissionMissing, TenancyError

log = logging.getLogger("kvgw.admin")

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


class ErrorDetail(BaseModel):
    """Why a request failed."""

    code: str
    message: str


class ErrorAnswer(BaseModel):
    """What every failure looks like."""

    error: ErrorDetail


RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorAnswer, "description": why}
    for status, why in (
        (400, "The request cannot be right; the sentence names the value."),
        (401, "No valid credential."),
        (403, "The credential lacks the permission."),
        (404, "It does not exist, or the credential may not use it: both look alike."),
        (413, "The body is too large."),
        (422, "A field is missing, unknown, or out of its bounds."),
        (429, "Too many requests; Retry-After says when to come again."),
        (503, "Something behind the gateway does not answer; Retry-After says when to come again."),
    )
}
"""For the OpenAPI description: what any route may answer besides its own."""

AS_JSON: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": told["description"], "content": {"application/json": {}}}
    for status, told in RESPONSES.items()
}
"""The same for a route whose own answers are not JSON."""

NOT_READY: Final[dict[int | str, dict[str, Any]]] = {503: {"description": "Not ready to serve."}}


def handle_errors(app: FastAPI) -> None:
    """Give the application this module's answers."""
    for kind in (KvgwError, StorageError, TenancyError):
        app.add_exception_handler(kind, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _unserved)
    app.add_exception_handler(Exception, _unforeseen)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    """One of ours, as an answer: its code and its sentence."""
    if isinstance(error, PermissionMissing):  # says nothing about what there is: only about the credential
        return _answer(403, Code.NOT_FOUND, str(error), {})
    ours = translate(error) if isinstance(error, (StorageError, TenancyError)) else error
    assert isinstance(ours, KvgwError)
    headers = {"Retry-After": str(max(1, math.ceil(ours.retry_after_s)))} if ours.retryable else {}
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


async def _unforeseen(_: Request, error: Exception) -> JSONResponse:
    """A bug of ours: its trace is for the operator, not for the client."""
    log.error("an admin request failed in an unforeseen way", exc_info=error)
    return _answer(500, Code.INTERNAL, "the gateway failed in an unforeseen way; see its log", {})


def _answer(status: int, code: Code, sentence: str, headers: dict[str, str]) -> JSONResponse:
    return JSONResponse({"error": {"code": code.value, "message": sentence}}, status_code=status, headers=headers)
