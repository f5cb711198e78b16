"""The leader appends the audit to the topic ``_audit``: every change once and in order, also over changes of leaders.

Changes are appended by a named producer, one record in a batch, and the number of a record is its sequence. So the log
itself knows which records it has: a new leader opens the producer, which ends that of its predecessor, and the fence
tells the last number in the log. Everything above it that is pending is appended then. Nothing is read back.

Denials are appended without a name, when a server asks for it. If the outcome is unknown, the server asks again with
the same records, and readers drop those whose id they have seen.

Nothing waits for the audit: errors are logged and retried. ADR 0053 has the reasons.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Protocol, TypeVar

from msgspec import structs

from cutwater.core.audit.audit_record import AuditRecord, encode_audit
from cutwater.core.audit.audit_requests import AUDIT_PRODUCER, DENIALS_MAX, NoteAuditedRequest
from cutwater.core.internal_topics import AUDIT
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.order.state import LogStream, OrderState
from cutwater.core.requests import (
    Answer,
    MakeInternalTopicsRequest,
    MoveProducerRequest,
    OpenProducerRequest,
    ProducerGrant,
    Request,
)
from cutwater.errors import CutwaterError, NotSealed, Unavailable
from cutwater.format.checksum import crc32c
from cutwater.format.plain_bodies import values_body
from cutwater.metadata.retention import Connect
from cutwater.protocol.storage_api import APPEND, FATE, AppendAnswer, AppendArguments, FateArguments
from cutwater.runtime import system
from cutwater.types import Batch, BatchKind, DecisionIndex, EventTime, ProducerId, ProducerTag, StorageNodeId
from cutwater.types import Sequence as ProducerSequence
from cutwater.wire.connection import Connection

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""How often the writer looks for records that are not in the log."""
RETRY_SECONDS_MAX = 5.0
ASK_MS_MAX = 5_000
IN_FLIGHT_MAX = 64
"""Number of records that are appended at once. It is less than what replicas remember of a producer."""
TOGETHER_BYTES_MAX = 512 * 1024

_ORIGIN = RequestOrigin(AUDIT_PRODUCER)
T = TypeVar("T")


class Deciding(Protocol):
    """A leader that decides requests."""

    async def __call__(self, request: Request, origin: RequestOrigin | None = None) -> Answer: ...


class AuditWriter:
    """See the module. ``stored`` returns the index of the last decision that is stored: only what is stored happened.
    ``connect`` connects to a storage node, ``decide`` submits a request to the leader."""

    def __init__(
        self, state: OrderState, stored: Callable[[], DecisionIndex], connect: Connect, decide: Deciding
    ) -> None:
        self._state, self._stored, self._connect, self._decide = state, stored, connect, decide
        self._session = system.random_bits(63)
        self._grant: ProducerGrant | None = None
        self._last: int | None = None
        """The number of the last record in the log, behind a fence of this leader; None if it is not known."""
        self._acked = 0
        """The number of the last record of which this leader knows that it is in the log."""
        self._connections: dict[StorageNodeId, Connection] = {}
        self._connecting = asyncio.Lock()
        self._is_told = False
        self.trouble = ""
        """Why the last attempt failed; empty if it did not."""

    async def write_for_ever(self) -> None:
        pause = LOOK_SECONDS
        try:
            while True:
                await asyncio.sleep(pause)
                try:
                    await self.write()
                    pause = LOOK_SECONDS
                    self.trouble = ""
                except Exception as error:
                    # Also a bug here must not end the leader's term, which does not need the audit.
                    pause = min(pause * 2, RETRY_SECONDS_MAX)
                    self._last = None
                    self._tell(error)
        finally:
            for connection in self._connections.values():
                connection.abort()

    def _tell(self, error: Exception) -> None:
        """Log trouble that is new. A log stream that is just being opened is no trouble yet."""
        is_bug = not isinstance(error, CutwaterError)
        words = repr(error) if is_bug else str(error)
        if is_bug and words != self.trouble:
            _log.error("the audit cannot be appended, and is tried again", exc_info=error)
        elif words == self.trouble and not self._is_told:
            _log.warning("the audit cannot be appended now, and is tried again: %s", words)
        self._is_told = is_bug or words == self.trouble
        self.trouble = words

    async def write(self) -> None:
        """Append the pending records of changes that are stored."""
        audit = self._state.audit
        if not audit.is_on or not audit.pending:
            return
        await self._make_topic()
        while pending := self._due():
            if self._last is None:
                self._last = await self._open()
            await self._append_numbered([record for record in pending if record.number > self._last])
            if self._last > audit.written:
                await self._decide(NoteAuditedRequest(self._last))

    def _due(self) -> list[AuditRecord]:
        stored = self._stored()
        return [record for record in islice(self._state.audit.pending, IN_FLIGHT_MAX) if record.index <= stored]

    async def _make_topic(self) -> None:
        if self._state.topic_named(AUDIT.name) is None:
            await self._decide(MakeInternalTopicsRequest((AUDIT,)))

    # The producer.

    async def _open(self) -> int:
        """Fence earlier leaders. Returns the number of the last record in the log; no other will come from them."""
        if self._grant is None:
            request = OpenProducerRequest(ProducerId(AUDIT_PRODUCER), AUDIT.name, self._session)
            self._grant = _expect(await self._decide(request, _ORIGIN), ProducerGrant)
        stream = self._state.streams[self._grant.stream]
        if not stream.is_open:
            stream = await self._move(stream)
        # If the log has lost records, the numbers go on after those that are known to have been there.
        base = ProducerSequence(max(self._grant.last_sequence, self._state.audit.written))
        tag = ProducerTag(ProducerId(AUDIT_PRODUCER), self._grant.epoch, base)
        fence = Batch(1, b"", 0, EventTime(0), EventTime(0), kind=BatchKind.FENCE, producer=tag)
        answer = await self._send(await self._head(stream), stream, fence)
        # The answer to a fence that is there already does not count what came after it.
        last = max(int(answer.last_sequence), self._acked)
        if last > self._state.audit.last:
            _log.error(
                "the audit in the log ends with number %s, but the store knows %s only: was the store restored from an "
                "old copy? Numbers go on after %s",
                *(last, self._state.audit.last, last),
            )
            await self._decide(NoteAuditedRequest(last))
        return last

    async def _move(self, stream: LogStream) -> LogStream:
        """Move the producer to another log stream, if there is one. A sealed replica knows the last number."""
        assert self._grant is not None
        epoch = stream.epoch
        arguments = FateArguments(stream.stream, epoch, ProducerId(AUDIT_PRODUCER))
        for node in dict.fromkeys((*stream.members, *stream.replicas)):
            try:
                fate = (await (await self._connected(node)).call(FATE, arguments, timeout_ms=ASK_MS_MAX)).value
                break
            except CutwaterError:
                continue
        else:
            raise Unavailable(f"log stream {stream.stream} of the audit is sealed, and no replica of it answers")
        last = max(fate.last_sequence, self._grant.last_sequence)
        request = MoveProducerRequest(ProducerId(AUDIT_PRODUCER), self._session, self._grant.epoch, epoch, last)
        # If it was opened meanwhile, the producer stays.
        with suppress(NotSealed):
            self._grant = _expect(await self._decide(request, _ORIGIN), ProducerGrant)
        return self._state.streams[self._grant.stream]

    async def _append_numbered(self, records: Sequence[AuditRecord]) -> None:
        """Append records, each as a batch of its own, and note those that are in the log."""
        assert self._grant is not None
        stream = self._state.streams[self._grant.stream]
        head = await self._head(stream)
        sends = [self._send(head, stream, self._numbered(record)) for record in records]
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        for record, outcome in zip(records, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            self._last = self._acked = record.number

    def _numbered(self, record: AuditRecord) -> Batch:
        assert self._grant is not None
        tag = ProducerTag(ProducerId(AUDIT_PRODUCER), self._grant.epoch, ProducerSequence(record.number))
        return _batch([encode_audit(record)], record.time, tag)

    # Denials.

    async def record_denials(self, records: Sequence[AuditRecord]) -> None:
        """Append records of a server, and return when they are in the log."""
        if not self._state.audit.is_on:
            return
        await self._make_topic()
        topic = self._state.topic_named(AUDIT.name)
        assert topic is not None
        streams = [stream for stream in self._state.streams_of(topic.topic) if stream.is_open]
        if not streams:
            raise Unavailable("the topic of the audit takes no appends now: try again")
        values: list[bytes] = []
        for place, record in enumerate(records, 1):
            values.append(encode_audit(record))
            is_last = place == len(records)
            if is_last or len(values) == DENIALS_MAX or sum(map(len, values)) > TOGETHER_BYTES_MAX:
                await self._send(await self._head(streams[0]), streams[0], _batch(values, record.time, None))
                values = []

    # Storage nodes.

    async def _head(self, stream: LogStream) -> Connection:
        if not stream.is_open or not stream.members:
            raise Unavailable(f"log stream {stream.stream} of the audit is sealed: {stream.reason}")
        return await self._connected(stream.members[0])

    async def _send(self, head: Connection, stream: LogStream, batch: Batch) -> AppendAnswer:
        arguments = AppendArguments(stream.stream, stream.epoch, structs.replace(batch, body=b""))
        return (await head.call(APPEND, arguments, batch.body, timeout_ms=ASK_MS_MAX)).value

    async def _connected(self, node: StorageNodeId) -> Connection:
        async with self._connecting:
            connection = self._connections.get(node)
            if connection is None or connection.is_closed:
                known = self._state.nodes.get(node)
                if known is None or not known.address:
                    raise Unavailable(f"the address of storage node {node} is not known")
                connection = self._connections[node] = await self._connect(node, known.address)
            return connection


def _batch(values: Sequence[bytes], time: int, tag: ProducerTag | None) -> Batch:
    body = values_body(values, time)
    return Batch(len(values), body, crc32c(body), EventTime(time), EventTime(time), producer=tag)


def _expect(answer: Answer, kind: type[T]) -> T:
    if not isinstance(answer, kind):
        raise Unavailable(f"the leader answered with {type(answer).__name__} instead of {kind.__name__}")
    return answer
