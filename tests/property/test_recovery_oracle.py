"""Recovery against a dumb oracle that looks at every single LLSN."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cutwater.core.replica.recovery import FoundFiles, HardState, Invalid, Valid, judge
from cutwater.types import GLSN, LLSN, CommitContext, Entry, Epoch
from tests.unit.replica_bench import context, entry

llsns = st.integers(0, 8)


@st.composite
def batches(draw: st.DrawFn, first: int) -> tuple[Entry, ...]:
    """Contiguous entries from ``first`` on; epochs mostly the current one."""
    made: list[Entry] = []
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.integers(1, 3))
        made.append(entry(first, count, epoch=draw(st.sampled_from([1, 2, 2, 2, 2]))))
        first += count
    return tuple(made)


@st.composite
def files(draw: st.DrawFn) -> tuple[tuple[Entry, ...], FoundFiles]:
    """All entries that are there, and what opening the files says of them."""
    base = draw(st.sampled_from([0, 0, 0, 2]))
    first = draw(st.integers(1, 6))
    entries = draw(batches(first))
    ends = [e.last_llsn for e in entries]
    last: CommitContext | None = None
    if draw(st.booleans()):
        end = draw(st.sampled_from([*ends, first - 1, draw(st.integers(1, 9))]))
        last = context(max(end, 1), 1, glsn=max(end, 1) + 10) if end > 0 else None
    hard: HardState | None = None
    if draw(st.integers(0, 9)) > 0:
        hard = HardState(
            epoch=Epoch(2),
            sealed_at=draw(st.none() | llsns.map(LLSN)),
            learning=draw(st.sampled_from([False, False, False, True])),
            base_llsn=LLSN(base),
            base_glsn=GLSN(base),
            trimmed_before=GLSN(draw(st.integers(1, 25))),
        )
    committed_end = last.last_llsn if last else base
    tail = tuple(e for e in entries if e.last_llsn > committed_end)
    damaged = draw(st.sampled_from([None, None, None, *[LLSN(e.first_llsn) for e in entries]]))
    end = entries[-1].last_llsn if entries else LLSN(first - 1)
    return entries, FoundFiles(hard, last, LLSN(first), LLSN(end), tail, damaged)


def is_valid(entries: tuple[Entry, ...], found: FoundFiles) -> bool:
    """Every committed LLSN from the first one that is left is there, on batch boundaries, and none is bad."""
    hard = found.hard_state
    if hard is None or hard.learning or found.damaged is not None:
        return False
    committed_end = found.last_commit.last_llsn if found.last_commit else hard.base_llsn
    there = {llsn for e in entries for llsn in range(e.first_llsn, e.last_llsn + 1)}
    lacks = [llsn for llsn in range(found.first_llsn, committed_end + 1) if llsn not in there]
    through_a_batch = any(e.first_llsn <= committed_end < e.last_llsn for e in entries)
    hole = found.first_llsn > committed_end + 1
    # Without a commit everything begins right after the base.
    before_the_base = found.last_commit is None and found.first_llsn <= hard.base_llsn
    return not lacks and not through_a_batch and not hole and not before_the_base


def kept_end(entries: tuple[Entry, ...], hard: HardState, committed_end: int) -> int:
    """One entry after the other, as long as it may still be committed."""
    end = committed_end
    for e in entries:
        if e.first_llsn != end + 1:
            continue
        if e.epoch == hard.epoch and (hard.sealed_at is None or e.last_llsn <= hard.sealed_at):
            end = e.last_llsn
    return end


def looks_removed(found: FoundFiles) -> bool:
    """Commits, but none of their entries: only the storage can tell whether all of them were trimmed."""
    return found.last_commit is not None and found.first_llsn > found.last_commit.last_llsn


@given(files())
def test_the_verdict_is_the_oracles(made: tuple[tuple[Entry, ...], FoundFiles]) -> None:
    entries, found = made
    verdict = judge(found)
    hard = found.hard_state
    if hard is None:
        assert isinstance(verdict, Invalid)
        return
    if looks_removed(found):
        return
    committed_end = found.last_commit.last_llsn if found.last_commit else hard.base_llsn
    high_watermark = found.last_commit.high_watermark if found.last_commit else hard.base_glsn
    if is_valid(entries, found):
        keep_end = LLSN(kept_end(entries, hard, committed_end))
        assert verdict == Valid(committed_end, high_watermark, keep_end, found.last_commit is None)
    else:
        assert isinstance(verdict, Invalid)


@given(files())
def test_what_an_invalid_replica_keeps_is_complete_and_good(made: tuple[tuple[Entry, ...], FoundFiles]) -> None:
    entries, found = made
    verdict = judge(found)
    if not isinstance(verdict, Invalid) or verdict.kept is None:
        return
    kept = verdict.kept
    assert kept.keep_end == kept.committed_end, "nothing uncommitted is kept"
    there = {llsn for e in entries for llsn in range(e.first_llsn, e.last_llsn + 1)}
    assert all(llsn in there for llsn in range(found.first_llsn, kept.committed_end + 1))
    assert found.damaged is None or found.damaged > kept.committed_end
