"""The application: finds the route of a request, checks it, lets its handler answer, and writes the answer.

Everything that can go wrong is answered as ``application/problem+json``, with the id of the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from cutwater.errors import CutwaterError
from cutwater.runtime import system
from cutwater.service.gateway import Gateway
from cutwater.service.http.bodies import ClientGone, body_chunks, decode_body, read_body
from cutwater.service.http.http_problems import (
    PROBLEM_TYPE,
    HttpRefusal,
    Problem,
    encode_problem,
    make_problem,
    problem_of,
    problem_of_refusal,
)
from cutwater.service.http.query import decode_query, decode_text
from cutwater.service.http.request_guard import (
    SECURITY_HEADERS,
    STRICT_TRANSPORT,
    AllowedHosts,
    check_address,
    check_form,
    check_origin,
    headers_of,
)
from cutwater.service.http.sessions import COOKIE, clear_cookie, session_token
from cutwater.service.places import Places
from cutwater.service.routes import (
    AnswerWith,
    BodyKind,
    EventStream,
    RestCall,
    RestRoute,
    RouteAccess,
    RouteCalls,
    SentEvent,
)
from cutwater.service.service_counters import ServiceCounters

_log = logging.getLogger(__name__)

SEND_SECONDS = 30.0
"""How long a reader may take for a part of an answer."""
STREAMS_MAX = 256
STREAMS_OF_CALLER_MAX = 64
UPLOADS_MAX = 4
UPLOADS_OF_CALLER_MAX = 2
REQUEST_ID_BYTES = 8
JSON_TYPE = "application/json"
EVENTS_TYPE = "text/event-stream"
UNKNOWN = "(none)"
"""The route of requests that have none, in metrics."""


class ServiceSettings(Struct, frozen=True):
    """What the application needs to know. ``is_secure``: it is reached with TLS."""

    hosts: AllowedHosts
    allow_submit: bool = False
    is_secure: bool = False


class RestService:
    """What all requests share. ``stopping`` is set when the service is to end: streams end then."""

    def __init__(self, settings: ServiceSettings, gateway: Gateway, routes: Sequence[RestRoute]) -> None:
        self.settings, self.gateway, self.routes = settings, gateway, tuple(routes)
        self.counters = ServiceCounters()
        self.stopping = asyncio.Event()
        self.streams = Places("streams", STREAMS_MAX, STREAMS_OF_CALLER_MAX)
        self.uploads = Places("uploads", UPLOADS_MAX, UPLOADS_OF_CALLER_MAX)
        self.document: bytes = b""
        """The description of all routes, in the form of OpenAPI."""

    @property
    def router(self) -> Router:
        """Make the router: one route of Starlette for each path, which knows the methods of that path."""
        paths: dict[str, dict[str, RestRoute]] = {}
        for route in self.routes:
            paths.setdefault(route.path, {})[route.method] = route
        found = [Route(path, _PathEndpoint(self, methods)) for path, methods in paths.items()]
        return Router(found, redirect_slashes=False, default=_no_such_path)


async def _no_such_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise HttpRefusal(404, "not_found", "there is no such address: /v1/openapi.json lists those that exist")


class ServiceEntry:
    """The outermost layer: whatever happens inside, the answer is one of ours."""

    def __init__(self, service: RestService) -> None:
        self._service, self._router = service, service.router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # Routes are found in the address as it was sent. A slash that is written as %2F is part of a name, not of the
        # structure of the address.
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        request_id = system.token_hex(REQUEST_ID_BYTES)
        scope = {**scope, "path": raw.decode("latin-1"), "cutwater": request_id}
        answer = _Answering(self._service, scope, send, request_id)
        try:
            headers = headers_of(scope["headers"])
            answer.has_unread_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
            check_address(raw, scope["query_string"])
            self._service.settings.hosts.check(headers.get("host", ""))
            check_origin(scope["method"], headers, scope["scheme"])
            answer.has_session = "authorization" not in headers and COOKIE in headers.get("cookie", "")
            scope["cutwater_headers"] = headers
            scope["cutwater_answer"] = answer
            await self._router(scope, receive, send)
        except HttpRefusal as refusal:
            await answer.refuse(refusal)
        except ClientGone:
            return
        except Exception as error:
            await answer.fail(error)


class _Answering:
    """Writes the answer to one request, and counts it."""

    def __init__(self, service: RestService, scope: Scope, send: Send, request_id: str) -> None:
        self._service, self._scope, self._send, self.request_id = service, scope, send, request_id
        self.route = UNKNOWN
        self.has_unread_body = False
        self.has_session = False
        """Whether the request shows the cookie of a session, and no token."""
        self._has_begun = False

    async def refuse(self, refusal: HttpRefusal) -> None:
        self._service.counters.refused[refusal.code] += 1
        problem, headers = problem_of_refusal(refusal, self.request_id)
        await self.problem(problem, headers)

    async def fail(self, error: Exception) -> None:
        """Answer a fault in the service itself."""
        _log.error("request %s (%s) failed", self.request_id, self.route, exc_info=error)
        detail = f"a fault in the service: its log has the cause under {self.request_id}"
        await self.problem(make_problem(500, "internal_error", detail, self.request_id), {})

    async def problem(self, problem: Problem, headers: Mapping[str, str]) -> None:
        if self._has_begun:
            # The status has been sent: the only sign that is left is to end the connection.
            raise ConnectionAbortedError(problem.detail)
        found = {"Content-Type": PROBLEM_TYPE, **headers}
        if problem.status == 401 and self.has_session:
            # It has ended, and the browser need not show it again.
            found["Set-Cookie"] = clear_cookie()
        await self.body(problem.status, encode_problem(problem), found)

    async def body(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        await self.begin(status, {"Content-Length": str(len(body)), **headers})
        await self.part(body, is_last=True)

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._has_begun = True
        self._service.counters.requests[self.route, status] += 1
        found = {**SECURITY_HEADERS, **headers, "X-Request-Id": self.request_id}
        if self._service.settings.is_secure:
            found["Strict-Transport-Security"] = STRICT_TRANSPORT
        if self.has_unread_body:
            # The unread rest of the body may be endless.
            found["Connection"] = "close"
        encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in found.items()]
        await self._sent({"type": "http.response.start", "status": status, "headers": encoded})

    async def part(self, body: bytes, *, is_last: bool = False) -> None:
        await self._sent({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def _sent(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError:
            self._service.counters.slow_readers += 1
            raise ClientGone from None


class _PathEndpoint:
    """All methods of one path."""

    def __init__(self, service: RestService, methods: Mapping[str, RestRoute]) -> None:
        self._service, self._methods = service, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: _Answering = scope["cutwater_answer"]
        route = self._methods.get(scope["method"])
        if route is None:
            allowed = ", ".join(sorted(self._methods))
            detail = f"this address has the methods {allowed}, and not {scope['method'][:20]}"
            raise HttpRefusal(405, "method_not_allowed", detail, headers={"Allow": allowed})
        answer.route = route.name
        try:
            await self._answered(route, scope, receive, answer)
        except CutwaterError as error:
            problem, headers = problem_of(error, answer.request_id)
            if problem.status == 500:
                _log.error("request %s (%s) failed", answer.request_id, route.name, exc_info=error)
            await answer.problem(problem, headers)

    async def _answered(self, route: RestRoute, scope: Scope, receive: Receive, answer: _Answering) -> None:
        headers: dict[str, str] = scope["cutwater_headers"]
        if route.needs_allow_submit and not self._service.settings.allow_submit:
            raise HttpRefusal(
                403,
                "submit_is_off",
                "this service changes nothing: its operator lets it do so with `cutwater service start --allow-submit`",
            )
        path = {name: decode_text(text.encode("latin-1")) for name, text in scope["path_params"].items()}
        query = decode_query(scope["query_string"], route.query)
        for name, form in route.header_forms.items():
            check_form(headers, name, form)
        if route.access is RouteAccess.OPEN:
            body = await _body(route, headers, receive, answer)
            await self._handled(route, path, query, body, None, headers, answer, receive)
            return
        token = session_token(headers)
        async with self._service.gateway.lease(token) as cluster:
            calls = RouteCalls(route, cluster)
            if route.body_kind is BodyKind.ZIP:
                with self._service.uploads.one(token):
                    body = _told(body_chunks(route, headers, receive), answer)
                    await self._handled(route, path, query, body, calls, headers, answer, receive, token)
                return
            # Only callers that the cluster may know can make the service read a body.
            body = await _body(route, headers, receive, answer)
            await self._handled(route, path, query, body, calls, headers, answer, receive, token)

    async def _handled(
        self,
        route: RestRoute,
        path: dict[str, str],
        query: Any,
        body: Any,
        calls: RouteCalls | None,
        headers: dict[str, str],
        answer: _Answering,
        receive: Receive,
        token: str = "",
    ) -> None:
        call = RestCall(
            route,
            path,
            query,
            body,
            calls=calls,
            service=self._service,
            headers=headers,
            request_id=answer.request_id,
            token=token,
        )
        try:
            async with asyncio.timeout(route.seconds):
                found = await route.handler(call)
        except TimeoutError:
            raise HttpRefusal(
                504, "deadline_exceeded", f"there was no answer within {route.seconds:g} s: try again"
            ) from None
        if isinstance(found, EventStream):
            await self._streamed(found, answer, receive, token)
            return
        status, more = route.status, {}
        if isinstance(found, AnswerWith):
            found, status, more = found.value, found.status or route.status, found.headers
        if found is None:
            await answer.body(204 if status == 200 else status, b"", more)
        elif isinstance(found, bytes):
            await answer.body(status, found, {"Content-Type": JSON_TYPE, **more})
        else:
            await answer.body(status, msgspec.json.encode(found), {"Content-Type": JSON_TYPE, **more})

    async def _streamed(self, stream: EventStream, answer: _Answering, receive: Receive, token: str) -> None:
        try:
            with self._service.streams.one(token):
                await self._sent_until_the_end(stream, answer, receive)
        finally:
            await stream.events.aclose()  # type: ignore[attr-defined]

    async def _sent_until_the_end(self, stream: EventStream, answer: _Answering, receive: Receive) -> None:
        loop = asyncio.get_running_loop()
        sending = loop.create_task(_send_events(stream, answer))
        ends = [loop.create_task(_gone(receive)), loop.create_task(self._service.stopping.wait())]
        try:
            await asyncio.wait([sending, *ends], return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            error = None if sending.cancelled() else sending.exception()
            if isinstance(error, CutwaterError):
                # The status has been sent. The reader learns it as the last event, and may go on from the last id.
                problem, _ = problem_of(error, answer.request_id)
                await answer.part(encode_event(SentEvent(encode_problem(problem), event="problem")))
            elif error is not None:
                raise error
            await answer.part(b"", is_last=True)
        finally:
            for task in (sending, *ends):
                task.cancel()
            await asyncio.gather(sending, *ends, return_exceptions=True)


async def _body(route: RestRoute, headers: Mapping[str, str], receive: Receive, answer: _Answering) -> Any:
    body = await read_body(route, headers, receive)
    answer.has_unread_body = False
    return decode_body(route, body)


async def _told(chunks: AsyncIterator[bytes], answer: _Answering) -> AsyncIterator[bytes]:
    """Pass a body on, and tell when all of it was read."""
    async for chunk in chunks:
        yield chunk
    answer.has_unread_body = False


async def _send_events(stream: EventStream, answer: _Answering) -> None:
    try:
        await answer.begin(200, {"Content-Type": EVENTS_TYPE, "X-Accel-Buffering": "no"})
        await answer.part(b": stream\n\n")
        async for event in stream.events:
            await answer.part(b": alive\n\n" if event is None else encode_event(event))
    finally:
        await stream.events.aclose()  # type: ignore[attr-defined]


async def _gone(receive: Receive) -> None:
    """Wait until the reader goes."""
    while (await receive())["type"] != "http.disconnect":
        pass


def encode_event(event: SentEvent) -> bytes:
    lines = [f"id: {event.id}\n"] if event.id else []
    if event.event:
        lines.append(f"event: {event.event}\n")
    return "".join(lines).encode() + b"data: " + event.data + b"\n\n"
