"""Callers, and the service itself: for whom a request counts, whether the service is ready, and its description."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from cutwater.core.access.access_requests import WhoAmI, WhoAmIRequest
from cutwater.errors import CutwaterError
from cutwater.service.http.http_problems import HttpRefusal
from cutwater.service.routes import RestCall, RestRoute, RouteAccess, get


class ServiceStatus(Struct, frozen=True):
    status: Literal["live", "ready"]


async def live(call: RestCall[None, None]) -> ServiceStatus:
    return ServiceStatus("live")


async def ready(call: RestCall[None, None]) -> ServiceStatus:
    """The cluster answers, and takes this service for what it is. Nothing else is told, not even why not."""
    try:
        await call.service.gateway.mode()
    except CutwaterError:
        raise HttpRefusal(503, "unavailable", "the service is not ready") from None
    return ServiceStatus("ready")


async def who_am_i(call: RestCall[None, None]) -> WhoAmI:
    return await call.ask(WhoAmIRequest(), WhoAmI)


async def document(call: RestCall[None, None]) -> Any:
    return call.service.document


OPEN = {"access": RouteAccess.OPEN, "tag": "service"}

ROUTES: tuple[RestRoute, ...] = (
    get("/livez", "live", "Whether the process of the service answers", live, answer=ServiceStatus, **OPEN),
    get("/readyz", "ready", "Whether the service can serve", ready, answer=ServiceStatus, **OPEN),
    get("/v1/openapi.json", "document", "This description", document, answer=bytes, **OPEN),
    get(
        "/v1/whoami",
        "who_am_i",
        "For which principal requests count",
        who_am_i,
        answer=WhoAmI,
        requests=(WhoAmIRequest,),
        tag="session",
    ),
)
