"""Divides quotas among servers: what the leader knows of their demand, and the share that each of them may use. Pure.

A server says by which shares it acts and how much it wants. It asks one question at a time, so a question also says
that earlier answers were taken or will never be. Until its next question, a server may act by the larger one of the
share that it named and the share that it was answered; that is its *claim*. Invariants (ADR 0054):

1. An answered share is at most what the quota leaves beside the claims of all other servers. So shares that are in use
   at the same time never exceed the quota that was in force when they were given.
2. A claim ends with the lease of its server, or with a question that does not name it.
3. A new leader does not know the claims of servers that have not answered to it yet. Until all have, or their leases
   are over, it confirms shares and enlarges none. A question counts for that if it names the term of an answer of this
   leader: an older one may be late, and say less than the server has by now.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

from msgspec import Struct

from cutwater.core.access.quotas import QuotaLimits

S = TypeVar("S")
"""What identifies a server."""

RATES = ("bytes_in_per_s", "bytes_out_per_s", "requests_per_s")
RATE_UNIT = 1_000
"""Shares of a rate are in thousandths per second: servers divide a limit of a few requests, too."""
HEADROOM_DIVISOR = 4
"""A server gets a quarter more than it uses, so that it need not wait for the next answer when it uses more."""
NO_SESSION = 0
LEAST_DIVISOR = 16
"""All servers together get at least a sixteenth of a rate as headroom."""


class QuotaUse(Struct, frozen=True, array_like=True):
    """What a server uses of one limit of one quota. ``share``: by which it acts now. ``wants``: what it could use.
    ``held``: what it has and cannot give back at once, such as connections. ``used``: what it used lately of a rate; it
    is told to people only."""

    subject: str
    limit: str
    share: int
    wants: int
    held: int = 0
    used: int = 0


class QuotaShare(Struct, frozen=True, array_like=True):
    subject: str
    limit: str
    share: int


class QuotaQuestion(Struct, frozen=True):
    """``session`` is when the server was started, and ``number`` grows with each question. If its clock goes back
    before a start, it gets no shares until its former lease is over. ``term`` is that of the last answer, or 0."""

    session: int
    number: int
    term: int
    uses: tuple[QuotaUse, ...]


class QuotaAnswer(Struct, frozen=True):
    """``term`` is that of the leader."""

    term: int
    shares: tuple[QuotaShare, ...] = ()


def quota_units(limits: QuotaLimits, limit: str) -> int | None:
    """Return a limit in the unit of its shares; None if there is none."""
    found: int | None = getattr(limits, limit, None)
    return found if found is None or limit not in RATES else found * RATE_UNIT


def fair_shares(quota: int, wants: Mapping[S, int]) -> dict[S, int]:
    """Divide a quota so that nobody gets more than it wants, and nobody gets less than another one that wants less."""
    found: dict[S, int] = {}
    left = quota
    for i, server in enumerate(sorted(wants, key=lambda one: wants[one])):
        found[server] = min(wants[server], left // (len(wants) - i))
        left -= found[server]
    return found


def wanted_share(quota: int, wants: Mapping[S, int], server: S, *, is_rate: bool) -> int:
    """Return the share that a server should have, with headroom from what nobody wants."""
    padded = dict(wants)
    if is_rate:
        least = quota // (LEAST_DIVISOR * len(wants))
        padded = {one: wanted + max(wanted // HEADROOM_DIVISOR, least) for one, wanted in wants.items()}
    fair = fair_shares(quota, padded)
    # One part of the rest stays for a server that has not asked yet.
    return fair[server] + (quota - sum(fair.values())) // (len(wants) + 1)


class _Claim(Struct):
    share: int
    wants: int
    held: int
    used: int


def _claim(use: QuotaUse) -> _Claim:
    held = max(0, use.held)
    return _Claim(max(held, use.share), max(held, use.wants), held, max(held, use.used))


class _Asker(Struct):
    session: int
    number: int
    at: float
    claims: dict[tuple[str, str], _Claim]
    is_certain: bool
    """Whether it has no other claims."""


class QuotaShares(Generic[S]):
    """See the module. Times are seconds of any clock that does not go back."""

    def __init__(self, lease_seconds: float, now: float, term: int = 0) -> None:
        self._lease_seconds = lease_seconds
        self._askers: dict[S, _Asker] = {}
        self._begun, self._term = now, term

    def begin(self, now: float, term: int) -> None:
        """Begin to lead. Servers may act by shares of an earlier leader."""
        self._askers.clear()
        self._begun, self._term = now, term

    def note_none(self, server: S, now: float) -> None:
        """Note that no quota is in force at this server, so that it has no share."""
        known = self._askers.get(server)
        if known is None or known.session == NO_SESSION:
            self._askers[server] = _Asker(NO_SESSION, 0, now, {}, is_certain=True)

    def answer(
        self,
        server: S,
        asked: QuotaQuestion,
        quotas: Mapping[str, QuotaLimits],
        servers: Collection[S],
        now: float,
    ) -> QuotaAnswer:
        """Return the shares for a server. ``servers``: all that may act by shares of an earlier leader."""
        self._askers = {one: it for one, it in self._askers.items() if now < it.at + self._lease_seconds}
        known, is_certain = self._askers.get(server), asked.term == self._term
        claims = {(use.subject, use.limit): _claim(use) for use in asked.uses}
        if known is not None and (asked.session, asked.number) <= (known.session, known.number):
            if (asked.session, asked.number) != (known.session, known.number):
                # The server does not wait for this answer any more.
                return QuotaAnswer(self._term)
            # It repeats its question, through another metadata node, and may take either answer.
            claims = known.claims
        self._askers[server] = _Asker(asked.session, asked.number, now, claims, is_certain)
        may_enlarge = now >= self._begun + self._lease_seconds or all(map(self._is_certain, {*servers, server}))
        shares = []
        for (subject, limit), claim in claims.items():
            limits = quotas.get(subject)
            quota = quota_units(limits, limit) if limits is not None else None
            if quota is None:
                continue
            share = self._share(server, (subject, limit), quota)
            share = share if may_enlarge else min(share, claim.share)
            claim.share = max(claim.share, share)
            shares.append(QuotaShare(subject, limit, share))
        return QuotaAnswer(self._term, tuple(shares))

    def _is_certain(self, server: S) -> bool:
        known = self._askers.get(server)
        return known is not None and known.is_certain

    def _share(self, server: S, key: tuple[str, str], quota: int) -> int:
        claims = {one: it.claims[key] for one, it in self._askers.items() if key in it.claims}
        held = sum(claim.held for claim in claims.values())
        wants = {one: claim.wants - claim.held for one, claim in claims.items()}
        wanted = claims[server].held + wanted_share(max(0, quota - held), wants, server, is_rate=key[1] in RATES)
        others = sum(claim.share for one, claim in claims.items() if one != server)
        return max(0, min(wanted, quota - others))

    def claimed(self, subject: str, limit: str, now: float) -> int:
        """Return what all servers together may use now, as far as this leader knows."""
        return sum(claim.share for claim in self._live(subject, limit, now))

    def used(self, subject: str, limit: str, now: float) -> int:
        """Return what all servers together use, in the unit of the limit, as far as they have told this leader."""
        total = sum(claim.used for claim in self._live(subject, limit, now))
        return round(total / RATE_UNIT) if limit in RATES else total

    def _live(self, subject: str, limit: str, now: float) -> list[_Claim]:
        key = subject, limit
        live = (it for it in self._askers.values() if now < it.at + self._lease_seconds)
        return [it.claims[key] for it in live if key in it.claims]
