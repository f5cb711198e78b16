"""What operators and clients ask of the metadata repository, and what they get back.

A request becomes one or more decisions, or an error. Its answer leaves only after the decisions are stored.
"""

from __future__ import annotations

from msgspec import Struct

from cutwater.types import (
    GLSN,
    LLSN,
    CutTime,
    Epoch,
    LogStreamId,
    ProducerEpoch,
    ProducerId,
    Revision,
    Sequence,
    StorageNodeId,
    TopicId,
)


class AddNodeRequest(Struct, frozen=True, tag=True):
    node: StorageNodeId


class RemoveNodeRequest(Struct, frozen=True, tag=True):
    node: StorageNodeId


class CreateTopicRequest(Struct, frozen=True, tag=True):
    name: str
    streams: int
    replication: int


class DeleteTopicRequest(Struct, frozen=True, tag=True):
    name: str


class AddStreamRequest(Struct, frozen=True, tag=True):
    topic: str


class SealRequest(Struct, frozen=True, tag=True):
    """Seal until it is unsealed by request, or for good."""

    stream: LogStreamId
    final: bool = False


class UnsealRequest(Struct, frozen=True, tag=True):
    stream: LogStreamId


class ReplaceRequest(Struct, frozen=True, tag=True):
    """Let ``new`` hold the stream instead of ``old``."""

    stream: LogStreamId
    old: StorageNodeId
    new: StorageNodeId


class TrimRequest(Struct, frozen=True, tag=True):
    topic: str
    before: GLSN


class OpenProducerRequest(Struct, frozen=True, tag=True):
    """``session`` is a number that no other opening has, so that asking again does not open again."""

    producer: ProducerId
    topic: str
    session: int


class MoveProducerRequest(Struct, frozen=True, tag=True):
    """Ask for another stream. ``last_sequence`` is what a replica that is sealed in ``stream_epoch`` told."""

    producer: ProducerId
    epoch: ProducerEpoch
    stream: LogStreamId
    stream_epoch: Epoch
    last_sequence: Sequence


class CommitCursorRequest(Struct, frozen=True, tag=True):
    cursor: str
    glsn: GLSN


class CatalogRequest(Struct, frozen=True, tag=True):
    """The catalog as of now."""


Request = (
    AddNodeRequest
    | RemoveNodeRequest
    | CreateTopicRequest
    | DeleteTopicRequest
    | AddStreamRequest
    | SealRequest
    | UnsealRequest
    | ReplaceRequest
    | TrimRequest
    | OpenProducerRequest
    | MoveProducerRequest
    | CommitCursorRequest
    | CatalogRequest
)


class Done(Struct, frozen=True, tag=True):
    """It is decided and stored."""


class Created(Struct, frozen=True, tag=True):
    topic: TopicId
    streams: tuple[LogStreamId, ...]


class SealedAt(Struct, frozen=True, tag=True):
    epoch: Epoch
    llsn: LLSN
    glsn: GLSN


class ProducerGrant(Struct, frozen=True, tag=True):
    """Where a producer appends, under which epoch, and its last sequence in the stream before that one."""

    epoch: ProducerEpoch
    stream: LogStreamId
    last_sequence: Sequence


class StreamInfo(Struct, frozen=True):
    """A log stream as clients need it. Everything up to ``committed_end`` lies at or below the catalog's HWM."""

    stream: LogStreamId
    topic: TopicId
    epoch: Epoch
    is_open: bool
    final: bool
    chain: tuple[StorageNodeId, ...]
    replicas: tuple[StorageNodeId, ...]
    committed_end: LLSN
    last_glsn: GLSN
    created_at: GLSN
    created_time: CutTime


class TopicInfo(Struct, frozen=True):
    topic: TopicId
    name: str
    trimmed_before: GLSN


class Catalog(Struct, frozen=True, tag=True):
    """The catalog at one decision: which topics and streams exist, and how far each is committed."""

    revision: Revision
    high_watermark: GLSN
    cut_time: CutTime
    topics: tuple[TopicInfo, ...]
    streams: tuple[StreamInfo, ...]


Answer = Done | Created | SealedAt | ProducerGrant | Catalog
