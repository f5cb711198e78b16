"""What any metadata node answers about jobs by reading internal topics itself: logs of jobs, and whether a program is
stored. Clients may not read these topics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from cutwater.core.internal_topics import JOB_LOGS
from cutwater.core.jobs.job_records import AttemptRecord, JobRecord
from cutwater.core.jobs.job_requests import (
    DescribeJobRequest,
    FetchProgramPlaceRequest,
    JobDescription,
    ProgramPlaces,
)
from cutwater.core.jobs.job_spec import check_sha256
from cutwater.core.jobs.log_records import decode_log, log_key
from cutwater.core.requests import Answer, Catalog, CatalogRequest, Request
from cutwater.errors import InvalidArgument, NotFound, Unavailable
from cutwater.metadata.internal.internal_reader import InternalReader, RowBatch
from cutwater.metadata.internal.program_keeper import is_stored_intact
from cutwater.metadata.retention import Connect
from cutwater.protocol import metadata_api as api
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN, SECOND, CutTime, JobEpoch
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.calls.incoming_calls import Call

T = TypeVar("T")

LOG_BYTES_MAX = 1024 * 1024
SEARCHED_SECONDS = 2.0
"""After this long the search for a log is interrupted, and the answer says where it goes on."""
LATE_US = 3_600 * SECOND
"""The end of a log is appended at most this long after the end of its attempt was decided."""
CHECKS_MAX = 2
"""Programs that are read at once at one metadata node."""

AskLeader = Callable[[Request], Awaitable[Answer]]


class InternalTopicAnswers:
    """See the module. ``ask`` asks the leader, as this metadata node; ``connect`` connects to a storage node."""

    def __init__(self, ask: AskLeader, connect: Connect) -> None:
        self._ask_leader, self._connect = ask, connect
        self._checking = asyncio.Semaphore(CHECKS_MAX)

    def register(self, methods: Methods) -> None:
        methods.answers(api.CHECK_PROGRAM)(self._check_program)
        methods.answers(api.JOB_LOG)(self._job_log)

    async def _ask(self, request: Request, kind: type[T]) -> T:
        answer = await self._ask_leader(request)
        if not isinstance(answer, kind):
            raise Unavailable(f"the leader answered with {type(answer).__name__} instead of {kind.__name__}")
        return answer

    async def _catalog(self) -> Catalog:
        return await self._ask(CatalogRequest(), Catalog)

    # Programs.

    async def _check_program(self, call: Call[api.CheckProgram]) -> api.ProgramCheck:
        sha256 = call.argument.sha256
        check_sha256("program", sha256)
        deadline = _left(call)
        places = (await self._ask(FetchProgramPlaceRequest(sha256), ProgramPlaces)).places
        async with self._checking, self._reading() as reader:
            return api.ProgramCheck(await is_stored_intact(reader, sha256, places, deadline))

    # Logs.

    async def _job_log(self, call: Call[api.JobLogArguments]) -> api.JobLogAnswer:
        asked, deadline = call.argument, _left(call)
        if asked.offset < 0 or asked.after < 0 or not 0 < asked.bytes_max <= LOG_BYTES_MAX:
            raise InvalidArgument(f"ask for 1 to {LOG_BYTES_MAX} bytes of a log, from an offset on, not {asked}")
        job = (await self._ask(DescribeJobRequest(asked.name), JobDescription)).job
        epoch, attempt, record = _attempt(job, asked)
        found = _Pieces(asked.offset, asked.bytes_max)
        async with self._reading() as reader:
            first, last = await self._range(reader, record, asked.after, deadline)
            search = _Search(log_key(job.number, epoch, attempt), found, GLSN(max(asked.after, first - 1)))
            is_end = first > last or await search.run(reader.rows(JOB_LOGS.name, first, last, deadline), deadline)
        is_running = record is not None and record.end is None
        return api.JobLogAnswer(epoch, attempt, tuple(found.pieces), found.end, search.after, is_end, is_running)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[InternalReader]:
        reader = InternalReader(self._catalog, self._connect)
        try:
            yield reader
        finally:
            reader.close()

    async def _range(
        self, reader: InternalReader, record: AttemptRecord | None, after: GLSN, deadline: Deadline
    ) -> tuple[GLSN, GLSN]:
        """Return the first and the last position at which the log of an attempt may be."""
        catalog = await self._catalog()
        topic = next((topic for topic in catalog.topics if topic.name == JOB_LOGS.name), None)
        last = catalog.high_watermark
        if topic is None:
            return GLSN(1), GLSN(0)
        first = GLSN(after + 1)
        if record is not None and not after:
            first = await reader.find(JOB_LOGS.name, record.begun, deadline)
        if record is not None and record.ended and record.ended + LATE_US < catalog.cut_time:
            last = await reader.find(JOB_LOGS.name, CutTime(record.ended + LATE_US), deadline)
        return max(first, topic.trimmed_before), last


def _left(call: Call[Any]) -> Deadline:
    loop = asyncio.get_running_loop()
    return Deadline(max(call.deadline - loop.time(), 0.001))


def _attempt(job: JobRecord, asked: api.JobLogArguments) -> tuple[JobEpoch, int, AttemptRecord | None]:
    """Return which attempt is meant. Only the last ones are remembered; earlier ones are found by their names."""
    for record in reversed(job.attempts):
        if asked.attempt in (0, record.number) and asked.epoch in (0, record.epoch):
            return record.epoch, record.number, record
    if asked.attempt and asked.epoch:
        return asked.epoch, asked.attempt, None
    known = ", ".join(f"{record.number} of epoch {record.epoch}" for record in job.attempts) or "none"
    raise NotFound(
        f"job {job.name!r} has no such attempt; the last ones are: {known}. Earlier ones are found by attempt and epoch"
    )


class _Search:
    """Searches rows for those of one attempt. ``after``: the position up to which it has come."""

    def __init__(self, key: bytes, found: _Pieces, after: GLSN) -> None:
        self._key, self._found, self.after = key, found, after

    async def run(self, batches: AsyncGenerator[RowBatch, None], deadline: Deadline) -> bool:
        """Return whether all rows were searched: there may be no room for more, or too little time."""
        give_up = deadline.now + SEARCHED_SECONDS
        async with aclosing(batches):
            async for batch in batches:
                if deadline.now >= give_up:
                    return False
                for row in batch.rows:
                    if row.key == self._key and not self._found.take(*decode_log(row.value)):
                        # It is asked for again, from the offset that was reached in it.
                        self.after = GLSN(row.glsn - 1)
                        return False
                self.after = batch.through
        return True


class _Pieces:
    """Collects pieces of a log from an offset on. What was stored twice counts once."""

    def __init__(self, offset: int, bytes_max: int) -> None:
        self.pieces: list[api.JobLogPiece] = []
        self.end, self._left = offset, bytes_max

    def take(self, offset: int, data: bytes) -> bool:
        """Take a record. Returns whether there was room for all of it."""
        skipped = max(0, self.end - offset)
        data = data[skipped:]
        if not data:
            return True
        taken = data[: self._left]
        if taken:
            self.pieces.append(api.JobLogPiece(offset + skipped, taken))
            self.end = offset + skipped + len(taken)
            self._left -= len(taken)
        return len(taken) == len(data)
