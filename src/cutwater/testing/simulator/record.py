"""What clients of a simulated cluster did and saw, for the checkers."""

from __future__ import annotations

import enum

from msgspec import Struct

from cutwater.core.requests import PublishedGroup
from cutwater.core.subscription import Run
from cutwater.storage.checksum import crc32c
from cutwater.types import (
    GLSN,
    Ack,
    Batch,
    BatchNumber,
    EventTime,
    LogStreamId,
    ProducerId,
    RunId,
    Sequence,
    StorageNodeId,
    TopicId,
)


class Outcome(enum.Enum):
    PENDING = "pending"
    OK = "ok"
    FAIL = "fail"
    UNKNOWN = "unknown"


class AppendOp(Struct):
    """One batch that a client wanted in the log. ``payload`` is unique, so a batch in the log tells whose it is."""

    payload: int
    client: int
    invoked: int
    batch: Batch
    producer: ProducerId | None = None
    sequence: Sequence = Sequence(0)
    part: str = ""
    """The staged part that it belongs to, if it is not appended but published."""
    outcome: Outcome = Outcome.PENDING
    completed: int = 0
    ack: Ack | None = None


class StagedRows(Struct):
    """What one attempt of a task staged: the payloads, in order."""

    part: str
    run: RunId
    batch: BatchNumber
    topic: TopicId
    payloads: list[int]


class PublishOp(Struct):
    """A batch of which a client was told that it is published."""

    run: RunId
    batch: BatchNumber
    topics: tuple[PublishedGroup, ...]


class TailOp(Struct):
    client: int
    invoked: int
    completed: int
    high_watermark: GLSN


class ReadOp(Struct):
    """A read of an acknowledged GLSN: the run that came back, or the code of the error."""

    op: AppendOp
    node: StorageNodeId
    stream: LogStreamId
    invoked: int
    completed: int
    run: Run | None
    error: str = ""
    first_left: GLSN = GLSN(0)


class TrimOp(Struct):
    before: GLSN
    topic: str
    completed: int


class Subscribed(Struct):
    """What a subscriber handed on. ``topics`` None: all there are. ``gaps`` are from where to where it was told that
    records are trimmed, ``ended`` where it was when it was told that a topic is deleted."""

    topics: frozenset[TopicId] | None
    runs: list[Run]
    gaps: list[tuple[GLSN, GLSN]]
    ended: dict[TopicId, GLSN]
    through: GLSN = GLSN(0)


class Record:
    """The history of one simulation."""

    def __init__(self) -> None:
        self.appends: list[AppendOp] = []
        self.tails: list[TailOp] = []
        self.reads: list[ReadOp] = []
        self.trims: list[TrimOp] = []
        self.staged: dict[str, StagedRows] = {}
        self.published: list[PublishOp] = []
        self.subscribers: dict[int, Subscribed] = {}

    def new_append(self, client: int, now: int, count: int, event_time: EventTime) -> AppendOp:
        payload = len(self.appends) + 1
        body = b"%d:%d" % (payload, count)
        batch = Batch(count, body, crc32c(body), EventTime(event_time), EventTime(event_time + (count - 1) * 1_000))
        op = AppendOp(payload, client, now, batch)
        self.appends.append(op)
        return op

    def op_of(self, batch: Batch) -> AppendOp | None:
        """Whose batch this is, by its body; None if nobody sent such bytes."""
        try:
            payload = int(batch.body.split(b":")[0])
        except ValueError:
            return None
        if not 1 <= payload <= len(self.appends):
            return None
        op = self.appends[payload - 1]
        return op if op.batch.body == batch.body else None


def event_times(batch: Batch) -> list[EventTime]:
    """The event times of a simulated batch's records: a millisecond apart, from its header."""
    return [EventTime(batch.time_min + i * 1_000) for i in range(batch.count)]
