"""Enforces quotas at one server: what clients may use here, as shares that the leader gives (ADR 0054).

While no quota is in force, connections have no meter, and questions to the leader say nothing about quotas. Quotas are
in force while the mode is ``enforced``. Servers of the cluster have no principal, so nothing that they do is counted:
replication, decided groups, the audit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from msgspec import structs

from cutwater.access.access_copy import AccessCopy
from cutwater.access.quota_account import QuotaAccount
from cutwater.access.quota_meter import CONNECTIONS, STAGED, SUBSCRIPTIONS, QuotaCounters, QuotaMeter
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_view import NOBODY
from cutwater.core.access.principals import GROUP_PREFIX
from cutwater.core.access.quota_shares import QuotaQuestion
from cutwater.core.access.quotas import NO_LIMITS, QuotaLimits
from cutwater.protocol.access_copy import AccessNews, decode_shares, encode_question, split_answer
from cutwater.protocol.methods import Received
from cutwater.runtime import system

if TYPE_CHECKING:
    from cutwater.wire.connection import Connection
    from cutwater.wire.identity.handshake import Peer

ASK_SECONDS_MIN = 0.1
ASK_SECONDS_MAX = 1.0
"""Interval of additional questions while a larger share is needed. It grows while the answers bring none."""
LESS = 0.9
"""A smaller share is confirmed at once if it is smaller by this."""
AT_METADATA = ("requests_per_s", "connections")
"""The limits that metadata nodes enforce. Data is sent and received at storage nodes."""


AskLeader = Callable[[bytes], Awaitable[Received[AccessNews]]]
"""Asks the leader for the rules. The argument says what is used of quotas."""


class QuotaControl:
    """See the module. ``limits``: names of the limits that hold at this server, None for all. ``connections`` returns
    its open connections, and ``is_server`` whether a peer is a server of the cluster."""

    def __init__(
        self,
        copy: AccessCopy,
        connections: Callable[[], Iterable[Connection]],
        is_server: Callable[[Peer], bool],
        limits: tuple[str, ...] | None = None,
    ) -> None:
        self._copy, self._connections, self._is_server, self._limits = copy, connections, is_server, limits
        self._loop = asyncio.get_running_loop()
        self.staged_by: Callable[[str], int] = lambda principal: 0
        """Returns the bytes that this principal has staged here."""
        self.counters = QuotaCounters()
        self.is_on = False
        self._accounts: dict[str, QuotaAccount] = {}
        self._meters: dict[str, QuotaMeter] = {}
        self._session, self._number = system.wall_time_ns() // 1_000, 0
        self._term = 0
        self._asked: tuple[tuple[str, str], ...] = ()
        self._expiry: asyncio.TimerHandle | None = None
        self._is_hungry = False
        """Something had to wait since the last answer."""
        self._asked_at = self._loop.time()
        self._ask_seconds = ASK_SECONDS_MIN
        self._ask_timer: asyncio.TimerHandle | None = None

    # Connections.

    def join(self, connection: Connection) -> None:
        """Take in a connection that was opened."""
        if self.is_on and (meter := self._meter_of(connection)) is not None:
            self._adopt(connection)
            meter.join(connection)

    def _adopt(self, connection: Connection) -> None:
        connection.closed.add_done_callback(lambda _: self._lose(connection))

    def _lose(self, connection: Connection) -> None:
        meter = self._meters.get(_principal_of(connection))
        if meter is not None:
            meter.lose(connection)
            if meter.is_unused:
                meter.set_accounts(())
                meter.stop()
                del self._meters[meter.principal]

    def _meter_of(self, connection: Connection) -> QuotaMeter | None:
        peer, principal = connection.peer, _principal_of(connection)
        if principal == NOBODY or peer is None or self._is_server(peer):
            return None
        meter = self._meters.get(principal)
        if meter is None:
            accounts = self._accounts_of(principal)
            if not accounts:
                return None
            meter = self._meters[principal] = QuotaMeter(principal, self.counters, self._hungry)
            meter.set_accounts(accounts)
        return meter

    def _accounts_of(self, principal: str) -> tuple[QuotaAccount, ...]:
        quotas = self._copy.view.quotas_of(principal)
        return tuple(self._accounts[quota.subject] for quota in quotas if quota.subject in self._accounts)

    # Rules.

    def changed(self) -> None:
        """Act by the quotas of the present rules."""
        view = self._copy.view
        quotas = {}
        if view.mode is AccessMode.ENFORCED:
            quotas = {quota.subject: self._of_here(quota.limits) for quota in view.rules.quotas}
        quotas = {subject: limits for subject, limits in quotas.items() if limits != NO_LIMITS}
        if not quotas and not self.is_on:
            return
        now = self._loop.time()
        for subject in self._accounts.keys() - quotas.keys():
            del self._accounts[subject]
        members = {GROUP_PREFIX + group.name: frozenset(group.members) for group in view.rules.groups}
        for subject, limits in quotas.items():
            account = self._accounts.get(subject)
            if account is None:
                account = self._accounts[subject] = QuotaAccount(subject, limits, self._held, now)
            else:
                account.set_limits(limits, now)
            account.members = members.get(subject, frozenset((subject,)))
        self.is_on = bool(quotas)
        for principal, meter in list(self._meters.items()):
            accounts = self._accounts_of(principal)
            if accounts:
                meter.set_accounts(accounts)
            else:
                meter.stop()
                del self._meters[principal]
        for connection in list(self._connections()):
            if connection.is_metered:
                continue
            found = self._meter_of(connection) if self.is_on else None
            if found is not None:
                self._adopt(connection)
                found.keep(connection)

    def _of_here(self, limits: QuotaLimits) -> QuotaLimits:
        if self._limits is None:
            return limits
        return QuotaLimits(**{name: value for name, value in structs.asdict(limits).items() if name in self._limits})

    def _held(self, account: QuotaAccount, stock: str) -> int:
        if stock == STAGED:
            return sum(self.staged_by(principal) for principal in account.members)
        if stock == CONNECTIONS:
            return sum(len(meter.connections) for meter in account.meters)
        assert stock == SUBSCRIPTIONS
        return sum(connection.streams_sent for meter in account.meters for connection in meter.connections)

    # Staging.

    async def room_to_stage(self, peer: Peer | None, size: int) -> None:
        """Return when a client may stage so many bytes, or raise."""
        meter = self._meters.get(peer.identity.principal) if self.is_on and peer is not None else None
        if meter is not None:
            await meter.room(STAGED, size)

    def check_staged(self, principal: str, size: int) -> None:
        """Raise if a principal may not stage so many bytes more."""
        meter = self._meters.get(principal) if self.is_on else None
        account = meter.lacking(STAGED, size) if meter is not None else None
        if meter is not None and account is not None:
            meter.short(account, STAGED, self._loop.time(), size)
            raise meter.refusal(account, STAGED, ASK_SECONDS_MAX)

    # Shares.

    async def ask(self, ask: AskLeader) -> Received[AccessNews]:
        """Ask the leader for the rules, and for shares. Returns the answer with the rules only."""
        sent, question = self._loop.time(), self._question()
        answer = await ask(question)
        rules, shares = split_answer(answer.value, answer.body)
        if question:
            self._take(shares, sent + answer.value.lease_ms / 1_000)
        return Received(answer.value, rules)

    def _question(self) -> bytes:
        """Return what the leader is asked, as the body of the question about rules; empty if nothing is used."""
        now = self._loop.time()
        self._asked_at = now
        if not self.is_on:
            return b""
        for meter in self._meters.values():
            meter.keep_asking()
        uses = tuple(use for account in self._accounts.values() for use in account.uses(now))
        self._number += 1
        self._asked = tuple((use.subject, use.limit) for use in uses)
        # Also an empty question counts: it gives back all shares.
        return encode_question(QuotaQuestion(self._session, self._number, self._term, uses))

    def _take(self, body: bytes, valid_until: float) -> None:
        """Take the shares from an answer."""
        now = self._loop.time()
        answer = decode_shares(body)
        if answer.term != self._term:
            # Only the next question tells the leader for certain what this server has.
            self._term = answer.term
            self._copy.ask_soon()
        shares = {(share.subject, share.limit): share.share for share in answer.shares}
        has_more = has_less = False
        for subject, limit in self._asked:
            account = self._accounts.get(subject)
            if account is not None:
                before, share = account.take_share(limit, shares.get((subject, limit), 0), now)
                has_more |= share > before
                has_less |= share < before * LESS
        in_vain = self._is_hungry and not has_more
        self._ask_seconds = min(self._ask_seconds * 2, ASK_SECONDS_MAX) if in_vain else ASK_SECONDS_MIN
        self._is_hungry = False
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._loop.call_at(valid_until, self._expire)
        self._pump()
        if has_less:
            # The next question confirms that, and then others get what was given up.
            self._copy.ask_soon()

    def _pump(self) -> None:
        for meter in list(self._meters.values()):
            meter.pump()

    def _expire(self) -> None:
        """Another leader may have given these shares to others."""
        self._expiry = None
        now = self._loop.time()
        for account in self._accounts.values():
            account.drop_shares(now)

    def _hungry(self) -> None:
        """Ask the leader soon: something waits, and a larger share may help."""
        self._is_hungry = True
        if self._ask_timer is None:
            at = max(self._asked_at + self._ask_seconds, self._loop.time())
            if at <= self._loop.time() + ASK_SECONDS_MIN / 10:
                self._ask_now()
            else:
                self._ask_timer = self._loop.call_at(at, self._ask_now)

    def _ask_now(self) -> None:
        self._ask_timer = None
        self._copy.ask_soon()

    def stop(self) -> None:
        """End with the server. Nothing waits any more."""
        for meter in self._meters.values():
            meter.stop()
        self._meters.clear()
        for timer in (self._expiry, self._ask_timer):
            if timer is not None:
                timer.cancel()
        self._expiry = self._ask_timer = None


def _principal_of(connection: Connection) -> str:
    return connection.peer.identity.principal if connection.peer is not None else NOBODY
