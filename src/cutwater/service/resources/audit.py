"""The audit: searched by page, and followed as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from cutwater.admin.audit_search import CLOCKS_DIFFER, AuditQuery, check_operation, no_audit
from cutwater.client.async_client import AsyncClient
from cutwater.client.read.records import Record
from cutwater.client.subscribe.subscriptions import AsyncSubscription
from cutwater.core import requests as r
from cutwater.core.access.access_requests import WhoAmI, WhoAmIRequest
from cutwater.core.audit.audit_record import AuditOutcome, AuditRecord, decode_audit
from cutwater.core.internal_topics import AUDIT
from cutwater.errors import DeadlineExceeded
from cutwater.runtime.deadlines import Deadline
from cutwater.service.resources.paging import Limit
from cutwater.service.resources.records import ALIVE_SECONDS, READS, SCAN_SECONDS, SCANNED_ROWS_MAX, Time, parse_time
from cutwater.service.routes import LAST_EVENT_ID, EventStream, Page, RestCall, RestRoute, SentEvent, get

Name = Annotated[str, Meta(max_length=255)]


class AuditPageQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments that are left out do not limit the answer. ``resource`` is literal, or a prefix and ``*``."""

    since: Time | None = None
    until: Time | None = None
    principal: Name | None = None
    operation: Name | None = None
    resource: Name | None = None
    outcome: AuditOutcome | None = None
    after: Annotated[int, Meta(ge=0, le=2**62)] = 0
    limit: Limit = 100


class AuditTailQuery(Struct, frozen=True, forbid_unknown_fields=True):
    principal: Name | None = None
    operation: Name | None = None
    resource: Name | None = None
    outcome: AuditOutcome | None = None
    seconds: Annotated[int, Meta(ge=1, le=3_600)] = 3_600


def _selection(query: Any) -> AuditQuery:
    since, until = getattr(query, "since", None), getattr(query, "until", None)
    check_operation(query.operation)
    return AuditQuery(
        None if since is None else parse_time(since),
        None if until is None else parse_time(until),
        query.principal,
        query.operation,
        query.resource,
        query.outcome,
    )


async def _log_with_audit(call: RestCall[Any, None]) -> AsyncClient:
    log = await call.ask.log()
    if all(topic.name != AUDIT.name for topic in await log.topics(internal=True)):
        raise no_audit((await call.ask(WhoAmIRequest(), WhoAmI)).principal)
    return log


async def audit(call: RestCall[AuditPageQuery, None]) -> Page[AuditRecord]:
    query, wanted = call.query, _selection(call.query)
    log = await _log_with_audit(call)
    start: Any = "earliest" if wanted.since is None else wanted.since - CLOCKS_DIFFER
    found: list[AuditRecord] = []
    seen: set[str] = set()
    reached = rows = 0
    deadline = Deadline(SCAN_SECONDS)
    async with log.subscribe(AUDIT.name, start=query.after + 1 if query.after else start, follow=False) as records:
        while some := await records.take():
            for stored in some:
                if len(found) >= query.limit or rows >= SCANNED_ROWS_MAX or deadline.is_over:
                    return Page(tuple(found), str(reached))
                rows, reached = rows + 1, stored.glsn
                record = _selected(stored, wanted, seen)
                if record is not None:
                    found.append(record)
    return Page(tuple(found))


def _selected(stored: Record, wanted: AuditQuery, seen: set[str]) -> AuditRecord | None:
    record = decode_audit(bytes(stored.value))
    if record is None or record.id in seen or not wanted.selects(record):
        return None
    if record.id:
        # A denial may be there twice.
        seen.add(record.id)
    return record


async def audit_tail(call: RestCall[AuditTailQuery, None]) -> EventStream:
    wanted = _selection(call.query)
    log = await _log_with_audit(call)
    last = call.headers.get(LAST_EVENT_ID)
    start: Any = "latest" if last is None else int(last) + 1
    records = log.subscribe(AUDIT.name, start=start)
    await records.begun()
    return EventStream(_tailed(records, wanted, call.query.seconds))


async def _tailed(
    records: AsyncSubscription[Record], wanted: AuditQuery, seconds: float
) -> AsyncIterator[SentEvent | None]:
    deadline = Deadline(seconds)
    seen: set[str] = set()
    async with records:
        while not deadline.is_over:
            try:
                some = await records.take(timeout=max(0.001, min(ALIVE_SECONDS, deadline.left)))
            except DeadlineExceeded:
                yield None
                continue
            for stored in some:
                record = _selected(stored, wanted, seen)
                if record is not None:
                    yield SentEvent(msgspec.json.encode(record), id=str(stored.glsn))
            if len(seen) > SCANNED_ROWS_MAX:
                seen.clear()


CALLS = {"requests": (r.CatalogRequest, WhoAmIRequest), "methods": READS}

ROUTES: tuple[RestRoute, ...] = (
    get(
        "/v1/audit",
        "audit",
        "Changes and denied calls",
        audit,
        answer=Page[AuditRecord],
        query=AuditPageQuery,
        seconds=20.0,
        **CALLS,
    ),
    get(
        "/v1/audit/tail",
        "audit_tail",
        "Changes and denied calls as they are recorded, as server-sent events",
        audit_tail,
        answer=AuditRecord,
        query=AuditTailQuery,
        is_stream=True,
        **CALLS,
    ),
)
