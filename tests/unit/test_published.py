"""What runs have published is held against what was decided."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from cutwater.admin.publish_audit import AuditedEntry, PublishAudit
from cutwater.core.requests import (
    Catalog,
    Description,
    GroupDescription,
    PublishedGroup,
    RunDescription,
    StreamInfo,
    TopicInfo,
)
from cutwater.types import (
    GLSN,
    LLSN,
    BatchNumber,
    ClusterId,
    CutTime,
    DecisionIndex,
    Epoch,
    LeaderEpoch,
    LogStreamId,
    Revision,
    RunId,
    TopicId,
)

A, B = TopicId(1), TopicId(2)
LS1, LS2, LS3 = LogStreamId(1), LogStreamId(2), LogStreamId(3)
END = GLSN(100)


def stream(number: LogStreamId, topic: TopicId) -> StreamInfo:
    return StreamInfo(number, topic, Epoch(1), True, False, (), (), LLSN(50), END, GLSN(0), CutTime(0))


def catalog(trimmed_before: int = 1) -> Catalog:
    topics = tuple(TopicInfo(topic, name, trimmed_before=GLSN(trimmed_before)) for topic, name in ((A, "a"), (B, "b")))
    streams = (stream(LS1, A), stream(LS2, A), stream(LS3, B))
    return Catalog(Revision(1), END, CutTime(1), topics=topics, streams=streams)


def entry(
    where: LogStreamId, glsn: int, count: int, batch: int, *, rows: int = 0, decided: int = 0, run: int = 1
) -> AuditedEntry:
    index = DecisionIndex(decided or 10 * run + batch)
    return AuditedEntry(where, GLSN(glsn), count, RunId(run), BatchNumber(batch), rows or count, index)


def begun(where: LogStreamId, glsn: int, count: int) -> AuditedEntry:
    return AuditedEntry(where, GLSN(glsn), count, RunId(0), BatchNumber(0), 0, DecisionIndex(0))


def described(*runs: RunDescription, last_run: int = 1) -> Description:
    return Description(
        ClusterId(1), "", LeaderEpoch(1), END, CutTime(1), "", (), (), runs=runs, last_run=RunId(last_run)
    )


def run_at(
    batch: int, *published: PublishedGroup, waiting: Sequence[GroupDescription] = (), fenced_by: int = 0
) -> RunDescription:
    return RunDescription(
        RunId(1),
        "q",
        "k",
        1,
        BatchNumber(batch),
        RunId(fenced_by),
        tuple(waiting),
        DecisionIndex(10 + batch),
        published,
    )


TWO = [
    entry(LS1, 5, 3, 0),
    begun(LS3, 8, 2),
    entry(LS3, 10, 2, 0, rows=4),
    entry(LS2, 20, 1, 1),
    entry(LS3, 21, 2, 1),
]
"""Two batches for two topics."""
LAST = run_at(1, PublishedGroup(A, LS2, GLSN(20), 1), PublishedGroup(B, LS3, GLSN(21), 2))


def found(
    entries: Sequence[AuditedEntry],
    description: Description,
    trimmed_before: int = 1,
    unseen: frozenset[TopicId] = frozenset(),
) -> list[tuple[LogStreamId | None, str, str]]:
    published = PublishAudit(catalog(trimmed_before))
    for one in entries:
        published.take(one)
    published.compare(description, unseen)
    assert all(finding.is_damage and finding.node is None for finding in published.findings)
    return [(finding.stream, finding.where, finding.what) for finding in published.findings]


def test_what_is_there_once_and_whole_and_was_decided_is_right() -> None:
    assert found(TWO, described(LAST)) == []
    # Since then, the run has gone on; or it was forgotten.
    assert found(TWO, described(run_at(2, PublishedGroup(A, LS1, GLSN(101), 7)))) == []
    assert found(TWO, described()) == []
    # It is in the log, but that is not decided yet.
    waiting = [GroupDescription("b", LS3, 2, 1, "")]
    assert found(TWO, described(run_at(1, PublishedGroup(A, LS2, GLSN(20), 1), waiting=waiting))) == []
    # A batch without rows.
    assert found(TWO, described(run_at(5))) == []


def test_what_is_trimmed_is_not_missed() -> None:
    assert found(TWO[2:], described(LAST), trimmed_before=10) == []
    assert found(TWO[:0], described(LAST), trimmed_before=90) == []
    ((_, _, what),) = found(TWO[2:], described(LAST), trimmed_before=8)
    assert what == "at GLSN 10: batch 0 of run 1 is not whole: 2 of 4 records are there"


def test_of_a_topic_that_could_not_be_read_nothing_is_missed() -> None:
    assert found(TWO[:4], described(LAST), unseen=frozenset({B})) == []


WRONG: dict[str, tuple[Sequence[AuditedEntry], Description, tuple[LogStreamId, str, str]]] = {
    "twice in one log stream": (
        [*TWO, entry(LS3, 30, 2, 1)],
        described(LAST),
        (LS3, "topic 'b'", "at GLSN 30: batch 1 of run 1 is in the topic twice, also at GLSN 21"),
    ),
    "twice in two": (
        [*TWO, entry(LS1, 30, 1, 1)],
        described(LAST),
        (LS1, "topic 'a'", "at GLSN 30: batch 1 of run 1 is in the topic twice, also at GLSN 20"),
    ),
    "an older one again": (
        [*TWO, entry(LS2, 30, 3, 0)],
        described(LAST),
        (LS2, "topic 'a'", "at GLSN 30: batch 0 of run 1 comes after batch 1, although it was decided before it"),
    ),
    "the end is missing": (
        [begun(LS3, 8, 2)],
        described(),
        (LS3, "topic 'b'", "at GLSN 8: 2 records begin a batch of a run, which does not end"),
    ),
    "something in between": (
        [begun(LS3, 8, 2), entry(LS3, 12, 1, 1)],
        described(),
        (LS3, "topic 'b'", "at GLSN 8: 2 records begin a batch of a run, which does not end"),
    ),
    "too few": (
        [entry(LS3, 8, 2, 0, rows=4)],
        described(),
        (LS3, "topic 'b'", "at GLSN 8: batch 0 of run 1 is not whole: 2 of 4 records are there"),
    ),
    "never decided": (
        [*TWO, entry(LS2, 30, 3, 2)],
        described(LAST),
        (LS2, "topic 'a'", "at GLSN 30: batch 2 of run 1 was never decided: the last batch of this run is 1"),
    ),
    "never opened": (
        [*TWO, entry(LS2, 30, 3, 0, run=2)],
        described(LAST),
        (LS2, "topic 'a'", "at GLSN 30: batch 0 of run 2 was never decided: there has been no such run"),
    ),
    "not for this topic": (
        TWO,
        described(run_at(1, PublishedGroup(A, LS2, GLSN(20), 1))),
        (LS3, "topic 'b'", "at GLSN 21: batch 1 of run 1 was decided, but not for this topic"),
    ),
    "by another decision": (
        [entry(LS2, 20, 1, 1, decided=7)],
        described(run_at(1, PublishedGroup(A, LS2, GLSN(20), 1))),
        (LS2, "topic 'a'", "at GLSN 20: batch 1 of run 1 is from decision 7, but decided by 11"),
    ),
    "by two decisions": (
        [*TWO[:4], entry(LS3, 21, 2, 1, decided=12)],
        described(),
        (LS3, "topic 'b'", "at GLSN 21: batch 1 of run 1 is from decision 12, in another topic from 11"),
    ),
    "decided too early": (
        [entry(LS1, 5, 3, 0, decided=20), entry(LS2, 20, 1, 1, decided=11)],
        described(),
        (LS2, "topic 'a'", "at GLSN 20: batch 1 of run 1 was decided no later than batch 0, which comes before it"),
    ),
    "missing": (
        TWO[:4],
        described(LAST),
        (LS3, "topic 'b'", "batch 1 of run 1 was published at GLSN 21, and is not there"),
    ),
    "elsewhere": (
        [*TWO[:4], entry(LS3, 23, 2, 1)],
        described(LAST),
        (
            LS3,
            "topic 'b'",
            "at GLSN 23: batch 1 of run 1 was published at GLSN 21 of log stream 3 with 2 records, and is elsewhere",
        ),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case: str) -> None:
    entries, description, expected = WRONG[case]
    assert found(entries, description) == [expected]


def test_what_a_dropped_run_was_just_publishing_may_be_there() -> None:
    dropped = structs.replace(LAST, published=LAST.published[:1], fenced_by=RunId(1))
    assert found(TWO, described(dropped)) == []
