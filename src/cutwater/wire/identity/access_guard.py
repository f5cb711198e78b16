"""Checks whether a peer may call a method, in one place, before any handler runs.

The table of methods and their callers is ``method_access``. Every connected peer may call a method without a guard.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from cutwater.errors import CutwaterError, Unavailable
from cutwater.protocol.access import MethodAccess
from cutwater.protocol.errors import Unproven
from cutwater.runtime import system
from cutwater.wire.identity.server_book import ServerBook

if TYPE_CHECKING:
    from cutwater.wire.identity.handshake import Peer

_log = logging.getLogger(__name__)


class ClientJudge(Protocol):
    """Decides whether clients may make calls, by the rules of access control."""

    is_on: bool

    def judge(self, peer: Peer | None, method: str, access: MethodAccess, argument: Any) -> None:
        """Raise unless the peer may call the method with this argument."""
        ...

    def judge_again(
        self, peer: Peer | None, method: str, access: MethodAccess, argument: Any, *, is_stream: bool
    ) -> None:
        """Raise if a call that is being served has lost its right, and may be ended."""
        ...


class NoJudge:
    """Access control does not exist here."""

    is_on = False

    def judge(self, peer: Peer | None, method: str, access: MethodAccess, argument: Any) -> None:
        return

    def judge_again(
        self, peer: Peer | None, method: str, access: MethodAccess, argument: Any, *, is_stream: bool
    ) -> None:
        return


NO_JUDGE = NoJudge()

LOG_SECONDS = 5.0
"""Refusals of one method are logged at most once in this time."""


class Guard:
    """Guards one method of one server. Refusals are logged, at most once in ``log_seconds``. ``judge`` authorises calls
    of clients."""

    __slots__ = (
        "_access",
        "_book",
        "_judge",
        "_log_after",
        "_log_seconds",
        "_name",
        "_needs_argument",
        "_refused",
        "_subject",
        "brings_data",
        "has_answer_limit",
        "is_for_clients",
    )

    def __init__(
        self,
        name: str,
        access: MethodAccess,
        book: ServerBook,
        *,
        judge: ClientJudge = NO_JUDGE,
        log_seconds: float = LOG_SECONDS,
    ) -> None:
        self._name, self._access, self._book, self._judge = name, access, book, judge
        self.is_for_clients = access.is_for_clients
        self.brings_data, self.has_answer_limit = access.brings_data, access.has_answer_limit
        self._subject = access.subject
        self._needs_argument = access.is_for_clients or access.client_subject is not None
        """Whether no peer can be refused before the argument is known."""
        self._log_seconds = log_seconds
        self._log_after = 0.0 if log_seconds < inf else inf
        self._refused = 0

    def check(self, peer: Peer | None) -> None:
        """Raise unless the peer has proved to be a server that may call this. Runs before the argument is decoded."""
        if not self._needs_argument:
            self._check_server(peer)

    def _check_server(self, peer: Peer | None) -> None:
        access = self._access
        server = peer.server if peer is not None else None
        if server is None or server.kind not in access.servers:
            raise self._refusal(peer, self._why_not(peer))
        if not access.is_admission and not self._book.is_known(server):
            if self._book.has(server.kind, server.name):
                raise self._refusal(
                    peer,
                    f"{server} of this cluster has another key than this peer: start each server with its own data",
                )
            # This side may not know yet of a server that was added a moment ago.
            raise self._refusal(peer, f"the key of {server} is not known here", is_certain=False)

    def check_argument(self, peer: Peer | None, argument: Any) -> None:
        """Raise if the argument speaks for another server than the peer, or if a client lacks a right."""
        if self.is_for_clients:
            if self._judge.is_on:
                self._judge.judge(peer, self._name, self._access, argument)
            return
        subject = self._subject
        if subject is None:
            return
        number = subject(argument)
        if self._access.client_subject is not None:
            if number == self._access.client_subject:
                # The handler judges: only the leader knows the names that rules are about.
                return
            self._check_server(peer)
        if peer is None or peer.server is None or peer.server.name != str(number):
            raise self._refusal(
                peer, f"it speaks for number {number}, and its caller is not that server: each speaks for itself"
            )

    def check_again(self, peer: Peer | None, argument: Any, *, is_stream: bool) -> None:
        """Raise if the call of a client, which is being served, has lost its right, and may be ended."""
        if self.is_for_clients and self._judge.is_on:
            self._judge.judge_again(peer, self._name, self._access, argument, is_stream=is_stream)

    def _why_not(self, peer: Peer | None) -> str:
        if self._access.is_internal:
            return "the metadata repository alone decides that, and does so by itself: nobody needs to ask for it"
        why = (
            f"it is for a {' or a '.join(self._access.servers)} of the cluster, and this peer has not proved to be one"
        )
        if peer is not None and peer.role in self._access.servers and peer.server is None:
            why += f"; {peer.role} {peer.name} may be of an earlier version: upgrade it"
        else:
            why += ": only a server that runs with its own data calls this, with the key that lies there"
        return why

    def _refusal(self, peer: Peer | None, why: str, *, is_certain: bool = True) -> CutwaterError:
        self._refused += 1
        self._book.refused[self._name] += 1
        now = system.monotonic()
        if now >= self._log_after:
            caller = (
                f"{peer.role!r} {peer.name!r} ({peer.identity.name!r}) at {peer.address}" if peer is not None else "?"
            )
            _log.warning("%s of %s refused: %s (%s refusals so far)", self._name, caller, why, self._refused)
            self._log_after = now + self._log_seconds
        message = f"{self._name} is refused: {why}"
        return Unproven(message) if is_certain else Unavailable(f"{message}: try again")
