"""Sends the requests of an agent to the cluster, and turns what comes of them into events."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from cutwater.agent import agent_events as e
from cutwater.agent.processes.watchdog import now_ms
from cutwater.client.cluster.metadata_client import Repository
from cutwater.core.jobs import job_requests as r
from cutwater.core.jobs.operations import OperationError
from cutwater.errors import CutwaterError, Fenced, LeaderFenced, NotFound

_log = logging.getLogger(__name__)

FIND_MS = 5_000
FIND_AGAIN_SECONDS = 0.5
_ANSWERS: dict[type[Any], Any] = {
    r.RegisterAgentRequest: r.AgentLease,
    r.RenewAgentRequest: r.AgentLease,
    r.WatchAgentRequest: r.AgentOrders,
    r.FetchAssignedRequest: r.AssignedJob,
}
"""The answers of those requests that get another one than ``ReportNoted``."""


class ClusterCalls:
    """See the module. Every call ends within its time."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def ask(self, request: e.AgentRequest, timeout_ms: int) -> e.AgentEvent:
        """Ask, and return what came of it."""
        sent_ms = now_ms()
        expected = _ANSWERS.get(type(request), r.ReportNoted)
        try:
            answer = await self._repository.ask(request, expected, timeout_ms=timeout_ms)
        except CutwaterError as error:
            return _not_answered(request, error)
        except Exception as error:
            _log.exception("%s failed", type(request).__name__)
            return e.RequestUnanswered(request, f"{type(error).__name__}: {error}")
        return e.RequestAnswered(request, answer, sent_ms)

    async def find_session(self, name: str, session: int) -> e.AgentEvent:
        """Find out whether another session than this one has the name. Asks until there is an answer."""
        while True:
            try:
                found = await self._repository.ask(r.ListAgentsRequest(name), r.AgentList, timeout_ms=FIND_MS)
            except NotFound:
                return e.NameFree()
            except Exception as error:
                # Until there is an answer, the agent does not register anew.
                is_bug = not isinstance(error, CutwaterError)
                _log.warning("it cannot be found out who runs as agent %r: %s", name, error, exc_info=is_bug)
                await asyncio.sleep(FIND_AGAIN_SECONDS)
                continue
            for one in found.agents:
                if one.agent.name == name and one.agent.is_alive and one.agent.session != session:
                    return e.NameTaken(one.agent.description.host)
            return e.NameFree()


def _not_answered(request: e.AgentRequest, error: CutwaterError) -> e.AgentEvent:
    told = f"{error.code}: {error.message}"
    if error.retriable or isinstance(error, LeaderFenced):
        _log.info("%s was not answered: %s", type(request).__name__, told)
        return e.RequestUnanswered(request, told)
    _log.info("%s was refused: %s", type(request).__name__, told)
    return e.RequestRefused(request, OperationError(error.code, error.message), isinstance(error, Fenced))
