"""Checks of what shipped clients saw that the simulator of the core has no clients for."""

from __future__ import annotations

from cutwater.testing.checkers.guarantees import SimLog
from cutwater.testing.checkers.record import event_times
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual.history import ClientHistory, Found, ScanOp
from cutwater.types import BatchKind, TopicId

Place = tuple[int, int, int, Found]


def check_clients(log: SimLog, history: ClientHistory) -> None:
    check_scans(log, history)


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
