"""Reports as changes to a whole one that the leader holds, and lists of members (ADR 0049): both ends together."""

from __future__ import annotations

from random import Random

import pytest
from msgspec import UNSET, structs
from order_driver import LEADER, LS1, LS2, LS3, N1, SEALED, ur

from cutwater.core.messages import LeaderHello
from cutwater.core.order.planning.reports import Admitted, ReportBook
from cutwater.storagenode.report_writer import (
    LISTED_PER_REPLICA_MAX,
    NODES_PER_TICK,
    OFFER_AGAIN_REPORTS,
    TICKS_MAX,
    Cadence,
    MemberLists,
    NodeCondition,
    ReportWriter,
)
from cutwater.types import (
    GLSN,
    Incarnation,
    LeaderEpoch,
    LogStreamId,
    NodeState,
    Report,
    Revision,
    UncommitReport,
)

I1 = Incarnation(1)
READY = NodeCondition(LEADER, NodeState.READY)
TWO = (ur(LS1, end=5), ur(LS2, end=7))


def held(reports: tuple[UncommitReport, ...] = TWO) -> tuple[ReportWriter, ReportBook]:
    """A writer whose first report the book holds, and which knows it."""
    writer, book = ReportWriter(N1, I1, 1), ReportBook()
    book.admit(writer.write(reports, READY))
    writer.hear(LeaderHello(LEADER, (I1, book.holds(N1, I1))))
    return writer, book


def test_the_first_report_is_whole_and_later_ones_list_what_differs_from_it() -> None:
    writer, _ = held()
    assert writer.write(TWO, READY).uncommit_reports == ()
    changed = ur(LS2, end=8)
    for _ in range(2):
        report = writer.write((TWO[0], changed), READY)
        assert (report.base, report.uncommit_reports) == (1, (changed,)), "each lists all that differs from the base"


def test_a_node_with_few_replicas_reports_as_ever() -> None:
    writer = ReportWriter(N1, I1, 3)
    writer.hear(LeaderHello(LEADER, (I1, 0)))
    assert [writer.write(TWO, READY).base for _ in range(3)] == [UNSET] * 3


def test_without_a_word_of_the_leader_every_report_is_whole() -> None:
    writer = ReportWriter(N1, I1, 1)
    bases = []
    for _ in range(OFFER_AGAIN_REPORTS + 2):
        report = writer.write(TWO, READY)
        assert report.uncommit_reports == TWO
        bases.append(report.base)
    assert bases == [1, *[0] * OFFER_AGAIN_REPORTS, OFFER_AGAIN_REPORTS + 2], "an offer may be lost"


@pytest.mark.parametrize(
    "hello",
    [
        LeaderHello(LEADER),
        LeaderHello(LEADER, (I1, 0)),
        LeaderHello(LEADER, (I1, 2)),
        LeaderHello(LEADER, (Incarnation(2), 1)),
        LeaderHello(LeaderEpoch(LEADER - 1), (I1, 1)),
        LeaderHello(LeaderEpoch(LEADER + 1), (I1, 1)),
    ],
)
def test_only_the_present_leaders_word_about_this_very_report_counts(hello: LeaderHello) -> None:
    writer = ReportWriter(N1, I1, 1)
    writer.write(TWO, READY)
    writer.hear(hello)
    assert writer.write(TWO, READY).uncommit_reports == TWO


def test_another_leader_or_other_replicas_get_a_whole_report() -> None:
    for reports, condition in (
        (TWO, structs.replace(READY, leader_epoch=LeaderEpoch(LEADER + 1))),
        (TWO[:1], READY),
        ((*TWO, ur(LS3, end=1)), READY),
        ((TWO[0], ur(LS3, end=1)), READY),
    ):
        writer, _ = held()
        report = writer.write(reports, condition)
        assert (report.base, report.uncommit_reports) == (report.sequence, reports)
        following = writer.write(reports, condition)
        assert (following.base, following.uncommit_reports) == (0, reports), "the new base is not held yet"


def test_a_leader_that_lost_the_base_gets_a_whole_report() -> None:
    writer, _ = held()
    writer.hear(LeaderHello(LEADER, (I1, 0)))
    report = writer.write(TWO, READY)
    assert (report.base, report.uncommit_reports) == (report.sequence, TWO)


def test_a_base_is_renewed_when_reports_on_it_have_become_long() -> None:
    writer, _ = held()
    changed = (ur(LS1, end=6), ur(LS2, end=8))
    lengths = [len(writer.write(changed, READY).uncommit_reports) for _ in range(LISTED_PER_REPLICA_MAX)]
    assert lengths == [2] * LISTED_PER_REPLICA_MAX
    renewed = writer.write(changed, READY)
    assert renewed.base == renewed.sequence


def test_a_late_word_about_an_earlier_base_changes_nothing() -> None:
    writer, book = held()
    late = LeaderHello(LEADER, (I1, book.holds(N1, I1)))
    three = (*TWO, ur(LS3, end=1))
    book.admit(writer.write(three, READY))
    writer.hear(LeaderHello(LEADER, (I1, book.holds(N1, I1))))
    writer.hear(late)
    writer.hear(LeaderHello(LEADER, (Incarnation(0), 5)))
    report = writer.write(three, READY)
    assert (report.base, report.uncommit_reports) == (2, ())


def test_a_node_that_takes_a_later_incarnation_begins_anew() -> None:
    writer, book = held()
    writer.incarnation = Incarnation(2)
    writer.hear(LeaderHello(LEADER, (I1, 1)))
    report = writer.write(TWO, READY)
    assert (report.incarnation, report.base, report.uncommit_reports) == (Incarnation(2), report.sequence, TWO)
    admitted = book.admit(report)
    assert admitted is not None
    assert admitted.is_restart
    assert book.holds(N1, Incarnation(2)) == report.sequence
    few = ReportWriter(N1, I1, 2)
    assert few.write(TWO, READY).base == 1
    few.incarnation = Incarnation(2)
    assert few.write(TWO[:1], READY).base is UNSET, "this incarnation has offered nothing"


def test_a_report_that_lost_its_base_on_the_way_counts_for_nothing() -> None:
    """A metadata node of an earlier version passes on only the fields that it knows."""
    writer, book = held()
    partial = structs.replace(writer.write((TWO[0], ur(LS2, end=9)), READY), base=UNSET)
    assert not book.is_complete(partial)
    assert book.admit(partial) is None
    assert (book.of(LS1, N1), book.of(LS2, N1), book.reported(N1)) == (*TWO, frozenset({LS1, LS2}))
    few = ReportWriter(N1, I1, 2)
    assert [few.write(TWO, READY).base, few.write(TWO[:1], READY).base] == [1, 0], "a whole one says so from then on"
    restarted = ReportWriter(N1, Incarnation(2), 3).write(TWO[:1], READY)
    assert restarted.base is UNSET
    assert book.admit(restarted) is not None, "another incarnation has offered nothing"


def test_the_word_that_a_node_says_its_base_outlives_the_base() -> None:
    writer, book = held()
    partial = structs.replace(writer.write((TWO[0], ur(LS2, end=9)), READY), base=UNSET)
    other = structs.replace(READY, invalid=(LS3,))
    whole = structs.replace(ReportWriter(N1, I1, 9).write(TWO[:1], other), sequence=2, base=0)
    assert book.admit(whole) is not None
    assert book.holds(N1, I1) == 0
    assert book.admit(structs.replace(partial, sequence=5)) is None


def test_the_book_takes_no_report_on_a_base_that_it_does_not_hold() -> None:
    writer, book = held()
    report = writer.write((TWO[0], ur(LS2, end=9)), READY)
    for strange in (
        structs.replace(report, base=7),
        structs.replace(report, incarnation=Incarnation(2)),
        structs.replace(report, uncommit_reports=(ur(LS3, end=9),)),
    ):
        assert book.admit(strange) is None
        assert not book.is_complete(strange)
    assert book.of(LS2, N1) == TWO[1]
    assert ReportBook().admit(report) is None, "a new leader holds no base"
    admitted = book.admit(report)
    assert admitted is not None
    assert admitted.changed == (ur(LS2, end=9),)
    assert book.admit(report) is None, "a repeated one changes nothing"


def test_what_was_voided_comes_back_with_the_next_report_although_it_is_not_listed() -> None:
    writer, book = held()
    book.void(LS1)
    assert book.of(LS1, N1) is None
    admitted = book.admit(writer.write(TWO, READY))
    assert admitted is not None
    assert admitted.changed == (TWO[0],)
    assert book.of(LS1, N1) == TWO[0]


def test_what_is_no_longer_listed_is_as_in_the_base() -> None:
    writer, book = held()
    book.admit(writer.write((ur(LS1, end=5, state=SEALED), TWO[1]), READY))
    book.admit(writer.write(TWO, READY))
    assert book.of(LS1, N1) == TWO[0]
    assert book.said_by(N1) == list(TWO)


def test_a_list_of_members_is_known_by_its_name_and_never_older() -> None:
    lists = MemberLists()
    old, new = (LEADER, Revision(3)), (LEADER, Revision(4))
    assert lists.others(old, ()) == []
    lists.learn(new, (LS1, LS2))
    lists.learn(old, (LS1, LS2, LS3))
    assert lists.name == new
    assert lists.others(old, ()) == [], "nothing is said about streams of another list"
    assert lists.others(new, (LS2,)) == [LS1]
    lists.learn((LeaderEpoch(LEADER + 1), Revision(4)), (LS3,))
    assert lists.others(new, ()) == []


class Whole:
    """The dumb oracle: a book that gets whole reports only."""

    def __init__(self) -> None:
        self.book = ReportBook()

    def admit(self, report: Report, said: tuple[UncommitReport, ...]) -> Admitted | None:
        return self.book.admit(structs.replace(report, uncommit_reports=said, base=UNSET))


@pytest.mark.parametrize("seed", range(150))
def test_reports_of_changes_are_admitted_as_the_whole_ones_that_they_stand_for(seed: int) -> None:
    """Messages in both directions are lost, repeated and reordered; nodes and leaders change. To replay, name the test
    with its seed in brackets."""
    random = Random(f"reports/{seed}")
    streams = [LogStreamId(n) for n in range(1, random.randint(3, 9))]
    leader, incarnation = LEADER, 1
    writer, book, oracle = ReportWriter(N1, I1, 1), ReportBook(), Whole()
    state = {lsid: ur(lsid, end=0) for lsid in streams}
    ways: list[tuple[Report, tuple[UncommitReport, ...]]] = []
    hellos: list[LeaderHello] = []
    heard, partial = leader, 0
    for _ in range(250):
        chance = random.random()
        lsid = random.choice(streams)
        if chance < 0.25 and lsid in state:
            before = state[lsid].durable_end
            state[lsid] = ur(lsid, end=random.choice((before + 1, before, 3)), state=random.choice(list(type(SEALED))))
        elif chance < 0.28:
            if state.pop(lsid, None) is None:
                state[lsid] = ur(lsid, end=1)
        elif chance < 0.33:
            book.void(lsid)
            oracle.book.void(lsid)
        elif chance < 0.34:
            incarnation += 1
            writer = ReportWriter(N1, Incarnation(incarnation), 1)
        elif chance < 0.36:
            leader = LeaderEpoch(leader + 1)
            book, oracle = ReportBook(), Whole()
        elif chance < 0.60:
            said = tuple(state[known] for known in sorted(state))
            report = writer.write(said, NodeCondition(heard, NodeState.READY, GLSN(0)))
            partial += report.base not in (UNSET, report.sequence)
            ways += [(report, said)] * random.choice((0, 1, 1, 1, 2))
        elif chance < 0.85 and ways:
            report, said = ways.pop(random.randrange(min(3, len(ways))))
            if report.leader_epoch != leader:
                hellos.append(LeaderHello(leader))
                continue
            if not book.is_new(report):
                assert oracle.admit(report, said) is None
                continue
            if not book.is_complete(report):
                hellos.append(LeaderHello(leader, (report.incarnation, book.holds(N1, report.incarnation))))
                continue
            mine, theirs = book.admit(report), oracle.admit(report, said)
            assert mine is not None
            assert theirs is not None
            # The oracle may have admitted fewer reports, never more: what is new is at most what is new to it.
            assert {ur.log_stream_id: ur for ur in mine.changed} == {ur.log_stream_id: ur for ur in theirs.changed}
            assert (mine.is_other, mine.is_restart) == (theirs.is_other, theirs.is_restart)
            if report.base is not UNSET:
                hellos.append(LeaderHello(leader, (report.incarnation, book.holds(N1, report.incarnation))))
        elif hellos:
            hello = hellos[random.randrange(min(3, len(hellos)))]
            if random.random() < 0.7:
                hellos.remove(hello)
            writer.hear(hello)
            heard = max(heard, hello.leader_epoch)
        for known in streams:
            assert book.of(known, N1) == oracle.book.of(known, N1)
        assert book.reported(N1) == oracle.book.reported(N1)
        assert sorted(book.said_by(N1), key=lambda ur: ur.log_stream_id) == sorted(
            oracle.book.said_by(N1), key=lambda ur: ur.log_stream_id
        )


@pytest.mark.parametrize(
    ("nodes", "every"), [(1, 1), (NODES_PER_TICK, 1), (2 * NODES_PER_TICK, 2), (100 * NODES_PER_TICK, TICKS_MAX)]
)
def test_one_of_many_nodes_says_less_often_that_nothing_has_changed(nodes: int, every: int) -> None:
    cadence = Cadence()
    cadence.nodes = nodes
    cadence.note(list(TWO), READY)
    sent = []
    for _ in range(3 * TICKS_MAX):
        sent.append(cadence.is_due(list(TWO), READY))
        if sent[-1]:
            cadence.note(list(TWO), READY)
    assert sent[: 2 * every] == ([False] * (every - 1) + [True]) * 2


def test_one_of_many_nodes_reports_each_change_at_the_next_tick() -> None:
    cadence = Cadence()
    cadence.nodes = 100 * NODES_PER_TICK
    assert cadence.is_due(list(TWO), READY), "the first one is news"
    cadence.note(list(TWO), READY)
    assert not cadence.is_due(list(TWO), READY)
    for condition in (
        structs.replace(READY, leader_epoch=LeaderEpoch(9)),
        structs.replace(READY, node_state=NodeState.READ_ONLY),
        structs.replace(READY, invalid=(LS3,)),
        structs.replace(READY, is_followed=True),
        structs.replace(READY, members=(LEADER, Revision(1))),
    ):
        assert cadence.is_due(list(TWO), condition)
    assert cadence.is_due([TWO[0], ur(LS2, end=8)], READY)
    assert cadence.is_due([TWO[0]], READY)
    cadence.note(list(TWO), READY)
    assert not cadence.is_due(list(TWO), structs.replace(READY, applied_high_watermark=GLSN(9)))


def test_a_writer_waits_for_the_leader_until_that_holds_the_base() -> None:
    writer = ReportWriter(N1, I1, 1)
    assert not writer.is_waiting
    writer.write(TWO, READY)
    assert writer.is_waiting
    writer.hear(LeaderHello(LEADER, (I1, 1)))
    assert not writer.is_waiting
    writer.hear(LeaderHello(LEADER, (I1, 0)))
    assert writer.is_waiting
