"""A named producer: pipelined, collected into batches, and exactly once over retries, seals and restarts.

Records wait in a buffer of bounded size until they become part of a batch. ``core.producer_session`` numbers and sends
batches, and keeps each of them until its fate is known. This module provides what that machine needs: messages to the
head of its log stream, all over one connection so that they keep their order; questions to sealed replicas and to the
metadata repository; and a look at the catalog whenever there is no progress.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any

from msgspec import structs

from cutwater.client.append.declarations import DECLARATION_BYTES, Declared, declared_of, required
from cutwater.client.append.plain_arrow import AppendRecords
from cutwater.client.cluster.catalog_cache import Catalogs, CatalogView
from cutwater.client.cluster.metadata_client import Repository
from cutwater.client.cluster.node_connections import Nodes
from cutwater.client.cluster.silence import first_answer
from cutwater.client.convert.times import Time
from cutwater.client.errors import ClientClosed, InvalidRecord
from cutwater.client.produce.producer_buffer import ProducerBuffer, Sent
from cutwater.client.produce.producer_flights import IN_FLIGHT_MAX, Flight, ProducerFlights
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
    ProducerFenced,
    ResourceExhausted,
    SequenceExpired,
    SequenceReused,
    Unavailable,
)
from cutwater.protocol.errors import ConnectionLost
from cutwater.protocol.methods import Received
from cutwater.protocol.storage_api import APPEND, FATE, AppendAnswer, AppendArguments, FateArguments
from cutwater.runtime.deadline_watch import DeadlineWatch
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
        prepare: Callable[..., tuple[AppendRecords, int, int]],
        encode: Callable[[list[AppendRecords]], Batch],
        bytes_max: int,
        timeout: float,
        buffer_bytes: int = BUFFER_BYTES_MAX,
    ) -> None:
        """``bytes_max``: the most bytes that share a batch."""
        self.topic, self.id = topic, name
        self._catalogs, self._nodes, self._repository = catalogs, nodes, repository
        self.prepare, self._encode, self._bytes_max = prepare, encode, bytes_max
        self.timeout, self.buffer_bytes = timeout, buffer_bytes
        self._buffer = ProducerBuffer(buffer_bytes)
        self._session = ProducerSession(ProducerId(name), topic, secrets.randbits(63))
        self._loop = asyncio.get_running_loop()
        self._watch = DeadlineWatch(self._loop, self._expire)
        self._flights = ProducerFlights(self._buffer, name)
        self.on_change: Callable[[], None] | None = None
        """Called when there may be room again, or when there never will be."""
        self._changed = asyncio.Event()
        """Set when a batch was settled, there is room again, or the phase has changed."""
        self._trouble = asyncio.Event()
        """Set when a message was refused or lost, so that the current step has to be repeated."""
        self._hindrance = ""
        """Why its log stream cannot be reached; empty if it can."""
        self._closed_since: float | None = None
        self._sent_in: tuple[LogStreamId, Epoch] | None = None
        """The log stream and epoch of the last message sent."""
        catalogs.listeners.add(self._take_catalog)
        self._moved_at = self._loop.time()
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
        deadline = Deadline(self.timeout if timeout is None else timeout)
        part, count, size = self.prepare(records, key, timestamp, headers)
        return await self._hand_in(part, count, size, declared_of(watermark, idle), deadline)

    async def declare(
        self, *, watermark: Time | None = None, idle: bool = False, timeout: float | None = None
    ) -> asyncio.Future[Ack]:
        """Declare a watermark, idleness or both without a record, after everything that was sent before, in the log
        stream of this producer. Otherwise as ``send``."""
        deadline = Deadline(self.timeout if timeout is None else timeout)
        return await self._hand_in(None, 1, DECLARATION_BYTES, required(watermark, idle), deadline)

    async def _hand_in(
        self, part: AppendRecords | None, count: int, size: int, declared: Declared | None, deadline: Deadline
    ) -> asyncio.Future[Ack]:
        await self._until(
            lambda: self._buffer.has_room(size) or self._failure is not None or self._is_closing,
            deadline,
            "has no room, so nothing was sent",
        )
        future: asyncio.Future[Ack] = self._loop.create_future()
        self.enqueue([Sent(part, count, size, deadline.at, deadline.seconds, future, declared=declared)])
        return future

    def enqueue(self, given: list[Sent]) -> None:
        """Take records over, whether or not there is room."""
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise ClientClosed(f"producer {self.id!r} was closed")
        self._buffer.add(given)
        self._watch.note(min([sent.at for sent in given]))
        self._depart_soon()

    async def flush(self, *, timeout: float | None = None) -> None:
        """Wait until everything that was sent before has its outcome. Raises the first failure since the last flush,
        even if its future was already asked."""
        given = [*self._flights, *self._buffer]
        settled = 0

        def are_settled() -> bool:
            # Sends are settled in about this order, so each is checked about once.
            nonlocal settled
            while settled < len(given) and given[settled].future.done():
                settled += 1
            return settled == len(given)

        deadline = Deadline(self.timeout if timeout is None else timeout)
        await self._until(are_settled, deadline, "has not heard of all that was sent")
        error, self._buffer.unheard = self._buffer.unheard, None
        if error is not None:
            raise error

    async def close(self, *, timeout: float | None = None) -> None:
        """Flush and end. A send without an outcome by then fails: *unknown* if it was sent. This also waits for sends
        whose callers were already told *unknown*; ``AppendUnknown`` says that some still are."""
        await self._end(Deadline(self.timeout if timeout is None else timeout), is_all=True)

    async def finish(self) -> None:
        """Close on behalf of a caller that did not send: earlier failures are not raised again."""
        self._buffer.unheard = None
        await self._end(Deadline(self.timeout), is_all=False)

    async def _end(self, deadline: Deadline, *, is_all: bool) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._note_change()
        try:
            await self.flush(timeout=deadline.seconds)
            if is_all:
                await self._until_known(deadline)
        finally:
            await self._stop(ClientClosed(f"producer {self.id!r} was closed before this was sent"))

    async def _until_known(self, deadline: Deadline) -> None:
        try:
            await self._until(lambda: not self._unknown(), deadline, "has not heard of all that was sent")
        except DeadlineExceeded as error:
            count = sum(sent.count for sent in self._unknown())
            raise AppendUnknown(
                f"producer {self.id!r} ends, after {deadline.seconds:g} s, before it knows what became of "
                f"{counted(count, 'record')}, and does not go on trying: read the log to see whether it is there"
            ) from error

    def _unknown(self) -> list[Sent]:
        """Return sends in flight, and sends that are sent again although their callers were told *unknown*."""
        return [*self._flights, *(sent for sent in self._buffer if sent.is_numbered)]

    async def __aenter__(self) -> AsyncProducer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_closed(self) -> bool:
        return self._is_closing

    # From records to numbered batches.

    async def _until(self, holds: Callable[[], bool], deadline: Deadline, otherwise: str) -> None:
        while not holds():
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline.at):
                    await self._changed.wait()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"producer {self.id!r} {otherwise}, after {deadline.seconds:g} s: it {self._session.phase.value}, "
                    f"{len(self._buffer)} calls of send() wait for that and {len(self._flights)} batches are under way"
                ) from None

    def _note_change(self) -> None:
        self._changed.set()
        if self.on_change is not None:
            self.on_change()

    @property
    def held_bytes(self) -> int:
        """Bytes that the producer holds, sent or not."""
        return self._buffer.bytes

    def _expire(self, now: float) -> float:
        earliest = self._buffer.expire(now, self.id, self._hindrance or self._repository.trouble)
        self._note_change()
        return earliest

    def _depart_soon(self) -> None:
        """Send a batch after this turn of the event loop, so that everything sent in this turn joins it."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._depart)

    def _depart(self) -> None:
        """Send batches. A batch gets its number only when it can be sent at once: until then, a caller that gives up
        knows that its records will never appear."""
        self._is_due = False
        while len(self._buffer) and self._may_send():
            if self._head(self._session.stream) is None:
                self._trouble.set()
                break
            group = self._buffer.next_group(self._bytes_max)
            if not group:
                continue
            try:
                batch = self._batch(group)
            except CutwaterError as error:
                self._buffer.fail(group, error)
                continue
            except Exception as error:
                # An unexpected error, such as no memory. Callers must not wait for ever.
                self._buffer.fail(group, _not_encoded(error))
                continue
            sequence, effects = self._session.submit(batch)
            if not self._flights:
                self._moved_at = self._loop.time()
            self._flights.add(sequence, group)
            self._do(effects)
        self._note_change()

    def _batch(self, group: list[Sent]) -> Batch:
        declared, parts = group[-1].declared, [sent.part for sent in group if sent.part is not None]
        if declared is None:
            return self._encode(parts)
        return declared.with_records(self._encode(parts)) if parts else declared.alone()

    def _may_send(self) -> bool:
        is_ready = self._session.phase is Phase.READY and self._session.has_room
        return is_ready and len(self._flights) < IN_FLIGHT_MAX and not self._is_stopped

    # Effects of the session.

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
                    self._flights.settle(effect)
                    self._go_on()
                case Withdrawn():
                    self._flights.withdraw(effect)
                    self._go_on()

    def _go_on(self) -> None:
        """Send more, if there is room for it."""
        self._moved_at = self._loop.time()
        self._note_change()
        self._depart_soon()

    def _head(self, stream: LogStreamId) -> tuple[StreamInfo, str, Connection] | None:
        """Return the head to which batches of this log stream go, or None if it cannot be reached now."""
        info = self._catalogs.view.streams.get(stream)
        address = self._catalogs.view.addresses.get(info.chain[0]) if info is not None and info.chain else None
        connection = self._nodes.ready(address) if address is not None else None
        if info is None or not info.is_open or address is None or connection is None:
            return None
        return info, address, connection

    def _send(self, effect: SendBatch) -> None:
        """Send to the head, if it can be reached now; otherwise ``_keep`` sends again."""
        head = self._head(effect.stream)
        if head is None:
            self._trouble.set()
            return
        info, address, connection = head
        batch, tag = effect.batch, effect.batch.producer
        assert tag is not None
        flight = self._flights.get(tag.sequence) if batch.kind is not BatchKind.FENCE else None
        arguments = AppendArguments(effect.stream, info.epoch, structs.replace(batch, body=b""))
        try:
            connection.begin(
                APPEND,
                arguments,
                batch.body,
                timeout_ms=SEND_MS_MAX,
                on_answer=lambda outcome: self._answered(batch.kind, tag, flight, outcome),
            )
        except ConnectionLost:
            self._nodes.drop(address, connection)
            self._trouble.set()
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
                self._note_change()
                self._depart_soon()
            else:
                self._do(self._session.acked(tag.sequence, answer.ack))
        elif isinstance(outcome, ProducerFenced):
            self._session.fenced(tag)
            if flight is not None and flight.attempts == 1 and self._session.phase is Phase.FENCED:
                # It was never taken before, and it was not taken now.
                self._flights.fail(tag.sequence, outcome)
                self._note_change()
        elif isinstance(outcome, SequenceReused | SequenceExpired):
            # A late answer says nothing about a batch that is settled by now, or was sent again under another epoch.
            is_settled = kind is not BatchKind.FENCE and self._flights.get(tag.sequence) is not flight
            if tag.epoch == self._session.epoch and not is_settled:
                self._give_up(outcome)
        else:
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

    async def _ask_fate(self, question: AskFate) -> None:
        info = self._catalogs.view.streams.get(question.stream)
        arguments = FateArguments(question.stream, question.stream_epoch, self._session.producer)

        async def ask(node: StorageNodeId) -> Fate:
            address = self._catalogs.view.address(node)
            connection = await self._nodes.connection(address, Deadline(CONNECT_SECONDS))
            return (await connection.call(FATE, arguments, timeout_ms=ASK_MS_MAX)).value

        nodes = dict.fromkeys((*info.chain, *info.replicas)) if info is not None else ()
        try:
            fate = await first_answer([partial(ask, node) for node in nodes])
        except CutwaterError:
            self._trouble.set()
            return
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
        except Unavailable:
            self._trouble.set()
        except CutwaterError as error:
            if isinstance(request, RenewProducerRequest) and isinstance(error, InvalidArgument):
                # A metadata repository of an older version does not know this request: a newer one will.
                self._trouble.set()
            else:
                self._give_up(error)

    async def _know(self, grant: ProducerGrant) -> None:
        """Fetch the catalog and connect to the head: the granted log stream may be newer than the cached catalog, and
        its head may not be connected."""
        deadline = Deadline(CONNECT_SECONDS)
        view = self._catalogs.view
        info = view.streams.get(grant.stream)
        if info is None or not info.is_open:
            view = await self._catalogs.fresh(deadline)
            info = view.streams.get(grant.stream)
        if info is not None and info.chain:
            await self._connected(info)

    async def _connected(self, info: StreamInfo) -> None:
        head = info.chain[0]
        try:
            # The attempt goes on; after this time the caller looks at the catalog again.
            await self._nodes.connection(self._catalogs.view.address(head), Deadline(SLOW_SECONDS))
        except (ConnectionLost, DeadlineExceeded):
            self._nodes.unreachable(info.stream, head)
            raise

    # Without progress.

    async def _keep(self) -> None:
        wait = RETRY_SECONDS_MIN
        while True:
            is_troubled = await self._pause(wait)
            if self._session.phase is Phase.FENCED or self._failure is not None:
                continue
            waits = bool(self._flights) or len(self._buffer) > 0 or self._session.phase is not Phase.READY
            silence = self._loop.time() - self._moved_at if waits else 0.0
            is_stuck = silence > STUCK_SECONDS
            if silence > SLOW_SECONDS:
                self._blame_head()
            if not (is_troubled and waits) and not is_stuck:
                wait = RETRY_SECONDS_MIN
                continue
            self._moved_at = self._loop.time() if is_stuck else self._moved_at
            await self._nudge()
            await asyncio.sleep(wait)
            wait = min(wait * 2, RETRY_SECONDS_MAX)

    def _blame_head(self) -> None:
        """Report the head: silence is evidence. The metadata repository should probe it, and the catalog may have
        changed."""
        info = self._catalogs.view.streams.get(self._session.stream)
        if info is not None and info.is_open and info.chain:
            self._nodes.unreachable(info.stream, info.chain[0])
        self._catalogs.look()

    def _take_catalog(self, view: CatalogView) -> None:
        """Check the batches in flight at once if their epoch has ended."""
        info = view.streams.get(self._session.stream)
        if self._flights and (info is None or not info.is_open or (info.stream, info.epoch) != self._sent_in):
            self._trouble.set()

    async def _pause(self, wait: float) -> bool:
        """Wait until there is trouble, or until the next regular check. Returns whether there is trouble."""
        try:
            async with asyncio.timeout(max(wait, LOOK_SECONDS)):
                await self._trouble.wait()
        except TimeoutError:
            return False
        self._trouble.clear()
        return True

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
        except ClientClosed as error:
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

    # Closing.

    def _give_up(self, error: CutwaterError) -> None:
        """End the producer: nothing more can be sent."""
        if self._failure is None:
            self._failure = error
        self._buffer.fail_all(self._failure)
        self._flights.give_up(self._failure, with_open_calls=False)
        self._note_change()

    async def _stop(self, error: CutwaterError) -> None:
        self._is_closing = self._is_stopped = True
        self._catalogs.listeners.discard(self._take_catalog)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watch.stop()
        if self._failure is None:
            self._failure = error
        self._buffer.fail_all(error)
        self._flights.give_up(error, with_open_calls=True)
        self._note_change()

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


def _not_encoded(error: Exception) -> CutwaterError:
    what = f"these records could not be made ready ({error!r}), so nothing of them was sent"
    if isinstance(error, MemoryError):
        return ResourceExhausted(f"{what}: send fewer at a time", retry_ms=100)
    return InvalidRecord(what)
