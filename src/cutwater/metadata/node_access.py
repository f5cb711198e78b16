"""Access control at one metadata node: its copy of the rules, who must confirm them, and who is told of changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

from cutwater.access.access_control import AccessControl
from cutwater.access.access_copy import AccessCopy
from cutwater.access.denial_log import DenialLog
from cutwater.access.quota_control import AT_METADATA
from cutwater.access.token_use import TokenUse
from cutwater.core.access.access_rules import AccessRules
from cutwater.core.order.state import OrderState
from cutwater.errors import CutwaterError, NotLeader
from cutwater.metadata.access_leader import LeaderAccess, Server
from cutwater.metadata.node_channels import Ways
from cutwater.metadata.request_desk import LeaderSearch, RequestDesk
from cutwater.metadata.state_names import StateNames
from cutwater.metadata.stores.store_interface import MetadataStore
from cutwater.metadata.term import Term
from cutwater.protocol import metadata_api as api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.access_copy import AccessAsk, AccessNews, Bytes
from cutwater.protocol.methods import Received
from cutwater.types import LeaderEpoch, MetadataNodeId, Revision
from cutwater.wire.connection import Connection
from cutwater.wire.identity.server_book import ServerBook

_log = logging.getLogger(__name__)

ACCESS_MS_MAX = 1_000
SWEEP_SECONDS = 1.0


class NodeAccess:
    """See the module. The functions return the term, the connection to the leader, the connections of followers, and
    all connections, as they are now."""

    def __init__(
        self,
        node: MetadataNodeId,
        store: MetadataStore,
        book: ServerBook,
        ways: Ways,
        search: LeaderSearch,
        lease_seconds: float,
        *,
        term: Callable[[], Term | None],
        upstream: Callable[[], Connection | None],
        followers: Callable[[], Iterable[Connection]],
        connections: Callable[[], Iterable[Connection]],
        spool: Path | None,
        threads: Executor | None,
    ) -> None:
        self._node, self._book, self._ways = node, book, ways
        self._term, self._upstream, self._followers = term, upstream, followers
        self.copy = AccessCopy()
        self.control = AccessControl(self.copy, book, StateNames(self._state), connections, AT_METADATA)
        self._leader = LeaderAccess(
            self.copy, store, self._epoch, lease_seconds, self._replaced, lambda: self._everyone(self._state())
        )
        self.use = TokenUse()
        self._threads = threads
        self.denials = DenialLog(f"{METADATA_NODE} {node}", spool, self._in_thread)
        self.control.denials.on_denial = self.denials.note
        self.desk = RequestDesk(node, search, self.control, self._leader, book, self._confirming)

    def _state(self) -> OrderState | None:
        term = self._term()
        return term.layer.state if term is not None else None

    def _epoch(self) -> LeaderEpoch | None:
        term = self._term()
        return term.epoch if term is not None else None

    def _replaced(self, epoch: LeaderEpoch) -> None:
        """End the term of this epoch: its next write would be refused. So an idle leader, too, takes in what another
        process has decided (``admin_recovery``)."""
        term = self._term()
        if term is not None and term.epoch == epoch:
            term.finish("the store says that another leader was there")

    def begin_term(self, epoch: LeaderEpoch, state: OrderState) -> None:
        self.copy.take(state.access.snapshot())
        self._leader.begin(epoch)

    def changed(self, rules: AccessRules) -> None:
        """Take in rules that this node, which leads, has stored, and tell other servers. Followers see the revision in
        the next heartbeat."""
        self.copy.take(rules)
        self._ways.tell_access(rules.revision)

    def heard(self, revision: Revision) -> None:
        """The leader has this revision."""
        if revision > self.copy.view.revision:
            self.copy.nudge(revision)
            self._ways.tell_access(revision)

    def works(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return what has to go on while the node runs."""
        return (
            self.copy.pull_for_ever(self._ask),
            self._sweep_for_ever(),
            self.use.tell_for_ever(self.desk.ask_as_this_node),
            self.denials.deliver_for_ever(self.desk.ask_as_this_node),
        )

    async def confirm(self) -> None:
        """Get a lease before requests are served. Without one, they are refused while access control is on."""
        try:
            await self.copy.pull(self._ask)
        except CutwaterError as error:
            _log.info("the rules of access control cannot be confirmed yet: %s", error.message)

    async def _ask(self, revision: Revision) -> Received[AccessNews]:
        asked = AccessAsk(METADATA_NODE, int(self._node), revision)
        return await self.control.quotas.ask(partial(self.news, asked))

    async def _sweep_for_ever(self) -> None:
        """End connections whose token expires."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.control.sweep()

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def news(self, asked: AccessAsk, body: Bytes) -> Received[AccessNews]:
        """Answer a server, or let the leader answer it."""
        if self._term() is not None:
            return await self._leader.answer(asked, body)
        upstream = self._upstream()
        if upstream is None:
            raise NotLeader("the metadata repository has no leader now: try again")
        return await upstream.call(api.ACCESS_LEADER, asked, body, timeout_ms=ACCESS_MS_MAX)

    async def news_of_leader(self, asked: AccessAsk, body: Bytes = b"") -> Received[AccessNews]:
        return await self._leader.answer(asked, body)

    def _everyone(self, state: OrderState | None) -> set[Server]:
        """Return all servers of the cluster."""
        found = {(METADATA_NODE, number) for number in self._book.keys(METADATA_NODE)}
        return found | {(STORAGE_NODE, int(node)) for node in (state.nodes if state is not None else ())}

    def _confirming(self, *, is_first: bool) -> set[Server]:
        """Return the servers that must confirm a change of access control: those that may have a lease, and those that
        are connected. ``is_first``: the mode changes, and all servers count, since a server that did not enforce
        the rules has no lease that ends; they do as well for a question about all."""
        found = self._leader.leaseholders()
        found |= {(STORAGE_NODE, int(node)) for node in self._ways.heard}
        servers = (connection.peer.server for connection in self._followers() if connection.peer is not None)
        found |= {(METADATA_NODE, int(server.name)) for server in servers if server is not None}
        state = self._state()
        if state is not None:
            if is_first or self._leader.is_new:
                found |= self._everyone(state)
            # What was removed is no server of the cluster any more.
            found = {server for server in found if server[0] != STORAGE_NODE or server[1] in state.nodes}
        return found - {(METADATA_NODE, int(self._node))}
