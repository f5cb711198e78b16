"""Counts denials by principal and right, and tells the audit of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from cutwater.core.access.access_requests import AccessVerdict

KEYS_MAX = 1_024
OTHERS = "(others)"
"""Counts what has no room of its own: a client can make up names."""


class Denial(Struct, frozen=True):
    """A call that the rules deny. ``is_enforced`` is False if it was executed nevertheless, because access control is
    permissive. ``address`` is where the caller comes from, and ``via`` the gateway that calls for it, if one does."""

    verdict: AccessVerdict
    method: str
    address: str
    is_enforced: bool
    via: str = ""


OnDenial = Callable[[Denial], None]


class DenialCounts:
    """``refused``: by principal and right, those that were refused; ``recorded``: those that were only recorded.
    ``on_denial`` is called with each."""

    def __init__(self) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        self.recorded: Counter[tuple[str, str]] = Counter()
        self.on_denial: OnDenial | None = None

    def note(self, denial: Denial) -> None:
        counts = self.refused if denial.is_enforced else self.recorded
        key = denial.verdict.principal, str(denial.verdict.right)
        if key not in counts and len(counts) >= KEYS_MAX:
            key = OTHERS, str(denial.verdict.right)
        counts[key] += 1
        if self.on_denial is not None:
            self.on_denial(denial)
