"""Which reports count (docs/protocol.md), on the book that keeps them."""

from __future__ import annotations

from msgspec import structs
from order_driver import LEADER, LS1, LS2, N1, N2, ur

from cutwater.core.order.planning.reports import ReportBook
from cutwater.types import GLSN, Incarnation, NodeState, Report, StorageNodeId, UncommitReport


def report(
    node: StorageNodeId, incarnation: int, sequence: int, *reports: UncommitReport, state: NodeState = NodeState.READY
) -> Report:
    return Report(node, Incarnation(incarnation), sequence, LEADER, state, reports, GLSN(0), ())


def test_only_the_newest_counts() -> None:
    book = ReportBook()
    assert book.admit(report(N1, 1, 5, ur(LS1, end=5)))
    for incarnation, sequence in ((1, 5), (1, 4), (0, 99)):
        assert not book.admit(report(N1, incarnation, sequence, ur(LS1, end=9)))
    assert book.of(LS1, N1) == ur(LS1, end=5)
    assert book.admit(report(N2, 0, 1, ur(LS1, end=2))), "each node counts for itself"
    assert book.admit(report(N1, 2, 1, ur(LS1, end=1))), "a new incarnation starts counting anew"
    assert book.of(LS1, N1) == ur(LS1, end=1)


def test_what_the_newest_leaves_out_is_not_known_any_more() -> None:
    book = ReportBook()
    book.admit(report(N1, 1, 1, ur(LS1, end=5), ur(LS2, end=5)))
    book.admit(report(N2, 1, 1, ur(LS1, end=6)))
    book.admit(report(N1, 1, 2, ur(LS2, end=5)))
    assert book.of(LS1, N1) is None
    assert book.of(LS1, N2) == ur(LS1, end=6)


def test_a_seal_or_unseal_voids_what_was_said_of_that_stream() -> None:
    book = ReportBook()
    for node in (N1, N2):
        book.admit(report(node, 1, 1, ur(LS1, end=5), ur(LS2, end=7)))
    book.void(LS1)
    assert [book.of(LS1, node) for node in (N1, N2)] == [None, None]
    assert book.of(LS2, N1) == ur(LS2, end=7)
    assert not book.admit(report(N1, 1, 1, ur(LS1, end=5))), "the same report again does not bring it back"
    assert book.admit(report(N1, 1, 2, ur(LS1, end=5)))
    assert book.of(LS1, N1) == ur(LS1, end=5)


def test_a_removed_node_is_forgotten() -> None:
    book = ReportBook()
    book.admit(report(N1, 1, 7, ur(LS1, end=5)))
    book.forget(N1)
    book.forget(N2)
    assert (book.newest(N1), book.of(LS1, N1)) == (None, None)
    assert book.admit(report(N1, 1, 1, ur(LS1, end=0))), "it may come back as another"


def test_a_full_disk_is_not_writable() -> None:
    book = ReportBook()
    assert not book.is_writable(N1)
    book.admit(report(N1, 1, 1))
    assert book.is_writable(N1)
    book.admit(report(N1, 1, 2, state=NodeState.READ_ONLY))
    assert not book.is_writable(N1)


def test_what_is_new_in_a_report() -> None:
    """The leader looks at this and at nothing else, so nothing may be missing from it."""
    book = ReportBook()
    first, second = ur(LS1, end=5), ur(LS2, end=5)

    def changed(said: Report) -> tuple[UncommitReport, ...]:
        admitted = book.admit(said)
        assert admitted is not None
        return admitted.changed

    assert changed(report(N1, 1, 1, first, second)) == (first, second)
    assert changed(report(N1, 1, 2, first, second)) == ()
    assert changed(report(N1, 1, 3, first, ur(LS2, end=6))) == (ur(LS2, end=6),)
    assert changed(report(N1, 1, 4, first)) == ()
    assert changed(report(N1, 1, 5, first, second)) == (second,), "it was left out in between"
    book.void(LS1)
    assert changed(report(N1, 1, 6, first, second)) == (first,), "what was voided has to be said again"
    assert changed(report(N1, 2, 1, first, second)) == (first, second), "another incarnation, another replica"
    assert book.admit(report(N1, 2, 1, first, second)) is None


def test_whether_a_node_is_another_one_than_before() -> None:
    book = ReportBook()

    def kind(said: Report) -> tuple[bool, bool]:
        admitted = book.admit(said)
        assert admitted is not None
        return admitted.is_other, admitted.is_restart

    assert kind(report(N1, 1, 1, ur(LS1, end=5))) == (True, False), "nothing was known of it"
    assert kind(report(N1, 1, 2, ur(LS1, end=6))) == (False, False)
    assert kind(report(N1, 1, 3, ur(LS1, end=6), ur(LS2, end=1))) == (True, False)
    assert kind(report(N1, 1, 4, ur(LS2, end=1), ur(LS1, end=7))) == (False, False), "in whatever order"
    assert kind(report(N1, 1, 5, ur(LS2, end=1))) == (True, False)
    assert kind(structs.replace(report(N1, 1, 6, ur(LS2, end=1)), invalid=(LS1,))) == (True, False)
    assert kind(structs.replace(report(N1, 1, 7, ur(LS2, end=1)), invalid=(LS1,))) == (False, False)
    assert kind(structs.replace(report(N1, 2, 1, ur(LS2, end=1)), invalid=(LS1,))) == (True, True)


def test_what_a_report_leaves_out() -> None:
    book = ReportBook()
    assert book.left_out(N1, (LS1, LS2)) == [], "nothing is known of a node that has not reported"
    book.admit(report(N1, 1, 1, ur(LS1, end=5)))
    assert book.left_out(N1, (LS1, LS2)) == [LS2]
    assert book.reported(N1) == {LS1}
