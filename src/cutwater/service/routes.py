"""The table of routes is made of these: what a request takes and gives, and what it asks of the cluster.

A handler may ask the cluster only for what its route names (``RouteCalls``), so the rights that a route needs are those
of ``protocol.method_access``: the documentation of the API says them, and servers of the cluster decide by them.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct

from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.credentials import Access
from cutwater.client.cluster.metadata_client import Repository
from cutwater.protocol.access import ClientAnswers, MethodAccess
from cutwater.protocol.method_access import METADATA_ACCESS, REQUEST_ACCESS, STORAGE_NODE_ACCESS
from cutwater.runtime.deadlines import Deadline
from cutwater.service.gateway import PooledCluster

A = TypeVar("A")
T = TypeVar("T")
Q = TypeVar("Q")
B = TypeVar("B")

SECONDS_MAX = 15.0
"""How long a request may take, without its body and its answer."""
JSON_BYTES_MAX = 256 * 1024
IDEMPOTENCY_KEY = "idempotency-key"
LAST_EVENT_ID = "last-event-id"
KEY_PATTERN = "^[!-~]{1,255}$"
POSITION_PATTERN = "^[0-9]{1,18}$"


class BodyKind(enum.Enum):
    NONE = "none"
    JSON = "application/json"
    ZIP = "application/zip"


class RouteAccess(enum.Enum):
    """How a route treats callers."""

    CALLER = "caller"
    """It acts with the rights of the caller. With access control on, a principal is needed."""
    OPEN = "open"
    """It tells nothing about the cluster."""


class Page(Struct, Generic[T], frozen=True):
    """A part of a list. ``next``: what ``after`` of the next request is; null if this is the end."""

    items: tuple[T, ...]
    next: str | None = None


class AnswerWith(Struct, frozen=True):
    """An answer with another status than 200, or with headers."""

    value: Any
    status: int
    headers: dict[str, str]


class StillWorking(Struct, frozen=True):
    """An agent works on the answer. The same request again waits for it; 15 s after the last one it is given up."""

    detail: str
    retry_after_s: int = 1
    status: Literal["working"] = "working"


class SentEvent(Struct, frozen=True):
    """An event of a stream. ``data`` is JSON, and contains no line feed."""

    data: bytes
    id: str = ""
    event: str = ""


class EventStream(Struct, frozen=True):
    """An answer that goes on: server-sent events. The iterator is closed when the reader goes."""

    events: AsyncIterator[SentEvent | None]
    """None: nothing happened for a while; tell the reader that the stream is alive."""


class RestRoute(Struct, frozen=True):
    """One method of one path.

    ``requests`` and ``methods`` are all that its handler may ask of the cluster. ``query`` and ``body`` are the types
    of arguments, ``answer`` that of the answer; bytes stand for a body that is not JSON, and None for no body.
    ``is_stream``: the answer is server-sent events, each of which has the type of ``answer``; their ids have the form
    ``event_id``, if they have any. ``may_wait``: the answer may be ``StillWorking``. ``is_gated``: it is refused unless
    the operator of the service allows changes; by default, whatever is no GET is.
    """

    method: str
    path: str
    name: str
    summary: str
    handler: Callable[[Any], Awaitable[object]]
    answer: Any = None
    requests: tuple[type, ...] = ()
    methods: tuple[str, ...] = ()
    query: type[Struct] | None = None
    body: type | None = None
    body_kind: BodyKind = BodyKind.NONE
    body_bytes_max: int = JSON_BYTES_MAX
    status: int = 200
    more_statuses: tuple[int, ...] = ()
    tag: str = "cluster"
    access: RouteAccess = RouteAccess.CALLER
    is_stream: bool = False
    has_key: bool = False
    """Whether it takes an ``Idempotency-Key``."""
    has_location: bool = False
    event_id: str = POSITION_PATTERN
    may_wait: bool = False
    is_gated: bool | None = None
    seconds: float = SECONDS_MAX
    path_types: dict[str, dict[str, Any]] = {}
    """The schemas of parts of the path that are no names."""

    @property
    def changes(self) -> bool:
        return self.method not in ("GET", "HEAD")

    @property
    def needs_allow_submit(self) -> bool:
        return self.changes if self.is_gated is None else self.is_gated

    @property
    def header_forms(self) -> dict[str, str]:
        """The forms of the headers that it takes, as regular expressions."""
        found = {IDEMPOTENCY_KEY: KEY_PATTERN} if self.has_key else {}
        return found | ({LAST_EVENT_ID: self.event_id} if self.is_stream and self.event_id else {})

    @property
    def statuses(self) -> tuple[int, ...]:
        """The statuses of answers that are no problems."""
        return (self.status, *self.more_statuses, *((202,) if self.may_wait else ()))

    @property
    def rows(self) -> tuple[MethodAccess, ...]:
        """The rows of the table of access that hold for it."""
        of_requests = tuple(REQUEST_ACCESS[kind] for kind in self.requests)
        return of_requests + tuple(STORAGE_NODE_ACCESS.get(name) or METADATA_ACCESS[name] for name in self.methods)

    @property
    def rights(self) -> tuple[str, ...]:
        """The rights that it needs, in words, from the same table by which the cluster decides."""
        found: dict[str, None] = {}
        for row in self.rows:
            for need in row.needs:
                found[need.text] = None
            if row.answers is ClientAnswers.FILTERED:
                found["any; what the caller may not describe is left out"] = None
        return tuple(found)


def get(path: str, name: str, summary: str, handler: Callable[[Any], Awaitable[object]], **fields: Any) -> RestRoute:
    return RestRoute("GET", path, name, summary, handler, **fields)


def post(path: str, name: str, summary: str, handler: Callable[[Any], Awaitable[object]], **fields: Any) -> RestRoute:
    """Make a route that takes JSON, unless it says otherwise."""
    if fields.get("body") is not None:
        fields.setdefault("body_kind", BodyKind.JSON)
    return RestRoute("POST", path, name, summary, handler, **fields)


def put(path: str, name: str, summary: str, handler: Callable[[Any], Awaitable[object]], **fields: Any) -> RestRoute:
    return RestRoute("PUT", path, name, summary, handler, **fields)


def delete(path: str, name: str, summary: str, handler: Callable[[Any], Awaitable[object]], **fields: Any) -> RestRoute:
    return RestRoute("DELETE", path, name, summary, handler, **fields)


class RouteCalls:
    """What a handler asks of the cluster, with the rights of the caller: only what its route names."""

    def __init__(self, route: RestRoute, cluster: PooledCluster) -> None:
        self._route, self._cluster = route, cluster
        self._deadline = Deadline(route.seconds)

    async def __call__(
        self, request: Any, expected: type[A], *, timeout_ms: int | None = None, idempotent: bool = True
    ) -> A:
        """Ask the leader of the metadata repository, as ``Repository.ask`` does. ``timeout_ms``: the time that the
        request has, otherwise what is left of that of the route."""
        assert type(request) in self._route.requests, f"{self._route.name} does not name {type(request).__name__}"
        if timeout_ms is None:
            timeout_ms = self._deadline.left_ms()
        return await self._cluster.repository.ask(request, expected, timeout_ms=timeout_ms, idempotent=idempotent)

    async def log(self) -> AsyncClient:
        """Return the client for records."""
        assert self._route.methods, f"{self._route.name} names no methods of storage nodes"
        return await self._cluster.log()

    @property
    def repository(self) -> Repository:
        """The metadata repository, for methods that are no requests to its leader."""
        assert self._route.methods, f"{self._route.name} names no methods"
        return self._cluster.repository

    @property
    def access(self) -> Access:
        return self._cluster.access

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._cluster.repository.addresses


class RestCall(Generic[Q, B]):
    """One request, parsed, on its way to its handler."""

    def __init__(
        self,
        route: RestRoute,
        path: dict[str, str],
        query: Q,
        body: B,
        *,
        calls: RouteCalls | None,
        service: Any,
        headers: dict[str, str],
        request_id: str,
        token: str = "",
    ) -> None:
        self.route, self.path, self.query, self.body = route, path, query, body
        self._calls, self.service, self.headers, self.request_id = calls, service, headers, request_id
        self.token = token

    @property
    def key(self) -> str:
        """The ``Idempotency-Key`` of the request; empty if it has none."""
        return self.headers.get(IDEMPOTENCY_KEY, "") if self.route.has_key else ""

    @property
    def ask(self) -> RouteCalls:
        assert self._calls is not None, "an open route asks the cluster for nothing"
        return self._calls
