"""Commit history and commit index against oracles that remember every record they ever saw."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cutwater.core.order.history import CommitHistory
from cutwater.core.read.commit_index import (
    context_of_llsn,
    first_glsn_at_or_after_time,
    first_llsn_at_or_after,
    glsn_of_llsn,
)
from cutwater.types import GLSN, LLSN, CommitContext, CutTime, Epoch


@st.composite
def commits(draw: st.DrawFn, trimmed_max: int = 0) -> list[CommitContext]:
    """The commits of one log stream: contiguous in LLSN, with gaps in GLSN where other streams and ticks were."""
    found = []
    llsn = draw(st.integers(0, trimmed_max))
    hwm = time = 0
    for _ in range(draw(st.integers(0, 12))):
        before, count, after = draw(st.integers(0, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 3))
        prev = hwm + draw(st.integers(0, 3))
        hwm = prev + before + count + after
        time += draw(st.integers(1, 5))
        found.append(
            CommitContext(
                Epoch(1), LLSN(llsn + 1), GLSN(prev + before + 1), count, GLSN(hwm), GLSN(prev), CutTime(time)
            )
        )
        llsn += count
    return found


class HistoryOracle:
    """All ranges there ever were, and which of them have been forgotten."""

    def __init__(self) -> None:
        self.all: list[CommitContext] = []
        self.forgotten: set[int] = set()

    def trim(self, applied_end: int) -> int:
        due = {i for i, c in enumerate(self.all) if all(n <= applied_end for n in llsns(c))} - self.forgotten
        self.forgotten |= due
        return len(due)

    def after(self, committed_end: int) -> tuple[CommitContext, ...] | None:
        """The ranges that hold the missing records; None unless they are all there, with the missing ones only."""
        missing = {n for c in self.all for n in llsns(c) if n > committed_end}
        holding = [i for i, c in enumerate(self.all) if set(llsns(c)) & missing]
        told = {n for i in holding for n in llsns(self.all[i])}
        first = min(missing, default=committed_end + 1)
        if self.forgotten & set(holding) or told != missing or first != committed_end + 1:
            return None
        return tuple(self.all[i] for i in holding)


def llsns(context: CommitContext) -> range:
    return range(context.first_llsn, context.first_llsn + context.count)


Step = tuple[str, int]
kinds = st.sampled_from(["append", "append", "trim", "after", "after", "reload"])
steps = st.lists(st.tuples(kinds, st.integers(0, 12)), max_size=40)


@given(commits(), steps)
def test_history(contexts: list[CommitContext], todo: list[Step]) -> None:
    history, oracle = CommitHistory(), HistoryOracle()
    waiting = list(contexts)
    for what, llsn in todo:
        if what == "append" and waiting:
            history.append(waiting[0])
            oracle.all.append(waiting.pop(0))
        elif what == "trim":
            # No replica has durably applied what was never committed.
            applied = min(llsn, oracle.all[-1].last_llsn) if oracle.all else 0
            assert history.trim(LLSN(applied)) == oracle.trim(applied)
        elif what == "after":
            assert history.after(LLSN(llsn)) == oracle.after(llsn)
        elif what == "reload":
            # As from a snapshot, which holds the ranges that are left and the committed end.
            history = CommitHistory(history.contexts(), oracle.all[-1].last_llsn if oracle.all else LLSN(0))
        assert history.contexts() == tuple(c for i, c in enumerate(oracle.all) if i not in oracle.forgotten)
        assert len(history) == len(history.contexts())


@given(commits())
def test_a_replica_that_applies_what_it_is_told_is_current(contexts: list[CommitContext]) -> None:
    """'The MR answers a report with every later range of that stream.'"""
    history = CommitHistory(contexts)
    for i, context in enumerate(contexts):
        later = history.after(context.last_llsn)
        assert later == tuple(contexts[i + 1 :])
        if later:
            assert history.after(later[-1].last_llsn) == ()


@given(commits(trimmed_max=5))
def test_index_of_positions(contexts: list[CommitContext]) -> None:
    glsn_by_llsn = {n: c.first_glsn + i for c in contexts for i, n in enumerate(llsns(c))}
    llsn_by_glsn = {glsn: llsn for llsn, glsn in glsn_by_llsn.items()}
    context_by_llsn = {n: c for c in contexts for n in llsns(c)}
    for llsn in range(max(glsn_by_llsn, default=0) + 3):
        assert glsn_of_llsn(contexts, LLSN(llsn)) == glsn_by_llsn.get(llsn)
        assert context_of_llsn(contexts, LLSN(llsn)) == context_by_llsn.get(llsn)
    for glsn in range(max(llsn_by_glsn, default=0) + 5):
        following = [llsn_by_glsn[g] for g in sorted(llsn_by_glsn) if g >= glsn]
        assert first_llsn_at_or_after(contexts, GLSN(glsn)) == (following[0] if following else None)


@given(commits(trimmed_max=5))
def test_index_of_time(contexts: list[CommitContext]) -> None:
    ingested = {c.first_glsn + i: c.time for c in contexts for i in range(c.count)}
    for time in range(max(ingested.values(), default=0) + 3):
        at_or_after = [glsn for glsn, ingested_at in sorted(ingested.items()) if ingested_at >= time]
        assert first_glsn_at_or_after_time(contexts, CutTime(time)) == (at_or_after[0] if at_or_after else None)
