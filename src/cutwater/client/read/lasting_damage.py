"""When readers give up on a damaged place: if its log stream has one replica, there is no other copy to wait for."""

from __future__ import annotations

from cutwater.errors import CutwaterError, Damaged

DAMAGED_SECONDS = 1.0
"""For how long the only replica may meet damage. A trim that was decided may still remove what is damaged."""

WAY_OUT = (
    "There is no other replica: `cutwater verify` names the first GLSN behind the damage, where readers may start, and "
    "the ways out"
)


class LastingDamage:
    """Of one reader at one position; times are of its event loop."""

    def __init__(self) -> None:
        self._since: float | None = None

    def forget(self) -> None:
        """Something else happened."""
        self._since = None

    def take(self, error: CutwaterError, replicas: int, now: float) -> CutwaterError | None:
        """What to fail with, if there is nothing to wait for any more."""
        if not isinstance(error, Damaged) or replicas != 1:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if now < self._since + DAMAGED_SECONDS:
            return None
        error.message = f"{error.message}. {WAY_OUT}"
        return error
