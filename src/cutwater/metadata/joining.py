"""Lets storage nodes join: the leader admits them, a follower passes their introduction on."""

from __future__ import annotations

from msgspec import UNSET, structs

from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.requests import Joined, JoinRequest
from cutwater.errors import Unavailable, WrongIdentity
from cutwater.metadata.node_channels import Ways
from cutwater.metadata.request_desk import LeaderSearch
from cutwater.metadata.server_trust import ServerTrust
from cutwater.metadata.term import Term
from cutwater.protocol import metadata_api as api
from cutwater.protocol import storage_api
from cutwater.protocol.access import STORAGE_NODE
from cutwater.types import ClusterId
from cutwater.wire.calls.incoming_calls import Call

JOIN_MS_MAX = 5_000


class Joining:
    """See the module. ``cluster_key`` is set when this node leads and the key is stored."""

    def __init__(self, cluster: ClusterId, search: LeaderSearch, trust: ServerTrust, ways: Ways) -> None:
        self.cluster_key = ""
        self._cluster, self._search, self._trust, self._ways = cluster, search, trust, ways

    async def join(self, call: Call[storage_api.JoinArguments]) -> storage_api.JoinAnswer:
        server = call.connection.peer.server if call.connection.peer is not None else None
        assert server is not None
        joining = structs.replace(call.argument, server_key=server.key)
        try:
            return await self._join(call, joining)
        except WrongIdentity:
            self._trust.book.refused[storage_api.JOIN.name] += 1
            raise

    async def _join(
        self, call: Call[storage_api.JoinArguments], joining: storage_api.JoinArguments
    ) -> storage_api.JoinAnswer:
        term = await self._search.leader_within(call.deadline)
        if term is not None:
            return await self._admit(term, joining)
        upstream, timeout_ms = self._search.require_upstream(call.deadline)
        answer = await upstream.call(api.JOIN_LEADER, joining, timeout_ms=min(timeout_ms, JOIN_MS_MAX))
        if answer.value.known:
            # Its reports arrive before the leader's next heartbeat brings its key.
            self._trust.book.note(STORAGE_NODE, {joining.node: joining.server_key})
        return answer.value

    async def join_leader(self, call: Call[storage_api.JoinArguments]) -> storage_api.JoinAnswer:
        return await self._admit(self._search.require_term(), call.argument)

    async def _admit(self, term: Term, joining: storage_api.JoinArguments) -> storage_api.JoinAnswer:
        if not self.cluster_key:
            raise Unavailable("the leader has just begun: ask again")
        if joining.cluster_key not in (None, self.cluster_key):
            raise WrongIdentity(
                f"storage node {joining.node} belongs to another cluster that also has the id {self._cluster}: "
                "check --metadata, or start it with other volumes"
            )
        known, asked_at = term.layer.state.nodes.get(joining.node), ""
        if known is not None and not known.server_key:
            await self._trust.check_joining(known, joining.server_key)
            asked_at = known.address
        # Other requests may be decided first, so the decision checks whether the key was verified at the right address.
        request = JoinRequest(
            joining.node, joining.address, joining.node_key, joining.volumes, joining.server_key, asked_at
        )
        answer = await term.decide(request)
        assert isinstance(answer, Joined)
        keys = self._ways.servers.metadata_keys
        heard = term.layer.heard_of(joining.node)
        return storage_api.JoinAnswer(
            self.cluster_key,
            answer.known,
            keys if answer.known else {},
            UNSET if heard is None else heard,
            term.layer.state.access.mode is not AccessMode.OFF or UNSET,
        )
