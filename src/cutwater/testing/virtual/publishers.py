"""Queries of a simulated cluster that publish batches, as the Spark sink does: workers stage the rows of tasks, some of
them twice, and a driver publishes batch after batch.

A driver keeps its key and the last batch that it knows to be published, as a checkpoint does. When it is killed, or an
error ends it, it comes back and repeats the batch with other rows: the first decision stands. Another driver with a new
key may take over its name, and ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from cutwater.client.async_client import AsyncClient
from cutwater.client.publish.runs import Published, Run, RunStart
from cutwater.core.requests import PublishedGroup
from cutwater.errors import CutwaterError, OutputExists, RunFenced, Trimmed
from cutwater.testing.checkers.record import AppendOp, PublishOp, SimOutcome
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual import history as h
from cutwater.testing.virtual.workload import AGAIN_SECONDS, PLAIN, TYPED, VirtualClient
from cutwater.types import BatchNumber, Part

if TYPE_CHECKING:
    from cutwater.testing.virtual.simulation import ShippedSimulation

WORKERS_PER_SINK = 2
PAUSE_BATCHES = 3
"""Appenders make this many appends while a driver pauses."""
TASKS_MAX = 3
ATTEMPTS_MAX = 3
"""After so many failed attempts of a task, the query fails and begins again."""
SPECULATIVE = 0.15
"""Share of tasks that two workers run."""
ATTEMPT_SECONDS_MAX = 3.0
HANGS, HANG_SECONDS_MAX = 0.05, 2.0
"""How often a driver hangs before it publishes what is staged, and how long."""
CHECKPOINT_LOST = 0.1
"""Share of published batches after which the driver ends before its checkpoint has them."""


class TaskFailed(Exception):
    """All attempts of a task have failed."""


class StageTask:
    """One attempt of a task. ``done`` says whether it ended well, with the part if there were rows. A worker that is
    killed never says anything."""

    def __init__(self, run: Run, batch: int, topic: str, *, is_ordered: bool) -> None:
        self.run, self.batch, self.topic, self.is_ordered = run, batch, topic, is_ordered
        self.done: asyncio.Future[tuple[bool, Part | None]] = asyncio.get_running_loop().create_future()


class StagingWorker(VirtualClient):
    """Stages the rows of tasks. Every attempt has rows of its own, so that the log shows which one was published."""

    has_end = False

    def __init__(self, world: ShippedSimulation, name: str, host: str) -> None:
        super().__init__(world, name, host)
        self._tasks: list[StageTask] = []
        self._has_tasks = asyncio.Event()

    def give(self, task: StageTask) -> None:
        self._tasks.append(task)
        self._has_tasks.set()

    async def run(self, log: AsyncClient) -> None:
        while True:
            if self._tasks:
                task = self._tasks.pop(0)
                try:
                    task.done.set_result((True, await self._stage(log, task)))
                except CutwaterError as error:
                    self.world.note(f"{self.name}: {error.code}")
                    task.done.set_result((False, None))
            else:
                self._has_tasks.clear()
                await self._has_tasks.wait()

    async def _stage(self, log: AsyncClient, task: StageTask) -> Part | None:
        ops = [self._rows(task) for _ in range(self.random.choice((0, 1, 1, 2, 4)))]
        positions = [self.world.history.positions[op.payload] for op in ops for _ in range(op.batch.count)]
        if self.random.random() < 0.5:
            rows = self._content(ops, task.topic)
            where = positions if task.is_ordered else None
            part = await log.stage(task.run, task.batch, task.topic, rows, positions=where)
        else:
            async with await log.stager(task.run, task.batch, task.topic, ordered=task.is_ordered) as stager:
                for op in ops:
                    own = [self.world.history.positions[op.payload]] * op.batch.count if task.is_ordered else None
                    await stager.write(self._content([op], task.topic), positions=own)
                part = await stager.finish()
        if part is not None:
            self.world.note(f"{self.name} has staged {part.rows} rows of batch {task.batch} for {task.topic}")
            self.world.history.stage(part, ops)
        return part

    def _rows(self, task: StageTask) -> AppendOp:
        """Note rows that are about to be staged. They are in the log at most once, and only if they are decided on."""
        history = self.world.history
        op = history.begin(self.now, task.topic, self.random.choice((1, 2, 3)), self.world.event_time())
        op.outcome, op.part = SimOutcome.UNKNOWN, "not staged"
        # The rows of an attempt have rising positions, and those of several attempts are mixed.
        history.positions[op.payload] = b"%08d" % op.payload
        return op

    def _content(self, ops: Sequence[AppendOp], topic: str) -> list[object]:
        if topic == TYPED:
            return [row for op in ops for row in h.rows_of(op, "x" * self.padding())]
        return [
            {"value": value, "timestamp": time}
            for op in ops
            for value, time in zip(h.values_of(op, bytes(self.padding())), h.times_of(op), strict=True)
        ]


class VirtualSink(VirtualClient):
    """The driver of a query."""

    def __init__(self, world: ShippedSimulation, name: str, host: str, query: str, delay: float) -> None:
        super().__init__(world, name, host)
        self.query, self.delay = query, delay
        self.key = f"key of {name}"
        self.committed = -1
        self.published = 0
        self.is_fenced = False
        self.workers: list[StagingWorker] = []
        self.staged: list[Part] = []
        """The parts of the batch that is under way."""

    async def run(self, log: AsyncClient) -> None:
        if self.starts == 1:
            await asyncio.sleep(self.delay)
        start = RunStart()
        healed: int | None = None
        while not self.is_fenced and (healed is None or self.published == healed):
            try:
                await self._publish_next(log, start)
            except RunFenced:
                self.is_fenced = True
            except OutputExists:
                start = RunStart(replay=True)
                self.world.history.replays.add(self.key)
            except (CutwaterError, TaskFailed) as error:
                self.world.note(f"{self.name}: {error}")
                await asyncio.sleep(AGAIN_SECONDS)
            await self.pause(PAUSE_BATCHES * self.world.options.append_pause)
            if self.world.is_stopping and healed is None:
                # One more batch, now that nothing fails.
                healed = self.published

    async def _publish_next(self, log: AsyncClient, start: RunStart) -> None:
        run = await log.open_run(self.query, self.key, start=start)
        self._check_not_behind(run)
        batch = self.committed + 1
        self.staged = []
        if run.last_batch != batch or self.random.random() < 0.5:
            await self._stage(run, batch)
        if self.random.random() < HANGS:
            await asyncio.sleep(self.random.uniform(0.0, HANG_SECONDS_MAX))
        self.world.history.offered.append((run.run, batch, tuple(part.part for part in self.staged)))
        published = await log.publish(run, batch, self.staged)
        self.published += 1
        self.staged = []
        self._note(run, batch, published)
        if self.random.random() >= CHECKPOINT_LOST:
            self.committed = batch
        for group in published:
            await self._read_back(log, group)

    def _check_not_behind(self, run: Run) -> None:
        if run.last_batch < self.committed:
            what = f"batch {self.committed} was published, and {run} says that {run.last_batch} was the last"
            self.world.violations.append(Violation("groups", what))

    async def _stage(self, run: Run, batch: int) -> None:
        topics = (PLAIN, TYPED) if self.world.options.typed_topic else (PLAIN,)
        work = []
        for topic in topics:
            is_ordered = self.random.random() < 0.3
            for _ in range(self.random.randint(0, TASKS_MAX)):
                work.append(self._attempts(run, batch, topic, is_ordered=is_ordered))
        for outcome in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _attempts(self, run: Run, batch: int, topic: str, *, is_ordered: bool) -> None:
        """Let workers stage the rows of a task, and take the part of the first attempt that ends well."""
        for _ in range(ATTEMPTS_MAX):
            count = 2 if self.random.random() < SPECULATIVE else 1
            attempts = [StageTask(run, batch, topic, is_ordered=is_ordered) for _ in range(count)]
            for attempt in attempts:
                self.random.choice(self.workers).give(attempt)
            waiting = [attempt.done for attempt in attempts]
            await asyncio.wait(waiting, timeout=ATTEMPT_SECONDS_MAX, return_when=asyncio.FIRST_COMPLETED)
            for is_well, part in (future.result() for future in waiting if future.done()):
                if is_well:
                    self.staged += [] if part is None else [part]
                    return
        raise TaskFailed(f"a task of batch {batch} of run {run.run} has failed {ATTEMPTS_MAX} times")

    def _note(self, run: Run, batch: int, published: Sequence[Published]) -> None:
        self.world.note(f"{self.name} has published batch {batch} of run {run.run}: {len(published)} topics")
        groups = [
            PublishedGroup(self.world.cluster.topic(group.topic), group.stream, group.glsn, group.count)
            for group in published
        ]
        self.world.history.published.append(PublishOp(run.run, BatchNumber(batch), tuple(groups)))

    async def _read_back(self, log: AsyncClient, group: Published) -> None:
        """Check that published rows can be read, unless they were trimmed."""
        if self.random.random() < 0.5:
            return
        with suppress(Trimmed):
            end = group.glsn + group.count
            found = await log.table(group.topic, start=group.glsn, stop=end, columns=["glsn"])
            if found["glsn"].to_pylist() != list(range(group.glsn, end)):
                what = f"{group} was published, and a read of it found {found['glsn'].to_pylist()}"
                self.world.violations.append(Violation("groups", what))
