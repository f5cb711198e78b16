"""Subscribe: DESIGN §7, sentence by sentence.

“**Subscribe** delivers every committed record of its topics once, in GLSN order, across failover, new streams, sealed
streams and reconnects. It delivers up to a position h only when it knows all its streams at h (catalog revision of the
cut) and each is complete through h, told by a replica that applied h or, if sealed, by the MR; so a stream with nothing
new never holds up the others, and a new one is never skipped.”
"""

from __future__ import annotations

import pytest

from cutwater.core.requests import Catalog, StreamInfo, TopicInfo
from cutwater.core.subscription import ReadAnswer, Run, Subscription
from cutwater.errors import ProtocolViolation, Trimmed
from cutwater.types import GLSN, LLSN, Batch, CutTime, Epoch, LogStreamId, Revision, TopicId
from tests.unit.replica_bench import batch, fence

T, OTHER = TopicId(1), TopicId(2)


def info(stream: int, *, topic: TopicId = T, last_glsn: int = 0, created_at: int = 0) -> StreamInfo:
    return StreamInfo(
        stream=LogStreamId(stream),
        topic=topic,
        epoch=Epoch(1),
        is_open=True,
        final=False,
        chain=(),
        replicas=(),
        committed_end=LLSN(0),
        last_glsn=GLSN(last_glsn),
        created_at=GLSN(created_at),
        created_time=CutTime(0),
    )


def catalog(*streams: StreamInfo, revision: int = 1, high_watermark: int = 0, trimmed: int = 1) -> Catalog:
    topics = (TopicInfo(T, "orders", GLSN(trimmed)), TopicInfo(OTHER, "other", GLSN(1)))
    return Catalog(Revision(revision), GLSN(high_watermark), CutTime(0), topics, streams)


def run(stream: int, llsn: int, glsn: int, of: Batch | None = None) -> Run:
    return Run(LogStreamId(stream), LLSN(llsn), GLSN(glsn), CutTime(glsn), of or batch())


def answer(stream: int, *runs: Run, through: int, revision: int = 1) -> ReadAnswer:
    return ReadAnswer(LogStreamId(stream), runs, GLSN(through), Revision(revision))


def subscribed(*streams: StreamInfo, start: int = 1, high_watermark: int = 0) -> Subscription:
    subscription = Subscription([T], GLSN(start))
    subscription.take_catalog(catalog(*streams, high_watermark=high_watermark))
    return subscription


def glsns(runs: list[Run]) -> list[int]:
    return [glsn for of in runs for glsn in range(of.first_glsn, of.last_glsn + 1)]


def test_two_streams_are_merged_by_glsn() -> None:
    subscription = subscribed(info(1, last_glsn=4), info(2, last_glsn=5), high_watermark=5)
    subscription.take_answer(answer(1, run(1, 1, 1, batch(2)), run(1, 3, 4), through=5))
    assert subscription.take_ready() == [], "the other one is not complete"
    subscription.take_answer(answer(2, run(2, 1, 3), run(2, 2, 5), through=5))
    assert glsns(subscription.take_ready()) == [1, 2, 3, 4, 5]
    assert subscription.take_ready() == []
    assert subscription.next_glsn == 6


def test_nothing_is_delivered_before_the_first_catalog() -> None:
    subscription = Subscription([T], GLSN(1))
    subscription.take_answer(answer(1, run(1, 1, 1), through=1))
    assert subscription.take_ready() == []


# "… a stream with nothing new never holds up the others"


def test_a_quiet_stream_is_complete_by_the_word_of_its_replica() -> None:
    subscription = subscribed(info(1), info(2))
    subscription.take_answer(answer(1, run(1, 1, 1), through=1))
    assert subscription.take_ready() == []
    subscription.take_answer(answer(2, through=9))
    assert glsns(subscription.take_ready()) == [1]


def test_a_sealed_stream_is_complete_by_the_word_of_the_metadata_repository() -> None:
    """“told by a replica that applied h or, if sealed, by the MR”."""
    subscription = subscribed(info(1), info(2))
    subscription.take_answer(answer(1, run(1, 1, 1), run(1, 2, 7), through=7))
    subscription.take_answer(answer(2, run(2, 1, 2), through=2))
    assert glsns(subscription.take_ready()) == [1, 2]
    subscription.take_catalog(catalog(info(1, last_glsn=7), info(2, last_glsn=2), revision=2, high_watermark=8))
    assert glsns(subscription.take_ready()) == [7]


def test_the_metadata_repository_says_nothing_of_records_that_have_not_arrived() -> None:
    subscription = subscribed(info(1, last_glsn=3), info(2), high_watermark=8)
    subscription.take_answer(answer(2, run(2, 1, 9), through=9))
    assert subscription.take_ready() == []
    assert subscription.wants()[0][1] == 1


# "… and a new one is never skipped."


def test_a_position_is_not_delivered_before_all_its_streams_are_known() -> None:
    subscription = subscribed(info(1))
    subscription.take_answer(answer(1, run(1, 1, 1), run(1, 2, 3), through=3, revision=2))
    assert subscription.take_ready() == []
    assert subscription.needs_catalog
    subscription.take_catalog(catalog(info(1, last_glsn=3), info(2, last_glsn=2), revision=2, high_watermark=3))
    assert not subscription.needs_catalog
    assert subscription.take_ready() == []
    subscription.take_answer(answer(2, run(2, 1, 2), through=3, revision=2))
    assert glsns(subscription.take_ready()) == [1, 2, 3]


def test_a_replica_that_does_not_know_its_revision_is_not_believed() -> None:
    subscription = subscribed(info(1))
    subscription.take_answer(answer(1, run(1, 1, 1), through=1, revision=0))
    assert subscription.take_ready() == []
    subscription.take_answer(answer(1, through=1))
    assert glsns(subscription.take_ready()) == [1]


@pytest.mark.parametrize("later", [0, 2])
def test_a_wish_for_a_newer_catalog_is_not_forgotten(later: int) -> None:
    """Whoever speaks of an older revision, or of none, takes nothing back."""
    subscription = subscribed(info(1), info(2))
    subscription.take_answer(answer(1, run(1, 1, 1), through=1, revision=5))
    subscription.take_answer(answer(2, through=1, revision=later))
    assert subscription.wanted_revision == 5
    assert subscription.needs_catalog


def test_a_new_stream_is_complete_through_its_creation() -> None:
    subscription = subscribed(info(1))
    subscription.take_answer(answer(1, run(1, 1, 1), through=4))
    subscription.take_catalog(catalog(info(1, last_glsn=1), info(2, created_at=4, last_glsn=6), revision=2))
    assert glsns(subscription.take_ready()) == [1]
    assert subscription.next_glsn == 5


def test_an_older_catalog_is_ignored() -> None:
    subscription = Subscription([T], GLSN(1))
    subscription.take_catalog(catalog(info(1), info(2, last_glsn=4), revision=3, high_watermark=4))
    subscription.take_catalog(catalog(info(1), revision=2, high_watermark=9))
    assert subscription.ready_through() == 0
    assert subscription.revision == 3


# "… once, in GLSN order, across failover … and reconnects"


def test_what_comes_again_from_another_replica_is_dropped() -> None:
    subscription = subscribed(info(1))
    subscription.take_answer(answer(1, run(1, 1, 1, batch(2)), run(1, 3, 5), through=5))
    subscription.take_answer(answer(1, run(1, 1, 1, batch(2)), through=2))
    subscription.take_answer(answer(1, run(1, 3, 5), run(1, 4, 6), through=6))
    assert glsns(subscription.take_ready()) == [1, 2, 5, 6]


def test_an_answer_in_parts_is_complete_only_as_far_as_it_goes() -> None:
    subscription = subscribed(info(1))
    subscription.take_answer(answer(1, run(1, 1, 1), through=1))
    assert glsns(subscription.take_ready()) == [1]
    subscription.take_answer(answer(1, run(1, 2, 4), through=9))
    assert glsns(subscription.take_ready()) == [4]
    assert [position for _, position in subscription.wants()] == [10]


def test_a_replica_that_leaves_records_out_is_an_alarm() -> None:
    subscription = subscribed(info(1))
    subscription.take_answer(answer(1, run(1, 1, 1), through=1))
    with pytest.raises(ProtocolViolation):
        subscription.take_answer(answer(1, run(1, 3, 5), through=5))


def test_fences_are_left_out() -> None:
    """“Subscribers never see it”; it is a position all the same."""
    subscription = subscribed(info(1))
    subscription.take_answer(answer(1, run(1, 1, 1, fence()), run(1, 2, 2), through=3))
    assert glsns(subscription.take_ready()) == [2]
    assert subscription.next_glsn == 4


def test_other_topics_are_not_asked_and_not_delivered() -> None:
    subscription = subscribed(info(1), info(2, topic=OTHER, last_glsn=3), high_watermark=3)
    assert [of.stream for of, _ in subscription.wants()] == [1]
    subscription.take_answer(answer(2, run(2, 1, 2), through=3))
    subscription.take_answer(answer(1, through=3))
    assert subscription.take_ready() == []
    assert subscription.next_glsn == 4


def test_a_start_in_the_middle_asks_from_there() -> None:
    subscription = subscribed(info(1, last_glsn=9), info(2, last_glsn=4), start=6, high_watermark=9)
    assert [(of.stream, position) for of, position in subscription.wants()] == [(1, 6), (2, 10)]
    subscription.take_answer(answer(1, run(1, 5, 7), run(1, 6, 9), through=9))
    assert glsns(subscription.take_ready()) == [7, 9]


def test_a_deleted_topic_does_not_hold_up_the_others() -> None:
    """Its streams are no longer in the catalog, and nobody will say any more how far they are complete."""
    subscription = Subscription([T, OTHER], GLSN(1))
    subscription.take_catalog(catalog(info(1), info(2, topic=OTHER)))
    deleted = Catalog(Revision(2), GLSN(1), CutTime(0), (TopicInfo(T, "orders", GLSN(1)),), (info(1),))
    subscription.take_catalog(deleted)
    subscription.take_answer(answer(1, run(1, 1, 2), through=2, revision=2))
    assert glsns(subscription.take_ready()) == [2]


# Trim (§5): "a later read below it answers trimmed with the first GLSN that is left".


def test_a_subscription_below_the_trim_position_is_told() -> None:
    subscription = Subscription([T], GLSN(3))
    with pytest.raises(Trimmed) as caught:
        subscription.take_catalog(catalog(info(1, last_glsn=9), high_watermark=9, trimmed=5))
    assert (caught.value.asked, caught.value.first_left) == (3, 5)


def test_a_subscription_at_or_above_the_trim_position_goes_on() -> None:
    for start in (5, 6):
        subscription = Subscription([T], GLSN(start))
        subscription.take_catalog(catalog(info(1, last_glsn=9), high_watermark=9, trimmed=5))
        assert subscription.wants()[0][1] == start


def test_a_subscription_that_has_delivered_what_is_trimmed_goes_on() -> None:
    subscription = subscribed(info(1))
    subscription.take_answer(answer(1, run(1, 1, 1, batch(4)), through=4))
    subscription.take_ready()
    subscription.take_catalog(catalog(info(1, last_glsn=4), revision=2, high_watermark=4, trimmed=5))
    assert subscription.next_glsn == 5


def test_the_trim_of_another_topic_is_no_concern() -> None:
    subscription = Subscription([OTHER], GLSN(1))
    subscription.take_catalog(catalog(info(1), trimmed=5))
    assert subscription.revision == 1
