"""The methods of a storage node, for clients, other storage nodes and the metadata repository, and the methods of the
metadata repository that a storage node calls.

Records never travel in headers: the body of a batch, and stored frames, are the bodies of messages.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

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
    """Arguments of an append. ``batch`` has an empty body; the real one is the body of the message."""

    stream: LogStreamId
    epoch: Epoch
    batch: Batch
    if_llsn: LLSN | None = None


class AppendAnswer(Struct, frozen=True):
    """Answer to an append.

    ``revision`` is that of the newest catalog that the replica knows from a cut; 0 if the server is older.
    """

    ack: Ack
    last_sequence: Sequence
    revision: Revision = Revision(0)


class Columns(Struct, frozen=True):
    """The columns of a schema that a reader wants, in this order.

    The reader sends the schema: an Arrow schema in its IPC form. ``event_time`` names its column with event time; empty
    if it has none; None if the reader does not say.
    """

    schema: bytes
    columns: tuple[str, ...]
    event_time: str | None = None


class ReadArguments(Struct, frozen=True):
    """Asks for the committed records of a stream from a GLSN on.

    ``projection`` picks columns from batches with these schemas. Batches with other schemas come unchanged.
    """

    stream: LogStreamId
    from_glsn: GLSN
    bytes_max: int
    projection: dict[int, Columns] = {}


class ReadAnswerHeader(Struct, frozen=True):
    """Header of an answer whose body is the frames.

    Frames of batches from which columns were picked are encoded again, with their own checksums. ``complete_through``
    and ``revision`` are as in ``core.read.merge_reader.ReadAnswer``.
    """

    stream: LogStreamId
    commits: tuple[CommitContext, ...]
    complete_through: GLSN
    revision: Revision


class FindArguments(Struct, frozen=True):
    """Asks for the first record that was committed at or after this time.

    With ``bytes_max``, asks for the first of the newest records that fit into that many bytes instead.
    """

    stream: LogStreamId
    time: CutTime
    bytes_max: int = 0


class FindAnswer(Struct, frozen=True):
    """``glsn`` is the first such record, or None if there is none. Later ones lie above ``complete_through``."""

    glsn: GLSN | None
    complete_through: GLSN
    size_bytes: int = 0
    """Size of all entries of the replica."""


class EventTimeArguments(Struct, frozen=True):
    """Asks for the event time of a log stream after this position."""

    stream: LogStreamId
    at: GLSN


class EventTimeAnswer(Struct, frozen=True):
    """Event time after a position.

    ``time_max`` and ``declared`` are the largest event time and the largest declared watermark of all batches that end
    at or below the position, including trimmed ones. ``commit`` is the last one that begins at or below it and is not
    trimmed. ``idle``: the last entry that begins at or below the position declares idleness.
    """

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
    """Why the replica cannot be trusted, if it cannot."""
    source: StorageNodeId | None = None
    """The storage node that it copies from now."""


class DamageStatus(Struct, frozen=True):
    """A part of a replica that cannot be read: these LLSNs, or no entries if both are 0.

    ``since_us`` is the wall clock when it was found. ``trouble`` says why it is not repaired; it is empty while a
    repair is under way.
    """

    stream: LogStreamId
    what: str
    first_llsn: LLSN
    last_llsn: LLSN
    since_us: int
    trouble: str = ""


class NodeStatus(Struct, frozen=True):
    """Status of a storage node.

    ``unreadable`` lists log streams whose files cannot be opened; they wait to be copied from a peer. ``problems`` says
    why each of them cannot be opened. ``leftovers`` lists replicas that the cluster does not count any more, as the
    node was told.
    """

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


class NodeSelfDescription(Struct, frozen=True):
    """The identity of a storage node.

    ``cluster_key`` is None until it has been added to a cluster. ``node_key`` is empty, since clients need not know it.
    """

    cluster: ClusterId
    node: StorageNodeId
    node_key: str
    cluster_key: str | None
    address: str
    volumes: tuple[VolumeRoom, ...]
    version: str
    incarnation: Incarnation


class VerifyFinding(Struct, frozen=True):
    """A fault that verification found.

    ``stream`` is ``NO_STREAM`` for staged parts. ``is_content``: the bytes are intact, but hold no records of the
    topic. The LLSNs are those of the affected entries, None if none or all of them are affected. ``next_glsn`` is the
    first position after them, if they are committed.
    """

    stream: LogStreamId
    where: str
    what: str
    is_content: bool = False
    first_llsn: LLSN | None = None
    last_llsn: LLSN | None = None
    next_glsn: GLSN | None = None


NO_STREAM = LogStreamId(0)


class StageArguments(Struct, frozen=True):
    """Sends the next frames of a part, which are the body of the message: whole, numbered within the part, as many as
    fit.

    ``offset`` is the number of bytes of frames that came before.
    """

    part: StagedPart
    offset: int


class StageAnswer(Struct, frozen=True):
    """``end`` is how many bytes of the part the node has now.

    They are durable when the part is finished, not before.
    """

    end: int


class FinishArguments(Struct, frozen=True):
    """Says that the part is complete and has this size."""

    part: str
    size: PartSize


class FetchArguments(Struct, frozen=True):
    """Asks for frames of a complete part from this offset on: at least one and otherwise at most ``bytes_max``."""

    part: str
    offset: int
    bytes_max: int


class FetchAnswer(Struct, frozen=True):
    """The frames are the body; an empty one means that none are left. ``checked``: their content was found valid."""

    part: StagedPart
    size: PartSize
    checked: bool = False


class StagedInfo(Struct, frozen=True):
    """The staged parts of a batch on a storage node. ``age_us`` is the age of the newest part."""

    run: RunId
    batch: BatchNumber
    generation: int
    parts: int
    bytes: int
    age_us: int


APPEND: Method[AppendArguments, AppendAnswer] = Method("append", AppendArguments, AppendAnswer)
READ: Method[ReadArguments, ReadAnswerHeader] = Method("read", ReadArguments, ReadAnswerHeader)
FOLLOW: StreamMethod[ReadArguments, ReadAnswerHeader] = StreamMethod("follow", ReadArguments, ReadAnswerHeader)
"""Messages of about ``bytes_max`` come until the reader cancels. A message without a body says that a log stream is
complete further, although nothing was appended to it.
"""
FIND: Method[FindArguments, FindAnswer] = Method("find", FindArguments, FindAnswer)
EVENT_TIME: Method[EventTimeArguments, EventTimeAnswer] = Method("event_time", EventTimeArguments, EventTimeAnswer)
FATE: Method[FateArguments, Fate] = Method("fate", FateArguments, Fate)
STATUS: Method[None, NodeStatus] = Method("status", None, NodeStatus)
DESCRIBE: Method[None, NodeSelfDescription] = Method("describe", None, NodeSelfDescription)
VERIFY: Method[LogStreamId, tuple[VerifyFinding, ...]] = Method("verify", int, tuple[VerifyFinding, ...])
STAGE: Method[StageArguments, StageAnswer] = Method("stage", StageArguments, StageAnswer)
"""Frames that are sent again, because an answer was lost, are not stored twice. ``NotFound``: the node does not have
the frames before, or not any more, so the part must be staged again under another name.
"""
FINISH_PART: Method[FinishArguments, None] = Method("finish_part", FinishArguments, None)
"""The part is durable when this is answered."""
DISCARD_PART: Method[str, None] = Method("discard_part", str, None)
"""Drops an incomplete part that is no longer wanted."""
STAGED: Method[None, tuple[StagedInfo, ...]] = Method("staged", None, tuple[StagedInfo, ...])
VERIFY_STAGED: Method[None, tuple[VerifyFinding, ...]] = Method("verify_staged", None, tuple[VerifyFinding, ...])
ADD_VOLUME: Method[str, NodeSelfDescription] = Method("add_volume", str, NodeSelfDescription)
"""Adds a directory on the machine of the storage node. When the answer comes, it is in use and in the catalog."""
REMOVE_VOLUME: Method[str, NodeSelfDescription] = Method("remove_volume", str, NodeSelfDescription)
"""Refused while any data lies there."""

# Storage nodes among each other.


class EntryRefused(Struct, frozen=True):
    """The next replica of the chain refused an entry."""

    stream: LogStreamId
    epoch: Epoch
    node: StorageNodeId
    reason: str


class SyncContexts(Struct, frozen=True, tag=True):
    """Some of the commit contexts, which are the body of the message."""


class SyncDedup(Struct, frozen=True, tag=True):
    """The next bytes of the deduplication checkpoint, in the form of its file. They are the body of the message."""


class CopyArguments(Struct, frozen=True):
    """Asks for an intact copy of the committed entry that holds this LLSN, to repair a damaged one.

    ``commits_only``: the entry is trimmed, and only its commit is needed. An older peer says that it is trimmed.
    """

    stream: LogStreamId
    llsn: LLSN
    commits_only: bool = False


class CopyAnswer(Struct, frozen=True):
    """The frame is the body. ``commits`` are the commits that give it its GLSNs."""

    commits: tuple[CommitContext, ...]


class KeepUpArguments(Struct, frozen=True):
    """Asks a replica and those after it in the chain to catch up.

    A replica that sends a group needs this, since nothing of the group is committed before its end. ``bytes_to_come``
    is the room that the others should have.
    """

    stream: LogStreamId
    epoch: Epoch
    bytes_to_come: int = 0


REPLICATE: Notice[Replicate] = Notice("replicate", Replicate)
"""The entry's batch has an empty body; the real one is the body of the message."""
ENTRY_REFUSED: Notice[EntryRefused] = Notice("entry_refused", EntryRefused)
SyncItem = SyncBegin | SyncEntries | SyncContexts | SyncDedup | SyncEnd | SyncFailed
SYNC: StreamMethod[SyncRequest, SyncItem] = StreamMethod("sync", SyncRequest, SyncItem)
"""The body of ``SyncBegin`` is event time before the first entry. The body of ``SyncEntries`` is the entries, as
frames. Commit contexts and deduplication come in parts before ``SyncEnd``, which contains neither.
"""
COPY: Method[CopyArguments, CopyAnswer] = Method("copy", CopyArguments, CopyAnswer)
FETCH: Method[FetchArguments, FetchAnswer] = Method("fetch", FetchArguments, FetchAnswer)
"""Fetches staged entries from a node that holds them."""
KEEP_UP: Method[KeepUpArguments, None] = Method("keep_up", KeepUpArguments, None)
"""Answered when little of the log stream waits for a disk, here and further down the chain. ``ReadOnly``: a node there
has no room.
"""

# The metadata repository.


class Addresses(Struct, frozen=True):
    """The addresses of storage nodes, and the public keys of all servers, by number.

    ``revision`` is that of the catalog that last changed addresses or keys of storage nodes.
    """

    storage_nodes: dict[StorageNodeId, str]
    keys: dict[StorageNodeId, str] = {}
    metadata_keys: dict[MetadataNodeId, str] = {}
    revision: Revision = Revision(0)


class JoinArguments(Struct, frozen=True):
    """The identity and address of a storage node.

    ``cluster_key`` is the one that it got when it was added, if it was. ``server_key`` is the key that it has proved to
    hold, as stated by the metadata node that passes this on.
    """

    node: StorageNodeId
    node_key: str
    cluster_key: str | None
    address: str
    incarnation: Incarnation
    volumes: tuple[str, ...]
    server_key: str = ""


class JoinAnswer(Struct, frozen=True):
    """Answer to a join.

    ``known``: the node has been added to the cluster, and the repository accepts its reports. ``metadata_keys`` are the
    public keys of all metadata nodes. ``heard`` is the newest incarnation of the node whose reports the leader knows,
    if there is one. ``secured``: access control is on, so the node serves no client before it has the rules.
    """

    cluster_key: str
    known: bool
    metadata_keys: dict[MetadataNodeId, str] = {}
    heard: Incarnation | UnsetType = UNSET
    secured: bool | UnsetType = UNSET


A_CLIENT = StorageNodeId(0)
"""Stands for a client that complains about a storage node."""


class Complaint(Struct, frozen=True):
    stream: LogStreamId
    complainer: StorageNodeId
    peer: StorageNodeId


JOIN: Method[JoinArguments, JoinAnswer] = Method("join", JoinArguments, JoinAnswer)
"""A storage node sends this first on every new connection. If the keys do not belong together, the answer is
``WrongIdentity``, and the node stops.
"""
REPORT: Notice[Report] = Notice("report", Report)
COMPLAINT: Notice[Complaint] = Notice("complaint", Complaint)
GROUP_OUTCOME: Notice[GroupOutcome] = Notice("group_outcome", GroupOutcome)
LEADER_SAYS: Notice[LeaderMessage] = Notice("leader_says", LeaderMessage)
ACCESS_CHANGED: Notice[Revision] = Notice("access_changed", Revision)
"""The rules of access control have this revision now: the storage node asks for them."""
ADDRESSES: Notice[Addresses] = Notice("addresses", Addresses)
