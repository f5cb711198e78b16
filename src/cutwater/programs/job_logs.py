"""The logs of jobs in the log: agents append what programs print, and users read it through a metadata node.

An agent never waits for it. What is printed goes into bounded buffers; one task appends what waits, in batches, and
goes on when the log was away. What has no answer is appended again, and readers take bytes with the same offset once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress

from msgspec import Struct

from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.metadata_client import Repository
from cutwater.core.internal_topics import JOB_LOGS
from cutwater.core.jobs.log_records import HEAD_BYTES, TAIL_BYTES, encode_log, log_key
from cutwater.core.requests import InternalTopics, MakeJobTopicRequest
from cutwater.errors import CutwaterError, NotFound
from cutwater.programs.log_buffer import LogBuffer, LogPiece
from cutwater.protocol.metadata_api import JOB_LOG, JobLogArguments
from cutwater.runtime import system
from cutwater.runtime.deadlines import TIMEOUT_SECONDS, Deadline
from cutwater.types import GLSN, JobEpoch, JobNumber

_log = logging.getLogger(__name__)

APPEND_SECONDS = 1.0
"""How long what was printed waits for more, unless there is much of it."""
RECORD_BYTES = 64 * 1024
BATCH_BYTES = 512 * 1024
LOGS_MAX = 1_024
"""Number of logs that are kept while the log is away. The oldest ones that have ended go first."""
ASK_SECONDS = 10.0
RETRY_SECONDS_MIN = 0.2
RETRY_SECONDS_MAX = 10.0


class AttemptLog:
    """What one attempt prints."""

    def __init__(self, key: bytes, now: float, wake: asyncio.Event) -> None:
        self.key, self.buffer, self._wake = key, LogBuffer(now), wake

    def write(self, data: bytes) -> None:
        """Take what was printed. Returns at once, and never fails."""
        self.buffer.write(data)
        if self.buffer.waiting_bytes >= RECORD_BYTES:
            self._wake.set()

    def end(self) -> None:
        """Nothing more is printed."""
        self.buffer.end()
        self._wake.set()


class JobLogAppender:
    """See the module. Belongs to an event loop. ``append_for_ever`` appends; ``close`` appends the rest."""

    def __init__(self, log: AsyncClient, *, seconds: float = APPEND_SECONDS) -> None:
        self._client, self._seconds = log, seconds
        self._logs: dict[bytes, AttemptLog] = {}
        self._wake = asyncio.Event()
        self._appending = asyncio.Lock()
        self.trouble = ""
        """Why the last attempt to append failed; empty if it did not."""

    def log_of(self, job: JobNumber, epoch: JobEpoch, attempt: int) -> AttemptLog:
        """Return the log of an attempt."""
        key = log_key(job, epoch, attempt)
        found = self._logs.get(key)
        if found is None:
            if len(self._logs) >= LOGS_MAX:
                self._drop_one()
            found = self._logs[key] = AttemptLog(key, system.monotonic(), self._wake)
        return found

    def _drop_one(self) -> None:
        ended = next((key for key, known in self._logs.items() if known.buffer.is_ended), next(iter(self._logs)))
        _log.warning("the log of attempt %s is given up: too many wait for topic %s", ended.decode(), JOB_LOGS.name)
        del self._logs[ended]

    async def append_for_ever(self) -> None:
        pause = RETRY_SECONDS_MIN
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._append_all(ASK_SECONDS)
                pause, self.trouble = RETRY_SECONDS_MIN, ""
            except Exception as error:
                self._tell(error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, RETRY_SECONDS_MAX)

    def _tell(self, error: Exception) -> None:
        is_bug = not isinstance(error, CutwaterError)
        if is_bug or str(error) != self.trouble:
            _log.warning("logs of jobs cannot be appended now: %s", error, exc_info=error if is_bug else None)
        self.trouble = str(error)

    async def close(self, seconds: float) -> None:
        """Append what waits, as far as that is possible within this time. The task of ``append_for_ever`` must have
        ended."""
        for log in self._logs.values():
            log.buffer.end()
        deadline = Deadline(seconds)
        while self._logs and not deadline.is_over:
            try:
                await self._append_all(max(deadline.left, 0.001))
            except CutwaterError as error:
                self._tell(error)
                await deadline.pause(RETRY_SECONDS_MIN)

    async def _append_all(self, seconds: float) -> None:
        async with self._appending:
            while pieces := self._pieces():
                await self._append(pieces, seconds)
            for key in [key for key, log in self._logs.items() if log.buffer.is_done]:
                del self._logs[key]

    def _pieces(self) -> list[tuple[AttemptLog, LogPiece]]:
        """Return the next piece of each log, up to the size of a batch."""
        found: list[tuple[AttemptLog, LogPiece]] = []
        size, now = 0, system.monotonic()
        for log in self._logs.values():
            piece = log.buffer.next(RECORD_BYTES, now)
            if piece is not None:
                found.append((log, piece))
                size += len(piece.data)
            if size >= BATCH_BYTES:
                break
        return found

    async def _append(self, pieces: list[tuple[AttemptLog, LogPiece]], seconds: float) -> None:
        values = [encode_log(piece.offset, piece.data) for _, piece in pieces]
        keys = [log.key for log, _ in pieces]
        deadline = Deadline(seconds)
        try:
            await self._client.append(JOB_LOGS.name, values, key=keys, timeout=seconds)
        except NotFound:
            request = MakeJobTopicRequest(JOB_LOGS.name)
            await self._client.repository.ask(request, InternalTopics, timeout_ms=deadline.left_ms())
            await self._client.topic(JOB_LOGS.name, timeout=max(deadline.left, 0.001))
            await self._client.append(JOB_LOGS.name, values, key=keys, timeout=max(deadline.left, 0.001))
        for log, piece in pieces:
            log.buffer.appended(piece)


# Reading.


class JobLogText(Struct, frozen=True):
    """The log of an attempt, from ``offset`` to ``end``. ``is_running``: more may come; read on with ``offset=end`` and
    ``after=after``."""

    epoch: JobEpoch
    attempt: int
    text: bytes
    end: int
    after: GLSN
    is_running: bool


async def read_job_log(
    log: AsyncClient | Repository,
    name: str,
    attempt: int | None = None,
    *,
    epoch: int | None = None,
    offset: int = 0,
    after: int = 0,
    timeout: float = TIMEOUT_SECONDS,
) -> JobLogText:
    """Read what an attempt to run a job printed: by default the last attempt. Needs the right to describe the job.

    The beginning and the last part are returned, at most 1 MiB. A line says where bytes are left out.
    """
    deadline = Deadline(timeout)
    repository = log.repository if isinstance(log, AsyncClient) else log
    asked = JobLogArguments(name, JobEpoch(epoch or 0), attempt or 0, offset, GLSN(after))
    text = _Excerpt(offset)
    while True:
        answer = await repository.call(JOB_LOG, asked, timeout_ms=deadline.left_ms(), idempotent=True)
        for piece in answer.pieces:
            text.add(piece.offset, piece.data)
        if answer.is_end:
            break
        deadline.check(f"the log of job {name!r} was read up to byte {answer.next_offset}")
        asked = JobLogArguments(name, answer.epoch, answer.attempt, answer.next_offset, answer.after)
    return JobLogText(answer.epoch, answer.attempt, text.text(), answer.next_offset, answer.after, answer.is_running)


class _Excerpt:
    """The beginning and the end of a log, and words about what is missing."""

    def __init__(self, offset: int) -> None:
        self._at = offset
        self._head, self._tail = bytearray(), deque[bytes]()
        self._tail_bytes = self._dropped = 0

    def add(self, offset: int, data: bytes) -> None:
        if offset > self._at:
            self._put(_left_out(offset - self._at))
        self._put(data)
        self._at = offset + len(data)

    def _put(self, data: bytes) -> None:
        if not self._tail and len(self._head) + len(data) <= HEAD_BYTES:
            self._head += data
            return
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes > TAIL_BYTES and len(self._tail) > 1:
            gone = len(self._tail.popleft())
            self._tail_bytes -= gone
            self._dropped += gone

    def text(self) -> bytes:
        between = _left_out(self._dropped) if self._dropped else b""
        return bytes(self._head) + between + b"".join(self._tail)


def _left_out(count: int) -> bytes:
    return f"\n[{count} bytes are left out]\n".encode()
