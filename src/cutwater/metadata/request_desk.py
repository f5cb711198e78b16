"""Requests of clients at a metadata node: the leader authorises and decides them, a follower passes them on.

A follower tells the leader the original caller: its principal, and the id of its token. The leader believes that from
metadata nodes only, and authorises the request again by its own rules. While access control is on, a request that was
passed on without its caller is refused: it is never executed as the follower's own (ADR 0052).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Protocol

from msgspec import Raw, structs

from cutwater.access.access_control import AccessControl, Caller
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_requests import (
    AccessChanged,
    ConfirmAccessRequest,
    ListQuotasRequest,
    NoteTokenUseRequest,
    QuotaList,
    SetAccessModeRequest,
)
from cutwater.core.access.answer_filters import AnswerFilter
from cutwater.core.access.principals import LOCAL_ADMIN
from cutwater.core.audit.audit_requests import RecordDenialsRequest, checked_denials
from cutwater.core.jobs.job_requests import ErrandAnswer
from cutwater.core.order.events import RightsChanged
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.requests import AddNodeRequest, Answer, Done, Request
from cutwater.errors import CutwaterError, Unavailable
from cutwater.metadata.access_leader import LeaderAccess, Server
from cutwater.metadata.term import Term
from cutwater.protocol import metadata_api as api
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE, ClientAnswers, MethodAccess
from cutwater.protocol.errors import Unproven, WireError, from_wire
from cutwater.protocol.method_access import METADATA_ACCESS, REQUEST_ACCESS
from cutwater.protocol.storage_api import NodeSelfDescription
from cutwater.runtime import system
from cutwater.types import MetadataNodeId, Revision
from cutwater.wire.calls.handlers import Methods
from cutwater.wire.calls.incoming_calls import Call
from cutwater.wire.connection import Connection
from cutwater.wire.identity.access_guard import Guard
from cutwater.wire.identity.handshake import Peer
from cutwater.wire.identity.server_book import ServerBook

REQUEST_ID_BYTES = 8
OWN_SECONDS_MAX = 5.0
JUDGED_TIMES_MAX = 16
"""How often a request is judged while rights are taken away again and again."""
ASK_NEXT_SECONDS = 0.05
CONFIRM_SECONDS = 2.0
"""How long a change of access control waits for servers to confirm it. Usually they need a few milliseconds."""

_CHANGE_VOLUMES = METADATA_ACCESS[api.CHANGE_VOLUMES.name]


class LeaderSearch(Protocol):
    """Finds the leader: this node itself, or the node that it follows."""

    async def leader_within(self, deadline: float) -> Term | None:
        """Wait for a leader. Returns None if it is another node."""
        ...

    def require_term(self) -> Term: ...

    def require_upstream(self, deadline: float) -> tuple[Connection, int]:
        """Return the connection to the leader, and the milliseconds that are left."""
        ...

    async def change_volumes(self, change: api.ChangeVolumes, deadline: float) -> NodeSelfDescription: ...


class Confirming(Protocol):
    """Returns the servers that must confirm a change of access control. ``is_first``: all servers of the cluster, as
    access control was off before, or all are asked about."""

    def __call__(self, *, is_first: bool) -> Iterable[Server]: ...


class RequestDesk:
    """See the module."""

    def __init__(
        self,
        node: MetadataNodeId,
        search: LeaderSearch,
        control: AccessControl,
        access: LeaderAccess,
        book: ServerBook,
        confirming: Confirming,
    ) -> None:
        self._node, self._search, self._control = node, search, control
        self._access, self._confirming = access, confirming
        self._guards = {kind: Guard(kind.__name__, row, book) for kind, row in REQUEST_ACCESS.items()}

    def register(self, methods: Methods) -> None:
        methods.answers(api.ASK)(self._ask)
        methods.answers(api.ASK_LEADER)(self._ask_leader)
        methods.answers(api.ASK_LEADER_AS)(self._ask_leader_as)
        methods.answers(api.CHANGE_VOLUMES)(self._change_volumes)
        methods.answers(api.CHANGE_VOLUMES_AS)(self._change_volumes_as)

    # The original caller.

    def caller(self, peer: Peer | None) -> tuple[Caller, RequestOrigin]:
        caller = self._control.caller(peer)
        principal = caller.principal
        if caller.server and peer is not None and peer.server is not None:
            principal = server_principal(peer.server.kind, peer.server.name)
        return caller, RequestOrigin(principal, system.token_hex(REQUEST_ID_BYTES), caller.token, caller.via)

    def judge(self, caller: Caller, method: str, row: MethodAccess, argument: object) -> None:
        self._control.judge_caller(caller, method, row, argument)

    # Requests.

    async def _ask(self, call: Call[Request]) -> Answer:
        request, peer = call.argument, call.connection.peer
        guard = self._guards[type(request)]
        guard.check(peer)
        guard.check_argument(peer, request)
        if isinstance(request, AddNodeRequest):
            # A caller's claim about the key of a server does not count: the server itself is asked.
            request = structs.replace(request, server_key="", renews=False)
        term = await self._search.leader_within(call.deadline)
        # Only now are the rules known for certain, by which the credentials are judged.
        caller, origin = self.caller(call.connection.peer)
        if term is not None:
            return await self._decide_for(term, request, caller, origin)
        upstream, timeout_ms = self._search.require_upstream(call.deadline)
        if not self._control.is_on:
            return (await upstream.call(api.ASK_LEADER, request, timeout_ms=timeout_ms)).value
        if not self._control.copy.is_valid and not caller.server:
            raise self._control.copy.stale()
        asked = api.RequestOf(request, origin, bool(caller.server), caller.address, caller.is_judged)
        return (await upstream.call(api.ASK_LEADER_AS, asked, timeout_ms=timeout_ms)).value

    async def ask_as_this_node(self, request: Request) -> Answer:
        """Ask for this node itself."""
        deadline = asyncio.get_running_loop().time() + OWN_SECONDS_MAX
        term = await self._search.leader_within(deadline)
        origin = RequestOrigin(server_principal(METADATA_NODE, str(self._node)), system.token_hex(REQUEST_ID_BYTES))
        if term is not None:
            return await self._decided(term, request, origin)
        upstream, timeout_ms = self._search.require_upstream(deadline)
        asked = api.RequestOf(request, origin, is_server=True)
        return (await upstream.call(api.ASK_LEADER_AS, asked, timeout_ms=timeout_ms)).value

    async def _ask_leader(self, call: Call[Request]) -> Answer:
        """Decide a request that a follower passed on without its caller."""
        if self._control.is_on:
            raise Unavailable(
                "the request was passed on without its original caller, which is refused while access control is on: "
                "try again; if the metadata node is of an earlier version, upgrade it"
            )
        revision = self._control.copy.view.revision
        return await self._decided(self._search.require_term(), call.argument, None, revision)

    async def _ask_leader_as(self, call: Call[api.RequestOf]) -> Answer:
        asked = call.argument
        caller = relayed(asked.origin, asked.address, is_server=asked.is_server, is_judged=asked.is_judged)
        return await self._decide_for(self._search.require_term(), asked.request, caller, asked.origin)

    async def _decide_for(self, term: Term, request: Request, caller: Caller, origin: RequestOrigin) -> Answer:
        """Authorise a request and decide it. Raises if the caller lacks a right.

        The request may wait before it is decided: behind a write, for reports or for a batch. If rights were taken away
        meanwhile, it is judged again.
        """
        control, row = self._control, REQUEST_ACCESS[type(request)]
        for attempt in count(1):
            revision = control.copy.view.revision
            known: RequestOrigin | None = origin
            if control.is_on:
                self._check_server(row, request, caller, origin)
                self.judge(caller, type(request).__name__, row, request)
            elif origin.principal != LOCAL_ADMIN:
                known = None
            try:
                answer = await self._decided(term, request, known, revision)
                break
            except RightsChanged:
                if attempt == JUDGED_TIMES_MAX:
                    raise
        view = control.copy.view
        if (
            known is not None
            and row.answers is ClientAnswers.FILTERED
            and view.mode is AccessMode.ENFORCED
            and not row.is_free_for(caller.server)
        ):
            return AnswerFilter(view, caller.principal, caller.token).shown(answer)
        return answer

    def _check_server(self, row: MethodAccess, request: Request, caller: Caller, origin: RequestOrigin) -> None:
        """Raise if the request is for servers, and not for this caller. The metadata node to which the caller is
        connected has done so too."""
        name = type(request).__name__
        if row.is_internal:
            raise Unproven(f"{name} is refused: the metadata repository alone decides that")
        if row.is_for_clients:
            return
        if not row.is_free_for(caller.server):
            raise Unproven(f"{name} is for servers of the cluster, and its caller is none that may ask this")
        if row.subject is not None and origin.principal != server_principal(caller.server, str(row.subject(request))):
            raise Unproven(f"{name} speaks for another server than its caller")

    async def _decided(
        self, term: Term, request: Request, origin: RequestOrigin | None, judged_at: Revision | None = None
    ) -> Answer:
        """Decide. A change of access control is answered when the servers act by it."""
        if isinstance(request, RecordDenialsRequest):
            # Without an origin, access control is off again, and only what waited since is still told.
            records = request.records if origin is None else checked_denials(request.records, server_name(origin))
            await term.audit.record_denials(records)
            return Done()
        await term.programs.prepare(request)
        # Before the rules are enforced, no lease ends what a server without contact does.
        is_first = not self._control.is_on or isinstance(request, ConfirmAccessRequest | SetAccessModeRequest)
        answer = await term.decide(request, origin, judged_at)
        if isinstance(answer, ErrandAnswer) and answer.error is not None:
            raise from_wire(WireError(answer.error.code, answer.error.message, False, Raw(b"")))
        if isinstance(answer, QuotaList) and isinstance(request, ListQuotasRequest) and request.with_use:
            return structs.replace(answer, used=self._access.used(answer.quotas))
        if not isinstance(answer, AccessChanged) or isinstance(request, NoteTokenUseRequest):
            return answer
        servers = partial(self._confirming, is_first=is_first)
        behind = await self._access.until_confirmed(answer.revision, servers, CONFIRM_SECONDS, term.over)
        if behind and term.over.done():
            behind = await self._confirmed_to_next(answer.revision, behind)
        return structs.replace(answer, unconfirmed=behind)

    async def _confirmed_to_next(self, revision: Revision, behind: tuple[str, ...]) -> tuple[str, ...]:
        """Ask the next leader about a change that this node stored as the leader before: servers confirm it there, and
        the next leader itself acts by it. Returns ``behind`` if there is no answer."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + CONFIRM_SECONDS
        while loop.time() < give_up:
            try:
                answer = await self.ask_as_this_node(ConfirmAccessRequest(revision))
            except CutwaterError as error:
                if not error.retriable:
                    break
                await asyncio.sleep(ASK_NEXT_SECONDS)
                continue
            return answer.unconfirmed if isinstance(answer, AccessChanged) else behind
        return behind

    # Volumes.

    async def _change_volumes(self, call: Call[api.ChangeVolumes]) -> NodeSelfDescription:
        """Change a storage node's volumes. Storage nodes take this only from metadata nodes, so operators ask here."""
        if not self._control.is_on:
            return await self._search.change_volumes(call.argument, call.deadline)
        term = await self._search.leader_within(call.deadline)
        caller, origin = self.caller(call.connection.peer)
        if term is not None:
            self.judge(caller, api.CHANGE_VOLUMES.name, _CHANGE_VOLUMES, call.argument)
            return await self._search.change_volumes(call.argument, call.deadline)
        upstream, timeout_ms = self._search.require_upstream(call.deadline)
        asked = api.VolumesOf(call.argument, origin, bool(caller.server), caller.address, caller.is_judged)
        return (await upstream.call(api.CHANGE_VOLUMES_AS, asked, timeout_ms=timeout_ms)).value

    async def _change_volumes_as(self, call: Call[api.VolumesOf]) -> NodeSelfDescription:
        asked = call.argument
        self._search.require_term()
        caller = relayed(asked.origin, asked.address, is_server=asked.is_server, is_judged=asked.is_judged)
        self.judge(caller, api.CHANGE_VOLUMES.name, _CHANGE_VOLUMES, asked.change)
        return await self._search.change_volumes(asked.change, call.deadline)


def server_principal(kind: str, number: str) -> str:
    """Return the name under which a server of the cluster asks. No client can have a name like this."""
    return f"_{kind.replace(' ', '-')}-{number}"


def server_name(origin: RequestOrigin) -> str:
    """Return the server that asks under this name, as records and answers call it."""
    kind, _, number = origin.principal.removeprefix("_").rpartition("-")
    return f"{kind.replace('-', ' ')} {number}"


def relayed(origin: RequestOrigin, address: str, *, is_server: bool = False, is_judged: bool = True) -> Caller:
    """Return the caller of a request that a metadata node passed on."""
    if not is_server:
        return Caller(origin.principal, origin.token, "", address, is_judged=is_judged, via=origin.via)
    kinds = (kind for kind in (STORAGE_NODE, METADATA_NODE) if origin.principal.startswith(server_principal(kind, "")))
    return Caller(name=origin.principal, address=address, server=next(kinds, ""))
