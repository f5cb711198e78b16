"""What happened in a run, as a hash, and as lines for people if they are asked for."""

from __future__ import annotations

from hashlib import blake2b
from struct import Struct

_WHEN = Struct("<dI")


class Trace:
    """Two runs with the same hash had the same events at the same times. ``lines`` gets them as text."""

    def __init__(self, lines: list[str] | None = None) -> None:
        self.lines = lines
        self.events = 0
        self._hash = blake2b(digest_size=16)
        self._update = self._hash.update

    def note(self, now: float, what: bytes) -> None:
        """Note an event of which there are many."""
        self.events += 1
        self._update(_WHEN.pack(now, len(what)) + what)

    def say(self, now: float, what: str) -> None:
        """Note an event that a reader of the trace wants to see."""
        self.note(now, what.encode())
        if self.lines is not None:
            self.lines.append(f"{now:12.6f} {what}")

    @property
    def hash(self) -> str:
        return self._hash.hexdigest()
