"""The part of one quota that this server may use, and what it uses of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cutwater.core.access.demand import Demand
from cutwater.core.access.quota_shares import RATE_UNIT, RATES, QuotaUse, quota_units
from cutwater.core.access.quotas import QuotaLimits
from cutwater.core.access.rate_bucket import RateBucket

if TYPE_CHECKING:
    from cutwater.access.quota_meter import QuotaMeter

STOCKS = ("connections", "subscriptions", "staged_bytes")
"""Limits of what is held at a time."""
SHORT_SECONDS = 2.0
"""For this long after something had to wait, the server wants a larger share, unless it got one since."""
KEEP_SECONDS = 4.0
"""For this long after something had to wait, it keeps the share with which nothing has to."""
KEEP = 0.8
"""The leader adds a quarter to what is wanted."""
IDLE_SECONDS = 3.0
"""A share that was not used for this long is given back."""

COUNT_SECONDS = 0.01


class QuotaAccount:
    """See the module. ``held`` returns how much of a limit in ``STOCKS`` is held here. Times are those of the loop."""

    def __init__(self, subject: str, limits: QuotaLimits, held: Callable[[QuotaAccount, str], int], now: float) -> None:
        self.subject = subject
        self._held = held
        self.members: frozenset[str] = frozenset()
        """The principals to which it applies."""
        self.meters: set[QuotaMeter] = set()
        self.limits = QuotaLimits()
        self.buckets: dict[str, RateBucket] = {}
        self._stocks: dict[str, int] = {}
        """Shares of limits in ``STOCKS``."""
        self._shares: dict[str, int] = {}
        """Shares of rates, in the unit of ``quota_shares``."""
        self._short: dict[str, tuple[float, int]] = {}
        """By limit, when something last had to wait, and how much was missing of a stock."""
        self._enlarged_at: dict[str, float] = {}
        """When the share of a rate last grew."""
        self._full: dict[str, tuple[float, int]] = {}
        """Until when a stock counts as full for so much or more."""
        self._used_at: dict[str, float] = {}
        self._demand: dict[str, Demand] = {}
        self.set_limits(limits, now)

    def set_limits(self, limits: QuotaLimits, now: float) -> None:
        """Take the limits, of which only those that hold at this server are set."""
        self.limits = limits
        self._full.clear()
        for rate in RATES:
            units = quota_units(limits, rate)
            if units is None:
                self.buckets.pop(rate, None)
                self._demand.pop(rate, None)
                self._shares.pop(rate, None)
            else:
                self.buckets.setdefault(rate, RateBucket(now))
                self._demand.setdefault(rate, Demand())
                self._set_rate(rate, min(self._shares.get(rate, 0), units), now)
        for stock in STOCKS:
            limit = getattr(limits, stock)
            if limit is None:
                self._stocks.pop(stock, None)
            else:
                self._stocks[stock] = min(self._stocks.get(stock, 0), limit)

    def limit(self, name: str) -> int | None:
        found: int | None = getattr(self.limits, name)
        return found

    def _set_rate(self, rate: str, share: int, now: float) -> None:
        self._shares[rate] = share
        self.buckets[rate].set_rate(share / RATE_UNIT, now)

    # Use.

    def has_room(self, stock: str, more: int, now: float) -> bool:
        """Whether so much more may be held here. What the members of a large group hold takes long to count, so after
        a refusal it is not counted again for a moment."""
        share = self._stocks.get(stock)
        if share is None:
            return True
        until, refused = self._full.get(stock, (now, 0))
        if now < until and more >= refused:
            return False
        has_room = self._held(self, stock) + more <= share
        if has_room:
            self._full.pop(stock, None)
        else:
            self._full[stock] = now + COUNT_SECONDS, more
        return has_room

    def take(self, rate: str, amount: int, now: float) -> None:
        bucket = self.buckets.get(rate)
        if bucket is not None:
            bucket.take(amount, now)
            self._demand[rate].note(amount, now)
            self._used_at[rate] = now

    def note_short(self, limit: str, now: float, missing: int = 0) -> None:
        """Note that something must wait because of this limit."""
        at, before = self._short.get(limit, (now, 0))
        self._short[limit] = now, max(missing, before if now - at < SHORT_SECONDS else 0)

    def note_enough(self, limit: str) -> None:
        """Note that nothing waits because of this limit any more."""
        self._short.pop(limit, None)

    def may_get_more(self, limit: str) -> bool:
        units = quota_units(self.limits, limit)
        return units is not None and self._share(limit) < units

    def part(self, limit: str) -> float:
        """Return which part of the quota the share is."""
        units = quota_units(self.limits, limit)
        return self._share(limit) / units if units else 1.0

    def _share(self, limit: str) -> int:
        return self._shares.get(limit, 0) if limit in RATES else self._stocks.get(limit, 0)

    # Questions and answers.

    def uses(self, now: float) -> list[QuotaUse]:
        """Return what the leader is told. Gives back shares that are not used."""
        return [use for limit in (*self._shares, *self._stocks) if (use := self._use(limit, now)) is not None]

    def _use(self, limit: str, now: float) -> QuotaUse | None:
        at, missing = self._short.get(limit, (None, 0))
        is_short = at is not None and now - at < SHORT_SECONDS
        units = quota_units(self.limits, limit)
        assert units is not None
        if limit not in RATES:
            held = self._held(self, limit)
            wants = held + (missing if is_short else 0)
            if not wants:
                self._stocks[limit] = 0
                return None
            return QuotaUse(self.subject, limit, self._stocks[limit], wants, held)
        share = self._shares[limit]
        if (
            not is_short
            and not self.buckets[limit].debt(now)
            and now - self._used_at.get(limit, now - IDLE_SECONDS) >= IDLE_SECONDS
        ):
            self._set_rate(limit, 0, now)
            return None
        wants = used = round(self._demand[limit].rate(now) * RATE_UNIT)
        if at is not None and is_short and at >= self._enlarged_at.get(limit, at):
            wants = max(2 * share, 2 * used, units // 16)
        elif at is not None and now - at < KEEP_SECONDS:
            wants = max(round(share * KEEP), used)
        return QuotaUse(self.subject, limit, share, min(wants, units), used=used)

    def take_share(self, limit: str, share: int, now: float) -> tuple[int, int]:
        """Act by a share from now on. Returns the share before and the new one."""
        units = quota_units(self.limits, limit)
        if units is None:
            return 0, 0
        before, share = self._share(limit), min(share, units)
        if limit in RATES:
            self._set_rate(limit, share, now)
            if share > before:
                self._enlarged_at[limit] = now
        else:
            self._stocks[limit] = share
            self._full.pop(limit, None)
        return before, share

    def drop_shares(self, now: float) -> None:
        """Use nothing more: the lease is over."""
        for rate in self._shares:
            self._set_rate(rate, 0, now)
        for stock in self._stocks:
            self._stocks[stock] = 0
