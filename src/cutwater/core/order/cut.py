"""The cut: how many more records of each log stream are committed, and which GLSNs they get.

The total order rests on this arithmetic. Its invariants:

1. A cut of a log stream begins at its committed end, which the order layer stores itself. No report moves it.
2. It goes up to the *smallest* durable end over all replicas of the current epoch. A stream is not cut while one of
   them has not reported. So a committed record is on every disk that counts.
3. GLSNs are handed out in the order of log stream ids, without a hole, from the high watermark + 1.
4. Two calls with the same arguments give the same cut, in any process and with the arguments in any order.
5. A durable end never lies inside a batch, so one cut commits a whole batch (replicas assert it).
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from msgspec import Struct

from cutwater.errors import ProtocolViolation
from cutwater.types import GLSN, LLSN, CommitContext, CutTime, Epoch, LogStreamId


class Candidate(Struct, frozen=True):
    """An open log stream as the order layer sees it: its committed end, and the durable end of each replica that
    counts, or None for a replica that has not reported in this epoch."""

    stream: LogStreamId
    epoch: Epoch
    committed_end: LLSN
    durable_ends: tuple[LLSN | None, ...]


_by_stream = attrgetter("stream")


class StreamCommit(Struct, frozen=True, rename={"stream": "log_stream_id"}):
    """A commit context together with the log stream that it belongs to."""

    stream: LogStreamId
    context: CommitContext


def committable_end(candidate: Candidate) -> LLSN:
    """Return the last LLSN that is durable on every replica that counts."""
    ends = candidate.durable_ends
    if not ends or None in ends:
        return candidate.committed_end
    end: LLSN = min(ends)  # type: ignore[type-var, assignment]
    if end < candidate.committed_end:
        raise ProtocolViolation(
            f"log stream {candidate.stream} is committed to LLSN {candidate.committed_end}, but a replica that counts "
            f"ends at {end}: it must be quarantined before the next cut"
        )
    return end


def make_cut(high_watermark: GLSN, time: CutTime, candidates: Iterable[Candidate]) -> tuple[StreamCommit, ...]:
    """Return the next cut after ``high_watermark``: one commit for each log stream that has something to commit."""
    lengths: list[tuple[Candidate, int]] = []
    next_high_watermark = high_watermark
    for candidate in sorted(candidates, key=_by_stream):
        count = committable_end(candidate) - candidate.committed_end
        if count > 0:
            lengths.append((candidate, count))
            next_high_watermark = GLSN(next_high_watermark + count)
    commits = []
    glsn = high_watermark + 1
    for candidate, count in lengths:
        context = CommitContext(
            epoch=candidate.epoch,
            first_llsn=LLSN(candidate.committed_end + 1),
            first_glsn=GLSN(glsn),
            count=count,
            high_watermark=next_high_watermark,
            prev_high_watermark=high_watermark,
            time=time,
        )
        commits.append(StreamCommit(candidate.stream, context))
        glsn += count
    assert glsn == next_high_watermark + 1
    return tuple(commits)


def next_cut_time(last: CutTime, last_wall: int, wall: int) -> CutTime:
    """Return the time of the next cut. Cut time never goes back and never stands still, even if the wall clock does.

    If the clock is not ahead of the last stored time (it was set back, or an earlier leader's clock was fast), cut time
    advances at half the speed of the clock until the clock has caught up. ``last_wall`` is what this leader's clock
    showed at its previous cut.
    """
    if wall > last:
        return CutTime(wall)
    return CutTime(last + max(1, (wall - last_wall) // 2))
