"""Publishes batches that are in the log exactly once and as a whole, over all their topics.

Many tasks, also in other processes, *stage* the rows of a batch; one driver then *publishes* it. Readers do not see
staged rows. The rows that were published first under a batch number are final, so a batch may be repeated, even with
other rows. ``Run``, ``Part`` and the results of ``publish`` are plain data that can be pickled.

``PublishingCalls`` is a part of ``AsyncClient``, here because only few programs use it directly; Spark's sink does.
"""

from __future__ import annotations

import inspect
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Iterable

from msgspec import UNSET, Struct, UnsetType

from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.cluster.metadata_client import Repository
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.convert.conversion import Records
from cutwater.client.convert.encoding import Compression, Limits
from cutwater.client.publish.part_writer import AsyncStager, Positions, rows_in
from cutwater.core.requests import OpenRunRequest, PublishAnswer, PublishRequest, RunAnswer, RunStart
from cutwater.errors import CutwaterError, DeadlineExceeded, InvalidArgument, NotFound, Refused, Unavailable
from cutwater.runtime.deadlines import Deadline
from cutwater.types import GLSN, BatchNumber, InputRange, JobEpoch, LogStreamId, Part, RunId

__all__ = ["InputRange", "Published", "PublishingCalls", "Run", "RunStart"]

CATALOG_SECONDS = 1.0
"""Staging asks for the catalog no more often than this."""
RETRY_SECONDS_MIN = 0.05
RETRY_SECONDS_MAX = 1.0
NAME_CHARS_MAX = 255


class Run(Struct, frozen=True, omit_defaults=True):
    """One lifetime of a query, or one batch write. ``last_batch`` is the last batch that was decided, -1 if none was,
    and ``last_input`` is its range of the input, if known. Staged parts belong to ``generation``; when it expires, the
    run has to be opened again. ``job_epoch`` is the assignment of a job that has opened the run, 0 if none has."""

    run: RunId
    generation: int
    last_batch: int
    name: str
    key: str
    job_epoch: int = 0
    last_input: InputRange | None = None


class Published(Struct, frozen=True):
    """Where the rows of a batch for one topic are: ``count`` records from ``glsn`` on."""

    topic: str
    stream: LogStreamId
    glsn: GLSN
    count: int


class PublishingCalls(ABC):
    _catalogs: Catalogs
    _nodes: Nodes
    _repository: Repository
    _limits: Limits
    _compression: Compression | None

    def __init_subclass__(cls) -> None:
        """Rename the methods, so that errors about arguments name a method as the caller knows it: as one of the client
        class."""
        for name, method in vars(PublishingCalls).items():
            if inspect.isfunction(method) and PublishingCalls in cls.__bases__:
                method.__qualname__ = f"{cls.__qualname__}.{name}"

    @abstractmethod
    def _deadline(self, timeout: float | None) -> Deadline: ...

    async def open_run(
        self,
        name: str,
        key: str,
        *,
        once: bool = False,
        start: RunStart | None = None,
        job_epoch: int = 0,
        timeout: float | None = None,
    ) -> Run:
        """Return the run of this key: the one that it had before, or a new one. A new key takes the name over from the
        previous run, which is ``RunFenced`` from then on. Without a name (``""``), no other run is affected. ``once``:
        for a single batch, under a key that no other run has.

        A new key under a name that has published is refused (``OutputExists``) before any run is fenced, unless
        ``start`` says that the run begins after the input of that output, or that its rows are wanted again.

        ``job_epoch`` is the number of an assignment of the job with this name; each assignment has a higher one than
        those before. Drivers of earlier assignments are ``RunFenced`` from then on, also with the same key.

        >>> run = log.open_run("totals", "key in a checkpoint")
        >>> run.last_batch
        -1
        >>> log.open_run("totals", "key in a checkpoint").run == run.run
        True
        """
        return await self._open_run(name, key, once, start, job_epoch, self._deadline(timeout))

    async def check_run(
        self,
        name: str,
        key: str,
        *,
        start: RunStart | None = None,
        job_epoch: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Check that ``open_run`` would return a run: raise what it would raise. Opens nothing, and fences no run.

        >>> run = log.open_run("checked", "key of the checked")
        >>> _ = log.publish(run, 0, [log.stage(run, 0, "t", [b"a"])])
        >>> log.check_run("checked", "key of the checked")
        >>> log.check_run("checked", "another key")                                # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        cutwater.errors.OutputExists: 'checked' has published 1 row, ...
        """
        await self._open_run(name, key, False, start, job_epoch, self._deadline(timeout), is_question=True)

    async def _open_run(
        self,
        name: str,
        key: str,
        once: bool,
        start: RunStart | None,
        job_epoch: int,
        deadline: Deadline,
        *,
        is_question: bool = False,
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
        request = OpenRunRequest(name, key, once, begin, is_question, _epoch(job_epoch))
        answer = await self._repository.ask(request, RunAnswer, timeout_ms=deadline.left_ms())
        if job_epoch and answer.job_epoch is UNSET:
            raise Refused(
                "the metadata repository is of an older version, which does not tell one assignment of a job from "
                "another: upgrade all its nodes first"
            )
        return Run(answer.run, answer.generation, answer.last_batch, name, key, job_epoch, answer.input or None)

    async def find_runs(self, name: str, *, timeout: float | None = None) -> tuple[Run, ...]:
        """Return all known runs of a name, oldest first, including those that are over. Opens and changes nothing.

        >>> _ = log.open_run("found", "first key"), log.open_run("found", "second key")
        >>> [run.key for run in log.find_runs("found")], log.find_runs("never opened")
        (['first key', 'second key'], ())
        """
        known = (await self._catalogs.description(self._deadline(timeout))).runs
        own = sorted((run for run in known if name and run.name == name), key=lambda run: run.run)
        return tuple(
            Run(run.run, run.generation, run.last_batch, run.name, run.key, run.job_epoch or 0, run.input or None)
            for run in own
        )

    async def stage(
        self,
        run: Run,
        batch: int,
        topic: str,
        records: Records,
        *,
        positions: Positions | None = None,
        timeout: float | None = None,
    ) -> Part | None:
        """Store rows of a batch where no reader sees them; durable when it returns. None if there are no rows.

        ``records`` are as for ``append``, of any number. With ``positions`` (bytes for each row, in order), the rows of
        all parts are published in the order of their positions; either all parts of a topic have positions or none has.
        Several tasks and processes may stage parts, and send them to the process that publishes.

        >>> run = log.open_run("orders", "key of the orders")
        >>> part = log.stage(run, 0, "t", [b"a", b"b"])
        >>> part.rows, log.table("t").num_rows
        (2, 0)
        """
        deadline = self._deadline(timeout)
        _check_batch(run, batch)
        if not rows_in(records):
            return None
        await self._catalogs.topic(topic, deadline)
        wait = RETRY_SECONDS_MIN
        failed: CutwaterError | None = None
        while True:
            try:
                async with await self._stager(run, batch, topic, positions is not None, deadline) as stager:
                    await stager.write(records, positions=positions, timeout=max(deadline.left, 0.001))
                    return await stager.finish(timeout=max(deadline.left, 0.001))
            except (Unavailable, NotFound) as error:
                if not isinstance(error, DeadlineExceeded) or failed is None:
                    failed = error
                if topic not in self._catalogs.view.topics or deadline.left <= wait:
                    raise failed from None
            # A storage node has failed. All rows are staged again, on other nodes, which the catalog may name by then.
            await deadline.pause(wait)
            wait = min(wait * 2, RETRY_SECONDS_MAX)
            try:
                await self._catalogs.fresh(deadline)
            except CutwaterError as error:
                # The earlier failure says more.
                raise failed from error

    async def stager(
        self, run: Run, batch: int, topic: str, *, ordered: bool = False, timeout: float | None = None
    ) -> AsyncStager:
        """Stage rows that come one batch after the other: ``write(rows)`` and then ``finish()``. Otherwise as
        ``stage``. A failure of a storage node ends it; its rows have to be staged again.

        >>> run = log.open_run("visits", "key of the visits")
        >>> with log.stager(run, 0, "t") as stager:
        ...     for value in (b"a", b"b"):
        ...         stager.write([value])
        ...     part = stager.finish()
        >>> part.rows
        2
        """
        return await self._stager(run, batch, topic, ordered, self._deadline(timeout))

    async def _stager(self, run: Run, batch: int, topic: str, ordered: bool, deadline: Deadline) -> AsyncStager:
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
            job_epoch=_epoch(run.job_epoch),
        )
        await stager.begin(deadline)
        return stager

    async def publish(
        self,
        run: Run,
        batch: int,
        parts: Iterable[Part | None],
        *,
        position: int | None = None,
        read: InputRange | None = None,
        timeout: float | None = None,
    ) -> tuple[Published, ...]:
        """Publish a batch that consists of these parts, of one topic or several, and return when all of it is in the
        log. The rows of each topic stay together, with consecutive positions. Readers see all of a topic's rows or
        none.

        A batch that was decided before stays as it was, and these parts are ignored. So a batch may be repeated after
        any failure, even with other rows. If the time is up, the batch may or may not have been decided; once it is, it
        will be published, even if this client ends. ``StagedExpired``: open the run again and stage the rows again.
        If the input is this log, ``position`` is the last GLSN whose rows are in the output, and ``read`` is the range
        that was read for this batch. A decided batch has one range: a publisher with another gets ``BatchDiffers``.

        >>> run = log.open_run("billing", "key of the billing")
        >>> published = log.publish(run, 0, [log.stage(run, 0, "t", [b"a", b"b"])])
        >>> [(group.topic, group.count) for group in published]
        [('t', 2)]
        >>> log.publish(run, 0, [log.stage(run, 0, "t", [b"other"])]) == published
        True
        """
        deadline = self._deadline(timeout)
        _check_batch(run, batch)
        at: object = position
        if at is not None and (not isinstance(at, int) or isinstance(at, bool) or at < 0):
            raise InvalidArgument(f"position is {reprlib.repr(position)}: it is a GLSN, 0 for none, or left out")
        wanted = _wanted(parts)
        range_read: object = read
        if range_read is not None and not isinstance(range_read, InputRange):
            raise InvalidArgument(f"read is {reprlib.repr(read)}: give an InputRange, or leave it out")
        request = PublishRequest(
            run.run,
            BatchNumber(batch),
            wanted,
            None if position is None else GLSN(position),
            _epoch(run.job_epoch),
            UNSET if read is None else read,
        )
        answer = await self._repository.ask(request, PublishAnswer, timeout_ms=deadline.left_ms())
        if any(group.topic not in self._catalogs.view.names for group in answer.topics):
            await self._catalogs.fresh(deadline)
        names = self._catalogs.view.names
        return tuple(
            Published(names[group.topic], group.stream, group.glsn, group.count)
            for group in answer.topics
            if group.topic in names
        )


def _epoch(given: object) -> JobEpoch | UnsetType:
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise InvalidArgument(f"job_epoch is {reprlib.repr(given)}: assignments are numbered from 1 on; 0 is none")
    return JobEpoch(given) if given else UNSET


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
