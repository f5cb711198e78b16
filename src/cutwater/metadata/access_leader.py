"""The leader's part in copies of the access rules: it answers servers, and knows which of them have which revision.

An answer lets a server act by the rules for the time of the lease. So before each answer the leader makes sure with
its store that it still leads: a leader that was replaced, and does not know it, renews no lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from msgspec import structs

from cutwater.access.access_copy import AccessCopy
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.access_requests import QuotaUsed
from cutwater.core.access.quota_shares import QuotaShares
from cutwater.core.access.quotas import Quota, QuotaLimits
from cutwater.errors import NotLeader
from cutwater.metadata.stores.store_interface import MetadataStore
from cutwater.protocol.access_copy import AccessAsk, AccessNews, Bytes, decode_question, encode_rules, encode_shares
from cutwater.protocol.methods import Received
from cutwater.runtime import system
from cutwater.types import LeaderEpoch, Revision

Server = tuple[str, int]
"""The kind and the number of a server."""


class LeaderAccess:
    """See the module. ``epoch`` returns the epoch in which this node leads now, or None. ``on_replaced`` is called with
    an epoch that is over, as the store says. ``servers`` returns all that may act by shares of an earlier leader."""

    def __init__(
        self,
        copy: AccessCopy,
        store: MetadataStore,
        epoch: Callable[[], LeaderEpoch | None],
        lease_seconds: float,
        on_replaced: Callable[[LeaderEpoch], None] = lambda epoch: None,
        servers: Callable[[], Iterable[Server]] = lambda: (),
    ) -> None:
        self._servers = servers
        self._shares: QuotaShares[Server] = QuotaShares(lease_seconds, system.monotonic())
        self._on_replaced = on_replaced
        self._copy, self._store, self._epoch, self._lease_seconds = copy, store, epoch, lease_seconds
        self._confirmed: dict[Server, Revision] = {}
        self._answered: dict[Server, float] = {}
        """When each server was last answered, and so until when it may have a lease."""
        self._begun = system.monotonic()
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[LeaderEpoch] | None = None
        self._next_look: asyncio.Task[LeaderEpoch] | None = None

    def begin(self, epoch: LeaderEpoch) -> None:
        """A term begins: nothing is known yet about what servers have, and which of them have a lease."""
        self._confirmed.clear()
        self._answered.clear()
        self._begun = system.monotonic()
        self._shares.begin(self._begun, int(epoch))

    @property
    def is_new(self) -> bool:
        """Whether servers may have a lease of which only an earlier leader knows."""
        return system.monotonic() - self._begun < self._lease_seconds

    def leaseholders(self) -> set[Server]:
        """Return the servers that may have a lease from this leader."""
        since = system.monotonic() - self._lease_seconds
        return {server for server, at in self._answered.items() if at > since}

    async def answer(self, asked: AccessAsk, body: Bytes = b"") -> Received[AccessNews]:
        """Answer a server. ``body`` says what it uses of quotas, if they hold. Raises unless this node leads."""
        epoch = self._epoch()
        if epoch is None:
            raise NotLeader("this metadata node does not lead: the rules of access control come from the leader only")
        server = asked.kind, asked.number
        if asked.revision <= self._copy.view.revision:
            self._confirmed[server] = asked.revision
        self._changed.set()
        if self._copy.is_on and await self._epoch_in_store() != epoch:
            self._on_replaced(epoch)
            raise NotLeader("another metadata node leads: ask it for the rules of access control")
        rules = self._copy.view.rules
        self._answered[server] = system.monotonic()
        lease_ms = round(self._lease_seconds * 1_000)
        told = b"" if rules.revision == asked.revision else encode_rules(rules)
        if not len(body):
            if asked.revision == rules.revision:
                self._shares.note_none(server, system.monotonic())
            return Received(AccessNews(rules.revision, lease_ms), told)
        return Received(AccessNews(rules.revision, lease_ms, len(told)), told + self._divided(server, body))

    def _divided(self, server: Server, body: Bytes) -> bytes:
        view = self._copy.view
        is_on = view.mode is AccessMode.ENFORCED
        quotas = {quota.subject: quota.limits for quota in view.rules.quotas} if is_on else {}
        shares = self._shares.answer(server, decode_question(body), quotas, set(self._servers()), system.monotonic())
        return encode_shares(shares)

    def used(self, quotas: Iterable[Quota]) -> tuple[QuotaUsed, ...]:
        """Return what is used of these quotas, as servers have told this leader; nothing if no quotas hold."""
        if self._copy.view.mode is not AccessMode.ENFORCED:
            return ()
        now = system.monotonic()
        return tuple(QuotaUsed(quota.subject, self._used(quota, now)) for quota in quotas)

    def _used(self, quota: Quota, now: float) -> QuotaLimits:
        given = (name for name, limit in structs.asdict(quota.limits).items() if limit is not None)
        return QuotaLimits(**{name: self._shares.used(quota.subject, name, now) for name in given})

    async def _epoch_in_store(self) -> LeaderEpoch:
        """Look into the store. A look that is under way may be older than the question, so the next one counts; all
        questions that come meanwhile share it."""
        if self._next_look is None:
            self._next_look = asyncio.create_task(self._look_after(self._looking))
            # All who wait for it may be gone when it fails.
            self._next_look.add_done_callback(lambda look: look.cancelled() or look.exception())
        return await asyncio.shield(self._next_look)

    async def _look_after(self, earlier: asyncio.Task[LeaderEpoch] | None) -> LeaderEpoch:
        if earlier is not None and not earlier.done():
            await asyncio.wait({earlier})
        self._looking, self._next_look = self._next_look, None
        return (await self._store.leader()).epoch

    async def until_confirmed(
        self, revision: Revision, servers: Callable[[], Iterable[Server]], seconds: float, over: asyncio.Future[str]
    ) -> tuple[str, ...]:
        """Wait until all these servers act by this revision or a later one, but no longer than the term lasts, which is
        ``over`` when servers ask another leader. Returns those that have not said so."""

        def look(_: object) -> None:
            self._changed.set()

        over.add_done_callback(look)
        try:
            async with asyncio.timeout(seconds):
                while self._behind(revision, servers()) and not over.done():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            over.remove_done_callback(look)
        return tuple(f"{kind} {number}" for kind, number in self._behind(revision, servers()))

    def _behind(self, revision: Revision, servers: Iterable[Server]) -> list[Server]:
        return sorted(server for server in servers if self._confirmed.get(server, Revision(-1)) < revision)
