"""Checks of scans and watermarks, which only clients of simulated clusters note."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from cutwater.core.order import decisions as d
from cutwater.core.read.time_marks import Clock
from cutwater.testing.checkers.guarantees import LoggedBatch, SimLog, SourceOracle
from cutwater.testing.checkers.record import event_times
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual.history import ClientHistory, Found, ScanOp, WatermarkOp
from cutwater.types import MILLISECOND, BatchKind, LogStreamId, TopicId

Place = tuple[int, int, int, Found]


def check_clients(log: SimLog, decisions: Sequence[d.Decision], history: ClientHistory) -> None:
    check_batches(decisions, history)
    check_scans(log, history)
    check_declarations(log, history)
    check_watermarks(log, decisions, history)


def check_batches(decisions: Sequence[d.Decision], history: ClientHistory) -> None:
    """A decision about a batch names exactly the parts that its driver offered in one request."""
    offered = {(run, batch, frozenset(parts)) for run, batch, parts in history.offered}
    for decision in decisions:
        if isinstance(decision, d.DecideBatch):
            parts = frozenset(part.part for group in decision.groups for part in group.parts)
            if (decision.run, decision.batch, parts) not in offered:
                raise Violation("groups", f"{decision} was decided, and no driver offered just these parts")


def check_scans(log: SimLog, history: ClientHistory) -> None:
    """A scan finds every record of its range once, except those that it says are trimmed, and nothing else."""
    records: dict[TopicId, list[Place]] = {scan.topic: _records(log, history, scan.topic) for scan in history.scans}
    for scan in history.scans:
        wanted = {place[0]: place for place in records[scan.topic] if scan.start < place[0] <= scan.end}
        for place in scan.found:
            if wanted.pop(place[0], None) != place:
                raise Violation("scan", f"{_named(scan)} found {place} again, or elsewhere, or of no append")
        missed = [glsn for glsn in wanted if not any(begin <= glsn < end for begin, end in scan.gaps)]
        if missed:
            raise Violation("scan", f"{_named(scan)} was complete without GLSN {min(missed)}")
        decided = log.trims_of(scan.topic)
        if any(end not in decided for _, end in scan.gaps):
            raise Violation("scan", f"{_named(scan)} was told {scan.gaps}, trims were {decided}")


def _named(scan: ScanOp) -> str:
    return f"a scan of topic {scan.topic} from {scan.start + 1} to {scan.end}"


def _records(log: SimLog, history: ClientHistory, topic: TopicId) -> list[Place]:
    found: list[Place] = []
    for glsn, stream, llsn, _, batch in log.batches:
        op = history.op_of(batch) if batch.kind is BatchKind.DATA and log.topic_of[stream] == topic else None
        if op is not None:
            for i, time in enumerate(event_times(batch)):
                found.append((glsn + i, stream, llsn + i, Found(op.payload, i, batch.count, time)))
    return found


def check_declarations(log: SimLog, history: ClientHistory) -> None:
    """A declaration that was acknowledged is in the log, where the acknowledgement says."""
    at = {glsn: (stream, llsn, batch) for glsn, stream, llsn, _, batch in log.batches}
    for call in history.declared.values():
        for ack in call.acks:
            op = call.appends.get(ack.stream)
            if op is None or at.get(ack.glsn) != (ack.stream, ack.llsn, op.batch):
                raise Violation("3 durable", f"{call} was acknowledged as {ack}, the log has {at.get(ack.glsn)}")


def check_watermarks(log: SimLog, decisions: Sequence[d.Decision], history: ClientHistory) -> None:
    """All readers are told the same watermark of a position: that of the log up to there. After a trim it may be a
    lower one."""
    walks: dict[tuple[TopicId, int | None, int], _Watermarks] = {}
    for told in history.watermarks:
        key = told.topic, told.bound_us, told.idle_after_us
        if key not in walks:
            walks[key] = _Watermarks(log, decisions, told)
        true = walks[key].after(told.glsn)
        is_lower = told.is_trimmed and (told.watermark is None or (true is not None and told.watermark < true))
        if told.watermark != true and not is_lower:
            raise Violation("watermark", f"{told} was answered, and the log says {true}")


class _Watermarks:
    """The watermark of a topic after every position, computed from the beginning of the log."""

    def __init__(self, log: SimLog, decisions: Sequence[d.Decision], told: WatermarkOp) -> None:
        lag_us = 0 if told.bound_us is None else told.bound_us + MILLISECOND
        self._oracle = SourceOracle(lag_us, told.idle_after_us)
        self._positions: list[int] = []
        self._found: list[int] = []
        own: set[LogStreamId] = {stream for stream, topic in log.topic_of.items() if topic == told.topic}
        batches, marks, self._none = iter(log.batches), Clock(), self._oracle.watermark
        for decision in decisions:
            if isinstance(decision, d.CreateStream) and decision.stream in own:
                self._oracle.streams[decision.stream] = (None, decision.time, False)
                self._oracle.created.add(decision.stream)
            elif isinstance(decision, d.Seal) and decision.final and decision.stream in own:
                self._oracle.streams.pop(decision.stream, None)
                self._oracle.created.discard(decision.stream)
            elif isinstance(decision, d.Cut):
                self._cut(decision, batches, own, marks, is_punctuated=told.bound_us is None)

    def after(self, glsn: int) -> int | None:
        place = bisect_right(self._positions, glsn)
        found = self._found[place - 1] if place else self._none
        return None if found == self._none else found

    def _cut(
        self, cut: d.Cut, batches: Iterator[LoggedBatch], own: set[LogStreamId], marks: Clock, *, is_punctuated: bool
    ) -> None:
        known = marks.recent[-1:]
        marks.note(cut.high_watermark, cut.time, is_tick=cut.is_tick)
        for commit in cut.commits:
            left = commit.context.count
            while left:
                glsn, stream, _, time, batch = next(batches)
                left -= batch.count
                if stream not in own:
                    continue
                times = event_times(batch) if batch.kind is BatchKind.DATA else [None]
                for i, event_time in enumerate(times):
                    is_last = i == len(times) - 1
                    counts = (batch.declared if is_last else None) if is_punctuated else event_time
                    self._oracle.spoke(stream, counts, time, is_idle=batch.idle and is_last)
                    self._note(glsn + i)
        if marks.recent[-1:] != known:
            self._oracle.evaluate(cut.time)
            self._note(cut.high_watermark)

    def _note(self, glsn: int) -> None:
        self._positions.append(glsn)
        self._found.append(self._oracle.watermark)
