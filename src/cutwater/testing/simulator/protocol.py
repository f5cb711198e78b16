"""Messages between simulated processes besides those of the core: calls, answers and heartbeats."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from cutwater.core.messages import SyncBegin
from cutwater.format.entry_codec import RunningEventTime
from cutwater.types import (
    GLSN,
    LLSN,
    Batch,
    BatchNumber,
    Entry,
    Epoch,
    LeaderEpoch,
    LogStreamId,
    MetadataNodeId,
    ProducerId,
    Report,
    RunId,
    StorageNodeId,
)


class SimCall(Struct, frozen=True):
    """A request that expects an answer."""

    call_id: int
    body: Any


class Return(Struct, frozen=True):
    """The answer to a call: a value or an error, as an exception object."""

    call_id: int
    outcome: Any


# To storage nodes.


class AppendCall(Struct, frozen=True):
    stream: LogStreamId
    epoch: Epoch
    batch: Batch


class ReadCall(Struct, frozen=True):
    """A request for committed runs of a stream from a GLSN on."""

    stream: LogStreamId
    from_glsn: GLSN
    runs_max: int = 64


class FateCall(Struct, frozen=True):
    stream: LogStreamId
    stream_epoch: Epoch
    producer: ProducerId


class StageCall(Struct, frozen=True):
    """A request to keep these rows, invisibly, until it is decided whether they are published."""

    part: str
    run: RunId
    batch: BatchNumber
    generation: int
    batches: tuple[Batch, ...]


class FetchCall(Struct, frozen=True):
    """A request for a staged part, from another storage node that must publish it."""

    part: str


class FetchReturn(Struct, frozen=True):
    part: str
    batches: tuple[Batch, ...]


class CopyCall(Struct, frozen=True):
    """A request for an intact copy of the committed entry that holds this LLSN."""

    stream: LogStreamId
    llsn: LLSN


class CopyReturn(Struct, frozen=True):
    """The entry, and the event time reached before it, if the source disk knows it."""

    stream: LogStreamId
    entry: Entry
    running: RunningEventTime | None = None


class SyncStart(Struct, frozen=True):
    """The beginning of a sync, and the event time reached before the first entry that will be sent."""

    begin: SyncBegin
    running: RunningEventTime | None


# To and between metadata repository nodes.


class ReportMessage(Struct, frozen=True):
    report: Report


class ComplaintMessage(Struct, frozen=True):
    stream: LogStreamId
    complainer: StorageNodeId
    peer: StorageNodeId


class SimHeartbeat(Struct, frozen=True):
    leader_epoch: LeaderEpoch
    leader: MetadataNodeId


class Relay(Struct, frozen=True):
    """Relays a message: from the leader through a follower to a storage node, or from a follower to the leader."""

    target: tuple[str, int]
    message: Any


class SimAppendAnswer(Struct, frozen=True):
    """A committed append, with the producer's last sequence at that place, and the newest revision of the catalog that
    the replica knows."""

    ack: Any
    last_sequence: int
    revision: int
