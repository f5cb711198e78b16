"""The vocabulary of Cutwater as types.

Every word here means one thing in code, documentation, command line and error messages. Numbers that must not be
mixed up are distinct types to the type checker (``NewType``) and plain integers at run time.

Sequence numbers are dense and start at 1, so 0 always means "before the first". An *end* is the last number that is
included; the next one to come is ``end + 1``. All times are integers in microseconds: ``CutTime`` is the order
layer's clock (UTC), ``EventTime`` is what a record says of itself (UTC).
"""

from __future__ import annotations

import enum
from typing import NewType

from msgspec import Struct

ClusterId = NewType("ClusterId", int)
"""``cid``: one log service, a metadata repository and its storage nodes."""

StorageNodeId = NewType("StorageNodeId", int)
"""``snid``: a process that stores replicas of log streams on its volumes."""

MetadataNodeId = NewType("MetadataNodeId", int)
"""One process of the metadata repository."""

LogStreamId = NewType("LogStreamId", int)
"""``lsid``: a shard of the log, replicated on several storage nodes."""

TopicId = NewType("TopicId", int)
"""The number of a topic; its name may be reused after deletion, the number never."""

LLSN = NewType("LLSN", int)
"""Local log sequence number: a record's position in its log stream, dense from 1."""

GLSN = NewType("GLSN", int)
"""Global log sequence number: a record's position in the whole cluster, dense from 1, never reused."""

Epoch = NewType("Epoch", int)
"""How often a log stream has been opened. An entry, a report and a commit belong to one epoch of one stream."""

LeaderEpoch = NewType("LeaderEpoch", int)
"""How often the metadata repository has changed its leader; the number that fences a deposed one."""

Incarnation = NewType("Incarnation", int)
"""How often a storage node has been started. A new incarnation voids all reports of the earlier ones."""

Revision = NewType("Revision", int)
"""Version of the catalog. Every cut carries the revision under which it was made."""

DecisionIndex = NewType("DecisionIndex", int)
"""Position in the one sequence of decisions of the metadata repository, dense from 1."""

ProducerId = NewType("ProducerId", str)
"""The name a producer was opened with."""

ProducerEpoch = NewType("ProducerEpoch", int)
"""How often a producer of that name was opened; the newest one fences the others."""

Sequence = NewType("Sequence", int)
"""Number of a batch within its producer, dense from 1. ``(producer, sequence)`` identifies a batch for ever."""

RunId = NewType("RunId", int)
"""One life of a query's checkpoint, or one batch write: whose micro-batches are published. Never given out twice."""

BatchNumber = NewType("BatchNumber", int)
"""Number of a micro-batch within its run, given by Spark, from 0 on; -1 is before the first."""

CutTime = NewType("CutTime", int)
"""Microseconds UTC by the order layer's clock; strictly increasing from cut to cut."""

EventTime = NewType("EventTime", int)
"""Microseconds UTC as declared by the record."""

MILLISECOND = 1_000
SECOND = 1_000_000


class Instant(Struct, frozen=True):
    """A reading of the two clocks that a driver hands to a machine: timeouts use one, stored times the other."""

    monotonic: int
    wall: int


class ReplicaState(enum.IntEnum):
    """What a replica may do; the legal transitions are a table in ``core/replica/states.py``."""

    SEALING = 0
    SEALED = 1
    RUNNING = 2
    LEARNING = 3


class Retention(Struct, frozen=True):
    """How long the records of a topic are kept: for this time, up to this size of one copy; 0 is without bound."""

    time_us: int = 0
    bytes: int = 0


class NodeState(enum.IntEnum):
    """What a storage node says of itself as a whole in its reports."""

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
    """Who sent a batch, under which opening of the name, and as which number."""

    producer: ProducerId
    epoch: ProducerEpoch
    sequence: Sequence


class GroupTag(Struct, frozen=True):
    """Which group this is: the rows of one micro-batch of a run for one topic, several entries of one log stream that
    are committed by one cut. Its last entry carries it.

    ``count`` is how many records the group has. ``decided`` is the decision that made the batch what it is; it grows
    from batch to batch, over all runs. No group of the topic that was decided before ``oldest`` is under way any more,
    so nobody needs to remember those.
    """

    run: RunId
    batch: BatchNumber
    count: int
    decided: DecisionIndex
    oldest: DecisionIndex


class Part(Struct, frozen=True, array_like=True):
    """What one attempt of a task staged of a micro-batch for one topic, and where it lies.

    ``hint`` is the log stream that it was staged for, ``holders`` are the storage nodes that have all of it on disk,
    ``part`` is its name, which no other attempt has. ``generation`` is that of the run when it was staged. If it is
    ``ordered``, its rows have positions by which the parts of a group are merged. ``run`` and ``batch`` are those that
    it was staged for; parts from before these were told have none.
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


class Batch(Struct, frozen=True):
    """Records that are appended together: one write, one cut, contiguous in LLSN and GLSN.

    The body is opaque to everything that orders and stores it. ``checksum`` covers the body and is computed once, by
    the client. ``declared`` is a watermark that the producer promises with this batch. ``idle`` declares the log stream
    idle from this batch until the stream's next entry. ``more``: the next entry belongs to the same group and is
    committed by the same cut; the last one of a group has its ``group``. ``checked``: a storage node found the
    body to be sound, and what is said of it here to be true, before the batch had a place in the log. Entries of older
    versions were not looked into.
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
    """A log entry: a batch at its place in a log stream, as every replica stores it, byte for byte the same."""

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
"""What the fields of a commit are called where it is sent or stored."""


class CommitContext(Struct, frozen=True, rename=COMMITTED):
    """The part of one cut that concerns one log stream: LLSNs from ``first_llsn`` get GLSNs from ``first_glsn``.

    ``high_watermark`` names the cut and ``prev_high_watermark`` the cut before it. Stored by replicas for non-empty
    commits only; the metadata repository keeps the same object in its history until replicas have it on disk.
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
    """What one replica has: all durable, nothing that a power cut could take back.

    ``uncommitted_llsn_offset`` is the first LLSN whose commit is not yet on the replica's disk, and
    ``uncommitted_llsn_length`` how many durable records follow from there. They never end inside a group; ``progress``
    is how far the disk has come inside one, and only tells that the replica is not stuck.
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
    """What a storage node tells the metadata repository. Only the newest ``(incarnation, sequence)`` counts.

    ``leader_epoch`` is the newest leader that the node has heard of. A leader believes only reports that name it: an
    older one may have been on its way since before decisions that the leader knows of.

    ``applied_high_watermark`` is the last cut up to which all running replicas of the node know themselves to be
    complete; not durable, it only tells whether commits got lost on the way. ``invalid`` names replicas whose stored
    data cannot be trusted: they report nothing and wait to be synced. ``is_followed``: someone is told there of records
    as they are committed, so the node wants to hear of every cut at once.
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


class Ack(Struct, frozen=True):
    """The answer to an append that is committed: the position of its first record and how many follow."""

    glsn: GLSN
    llsn: LLSN
    stream: LogStreamId
    count: int
