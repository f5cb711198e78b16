"""What a replica that is behind is told, with exact numbers (docs/protocol.md)."""

from __future__ import annotations

import pytest

from cutwater.core.order.history import CommitHistory
from cutwater.errors import ProtocolViolation
from cutwater.types import GLSN, LLSN, CommitContext, CutTime, Epoch


def context(first_llsn: int, first_glsn: int, count: int, *, hwm: int, prev: int) -> CommitContext:
    return CommitContext(Epoch(1), LLSN(first_llsn), GLSN(first_glsn), count, GLSN(hwm), GLSN(prev), CutTime(hwm))


AT_4 = context(1, 1, 2, hwm=4, prev=0)
AT_10 = context(3, 5, 1, hwm=10, prev=4)
AT_16 = context(4, 11, 2, hwm=16, prev=10)


@pytest.fixture
def history() -> CommitHistory:
    """Log stream 1 of 'Example: cuts (HWM 4, 10, 16)': it got GLSNs [1,2], [5] and [11,12]; others got the rest."""
    return CommitHistory([AT_4, AT_10, AT_16])


def glsns(contexts: tuple[CommitContext, ...] | None) -> list[list[int]]:
    assert contexts is not None
    return [list(range(c.first_glsn, c.last_glsn + 1)) for c in contexts]


def test_two_cuts_behind(history: CommitHistory) -> None:
    """'a replica of LS1 that reports HWM 4 with 3 uncommitted gets ranges [5] and [11,12] and ends at HWM 16'."""
    later = history.after(AT_4.last_llsn)
    assert glsns(later) == [[5], [11, 12]]
    assert later is not None
    assert later[-1].high_watermark == 16
    assert sum(c.count for c in later) == 3


def test_one_cut_behind(history: CommitHistory) -> None:
    """'one that reports HWM 10 with 2 gets [11,12]'."""
    assert glsns(history.after(AT_10.last_llsn)) == [[11, 12]]


def test_everything(history: CommitHistory) -> None:
    assert history.after(LLSN(0)) == (AT_4, AT_10, AT_16)


def test_current(history: CommitHistory) -> None:
    """'A replica whose committed LLSN equals the stream's is current, whatever its HWM.'"""
    assert history.after(AT_16.last_llsn) == ()


def test_nothing_was_ever_committed() -> None:
    assert CommitHistory().after(LLSN(0)) == ()


def test_what_was_trimmed_is_not_told_in_part(history: CommitHistory) -> None:
    """'every later range': when one of them is gone the others are of no use."""
    assert history.trim(AT_10.last_llsn) == 2
    assert history.contexts() == (AT_16,)
    assert history.after(AT_10.last_llsn) == (AT_16,)
    assert history.after(AT_4.last_llsn) is None
    assert history.after(LLSN(0)) is None


def test_a_history_that_is_trimmed_to_the_end_still_knows_who_is_behind(history: CommitHistory) -> None:
    """'None when the history no longer reaches down to it … An empty tuple means that the replica is current.'"""
    assert history.trim(AT_16.last_llsn) == 3
    assert len(history) == 0
    assert history.after(AT_16.last_llsn) == ()
    assert history.after(AT_10.last_llsn) is None


def test_trim_keeps_a_range_that_is_applied_in_part(history: CommitHistory) -> None:
    assert history.trim(LLSN(AT_16.last_llsn - 1)) == 2
    assert history.contexts() == (AT_16,)
    assert history.trim(LLSN(0)) == 0


def test_a_replica_inside_a_range_has_to_learn(history: CommitHistory) -> None:
    """Commits are applied whole, so a replica that ends inside one is not what it says."""
    assert history.after(LLSN(AT_16.last_llsn - 1)) is None


@pytest.mark.parametrize("first_llsn", [1, 5, 7])
def test_a_hole_or_an_overlap_is_refused(history: CommitHistory, first_llsn: int) -> None:
    with pytest.raises(ProtocolViolation, match=r"ends at LLSN 5, .* does not follow"):
        history.append(context(first_llsn, 17, 1, hwm=17, prev=16))
    assert history.contexts() == (AT_4, AT_10, AT_16)


def test_a_hole_is_refused_after_everything_was_trimmed(history: CommitHistory) -> None:
    """The history 'is contiguous in LLSN and ends at the stream's committed end', also while it is empty."""
    history.trim(AT_16.last_llsn)
    with pytest.raises(ProtocolViolation, match=r"ends at LLSN 5, .* does not follow"):
        history.append(context(7, 17, 1, hwm=17, prev=16))
    history.append(context(6, 17, 1, hwm=17, prev=16))
    assert glsns(history.after(LLSN(5))) == [[17]]


def test_a_history_that_is_loaded_empty_knows_where_it_ends() -> None:
    """A snapshot holds the ranges that are left and the committed end, to which the history goes on."""
    loaded = CommitHistory((), AT_16.last_llsn)
    assert loaded.after(AT_16.last_llsn) == ()
    assert loaded.after(AT_10.last_llsn) is None
    assert loaded.after(LLSN(0)) is None
    with pytest.raises(ProtocolViolation, match=r"ends at LLSN 5, .* does not follow"):
        loaded.append(AT_4)
    loaded.append(context(6, 17, 1, hwm=17, prev=16))
    assert glsns(loaded.after(LLSN(5))) == [[17]]


def test_without_an_end_a_history_ends_where_its_ranges_do() -> None:
    assert CommitHistory([AT_10, AT_16]).after(AT_16.last_llsn) == ()
    assert CommitHistory([AT_10, AT_16], AT_16.last_llsn).after(AT_4.last_llsn) == (AT_10, AT_16)
    with pytest.raises(ProtocolViolation, match=r"ends at LLSN 0, .* does not follow"):
        CommitHistory().append(AT_10)


@pytest.mark.parametrize(
    ("contexts", "end"),
    [
        pytest.param([AT_4, AT_16], None, id="a hole"),
        pytest.param([AT_10, AT_4], None, id="a range that comes too late"),
        pytest.param([AT_4, AT_10], LLSN(5), id="ranges that end below the committed end"),
        pytest.param([AT_4, AT_10], LLSN(2), id="ranges that end beyond the committed end"),
    ],
)
def test_a_stored_history_that_does_not_fit_is_refused(contexts: list[CommitContext], end: LLSN | None) -> None:
    """'The history is contiguous in LLSN and ends at the stream's committed end', also one that comes from a snapshot:
    what a damaged one says would become the answer to a replica that is behind."""
    with pytest.raises(ProtocolViolation):
        CommitHistory(contexts, end)
