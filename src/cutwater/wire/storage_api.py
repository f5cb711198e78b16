"""What can be asked of a storage node, by clients, by other storage nodes and by the metadata repository.

Records never travel in headers: the body of a batch, and frames as they are stored, are the bodies of messages.
"""

from __future__ import annotations

from msgspec import Struct

from cutwater.core.messages import LeaderMessage, Replicate, SyncBegin, SyncEnd, SyncEntries, SyncFailed, SyncRequest
from cutwater.core.producer_session import Fate
from cutwater.types import (
    GLSN,
    LLSN,
    Ack,
    Batch,
    CommitContext,
    Epoch,
    LogStreamId,
    ProducerId,
    ReplicaState,
    Report,
    Revision,
    Sequence,
    StorageNodeId,
)
from cutwater.wire.methods import Method, Notice, StreamMethod

# Clients.


class AppendArguments(Struct, frozen=True):
    """``batch`` has an empty body; the real one is the body of the message."""

    stream: LogStreamId
    epoch: Epoch
    batch: Batch
    if_llsn: LLSN | None = None


class AppendAnswer(Struct, frozen=True):
    ack: Ack
    last_sequence: Sequence


class ReadArguments(Struct, frozen=True):
    """Committed records of a stream from a GLSN on."""

    stream: LogStreamId
    from_glsn: GLSN
    bytes_max: int


class ReadAnswerHeader(Struct, frozen=True):
    """The frames are the body. ``complete_through`` and ``revision`` are as in ``core.subscription.ReadAnswer``."""

    stream: LogStreamId
    commits: tuple[CommitContext, ...]
    complete_through: GLSN
    revision: Revision


class FateArguments(Struct, frozen=True):
    stream: LogStreamId
    stream_epoch: Epoch
    producer: ProducerId


class ReplicaStatus(Struct, frozen=True):
    stream: LogStreamId
    state: ReplicaState
    trusted: bool
    epoch: Epoch
    first_llsn: LLSN
    committed_end: LLSN
    durable_end: LLSN
    complete_through: GLSN


class NodeStatus(Struct, frozen=True):
    node: StorageNodeId
    replicas: tuple[ReplicaStatus, ...]


class VerifyFinding(Struct, frozen=True):
    stream: LogStreamId
    where: str
    what: str


APPEND: Method[AppendArguments, AppendAnswer] = Method("append", AppendArguments, AppendAnswer)
READ: Method[ReadArguments, ReadAnswerHeader] = Method("read", ReadArguments, ReadAnswerHeader)
FATE: Method[FateArguments, Fate] = Method("fate", FateArguments, Fate)
STATUS: Method[None, NodeStatus] = Method("status", None, NodeStatus)
VERIFY: Method[LogStreamId, tuple[VerifyFinding, ...]] = Method("verify", int, tuple[VerifyFinding, ...])

# Storage nodes among each other.


class EntryRefused(Struct, frozen=True):
    """The next replica of the chain did not take an entry."""

    stream: LogStreamId
    epoch: Epoch
    node: StorageNodeId
    reason: str


REPLICATE: Notice[Replicate] = Notice("replicate", Replicate)
"""The entry's batch has an empty body; the real one is the body of the message."""
ENTRY_REFUSED: Notice[EntryRefused] = Notice("entry_refused", EntryRefused)
SyncItem = SyncBegin | SyncEntries | SyncEnd | SyncFailed
SYNC: StreamMethod[SyncRequest, SyncItem] = StreamMethod("sync", SyncRequest, SyncItem)
"""The entries of a part are frames in the body of the message."""

# The metadata repository.


class Addresses(Struct, frozen=True):
    """Where storage nodes listen."""

    storage_nodes: dict[StorageNodeId, str]


class Complaint(Struct, frozen=True):
    stream: LogStreamId
    complainer: StorageNodeId
    peer: StorageNodeId


REPORT: Notice[Report] = Notice("report", Report)
COMPLAINT: Notice[Complaint] = Notice("complaint", Complaint)
LEADER_SAYS: Notice[LeaderMessage] = Notice("leader_says", LeaderMessage)
ADDRESSES: Notice[Addresses] = Notice("addresses", Addresses)
