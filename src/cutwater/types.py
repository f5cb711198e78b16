"""The vocabulary of Cutwater as types.

Every word here means one thing in code, documentation, command line and error messages. Numbers that must not be mixed
up are distinct types to the type checker (``NewType``) and plain integers at run time.

Sequence numbers are dense and start at 1, so 0 always means "before the first". An *end* is the last number that is
included; the next number is ``end + 1``. All times are integers in microseconds. ``CutTime`` comes from the order
layer's clock (UTC), ``EventTime`` from the record itself (UTC).
"""

from __future__ import annotations

import enum
from typing import NewType

from msgspec import UNSET, Struct, UnsetType

ClusterId = NewType("ClusterId", int)
"""``cid``: one log service, which consists of a metadata repository and its storage nodes."""

StorageNodeId = NewType("StorageNodeId", int)
"""``snid``: a process that stores replicas of log streams on its volumes."""

MetadataNodeId = NewType("MetadataNodeId", int)
"""One process of the metadata repository."""

LogStreamId = NewType("LogStreamId", int)
"""``lsid``: a shard of the log, replicated on several storage nodes."""

TopicId = NewType("TopicId", int)
"""The number of a topic. A name may be reused after deletion; the number never is."""

LLSN = NewType("LLSN", int)
"""Local log sequence number: a record's position in its log stream, dense from 1."""

GLSN = NewType("GLSN", int)
"""Global log sequence number: a record's position in the whole cluster, dense from 1, never reused."""

Epoch = NewType("Epoch", int)
"""How often a log stream has been opened. An entry, a report and a commit belong to one epoch of one stream."""

LeaderEpoch = NewType("LeaderEpoch", int)
"""How often the metadata repository has changed its leader. The number fences deposed leaders."""

Incarnation = NewType("Incarnation", int)
"""How often a storage node has been started. A new incarnation voids all reports of the earlier ones."""

Revision = NewType("Revision", int)
"""Version of the catalog. Every cut carries the revision under which it was made."""

DecisionIndex = NewType("DecisionIndex", int)
"""Position in the one sequence of decisions of the metadata repository, dense from 1."""

ProducerId = NewType("ProducerId", str)
"""The name with which a producer was opened."""

ProducerEpoch = NewType("ProducerEpoch", int)
"""How often a producer of that name was opened; the newest epoch fences the others."""

Sequence = NewType("Sequence", int)
"""Number of a batch within its producer, dense from 1. ``(producer, sequence)`` identifies a batch permanently."""

RunId = NewType("RunId", int)
"""Number of a run: one life of a query's checkpoint, or one batch write, that publishes micro-batches. Never given out
twice."""

JobNumber = NewType("JobNumber", int)
"""Number of a job that the cluster keeps running. A name may be used again after deletion; the number never is."""

JobEpoch = NewType("JobEpoch", int)
"""Number of an assignment of a job to an agent. It is higher than that of any earlier assignment, and fences these."""

BatchNumber = NewType("BatchNumber", int)
"""Number of a micro-batch within its run, given by Spark, from 0 on; -1 is before the first."""

CutTime = NewType("CutTime", int)
"""Microseconds UTC by the order layer's clock; strictly increasing from cut to cut."""

EventTime = NewType("EventTime", int)
"""Microseconds UTC as declared by the record."""

MemberList = tuple[LeaderEpoch, Revision]
"""Names a list of the open log streams of which a storage node is a member: a leader, and the catalog revision at which
that leader saw the list change. A name is never given to two lists of one node."""

MILLISECOND = 1_000
SECOND = 1_000_000


class Instant(Struct, frozen=True):
    """A reading of the two clocks that a driver hands to a state machine: timeouts use ``monotonic``, stored times
    ``wall``."""

    monotonic: int
    wall: int


class ReplicaState(enum.IntEnum):
    """What a replica may do; the legal transitions are a table in ``core/replica/states.py``."""

    SEALING = 0
    SEALED = 1
    RUNNING = 2
    LEARNING = 3


REPLICATION_DEFAULT = 3
"""Number of copies of each record, unless the creator of a topic says otherwise or there are fewer storage nodes."""


class Retention(Struct, frozen=True):
    """How long the records of a topic are kept: for this time, and up to this size of one copy; 0 means without
    bound."""

    time_us: int = 0
    bytes: int = 0


class NodeState(enum.IntEnum):
    """State of a storage node as a whole, in its reports."""

    READY = 0
    READ_ONLY = 1
    """The disk is full: nothing is lost, reads go on, appends are refused until there is room."""


class BatchKind(enum.IntEnum):
    """What the positions of a batch hold."""

    DATA = 0
    FENCE = 1
    """One position that opens a producer's epoch in a log stream. Subscribers never see it."""
    DECLARATION = 2
    """One position that declares a watermark, idleness or both for its log stream, without a record. It has no body,
    and subscribers never see it."""


class ProducerTag(Struct, frozen=True):
    """The producer of a batch, its epoch, and the batch's number."""

    producer: ProducerId
    epoch: ProducerEpoch
    sequence: Sequence


class GroupTag(Struct, frozen=True):
    """Identifies a group: the rows of one micro-batch of a run for one topic, stored as entries of one log stream that
    one cut commits. The last entry carries the tag.

    ``count`` is the number of records in the group. ``decided`` is the decision that fixed the contents of the batch;
    it grows from batch to batch, over all runs. No group of the topic that was decided before ``oldest`` is still to be
    published, so replicas need not remember those.
    """

    run: RunId
    batch: BatchNumber
    count: int
    decided: DecisionIndex
    oldest: DecisionIndex


class Part(Struct, frozen=True, array_like=True):
    """The rows that one attempt of a task staged of a micro-batch for one topic, and where they lie.

    ``hint`` is the log stream for which the part was staged. ``holders`` are the storage nodes that have all of it on
    disk. ``part`` is its name, which no other attempt has. ``generation`` is that of the run when the part was staged.
    If it is ``ordered``, its rows have positions by which the parts of a group are merged. ``run`` and ``batch`` are
    those for which it was staged; parts from before these fields existed have none.
    """

    topic: TopicId
    hint: LogStreamId
    holders: tuple[StorageNodeId, ...]
    part: str
    generation: int
    entries: int
    rows: int
    bytes: int
    ordered: bool = False
    run: RunId = RunId(0)
    batch: BatchNumber = BatchNumber(-1)


class InputRange(Struct, frozen=True, array_like=True):
    """The part of the log that was the input of a micro-batch: the positions above ``after``, up to ``through``."""

    after: GLSN
    through: GLSN

    def __str__(self) -> str:
        return f"GLSN {self.after + 1} to {self.through}"


class Batch(Struct, frozen=True):
    """Records that are appended together: one write, one cut, contiguous in LLSN and GLSN.

    The body is opaque to everything that orders and stores it. ``checksum`` covers the body and is computed once, by
    the client. ``declared`` is a watermark that the producer promises with this batch. ``idle`` declares the log stream
    idle from this batch until the stream's next entry. ``more``: the next entry belongs to the same group, and the same
    cut commits it; the last entry of a group has its ``group``. ``checked``: before the batch got its place in the log,
    a storage node found that the body is sound and that this header describes it correctly. Entries of older versions
    were not checked.
    """

    count: int
    body: bytes
    checksum: int
    time_min: EventTime
    time_max: EventTime
    kind: BatchKind = BatchKind.DATA
    producer: ProducerTag | None = None
    declared: EventTime | None = None
    schema: int = 0
    more: bool = False
    group: GroupTag | None = None
    idle: bool = False
    checked: bool = False


class Entry(Struct, frozen=True):
    """A log entry: a batch at its place in a log stream. Every replica stores it byte for byte the same."""

    first_llsn: LLSN
    epoch: Epoch
    batch: Batch

    @property
    def last_llsn(self) -> LLSN:
        return LLSN(self.first_llsn + self.batch.count - 1)


COMMITTED = {
    "first_llsn": "committed_llsn_offset",
    "first_glsn": "committed_glsn_offset",
    "count": "committed_glsn_length",
}
"""Field names of a commit where it is sent or stored."""


class CommitContext(Struct, frozen=True, rename=COMMITTED):
    """The part of one cut that concerns one log stream: LLSNs from ``first_llsn`` get GLSNs from ``first_glsn``.

    ``high_watermark`` identifies the cut and ``prev_high_watermark`` the cut before it. Replicas store non-empty
    commits only. The metadata repository keeps the same object in its history until replicas have it on disk.
    """

    epoch: Epoch
    first_llsn: LLSN
    first_glsn: GLSN
    count: int
    high_watermark: GLSN
    prev_high_watermark: GLSN
    time: CutTime

    @property
    def last_llsn(self) -> LLSN:
        return LLSN(self.first_llsn + self.count - 1)

    @property
    def last_glsn(self) -> GLSN:
        return GLSN(self.first_glsn + self.count - 1)

    def glsn_of(self, llsn: LLSN) -> GLSN:
        assert self.first_llsn <= llsn <= self.last_llsn
        return GLSN(self.first_glsn + (llsn - self.first_llsn))


class UncommitReport(Struct, frozen=True):
    """The durable state of one replica: nothing in it can be lost in a power cut.

    ``uncommitted_llsn_offset`` is the first LLSN whose commit is not yet on the replica's disk, and
    ``uncommitted_llsn_length`` is the number of durable records from there on. They never end inside a group.
    ``progress`` is how far the disk has come inside one, and only shows that the replica is not stuck.
    """

    log_stream_id: LogStreamId
    epoch: Epoch
    state: ReplicaState
    high_watermark: GLSN
    uncommitted_llsn_offset: LLSN
    uncommitted_llsn_length: int
    trimmed_before: GLSN = GLSN(1)
    progress: LLSN = LLSN(0)

    @property
    def committed_end(self) -> LLSN:
        return LLSN(self.uncommitted_llsn_offset - 1)

    @property
    def durable_end(self) -> LLSN:
        return LLSN(self.uncommitted_llsn_offset + self.uncommitted_llsn_length - 1)


class Report(Struct, frozen=True):
    """A storage node's report to the metadata repository. Only the newest ``(incarnation, sequence)`` counts.

    ``leader_epoch`` is the newest leader that the node has heard of. A leader believes only reports that name it:
    another report may have been sent before decisions that the leader knows of.

    ``applied_high_watermark`` is the last cut up to which all running replicas of the node know that they are complete.
    It is not durable, and only shows whether commits got lost on the way. ``invalid`` names replicas whose stored data
    cannot be trusted: they report nothing and wait to be synced. ``is_followed``: readers on this node wait for records
    as they are committed, so the node wants to hear of every cut at once.

    ``base`` is the number of an earlier report of the same incarnation, which was whole. ``uncommit_reports`` then has
    only the replicas that differ from it, and all others are as they were there (ADR 0049). A whole report that later
    ones may build on has its own number as ``base``; any other whole report after that one has 0.
    ``members`` is the newest list of members that the node holds, see ``CommitMessage``.
    """

    storage_node_id: StorageNodeId
    incarnation: Incarnation
    sequence: int
    leader_epoch: LeaderEpoch
    node_state: NodeState
    uncommit_reports: tuple[UncommitReport, ...]
    applied_high_watermark: GLSN = GLSN(0)
    invalid: tuple[LogStreamId, ...] = ()
    is_followed: bool = False
    base: int | UnsetType = UNSET
    members: MemberList | UnsetType = UNSET


class Ack(Struct, frozen=True):
    """The answer to a committed append: the position of its first record, and the number of records."""

    glsn: GLSN
    llsn: LLSN
    stream: LogStreamId
    count: int
