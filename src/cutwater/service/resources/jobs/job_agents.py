"""Agents: which there are, and what operators ask of them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from cutwater.admin.jobs import JobCalls
from cutwater.core.jobs import job_requests as q
from cutwater.service.resources.jobs.job_views import JOB_IN_PATH, AgentView, view_agent
from cutwater.service.resources.paging import PageQuery, page_of
from cutwater.service.routes import Page, RestCall, RestRoute, delete, get, post


class ForgottenAgent(Struct, frozen=True):
    removed: str


async def agents(call: RestCall[PageQuery, None]) -> Page[AgentView]:
    found = await JobCalls(call.ask).agents()
    return page_of(map(view_agent, found), call.query, lambda agent: agent.name)


async def agent(call: RestCall[None, None]) -> AgentView:
    return view_agent(await JobCalls(call.ask).agent(call.path["agent"]))


async def drain(call: RestCall[None, None]) -> AgentView:
    return await _drained(call, is_draining=True)


async def undrain(call: RestCall[None, None]) -> AgentView:
    return await _drained(call, is_draining=False)


async def _drained(call: RestCall[None, None], *, is_draining: bool) -> AgentView:
    calls, name = JobCalls(call.ask), call.path["agent"]
    await calls.drain_agent(name, is_draining=is_draining)
    return view_agent(await calls.agent(name))


async def remove_agent(call: RestCall[None, None]) -> ForgottenAgent:
    name = call.path["agent"]
    await JobCalls(call.ask).remove_agent(name)
    return ForgottenAgent(name)


OF_AGENT: dict[str, Any] = {"tag": "agents", "path_types": {"agent": JOB_IN_PATH}}
DRAINS: dict[str, Any] = {
    **OF_AGENT,
    "answer": AgentView,
    "requests": (q.DrainAgentRequest, q.ListAgentsRequest),
}

ROUTES: tuple[RestRoute, ...] = (
    get(
        "/v1/agents",
        "agents",
        "The agents, by name",
        agents,
        answer=Page[AgentView],
        query=PageQuery,
        requests=(q.ListAgentsRequest,),
        tag="agents",
    ),
    get(
        "/v1/agents/{agent}",
        "agent",
        "An agent",
        agent,
        answer=AgentView,
        requests=(q.ListAgentsRequest,),
        **OF_AGENT,
    ),
    post(
        "/v1/agents/{agent}/drain",
        "drain_agent",
        "Give an agent no further jobs, and move those that can run elsewhere",
        drain,
        **DRAINS,
    ),
    post("/v1/agents/{agent}/undrain", "undrain_agent", "Let an agent have jobs again", undrain, **DRAINS),
    delete(
        "/v1/agents/{agent}",
        "remove_agent",
        "Forget an agent that is not alive",
        remove_agent,
        answer=ForgottenAgent,
        requests=(q.RemoveAgentRequest,),
        **OF_AGENT,
    ),
)
