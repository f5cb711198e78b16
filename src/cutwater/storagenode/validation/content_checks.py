"""Checks the content of batches once, before they get a place in the log: the head checks appends, and every holder
checks staged parts. After that, no server refuses bytes because of their content.

Small bodies are checked on the event loop, where they arrive. Large ones, and those that must be decompressed, are
checked in a thread. Appends to one log stream keep their order, so later ones wait while an earlier one is checked.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from cutwater.durations import roughly, shown
from cutwater.errors import CutwaterError, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from cutwater.format.bodies import BadBody, BodyForm, inflated_bytes, problem_with
from cutwater.format.checksum import Buffer
from cutwater.format.entry_codec import EntryFrame
from cutwater.format.ipc_message import BadMessage, may_be_compressed, read_message
from cutwater.format.plain_bodies import is_plain
from cutwater.protocol.storage_api import AppendArguments
from cutwater.runtime import system
from cutwater.runtime.threads import in_thread
from cutwater.storage.results import FrameCheck
from cutwater.storagenode.memory_budget import MemoryBudget
from cutwater.storagenode.replica.replica_driver import ReplicaDriver
from cutwater.storagenode.validation.topic_forms import KnownTopics, Moment, TopicForms
from cutwater.types import MILLISECOND, Batch, BatchKind, EventTime, LogStreamId
from cutwater.wire.calls.incoming_calls import Call

_log = logging.getLogger(__name__)

LOOP_BYTES_MAX: Final = 1_280 * 1024
"""Larger uncompressed bodies are checked in a thread. A checksum over this many bytes takes equally long."""
LOOP_INFLATED_BYTES_MAX: Final = 128 * 1024
"""The same limit for columns that must be decompressed."""
WAITING_BYTES_MAX: Final = 64 * 1024 * 1024
WAITING_MAX: Final = 8_192
RETRY_MS: Final = 20
THREADS: Final = 2

Taken = Callable[[Batch], None]


class _Waiting:
    __slots__ = ("asker", "batch", "since", "take")

    def __init__(self, batch: Batch, asker: Call[AppendArguments], take: Taken, since: Moment) -> None:
        self.batch, self.asker, self.take, self.since = batch, asker, take, since


class ContentChecks:
    def __init__(
        self, topics: KnownTopics, replicas: Mapping[LogStreamId, ReplicaDriver], budget: MemoryBudget, name: str
    ) -> None:
        self._topics, self._replicas, self._budget = topics, replicas, budget
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=name)
        self._queues: dict[LogStreamId, deque[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = self._waiting_bytes = 0

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Appends.

    def append(self, stream: LogStreamId, batch: Batch, asker: Call[AppendArguments], take: Taken) -> None:
        """Pass a valid batch to ``take``, at once or after earlier ones. If the batch is invalid, raises an error or
        tells the asker. ``check_batch`` has already checked its numbers. A batch that a producer repeats is already in
        the log, and is not refused for its content."""
        is_sound = False
        if stream not in self._queues:
            try:
                is_sound = self._is_sound(stream, batch)
            except InvalidArgument:
                if not self._has(stream, batch):
                    raise
                is_sound = True
        if is_sound:
            take(batch)
        else:
            self._wait(stream, _Waiting(batch, asker, take, self._topics.now()))

    def _has(self, stream: LogStreamId, batch: Batch) -> bool:
        """Whether this very batch of a producer is committed, as far as the replica here remembers."""
        driver = self._replicas.get(stream)
        return driver is not None and driver.replica.dedup.has(batch)

    def _is_sound(self, stream: LogStreamId, batch: Batch) -> bool:
        """Whether the batch is known to be valid without waiting; raises if it is invalid."""
        if batch.kind is not BatchKind.DATA and batch.declared is None:
            return True
        topic = self._topics.known(stream)
        if topic is None:
            return False
        if batch.kind is BatchKind.DATA:
            form = topic.form(batch.schema)
            if form is None:
                return False
            # Nearly all batches are plain, and checking that is very cheap.
            is_plain_body = form.is_key_value and is_plain(batch.body, batch.count, batch.time_min, batch.time_max)
            if not is_plain_body:
                if not _is_quick(batch):
                    return False
                self._check_body(batch, topic, form)
        if topic.ahead_us:
            self._check_times(stream, batch, topic)
        return True

    def _check(self, stream: LogStreamId, batch: Batch, topic: TopicForms, form: BodyForm) -> None:
        """Raise if the batch is invalid. Runs in any thread."""
        self._check_body(batch, topic, form)
        self._check_times(stream, batch, topic)

    @staticmethod
    def _check_body(batch: Batch, topic: TopicForms, form: BodyForm) -> None:
        problem = problem_with(batch.body, form, batch.count, batch.time_min, batch.time_max)
        if problem:
            raise malformed(topic, problem)

    def _check_times(self, stream: LogStreamId, batch: Batch, topic: TopicForms) -> None:
        if not topic.ahead_us:
            return
        driver = self._replicas.get(stream)
        last = driver.storage.last_commit if driver is not None else None
        now = max(system.wall_time_ns() // 1_000, last.time if last is not None else 0)
        if batch.kind is BatchKind.DATA:
            check_ahead(topic, largest_of(batch.count), batch.time_max, now)
        if batch.declared is not None:
            check_ahead(topic, "the declared watermark", batch.declared, now)

    async def check_of(self, stream: LogStreamId) -> FrameCheck | None:
        """Return the check for stored frames of a log stream; None if the topic was deleted."""
        try:
            topic = await self._topics.of_stream(stream)
        except NotFound:
            return None

        def check(frame: EntryFrame) -> str:
            header = frame.header
            if header.kind is not BatchKind.DATA:
                return ""
            form = topic.form(header.schema)
            if form is None:
                return f"it names schema {header.schema}, which topic {topic.name!r} does not have"
            return problem_with(frame.body, form, header.count, header.time_min, header.time_max)

        return check

    def _wait(self, stream: LogStreamId, waiting: _Waiting) -> None:
        size = len(waiting.batch.body)
        if self._waiting and (self._waiting_bytes + size > WAITING_BYTES_MAX or self._waiting >= WAITING_MAX):
            raise ResourceExhausted(
                f"{self._waiting} batches with {self._waiting_bytes} bytes wait to be checked", retry_ms=RETRY_MS
            )
        self._waiting += 1
        self._waiting_bytes += size
        queue = self._queues.get(stream)
        if queue is not None:
            queue.append(waiting)
            return
        self._queues[stream] = deque([waiting])
        task = self._loop.create_task(self._work_off(stream))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("the check of an append failed, which is a bug", exc_info=task.exception())

    async def _work_off(self, stream: LogStreamId) -> None:
        """Check waiting batches in order until none is left: only then may a new batch skip the queue."""
        queue = self._queues[stream]
        try:
            while queue:
                waiting = queue[0]
                try:
                    try:
                        await self._check_next(stream, waiting)
                    except InvalidArgument:
                        if not self._has(stream, waiting.batch):
                            raise
                    waiting.take(waiting.batch)
                except CutwaterError as error:
                    waiting.asker.fail(error)
                queue.popleft()
                self._waiting -= 1
                self._waiting_bytes -= len(waiting.batch.body)
        finally:
            del self._queues[stream]
            for waiting in queue:
                # Only when the node stops, or after a bug: no caller may wait forever.
                waiting.asker.fail(Unavailable("this could not be checked, and nothing was appended: try again"))
                self._waiting -= 1
                self._waiting_bytes -= len(waiting.batch.body)

    async def _check_next(self, stream: LogStreamId, waiting: _Waiting) -> None:
        batch = waiting.batch
        if batch.kind is not BatchKind.DATA:
            self._check_times(stream, batch, await self._topics.of_stream(stream, waiting.since))
            return
        topic, form = await self._topics.form_of_stream(stream, batch.schema, waiting.since)
        if waiting.asker.is_cancelled:
            raise Unavailable("the caller did not wait for this append: nothing was appended")
        if _is_quick(batch):
            self._check(stream, batch, topic, form)
        else:
            async with self._budget.reserved(needed(batch.body, topic)):
                await in_thread(self._threads, partial(self._check, stream, batch, topic, form))


def needed(body: Buffer, topic: TopicForms) -> int:
    """Return the memory needed to check a body; 0 if its columns are not compressed. Raises if the size is unknown or
    too large; nothing is decompressed then."""
    try:
        return inflated_bytes(body)
    except BadBody as error:
        raise malformed(topic, str(error)) from None


def _is_quick(batch: Batch) -> bool:
    """Whether the event loop can check the batch itself without delaying other work."""
    if len(batch.body) > LOOP_BYTES_MAX or "pyarrow" not in sys.modules:
        # Arrow is slow to import, too.
        return False
    if not may_be_compressed(batch.body):
        return True
    try:
        message = read_message(batch.body)
    except BadMessage:
        return True
    return message.inflated_bytes <= LOOP_INFLATED_BYTES_MAX


def check_ahead(topic: TopicForms, what: str, moment: EventTime, now: int) -> None:
    if moment > now + topic.ahead_us:
        raise InvalidArgument(
            f"{what} is {_shown(moment)}, {roughly((moment - now) // MILLISECOND)} ahead of the log's clock, and topic "
            f"{topic.name!r} takes at most {shown(topic.ahead_us // MILLISECOND)}: correct the clock or the unit of "
            "the timestamps, or change event_time_ahead_max of the topic"
        )


def largest_of(records: int) -> str:
    return "the event time" if records == 1 else f"the largest event time of {records} records"


def _shown(moment: EventTime) -> str:
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=moment)).isoformat()
    except OverflowError:
        return f"{moment} (microseconds since 1970)"


def malformed(topic: TopicForms, problem: str) -> InvalidArgument:
    return InvalidArgument(
        f"the body of the batch is not what topic {topic.name!r} takes: {problem}. Nothing was taken"
    )
