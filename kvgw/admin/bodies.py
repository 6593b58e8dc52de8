"""Bodies of admin requests: bounded, and read strictly: no unknown field, no field twice, no number in quotes."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Final, TypeAlias

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.types import Message, Receive

from kvgw.durations import duration_ms
from kvgw.errors import Code, FormatError, RequestRefused
from tenancy.schema import UNLIMITED

BODY_BYTES_MAX: Final = 64 * 1024


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _a_duration(text: str) -> str:
    try:
        duration_ms(text)
    except FormatError as error:
        raise ValueError(str(error)) from error
    return text


Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=64)]
Duration: TypeAlias = Annotated[str, Field(max_length=16, examples=["1h"]), AfterValidator(_a_duration)]
Limit: TypeAlias = Annotated[int, Field(ge=0, le=UNLIMITED, description="0: none of its own.")]
Rate: TypeAlias = Annotated[int, Field(ge=0, le=10**6, description="0: none of its own.")]


class StrictRoute(APIRoute):
    """A route whose body is bounded, and whose JSON names no field twice: of two tenants, which would be meant?"""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            raw = await _bounded(request)
            if raw:
                _check_json(raw)
            return await handler(Request(request.scope, _replayed(raw)))

        return strict


async def _bounded(request: Request) -> bytes:
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > BODY_BYTES_MAX:
            raise RequestRefused(f"the body is larger than {BODY_BYTES_MAX} bytes", Code.TOO_LARGE)
    return bytes(raw)


def _check_json(raw: bytes) -> None:
    try:
        json.loads(raw, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not the JSON that is wanted: {str(error)[:200]}") from error


def _replayed(raw: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": raw, "more_body": False}

    return receive


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field is named twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number here")
