"""The leader keeps programs over trims of their topic: first it copies those that are live behind the position.

Copying a program means: read it at one of its places, compare its hash, publish it again as a new group, and wait until
its new place is noted. All that is before the trim, so the death of the leader, or of anything else, at any step leaves
a program twice at worst. A trim by an operator or by retention does this first; and when too much of the topic is dead,
the leader trims by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging

from cutwater.core.internal_topics import PROGRAM_ROWS_MAX, PROGRAMS
from cutwater.core.jobs.job_records import PROGRAM_RUN_PREFIX, ProgramPlace
from cutwater.core.order.program_trims import is_of_programs, live_programs
from cutwater.core.order.state import OrderState
from cutwater.core.requests import Answer, Catalog, CatalogRequest, Request, TrimRequest
from cutwater.errors import CutwaterError, Refused, Trimmed, Unavailable
from cutwater.metadata.internal.group_stager import Decide, GroupStager
from cutwater.metadata.internal.internal_reader import InternalReader
from cutwater.metadata.retention import Connect
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN

_log = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
COPY_SECONDS = 60.0
"""How long reading or publishing one program may take."""
DEAD_BYTES_MAX = 256 * 1024 * 1024
PROGRAM_BYTES_MAX = 80 * 1024 * 1024
"""Records of one place are read no further: a program has at most 64 MiB."""


class ProgramKeeper:
    """See the module. ``decide`` submits a request to the leader."""

    def __init__(
        self, state: OrderState, connect: Connect, decide: Decide, *, dead_bytes_max: int = DEAD_BYTES_MAX
    ) -> None:
        self._state, self._decide, self._dead_bytes_max = state, decide, dead_bytes_max
        self._reader = InternalReader(self._catalog, connect)
        self._stager = GroupStager(state, connect, decide)
        self._working = asyncio.Lock()
        self._left_bytes = 0
        """The size of the topic after the last trim of this leader: whole segments go, so dead bytes may stay."""
        self._intact: set[tuple[str, ProgramPlace]] = set()
        """Places that this leader has read, with the program that is there."""

    async def _catalog(self) -> Catalog:
        answer = await self._decide(CatalogRequest())
        if not isinstance(answer, Catalog):
            raise Unavailable("the leader gave no catalog: try again")
        return answer

    # Trims.

    async def prepare(self, request: Request) -> None:
        """Before a trim of the topic of programs, copy what is live behind its position. Other requests need
        nothing."""
        if isinstance(request, TrimRequest) and is_of_programs(self._state.topic_named(request.topic)):
            if request.before > self._state.high_watermark + 1:
                # It will be refused. No copy would ever be behind it.
                return
            async with self._working:
                await self._copy_live(GLSN(request.before))

    async def decide(self, request: Request) -> Answer:
        """Decide a request, after preparing it."""
        await self.prepare(request)
        return await self._decide(request)

    async def keep_for_ever(self, every_seconds: float = LOOK_SECONDS) -> None:
        try:
            while True:
                await asyncio.sleep(every_seconds)
                try:
                    await self.look()
                except CutwaterError as error:
                    _log.info("the topic of programs is not looked after now: %s", error.message)
                except Exception:
                    # A bug here must not end the leader's term.
                    _log.exception("the topic of programs cannot be looked after")
        finally:
            self._reader.close()

    async def look(self) -> None:
        """Trim the topic if more of it is dead than may be, and more than is live."""
        if not is_of_programs(self._state.topic_named(PROGRAMS.name)):
            return
        size = await self._reader.size_bytes(PROGRAMS.name, Deadline(COPY_SECONDS))
        live = sum(max(place.bytes for place in places) for places in live_programs(self._state).values())
        if size - live <= max(self._dead_bytes_max, live) or size - self._left_bytes <= self._dead_bytes_max:
            return
        before = GLSN(self._state.high_watermark + 1)
        _log.info("%s of %s bytes of programs are dead: they are trimmed before GLSN %s", size - live, size, before)
        await self.decide(TrimRequest(PROGRAMS.name, before))
        self._left_bytes = await self._reader.size_bytes(PROGRAMS.name, Deadline(COPY_SECONDS))

    # Copies.

    async def _copy_live(self, before: GLSN) -> None:
        """Copy live programs until each has an intact place at or behind a position. Others may become live meanwhile:
        the trim itself is refused then, and has to be asked for again."""
        self._intact = {(sha256, place) for sha256, place in self._intact if self._is_noted(sha256, place)}
        for sha256 in list(live_programs(self._state)):
            if not await self._has_copy_behind(sha256, before):
                await self._copy(sha256)

    def _is_noted(self, sha256: str, place: ProgramPlace) -> bool:
        return place in self._state.jobs.programs_stored.get(sha256, ())

    def _places(self, sha256: str) -> list[ProgramPlace]:
        """Return the places of a program, the newest first."""
        return sorted(self._state.jobs.programs_stored.get(sha256, ()), key=lambda place: -place.glsn)

    async def _has_copy_behind(self, sha256: str, before: GLSN) -> bool:
        for place in self._places(sha256):
            if place.glsn >= before and await self._read(sha256, place) is not None:
                return True
        return False

    async def _copy(self, sha256: str) -> None:
        for place in self._places(sha256):
            values = await self._read(sha256, place, is_wanted=True)
            if values is None:
                continue
            deadline = Deadline(COPY_SECONDS)
            group = await self._stager.publish(f"{PROGRAM_RUN_PREFIX}{sha256}", PROGRAMS.name, values, deadline)
            _log.info("program %s was copied from GLSN %s to %s", sha256, place.glsn, group.glsn)
            if not any(found.glsn == group.glsn for found in self._places(sha256)):
                raise Unavailable(f"the new place of program {sha256} is not noted: trim again")
            return
        if self._places(sha256):
            raise Refused(
                f"program {sha256} is live, and no copy of it has its hash, so it cannot be copied: submit it again, "
                "or delete the versions of jobs that name it, then trim again"
            )

    async def _read(self, sha256: str, place: ProgramPlace, *, is_wanted: bool = False) -> list[bytes] | None:
        """Return the records at a place if they are the program, else None. If they are not wanted and were read
        before, they are not read again, and the list is empty."""
        if not is_wanted and (sha256, place) in self._intact:
            return []
        values = await read_place(self._reader, sha256, place, Deadline(COPY_SECONDS))
        if values is not None:
            self._intact.add((sha256, place))
        return values


async def read_place(
    reader: InternalReader, sha256: str, place: ProgramPlace, deadline: Deadline
) -> list[bytes] | None:
    """Return the records at a place if they are the program with this hash, else None."""
    digest, values, size = hashlib.sha256(), list[bytes](), 0
    if place.rows > PROGRAM_ROWS_MAX:
        return None
    last = GLSN(place.glsn + place.rows - 1)
    try:
        async for batch in reader.rows(PROGRAMS.name, place.glsn, last, deadline):
            for row in batch.rows:
                digest.update(row.value)
                values.append(row.value)
                size += len(row.value)
            if size > PROGRAM_BYTES_MAX:
                return None
    except Trimmed:
        return None
    return values if digest.hexdigest() == sha256 else None


async def is_stored_intact(
    reader: InternalReader, sha256: str, places: tuple[ProgramPlace, ...], deadline: Deadline
) -> bool:
    """Return whether any of these places has the program."""
    for place in reversed(places):
        if await read_place(reader, sha256, place, deadline) is not None:
            return True
    return False
