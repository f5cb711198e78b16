"""Events that the leader of the metadata repository handles, and effects that it returns.

While a ``Store`` is in flight, the leader sends nothing that depends on the decisions being stored, so they cannot
become known too early. It may only say that it leads (``LeaderHello``), and that it is overloaded.
"""

from __future__ import annotations

from msgspec import Struct

from cutwater.core.messages import GroupOutcome, LeaderMessage
from cutwater.core.order.decisions import Decision
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.order.state import Snapshot
from cutwater.core.requests import Answer, Request
from cutwater.errors import CutwaterError, Unavailable
from cutwater.types import DecisionIndex, LeaderEpoch, LogStreamId, Report, Revision, StorageNodeId

RequestId = int
"""Identifies a request. The driver chooses the number; the core never interprets it."""


# Events


class ReportArrived(Struct, frozen=True):
    report: Report


class RightsChanged(Unavailable):
    """Rights were taken away after the request was judged. Nothing was done; it has to be judged again."""

    def __init__(self) -> None:
        super().__init__("rights were taken away while the request waited: nothing was done, try again")


class Asked(Struct, frozen=True):
    """A request, and the principal whose request it is, if the servers know it. ``judged_at`` is the revision of the
    access rules by which they judged it; None for requests of servers themselves."""

    request_id: RequestId
    request: Request
    origin: RequestOrigin | None = None
    judged_at: Revision | None = None


class Stored(Struct, frozen=True):
    """The decisions up to this one are durable, under this leader's epoch."""

    index: DecisionIndex


class StoreRefused(Struct, frozen=True):
    """The store refused the write because another leader took over. This leader's term is over."""

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
    """No process listens any more at the address of the storage node: its process has ended."""

    node: StorageNodeId


class NodeUnreachable(Struct, frozen=True):
    """The storage node reports, but the leader's probes of its address fail, and another process complained, too."""

    node: StorageNodeId


class Wake(Struct, frozen=True):
    """Time has passed. The driver sends this every few tens of milliseconds."""


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
    """Whether the message may be delayed a little and sent with the next ones, because no call waits for its effect."""


class Reply(Struct, frozen=True):
    request_id: RequestId
    outcome: Answer | CutwaterError


class Compact(Struct, frozen=True):
    """The store may replace all decisions up to the snapshot's index by the snapshot."""

    snapshot: Snapshot


class Alarm(Struct, frozen=True):
    """An invariant was violated; an operator should look."""

    error: CutwaterError


class StepDown(Struct, frozen=True):
    """Discard this leader: its state may contain decisions that were never stored."""

    reason: str


OrderEffect = Store | Send | Reply | Compact | Alarm | StepDown
