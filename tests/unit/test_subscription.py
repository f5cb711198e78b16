"""Subscribe, rule by rule (docs/clients.md).

“**Subscribe** delivers every committed record of its topics once, in GLSN order, across failover, new streams, sealed
streams and reconnects. It delivers up to a position h only when it knows all its streams at h (catalog revision of the
cut) and each is complete through h, told by a replica that applied h or, if sealed, by the MR; so a stream with nothing
new never holds up the others, and a new one is never skipped.”
"""

from __future__ import annotations

import pytest

from cutwater.core.read.merge_reader import CommittedBatch, MergeReader, ReadAnswer
from cutwater.core.requests import Catalog, StreamInfo, TopicInfo
from cutwater.errors import NotFound, ProtocolViolation, Trimmed
from cutwater.types import GLSN, LLSN, Batch, CutTime, Epoch, LogStreamId, Revision, TopicId
from tests.unit.replica_bench import batch, fence

T, OTHER = TopicId(1), TopicId(2)


def info(
    stream: int,
    *,
    topic: TopicId = T,
    last_glsn: int = 0,
    created_at: int = 0,
    is_open: bool = True,
) -> StreamInfo:
    return StreamInfo(
        stream=LogStreamId(stream),
        topic=topic,
        epoch=Epoch(1),
        is_open=is_open,
        final=False,
        chain=(),
        replicas=(),
        committed_end=LLSN(0),
        last_glsn=GLSN(last_glsn),
        created_at=GLSN(created_at),
        created_time=CutTime(0),
    )


def catalog(
    *streams: StreamInfo, revision: int = 1, high_watermark: int = 0, trimmed: int = 1, gone: TopicId | None = None
) -> Catalog:
    topics = tuple(
        TopicInfo(topic, name, GLSN(before))
        for topic, name, before in ((T, "orders", trimmed), (OTHER, "other", 1))
        if topic != gone
    )
    return Catalog(Revision(revision), GLSN(high_watermark), CutTime(0), topics, streams)


def run(stream: int, llsn: int, glsn: int, of: Batch | None = None) -> CommittedBatch:
    return CommittedBatch(LogStreamId(stream), LLSN(llsn), GLSN(glsn), CutTime(glsn), of or batch())


def answer(stream: int, *runs: CommittedBatch, through: int, revision: int = 1) -> ReadAnswer:
    return ReadAnswer(LogStreamId(stream), runs, GLSN(through), Revision(revision))


def subscribed(
    *streams: StreamInfo, start: int = 1, high_watermark: int = 0, stop: int | None = None, bytes_max: int = 10_000
) -> MergeReader:
    end = None if stop is None else GLSN(stop)
    subscription = MergeReader([T], GLSN(start), stop=end, bytes_max=bytes_max)
    subscription.take_catalog(catalog(*streams, high_watermark=high_watermark))
    return subscription


def glsns(runs: list[CommittedBatch]) -> list[int]:
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
    subscription = MergeReader([T], GLSN(1))
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
    sealed = info(2, last_glsn=2, is_open=False)
    subscription.take_catalog(catalog(info(1, last_glsn=7), sealed, revision=2, high_watermark=8))
    assert glsns(subscription.take_ready()) == [7]
    subscription.take_answer(answer(1, run(1, 3, 9), through=9, revision=2))
    assert glsns(subscription.take_ready()) == [9], "to open it again would have made another catalog"
    subscription.take_answer(answer(1, run(1, 4, 11), through=11, revision=3))
    assert subscription.take_ready() == []


def test_a_sealed_stream_is_read_to_its_end_and_no_further() -> None:
    subscription = subscribed(info(1), info(2, last_glsn=2, is_open=False), high_watermark=3)
    assert [of.stream for of, _ in subscription.wants()] == [1, 2]
    subscription.take_answer(answer(2, run(2, 1, 2), through=2))
    assert [of.stream for of, _ in subscription.wants()] == [1]
    assert subscription.want(LogStreamId(2)) is None


def test_when_only_the_metadata_repository_can_tell_a_catalog_is_needed() -> None:
    """Nobody who could be read from says how far the log has come."""
    subscription = MergeReader([T], GLSN(1))
    assert subscription.needs_catalog
    subscription.take_catalog(catalog(info(1)))
    assert not subscription.needs_catalog
    subscription.take_catalog(catalog(info(1, is_open=False), revision=2))
    assert subscription.needs_catalog


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
    assert subscription.needs_catalog
    subscription.take_answer(answer(1, through=1))
    assert glsns(subscription.take_ready()) == [1]


def test_what_lies_below_the_catalogs_high_watermark_needs_no_revision() -> None:
    """All streams that exist down there are in the catalog, so a long log is read without asking for another one."""
    subscription = subscribed(info(1, last_glsn=9), high_watermark=5)
    subscription.take_answer(answer(1, run(1, 1, 1, batch(3)), through=0, revision=0))
    assert glsns(subscription.take_ready()) == [1, 2, 3]
    subscription.take_answer(answer(1, run(1, 4, 4, batch(2)), run(1, 6, 6, batch(3)), through=8, revision=7))
    assert glsns(subscription.take_ready()) == [4, 5]
    assert subscription.needs_catalog


def test_what_a_replica_said_under_a_newer_catalog_need_not_be_said_again() -> None:
    subscription = subscribed(info(1))
    subscription.take_answer(answer(1, run(1, 1, 1), through=4, revision=2))
    subscription.take_catalog(catalog(info(1, last_glsn=9), revision=2, high_watermark=9))
    assert glsns(subscription.take_ready()) == [1]
    assert subscription.next_glsn == 5


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
    subscription = MergeReader([T], GLSN(1))
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
    subscription = MergeReader([T, OTHER], GLSN(1))
    subscription.take_catalog(catalog(info(1), info(2, topic=OTHER)))
    assert subscription.take_ended() == {}
    for _ in range(2):
        subscription.take_catalog(catalog(info(1), revision=2, high_watermark=1, gone=OTHER))
    assert subscription.take_ended() == {OTHER: 1}, "its end is visible"
    assert subscription.take_ended() == {}
    subscription.take_answer(answer(1, run(1, 1, 2), through=2, revision=2))
    assert glsns(subscription.take_ready()) == [2]


def test_a_subscription_without_topics_is_over() -> None:
    subscription = subscribed(info(1))
    with pytest.raises(NotFound):
        subscription.take_catalog(catalog(revision=2, gone=T))
    with pytest.raises(NotFound):
        MergeReader([TopicId(9)], GLSN(1)).take_catalog(catalog(info(1)))


def test_topics_may_come_and_go_by_a_pattern() -> None:
    """Whoever knows the pattern says which topics it means in a catalog. With none, the position goes on all the
    same."""
    subscription = MergeReader([], GLSN(1))
    subscription.take_catalog(catalog(high_watermark=4, gone=T))
    assert (subscription.take_ready(), subscription.next_glsn) == ([], 5)
    assert subscription.needs_catalog
    subscription.topics = frozenset([T])
    subscription.take_catalog(catalog(info(1, created_at=6, last_glsn=7), revision=2, high_watermark=7))
    subscription.take_answer(answer(1, run(1, 1, 7), through=7, revision=2))
    assert glsns(subscription.take_ready()) == [7]
    subscription.topics = frozenset()
    subscription.take_catalog(catalog(revision=3, high_watermark=9, gone=T))
    assert subscription.take_ended() == {T: 8}
    assert (subscription.take_ready(), subscription.next_glsn) == ([], 10)


# Guarantee 16: "memory and queues are bounded".


def test_a_fast_stream_is_not_read_ahead_without_limit() -> None:
    """While a slow one holds the merge up. The slow one may always be read, or nothing would ever be ready."""
    subscription = subscribed(info(1), info(2), bytes_max=1_500)
    one, two = LogStreamId(1), LogStreamId(2)
    for glsn in (1, 2):
        assert subscription.has_room(one)
        subscription.take_answer(answer(1, run(1, glsn, glsn, batch(1, bytes(400))), through=glsn))
    assert not subscription.has_room(one)
    assert subscription.has_room(two)
    subscription.take_answer(answer(2, through=1))
    assert glsns(subscription.take_ready()) == [1]
    assert subscription.has_room(one)


def test_what_is_left_of_a_deleted_topic_takes_no_room() -> None:
    subscription = MergeReader([T, OTHER], GLSN(1), bytes_max=1_000)
    subscription.take_catalog(catalog(info(1), info(2, topic=OTHER)))
    subscription.take_answer(answer(2, run(2, 1, 2, batch(1, bytes(2_000))), through=2))
    subscription.take_answer(answer(1, run(1, 1, 1), through=0))
    assert not subscription.has_room(LogStreamId(1))
    subscription.take_catalog(catalog(info(1), revision=2, gone=OTHER))
    assert subscription.has_room(LogStreamId(1))


# A last position.


def test_a_subscription_ends_after_its_last_position() -> None:
    subscription = subscribed(info(1), info(2), stop=3)
    subscription.take_answer(answer(1, run(1, 1, 1), run(1, 2, 4), through=9))
    assert [of.stream for of, _ in subscription.wants()] == [2]
    assert subscription.take_ready() == []
    assert not subscription.is_finished
    subscription.take_answer(answer(2, run(2, 1, 2, batch(2)), run(2, 3, 5), through=5))
    assert glsns(subscription.take_ready()) == [1, 2, 3]
    assert subscription.is_finished
    assert subscription.wants() == []
    assert not subscription.needs_catalog
    assert subscription.take_ready() == []


def test_a_last_position_inside_a_batch_hands_the_batch_on() -> None:
    """Runs are handed on whole; whoever wants less of them cuts it off, as at the start."""
    subscription = subscribed(info(1), start=2, stop=5)
    subscription.take_answer(answer(1, run(1, 1, 1, batch(3)), run(1, 4, 4, batch(3)), through=6))
    assert glsns(subscription.take_ready()) == [1, 2, 3, 4, 5, 6]
    assert subscription.next_glsn == 6
    assert subscription.is_finished


# Trim: "a later read below it answers trimmed with the first GLSN that is left".


def trimmed_at(subscription: MergeReader) -> tuple[int, int]:
    with pytest.raises(Trimmed) as caught:
        subscription.take_ready()
    return caught.value.asked, caught.value.first_left


def test_a_subscription_below_the_trim_position_is_told() -> None:
    subscription = MergeReader([T], GLSN(3))
    subscription.take_catalog(catalog(info(1, last_glsn=9), high_watermark=9, trimmed=5))
    assert trimmed_at(subscription) == (3, 5)


def test_whoever_can_do_without_what_was_trimmed_goes_on() -> None:
    subscription = MergeReader([T], GLSN(3))
    subscription.take_catalog(catalog(info(1, last_glsn=9), high_watermark=9, trimmed=5))
    trimmed_at(subscription)
    assert [position for _, position in subscription.wants()] == [5]
    subscription.take_answer(answer(1, run(1, 5, 6), run(1, 6, 9), through=9))
    assert glsns(subscription.take_ready()) == [6, 9]


def test_a_topic_that_lost_nothing_is_not_concerned_by_the_trim_of_another() -> None:
    """Its records come in order, before and after the gap."""
    subscription = MergeReader([T, OTHER], GLSN(1))
    both = (info(1, last_glsn=7), info(2, topic=OTHER, last_glsn=8))
    subscription.take_catalog(catalog(*both, high_watermark=8))
    subscription.take_answer(answer(2, run(2, 1, 2), run(2, 2, 4), run(2, 3, 8), through=8))
    subscription.take_answer(answer(1, run(1, 1, 1), through=2))
    assert glsns(subscription.take_ready()) == [1, 2]
    subscription.take_catalog(catalog(*both, revision=2, high_watermark=8, trimmed=6))
    assert trimmed_at(subscription) == (3, 6)
    assert glsns(subscription.take_ready()) == [4]
    subscription.take_answer(answer(1, run(1, 5, 7), through=8))
    assert glsns(subscription.take_ready()) == [7, 8]


def test_what_arrived_before_the_trim_is_handed_on_before_anyone_is_told() -> None:
    subscription = subscribed(info(1, last_glsn=9), info(2, last_glsn=3), high_watermark=9)
    subscription.take_answer(answer(1, run(1, 1, 1), run(1, 2, 2), through=2))
    subscription.take_trimmed(LogStreamId(1), GLSN(6))
    assert subscription.take_ready() == [], "the other stream comes first"
    subscription.take_answer(answer(2, run(2, 1, 3), through=9))
    assert glsns(subscription.take_ready()) == [1, 2]
    assert trimmed_at(subscription) == (3, 6)
    assert glsns(subscription.take_ready()) == [3]
    subscription.take_trimmed(LogStreamId(1), GLSN(6))
    subscription.take_trimmed(LogStreamId(8), GLSN(9))
    assert subscription.take_ready() == []


def test_streams_with_nothing_down_there_are_not_trimmed() -> None:
    subscription = MergeReader([T], GLSN(3))
    later = info(2, created_at=4, last_glsn=9)
    subscription.take_catalog(catalog(info(1, last_glsn=2), later, high_watermark=9, trimmed=5))
    assert subscription.take_ready() == []


def test_a_topic_may_be_wanted_from_a_later_position_on() -> None:
    """Who begins with the earliest record of each topic asks for nothing that is trimmed."""
    subscription = MergeReader([T, OTHER], GLSN(1), {T: GLSN(5)})
    streams = (info(1, last_glsn=9), info(2, topic=OTHER, last_glsn=8))
    subscription.take_catalog(catalog(*streams, high_watermark=9, trimmed=5))
    assert [(of.stream, position) for of, position in subscription.wants()] == [(1, 5), (2, 1)]
    assert subscription.take_ready() == []


def test_a_subscription_at_or_above_the_trim_position_goes_on() -> None:
    for start in (5, 6):
        subscription = MergeReader([T], GLSN(start))
        subscription.take_catalog(catalog(info(1, last_glsn=9), high_watermark=9, trimmed=5))
        assert subscription.wants()[0][1] == start


def test_a_subscription_that_has_delivered_what_is_trimmed_goes_on() -> None:
    subscription = subscribed(info(1))
    subscription.take_answer(answer(1, run(1, 1, 1, batch(4)), through=4))
    subscription.take_ready()
    subscription.take_catalog(catalog(info(1, last_glsn=4), revision=2, high_watermark=4, trimmed=5))
    assert subscription.next_glsn == 5


def test_the_trim_of_another_topic_is_no_concern() -> None:
    subscription = MergeReader([OTHER], GLSN(1))
    subscription.take_catalog(catalog(info(1), trimmed=5))
    assert subscription.revision == 1
