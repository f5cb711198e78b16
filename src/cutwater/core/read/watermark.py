"""The watermark: how far event time has come, as a function of a position in the log. This is rule 2.

A position ``g`` is a GLSN that holds a record, a fence, a declaration or a tick; it has the time of its cut. ``W(g)``
is the watermark *after* position ``g``. A record at ``g`` is delivered under ``W(g - 1)`` and only then does the
watermark advance to ``W(g)``, so ``W(g - 1)`` is what the record *sees*.

A *source* is a topic with a watermark strategy. ``WatermarkClock`` is the clock of one source, ``combined`` joins the
clocks of the sources that feed one operator. The rule, exact for every position, in microseconds:

1.  A log stream's own watermark is made by the strategy of its source from the stream's positions up to ``g``: bounded
    out-of-orderness = largest event time − bound − 1 ms, punctuated = largest declared watermark. A stream that has
    not spoken stands at ``NO_WATERMARK``.
2.  A declaration (of a watermark, of idleness) is a promise about what follows its batch, so it takes effect at the
    batch's last position: no record of the batch sees it. Only punctuated streams heed a declared watermark, and those
    do not heed event times. All streams heed declared idleness.
3.  A source is evaluated at its own entries and at the marks of the log's clock, and at no other position. In between
    it stays as it is.
4.  A stream is idle if its last entry declares idleness, or lies more than ``idle_after_us`` of cut time back. Its
    creation counts as its first entry. Entries above ``g`` do not count, not even those of the same cut.
5.  ``v_s(g)`` is the minimum over the streams of source ``s`` that are not idle; if all are, the maximum over those
    that have spoken. ``W_s(g) = max(W_s(g - 1), v_s(g))``. A source is idle if all its streams are.
6.  A stream counts at the positions after its creation, up to the one at which it was sealed permanently. Because its
    creation is an entry, its source is not idle from there on, until it is evaluated again. A source without streams is
    idle.
7.  ``u(g)`` of an operator is the minimum of ``W_s`` over its sources that are not idle, or the maximum if all are.
    ``W(g) = max(W(g - 1), u(g))``. A stream or source that returns behind counts again, and nothing goes back.
8.  The end of a bounded input is ``MAX_WATERMARK``; the reader sets it, because no position follows.

So ``W`` depends on nothing but the log up to ``g``: no clock, no batch size, no reader. The reference is Flink's
``WatermarkOutputMultiplexer``.

Watermarks are plain integers, microseconds of event time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias

from msgspec import Struct

from cutwater.errors import InvalidArgument, ProtocolViolation, Refused
from cutwater.types import GLSN, MILLISECOND, SECOND, CutTime, LogStreamId

NO_WATERMARK: Final = -(2**63)
"""Nothing is known of event time yet: smaller than every other watermark."""

MAX_WATERMARK: Final = 2**63 - 1
"""No more records will come: every timer fires."""

RULE: Final = 2
"""The number of the rule. It is stored with offsets and savepoints."""

RULE_BEFORE: Final = 1
"""The rule that applies to offsets and savepoints that name none."""

IDLE_AFTER_US_DEFAULT: Final = 30 * SECOND

_NEVER: Final = 2**63 - 1
"""A cut time that no log reaches."""


class BoundedOutOfOrderness(Struct, frozen=True, tag="bounded"):
    """Strategy for streams whose records are at most ``bound_us`` of event time behind the largest one before them."""

    bound_us: int
    idle_after_us: int = IDLE_AFTER_US_DEFAULT

    def __post_init__(self) -> None:
        if self.bound_us < 0:
            raise InvalidArgument(f"bound of out-of-orderness is {self.bound_us} µs: it must not be negative")
        _require_idle_after(self.idle_after_us)


class Punctuated(Struct, frozen=True, tag="punctuated"):
    """Strategy for streams whose producers declare the watermark in batch headers. A lower declaration is ignored."""

    idle_after_us: int = IDLE_AFTER_US_DEFAULT

    def __post_init__(self) -> None:
        _require_idle_after(self.idle_after_us)


Strategy: TypeAlias = BoundedOutOfOrderness | Punctuated


def ascending(idle_after_us: int = IDLE_AFTER_US_DEFAULT) -> BoundedOutOfOrderness:
    """Return the strategy for streams whose event times never go back: bounded out-of-orderness with bound 0."""
    return BoundedOutOfOrderness(bound_us=0, idle_after_us=idle_after_us)


def _require_idle_after(idle_after_us: int) -> None:
    if idle_after_us < 0:
        raise InvalidArgument(f"idle_after is {idle_after_us} µs: it must not be negative")


class StreamSnapshot(Struct, frozen=True, forbid_unknown_fields=True):
    """What the clock knows of one log stream.

    ``last_commit`` is the time of creation until the first entry. ``idle``: the last entry declares idleness.
    ``is_new``: the stream was added after the last position that was reported.
    """

    log_stream_id: LogStreamId
    strategy: Strategy
    last_commit: CutTime
    watermark: int = NO_WATERMARK
    idle: bool = False
    is_new: bool = False


class WatermarkSnapshot(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole state of a ``WatermarkClock``, last evaluated at position ``glsn``, with streams in the order of their
    numbers. ``idle``: whether the source was idle there. ``ended`` is always False: the end of a bounded input is not
    the concern of a clock (``Ticks.end``)."""

    glsn: GLSN
    time: CutTime
    watermark: int
    ended: bool
    streams: tuple[StreamSnapshot, ...]
    idle: bool = True

    @property
    def is_idle(self) -> bool:
        """The same as ``WatermarkClock.is_idle``."""
        return self.idle and not any(stream.is_new for stream in self.streams)


class _Stream(Struct, eq=False):
    """The running state of one log stream. ``idle`` is as of the last ``WatermarkClock._scan``."""

    strategy: Strategy
    last_commit: CutTime
    watermark: int
    declared_idle: bool = False
    idle: bool = False
    lag_us: int = 0

    def __post_init__(self) -> None:
        self.lag_us = lag_us(self.strategy)


def require_known_rule(rule: object, what: str, way_out: str = "use the version that made it, or a newer one") -> None:
    """Raise if ``what`` was made under a rule that this version does not know."""
    if rule not in (RULE_BEFORE, RULE):
        raise Refused(
            f"{what} was made under rule {rule!r} of the watermark, and this version of Cutwater knows {RULE_BEFORE} "
            f"and {RULE}: {way_out}"
        )


def combined(sources: Iterable[tuple[int, bool]]) -> int:
    """Return ``u`` of an operator, from the watermark of each of its sources and whether that source is idle."""
    least, highest, is_idle = MAX_WATERMARK, NO_WATERMARK, True
    for watermark, idle in sources:
        highest = max(highest, watermark)
        if not idle:
            least, is_idle = min(least, watermark), False
    return highest if is_idle else least


class WatermarkClock:
    """Walks the log in GLSN order and tells the watermark of one source at every position.

    The caller reports every entry of the source (``seen``) and every mark of the log's clock (``tick``).
    It reports nothing else, because the source is not evaluated anywhere else. A mark that is the last position of one
    of the source's own batches may be reported or left out.

    A call that raises has changed nothing.

    The cost of a position does not grow with the streams as long as nothing turns idle and the lowest stream does not
    overtake the next: only the lowest stream can move the minimum. ``_lowest`` is that stream. ``_floor`` is at or
    below the watermark of every other stream that is not idle, exact right after a scan, and stays a bound because
    streams only rise. ``_highest`` is the highest stream as of the last scan; it counts while all are idle, and then
    nothing changes it. ``_created`` are streams that were added since the last position. ``_idle_check`` is a
    time up to which no stream can turn idle.
    """

    def __init__(self) -> None:
        self._glsn = GLSN(0)
        self._time = CutTime(0)
        self._watermark = NO_WATERMARK
        self._idle = True
        self._created: set[LogStreamId] = set()
        self._streams: dict[LogStreamId, _Stream] = {}
        self._lowest: _Stream | None = None
        self._floor = MAX_WATERMARK
        self._highest = NO_WATERMARK
        self._idle_check = 0
        self._stale = True

    @classmethod
    def restore(cls, snapshot: WatermarkSnapshot) -> WatermarkClock:
        """Return a clock that continues as the one that made the snapshot would."""
        clock = cls()
        clock._glsn = snapshot.glsn
        clock._time = snapshot.time
        clock._watermark = snapshot.watermark
        clock._idle = snapshot.idle
        clock._streams = {
            stream.log_stream_id: _Stream(stream.strategy, stream.last_commit, stream.watermark, stream.idle)
            for stream in snapshot.streams
        }
        clock._created = {stream.log_stream_id for stream in snapshot.streams if stream.is_new}
        return clock

    def snapshot(self) -> WatermarkSnapshot:
        """Return everything that ``restore`` needs. The rest (the lowest stream, idle ones) follows from it."""
        streams = tuple(
            StreamSnapshot(lsid, own.strategy, own.last_commit, own.watermark, own.declared_idle, lsid in self._created)
            for lsid, own in sorted(self._streams.items())
        )
        return WatermarkSnapshot(self._glsn, self._time, self._watermark, False, streams, self._idle)

    @property
    def watermark(self) -> int:
        """``W_s`` after the last position that was reported."""
        return self._watermark

    @property
    def glsn(self) -> GLSN:
        """The last position that was reported, 0 before the first."""
        return self._glsn

    @property
    def is_idle(self) -> bool:
        """Whether every stream was idle at the last reported position, and none was added since. Marks then change
        nothing."""
        return self._idle and not self._created

    def knows(self, lsid: LogStreamId) -> bool:
        """Whether a log stream counts."""
        return lsid in self._streams

    def add_stream(self, lsid: LogStreamId, strategy: Strategy, created: CutTime) -> None:
        """Count a log stream from the next position on. It holds the watermark back until it speaks or turns idle.

        ``created`` may lie ahead of the next cut's time: the leader that created the stream and the one that makes the
        cut may read different clocks, and a reader must get past such a place in the log.
        """
        if lsid in self._streams:
            raise InvalidArgument(f"log stream {lsid} is already part of this watermark")
        self._streams[lsid] = _Stream(strategy, created, NO_WATERMARK)
        self._created.add(lsid)
        self._stale = True

    def remove_stream(self, lsid: LogStreamId) -> None:
        """Leave out a log stream from the next position on, because it is sealed permanently or its input has ended."""
        self._stream(lsid)
        del self._streams[lsid]
        self._created.discard(lsid)
        self._stale = True

    def recall(self, lsid: LogStreamId, watermark: int, last_commit: CutTime, *, idle: bool) -> None:
        """Take in what a log stream had said by a position, where its earlier entries no longer exist. The effect shows
        when the source is next evaluated."""
        stream = self._stream(lsid)
        stream.watermark = max(stream.watermark, watermark)
        stream.last_commit = max(stream.last_commit, last_commit)
        stream.declared_idle = idle
        self._stale = True

    def seen(
        self,
        lsid: LogStreamId,
        first_glsn: GLSN,
        count: int,
        time: CutTime,
        time_max: int | None,
        declared: int | None = None,
        *,
        idle: bool = False,
    ) -> tuple[int, int, int]:
        """Take in a batch by its header. A fence or a declaration is an entry that says nothing of event time: its
        ``time_max`` is None.

        Returns three watermarks: the one before the batch, the minimum of the other streams during it, and the stream's
        own before it. Together with the event times of the records, they give the watermark after each record. The
        exception is the last record of a batch that declares idleness: after it, ``self.watermark`` holds.
        """
        stream = self._stream(lsid)
        before, own = self._watermark, stream.watermark
        self._require_position(first_glsn, count, time)
        said = declared if isinstance(stream.strategy, Punctuated) else time_max
        own_after = own if said is None else max(own, said - stream.lag_us)
        others = self._commit(stream, time, own_after)
        self._advance(first_glsn, count, time, max(before, min(own_after, others)))
        if idle:
            self._turn_idle(stream)
        return before, others, own

    def tick(self, glsn: GLSN, time: CutTime) -> int:
        """Return the watermark after a mark of the log's clock. Only cut time moves."""
        if glsn == self._glsn and time == self._time:
            # The mark is the last position of an entry of this source, which has been evaluated there.
            return self._watermark
        self._require_position(glsn, 1, time)
        if self._stale or time > self._idle_check:
            self._scan(time)
        self._advance(glsn, 1, time, max(self._watermark, self._value))
        return self._watermark

    def _stream(self, lsid: LogStreamId) -> _Stream:
        stream = self._streams.get(lsid)
        if stream is None:
            raise InvalidArgument(f"log stream {lsid} is not part of this watermark: add it first")
        return stream

    def _require_position(self, first_glsn: GLSN, count: int, time: CutTime) -> None:
        if count < 1:
            raise InvalidArgument(f"the batch at GLSN {first_glsn} has {count} records: it needs at least one")
        if first_glsn <= self._glsn:
            raise ProtocolViolation(f"GLSN {first_glsn} comes after {self._glsn}: positions never go back")
        if time < self._time:
            raise ProtocolViolation(
                f"GLSN {first_glsn} has cut time {time}, GLSN {self._glsn} before it has {self._time}: "
                "cut time never goes back"
            )

    @property
    def _value(self) -> int:
        """``v_s`` as of the last scan."""
        return self._highest if self._lowest is None else self._lowest.watermark

    def _commit(self, stream: _Stream, time: CutTime, own_after: int) -> int:
        """Record that ``stream`` spoke, and return the minimum of the others that holds throughout its batch. If the
        stream stays at or below ``_floor``, any value from ``own_after`` up serves as that minimum."""
        overtakes = stream is self._lowest and own_after > self._floor
        rescan = self._stale or stream.idle or time > self._idle_check or overtakes
        stream.watermark = own_after
        stream.last_commit = time
        stream.declared_idle = False
        if rescan:
            self._scan(time)
        else:
            # The commit may be older than a creation that lay ahead of it, so the check may have to come earlier.
            self._idle_check = min(self._idle_check, time + stream.strategy.idle_after_us)
        assert self._lowest is not None, "a stream that has just spoken is not idle"
        return self._floor if stream is self._lowest else self._lowest.watermark

    def _turn_idle(self, stream: _Stream) -> None:
        """Mark the stream idle after the last position of its batch. Without the stream the value is never lower, so
        earlier results stay valid."""
        stream.declared_idle = True
        self._scan(self._time)
        self._idle = self._lowest is None
        self._watermark = max(self._watermark, self._value)

    def _scan(self, time: CutTime) -> None:
        """Determine which streams are idle at ``time``, which of the others is lowest, and what bounds the rest."""
        lowest: _Stream | None = None
        floor, highest = MAX_WATERMARK, NO_WATERMARK
        idle_check = _NEVER
        for stream in self._streams.values():
            active_until = stream.last_commit + stream.strategy.idle_after_us
            stream.idle = stream.declared_idle or time > active_until
            highest = max(highest, stream.watermark)
            if stream.idle:
                continue
            idle_check = min(idle_check, active_until)
            if lowest is None:
                lowest = stream
            elif stream.watermark < lowest.watermark:
                lowest, floor = stream, lowest.watermark
            else:
                floor = min(floor, stream.watermark)
        # If every stream is idle, time alone changes nothing. An entry or a new stream causes the next scan.
        self._lowest, self._floor, self._highest, self._idle_check = lowest, floor, highest, idle_check
        self._stale = False

    def _advance(self, first_glsn: GLSN, count: int, time: CutTime, watermark: int) -> None:
        assert watermark >= self._watermark, "the watermark never goes back"
        self._glsn = GLSN(first_glsn + count - 1)
        self._time = time
        self._watermark = watermark
        self._idle = self._lowest is None
        self._created.clear()


def own_watermark(strategy: Strategy, time_max: int | None, declared: int | None) -> int:
    """Return a stream's own watermark, from the largest event time and the largest declaration so far."""
    said = declared if isinstance(strategy, Punctuated) else time_max
    return NO_WATERMARK if said is None else max(NO_WATERMARK, said - lag_us(strategy))


def lag_us(strategy: Strategy) -> int:
    """Return how far the watermark stays behind the largest event time, or behind what is declared. A record of time t
    may be followed by one of t − bound, so the watermark stays one millisecond below that."""
    return 0 if isinstance(strategy, Punctuated) else strategy.bound_us + MILLISECOND
