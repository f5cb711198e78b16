"""One suite for every storage: what a storage node may rely on, whatever keeps its entries."""

from __future__ import annotations

from pathlib import Path

import pytest
from storage_kit import BENCHES, batch, commit_of, entries_from, heads_of

from cutwater.core.read.commit_index import glsn_of_llsn
from cutwater.core.replica.deduplication import DedupCheckpoint, Deduplicator
from cutwater.core.replica.recovery import HardState, Invalid, Valid, judge
from cutwater.errors import Damaged, NotYetCommitted, Trimmed
from cutwater.format.entry_codec import NO_TIME, RunningEventTime, frames_in
from cutwater.format.errors import DamagedEntries, StorageBroken
from cutwater.types import GLSN, LLSN, CutTime, Entry, Epoch, EventTime, StorageNodeId
from tests.unit.memory_storage import MemoryStorage


@pytest.fixture(params=BENCHES)
def bench(request, tmp_path):
    return BENCHES[request.param](tmp_path)


def fill(storage, groups=6, per_group=5):
    """Entries in groups, each synced and then committed; the entries and the commits."""
    entries, contexts = [], []
    for _ in range(groups):
        group = entries_from(storage.end + 1, per_group)
        storage.write(group)
        storage.sync()
        contexts.append(commit_of(group, contexts[-1] if contexts else None))
        storage.write_contexts(contexts[-1:])
        storage.sync()
        entries += group
    return entries, contexts


def read_all(storage, first, last, bytes_max=700):
    """Everything in a range, as a reader gets it."""
    found, commits = [], []
    while first <= last:
        part = storage.read(LLSN(first), LLSN(last), bytes_max)
        assert len(part.data) <= bytes_max or len(part.frames) == 1
        assert b"".join(frame.data for frame in part.frames) == bytes(part.data)
        assert [frame.entry for frame in frames_in(part.data)] == [frame.entry for frame in part.frames]
        check_located(storage, LLSN(first), LLSN(last), bytes_max, part)
        found += [frame.entry for frame in part.frames]
        commits += [commit for commit in part.commits if commit not in commits]
        first = part.last_llsn + 1
    return found, commits


def check_located(storage, first, last, bytes_max, part) -> None:
    """Whoever is told where entries are finds the same ones there."""
    headers = [frame.header for frame in part.frames]
    for count_max in (len(headers), 1):
        located = storage.locate(first, last, bytes_max, count_max)
        if isinstance(storage, MemoryStorage):
            assert located is None
            return
        data = storage._files.open(Path(located.path)).pread(located.end - located.start, located.start)
        assert data == bytes(part.data)[: len(data)]
        assert sum(header.frame_bytes for header in located.headers) == len(data)
        assert list(located.headers) == headers[:count_max]
        assert located.commits == [
            commit for commit in part.commits if commit.first_llsn <= located.headers[-1].last_llsn
        ]


def test_nothing_is_not_a_replica(bench) -> None:
    """Not before its first hard state is saved."""
    found = bench.storage.find()
    assert (found.hard_state, found.last_commit, found.first_llsn, found.entries_end, found.tail) == (
        None,
        None,
        1,
        0,
        (),
    )
    assert isinstance(judge(found), Invalid)


def test_what_is_written_can_be_read(bench) -> None:
    entries, contexts = fill(bench.storage)
    for storage in (bench.storage, bench.reopen()):
        assert read_all(storage, 1, storage.end) == (entries, contexts)
        assert list(storage.entries(LLSN(1), storage.end)) == entries
        assert [head.batch.checksum for head in storage.heads(LLSN(1), storage.end)] == [
            entry.batch.checksum for entry in entries
        ]
        assert all(head.batch.body == b"" for head in storage.heads(LLSN(1), storage.end))
        for entry in entries:
            assert storage.entry_at(entry.last_llsn) == entry
        assert storage.verify() == []


def test_a_read_starts_and_ends_anywhere(bench) -> None:
    entries, contexts = fill(bench.storage)
    for entry in entries[3::4]:
        found, commits = read_all(bench.storage, entry.last_llsn, entry.last_llsn, 1)
        assert found == [entry]
        assert [c for c in contexts if c.first_llsn <= entry.last_llsn <= c.last_llsn] == commits


def test_nothing_uncommitted_is_read(bench) -> None:
    entries, _ = fill(bench.storage, groups=2)
    more = entries_from(bench.storage.end + 1, 3)
    bench.storage.write(more)
    bench.storage.sync()
    assert read_all(bench.storage, 1, entries[-1].last_llsn)[0] == entries
    with pytest.raises(NotYetCommitted):
        bench.storage.read(more[0].first_llsn, more[-1].last_llsn, 1000)
    assert bench.storage.read(LLSN(1), LLSN(10**9), 10**9).last_llsn <= entries[-1].last_llsn
    assert bench.storage.entry_at(more[1].first_llsn) == more[1]
    with pytest.raises(NotYetCommitted):
        bench.storage.entry_at(LLSN(bench.storage.end + 1))


def test_sync_makes_durable_what_it_is_asked_to(bench) -> None:
    storage = bench.storage
    group = entries_from(1, 4)
    storage.write(group)
    assert (storage.end, storage.durable_end) == (group[-1].last_llsn, 0)
    storage.sync()
    assert storage.durable_end == group[-1].last_llsn
    context = commit_of(group, None)
    storage.write_contexts([context])
    assert (storage.last_commit, storage.durable_commit) == (context, None)
    storage.sync(contexts=False)
    assert storage.durable_commit is None
    storage.sync(entries=False)
    assert storage.durable_commit == context


def test_a_commit_of_entries_that_are_not_durable_is_refused(bench) -> None:
    group = entries_from(1, 4)
    bench.storage.write(group)
    with pytest.raises(AssertionError):
        bench.storage.write_contexts([commit_of(group, None)])


def test_after_a_power_cut_everything_synced_is_there(bench) -> None:
    entries, contexts = fill(bench.storage, groups=4)
    tail = entries_from(bench.storage.end + 1, 6)
    bench.storage.write(tail[:3])
    bench.storage.sync()
    bench.storage.write(tail[3:])
    storage = bench.lose_power()
    found = storage.find()
    assert found.last_commit == contexts[-1]
    assert found.tail[:3] == heads_of(tail[:3])
    assert found.tail == heads_of(tail[: len(found.tail)])
    assert found.entries_end == storage.durable_end == found.tail[-1].last_llsn
    assert read_all(storage, 1, contexts[-1].last_llsn) == (entries, contexts)


def test_recovery_is_judged_as_the_core_says(bench) -> None:
    storage = bench.storage
    storage.save_hard_state(HardState(epoch=Epoch(1), base_glsn=GLSN(7)))
    assert judge(bench.reopen().find()) == Valid(LLSN(0), GLSN(7), LLSN(0), lacks_commits=True)
    _, contexts = fill(bench.storage, groups=2)
    tail = entries_from(bench.storage.end + 1, 3)
    bench.storage.write(tail)
    bench.storage.sync()
    last = contexts[-1]
    expected = Valid(last.last_llsn, last.high_watermark, tail[-1].last_llsn)
    assert judge(bench.reopen().find()) == expected


def test_hard_state_and_checkpoint_survive(bench) -> None:
    hard_state = HardState(
        epoch=Epoch(3), sealed_at=LLSN(9), chain=(StorageNodeId(2), StorageNodeId(1)), trimmed_before=GLSN(5)
    )
    dedup = Deduplicator()
    for entry in entries_from(1, 20):
        dedup.record(entry)
    group = entries_from(1, 20)
    dedup.commit(commit_of(group, None))
    checkpoint = dedup.checkpoint(group[-1].last_llsn)
    assert checkpoint.producers
    bench.storage.save_hard_state(HardState())
    bench.storage.save_hard_state(hard_state)
    bench.storage.save_dedup(DedupCheckpoint(LLSN(0), ()))
    bench.storage.save_dedup(checkpoint)
    for storage in (bench.storage, bench.lose_power()):
        assert storage.hard_state == storage.find().hard_state == hard_state
        assert storage.dedup == checkpoint


def test_a_truncated_tail_is_gone_for_good(bench) -> None:
    entries, contexts = fill(bench.storage, groups=3)
    committed_end = bench.storage.end
    tail = entries_from(committed_end + 1, 40)
    bench.storage.write(tail)
    bench.storage.sync()
    keep = tail[2].last_llsn
    bench.storage.truncate(keep)
    assert bench.storage.end == bench.storage.durable_end == keep
    assert bench.lose_power().find().tail == heads_of(tail[:3])
    bench.storage.truncate(committed_end)
    assert bench.reopen().find().tail == ()
    # In another epoch the same LLSNs hold something else.
    other = entries_from(committed_end + 1, 30, epoch=2, size=33)
    bench.storage.write(other)
    bench.storage.sync()
    assert bench.lose_power().find().tail == heads_of(other)
    context = commit_of(other, contexts[-1])
    bench.storage.write_contexts([context])
    bench.storage.sync()
    assert read_all(bench.storage, 1, bench.storage.end) == (entries + other, [*contexts, context])
    assert bench.storage.verify() == []


def test_truncating_where_nothing_is_changes_nothing(bench) -> None:
    entries, _ = fill(bench.storage, groups=2)
    bench.storage.truncate(bench.storage.end)
    assert list(bench.reopen().entries(LLSN(1), bench.storage.end)) == entries


@pytest.mark.parametrize("is_synced", [True, False])
def test_restart_may_keep_the_entries_from_there_on(bench, is_synced: bool) -> None:
    """All commits go, and so do the entries before; those that are kept are durable."""
    fill(bench.storage, groups=3)
    tail = entries_from(bench.storage.end + 1, 40)
    bench.storage.write(tail)
    if is_synced:
        bench.storage.sync()
    first, running = tail[7].first_llsn, RunningEventTime(EventTime(5_000), EventTime(77))
    bench.storage.restart(first, running, tail[30].last_llsn)
    storage = bench.lose_power()
    assert (storage.first_llsn, storage.end, storage.last_commit) == (first, tail[30].last_llsn, None)
    assert storage.find().tail == heads_of(tail[7:31])
    assert list(storage.entries(first, storage.end)) == tail[7:31]
    assert storage.running_before(first) == running
    assert storage.verify() == []
    storage.save_hard_state(HardState(base_llsn=LLSN(first - 1), base_glsn=GLSN(800)))
    more = entries_from(storage.end + 1, 3)
    storage.write(more)
    storage.sync()
    storage.write_contexts([commit_of([*tail[7:31], *more], None)])
    storage.sync()
    assert bench.reopen().verify() == []


def test_restart_begins_anew_elsewhere(bench) -> None:
    fill(bench.storage)
    running = RunningEventTime(EventTime(5_000), EventTime(77))
    bench.storage.restart(LLSN(500), running)
    assert (bench.storage.first_llsn, bench.storage.end, bench.storage.last_commit) == (500, 499, None)
    bench.storage.save_hard_state(HardState(base_llsn=LLSN(499), base_glsn=GLSN(800)))
    storage = bench.lose_power()
    assert (storage.first_llsn, storage.end, storage.last_commit) == (500, 499, None)
    assert storage.running_before(LLSN(500)) == running
    entries = entries_from(500, 9)
    storage.write(entries)
    storage.sync()
    # A commit may have begun before the first entry that was copied.
    whole = commit_of([*entries_from(497, 1, records=1), *entries], None)
    storage.write_contexts([whole])
    storage.sync()
    storage = bench.reopen()
    assert read_all(storage, 500, storage.end) == (entries, [whole])
    with pytest.raises(Trimmed):
        storage.read(LLSN(499), LLSN(600), 100)
    assert storage.verify() == []


def test_trim_removes_only_what_is_below_and_stays_so(bench) -> None:
    entries, contexts = fill(bench.storage, groups=30)
    before = contexts[15].first_glsn
    bench.storage.save_hard_state(HardState(trimmed_before=before))
    first = bench.storage.drop_before(before, bench.storage.end)
    assert first == contexts[15].first_llsn
    assert bench.storage.first_llsn == first
    for opened in (lambda: bench.storage, bench.reopen, bench.lose_power):
        storage = opened()
        assert storage.first_llsn == storage.find().first_llsn == first
        left = [entry for entry in entries if entry.first_llsn >= first]
        assert read_all(storage, first, storage.end)[0] == left
        with pytest.raises(Trimmed) as trimmed:
            storage.read(LLSN(first - 1), LLSN(first), 100)
        assert trimmed.value.first_left == before
        with pytest.raises(Trimmed):
            storage.from_glsn(GLSN(before - 1))
        assert storage.from_glsn(before) == contexts[15].first_llsn
        assert storage.drop_before(GLSN(1), storage.end) == first
        assert glsn_of_llsn(storage.contexts, LLSN(first - 1)) is not None
        assert storage.verify() == []


def test_everything_can_be_trimmed(bench) -> None:
    entries, contexts = fill(bench.storage, groups=4)
    end = bench.storage.end
    assert bench.storage.drop_before(GLSN(contexts[-1].high_watermark + 1), end) == end + 1
    storage = bench.lose_power()
    found = storage.find()
    assert (found.first_llsn, found.entries_end, found.last_commit) == (end + 1, end, contexts[-1])
    assert storage.running_before(LLSN(end + 1)) != NO_TIME
    more = entries_from(end + 1, 3)
    storage.write(more)
    storage.sync()
    assert list(bench.reopen().entries(more[0].first_llsn, LLSN(10**9))) == more
    assert entries


def test_trim_goes_no_further_than_it_may(bench) -> None:
    _, contexts = fill(bench.storage, groups=30)
    assert bench.storage.drop_before(GLSN(10**6), LLSN(0)) == 1
    upto = contexts[11].last_llsn
    assert 1 < bench.storage.drop_before(GLSN(10**6), upto) <= upto + 1


def test_the_uncommitted_tail_is_not_trimmed(bench) -> None:
    _, contexts = fill(bench.storage, groups=2)
    tail = entries_from(bench.storage.end + 1, 4)
    bench.storage.write(tail)
    bench.storage.sync()
    bench.storage.drop_before(GLSN(10**6), bench.storage.end)
    assert bench.storage.first_llsn <= tail[0].first_llsn
    assert bench.reopen().find().tail == heads_of(tail)
    assert contexts


def test_positions_and_times(bench) -> None:
    _, contexts = fill(bench.storage, groups=12)
    for storage in (bench.storage, bench.reopen()):
        assert list(storage.contexts) == contexts
        for context in contexts:
            for llsn in range(context.first_llsn, context.last_llsn + 1):
                glsn = context.glsn_of(LLSN(llsn))
                assert glsn_of_llsn(storage.contexts, LLSN(llsn)) == glsn
                assert storage.from_glsn(glsn) == llsn
            assert storage.from_glsn(GLSN(context.first_glsn - 1)) == context.first_llsn
            assert storage.from_time(context.time) == context.first_glsn
            assert storage.from_time(CutTime(context.time - 1)) == context.first_glsn
        assert storage.from_glsn(GLSN(contexts[-1].high_watermark + 1)) is None
        assert storage.from_time(CutTime(contexts[-1].time + 1)) is None


def test_the_newest_records_that_fit(bench) -> None:
    """Retention by size asks for this: the more room, the more is kept, and something always is."""
    assert bench.storage.within(10**9) is None, "nothing is committed yet"
    _, contexts = fill(bench.storage, groups=12)
    for storage in (bench.storage, bench.reopen()):
        found = [storage.within(size) for size in (1, 500, 2_000, 5_000, 10**9)]
        assert None not in found
        assert found == sorted(found, reverse=True)
        assert found[-1] == contexts[0].first_glsn
        assert contexts[0].first_glsn < found[0] <= contexts[-1].last_glsn


def test_how_many_bytes_lie_where(bench) -> None:
    """About: as exact as an index is. But it never falls, and nothing is left out at the end."""
    entries, _ = fill(bench.storage, groups=12)
    for storage in (bench.storage, bench.reopen()):
        assert storage.bytes_through([]) == []
        sizes = storage.bytes_through([entry.last_llsn for entry in entries])
        assert sizes == sorted(sizes)
        assert sizes[-1] - sizes[0] > sum(len(entry.batch.body) for entry in entries) / 2


def test_event_time_runs_through_all_entries(bench) -> None:
    entries, contexts = fill(bench.storage, groups=10)
    bench.storage.drop_before(contexts[5].first_glsn, bench.storage.end)
    storage = bench.reopen()
    running = NO_TIME
    for entry in entries:
        if entry.first_llsn >= storage.first_llsn:
            assert storage.running_before(entry.first_llsn) == running
        running = running.after(entry.batch)
    assert storage.running_before(LLSN(storage.end + 1)) == running
    assert running.declared is not None


def test_damage_is_told_and_never_served_and_repaired(bench) -> None:
    entries, contexts = fill(bench.storage, groups=6)
    bad = next(entry for entry in entries[7:] if entry.batch.body)
    bench.damage(bad.first_llsn)
    for storage in (bench.storage, bench.reopen()):
        with pytest.raises(DamagedEntries) as damaged:
            read_all(storage, 1, storage.end)
        assert (damaged.value.first_llsn, damaged.value.last_llsn) == (bad.first_llsn, bad.last_llsn)
        with pytest.raises(Damaged):
            storage.entry_at(bad.last_llsn)
        assert read_all(storage, bad.last_llsn + 1, storage.end)[0][0].first_llsn == bad.last_llsn + 1
        assert [(f.first_llsn, f.last_llsn) for f in storage.verify()] == [(bad.first_llsn, bad.last_llsn)]
    other = Entry(bad.first_llsn, bad.epoch, batch(bad.first_llsn, bad.batch.count, 21))
    assert not bench.storage.repair(other)
    assert not bench.storage.repair(Entry(LLSN(10**6), bad.epoch, bad.batch))
    assert bench.storage.repair(bad)
    storage = bench.lose_power()
    assert read_all(storage, 1, storage.end) == (entries, contexts)
    assert storage.verify() == []


def test_damage_in_the_uncommitted_tail_is_found_when_opened(bench) -> None:
    fill(bench.storage, groups=1)
    committed_end = bench.storage.end
    tail = entries_from(committed_end + 1, 9)
    bench.storage.write(tail)
    bench.storage.sync()
    bad = next(entry for entry in tail[2:] if entry.batch.body)
    bench.damage(bad.first_llsn)
    found = bench.reopen().find()
    assert found.damaged == bad.first_llsn
    assert found.entries_end == tail[-1].last_llsn
    assert found.tail == heads_of([entry for entry in tail if entry is not bad])


def test_a_damaged_entry_is_not_taken(bench) -> None:
    entry = entries_from(1, 1)[0]
    wrong = Entry(entry.first_llsn, entry.epoch, batch(1).__class__(1, b"abc", 7, EventTime(0), EventTime(0)))
    with pytest.raises(Damaged):
        bench.storage.write([entry, wrong])
    assert bench.storage.end == 0


def test_cut_back_keeps_what_is_known_to_be_durable(bench) -> None:
    entries, contexts = fill(bench.storage, groups=9)
    more = entries_from(bench.storage.end + 1, 8)
    bench.storage.write(more)
    bench.storage.sync()
    bench.storage.cut_back(more[3].last_llsn, contexts[-3].last_llsn)
    assert bench.storage.find().last_commit == contexts[-3]
    storage = bench.lose_power()
    assert storage.end == more[3].last_llsn
    assert list(storage.contexts) == contexts[:-2]
    storage.write_contexts(contexts[-2:])
    storage.sync()
    assert read_all(storage, 1, contexts[-1].last_llsn) == (entries, contexts)
    assert storage.verify() == []


def test_a_closed_storage_does_nothing_any_more(bench) -> None:
    entries, _ = fill(bench.storage, groups=2)
    bench.storage.write(entries_from(bench.storage.end + 1, 2))
    closed = bench.storage
    closed.close()
    closed.close()
    with pytest.raises(StorageBroken):
        closed.write([])
    with pytest.raises(StorageBroken):
        closed.read(LLSN(1), LLSN(1), 1)
    assert len(bench.lose_power().find().tail) == 2
    assert entries
