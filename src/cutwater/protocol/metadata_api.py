"""The methods of the metadata repository, for clients and operators, and among its nodes.

Clients and operators may ask any node. A node that does not lead passes the request on to the leader.
"""

from __future__ import annotations

from msgspec import Struct

from cutwater.core.messages import GroupOutcome, LeaderMessage
from cutwater.core.requests import Answer, Request
from cutwater.protocol.methods import Method, Notice
from cutwater.protocol.storage_api import Addresses, Complaint, JoinAnswer, JoinArguments, NodeSelfDescription
from cutwater.types import LeaderEpoch, MetadataNodeId, Report, StorageNodeId

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

# Nodes of the metadata repository among each other.

ASK_LEADER: Method[Request, Answer] = Method("ask_leader", Request, Answer)
"""Same as ``ASK``, passed on by a follower. A node that does not lead refuses it, so that requests cannot circle."""
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
COMPLAINT_UP: Notice[Complaint] = Notice("complaint_up", Complaint)
GROUP_OUTCOME_UP: Notice[GroupOutcome] = Notice("group_outcome_up", GroupOutcome)
SUSPECT_UP: Notice[Suspect] = Notice("suspect_up", Suspect)
RELAY_DOWN: Notice[RelayDown] = Notice("relay_down", RelayDown)
