"""The watermark: how far event time has come, as a function of a position in the log.

A position ``g`` is a GLSN that holds a record, a fence or a tick, and it has the time of its cut. ``W(g)`` is the
watermark *after* position ``g``. A record at ``g`` is delivered under ``W(g - 1)`` and only then does the watermark
advance to ``W(g)``, so ``W(g - 1)`` is what the record *sees*.

The rule, exact for every record:

1.  A log stream's own watermark is made by the strategy of its topic from the stream's positions up to ``g``: bounded
    out-of-orderness = largest event time − bound − 1 ms, punctuated = largest declared watermark. A stream that has
    said nothing yet stands at ``NO_WATERMARK``.
2.  A declared watermark is a promise about what follows its batch, so it takes effect at the batch's last position: no
    record of the batch sees it. Only punctuated streams heed it, and those do not heed event times.
3.  A stream is idle at ``g`` if its last commit at or below ``g`` (or its creation, before the first) lies more than
    ``idle_after_us`` of cut time before the time of ``g``. Commits above ``g`` do not count, not even those of the same
    cut.
4.  ``W(g)`` is the minimum over the streams that are not idle at ``g``, unless that is less than ``W(g - 1)``: the
    watermark never goes back. If every stream is idle, or there is none, it stays as it is.
5.  The watermark moves at positions only. A stream that is added or removed counts, or ceases to, from the next
    position on.
6.  The end of a bounded input is ``MAX_WATERMARK``.

So ``W`` depends on nothing but the log up to ``g``: no clock, no batch size, no reader. The reference is Flink's
``WatermarkOutputMultiplexer``.

Watermarks are plain integers, microseconds of event time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, TypeAlias

from msgspec import Struct

from cutwater.errors import InvalidArgument, ProtocolViolation
from cutwater.types import GLSN, MILLISECOND, SECOND, CutTime, EventTime, LogStreamId

NO_WATERMARK: Final = -(2**63)
"""Nothing is known of event time yet: smaller than every other watermark."""

MAX_WATERMARK: Final = 2**63 - 1
"""No more records will come: every timer fires."""

IDLE_AFTER_US_DEFAULT: Final = 30 * SECOND

_NEVER: Final = 2**63 - 1
"""A cut time that no log reaches."""


class BoundedOutOfOrderness(Struct, frozen=True, tag="bounded"):
    """Records of a stream are at most ``bound_us`` of event time behind the largest one before them."""

    bound_us: int
    idle_after_us: int = IDLE_AFTER_US_DEFAULT

    def __post_init__(self) -> None:
        if self.bound_us < 0:
            raise InvalidArgument(f"bound of out-of-orderness is {self.bound_us} µs: it must not be negative")
        _require_idle_after(self.idle_after_us)


class Punctuated(Struct, frozen=True, tag="punctuated"):
    """Producers declare the watermark in batch headers; a smaller declaration than the last is ignored."""

    idle_after_us: int = IDLE_AFTER_US_DEFAULT

    def __post_init__(self) -> None:
        _require_idle_after(self.idle_after_us)


Strategy: TypeAlias = BoundedOutOfOrderness | Punctuated


def ascending(idle_after_us: int = IDLE_AFTER_US_DEFAULT) -> BoundedOutOfOrderness:
    """Event times of a stream never go back: bounded out-of-orderness with bound 0."""
    return BoundedOutOfOrderness(bound_us=0, idle_after_us=idle_after_us)


def _require_idle_after(idle_after_us: int) -> None:
    if idle_after_us < 0:
        raise InvalidArgument(f"idle_after is {idle_after_us} µs: it must not be negative")


class StreamSnapshot(Struct, frozen=True):
    """What the clock knows of one log stream. ``last_commit`` is the creation until the first commit."""

    log_stream_id: LogStreamId
    strategy: Strategy
    last_commit: CutTime
    watermark: int = NO_WATERMARK


class WatermarkSnapshot(Struct, frozen=True):
    """The whole state of a ``WatermarkClock`` after position ``glsn``, streams in the order of their numbers."""

    glsn: GLSN
    time: CutTime
    watermark: int
    ended: bool
    streams: tuple[StreamSnapshot, ...]


class _Stream(Struct, eq=False):
    """The running state of one log stream. ``idle`` is as of the last ``WatermarkClock._scan``."""

    strategy: Strategy
    last_commit: CutTime
    watermark: int
    idle: bool = False


class WatermarkClock:
    """Walks the log in GLSN order and tells the watermark at every position.

    The caller reports every cut: ``batch`` or ``header`` for each batch of the clock's streams, ``tick`` for positions
    that hold none, which are true ticks and records of topics that the clock does not follow. One ``tick`` with the
    last GLSN stands for a whole run of those within a cut. GLSNs may therefore be skipped, cuts may not: a cut that is
    left out hides its time, and a stream may turn idle just then.

    A call that raises has changed nothing.

    The cost of a position does not grow with the streams as long as nothing turns idle and the lowest stream does not
    overtake the next: only the lowest stream can move the minimum. ``_lowest`` is that stream. ``_floor`` is at or
    below the watermark of every other stream that is not idle, exact right after a scan, and stays a bound because
    streams only rise. ``_idle_check`` is a time up to which no stream can turn idle.
    """

    def __init__(self) -> None:
        self._glsn = GLSN(0)
        self._time = CutTime(0)
        self._watermark = NO_WATERMARK
        self._ended = False
        self._streams: dict[LogStreamId, _Stream] = {}
        self._lowest: _Stream | None = None
        self._floor = MAX_WATERMARK
        self._idle_check = 0
        self._stale = True

    @classmethod
    def restore(cls, snapshot: WatermarkSnapshot) -> WatermarkClock:
        """A clock that goes on as the one that made the snapshot."""
        clock = cls()
        clock._glsn = snapshot.glsn
        clock._time = snapshot.time
        clock._watermark = snapshot.watermark
        clock._ended = snapshot.ended
        clock._streams = {
            stream.log_stream_id: _Stream(stream.strategy, stream.last_commit, stream.watermark)
            for stream in snapshot.streams
        }
        return clock

    def snapshot(self) -> WatermarkSnapshot:
        """Everything that ``restore`` needs. What is left out (idleness, the lowest stream) follows from it."""
        streams = tuple(
            StreamSnapshot(lsid, stream.strategy, stream.last_commit, stream.watermark)
            for lsid, stream in sorted(self._streams.items())
        )
        return WatermarkSnapshot(self._glsn, self._time, self._watermark, self._ended, streams)

    @property
    def watermark(self) -> int:
        """``W`` after the last position that was reported."""
        return self._watermark

    @property
    def glsn(self) -> GLSN:
        """The last position that was reported, 0 before the first."""
        return self._glsn

    @property
    def time(self) -> CutTime:
        """The cut time of the last position that was reported, 0 before the first."""
        return self._time

    @property
    def is_idle(self) -> bool:
        """Whether every stream is idle, so that time alone will change nothing any more."""
        return not self._stale and self._lowest is None

    def add_stream(self, lsid: LogStreamId, strategy: Strategy, created: CutTime) -> None:
        """Count a log stream from the next position on; it holds the watermark back until it speaks or turns idle.

        ``created`` may lie ahead of the next cut's time: the leader that created the stream and the one that makes the
        cut may read different clocks, and a reader must get past such a place in the log.
        """
        if lsid in self._streams:
            raise InvalidArgument(f"log stream {lsid} is already part of this watermark")
        self._streams[lsid] = _Stream(strategy, created, NO_WATERMARK)
        self._stale = True

    def remove_stream(self, lsid: LogStreamId) -> None:
        """Leave a log stream out from the next position on, because it is sealed for good or its input has ended."""
        self._stream(lsid)
        del self._streams[lsid]
        self._stale = True

    def batch(
        self,
        lsid: LogStreamId,
        first_glsn: GLSN,
        time: CutTime,
        event_times: Sequence[EventTime],
        declared: EventTime | None = None,
    ) -> list[int]:
        """The watermark seen by each record of a batch.

        The record at index ``i`` sees the watermark after the position before it, so ``result[i + 1]`` is also the
        watermark after record ``i``, and ``self.watermark`` the one after the last.
        """
        stream = self._stream(lsid)
        count = len(event_times)
        self._require_position(first_glsn, count, time)

        seen_by_first, own_before = self._watermark, stream.watermark
        own_after = _own_after_batch(stream, max(event_times), declared)
        others = self._commit(stream, time, own_after)
        if own_before >= others:
            # The stream was above the others before its first record, so nothing moves inside the batch.
            after = [max(seen_by_first, others)] * count
        else:
            rising = _own_after_each(stream.strategy, own_before, event_times, own_after)
            after = _clamped(rising, seen_by_first, others)
        self._advance(first_glsn, count, time, after[-1])
        return [seen_by_first, *after[:-1]]

    def header(
        self,
        lsid: LogStreamId,
        first_glsn: GLSN,
        count: int,
        time: CutTime,
        time_max: EventTime | None,
        declared: EventTime | None = None,
    ) -> int:
        """The watermark after a batch of which only the header is known; leaves the same state as ``batch``.

        A fence is a commit that says nothing of event time: its ``time_max`` is None.
        """
        stream = self._stream(lsid)
        self._require_position(first_glsn, count, time)

        own_after = _own_after_batch(stream, time_max, declared)
        others = self._commit(stream, time, own_after)
        self._advance(first_glsn, count, time, max(self._watermark, min(own_after, others)))
        return self._watermark

    def tick(self, glsn: GLSN, time: CutTime) -> int:
        """The watermark after a position without a record of these streams: only cut time moves."""
        self._require_position(glsn, 1, time)

        if self._stale or time > self._idle_check:
            self._scan(time)
        minimum = NO_WATERMARK if self._lowest is None else self._lowest.watermark
        self._advance(glsn, 1, time, max(self._watermark, minimum))
        return self._watermark

    def end(self) -> int:
        """The end of a bounded input: no position follows. If one of several inputs ends, remove its streams."""
        self._ended = True
        self._watermark = MAX_WATERMARK
        return self._watermark

    def _stream(self, lsid: LogStreamId) -> _Stream:
        stream = self._streams.get(lsid)
        if stream is None:
            raise InvalidArgument(f"log stream {lsid} is not part of this watermark: add it first")
        return stream

    def _require_position(self, first_glsn: GLSN, count: int, time: CutTime) -> None:
        if count < 1:
            raise InvalidArgument(f"the batch at GLSN {first_glsn} has {count} records: it needs at least one")
        if self._ended:
            raise ProtocolViolation(f"GLSN {first_glsn} comes after the end of the input, which was at {self._glsn}")
        if first_glsn <= self._glsn:
            raise ProtocolViolation(f"GLSN {first_glsn} comes after {self._glsn}: positions never go back")
        if time < self._time:
            raise ProtocolViolation(
                f"GLSN {first_glsn} has cut time {time}, GLSN {self._glsn} before it has {self._time}: "
                "cut time never goes back"
            )

    def _commit(self, stream: _Stream, time: CutTime, own_after: int) -> int:
        """Record that ``stream`` spoke, and return the minimum of the others that holds throughout its batch.

        Where the stream stays at or below ``_floor``, any value from ``own_after`` up serves as that minimum.
        """
        overtakes = stream is self._lowest and own_after > self._floor
        rescan = self._stale or stream.idle or time > self._idle_check or overtakes
        stream.watermark = own_after
        stream.last_commit = time
        if rescan:
            self._scan(time)
        else:
            # The commit may be older than a creation that lay ahead of it, so the check may have to come earlier.
            self._idle_check = min(self._idle_check, time + stream.strategy.idle_after_us)
        assert self._lowest is not None, "a stream that has just spoken is not idle"
        return self._floor if stream is self._lowest else self._lowest.watermark

    def _scan(self, time: CutTime) -> None:
        """Decide anew which streams are idle at ``time``, which of the others is lowest, and what bounds the rest."""
        lowest: _Stream | None = None
        floor = MAX_WATERMARK
        idle_check = _NEVER
        for stream in self._streams.values():
            active_until = stream.last_commit + stream.strategy.idle_after_us
            stream.idle = time > active_until
            if stream.idle:
                continue
            idle_check = min(idle_check, active_until)
            if lowest is None:
                lowest = stream
            elif stream.watermark < lowest.watermark:
                lowest, floor = stream, lowest.watermark
            else:
                floor = min(floor, stream.watermark)
        # Where every stream is idle, time alone changes nothing: a commit or a new stream will ask for the next scan.
        self._lowest, self._floor, self._idle_check, self._stale = lowest, floor, idle_check, False

    def _advance(self, first_glsn: GLSN, count: int, time: CutTime, watermark: int) -> None:
        assert watermark >= self._watermark, "the watermark never goes back"
        self._glsn = GLSN(first_glsn + count - 1)
        self._time = time
        self._watermark = watermark


def own_watermark(strategy: Strategy, time_max: EventTime | None, declared: EventTime | None) -> int:
    """A stream's own watermark, from the largest event time and the largest declaration so far."""
    said = declared if isinstance(strategy, Punctuated) else time_max
    if said is None:
        return NO_WATERMARK
    return said if isinstance(strategy, Punctuated) else said - _lag_us(strategy)


def _own_after_batch(stream: _Stream, time_max: EventTime | None, declared: EventTime | None) -> int:
    """The stream's own watermark after a batch, from what the batch header says."""
    if isinstance(stream.strategy, Punctuated):
        said: int | None = declared
    else:
        said = None if time_max is None else time_max - _lag_us(stream.strategy)
    return stream.watermark if said is None else max(stream.watermark, said)


def _own_after_each(strategy: Strategy, own_before: int, event_times: Sequence[EventTime], own_after: int) -> list[int]:
    """The stream's own watermark after each record of a batch; the last one is ``own_after``."""
    if isinstance(strategy, Punctuated):
        return [own_before] * (len(event_times) - 1) + [own_after]
    lag_us = _lag_us(strategy)
    rising = list(accumulate((time - lag_us for time in event_times), max, initial=own_before))
    assert rising[-1] == own_after, "the header's maximum is that of the records"
    return rising[1:]


def _lag_us(strategy: BoundedOutOfOrderness) -> int:
    """A record of time t may be followed by one of t − bound, so the watermark stays one millisecond below that."""
    return strategy.bound_us + MILLISECOND


def _clamped(rising: list[int], low: int, high: int) -> list[int]:
    """``max(low, min(high, value))`` for each value of a list that never falls."""
    if high <= low:
        return [low] * len(rising)
    start = bisect_right(rising, low)
    end = bisect_left(rising, high, lo=start)
    return [low] * start + rising[start:end] + [high] * (len(rising) - end)
