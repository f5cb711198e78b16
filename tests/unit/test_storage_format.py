"""The layout of files: round trips, files of a newer version, and files full of anything."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs
from storage_kit import DIRECTORY, IDENTITY, SMALL, FaultBench, commit_of, entries_from

from cutwater.core.publish.groups import RememberedGroup
from cutwater.core.replica.deduplication import DedupCheckpoint, ProducerWindow, Remembered
from cutwater.core.replica.recovery import HardState
from cutwater.errors import CutwaterError, Damaged, InvalidArgument, WrongIdentity
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import (
    HEADER_BYTES_MAX,
    PRODUCER_BYTES_MAX,
    EntryFrame,
    RunningEventTime,
    decode_header,
    decode_trailer,
    encode_frame,
    frames_in,
)
from cutwater.format.errors import DamagedFile, NewerFormat
from cutwater.storage import format as layout
from cutwater.storage.format import FileHeader, ReplicaManifest, SyncMark
from cutwater.storage.replica.replica_storage import SegmentStorage
from cutwater.storage.replica.small_files import ReplicaIdentity
from cutwater.testing.fault_files import FaultFile, FaultFiles
from cutwater.types import (
    GLSN,
    LLSN,
    Batch,
    BatchKind,
    BatchNumber,
    ClusterId,
    CommitContext,
    CutTime,
    DecisionIndex,
    Entry,
    Epoch,
    EventTime,
    GroupTag,
    LogStreamId,
    ProducerEpoch,
    ProducerId,
    ProducerTag,
    RunId,
    Sequence,
    StorageNodeId,
)

PATH = Path("somewhere")
numbers = st.integers(1, 2**62)
times = st.integers(-(2**62), 2**62).map(EventTime)
maybe_times = st.none() | times
runnings = st.builds(RunningEventTime, maybe_times, maybe_times, st.booleans())
tags = st.builds(ProducerTag, st.text(max_size=60).map(ProducerId), numbers.map(ProducerEpoch), numbers.map(Sequence))
groups = st.builds(
    GroupTag,
    numbers.map(RunId),
    st.integers(0, 2**62).map(BatchNumber),
    numbers,
    numbers.map(DecisionIndex),
    numbers.map(DecisionIndex),
)
bodies = st.binary(max_size=300)
batches = st.builds(
    lambda body, count, time_min, time_max, kind, producer, declared, schema, more, group, idle, checked: Batch(
        count, body, crc32c(body), time_min, time_max, kind, producer, declared, schema, more, group, idle, checked
    ),
    bodies,
    st.integers(1, 2**32 - 1),
    times,
    times,
    st.sampled_from(BatchKind),
    st.none() | tags,
    maybe_times,
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.none() | groups,
    st.booleans(),
    st.booleans(),
)
entries = st.builds(Entry, numbers.map(LLSN), st.integers(0, 2**32 - 1).map(Epoch), batches)
contexts = st.builds(
    CommitContext,
    st.integers(0, 2**32 - 1).map(Epoch),
    numbers.map(LLSN),
    numbers.map(GLSN),
    st.integers(1, 2**40),
    numbers.map(GLSN),
    numbers.map(GLSN),
    numbers.map(CutTime),
)


def frame_of(entry: Entry, running: RunningEventTime = RunningEventTime()) -> bytes:  # noqa: B008
    header, trailer = encode_frame(entry, running)
    return header + entry.batch.body + trailer


@given(entries, runnings)
def test_a_frame_says_all_that_the_entry_says(entry: Entry, running: RunningEventTime) -> None:
    data = frame_of(entry, running)
    header = decode_header(data)
    assert header is not None
    assert header.frame_bytes == len(data)
    assert header.running == running
    frame = EntryFrame(header, memoryview(data))
    assert frame.problem is None
    assert frame.entry == entry
    trailer = decode_trailer(data)
    assert trailer is not None
    assert (trailer.frame_bytes, trailer.first_llsn) == (len(data), entry.first_llsn)
    assert [f.entry for f in frames_in(data + data)] == [entry, entry]


@given(entries, st.data())
def test_any_wrong_bit_of_a_frame_is_noticed(entry: Entry, data: st.DataObject) -> None:
    frame = bytearray(frame_of(entry))
    offset = data.draw(st.integers(0, len(frame) - 1))
    frame[offset] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Damaged):
        list(frames_in(frame))


def test_running_time_is_before_the_batch() -> None:
    first = Batch(1, b"", 0, EventTime(5), EventTime(9), declared=EventTime(3))
    late = Batch(1, b"", 0, EventTime(1), EventTime(2), declared=EventTime(1))
    fence = Batch(1, b"", 0, EventTime(0), EventTime(99), kind=BatchKind.FENCE)
    running = RunningEventTime().after(first)
    assert running == RunningEventTime(EventTime(9), EventTime(3))
    assert running.after(late) == running.after(fence) == running


def test_running_says_whether_the_last_entry_declares_idleness() -> None:
    zero = EventTime(0)
    quiet = Batch(1, b"", 0, zero, zero, kind=BatchKind.DECLARATION, declared=EventTime(7), idle=True)
    fence = Batch(1, b"", 0, zero, zero, kind=BatchKind.FENCE)
    running = RunningEventTime(EventTime(9)).after(quiet)
    assert running == RunningEventTime(EventTime(9), EventTime(7), idle=True)
    assert running.after(quiet) is running
    assert running.after(fence) == RunningEventTime(EventTime(9), EventTime(7))


def versioned(batch: Batch, running: RunningEventTime = RunningEventTime()) -> int:  # noqa: B008
    return encode_frame(Entry(LLSN(1), Epoch(1), batch), running)[0][4]


def test_a_frame_has_the_oldest_version_that_says_all_of_it() -> None:
    """Code that knows versions 1 and 2 refuses what it would misread, and reads everything else as before."""
    time = EventTime(5)
    plain = Batch(1, b"", 0, time, time, declared=time)
    assert versioned(plain) == versioned(structs.replace(plain, kind=BatchKind.FENCE)) == 1
    assert versioned(structs.replace(plain, more=True)) == 2
    assert versioned(structs.replace(plain, kind=BatchKind.DECLARATION)) == 3
    assert versioned(structs.replace(plain, idle=True)) == versioned(structs.replace(plain, more=True, idle=True)) == 3
    # What follows an idle entry is read by older code as it always was: the flag only adds to what came before.
    assert versioned(plain, RunningEventTime(time, time, idle=True)) == 1


def test_a_frame_without_declarations_has_the_bytes_of_before() -> None:
    tag = ProducerTag(ProducerId("p"), ProducerEpoch(2), Sequence(3))
    entry = Entry(LLSN(7), Epoch(1), Batch(2, b"ab", crc32c(b"ab"), EventTime(1), EventTime(4), producer=tag))
    assert frame_of(entry, RunningEventTime(EventTime(9), EventTime(8))).hex() == (
        "4357465201000d00650001000200000002000000010000000700000000000000010000000000000004000000000000000900"
        "0000000000000000000000000000080000000000000002000000000000000300000000000000000000003629a2e270b2262b"
        "b961627b0000000700000000000000b2262bb9be4166d3"
    )


def test_what_does_not_fit_is_refused() -> None:
    tag = ProducerTag(ProducerId("x" * (PRODUCER_BYTES_MAX + 1)), ProducerEpoch(1), Sequence(1))
    with pytest.raises(InvalidArgument, match="at most 1024 bytes"):
        encode_frame(
            Entry(LLSN(1), Epoch(1), Batch(1, b"", 0, EventTime(0), EventTime(0), producer=tag)), RunningEventTime()
        )
    with pytest.raises(InvalidArgument, match="out of range"):
        encode_frame(Entry(LLSN(1), Epoch(1), Batch(2**32, b"", 0, EventTime(0), EventTime(0))), RunningEventTime())


@given(contexts, st.integers(0, 2**32 - 1))
def test_commit_contexts(context: CommitContext, number: int) -> None:
    record = layout.encode_context(context, number)
    assert len(record) == layout.CONTEXT_BYTES
    assert layout.decode_context(record, number) == context
    assert layout.decode_context(record, number + 1) is None
    assert layout.decode_context(record[:-1], number) is None


@given(st.binary(min_size=64, max_size=64))
def test_random_bytes_are_no_commit_context(record: bytes) -> None:
    assert layout.decode_context(record, 0) is None


@given(numbers, numbers, st.integers(0, 2**31), st.integers(0, 2**31), runnings)
def test_headers_marks_and_points(
    generation: int, llsn: int, points: int, interval: int, running: RunningEventTime
) -> None:
    header = FileHeader(generation, LLSN(llsn), points, interval, running)
    sector = layout.encode_header(layout.SEGMENT, header)
    assert len(sector) == layout.SECTOR_BYTES
    assert layout.decode_header(sector, layout.SEGMENT, PATH) == header
    with pytest.raises(DamagedFile, match="begins with"):
        layout.decode_header(sector, layout.COMMITS, PATH)
    mark = SyncMark(generation, interval, LLSN(llsn), running)
    assert layout.decode_mark(layout.encode_mark(mark)) == mark
    assert layout.decode_point(layout.encode_point(LLSN(llsn), interval)) == (llsn, interval)
    assert header.data_start % layout.SECTOR_BYTES == 0


def again(magic: bytes, content: Struct) -> Struct:
    return layout.decode_struct(layout.encode_struct(magic, content), magic, PATH, type(content))


def test_small_files() -> None:
    manifest = ReplicaManifest(1, 2, 3, 4, LLSN(5))
    assert again(layout.MANIFEST, manifest) == manifest
    hard_state = HardState(epoch=Epoch(4), chain=(StorageNodeId(1),), sealed_at=LLSN(3))
    assert again(layout.HARD_STATE, hard_state) == hard_state
    batch = Remembered(Sequence(1), ProducerEpoch(2), BatchKind.FENCE, LLSN(3), 4, 5, None)
    window = ProducerWindow(ProducerId("ü"), ProducerEpoch(1), Sequence(2), (batch,))
    group = RememberedGroup(RunId(1), BatchNumber(2), DecisionIndex(3), DecisionIndex(3), LLSN(4), 5, GLSN(6))
    checkpoint = DedupCheckpoint(LLSN(9), (window,), (group,))
    assert again(layout.DEDUP, checkpoint) == checkpoint


def test_a_right_checksum_over_wrong_content_is_damage() -> None:
    wrong = layout.encode_whole(layout.HARD_STATE, b"\x93\x01\x02\x03")
    with pytest.raises(DamagedFile, match="its content is not"):
        layout.decode_struct(wrong, layout.HARD_STATE, PATH, HardState)


def newer(content: bytes) -> bytes:
    """The same file as a later version of the program would begin it."""
    start = content[:8] + struct.pack("<HH", layout.VERSION + 1, 0)
    return start + struct.pack("<I", crc32c(start)) + b"whatever comes then" + content[40:]


@pytest.mark.parametrize("name", ["manifest", "state", "dedup", ".entries", ".commits"])
def test_a_file_of_a_newer_version_says_so(name: str, tmp_path: Path) -> None:
    bench = filled(tmp_path)
    path = [path for path in bench.files.paths() if path.name.endswith(name)][-1]
    content = bench.files.content(path)
    bench.files.put(path, newer(content))
    with pytest.raises(NewerFormat, match=r"format version 2; this program reads versions up to 1: start the newer"):
        bench.reopen()


def test_the_wrong_replica_is_refused(tmp_path: Path) -> None:
    bench = filled(tmp_path)
    other = ReplicaIdentity(ClusterId(1), StorageNodeId(2), LogStreamId(4))
    with pytest.raises(WrongIdentity, match="holds log stream 3 of storage node 2 in cluster 1, not log stream 4"):
        SegmentStorage(DIRECTORY, other, SMALL, bench.files)


def filled(tmp_path: Path) -> FaultBench:
    bench = FaultBench(tmp_path)
    storage = bench.storage
    storage.save_hard_state(HardState(epoch=Epoch(1)))
    storage.save_dedup(DedupCheckpoint(LLSN(0), ()))
    last = None
    for _ in range(7):
        group = entries_from(storage.end + 1, 3)
        storage.write(group)
        storage.sync()
        last = commit_of(group, last)
        storage.write_contexts([last])
        storage.sync()
    storage.close()
    return bench


# The bytes of docs/data-files.md.


def at(data: bytes, fields: dict[int, tuple[str, int]]) -> None:
    """What stands at these offsets."""
    for offset, (kind, value) in fields.items():
        assert struct.unpack_from(f"<{kind}", data, offset) == (value,), offset


def test_a_frame_is_laid_out_as_documented() -> None:
    tag = ProducerTag(ProducerId("me"), ProducerEpoch(7), Sequence(8))
    batch = Batch(3, b"body", crc32c(b"body"), EventTime(-5), EventTime(6), BatchKind.DATA, tag, EventTime(9), 10)
    header, trailer = encode_frame(Entry(LLSN(11), Epoch(12), batch), RunningEventTime(EventTime(13), EventTime(14)))
    assert (len(header), len(trailer)) == (102, 20)
    assert header[:4] == b"CWFR"
    at(header, {4: ("B", 1), 5: ("B", 0), 6: ("H", 15), 8: ("H", 102), 10: ("H", 2), 12: ("I", 4), 16: ("I", 3)})
    at(header, {20: ("I", 12), 24: ("Q", 11), 32: ("q", -5), 40: ("q", 6), 48: ("q", 13), 56: ("q", 9)})
    at(header, {64: ("q", 14), 72: ("Q", 7), 80: ("Q", 8), 88: ("I", 10), 92: ("I", crc32c(b"body"))})
    assert header[96:98] == b"me"
    at(header, {98: ("I", crc32c(header[:98]))})
    at(trailer, {0: ("I", 126), 4: ("Q", 11), 12: ("I", crc32c(header[:98])), 16: ("I", crc32c(trailer[:16]))})


def test_a_frame_of_a_group_is_laid_out_as_documented() -> None:
    """It is of a newer version, so that a program which knows nothing of groups does not cut one in two."""
    plain = Batch(3, b"", 0, EventTime(0), EventTime(0))
    tag = GroupTag(RunId(1), BatchNumber(2), 3, DecisionIndex(4), DecisionIndex(5))
    header, _ = encode_frame(Entry(LLSN(1), Epoch(1), structs.replace(plain, group=tag)), RunningEventTime())
    at(header, {4: ("B", 2), 6: ("H", 32), 8: ("H", 140), 10: ("H", 0)})
    at(header, {96: ("Q", 1), 104: ("Q", 2), 112: ("Q", 3), 120: ("Q", 4), 128: ("Q", 5)})
    at(header, {136: ("I", crc32c(header[:136]))})
    header, _ = encode_frame(Entry(LLSN(1), Epoch(1), structs.replace(plain, more=True)), RunningEventTime())
    at(header, {4: ("B", 2), 6: ("H", 16), 8: ("H", 100)})
    header, _ = encode_frame(Entry(LLSN(1), Epoch(1), plain), RunningEventTime())
    at(header, {4: ("B", 1), 6: ("H", 0), 8: ("H", 100)})


def test_a_checkpoint_of_before_there_were_groups_is_read() -> None:
    window = ProducerWindow(ProducerId("p"), ProducerEpoch(1), Sequence(2), ())
    old = msgspec.msgpack.encode((LLSN(9), (window,)))
    found = layout.decode_struct(layout.encode_whole(layout.DEDUP, old), layout.DEDUP, PATH, DedupCheckpoint)
    assert found == DedupCheckpoint(LLSN(9), (window,))


def test_headers_marks_and_records_are_laid_out_as_documented() -> None:
    header = layout.encode_header(
        layout.SEGMENT, FileHeader(1, LLSN(2), 3, 4, RunningEventTime(EventTime(5), EventTime(-6)))
    )
    assert header[:8] == b"CWSEGMNT"
    at(header, {8: ("H", 1), 10: ("H", 0), 12: ("I", crc32c(header[:12])), 16: ("Q", 1), 24: ("Q", 2)})
    at(
        header,
        {32: ("I", 3), 36: ("I", 4), 40: ("B", 3), 41: ("q", 5), 49: ("q", -6), 508: ("I", crc32c(header[:508]))},
    )
    mark = layout.encode_mark(SyncMark(1, 2, LLSN(3), RunningEventTime(None, EventTime(4))))
    at(mark, {0: ("Q", 1), 8: ("Q", 2), 16: ("Q", 3), 24: ("B", 2), 33: ("q", 4), 508: ("I", crc32c(mark[:508]))})
    point = layout.encode_point(LLSN(1), 2)
    at(point, {0: ("Q", 1), 8: ("I", 2), 12: ("I", crc32c(point[:12]))})
    context = layout.encode_context(CommitContext(Epoch(7), LLSN(1), GLSN(2), 6, GLSN(3), GLSN(4), CutTime(5)), 8)
    at(context, {0: ("Q", 1), 8: ("Q", 2), 16: ("Q", 3), 24: ("Q", 4), 32: ("q", 5), 40: ("Q", 6), 48: ("I", 7)})
    at(context, {52: ("I", 8), 60: ("I", crc32c(context[:60]))})
    assert context[56:60] == b"CWCC"
    whole = layout.encode_whole(layout.NODE, b"body")
    assert (whole[:8], whole[28:]) == (b"CWNODEID", b"body")
    at(whole, {16: ("I", 4), 20: ("I", crc32c(b"body")), 24: ("I", crc32c(whole[:24]))})


# Anything at all in the files.


class CarefulFile(FaultFile):
    """Notes when someone wants to read far more than there is."""

    def pread(self, size: int, offset: int) -> bytes:
        assert 0 <= size <= max(self.size(), HEADER_BYTES_MAX) + 64 * 1024, f"{size} bytes of {self.size()}"
        assert offset >= 0
        return super().pread(size, offset)


class CarefulFiles(FaultFiles):
    def open(self, path: Path) -> CarefulFile:
        return CarefulFile(self, path, self._file(path))


def use(files: FaultFiles, seed: int) -> None:
    try:
        read_everything(files)
    except BaseException as error:
        error.add_note(f"with seed {seed}: change the range of seeds in the test to this one to see it again")
        raise


def read_everything(files: FaultFiles) -> None:
    """Only errors of ours may come out of it."""
    try:
        storage = SegmentStorage(DIRECTORY, IDENTITY, SMALL, files)
    except CutwaterError:
        return
    for read in (
        storage.find,
        storage.verify,
        lambda: list(storage.contexts),
        lambda: list(storage.entries(storage.first_llsn, storage.end)),
        lambda: list(storage.heads(storage.first_llsn, storage.end)),
        lambda: storage.read(storage.first_llsn, storage.end, 10_000),
        lambda: storage.from_glsn(GLSN(5)),
        lambda: storage.from_time(CutTime(1_030)),
    ):
        with suppress(CutwaterError):
            read()


def careful(bench: FaultBench) -> CarefulFiles:
    files = CarefulFiles()
    for path in bench.files.paths():
        files.put(path, bench.files.content(path))
    return files


def garble(rng: Random, content: bytes) -> bytes:
    """Some way in which a file may be wrong."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(6)
        at = rng.randrange(len(data) + 1)
        size = rng.choice((1, 4, 16, 64, 512))
        if kind == 0:
            data[at : at + size] = rng.randbytes(size)
        elif kind == 1:
            del data[at : at + size]
        elif kind == 2:
            data[at:at] = rng.randbytes(size)
        elif kind == 3:
            data[at : at + size] = bytes(size)
        elif kind == 4:
            other = rng.randrange(len(data) + 1)
            data[at : at + size] = data[other : other + size]
        else:
            data = bytearray(rng.randbytes(rng.randrange(3000)))
    return bytes(data)


def test_any_bytes_in_any_file_give_an_error_of_ours_or_the_truth(tmp_path: Path) -> None:
    bench = filled(tmp_path)
    for seed in range(500):
        rng = Random(f"garble/{seed}")
        files = careful(bench)
        for path in rng.sample(files.paths(), rng.randint(1, 2)):
            files.put(path, garble(rng, files.content(path)))
        use(files, seed)


def test_wrong_numbers_under_right_checksums_do_no_harm(tmp_path: Path) -> None:
    """Sectors, records and headers with random content and a correct checksum: nobody can make those by accident."""
    bench = filled(tmp_path)
    for seed in range(300):
        rng = Random(f"forge/{seed}")
        files = careful(bench)
        path = rng.choice([path for path in files.paths() if path.suffix])
        data = bytearray(files.content(path))
        if path.suffix == ".commits" and rng.random() < 0.5:
            at = layout.HEADER_BYTES + 64 * rng.randrange(SMALL.commits_per_file)
            reseal(data, at, at + 64, rng, 0)
        elif rng.random() < 0.3:
            at = layout.HEADER_BYTES + 16 * rng.randrange(4)
            reseal(data, at, at + 16, rng, 0)
        else:
            sector = rng.randrange(4)
            reseal(data, sector * 512, (sector + 1) * 512, rng, 16 if sector in (0, 3) else 0)
            if sector in (0, 3):
                data[(3 - sector) * 512] ^= 1
        files.put(path, bytes(data))
        use(files, seed)


def test_any_numbers_in_small_files_do_no_harm(tmp_path: Path) -> None:
    bench = filled(tmp_path)
    numbers = (-1, 0, 1, 3, 40, 1 << 31, (1 << 63) - 1, -(1 << 63))
    for seed in range(200):
        rng = Random(f"numbers/{seed}")
        files = careful(bench)
        one, two, three = (rng.choice(numbers) for _ in range(3))
        manifest = ReplicaManifest(1, 2, 3, rng.choice((1, one)), LLSN(two))
        state = HardState(epoch=Epoch(one), base_llsn=LLSN(two), base_glsn=GLSN(three), trimmed_before=GLSN(two))
        dedup = DedupCheckpoint(LLSN(one), ())
        for name, content in (
            ("manifest", layout.encode_struct(layout.MANIFEST, manifest)),
            ("state", layout.encode_struct(layout.HARD_STATE, state)),
            ("dedup", layout.encode_struct(layout.DEDUP, dedup)),
        ):
            if rng.random() < 0.6:
                files.put(DIRECTORY / name, content)
        use(files, seed)


def reseal(data: bytearray, start: int, end: int, rng: Random, keep: int) -> None:
    """Change some numbers of a record and give it a right checksum."""
    if end > len(data):
        return
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(start + keep, min(end - 4, start + 72), 4)
        data[at : at + 4] = rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", rng.randbytes(4), b"\1\0\0\0"))
    data[end - 4 : end] = struct.pack("<I", crc32c(bytes(data[start : end - 4])))


@settings(max_examples=300)
@given(st.binary(max_size=200), st.sampled_from([layout.MANIFEST, layout.HARD_STATE, layout.DEDUP]))
def test_random_bytes_are_no_small_file(data: bytes, magic: bytes) -> None:
    with pytest.raises(DamagedFile):
        layout.decode_whole(data, magic, PATH)
