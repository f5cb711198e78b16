"""Keeps the recent history of one object cheaply, so that an error can tell what happened before."""

from __future__ import annotations

from collections import deque

NOTES_MAX = 24


class Journal:
    """A bounded list of notes. A note is a tuple and becomes text only when ``lines`` is called."""

    __slots__ = ("_notes", "_subject")

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._notes: deque[tuple[object, ...]] = deque(maxlen=NOTES_MAX)

    def note(self, *what: object) -> None:
        self._notes.append(what)

    def lines(self) -> tuple[str, ...]:
        return tuple(f"{self._subject}: {' '.join(map(str, note))}" for note in self._notes)
