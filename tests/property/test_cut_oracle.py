"""The cut against an oracle that knows no arithmetic: it walks over single records and counts.

The oracle sees each replica as the set of LLSNs on its disk. A record is committable if every replica has it and the
record before it is committed or committable; committable records get the next number one by one.
"""

from __future__ import annotations

import itertools
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from cutwater.core.order.cut import Candidate, StreamCommit, make_cut
from cutwater.types import GLSN, LLSN, CutTime, Epoch, LogStreamId

TIME = CutTime(1)


def oracle(high_watermark: int, candidates: list[Candidate]) -> dict[tuple[int, int], int]:
    """(stream, LLSN) → GLSN of every record that the next cut commits."""
    given_out: dict[tuple[int, int], int] = {}
    glsn = high_watermark
    by_stream = {c.stream: c for c in candidates}
    for lsid in sorted(by_stream):
        candidate = by_stream[lsid]
        if not candidate.durable_ends:
            continue
        disks = [set() if end is None else set(range(1, end + 1)) for end in candidate.durable_ends]
        llsn = candidate.committed_end + 1
        while all(llsn in disk for disk in disks):
            glsn += 1
            given_out[lsid, llsn] = glsn
            llsn += 1
    return given_out


def as_records(commits: tuple[StreamCommit, ...]) -> dict[tuple[int, int], int]:
    records: dict[tuple[int, int], int] = {}
    for commit in commits:
        for i in range(commit.context.count):
            key = (commit.stream, commit.context.first_llsn + i)
            assert key not in records
            records[key] = commit.context.first_glsn + i
    return records


@st.composite
def streams(draw: st.DrawFn) -> list[Candidate]:
    """Streams with replicas that are all at or beyond the committed end, or have not reported."""
    found = []
    for lsid in draw(st.lists(st.integers(1, 50), unique=True, max_size=6)):
        committed = draw(st.integers(0, 20))
        more = st.none() | st.integers(0, 6) if draw(st.booleans()) else st.integers(0, 6)
        ends = tuple(None if n is None else LLSN(committed + n) for n in draw(st.lists(more, max_size=4)))
        found.append(Candidate(LogStreamId(lsid), Epoch(draw(st.integers(1, 3))), LLSN(committed), ends))
    return found


@given(st.integers(0, 1_000), streams())
def test_a_cut_commits_what_the_oracle_commits(high_watermark: int, candidates: list[Candidate]) -> None:
    commits = make_cut(GLSN(high_watermark), TIME, candidates)
    assert as_records(commits) == oracle(high_watermark, candidates)
    epochs = {c.stream: c.epoch for c in candidates}
    for commit in commits:
        context = commit.context
        assert context.count > 0
        assert context.epoch == epochs[commit.stream]
        assert context.prev_high_watermark == high_watermark
        assert context.high_watermark == high_watermark + sum(c.context.count for c in commits)
        assert context.time == TIME


@given(streams(), st.randoms(use_true_random=False))
def test_the_order_of_arguments_does_not_matter(candidates: list[Candidate], random: Random) -> None:
    """'Two of them fed the same inputs give the same cuts', in whatever order streams and replicas come."""
    shuffled = []
    for candidate in candidates:
        ends = list(candidate.durable_ends)
        random.shuffle(ends)
        shuffled.append(Candidate(candidate.stream, candidate.epoch, candidate.committed_end, tuple(ends)))
    random.shuffle(shuffled)
    assert make_cut(GLSN(5), TIME, shuffled) == make_cut(GLSN(5), TIME, candidates)
    assert make_cut(GLSN(5), TIME, iter(candidates)) == make_cut(GLSN(5), TIME, candidates)


growth = st.lists(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=3, max_size=3), max_size=8)
"""Per cut, per stream, per replica: how many more records became durable."""


@given(growth)
def test_glsns_and_llsns_are_dense_over_many_cuts(steps: list[list[list[int]]]) -> None:
    """Dense: GLSN 1..HWM without holes, LLSN contiguous per stream; each is given out once."""
    committed = [0, 0, 0]
    durable = [[0, 0, 0] for _ in committed]
    high_watermark = 0
    glsn_of: dict[tuple[int, int], int] = {}
    for step in steps:
        for lsid, more in enumerate(step):
            durable[lsid] = [end + n for end, n in zip(durable[lsid], more, strict=True)]
        candidates = [
            Candidate(LogStreamId(i), Epoch(1), LLSN(committed[i]), tuple(LLSN(end) for end in durable[i]))
            for i in range(3)
        ]
        commits = make_cut(GLSN(high_watermark), TIME, candidates)
        new = as_records(commits)
        assert not new.keys() & glsn_of.keys()
        glsn_of |= new
        for commit in commits:
            committed[commit.stream] = commit.context.last_llsn
            high_watermark = commit.context.high_watermark
    assert sorted(glsn_of.values()) == list(range(1, high_watermark + 1))
    for lsid, end in enumerate(committed):
        assert end == min(durable[lsid])
        glsns = [glsn_of[lsid, llsn] for llsn in range(1, end + 1)]
        assert glsns == sorted(glsns)


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=12), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(0, 4), min_size=9, max_size=9), min_size=1, max_size=6),
)
def test_a_batch_is_committed_by_one_cut(batches: list[list[int]], steps: list[list[int]]) -> None:
    """'Records of one batch are committed by one cut, contiguous in LLSN and GLSN (all replicas share batch
    boundaries, so `min` falls on one).'"""
    boundaries = [[0, *itertools.accumulate(sizes)] for sizes in batches]
    written = [[0, 0, 0] for _ in batches]
    committed = [0 for _ in batches]
    high_watermark = 0
    for step in steps:
        for lsid, replica in itertools.product(range(len(batches)), range(3)):
            written[lsid][replica] = min(written[lsid][replica] + step[3 * lsid + replica], len(batches[lsid]))
        candidates = [
            Candidate(
                LogStreamId(lsid),
                Epoch(1),
                LLSN(committed[lsid]),
                tuple(LLSN(boundaries[lsid][n]) for n in written[lsid]),
            )
            for lsid in range(len(batches))
        ]
        for commit in make_cut(GLSN(high_watermark), TIME, candidates):
            context = commit.context
            assert context.first_llsn - 1 in boundaries[commit.stream]
            assert context.last_llsn in boundaries[commit.stream]
            committed[commit.stream] = context.last_llsn
            high_watermark = context.high_watermark
    assert committed == [boundaries[lsid][min(ends)] for lsid, ends in enumerate(written)]
