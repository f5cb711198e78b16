"""Decides when a leader makes a cut, and from which streams: those that moved since the last cut, or none in a tick."""

from __future__ import annotations

from collections.abc import Container

from cutwater.core.order import decisions as d
from cutwater.core.order.cut import Candidate, make_cut, next_cut_time
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.planning.reports import ReportBook
from cutwater.core.order.state import LogStream, OrderState
from cutwater.types import GLSN, LLSN, CutTime, Instant, LogStreamId, ReplicaState


class Cutter:
    """Makes the cuts of one leader."""

    def __init__(self, state: OrderState, book: ReportBook, options: OrderOptions, now: Instant) -> None:
        self._state, self._book, self._options = state, book, options
        self._moved: set[LogStreamId] = set()
        """Open streams that may have records to commit."""
        self._last_wall = now.wall
        self._last_cut = now.monotonic
        self._tick_wait = options.tick_us_min

    def note_report(self, stream: LogStream) -> bool:
        """Consider the stream for the next cut if every member has reported records that are not committed. Return
        whether that is so."""
        reports, end = self._book.of_stream(stream.stream), stream.committed_end
        # The end of the chain gets records last, so it is checked first.
        for node in reversed(stream.members):
            ur = reports.get(node)
            if ur is None or ur.durable_end <= end:
                return False
        self._moved.add(stream.stream)
        return True

    def forget_streams(self) -> None:
        self._moved &= self._state.streams.keys()

    def time(self, now: Instant) -> CutTime:
        """Return the time that a cut made now would get."""
        return next_cut_time(self._state.cut_time, self._last_wall, now.wall)

    def due(self, distrusted: Container[LogStreamId], now: Instant) -> d.Cut | None:
        """Return the next cut, or None if none is due. Streams with a distrusted replica are left out."""
        return (self._next_cut(distrusted, now) if self._moved else None) or self._due_tick(now)

    def _next_cut(self, distrusted: Container[LogStreamId], now: Instant) -> d.Cut | None:
        state = self._state
        candidates = [self._candidate(state.streams[lsid]) for lsid in self._moved if lsid not in distrusted]
        self._moved.clear()
        time = self.time(now)
        commits = make_cut(state.high_watermark, time, candidates)
        if not commits:
            return None
        self._tick_wait = self._options.tick_us_min
        self._last_wall, self._last_cut = now.wall, now.monotonic
        return d.Cut(commits[0].context.high_watermark, state.high_watermark, time, state.revision, commits)

    def _due_tick(self, now: Instant) -> d.Cut | None:
        """Return a tick if it is due. Time advances only at positions, so without appends a tick takes a position."""
        if now.monotonic - self._last_cut < self._tick_wait:
            return None
        self._tick_wait = min(self._tick_wait * 2, self._options.tick_us_max)
        time = self.time(now)
        self._last_wall, self._last_cut = now.wall, now.monotonic
        last = self._state.high_watermark
        return d.Cut(GLSN(last + 1), last, time, self._state.revision, ())

    def _candidate(self, stream: LogStream) -> Candidate:
        ends = self._durable_ends(stream) if stream.is_open else ()
        return Candidate(stream.stream, stream.epoch, stream.committed_end, ends)

    def _durable_ends(self, stream: LogStream) -> tuple[LLSN | None, ...]:
        """Return the durable end of each replica that counts, or None if it has not reported in this epoch."""
        reports = self._book.of_stream(stream.stream)
        ends: list[LLSN | None] = []
        for node in stream.members:
            ur = reports.get(node)
            if ur is None or ur.epoch != stream.epoch or ur.state is ReplicaState.LEARNING:
                ends.append(None)
            else:
                ends.append(ur.durable_end)
        return tuple(ends)
