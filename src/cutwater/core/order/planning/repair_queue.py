"""Streams whose repair has to be planned. A turn takes only some of them, so that other streams get their cuts.

Streams that can wait, such as the many permanently sealed ones, get the room that streams in need leave.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import islice

from cutwater.types import LogStreamId


class RepairQueue:
    """``urgent`` and ``patient`` streams, each with the one that has waited longest first."""

    __slots__ = ("patient", "urgent")

    def __init__(self) -> None:
        self.urgent: dict[LogStreamId, None] = {}
        self.patient: dict[LogStreamId, None] = {}

    def __len__(self) -> int:
        return len(self.urgent) + len(self.patient)

    def add(self, stream: LogStreamId) -> None:
        self.urgent[stream] = None

    def add_all(self, streams: Iterable[LogStreamId]) -> None:
        self.urgent.update(dict.fromkeys(streams))

    def add_patient(self, streams: Iterable[LogStreamId]) -> None:
        self.patient.update(dict.fromkeys(streams))

    def take(self, count: int) -> list[LogStreamId]:
        """Remove and return at most so many streams, in the order of their numbers."""
        taken = list(islice(self.urgent, count))
        for stream in taken:
            del self.urgent[stream]
            self.patient.pop(stream, None)
        others = list(islice(self.patient, count - len(taken)))
        for stream in others:
            del self.patient[stream]
        return sorted(taken + others)

    def keep(self, known: Container[LogStreamId]) -> None:
        """Forget streams that were deleted."""
        self.urgent = {stream: None for stream in self.urgent if stream in known}
        self.patient = {stream: None for stream in self.patient if stream in known}
