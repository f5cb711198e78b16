"""Records what clients of a simulated cluster did and saw, for the checkers."""

from __future__ import annotations

import enum

from msgspec import Struct, structs

from cutwater.core.read.merge_reader import CommittedBatch
from cutwater.core.requests import PublishedGroup
from cutwater.format.checksum import crc32c
from cutwater.types import (
    GLSN,
    Ack,
    Batch,
    BatchKind,
    BatchNumber,
    EventTime,
    LogStreamId,
    ProducerId,
    Revision,
    RunId,
    Sequence,
    StorageNodeId,
    TopicId,
)

DECLARATION_EVERY = 8
"""One in this many batches of appenders and producers is a declaration without a record."""


class SimOutcome(enum.Enum):
    PENDING = "pending"
    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"


class AppendOp(Struct):
    """One batch that a client wanted in the log. ``payload`` is unique, so a batch in the log identifies its append."""

    payload: int
    invoked: int
    batch: Batch
    producer: ProducerId | None = None
    sequence: Sequence = Sequence(0)
    holder: int = 0
    """The opening of a producer after which it was sent: a place in ``SimHistory.opens``, from 1 on."""
    part: str = ""
    """The staged part that it belongs to, if it is published and not appended."""
    outcome: SimOutcome = SimOutcome.PENDING
    completed: int = 0
    ack: Ack | None = None


class OpenOp(Struct):
    """A client that opened a producer. From then on, no client that had opened the same name before can append."""

    producer: ProducerId
    invoked: int
    completed: int


class PublishOp(Struct):
    """A batch that a client was told is published."""

    run: RunId
    batch: BatchNumber
    topics: tuple[PublishedGroup, ...]


class TailOp(Struct):
    """A catalog that a client received, and the tail in it."""

    invoked: int
    completed: int
    high_watermark: GLSN
    revision: Revision = Revision(0)


class CursorOp(Struct):
    """The position where a client put its cursor, or was told that it is."""

    cursor: str
    invoked: int
    completed: int
    glsn: GLSN
    is_read: bool


class ReadOp(Struct):
    """A read of an acknowledged GLSN: the run that was returned, or the code of the error."""

    op: AppendOp
    node: StorageNodeId
    stream: LogStreamId
    invoked: int
    completed: int
    run: CommittedBatch | None
    error: str = ""
    first_left: GLSN = GLSN(0)


class TrimOp(Struct):
    before: GLSN
    topic: str


class Subscribed(Struct):
    """What a subscriber handed on. ``topics`` is None for all topics. ``gaps`` are the ranges that it was told are
    trimmed. ``ended`` has its position when it was told that a topic is deleted."""

    topics: frozenset[TopicId] | None
    runs: list[CommittedBatch]
    gaps: list[tuple[GLSN, GLSN]]
    ended: dict[TopicId, GLSN]
    through: GLSN = GLSN(0)


class SimHistory:
    """The history of one simulation."""

    def __init__(self) -> None:
        self.appends: list[AppendOp] = []
        self.tails: list[TailOp] = []
        self.cursors: list[CursorOp] = []
        self.reads: list[ReadOp] = []
        self.trims: list[TrimOp] = []
        self.staged: dict[str, list[int]] = {}
        """The payloads of each staged part, in order."""
        self.opens: list[OpenOp] = []
        self.positions: dict[int, bytes] = {}
        """The position of each payload that was staged with one: ordered parts are merged by it."""
        self.stolen: set[str] = set()
        """Staged parts that another principal has tried to publish, and nobody else."""
        self.published: list[PublishOp] = []
        self.replays: set[str] = set()
        """Keys of runs that asked to publish again what their name has published."""
        self.subscribers: dict[int, Subscribed] = {}

    def new_append(self, now: int, count: int, event_time: EventTime) -> AppendOp:
        payload = len(self.appends) + 1
        body = b"%d:%d" % (payload, count)
        batch = Batch(count, body, crc32c(body), EventTime(event_time), EventTime(event_time + (count - 1) * 1_000))
        op = AppendOp(payload, now, batch)
        self.appends.append(op)
        return op

    def new_entry(self, now: int, count: int, event_time: EventTime) -> AppendOp:
        """Create an append as ``new_append`` does, but make one in ``DECLARATION_EVERY`` a declaration without a
        record, and let as many declare idleness with their records. This uses no random choice, so other random choices
        stay the same."""
        op = self.new_append(now, count, event_time)
        kind = op.payload % DECLARATION_EVERY
        if kind == 0:
            zero, is_idle = EventTime(0), op.payload % (2 * DECLARATION_EVERY) == 0
            op.batch = Batch(1, b"", 0, zero, zero, BatchKind.DECLARATION, declared=EventTime(op.payload), idle=is_idle)
        elif kind == 1:
            op.batch = structs.replace(op.batch, idle=True)
        return op

    def op_of(self, batch: Batch) -> AppendOp | None:
        """Return the append that sent this batch, found by its body or its declaration; None if none did."""
        if batch.kind is BatchKind.DECLARATION:
            payload = batch.declared or 0
        else:
            try:
                payload = int(batch.body.split(b":")[0])
            except ValueError:
                return None
        if not 1 <= payload <= len(self.appends):
            return None
        op = self.appends[payload - 1]
        sent = (op.batch.kind, op.batch.body, op.batch.idle)
        return op if sent == (batch.kind, batch.body, batch.idle) else None


def event_times(batch: Batch) -> list[EventTime]:
    """Return the event times of a simulated batch's records: a millisecond apart, from its header."""
    return [EventTime(batch.time_min + i * 1_000) for i in range(batch.count)]
