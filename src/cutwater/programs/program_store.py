"""Stores programs in the log, and fetches them: as records of the internal topic ``_programs``, under their SHA-256.

A program is cut into records of less than 1 MiB, which a run publishes as one group. When the group is in the log, the
leader notes where. Everybody who may submit a job may publish under the name of any program, so a place says nothing
about the bytes: ``fetch_program`` compares the hash, and goes on with the next place if it differs. Lists of
requirements are stored in the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

from msgspec import Struct

from cutwater.client.async_client import AsyncClient
from cutwater.client.publish.part_writer import AsyncStager
from cutwater.client.publish.runs import Run
from cutwater.core.internal_topics import PROGRAM_ROWS_MAX, PROGRAMS
from cutwater.core.jobs.job_records import PROGRAM_RUN_PREFIX, ProgramPlace
from cutwater.core.jobs.job_requests import FetchProgramPlaceRequest, ProgramPlaces
from cutwater.core.jobs.job_spec import check_sha256
from cutwater.core.requests import InternalTopics, MakeJobTopicRequest
from cutwater.errors import (
    Damaged,
    InvalidArgument,
    NotFound,
    Refused,
    RunFenced,
    StagedExpired,
    Trimmed,
    Unavailable,
)
from cutwater.programs.archive_rules import ARCHIVE_BYTES_MAX, too_large
from cutwater.programs.packing import sha256_of
from cutwater.protocol.metadata_api import CHECK_PROGRAM, CheckProgram
from cutwater.runtime import system
from cutwater.runtime.deadlines import TIMEOUT_SECONDS, Deadline
from cutwater.types import GLSN

RECORD_BYTES = 1024 * 1024 - 4_096
"""Size of a record, but for the last one. Its batch stays below 1 MiB."""
ZIP_MARK = b"PK"
STORE_SECONDS = 120.0
FETCH_SECONDS = 60.0
TRIES_MAX = 5
RETRY_SECONDS = 0.1
BEGIN_SECONDS = 15.0


def run_name(sha256: str) -> str:
    """Return the name of the runs that store this program."""
    return f"{PROGRAM_RUN_PREFIX}{sha256}"


async def store_program(log: AsyncClient, data: bytes, *, timeout: float = STORE_SECONDS) -> str:
    """Store a program, or a list of requirements, unless an intact copy is stored. Returns its SHA-256."""
    if not data:
        raise InvalidArgument("there is nothing to store: pack a program first")
    if len(data) > ARCHIVE_BYTES_MAX:
        raise too_large("the program", ARCHIVE_BYTES_MAX)
    deadline, sha256 = Deadline(timeout), sha256_of(data)
    for attempt in range(1, TRIES_MAX + 1):
        if await _is_stored(log, sha256, deadline):
            break
        try:
            await _upload(log, sha256, data, deadline)
            break
        except (RunFenced, StagedExpired):
            # Somebody else stores it at the same time, or this upload took very long.
            if attempt == TRIES_MAX:
                raise
            await deadline.pause(RETRY_SECONDS * attempt * (1 + system.random().random()))
    return sha256


class StreamedProgram(Struct, frozen=True):
    """``was_stored``: an intact copy was there before."""

    bytes: int
    was_stored: bool


async def store_streamed(
    log: AsyncClient, sha256: str, chunks: AsyncIterator[bytes], *, timeout: float = STORE_SECONDS
) -> StreamedProgram:
    """Store a zip that comes in pieces, under the SHA-256 that its sender has named, unless an intact copy is stored.
    Only a record of it is in memory at a time. It is read to its end in any case; if it has another hash, nothing of it
    is kept."""
    check_sha256("program", sha256)
    deadline, pieces = Deadline(timeout), _Pieces(sha256, chunks)
    if await _is_stored(log, sha256, deadline):
        async for _ in pieces.records():
            pass
        return StreamedProgram(pieces.size, True)
    try:
        records = pieces.records()
        # Nothing is opened for what turns out to be no program with its first record, such as all of a small one.
        first = await anext(records)
        run = await _opened(log, sha256, deadline)
        async with await _stager(log, run, deadline) as stager:
            await stager.write([first], timeout=max(deadline.left, 0.001))
            async for record in records:
                await stager.write([record], timeout=max(deadline.left, 0.001))
            part = await stager.finish(timeout=max(deadline.left, 0.001))
        await log.publish(run, 0, [part], timeout=deadline.left or None)
    except (RunFenced, StagedExpired) as error:
        raise Refused(
            f"program {sha256} was not stored, since somebody else stores it at the same time, or it came too slowly: "
            "send it again"
        ) from error
    return StreamedProgram(pieces.size, False)


async def _stager(log: AsyncClient, run: Run, deadline: Deadline) -> AsyncStager:
    """Begin a part, as soon as there is a log stream for it: the topic may have been made just now."""
    begin = Deadline(min(BEGIN_SECONDS, deadline.left))
    while True:
        try:
            return await log.stager(run, 0, PROGRAMS.name, timeout=deadline.left or None)
        except Unavailable:
            if begin.is_over:
                raise
        await begin.pause(RETRY_SECONDS)
        await log.topic(PROGRAMS.name, timeout=deadline.left or None)


class _Pieces:
    """A program on its way, cut into records."""

    def __init__(self, sha256: str, chunks: AsyncIterator[bytes]) -> None:
        self._sha256, self._chunks, self.size = sha256, chunks, 0

    async def records(self) -> AsyncIterator[bytes]:
        """Yield the records. Raises at the end, at the latest, if they are not the program."""
        waiting, found = bytearray(), hashlib.sha256()
        async for chunk in self._chunks:
            if not self.size and chunk[: len(ZIP_MARK)] != ZIP_MARK[: len(chunk)]:
                raise InvalidArgument("this is no zip: pack the program first, also if it is a single file")
            self.size += len(chunk)
            if self.size > ARCHIVE_BYTES_MAX:
                raise too_large("the program", ARCHIVE_BYTES_MAX)
            found.update(chunk)
            waiting += chunk
            while len(waiting) >= RECORD_BYTES:
                yield bytes(waiting[:RECORD_BYTES])
                del waiting[:RECORD_BYTES]
        if not self.size:
            raise InvalidArgument("there is nothing to store: pack a program first")
        if found.hexdigest() != self._sha256:
            raise InvalidArgument(
                f"the {self.size} bytes that came have the SHA-256 {found.hexdigest()}, and not {self._sha256}: "
                "nothing was stored"
            )
        if waiting:
            yield bytes(waiting)


async def is_program_stored(log: AsyncClient, sha256: str, *, timeout: float = TIMEOUT_SECONDS) -> bool:
    """Return whether an intact copy of a program is stored."""
    check_sha256("program", sha256)
    return await _is_stored(log, sha256, Deadline(timeout))


async def _is_stored(log: AsyncClient, sha256: str, deadline: Deadline) -> bool:
    """Whether an intact copy is stored. A metadata node reads it: who submits a job may not read programs."""
    if not await _places(log, sha256, deadline):
        return False
    asked = CheckProgram(sha256)
    check = await log.repository.call(CHECK_PROGRAM, asked, timeout_ms=deadline.left_ms(), idempotent=True)
    return check.is_intact


async def _opened(log: AsyncClient, sha256: str, deadline: Deadline) -> Run:
    """Open a run that stores this program."""
    request = MakeJobTopicRequest(PROGRAMS.name)
    await log.repository.ask(request, InternalTopics, timeout_ms=deadline.left_ms())
    name = run_name(sha256)
    key = f"{name}:{system.token_hex(16)}"
    return await log.open_run(name, key, once=True, timeout=deadline.left or None)


async def _upload(log: AsyncClient, sha256: str, data: bytes, deadline: Deadline) -> None:
    run = await _opened(log, sha256, deadline)
    records = [data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES)]
    part = await log.stage(run, 0, PROGRAMS.name, records, timeout=deadline.left or None)
    await log.publish(run, 0, [part], timeout=deadline.left or None)


async def fetch_program(log: AsyncClient, sha256: str, *, timeout: float = FETCH_SECONDS) -> bytes:
    """Return the bytes that were stored under this SHA-256: they have exactly this hash."""
    check_sha256("program", sha256)
    deadline = Deadline(timeout)
    tried: set[ProgramPlace] = set()
    while True:
        places = [place for place in await _places(log, sha256, deadline) if place not in tried]
        if not places:
            break
        # The newest ones last: earlier ones are trimmed before them.
        tried.add(place := places[-1])
        try:
            data = await _read(log, place, deadline)
        except Trimmed:
            # It was copied forward meanwhile, and the next question says where to.
            continue
        if data is not None and hashlib.sha256(data).hexdigest() == sha256:
            return data
    if tried:
        raise Damaged(f"program {sha256} is stored, but no copy of it has this hash: submit it again")
    raise NotFound(f"program {sha256} is not stored, or not any more: submit it again")


async def _places(log: AsyncClient, sha256: str, deadline: Deadline) -> tuple[ProgramPlace, ...]:
    request = FetchProgramPlaceRequest(sha256)
    return (await log.repository.ask(request, ProgramPlaces, timeout_ms=deadline.left_ms())).places


async def _read(log: AsyncClient, place: ProgramPlace, deadline: Deadline) -> bytes | None:
    """Return what the records of a place hold; None if that cannot be a program."""
    if place.rows > PROGRAM_ROWS_MAX:
        return None
    found, size = [], 0
    stop = GLSN(place.glsn + place.rows)
    batches = log.batches(PROGRAMS.name, start=place.glsn, stop=stop, columns=["value"], timeout=deadline.left or None)
    async with batches:
        async for batch in batches:
            values = batch.column("value").to_pylist()
            size += sum(map(len, values))
            if size > ARCHIVE_BYTES_MAX:
                return None
            found += values
            deadline.check(f"program records at GLSN {place.glsn} were not read")
    return b"".join(found)
