"""The HTTP application of one gateway: every route but `OPEN_ROUTES` needs a credential."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

import kvgw
from kvgw.admin import audit, deletions, explain, fsck, keys, namespaces, scrub, tenants, tokens, upkeep, usage
from kvgw.admin.errors import AS_JSON, NOT_READY, RESPONSES, handle_errors
from kvgw.admin.framing import OneEnd
from kvgw.admin.seat import Seated
from kvgw.wiring import Opened
from tenancy.access import Permission

OPEN_ROUTES: Final = frozenset({"/livez", "/readyz"})
"""The only routes that need no credential: they tell a prober nothing but yes or no."""


async def _livez() -> PlainTextResponse:
    return PlainTextResponse("ok\n")


async def _readyz(request: Request) -> JSONResponse:
    ready = await request.app.state.gateway.gateway.ready()
    return JSONResponse({"ready": ready}, status_code=200 if ready else 503)


async def _metrics(seat: Seated) -> Response:
    seat.require(Permission.METRICS)
    seat.opened.refresh_gauges()
    return Response(seat.opened.rooms.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _openapi(seat: Seated, request: Request) -> JSONResponse:
    """The description of this API."""
    seat.require(Permission.READ)
    return JSONResponse(request.app.openapi())


def build_app(gateway: Opened) -> FastAPI:
    """The application of one opened gateway."""
    app = FastAPI(title="kvgw", version=kvgw.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gateway = gateway
    handle_errors(app)
    app.add_middleware(OneEnd)
    app.add_api_route("/livez", _livez, methods=["GET"], response_class=PlainTextResponse)
    app.add_api_route("/readyz", _readyz, methods=["GET"], response_model=None, responses=NOT_READY)
    app.add_api_route("/metrics", _metrics, methods=["GET"], response_class=PlainTextResponse, responses=AS_JSON)
    for subject in (audit, usage, explain, tenants, namespaces, tokens, keys, deletions, upkeep, fsck, scrub):
        app.include_router(subject.router, prefix="/v1", responses=RESPONSES)
    app.add_api_route("/v1/openapi.json", _openapi, methods=["GET"], response_model=None, responses=RESPONSES)
    return app
