"""The whole table of routes."""

from __future__ import annotations

from cutwater.service.resources import audit, callers, cluster, records
from cutwater.service.routes import RestRoute

ROUTES: tuple[RestRoute, ...] = (
    *callers.ROUTES,
    *cluster.ROUTES,
    *records.ROUTES,
    *audit.ROUTES,
)
