"""Questions about jobs and operations: lists, one of them, their versions and exceptions, and what changes in them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from cutwater.admin.jobs import JobCalls
from cutwater.client.async_client import AsyncClient
from cutwater.core import requests as r
from cutwater.core.jobs import job_requests as q
from cutwater.core.jobs.job_records import JobPhase
from cutwater.core.jobs.operations import check_random_id
from cutwater.errors import CutwaterError, InvalidArgument
from cutwater.service.record_json import JsonRecord, json_rows
from cutwater.service.resources.jobs.following import events_of
from cutwater.service.resources.jobs.job_views import (
    ID_IN_PATH,
    JOB_IN_PATH,
    AttemptView,
    JobRow,
    JobView,
    OperationView,
    VersionView,
    view_attempt,
    view_job,
    view_operation,
    view_row,
    view_version,
)
from cutwater.service.resources.paging import NUMBER_IN_PATH, NumberedQuery, PageQuery, number_of, page_of
from cutwater.service.resources.records import READS
from cutwater.service.routes import LAST_EVENT_ID, EventStream, Page, RestCall, RestRoute, SentEvent, get

STREAM_SECONDS = 3_600
OPERATIONS_MAX = 200
Seconds = Annotated[int, Meta(ge=1, le=STREAM_SECONDS, description="When the stream ends, at the latest.")]


class JobsQuery(PageQuery, frozen=True, forbid_unknown_fields=True):
    """Jobs of one owner or in one phase, if it is given."""

    owner: Annotated[str, Meta(max_length=255)] = ""
    phase: JobPhase | None = None


class OperationsQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=OPERATIONS_MAX)] = 100


class FollowQuery(Struct, frozen=True, forbid_unknown_fields=True):
    seconds: Seconds = STREAM_SECONDS


class JobFollowQuery(FollowQuery, frozen=True, forbid_unknown_fields=True):
    """``progress``: also when only the progress has changed, which is seen up to a second later."""

    progress: bool = False


class ExceptionsQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """``records``: with the records at which attempts failed, as far as the caller may read them."""

    records: bool = True


class ExceptionView(AttemptView, frozen=True, kw_only=True):
    """An attempt that failed. ``record`` is the record at which it did; if it is null, ``no_record`` says why."""

    record: JsonRecord | None = None
    no_record: str | None = None


class JobExceptions(Struct, frozen=True):
    """Attempts of a job that failed, the last first. The newest five attempts are known."""

    items: tuple[ExceptionView, ...]


async def jobs(call: RestCall[JobsQuery, None]) -> Page[JobRow]:
    query = call.query
    found = await JobCalls(call.ask).jobs_page(
        after=query.after, limit=query.limit, owner=query.owner, phase=query.phase
    )
    rows = tuple(map(view_row, found.jobs))
    return Page(rows, rows[-1].name if found.more and rows else None)


async def job(call: RestCall[None, None]) -> JobView:
    return view_job(await JobCalls(call.ask).job(call.path["job"]))


async def job_follow(call: RestCall[JobFollowQuery, None]) -> EventStream:
    name, calls = call.path["job"], JobCalls(call.ask)
    # A job that does not exist is told before the stream begins.
    await calls.job(name)
    seen = int(call.headers.get(LAST_EVENT_ID, 0))
    found = calls.follow_job(name, seen=seen, is_progress=call.query.progress, timeout=call.query.seconds)
    return EventStream(events_of(found, _job_event))


def _job_event(found: q.JobDescription) -> SentEvent:
    return SentEvent(msgspec.json.encode(view_job(found)), id=str(found.job.revision))


async def job_versions(call: RestCall[NumberedQuery, None]) -> Page[VersionView]:
    calls, name = JobCalls(call.ask), call.path["job"]
    numbers = page_of((await calls.job(name)).versions, call.query, lambda number: number)
    wanted = set(numbers.items)
    found = [one for one in await calls.versions(name) if one.number in wanted]
    return Page(tuple(map(view_version, found)), numbers.next)


async def job_version(call: RestCall[None, None]) -> VersionView:
    number = number_of(call.path, "version")
    return view_version(await JobCalls(call.ask).version(call.path["job"], number))


async def job_operations(call: RestCall[OperationsQuery, None]) -> Page[OperationView]:
    found = await JobCalls(call.ask).operations(call.path["job"], limit=call.query.limit)
    return Page(tuple(map(view_operation, found)))


async def operation(call: RestCall[None, None]) -> OperationView:
    found = await JobCalls(call.ask).operation(call.path["operation"])
    return view_operation(found.operation, found.advice)


async def operation_follow(call: RestCall[FollowQuery, None]) -> EventStream:
    identifier, calls = call.path["operation"], JobCalls(call.ask)
    check_random_id("operation", identifier)
    await calls.operation(identifier)
    return EventStream(events_of(calls.follow_operation(identifier, timeout=call.query.seconds), _operation_event))


def _operation_event(found: q.OperationAnswer) -> SentEvent:
    return SentEvent(msgspec.json.encode(view_operation(found.operation, found.advice)))


# Exceptions.


async def job_exceptions(call: RestCall[ExceptionsQuery, None]) -> Any:
    found = await JobCalls(call.ask).job(call.path["job"])
    failed = [attempt for attempt in reversed(found.job.attempts) if attempt.failure is not None]
    items = []
    for attempt in failed:
        told = msgspec.to_builtins(view_attempt(attempt))
        glsn = attempt.failure.glsn if attempt.failure is not None else 0
        record, why = await _record(call, glsn) if call.query.records else (None, "it was not asked for")
        items.append(told | {"record": record, "no_record": why})
    return {"items": items}


async def _record(call: RestCall[Any, None], glsn: int) -> tuple[Raw | None, str | None]:
    """Return the record at a position, with the rights of the caller; or why there is none."""
    if not glsn:
        return None, "it is not known at which record the attempt failed"
    try:
        return await _read(await call.ask.log(), glsn), None
    except CutwaterError as error:
        if error.retriable:
            raise
        return None, f"{error.code}: {error.message}"


async def _read(log: AsyncClient, glsn: int) -> Raw:
    name = (await log.read(glsn)).topic
    is_typed = (await log.topic(name)).schema is not None
    async with log.batches(name, start=glsn, stop=glsn + 1, follow=False) as batches:
        while some := await batches.take():
            for batch in some:
                for _, encoded in json_rows(batch, is_typed=is_typed):
                    return Raw(encoded)
    raise InvalidArgument(f"topic {name!r} shows no record at GLSN {glsn}")


OF_JOB: dict[str, Any] = {"tag": "jobs", "path_types": {"job": JOB_IN_PATH, "version": NUMBER_IN_PATH}}
OF_OPERATION: dict[str, Any] = {
    "tag": "jobs",
    "path_types": {"operation": ID_IN_PATH},
    "requests": (q.DescribeOperationRequest,),
}

ROUTES: tuple[RestRoute, ...] = (
    get(
        "/v1/jobs",
        "jobs",
        "The jobs, by name",
        jobs,
        answer=Page[JobRow],
        query=JobsQuery,
        requests=(q.ListJobsRequest,),
        tag="jobs",
    ),
    get("/v1/jobs/{job}", "job", "A job", job, answer=JobView, requests=(q.DescribeJobRequest,), **OF_JOB),
    get(
        "/v1/jobs/{job}/follow",
        "job_follow",
        "A job, each time that it has changed, as server-sent events",
        job_follow,
        answer=JobView,
        query=JobFollowQuery,
        is_stream=True,
        requests=(q.DescribeJobRequest,),
        **OF_JOB,
    ),
    get(
        "/v1/jobs/{job}/versions",
        "job_versions",
        "The versions of a job, the oldest first",
        job_versions,
        answer=Page[VersionView],
        query=NumberedQuery,
        requests=(q.DescribeJobRequest, q.FetchVersionRequest),
        **OF_JOB,
    ),
    get(
        "/v1/jobs/{job}/versions/{version}",
        "job_version",
        "A version of a job",
        job_version,
        answer=VersionView,
        requests=(q.FetchVersionRequest,),
        **OF_JOB,
    ),
    get(
        "/v1/jobs/{job}/operations",
        "job_operations",
        "What was asked of a job, the newest first",
        job_operations,
        answer=Page[OperationView],
        query=OperationsQuery,
        requests=(q.ListOperationsRequest,),
        **OF_JOB,
    ),
    get(
        "/v1/jobs/{job}/exceptions",
        "job_exceptions",
        "Why attempts of a job failed, with the record at which they did",
        job_exceptions,
        answer=JobExceptions,
        query=ExceptionsQuery,
        requests=(q.DescribeJobRequest, r.CatalogRequest),
        methods=READS,
        seconds=30.0,
        **OF_JOB,
    ),
    get(
        "/v1/operations/{operation}",
        "operation",
        "An operation",
        operation,
        answer=OperationView,
        **OF_OPERATION,
    ),
    get(
        "/v1/operations/{operation}/follow",
        "operation_follow",
        "An operation, each time that it has come further, until it is over, as server-sent events",
        operation_follow,
        answer=OperationView,
        query=FollowQuery,
        is_stream=True,
        event_id="",
        **OF_OPERATION,
    ),
)
