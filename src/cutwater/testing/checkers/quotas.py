"""Quotas, as a named check over the history of one run: ``quota``.

A quota of requests or bytes bounds what passes in any time. What clients know is a lower bound of that: of an
acknowledged append, one request and the bytes of its values passed after it was begun and before it was acknowledged.
So in each window, from the beginning of one append to the acknowledgement of another one, all appends that lie within
it together are at most

- the quota of that time, where a server may act by a former quota for as long as its lease,
- and of a moment more, since a server saves up what it does not use,
- and the last request of each server, which passes as a whole. A server that starts again owes nothing.

None of the shipped code that divides and charges quotas is used here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from cutwater.core.access import access_decisions as a
from cutwater.testing.checkers.access import Decided
from cutwater.testing.checkers.violation import Violation

QUOTA = "quota"
MOMENT_SECONDS = 0.25
"""What a server may save up (ADR 0054)."""


class Passed(Struct, frozen=True):
    """Something that passed: when its caller began it and was told, in virtual seconds, and what it costs at least."""

    begin: float
    end: float
    cost: int


class _Limits:
    """A limit of a subject over time."""

    def __init__(self, subject: str, limit: str, decided: Iterable[Decided], lease_seconds: float) -> None:
        own = [one for one in decided if isinstance(one.decision, a.SetQuota) and one.decision.subject == subject]
        self._values = [getattr(one.decision.limits, limit) for one in own]  # type: ignore[union-attr]
        self._from = [one.offered.seconds for one in own]
        self._until = [one.known.seconds + lease_seconds for one in own[1:]] + [float("inf")]

    def most(self, begin: float, end: float) -> int:
        """Return the largest limit by which a server may have acted in this time."""
        ranges = zip(self._values, self._from, self._until, strict=True)
        return max((value for value, since, until in ranges if since <= end and until >= begin), default=0)


def check_quota(
    subject: str,
    limit: str,
    passed: Sequence[Passed],
    decided: Iterable[Decided],
    *,
    lease_seconds: float,
    starts: int,
) -> None:
    """Check all windows. ``starts``: how often servers were started."""
    limits = _Limits(subject, limit, decided, lease_seconds)
    by_end = sorted(passed, key=lambda one: one.end)
    last = max((one.cost for one in passed), default=0) * starts
    for begin in sorted({one.begin for one in passed}):
        together = 0
        for one in by_end:
            if one.begin < begin:
                continue
            together += one.cost
            quota = limits.most(begin, one.end)
            if together > quota * (one.end - begin + MOMENT_SECONDS) + last:
                raise Violation(
                    QUOTA,
                    f"{subject} may use {quota} of {limit}, and used {together} from {begin:.3f} to {one.end:.3f} s",
                )
