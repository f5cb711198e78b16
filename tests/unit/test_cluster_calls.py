"""The requests of an agent, and what comes of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cutwater.agent import agent_events as e
from cutwater.agent import cluster_calls
from cutwater.agent.cluster_calls import ClusterCalls
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.agents import AgentRecord
from cutwater.errors import CutwaterError, Fenced, Refused, Unavailable
from tests.unit.job_kit import agent

RENEW = q.RenewAgentRequest("a", 1)


class Answers:
    """Answers as told, one after another. An exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)

    async def ask(self, request: object, expected: type[Any], *, timeout_ms: int) -> Any:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def calls(*answers: Any) -> ClusterCalls:
    return ClusterCalls(Answers(*answers))  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", [Unavailable("no leader"), Refused("no right"), RuntimeError("a bug")])
def test_whoever_has_the_name_is_asked_for_until_there_is_an_answer(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the agent would never register anew."""
    monkeypatch.setattr(cluster_calls, "FIND_AGAIN_SECONDS", 0)
    other = q.AgentList((q.AgentSummary(AgentRecord(agent("a"), 2)),))
    assert asyncio.run(calls(failure, other).find_session("a", 1)) == e.NameTaken("")
    assert asyncio.run(calls(failure, other).find_session("a", 2)) == e.NameFree()


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (Unavailable("no leader"), e.RequestUnanswered),
        (RuntimeError("a bug"), e.RequestUnanswered),
        (Refused("no right"), e.RequestRefused),
        (Fenced("another session"), e.RequestRefused),
    ],
)
def test_what_came_of_a_request(failure: Exception, told: type[Any]) -> None:
    event = asyncio.run(calls(failure).ask(RENEW, 1_000))
    assert isinstance(event, told)
    if isinstance(event, e.RequestRefused):
        assert event.is_session_over is isinstance(failure, Fenced)
        assert isinstance(failure, CutwaterError)
        assert event.error.code == failure.code
