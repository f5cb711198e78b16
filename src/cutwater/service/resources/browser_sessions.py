"""Sessions of browsers: a token is exchanged for a cookie with a short-lived child of it.

The cluster knows the child, and ends it with its parent. So a service keeps nothing, and any service takes the sessions
of the others. A child has no children: a stolen cookie makes no further sessions.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from cutwater.admin.access_calls import AccessCalls
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_requests import CreateChildTokenRequest, EndOwnTokenRequest, WhoAmIRequest
from cutwater.errors import Refused
from cutwater.runtime import system
from cutwater.service.http.sessions import clear_cookie, set_cookie
from cutwater.service.routes import AnswerWith, RestCall, RestRoute, delete, post

SESSION_SECONDS = 8 * 3_600
SESSION_SECONDS_MAX = 23 * 3_600
"""A child lives for 24 hours at most, by the clock of the leader, which may differ from that of the service."""
SECOND_US = 1_000_000


class SessionQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """``seconds``: how long the session lasts at most. It never outlasts the token that it is begun with."""

    seconds: Annotated[int, Meta(ge=60, le=SESSION_SECONDS_MAX)] = SESSION_SECONDS


class SessionView(Struct, frozen=True):
    """A session. Its cookie is not shown to scripts."""

    principal: str
    expires: int


async def begin_session(call: RestCall[SessionQuery, None]) -> AnswerWith:
    control = AccessCalls(call.ask)
    caller = await control.who_am_i()
    if caller.mode is AccessMode.OFF or not caller.token:
        raise Refused("access control is off, so requests count for nobody: use the service without a session")
    if caller.parent:
        raise Refused("this is a session already: begin another one with the token itself")
    now = system.wall_time_ns() // 1_000
    expires = now + call.query.seconds * SECOND_US
    if caller.expires:
        expires = min(expires, caller.expires)
    made = await control.create_child_token(expires)
    cookie = set_cookie(made.token, max(1, (expires - now) // SECOND_US))
    return AnswerWith(SessionView(made.principal, made.expires), 201, {"Set-Cookie": cookie})


async def end_session(call: RestCall[None, None]) -> AnswerWith:
    control = AccessCalls(call.ask)
    if not (await control.who_am_i()).parent:
        raise Refused("this token is no session, and is not ended here: `cutwater token revoke` revokes it")
    await control.end_own_token()
    call.service.gateway.forget(call.token)
    return AnswerWith(None, 204, {"Set-Cookie": clear_cookie()})


ROUTES: tuple[RestRoute, ...] = (
    post(
        "/v1/session",
        "begin_session",
        "Exchange a token for the cookie of a session",
        begin_session,
        answer=SessionView,
        status=201,
        query=SessionQuery,
        requests=(WhoAmIRequest, CreateChildTokenRequest),
        tag="session",
        is_gated=False,
    ),
    delete(
        "/v1/session",
        "end_session",
        "End the session of the request",
        end_session,
        status=204,
        requests=(WhoAmIRequest, EndOwnTokenRequest),
        tag="session",
        is_gated=False,
    ),
)
