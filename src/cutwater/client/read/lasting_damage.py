"""Decides when readers give up on a damaged place: a log stream with one replica has no other copy to wait for."""

from __future__ import annotations

from cutwater.errors import CutwaterError, Damaged

DAMAGED_SECONDS = 1.0
"""How long a reader waits while the only replica is damaged. A decided trim may still remove the damaged place."""

WAY_OUT = (
    "There is no other replica: `cutwater verify` names the first GLSN behind the damage, where readers may start, and "
    "the ways out"
)


class LastingDamage:
    """Damage that one reader meets at one position. Times are those of its event loop."""

    def __init__(self) -> None:
        self._since: float | None = None

    def forget(self) -> None:
        """Forget earlier damage, because something else happened."""
        self._since = None

    def take(self, error: CutwaterError, replicas: int, now: float) -> CutwaterError | None:
        """Return the error to fail with, or None while waiting may help."""
        if not isinstance(error, Damaged) or replicas != 1:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if now < self._since + DAMAGED_SECONDS:
            return None
        error.message = f"{error.message}. {WAY_OUT}"
        return error
