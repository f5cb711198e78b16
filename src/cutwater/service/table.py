"""The whole table of routes."""

from __future__ import annotations

from cutwater.service.resources import audit, browser_sessions, callers, cluster, records
from cutwater.service.resources.jobs import (
    job_agents,
    job_changes,
    job_output,
    job_programs,
    job_questions,
    savepoints,
)
from cutwater.service.routes import RestRoute

ROUTES: tuple[RestRoute, ...] = (
    *callers.ROUTES,
    *browser_sessions.ROUTES,
    *cluster.ROUTES,
    *records.ROUTES,
    *audit.ROUTES,
    *job_questions.ROUTES,
    *job_changes.ROUTES,
    *job_output.ROUTES,
    *savepoints.ROUTES,
    *job_programs.ROUTES,
    *job_agents.ROUTES,
)
