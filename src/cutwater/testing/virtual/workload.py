"""Clients of a simulated cluster. They use the public methods of ``AsyncClient`` only, and note what they did and saw.

Each client is a process of its own, which may be killed and started again.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.client.async_client import AsyncClient
from cutwater.client.read.records import Record
from cutwater.errors import (
    AppendUnknown,
    CutwaterError,
    DeadlineExceeded,
    InvalidArgument,
    ProducerFenced,
    SequenceExpired,
    SequenceReused,
    Trimmed,
)
from cutwater.testing.checkers.record import AppendOp, SimOutcome
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual import history as h
from cutwater.testing.virtual.loop import place_of
from cutwater.testing.virtual.processes import SimProcess
from cutwater.types import GLSN, Ack

if TYPE_CHECKING:
    from cutwater.testing.virtual.simulation import ShippedSimulation

PLAIN, TYPED = "t", "u"
"""The names of the two topics: one of keys and values, one with a schema."""
AGAIN_SECONDS = 0.1
EVENT_TIME_START_US = 1_700_000_000_000_000


class VirtualClient(ABC):
    """One client process. ``run`` is its program, which begins again after a kill."""

    has_end = True
    """Whether the program ends when the world stops."""

    def __init__(self, world: ShippedSimulation, name: str, host: str) -> None:
        self.world, self.name, self.host = world, name, host
        self.random = Random(world.random.getrandbits(64))
        self.process: SimProcess | None = None
        self.starts = 0
        self.is_done = False
        """Whether the program has ended: nothing that it called is under way."""
        self._appends: list[AppendOp] = []
        """What this life has begun to append."""

    # Life.

    def start(self) -> None:
        self.starts += 1
        self.process = self.world.cluster.new_process(f"{self.name}.{self.starts}", self.host)
        self.world.loop.spawn(self.process, self._live())

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.world.cluster.network.process_ended(self.process)
        self.give_up()

    def give_up(self) -> None:
        """Nothing will be told of the appends that are under way."""
        for op in self._appends:
            if op.outcome is SimOutcome.PENDING:
                op.outcome = SimOutcome.UNKNOWN
        self._appends = []

    def begin(self, topic: str, counts: tuple[int, ...], producer: tuple[str, int] | None = None) -> AppendOp:
        """Note an append of some records, which is about to be called."""
        count, time = self.random.choice(counts), self.world.event_time()
        op = self.world.history.begin(self.now, topic, count, time, producer)
        self._appends.append(op)
        return op

    @property
    def now(self) -> int:
        return self.world.loop.callbacks

    async def _live(self) -> None:
        try:
            await self.connect_and_run()
        except Exception as error:
            self.world.violations.append(Violation("crash", f"{self.name}: {error!r}{place_of(error)}"))
        self.is_done = True

    async def connect_and_run(self) -> None:
        await self.world.cluster.live(self)

    @abstractmethod
    async def run(self, log: AsyncClient) -> None: ...

    async def pause(self, mean: float) -> None:
        await asyncio.sleep(self.random.expovariate(1 / mean))

    def padding(self) -> int:
        return self.random.randint(0, self.world.options.padding_bytes_max)


class AppendingClient(VirtualClient):
    """A client that appends to topics without a schema."""

    _last: tuple[str, int, int] | None = None
    """The topic and log stream of the last acknowledged append, and the position after it."""

    async def append_plain(self, log: AsyncClient, topic: str) -> None:
        op = self.begin(topic, (1, 1, 1, 2, 5))
        await self.settle(op, self._plain(log, op, topic))

    async def settle(self, op: AppendOp, call: Awaitable[Ack]) -> None:
        """Wait for the outcome of an append and note it."""
        history = self.world.history
        try:
            ack = await call
        except AppendUnknown:
            history.end(op, self.now, SimOutcome.UNKNOWN)
        except CutwaterError as error:
            self.world.refused[error.code] = self.world.refused.get(error.code, 0) + 1
            history.end(op, self.now, SimOutcome.FAIL)
        else:
            history.end(op, self.now, SimOutcome.OK, ack)
            self._last = history.topic_of(op), ack.stream, ack.llsn + ack.count
            self.world.note(f"append {op.payload} is at {ack.glsn}")

    def _plain(self, log: AsyncClient, op: AppendOp, topic: str) -> Awaitable[Ack]:
        values, times = h.values_of(op, bytes(self.padding())), h.times_of(op)
        match self.random.randrange(5) if len(values) == 1 else self.random.randrange(4):
            case 0:
                return log.append(topic, values, timestamp=times)
            case 3 if self.world.options.conditional_appends and self._last is not None and self._last[0] == topic:
                _, stream, llsn = self._last
                return log.append(topic, values, timestamp=times, stream=stream, if_llsn=llsn)
            case 1:
                return log.append(topic, pa.array(values), timestamp=times, key=b"k")
            case 2:
                return log.append(topic, values, timestamp=times, headers={"from": b"here"})
        return log.append(
            topic, values[0] if len(values) == 1 else values, timestamp=times[0] if len(times) == 1 else times
        )


class VirtualAppender(AppendingClient):
    """Appends records of several shapes, a few at a time."""

    def __init__(self, world: ShippedSimulation, name: str, host: str, topic: str) -> None:
        super().__init__(world, name, host)
        self.topic = topic

    async def run(self, log: AsyncClient) -> None:
        await asyncio.gather(*(self._append_for_ever(log) for _ in range(2)))

    async def _append_for_ever(self, log: AsyncClient) -> None:
        while not self.world.is_stopping:
            if self.topic == TYPED:
                op = self.begin(TYPED, (1, 1, 2, 5))
                await self.settle(op, self._typed(log, op))
            else:
                await self.append_plain(log, self.topic)
            await self.pause(self.world.options.append_pause)

    def _typed(self, log: AsyncClient, op: AppendOp) -> Awaitable[Ack]:
        rows = h.rows_of(op, "x" * self.padding())
        if self.random.random() < 0.5:
            return log.append(self.topic, rows)
        return log.append(self.topic, pa.Table.from_pylist(rows, h.TYPED))


class VirtualProducer(VirtualClient):
    """A producer, whose name goes on in its next life, until another client takes over the name."""

    async def run(self, log: AsyncClient) -> None:
        while not self.world.is_stopping:
            invoked = self.now
            try:
                producer = await log.producer(PLAIN, id=self.name)
            except CutwaterError:
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            holder = self.world.history.opened(self.name, invoked, self.now)
            try:
                while not self.world.is_stopping:
                    await self._send(producer, holder)
                    await self.pause(self.world.options.append_pause)
                await producer.close()
            except ProducerFenced:
                return
            except CutwaterError:
                await asyncio.sleep(AGAIN_SECONDS)

    async def _send(self, producer: Any, holder: int) -> None:
        history = self.world.history
        op = self.begin(PLAIN, (1, 1, 2), (self.name, history.next_call(self.name)))
        op.holder = holder

        def done(future: asyncio.Future[Any]) -> None:
            error = None if future.cancelled() else future.exception()
            if future.cancelled() or error is not None:
                is_definite = isinstance(error, DeadlineExceeded | InvalidArgument)
                if isinstance(error, SequenceReused | SequenceExpired):
                    self.world.violations.append(Violation("9 exactly once", f"producer {self.name}: {error}"))
                history.end(op, self.now, SimOutcome.FAIL if is_definite else SimOutcome.UNKNOWN)
            else:
                history.end(op, self.now, SimOutcome.OK, future.result())
                self.world.note(f"send {op.payload} is at {future.result().glsn}")

        try:
            sent = await producer.send(h.values_of(op, bytes(self.padding())), timestamp=h.times_of(op))
        except CutwaterError:
            history.end(op, self.now, SimOutcome.FAIL)
            raise
        sent.add_done_callback(done)


class VirtualSubscriber(VirtualClient):
    """Subscribes to one topic, and goes on after its last record in its next life."""

    has_end = False

    def __init__(self, world: ShippedSimulation, name: str, host: str, topic: str) -> None:
        super().__init__(world, name, host)
        self.topic = topic
        self.records: list[Record] = []
        self.gaps: list[tuple[GLSN, GLSN]] = []

    @property
    def next_glsn(self) -> int:
        ends = [self.records[-1].glsn + 1] if self.records else [1]
        return max(ends + [end for _, end in self.gaps])

    async def run(self, log: AsyncClient) -> None:
        while True:
            try:
                async for record in log.subscribe(self.topic, start=self.next_glsn):
                    self.records.append(record)
            except Trimmed as error:
                self.gaps.append((GLSN(self.next_glsn), error.first_left))
            except CutwaterError:
                await asyncio.sleep(AGAIN_SECONDS)
