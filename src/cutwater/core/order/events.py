"""What happens to the leader of the metadata repository, and what it wants done.

As long as a ``Store`` is in flight the leader says nothing that depends on what is being stored, so nobody can learn of
a decision too early. All it may say is that it leads (``LeaderHello``), and that it is overloaded.
"""

from __future__ import annotations

from msgspec import Struct

from cutwater.core.messages import GroupOutcome, LeaderMessage
from cutwater.core.order.decisions import Decision
from cutwater.core.order.state import Snapshot
from cutwater.core.requests import Answer, Request
from cutwater.errors import CutwaterError
from cutwater.types import DecisionIndex, LeaderEpoch, LogStreamId, Report, StorageNodeId

RequestId = int
"""Names whoever asked; given by the driver, never interpreted."""


# Events


class ReportArrived(Struct, frozen=True):
    report: Report


class Asked(Struct, frozen=True):
    request_id: RequestId
    request: Request


class Stored(Struct, frozen=True):
    """The decisions up to this one are durable, under this leader's epoch."""

    index: DecisionIndex


class StoreRefused(Struct, frozen=True):
    """Someone else leads: the write was refused. This leader's time is over."""

    reason: str


class PeerComplaint(Struct, frozen=True):
    """A storage node says that it could not pass entries of a stream on to a peer."""

    stream: LogStreamId
    complainer: StorageNodeId
    peer: StorageNodeId


class GroupOutcomeArrived(Struct, frozen=True):
    """A storage node says what became of a group."""

    outcome: GroupOutcome


class NodeGone(Struct, frozen=True):
    """Nobody listens any more where the storage node did: its process has ended."""

    node: StorageNodeId


class NodeUnreachable(Struct, frozen=True):
    """The storage node reports, but the leader's own probes of its address fail, as do those of whoever complained."""

    node: StorageNodeId


class Wake(Struct, frozen=True):
    """Time has passed. Comes every few ten milliseconds."""


OrderEvent = (
    ReportArrived
    | Asked
    | Stored
    | StoreRefused
    | PeerComplaint
    | GroupOutcomeArrived
    | NodeGone
    | NodeUnreachable
    | Wake
)


# Effects


class Store(Struct, frozen=True):
    """Make the decisions durable right after decision ``after``, if this leader epoch still leads."""

    leader_epoch: LeaderEpoch
    after: DecisionIndex
    decisions: tuple[Decision, ...]


class Send(Struct, frozen=True):
    node: StorageNodeId
    message: LeaderMessage
    may_wait: bool = False
    """Nobody waits for what the node does with it, so it may come a little later, together with the next ones."""


class Reply(Struct, frozen=True):
    request_id: RequestId
    outcome: Answer | CutwaterError


class Compact(Struct, frozen=True):
    """The store may replace all decisions up to the snapshot's index by the snapshot."""

    snapshot: Snapshot


class Alarm(Struct, frozen=True):
    """Something that must not happen did; an operator should look."""

    error: CutwaterError


class StepDown(Struct, frozen=True):
    """Forget this leader: its state may contain decisions that were never stored."""

    reason: str


OrderEffect = Store | Send | Reply | Compact | Alarm | StepDown
