"""The methods of the metadata repository, for clients and operators, and among its nodes.

Clients and operators may ask any node. A node that does not lead passes the request on to the leader.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from cutwater.core.messages import GroupOutcome, LeaderMessage
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.requests import Answer, Request
from cutwater.protocol.access_copy import AccessAsk, AccessNews
from cutwater.protocol.methods import Method, Notice
from cutwater.protocol.storage_api import Addresses, Complaint, JoinAnswer, JoinArguments, NodeSelfDescription
from cutwater.types import GLSN, JobEpoch, LeaderEpoch, MetadataNodeId, Report, Revision, StorageNodeId

# Clients and operators.

ASK: Method[Request, Answer] = Method("ask", Request, Answer)
"""All requests that the leader decides or answers, see ``core.requests``."""


class MetadataNode(Struct, frozen=True):
    """One process of the metadata repository, and the node that it believes to lead (epoch 0: none)."""

    node: MetadataNodeId
    leader: MetadataNodeId
    leader_epoch: LeaderEpoch
    leader_address: str


WHO_LEADS: Method[None, MetadataNode] = Method("who_leads", None, MetadataNode)


class ChangeVolumes(Struct, frozen=True):
    """Lets a running storage node use one more directory of its machine, or stop using one."""

    node: StorageNodeId
    path: str
    is_removal: bool = False


CHANGE_VOLUMES: Method[ChangeVolumes, NodeSelfDescription] = Method(
    "change_volumes", ChangeVolumes, NodeSelfDescription
)
"""Any metadata node passes this on to the storage node, to which it proves its identity."""


class CheckProgram(Struct, frozen=True):
    """Asks whether an intact copy of this program is stored. The right to store programs is no right to read them."""

    sha256: str


class ProgramCheck(Struct, frozen=True):
    is_intact: bool


class JobLogArguments(Struct, frozen=True):
    """Asks for what an attempt to run a job printed, from this offset on. Without an attempt, the last one is meant;
    without an epoch, the last one with this number. ``after``: the position in an earlier answer, after which the
    search goes on. At most ``bytes_max`` are wanted."""

    name: str
    epoch: JobEpoch = JobEpoch(0)
    attempt: int = 0
    offset: int = 0
    after: GLSN = GLSN(0)
    bytes_max: int = 256 * 1024


class JobLogPiece(Struct, frozen=True):
    """Some bytes of the log of an attempt. What lies between two pieces was left out."""

    offset: int
    data: bytes


class JobLogAnswer(Struct, frozen=True):
    """Some pieces, in order. ``next_offset`` and ``after`` are for the next question. ``is_end``: nothing more is
    stored by now. ``is_running``: the attempt has not ended, so more may come."""

    epoch: JobEpoch
    attempt: int
    pieces: tuple[JobLogPiece, ...]
    next_offset: int
    after: GLSN
    is_end: bool
    is_running: bool


CHECK_PROGRAM: Method[CheckProgram, ProgramCheck] = Method("check_program", CheckProgram, ProgramCheck)
"""Any metadata node reads the copies by itself."""
JOB_LOG: Method[JobLogArguments, JobLogAnswer] = Method("job_log", JobLogArguments, JobLogAnswer)
"""Any metadata node reads the topic of logs by itself."""

# Rules of access control.

ACCESS: Method[AccessAsk, AccessNews] = Method("access", AccessAsk, AccessNews)
"""A server asks for the rules of access control. Only the leader answers; a follower passes it on as
``ACCESS_LEADER``."""

# Nodes of the metadata repository among each other.

ACCESS_LEADER: Method[AccessAsk, AccessNews] = Method("access_leader", AccessAsk, AccessNews)
ASK_LEADER: Method[Request, Answer] = Method("ask_leader", Request, Answer)
"""Same as ``ASK``, passed on by a follower. A node that does not lead refuses it, so that requests cannot circle. While
access control is on, it is refused, since it does not say for whom it is: see ``ASK_LEADER_AS``."""


class RequestOf(Struct, frozen=True):
    """A request, and the original caller. ``is_server``: the caller has proved to be a server of the cluster, and its
    name is in ``origin``. ``address`` is where it comes from. ``is_judged``: its credentials were judged while access
    control was on."""

    request: Request
    origin: RequestOrigin
    is_server: bool = False
    address: str = ""
    is_judged: bool = True


class VolumesOf(Struct, frozen=True):
    """A change of volumes, and the original caller, see ``RequestOf``."""

    change: ChangeVolumes
    origin: RequestOrigin
    is_server: bool = False
    address: str = ""
    is_judged: bool = True


class ComplaintOf(Struct, frozen=True):
    """A complaint of a client, and the client."""

    complaint: Complaint
    origin: RequestOrigin
    address: str = ""


ASK_LEADER_AS: Method[RequestOf, Answer] = Method("ask_leader_as", RequestOf, Answer)
"""The leader authorises the request again, for the original caller, by its own rules."""
CHANGE_VOLUMES_AS: Method[VolumesOf, NodeSelfDescription] = Method("change_volumes_as", VolumesOf, NodeSelfDescription)
JOIN_LEADER: Method[JoinArguments, JoinAnswer] = Method("join_leader", JoinArguments, JoinAnswer)


class Follow(Struct, frozen=True):
    """A follower announces that it will pass on messages of storage nodes."""

    node: MetadataNodeId


class Heartbeat(Struct, frozen=True):
    """The leader is alive, can write to its store, and knows these addresses and keys of servers."""

    leader_epoch: LeaderEpoch
    node: MetadataNodeId
    servers: Addresses | None = None
    """None: unchanged since the last one on this connection."""
    access: Revision | UnsetType = UNSET
    """The revision of the rules of access control, if there are any."""


class RelayDown(Struct, frozen=True):
    """A message that the follower passes on to a storage node."""

    node: StorageNodeId
    message: LeaderMessage


class Suspect(Struct, frozen=True):
    """A connection of this storage node broke, so the leader should check whether it is alive."""

    node: StorageNodeId


MEET: Method[Follow, None] = Method("meet", Follow, None)
"""A follower asks whether the leader knows its key, before it sends anything else. The leader looks into the store."""
FOLLOW: Notice[Follow] = Notice("follow", Follow)
HEARTBEAT: Notice[Heartbeat] = Notice("heartbeat", Heartbeat)
REPORT_UP: Notice[Report] = Notice("report_up", Report)
COMPLAINT_OF: Notice[ComplaintOf] = Notice("complaint_of", ComplaintOf)
COMPLAINT_UP: Notice[Complaint] = Notice("complaint_up", Complaint)
GROUP_OUTCOME_UP: Notice[GroupOutcome] = Notice("group_outcome_up", GroupOutcome)
SUSPECT_UP: Notice[Suspect] = Notice("suspect_up", Suspect)
RELAY_DOWN: Notice[RelayDown] = Notice("relay_down", RelayDown)
