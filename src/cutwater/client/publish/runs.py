"""Publishes batches that are in the log exactly once and as a whole, over all their topics.

Many tasks, also in other processes, *stage* the rows of a batch; one driver then *publishes* it. Readers do not see
staged rows. The rows that were published first under a batch number are final, so a batch may be repeated, even with
other rows. ``Run``, ``Part`` and the results of ``publish`` are plain data that can be pickled.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

from msgspec import Struct

from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.cluster.metadata_client import Repository
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.convert.conversion import Records
from cutwater.client.convert.encoding import Compression, Limits
from cutwater.client.publish.part_writer import AsyncStager, Positions, rows_in
from cutwater.core.requests import OpenRunRequest, PublishAnswer, PublishRequest, RunAnswer, RunStart
from cutwater.errors import CutwaterError, DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN, BatchNumber, LogStreamId, Part, RunId

__all__ = ["Published", "Run", "RunStart", "Runs"]

CATALOG_SECONDS = 1.0
"""Staging asks for the catalog no more often than this."""
RETRY_SECONDS_MIN = 0.05
RETRY_SECONDS_MAX = 1.0
NAME_CHARS_MAX = 255


class Run(Struct, frozen=True):
    """One lifetime of a query, or one batch write. ``last_batch`` is the last batch that was decided, -1 if none was.
    Staged parts belong to ``generation``; when it expires, the run has to be opened again."""

    run: RunId
    generation: int
    last_batch: int
    name: str
    key: str


class Published(Struct, frozen=True):
    """Where the rows of a batch for one topic are: ``count`` records from ``glsn`` on."""

    topic: str
    stream: LogStreamId
    glsn: GLSN
    count: int


class Runs:
    def __init__(
        self,
        catalogs: Catalogs,
        nodes: Nodes,
        repository: Repository,
        limits: Limits,
        compression: Compression | None,
    ) -> None:
        self._catalogs, self._nodes, self._repository = catalogs, nodes, repository
        self._limits, self._compression = limits, compression

    async def open(
        self, name: str, key: str, once: bool, start: RunStart | None, deadline: Deadline, *, is_question: bool = False
    ) -> Run:
        given: dict[str, object] = {"name": name, "key": key}
        for what, text in given.items():
            if not isinstance(text, str) or len(text) > NAME_CHARS_MAX:
                raise InvalidArgument(
                    f"the {what} of a run is a text of at most {NAME_CHARS_MAX} characters, not {reprlib.repr(text)}"
                )
        if not key:
            raise InvalidArgument("a run has a key: one that its checkpoint keeps, or a random one for a single write")
        begin: object = RunStart() if start is None else start
        if not isinstance(begin, RunStart):
            raise InvalidArgument(f"start is {reprlib.repr(start)}: give a RunStart, or leave it out")
        request = OpenRunRequest(name, key, once, begin, is_question)
        answer = await self._repository.ask(request, RunAnswer, timeout_ms=deadline.left_ms())
        return Run(answer.run, answer.generation, answer.last_batch, name, key)

    async def of_name(self, name: str, deadline: Deadline) -> tuple[Run, ...]:
        known = (await self._catalogs.description(deadline)).runs
        own = sorted((run for run in known if name and run.name == name), key=lambda run: run.run)
        return tuple(Run(run.run, run.generation, run.last_batch, run.name, run.key) for run in own)

    async def stager(self, run: Run, batch: int, topic: str, ordered: bool, deadline: Deadline) -> AsyncStager:
        """Return a stager that has begun: the nodes that will hold the part are known."""
        _check_batch(run, batch)
        info = await self._catalogs.topic(topic, deadline)
        # The parts of later batches use log streams that were opened meanwhile.
        self._catalogs.look(after_seconds=CATALOG_SECONDS)
        stager = AsyncStager(
            self._catalogs,
            self._nodes,
            self._limits,
            self._compression,
            run=(run.run, run.generation),
            batch=BatchNumber(batch),
            topic=info,
            ordered=ordered,
            seconds=deadline.seconds,
        )
        await stager.begin(deadline)
        return stager

    async def stage(
        self, run: Run, batch: int, topic: str, records: Records, positions: Positions | None, deadline: Deadline
    ) -> Part | None:
        """Stage rows until they are staged or the time is up. After a failure of a storage node, stage all of them
        again, on other nodes."""
        _check_batch(run, batch)
        if not rows_in(records):
            return None
        await self._catalogs.topic(topic, deadline)
        wait = RETRY_SECONDS_MIN
        failed: CutwaterError | None = None
        while True:
            try:
                async with await self.stager(run, batch, topic, positions is not None, deadline) as stager:
                    await stager.write(records, positions=positions, timeout=max(deadline.left, 0.001))
                    return await stager.finish(timeout=max(deadline.left, 0.001))
            except (Unavailable, NotFound) as error:
                if not isinstance(error, DeadlineExceeded) or failed is None:
                    failed = error
                if topic not in self._catalogs.view.topics or deadline.left <= wait:
                    raise failed from None
            await deadline.pause(wait)
            wait = min(wait * 2, RETRY_SECONDS_MAX)
            await self._look_again(failed, deadline)

    async def _look_again(self, failed: CutwaterError, deadline: Deadline) -> None:
        """Fetch the catalog, which may have changed. If that fails, raise the earlier failure, which says more."""
        try:
            await self._catalogs.fresh(deadline)
        except CutwaterError as error:
            raise failed from error

    async def publish(
        self, run: Run, batch: int, parts: Iterable[Part | None], position: int | None, deadline: Deadline
    ) -> tuple[Published, ...]:
        _check_batch(run, batch)
        read: object = position
        if read is not None and (not isinstance(read, int) or isinstance(read, bool) or read < 0):
            raise InvalidArgument(f"position is {reprlib.repr(position)}: it is a GLSN, 0 for none, or left out")
        wanted = _wanted(parts)
        request = PublishRequest(run.run, BatchNumber(batch), wanted, None if position is None else GLSN(position))
        answer = await self._repository.ask(request, PublishAnswer, timeout_ms=deadline.left_ms())
        if any(group.topic not in self._catalogs.view.names for group in answer.topics):
            await self._catalogs.fresh(deadline)
        names = self._catalogs.view.names
        return tuple(
            Published(names[group.topic], group.stream, group.glsn, group.count)
            for group in answer.topics
            if group.topic in names
        )


def _check_batch(run: object, batch: object) -> None:
    if not isinstance(run, Run):
        raise InvalidArgument(f"a run is what open_run returns, not {reprlib.repr(run)}")
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 0:
        raise InvalidArgument(f"batches are numbered from 0, there is no batch {reprlib.repr(batch)}")


def _wanted(parts: object) -> tuple[Part, ...]:
    """Return the parts that are not None, after checking that they fit together."""
    given: tuple[object, ...] = tuple(parts) if isinstance(parts, Iterable) else (parts,)
    wanted = tuple(part for part in given if isinstance(part, Part))
    wrong = [part for part in given if part is not None and not isinstance(part, Part)]
    if wrong or not isinstance(parts, Iterable):
        raise InvalidArgument(
            "a batch consists of parts as stage() returns them, in a list or the like, not of "
            f"{reprlib.repr(wrong[0] if wrong else parts)}"
        )
    ordered = {(part.topic, part.ordered) for part in wanted}
    if len(ordered) > len({topic for topic, _ in ordered}):
        raise InvalidArgument("of one topic, either all parts of a batch have positions or none has: stage them alike")
    return wanted
