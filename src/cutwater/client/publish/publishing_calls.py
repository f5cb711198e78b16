"""The client's methods for publishing whole batches: rows are staged, and then published together.

Part of ``AsyncClient``, in a file of its own because only few programs use it directly; Spark's sink does.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable

from cutwater.client.convert.conversion import Records
from cutwater.client.publish.part_writer import AsyncStager
from cutwater.client.publish.part_writer import Positions as RowPositions
from cutwater.client.publish.runs import Published, Run, Runs, RunStart
from cutwater.runtime.deadlines import Deadline
from cutwater.types import Part


class PublishingCalls(ABC):
    _runs: Runs

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
        timeout: float | None = None,
    ) -> Run:
        """Return the run of this key: the one that it had before, or a new one. A new key takes the name over from the
        previous run, which is ``RunFenced`` from then on. Without a name (``""``), no other run is affected. ``once``:
        for a single batch, under a key that no other run has.

        A new key under a name that has published is refused (``OutputExists``) before any run is fenced, unless
        ``start`` says that the run begins after the input of that output, or that its rows are wanted again.

        >>> run = log.open_run("totals", "key in a checkpoint")
        >>> run.last_batch
        -1
        >>> log.open_run("totals", "key in a checkpoint").run == run.run
        True
        """
        return await self._runs.open(name, key, once, start, self._deadline(timeout))

    async def check_run(
        self, name: str, key: str, *, start: RunStart | None = None, timeout: float | None = None
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
        await self._runs.open(name, key, False, start, self._deadline(timeout), is_question=True)

    async def find_runs(self, name: str, *, timeout: float | None = None) -> tuple[Run, ...]:
        """Return all known runs of a name, oldest first, including those that are over. Opens and changes nothing.

        >>> _ = log.open_run("found", "first key"), log.open_run("found", "second key")
        >>> [run.key for run in log.find_runs("found")], log.find_runs("never opened")
        (['first key', 'second key'], ())
        """
        return await self._runs.of_name(name, self._deadline(timeout))

    async def stage(
        self,
        run: Run,
        batch: int,
        topic: str,
        records: Records,
        *,
        positions: RowPositions | None = None,
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
        return await self._runs.stage(run, batch, topic, records, positions, self._deadline(timeout))

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
        return await self._runs.stager(run, batch, topic, ordered, self._deadline(timeout))

    async def publish(
        self,
        run: Run,
        batch: int,
        parts: Iterable[Part | None],
        *,
        position: int | None = None,
        timeout: float | None = None,
    ) -> tuple[Published, ...]:
        """Publish a batch that consists of these parts, of one topic or several, and return when all of it is in the
        log. The rows of each topic stay together, with consecutive positions. Readers see all of a topic's rows or
        none.

        A batch that was decided before stays as it was, and these parts are ignored. So a batch may be repeated after
        any failure, even with other rows. If the time is up, the batch may or may not have been decided; once it is, it
        will be published, even if this client ends. ``StagedExpired``: open the run again and stage the rows again.
        ``position``: the GLSN up to which the input was read for this batch, if the input is this log.

        >>> run = log.open_run("billing", "key of the billing")
        >>> published = log.publish(run, 0, [log.stage(run, 0, "t", [b"a", b"b"])])
        >>> [(group.topic, group.count) for group in published]
        [('t', 2)]
        >>> log.publish(run, 0, [log.stage(run, 0, "t", [b"other"])]) == published
        True
        """
        return await self._runs.publish(run, batch, parts, position, self._deadline(timeout))
