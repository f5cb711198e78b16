"""What can be asked of a storage node, by clients, by other storage nodes and by the metadata repository; and what a
storage node asks of the metadata repository.

Records never travel in headers: the body of a batch, and frames as they are stored, are the bodies of messages.
"""

from __future__ import annotations

from msgspec import Struct

from cutwater.core.messages import (
    GroupOutcome,
    LeaderMessage,
    Replicate,
    SyncBegin,
    SyncEnd,
    SyncEntries,
    SyncFailed,
    SyncRequest,
)
from cutwater.core.producer_session import Fate
from cutwater.core.publish.staged import PartSize, StagedPart
from cutwater.protocol.methods import Method, Notice, StreamMethod
from cutwater.types import (
    GLSN,
    LLSN,
    Ack,
    Batch,
    BatchNumber,
    ClusterId,
    CommitContext,
    CutTime,
    Epoch,
    EventTime,
    Incarnation,
    LogStreamId,
    MetadataNodeId,
    NodeState,
    ProducerId,
    ReplicaState,
    Report,
    Revision,
    RunId,
    Sequence,
    StorageNodeId,
)

# Clients.


class AppendArguments(Struct, frozen=True):
    """``batch`` has an empty body; the real one is the body of the message."""

    stream: LogStreamId
    epoch: Epoch
    batch: Batch
    if_llsn: LLSN | None = None


class AppendAnswer(Struct, frozen=True):
    """``revision``: that of the newest catalog which the replica has heard of with a cut; 0 if the server is older."""

    ack: Ack
    last_sequence: Sequence
    revision: Revision = Revision(0)


class Columns(Struct, frozen=True):
    """Which columns of a schema a reader wants, in this order. The reader tells the schema: an Arrow schema in its IPC
    form. ``event_time`` names its column with event time, empty if it has none; None if the reader does not say."""

    schema: bytes
    columns: tuple[str, ...]
    event_time: str | None = None


class ReadArguments(Struct, frozen=True):
    """Committed records of a stream from a GLSN on. ``projection``: of batches with these schemas, only some columns;
    batches with others come as they are."""

    stream: LogStreamId
    from_glsn: GLSN
    bytes_max: int
    projection: dict[int, Columns] = {}


class ReadAnswerHeader(Struct, frozen=True):
    """The frames are the body; those of batches of which columns were picked are made anew, with their own checksums.
    ``complete_through`` and ``revision`` are as in ``core.read.merge_reader.ReadAnswer``."""

    stream: LogStreamId
    commits: tuple[CommitContext, ...]
    complete_through: GLSN
    revision: Revision


class FollowArguments(Struct, frozen=True):
    """As ``ReadArguments``, for a reader that stays: each message has about ``bytes_max``, and they go on for ever."""

    stream: LogStreamId
    from_glsn: GLSN
    bytes_max: int
    projection: dict[int, Columns] = {}


class FindArguments(Struct, frozen=True):
    """Where the records begin that were committed at or after this time; or, with ``bytes_max``, the newest that fit
    into so many bytes."""

    stream: LogStreamId
    time: CutTime
    bytes_max: int = 0


class FindAnswer(Struct, frozen=True):
    """``glsn``: the first such record that is there, None if none is. Later ones lie above ``complete_through``."""

    glsn: GLSN | None
    complete_through: GLSN
    size_bytes: int = 0
    """Of all entries that are there."""


class EventTimeArguments(Struct, frozen=True):
    """How far the event time of a log stream had come after this position."""

    stream: LogStreamId
    at: GLSN


class EventTimeAnswer(Struct, frozen=True):
    """The largest event time and the largest declared watermark of all batches that end at or below the position, also
    of those that are trimmed. ``commit``: the last one that begins at or below it and is not trimmed. ``idle``: the
    last entry that begins at or below the position declares idleness."""

    time_max: EventTime | None
    declared: EventTime | None
    commit: CommitContext | None
    complete_through: GLSN
    idle: bool = False


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
    problem: str = ""
    """Why it cannot be trusted, if it cannot."""
    source: StorageNodeId | None = None
    """The storage node that it learns from now."""


class DamageStatus(Struct, frozen=True):
    """Something of a replica that cannot be read: these LLSNs, or no entries if both are 0. ``since_us``: the wall
    clock when it was met. ``trouble``: why it is not repaired; empty while a repair is under way."""

    stream: LogStreamId
    what: str
    first_llsn: LLSN
    last_llsn: LLSN
    since_us: int
    trouble: str = ""


class NodeStatus(Struct, frozen=True):
    """``unreadable``: log streams whose files cannot even be opened; they wait to be learned from a peer. ``problems``:
    why each of them cannot be opened. ``leftovers``: replicas that the cluster does not count any more, as the node was
    told."""

    node: StorageNodeId
    state: NodeState
    replicas: tuple[ReplicaStatus, ...]
    unreadable: tuple[LogStreamId, ...] = ()
    damage: tuple[DamageStatus, ...] = ()
    leftovers: tuple[LogStreamId, ...] = ()
    problems: dict[LogStreamId, str] = {}


class VolumeRoom(Struct, frozen=True):
    path: str
    total_bytes: int
    free_bytes: int


class NodeDescription(Struct, frozen=True):
    """The identity of a storage node. ``cluster_key`` is None until it has been added to a cluster. ``node_key`` is
    empty: clients need not know it."""

    cluster: ClusterId
    node: StorageNodeId
    node_key: str
    cluster_key: str | None
    address: str
    volumes: tuple[VolumeRoom, ...]
    version: str
    incarnation: Incarnation


class VerifyFinding(Struct, frozen=True):
    """``stream`` is ``NO_STREAM`` for what is staged. ``is_content``: the bytes are intact, but hold no records of the
    topic. The LLSNs are those of the entries that are concerned, None if none or all of them are; ``next_glsn`` is the
    first position behind them, if they are committed."""

    stream: LogStreamId
    where: str
    what: str
    is_content: bool = False
    first_llsn: LLSN | None = None
    last_llsn: LLSN | None = None
    next_glsn: GLSN | None = None


NO_STREAM = LogStreamId(0)


class StageArguments(Struct, frozen=True):
    """The next frames of a part, which are the body of the message: each whole, numbered within the part, and so many
    as fit. ``offset``: how many bytes of frames came before."""

    part: StagedPart
    offset: int


class StageAnswer(Struct, frozen=True):
    """How many bytes of the part are there now. They are durable when it is complete, not before."""

    end: int


class FinishArguments(Struct, frozen=True):
    """The part is complete and has this size."""

    part: str
    size: PartSize


class FetchArguments(Struct, frozen=True):
    """Frames of a complete part from this offset on: at least one and otherwise at most ``bytes_max``."""

    part: str
    offset: int
    bytes_max: int


class FetchAnswer(Struct, frozen=True):
    """The frames are the body; none are left if it is empty. ``checked``: what is in them was found to be sound."""

    part: StagedPart
    size: PartSize
    checked: bool = False


class StagedInfo(Struct, frozen=True):
    """What a storage node has staged of a batch. ``age_us``: how long its newest part has been there."""

    run: RunId
    batch: BatchNumber
    generation: int
    parts: int
    bytes: int
    age_us: int


APPEND: Method[AppendArguments, AppendAnswer] = Method("append", AppendArguments, AppendAnswer)
READ: Method[ReadArguments, ReadAnswerHeader] = Method("read", ReadArguments, ReadAnswerHeader)
FOLLOW: StreamMethod[FollowArguments, ReadAnswerHeader] = StreamMethod("follow", FollowArguments, ReadAnswerHeader)
"""Also told, without a body, is that a log stream is complete further although nothing was appended to it."""
FIND: Method[FindArguments, FindAnswer] = Method("find", FindArguments, FindAnswer)
EVENT_TIME: Method[EventTimeArguments, EventTimeAnswer] = Method("event_time", EventTimeArguments, EventTimeAnswer)
FATE: Method[FateArguments, Fate] = Method("fate", FateArguments, Fate)
STATUS: Method[None, NodeStatus] = Method("status", None, NodeStatus)
DESCRIBE: Method[None, NodeDescription] = Method("describe", None, NodeDescription)
VERIFY: Method[LogStreamId, tuple[VerifyFinding, ...]] = Method("verify", int, tuple[VerifyFinding, ...])
STAGE: Method[StageArguments, StageAnswer] = Method("stage", StageArguments, StageAnswer)
"""What is repeated, because an answer was lost, is not taken twice. ``NotFound``: the node has not, or no longer, what
came before, so the part has to be staged again, under another name."""
FINISH_PART: Method[FinishArguments, None] = Method("finish_part", FinishArguments, None)
"""The part is durable when this is answered."""
DISCARD_PART: Method[str, None] = Method("discard_part", str, None)
"""A part that is not complete is not wanted any more."""
STAGED: Method[None, tuple[StagedInfo, ...]] = Method("staged", None, tuple[StagedInfo, ...])
VERIFY_STAGED: Method[None, tuple[VerifyFinding, ...]] = Method("verify_staged", None, tuple[VerifyFinding, ...])
ADD_VOLUME: Method[str, NodeDescription] = Method("add_volume", str, NodeDescription)
"""A directory on the machine of the storage node. It is used, and in the catalog, when the answer comes."""
REMOVE_VOLUME: Method[str, NodeDescription] = Method("remove_volume", str, NodeDescription)
"""Refused while anything lies there."""

# Storage nodes among each other.


class EntryRefused(Struct, frozen=True):
    """The next replica of the chain did not take an entry."""

    stream: LogStreamId
    epoch: Epoch
    node: StorageNodeId
    reason: str


class SyncContexts(Struct, frozen=True, tag=True):
    """Some of the commit contexts, which are the body of the message."""


class SyncDedup(Struct, frozen=True, tag=True):
    """The next bytes of the deduplication checkpoint, in the form of its file, which are the body of the message."""


class CopyArguments(Struct, frozen=True):
    """An intact copy of the committed entry that holds this LLSN is wanted, to repair a damaged one."""

    stream: LogStreamId
    llsn: LLSN


class CopyAnswer(Struct, frozen=True):
    """The frame is the body. ``commits`` are those that give it its GLSNs."""

    commits: tuple[CommitContext, ...]


class KeepUpArguments(Struct, frozen=True):
    """Whoever sends a group, of which nothing is committed before the end, waits for those that follow in the chain.
    ``bytes_to_come``: what they should have room for."""

    stream: LogStreamId
    epoch: Epoch
    bytes_to_come: int = 0


REPLICATE: Notice[Replicate] = Notice("replicate", Replicate)
"""The entry's batch has an empty body; the real one is the body of the message."""
ENTRY_REFUSED: Notice[EntryRefused] = Notice("entry_refused", EntryRefused)
SyncItem = SyncBegin | SyncEntries | SyncContexts | SyncDedup | SyncEnd | SyncFailed
SYNC: StreamMethod[SyncRequest, SyncItem] = StreamMethod("sync", SyncRequest, SyncItem)
"""With ``SyncBegin`` comes, as the body, how far event time had come before the first entry; with ``SyncEntries`` the
entries, as frames. Commit contexts and deduplication come in parts before ``SyncEnd``, which itself has neither."""
COPY: Method[CopyArguments, CopyAnswer] = Method("copy", CopyArguments, CopyAnswer)
FETCH: Method[FetchArguments, FetchAnswer] = Method("fetch", FetchArguments, FetchAnswer)
"""Staged entries, of one who holds them."""
KEEP_UP: Method[KeepUpArguments, None] = Method("keep_up", KeepUpArguments, None)
"""Answered when little of the log stream waits for a disk, here and further down the chain. ``ReadOnly``: someone there
has no room."""

# The metadata repository.


class Addresses(Struct, frozen=True):
    """Where storage nodes listen, and the public keys of all servers, by their numbers. ``revision``: that of the
    catalog in which the addresses and keys of storage nodes became what they are."""

    storage_nodes: dict[StorageNodeId, str]
    keys: dict[StorageNodeId, str] = {}
    metadata_keys: dict[MetadataNodeId, str] = {}
    revision: Revision = Revision(0)


class JoinArguments(Struct, frozen=True):
    """The identity and address of a storage node. ``cluster_key`` is the one that it got when it was added, if it was.
    ``server_key``: the key that it has proved to hold, as the metadata node says that passes this on."""

    node: StorageNodeId
    node_key: str
    cluster_key: str | None
    address: str
    incarnation: Incarnation
    volumes: tuple[str, ...]
    server_key: str = ""


class JoinAnswer(Struct, frozen=True):
    """``known``: the node has been added to the cluster, and its reports are welcome. ``metadata_keys``: the public
    keys of all metadata nodes."""

    cluster_key: str
    known: bool
    metadata_keys: dict[MetadataNodeId, str] = {}


A_CLIENT = StorageNodeId(0)
"""Stands for a client that complains of a storage node."""


class Complaint(Struct, frozen=True):
    stream: LogStreamId
    complainer: StorageNodeId
    peer: StorageNodeId


JOIN: Method[JoinArguments, JoinAnswer] = Method("join", JoinArguments, JoinAnswer)
"""Asked by a storage node on every new connection, before anything else. Keys that do not belong together get
``WrongIdentity``, which the node takes as a reason to stop."""
REPORT: Notice[Report] = Notice("report", Report)
COMPLAINT: Notice[Complaint] = Notice("complaint", Complaint)
GROUP_OUTCOME: Notice[GroupOutcome] = Notice("group_outcome", GroupOutcome)
LEADER_SAYS: Notice[LeaderMessage] = Notice("leader_says", LeaderMessage)
ADDRESSES: Notice[Addresses] = Notice("addresses", Addresses)
