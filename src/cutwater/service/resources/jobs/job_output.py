"""What the programs of jobs print: by attempt, and as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from cutwater.admin.jobs import JobCalls
from cutwater.core.jobs import job_requests as q
from cutwater.errors import NotFound
from cutwater.programs.job_logs import JobLogText, read_job_log
from cutwater.protocol.metadata_api import JOB_LOG
from cutwater.runtime.deadlines import Deadline
from cutwater.service.resources.jobs.job_questions import STREAM_SECONDS, Seconds
from cutwater.service.resources.jobs.job_views import JOB_IN_PATH
from cutwater.service.resources.records import ALIVE_SECONDS
from cutwater.service.routes import LAST_EVENT_ID, EventStream, RestCall, RestRoute, SentEvent, get

LOOK_SECONDS = 1.0
READ_SECONDS = 12.0
EVENT_ID = "^[0-9]{1,18}-[0-9]{1,9}-[0-9]{1,18}-[0-9]{1,18}$"
Epoch = Annotated[int, Meta(ge=0, le=2**62)]
Attempt = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class LogsQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """``epoch`` and ``attempt``: those of the last attempt, if they are 0 or left out. ``offset`` and ``after`` go on
    behind an earlier answer: they are its ``end`` and ``after``."""

    epoch: Epoch = 0
    attempt: Attempt = 0
    offset: Annotated[int, Meta(ge=0, le=2**53)] = 0
    after: Annotated[int, Meta(ge=0, le=2**62)] = 0


class LogsFollowQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Without an attempt, later attempts follow until the job has ended."""

    epoch: Epoch = 0
    attempt: Attempt = 0
    seconds: Seconds = STREAM_SECONDS


class LogText(Struct, frozen=True):
    """What an attempt printed, up to byte ``end``. ``is_running``: more may come."""

    epoch: int
    attempt: int
    text: str
    end: int
    after: int
    is_running: bool


async def logs(call: RestCall[LogsQuery, None]) -> LogText:
    query = call.query
    found = await _read(call, query.epoch, query.attempt, query.offset, query.after)
    return _view(found, found.text)


async def _read(call: RestCall[Any, None], epoch: int, attempt: int, offset: int = 0, after: int = 0) -> JobLogText:
    return await read_job_log(
        call.ask.repository,
        call.path["job"],
        attempt or None,
        epoch=epoch or None,
        offset=offset,
        after=after,
        timeout=READ_SECONDS,
    )


def _view(found: JobLogText, text: bytes) -> LogText:
    return LogText(found.epoch, found.attempt, text.decode(errors="replace"), found.end, found.after, found.is_running)


async def logs_follow(call: RestCall[LogsFollowQuery, None]) -> EventStream:
    last = call.headers.get(LAST_EVENT_ID)
    query = call.query
    if last is None:
        first = await _first(call, query.epoch, query.attempt)
    else:
        first = await _read(call, *map(int, last.split("-")))
    return EventStream(_followed(call, first, is_one=bool(query.epoch or query.attempt)))


async def _first(call: RestCall[Any, None], epoch: int, attempt: int) -> JobLogText | None:
    try:
        return await _read(call, epoch, attempt)
    except NotFound:
        # A job that has not begun yet has no log; one that does not exist never will.
        await JobCalls(call.ask).job(call.path["job"])
        if epoch or attempt:
            raise
        return None


async def _followed(
    call: RestCall[LogsFollowQuery, None], first: JobLogText | None, *, is_one: bool
) -> AsyncIterator[SentEvent | None]:
    deadline, found = Deadline(call.query.seconds), first
    quiet = 0.0
    rest = b""
    while True:
        if found is not None:
            text, rest = split_text(rest + found.text, is_last=not found.is_running)
            if text:
                quiet = 0.0
                last = f"{found.epoch}-{found.attempt}-{found.end - len(rest)}-{found.after}"
                yield SentEvent(msgspec.json.encode(_view(found, text)), id=last)
        is_over = found is not None and not found.is_running and (is_one or await _has_ended(call))
        if is_over or deadline.is_over:
            return
        await asyncio.sleep(min(LOOK_SECONDS, max(deadline.left, 0.01)))
        quiet += LOOK_SECONDS
        if quiet >= ALIVE_SECONDS:
            quiet = 0.0
            yield None
        found, rest = await _next(call, found, rest)


async def _next(
    call: RestCall[LogsFollowQuery, None], found: JobLogText | None, rest: bytes
) -> tuple[JobLogText | None, bytes]:
    if found is not None and found.is_running:
        return await _read(call, found.epoch, found.attempt, found.end, found.after), rest
    newest = await _first(call, 0, 0)
    if newest is None or found is None or (newest.epoch, newest.attempt) != (found.epoch, found.attempt):
        return newest, b""
    return msgspec.structs.replace(found, text=b""), b""


async def _has_ended(call: RestCall[Any, None]) -> bool:
    return (await JobCalls(call.ask).job(call.path["job"])).job.end is not None


def split_text(data: bytes, *, is_last: bool) -> tuple[bytes, bytes]:
    """Split what was printed into whole characters, and the begin of one whose end has not come yet."""
    if is_last:
        return data, b""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0b1100_0000 == 0b1000_0000:
            continue
        size = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        return (data[:-back], data[-back:]) if size > back else (data, b"")
    return data, b""


READS_LOGS: dict[str, Any] = {
    "answer": LogText,
    "methods": (JOB_LOG.name,),
    "tag": "jobs",
    "path_types": {"job": JOB_IN_PATH},
}

ROUTES: tuple[RestRoute, ...] = (
    get(
        "/v1/jobs/{job}/logs",
        "job_logs",
        "What an attempt of a job printed, by default the last one",
        logs,
        query=LogsQuery,
        **READS_LOGS,
    ),
    get(
        "/v1/jobs/{job}/logs/follow",
        "job_logs_follow",
        "What a job prints, as server-sent events, until it has ended",
        logs_follow,
        query=LogsFollowQuery,
        is_stream=True,
        event_id=EVENT_ID,
        requests=(q.DescribeJobRequest,),
        **READS_LOGS,
    ),
)
