"""A named producer: pipelined, collected into batches, and exactly once over retries, seals and restarts.

``core.producer_session`` numbers and sends batches, and keeps each of them until its fate is known. This module does
the rest: messages to the head of its log stream, all over one connection so that they keep their order; questions to
sealed replicas and to the metadata repository; and a look at the catalog whenever there is no progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any

from cutwater.client.append.batcher import AppendOutcome
from cutwater.client.append.declarations import Declared, declared_of
from cutwater.client.append.plain_arrow import AppendRecords
from cutwater.client.append.router import Prepared
from cutwater.client.append.sender import HeadCalls
from cutwater.client.cluster.catalog_cache import Catalogs, CatalogView
from cutwater.client.cluster.metadata_client import Repository
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.cluster.silence import first_answer
from cutwater.client.convert.times import Time
from cutwater.client.errors import ClientClosed
from cutwater.client.produce.producer_queue import (
    IN_FLIGHT_MAX,
    Flight,
    ProducerQueue,
    SentAppend,
    declaration,
    not_encoded,
)
from cutwater.core.producer_session import (
    AskFate,
    AskMetadata,
    Fate,
    Phase,
    ProducerSession,
    SendBatch,
    SessionEffect,
    Settled,
    Withdrawn,
)
from cutwater.core.requests import (
    MoveProducerRequest,
    OpenProducerRequest,
    ProducerGrant,
    RenewProducerRequest,
    StreamInfo,
)
from cutwater.core.text import counted
from cutwater.errors import (
    AppendUnknown,
    CutwaterError,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    NotSealed,
    PermissionDenied,
    ProducerFenced,
    QuotaExceeded,
    SequenceExpired,
    SequenceReused,
    Unavailable,
)
from cutwater.protocol.errors import ConnectionLost, Unauthenticated
from cutwater.protocol.methods import Received
from cutwater.protocol.storage_api import FATE, AppendAnswer, FateArguments
from cutwater.runtime import system
from cutwater.runtime.deadlines import SLOW_SECONDS, Deadline
from cutwater.types import Ack, Batch, BatchKind, Epoch, LogStreamId, ProducerId, ProducerTag, StorageNodeId
from cutwater.wire.connection import Connection

BUFFER_BYTES_MAX = 32 * 1024 * 1024

SEND_MS_MAX = 10_000
"""How long one attempt may take; the next one finds out what became of it."""
ASK_MS_MAX = 3_000
CONNECT_SECONDS = 3.0
RETRY_SECONDS_MIN = 0.01
RETRY_SECONDS_MAX = 0.5
PATIENCE_SECONDS = 0.5
"""A producer leaves a log stream that is sealed for longer than this, if the metadata repository has another one."""
STUCK_SECONDS = 2.0
"""Without any answer for this long, the producer repeats its current step."""
LOOK_SECONDS = 0.25
"""Interval of the check for that."""


class AsyncProducer:
    """Made by ``AsyncClient.producer``; see there."""

    def __init__(
        self,
        catalogs: Catalogs,
        nodes: Nodes,
        repository: Repository,
        topic: str,
        name: str,
        prepare: Callable[..., Prepared],
        encode: Callable[[list[AppendRecords], Declared | None], Batch],
        bytes_max: int,
        timeout: float,
        buffer_bytes: int = BUFFER_BYTES_MAX,
    ) -> None:
        """``bytes_max``: the most bytes that share a batch."""
        self.topic, self.id = topic, name
        self._catalogs, self._nodes, self._repository = catalogs, nodes, repository
        self._heads = HeadCalls(catalogs, nodes)
        self._prepare, self._encode, self._bytes_max = prepare, encode, bytes_max
        self.timeout, self.buffer_bytes = timeout, buffer_bytes
        self._changed = asyncio.Event()
        """Set when a batch was settled, there is room again, or the phase has changed."""
        self._queue = ProducerQueue(
            name, buffer_bytes, lambda: self._hindrance or repository.trouble, self._changed.set
        )
        self._session = ProducerSession(ProducerId(name), topic, system.random_bits(63))
        self._loop = asyncio.get_running_loop()
        self._trouble = asyncio.Event()
        """Set when a message was refused or lost, so that the current step has to be repeated."""
        self._hindrance = ""
        """Why its log stream cannot be reached; empty if it can."""
        self._closed_since: float | None = None
        self._sent_in: tuple[LogStreamId, Epoch] | None = None
        """The log stream and epoch of the last message sent."""
        catalogs.listeners[self._take_catalog] = None
        self._moved_at = self._loop.time()
        self._held_back_until = 0.0
        """When a quota leaves room again, as its error said."""
        self._is_due = False
        self._failure: CutwaterError | None = None
        """Why nothing more can be sent."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._is_stopped = False
        """Whether answers from outside are ignored from now on."""

    # Public methods.

    async def open(self, deadline: Deadline) -> None:
        """Fence the previous producer of this name, and return when this one is ready."""
        self._spawn(self._keep())
        self._do(self._session.start())
        try:
            await self._until(
                lambda: self._session.phase is Phase.READY or self._failure is not None, deadline, "is not open"
            )
        except BaseException:
            await self._stop(ClientClosed("the producer was never open"))
            raise
        if self._failure is not None:
            await self._stop(self._failure)
            raise self._failure

    async def send(
        self,
        records: object,
        *,
        key: object = None,
        timestamp: object = None,
        headers: object = None,
        watermark: Time | None = None,
        idle: bool = False,
        timeout: float | None = None,
    ) -> asyncio.Future[Ack]:
        """Hand over one record or several, as for ``append``; several stay together. Returns a future of the
        acknowledgement as soon as there is room for the records.

        After ``timeout`` the future fails: with ``DeadlineExceeded`` if nothing was sent, so that nothing will appear,
        otherwise with ``AppendUnknown``; then the producer still goes on trying. ``watermark`` and ``idle`` are as for
        ``append``, in the log stream of this producer.
        """
        deadline, future = self._deadline(timeout), self._loop.create_future()
        append = self.prepare(future, deadline.seconds, watermark, idle, records, key, timestamp, headers)
        await self._hand_in(append, deadline)
        return future

    async def declare(
        self, *, watermark: Time | None = None, idle: bool = False, timeout: float | None = None
    ) -> asyncio.Future[Ack]:
        """Declare a watermark, idleness or both without a record, after everything that was sent before, in the log
        stream of this producer. Otherwise as ``send``."""
        deadline, future = self._deadline(timeout), self._loop.create_future()
        await self._hand_in(declaration(future, deadline.seconds, watermark, idle), deadline)
        return future

    def prepare(
        self, outcome: AppendOutcome, seconds: float, watermark: Time | None, idle: bool, *given: object
    ) -> SentAppend:
        """Check and copy records, key, timestamp and headers, in any thread."""
        declared = None if watermark is None and idle is False else declared_of(watermark, idle)
        return SentAppend(*self._prepare(*given), seconds, outcome, declared=declared)

    async def wait_for_room(self, size: int, *, timeout: float, left: float) -> None:
        """Wait until there is room for a send, or raise why there will be none. Of ``timeout``, so much is left."""
        await self._until(
            lambda: self._queue.has_room(size) or self._failure is not None or self._is_closing,
            Deadline(timeout, self._loop.time() + left),
            "has no room, so nothing was sent",
        )
        self._check_open()

    async def _hand_in(self, append: SentAppend, deadline: Deadline) -> None:
        append.at = deadline.at
        await self.wait_for_room(append.size, timeout=deadline.seconds, left=deadline.left)
        self.enqueue([append])

    def enqueue(self, given: list[SentAppend]) -> None:
        """Take records over, whether or not there is room."""
        self._check_open()
        for append in given:
            self._queue.add(append)
        self._depart_soon()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise ClientClosed(f"producer {self.id!r} was closed")

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.timeout if timeout is None else timeout)

    async def flush(self, *, timeout: float | None = None) -> None:
        """Wait until everything that was sent before has its outcome. Raises the first failure since the last flush,
        even if its future was already asked."""
        given = self._queue.everything()
        settled = 0

        def are_settled() -> bool:
            # Sends are settled in about this order, so each is checked about once.
            nonlocal settled
            while settled < len(given) and given[settled].outcome.done():
                settled += 1
            return settled == len(given)

        await self._until(are_settled, self._deadline(timeout), "has not heard of all that was sent")
        error, self._queue.failure = self._queue.failure, None
        if error is not None:
            raise error

    async def close(self, *, timeout: float | None = None) -> None:
        """Flush and end. A send without an outcome by then fails: *unknown* if it was sent. This also waits for sends
        whose callers were already told *unknown*; ``AppendUnknown`` says that some still are."""
        await self._end(self._deadline(timeout), is_all=True)

    async def finish(self) -> None:
        """Close on behalf of a caller that did not send: earlier failures are not raised again."""
        self._queue.failure = None
        await self._end(Deadline(self.timeout), is_all=False)

    async def _end(self, deadline: Deadline, *, is_all: bool) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._changed.set()
        try:
            await self.flush(timeout=deadline.seconds)
            while is_all and (unknown := self._queue.unknown()):
                if not await self._change(deadline):
                    count = sum(append.count for append in unknown)
                    raise AppendUnknown(
                        f"producer {self.id!r} ends, after {deadline.seconds:g} s, before it knows what became of "
                        f"{counted(count, 'record')}, and does not go on trying: read the log to see whether it is "
                        "there"
                    )
        finally:
            await self._stop(ClientClosed(f"producer {self.id!r} was closed before this was sent"))

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_closed(self) -> bool:
        return self._is_closing

    async def _until(self, holds: Callable[[], bool], deadline: Deadline, otherwise: str) -> None:
        while not holds():
            if not await self._change(deadline):
                raise DeadlineExceeded(
                    f"producer {self.id!r} {otherwise}, after {deadline.seconds:g} s: it {self._session.phase.value}, "
                    f"{len(self._queue)} calls of send() wait for that and {len(self._queue.flights)} batches are "
                    "under way"
                )

    async def _change(self, deadline: Deadline) -> bool:
        self._changed.clear()
        return await _within(self._changed, deadline.left)

    @property
    def held_bytes(self) -> int:
        """Bytes that the producer holds, sent or not."""
        return self._queue.bytes

    def _depart_soon(self) -> None:
        """Send a batch after this turn of the event loop, so that everything sent in this turn joins it."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._depart)

    def _depart(self) -> None:
        """Send batches. A batch gets its number only when it can be sent at once: until then, a caller that gives up
        knows that its records will never appear."""
        self._is_due = False
        if len(self._queue) and self._loop.time() < self._held_back_until:
            # If it passed the quota before an earlier batch, it would be refused, and be paid for. ``_keep`` goes on.
            self._trouble.set()
            return
        while len(self._queue) and self._may_send():
            if self._head(self._session.stream) is None:
                self._trouble.set()
                break
            group = self._queue.next_group(self._bytes_max)
            if not group:
                continue
            try:
                batch = self._batch(group)
            except Exception as error:
                # Callers must not wait for ever, also after an unexpected error, such as no memory.
                self._queue.refuse(group, error if isinstance(error, CutwaterError) else not_encoded(error))
                continue
            sequence, effects = self._session.submit(batch)
            if not self._queue.flights:
                self._moved_at = self._loop.time()
            self._queue.number(sequence, group)
            self._do(effects)

    def _batch(self, group: list[SentAppend]) -> Batch:
        declared, parts = group[-1].declared, [append.part for append in group if append.part is not None]
        if declared is not None and not parts:
            return declared.alone()
        return self._encode(parts, declared)

    def _may_send(self) -> bool:
        is_ready = self._session.phase is Phase.READY and self._session.has_room
        return is_ready and len(self._queue.flights) < IN_FLIGHT_MAX and not self._is_stopped

    def _do(self, effects: list[SessionEffect]) -> None:
        for effect in effects:
            match effect:
                case SendBatch():
                    self._send(effect)
                case AskFate():
                    self._spawn(self._ask_fate(effect))
                case AskMetadata():
                    self._spawn(self._ask_metadata(effect.request))
                case Settled():
                    self._queue.settled(effect)
                    self._go_on()
                case Withdrawn():
                    self._queue.withdraw(effect)
                    self._go_on()

    def _go_on(self) -> None:
        self._moved_at = self._loop.time()
        self._changed.set()
        self._depart_soon()

    def _head(self, stream: LogStreamId) -> tuple[StreamInfo, Connection] | None:
        """Return the head to which batches of this log stream go, or None if it cannot be reached now."""
        info = self._catalogs.view.streams.get(stream)
        connection = self._heads.ready(info) if info is not None and info.is_open and info.chain else None
        return None if info is None or connection is None else (info, connection)

    def _send(self, effect: SendBatch) -> None:
        """Send to the head, if it can be reached now; otherwise ``_keep`` sends again."""
        head = self._head(effect.stream)
        if head is None:
            self._trouble.set()
            return
        info, connection = head
        batch, tag = effect.batch, effect.batch.producer
        assert tag is not None
        flight = self._queue.flights.get(tag.sequence) if batch.kind is not BatchKind.FENCE else None
        try:
            self._heads.post(
                connection, info, batch, SEND_MS_MAX, lambda outcome: self._answered(batch.kind, tag, flight, outcome)
            )
        except CutwaterError:
            self._trouble.set()
        else:
            self._sent_in = effect.stream, info.epoch
            if flight is not None:
                flight.attempts += 1
                flight.open_calls += 1

    def _answered(
        self, kind: BatchKind, tag: ProducerTag, flight: Flight | None, outcome: Received[AppendAnswer] | CutwaterError
    ) -> None:
        if self._is_stopped:
            return
        if flight is not None:
            flight.open_calls -= 1
        if isinstance(outcome, Received):
            self._hindrance = ""
            answer = outcome.value
            self._catalogs.heard(answer.revision)
            if kind is BatchKind.FENCE:
                self._do(self._session.fence_committed(tag, answer.last_sequence))
                self._go_on()
            else:
                self._do(self._session.acked(tag.sequence, answer.ack))
        elif isinstance(outcome, ProducerFenced | PermissionDenied):
            if isinstance(outcome, PermissionDenied):
                self._failure = self._failure or outcome
            else:
                self._session.fenced(tag)
            is_over = self._failure is not None or self._session.phase is Phase.FENCED
            if is_over and flight is not None and flight.attempts == 1:
                # It was never taken before, and it was not taken now.
                self._queue.fail_flight(tag.sequence, outcome)
        elif isinstance(outcome, SequenceReused | SequenceExpired):
            # A late answer says nothing about a batch that is settled by now, or was sent again under another epoch.
            is_settled = kind is not BatchKind.FENCE and self._queue.flights.get(tag.sequence) is not flight
            if tag.epoch == self._session.epoch and not is_settled:
                self._give_up(outcome)
        else:
            if isinstance(outcome, QuotaExceeded):
                self._hold_back(outcome)
            if isinstance(outcome, InvalidArgument) and flight is not None:
                flight.refusal = outcome
                self._do(self._session.refused(tag))
            if self._session.phase is not Phase.RENEWING and tag.epoch == self._session.epoch:
                # Otherwise the batch is sent again in any case, under the next epoch.
                self._trouble.set()
        if self._session.phase is Phase.FENCED:
            self._give_up(_fenced(self.id))
        elif self._failure is not None:
            self._give_up(self._failure)

    def _hold_back(self, error: QuotaExceeded) -> None:
        """Send nothing again before the quota leaves room. The log stream is not silent meanwhile."""
        self._hindrance = error.message
        self._held_back_until = max(self._held_back_until, self._loop.time() + error.retry_after)
        self._moved_at = max(self._moved_at, self._held_back_until)

    async def _ask_fate(self, question: AskFate) -> None:
        info = self._catalogs.view.streams.get(question.stream)
        arguments = FateArguments(question.stream, question.stream_epoch, self._session.producer)

        async def ask(node: StorageNodeId) -> Fate:
            address = self._catalogs.view.address(node)
            connection = await self._nodes.connection(address, Deadline(CONNECT_SECONDS))
            return (await connection.call(FATE, arguments, timeout_ms=ASK_MS_MAX)).value

        nodes = dict.fromkeys((*info.chain, *info.replicas)) if info is not None else ()
        try:
            fate = await first_answer([partial(ask, node) for node in nodes], final=(PermissionDenied,))
        except PermissionDenied as error:
            return self._give_up(error)
        except CutwaterError:
            return self._trouble.set()
        self._do(self._session.fate_known(fate))
        if self._session.phase is Phase.FENCED:
            self._give_up(_fenced(self.id))

    async def _ask_metadata(self, request: OpenProducerRequest | MoveProducerRequest | RenewProducerRequest) -> None:
        try:
            grant = await self._repository.ask(request, ProducerGrant, timeout_ms=ASK_MS_MAX)
            await self._know(grant)
            self._do(self._session.granted(grant))
        except ProducerFenced as error:
            if not isinstance(request, OpenProducerRequest):
                self._session.fenced(request)
            if self._session.phase is Phase.FENCED:
                self._give_up(error)
        except NotSealed:
            if isinstance(request, MoveProducerRequest):
                self._do(self._session.move_refused(request))
        except Unavailable as error:
            if isinstance(error, QuotaExceeded):
                self._hold_back(error)
            self._trouble.set()
        except CutwaterError as error:
            if isinstance(request, RenewProducerRequest) and isinstance(error, InvalidArgument):
                # A metadata repository of an older version does not know this request: a newer one will.
                self._trouble.set()
            else:
                self._give_up(error)

    async def _know(self, grant: ProducerGrant) -> None:
        """Fetch the catalog and connect to the head: the granted log stream may be newer than the cached catalog, and
        its head may not be connected. The head of a closed log stream may never come back, and is not needed."""
        info = self._catalogs.view.streams.get(grant.stream)
        if info is None or not info.is_open:
            info = (await self._catalogs.fresh(Deadline(CONNECT_SECONDS))).streams.get(grant.stream)
        if info is not None and info.is_open and info.chain:
            await self._connected(info)

    async def _connected(self, info: StreamInfo) -> None:
        head = info.chain[0]
        try:
            # The attempt goes on; after this time the caller looks at the catalog again.
            await self._nodes.connection(self._catalogs.view.address(head), Deadline(SLOW_SECONDS))
        except (ConnectionLost, DeadlineExceeded):
            self._nodes.unreachable(info.stream, head)
            raise

    async def _keep(self) -> None:
        wait = RETRY_SECONDS_MIN
        while True:
            is_troubled = await _within(self._trouble, max(wait, LOOK_SECONDS))
            if is_troubled:
                self._trouble.clear()
            if self._session.phase is Phase.FENCED or self._failure is not None:
                continue
            waits = bool(self._queue.flights) or len(self._queue) > 0 or self._session.phase is not Phase.READY
            silence = self._loop.time() - self._moved_at if waits else 0.0
            is_stuck = silence > STUCK_SECONDS
            if silence > SLOW_SECONDS:
                self._catalogs.look()
                info = self._catalogs.view.streams.get(self._session.stream)
                if info is not None and info.is_open and info.chain:
                    self._nodes.unreachable(info.stream, info.chain[0])
            if not (is_troubled and waits) and not is_stuck:
                wait = RETRY_SECONDS_MIN
                continue
            self._moved_at = self._loop.time() if is_stuck else self._moved_at
            while (held_back := self._held_back_until - self._loop.time()) > 0:
                await asyncio.sleep(held_back)
                wait = RETRY_SECONDS_MIN
            await self._nudge()
            await asyncio.sleep(wait)
            wait = min(wait * 2, RETRY_SECONDS_MAX)

    def _take_catalog(self, view: CatalogView) -> None:
        """Check the batches in flight at once if their epoch has ended."""
        info = view.streams.get(self._session.stream)
        if self._queue.flights and (info is None or not info.is_open or (info.stream, info.epoch) != self._sent_in):
            self._trouble.set()

    async def _nudge(self) -> None:
        session = self._session
        try:
            view = await self._catalogs.fresh(Deadline(CONNECT_SECONDS))
            info = view.streams.get(session.stream)
            if info is not None and info.is_open and info.chain:
                self._closed_since = None
                await self._connected(info)
                self._hindrance = ""
                self._do(session.stream_reopened(info.stream) or session.retry())
                self._depart_soon()
                return
        except (ClientClosed, PermissionDenied, Unauthenticated) as error:
            self._give_up(error)
            return
        except CutwaterError as error:
            self._hindrance = error.message
            self._trouble.set()
            return
        now = self._loop.time()
        if info is None and session.stream:
            session.topic_deleted()
            self._give_up(NotFound(f"topic {self.topic!r} of producer {self.id!r} was deleted: open it on another one"))
            return
        self._closed_since = now if self._closed_since is None else self._closed_since
        self._hindrance = f"log stream {session.stream} is sealed" if session.stream else ""
        effects: list[SessionEffect] = []
        if info is not None and (info.final or now - self._closed_since >= PATIENCE_SECONDS):
            effects = session.stream_closed(info.stream, info.epoch)
        if not effects and session.phase in (Phase.OPENING, Phase.SETTLING, Phase.MOVING, Phase.RENEWING):
            effects = session.retry()
        self._do(effects)
        self._trouble.set()

    def _give_up(self, error: CutwaterError) -> None:
        """End the producer: nothing more can be sent."""
        if self._failure is None:
            self._failure = error
        self._queue.give_up(self._failure, with_open_calls=False)
        self._changed.set()

    async def _stop(self, error: CutwaterError) -> None:
        self._is_closing = self._is_stopped = True
        self._catalogs.listeners.pop(self._take_catalog, None)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._queue.close()
        if self._failure is None:
            self._failure = error
        self._queue.give_up(error, with_open_calls=True)
        self._changed.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the producer if a background task has failed: a bug must not look like silence."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            failure = CutwaterError(f"producer {self.id!r} failed: {error!r}")
            failure.__cause__ = error
            self._give_up(failure)


def _fenced(name: str) -> ProducerFenced:
    return ProducerFenced(f"producer {name!r} was opened again elsewhere: stop using it here")


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event; return whether it came in time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
