"""The lease of an agent, as the agent counts it.

1. The lease counts from when the last confirmed renewal was sent, so it ends here no later than at the leader.
2. All processes of jobs are dead before it ends: killing them begins ``margin_ms`` earlier.
3. Its clock runs while the machine sleeps.
"""

from __future__ import annotations

MARGIN_MS_MAX = 3_000
_MARGIN_SHARE = 4
_RENEWALS = 3


def margin_ms(lease_ms: int) -> int:
    """Return how long before the end of the lease the killing begins."""
    return min(MARGIN_MS_MAX, lease_ms // _MARGIN_SHARE)


class LeaseClock:
    """Times are milliseconds."""

    def __init__(self) -> None:
        self.lease_ms = 0
        """0 before the first registration was confirmed."""
        self.confirmed_ms = 0
        """When the last confirmed renewal was sent."""

    def confirm(self, sent_ms: int, lease_ms: int) -> None:
        if sent_ms >= self.confirmed_ms:
            self.lease_ms, self.confirmed_ms = lease_ms, sent_ms

    @property
    def is_held(self) -> bool:
        return self.lease_ms > 0

    def end(self) -> None:
        self.lease_ms = self.confirmed_ms = 0

    @property
    def deadline_ms(self) -> int:
        """When the killing begins."""
        return self.confirmed_ms + self.lease_ms - margin_ms(self.lease_ms)

    @property
    def renew_ms(self) -> int:
        """When to renew the lease."""
        return self.confirmed_ms + self.lease_ms // _RENEWALS
