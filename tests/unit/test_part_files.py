"""Staged parts on disk: complete and durable under their names, or not there; damage is found, and whole frames come
back."""

from __future__ import annotations

import errno
from contextlib import nullcontext
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cutwater.core.publish.staged import PartSize, StagedPart
from cutwater.errors import Damaged, InvalidArgument
from cutwater.format.checksum import crc32c
from cutwater.format.entry_codec import NO_TIME, encode_frame, frames_in, staged_frame
from cutwater.format.errors import DiskFull, StorageBroken
from cutwater.storage.part_files import Held, StagingFiles, name_of
from cutwater.testing.disk_faults import DiskFault, DiskFaultRule
from cutwater.testing.fault_files import FaultFiles
from cutwater.types import LLSN, Batch, BatchNumber, Entry, Epoch, EventTime, RunId, TopicId

STAGED = Path("/volume/cid=1/snid=1/staged")
PART = StagedPart(RunId(3), BatchNumber(7), 1, TopicId(2), "0123456789abcdef" * 2)
OTHER = StagedPart(RunId(3), BatchNumber(7), 1, TopicId(2), "f" * 32)


def area_of(files: FaultFiles) -> StagingFiles:
    return StagingFiles(lambda: nullcontext(STAGED), files)


def batch(body: bytes, count: int = 1) -> Batch:
    return Batch(count, body, crc32c(body), EventTime(1), EventTime(2), schema=4)


def frames(*bodies: bytes, first: int = 1) -> bytes:
    return b"".join(b"".join(staged_frame(batch(body), first + i)) for i, body in enumerate(bodies))


def staged(files: FaultFiles, *bodies: bytes) -> Held:
    writer = area_of(files).begin(PART)
    for i, body in enumerate(bodies):
        writer.append(frames(body, first=i + 1))
    return writer.finish(99)


def test_a_part_comes_back_after_a_restart_as_it_was_staged() -> None:
    files = FaultFiles()
    held = staged(files, b"one", b"two" * 1000, b"three")
    found, broken = area_of(files).open([STAGED, Path("/never/used")])
    assert (found, broken) == ([held], [])
    assert (held.part, held.size.entries, held.size.rows, held.staged_us) == (PART, 3, 3, 99)
    data = area_of(files).read(held, 0, 1 << 20)
    assert data == frames(b"one", b"two" * 1000, b"three")
    assert [frame.entry.batch for frame in frames_in(data)] == [batch(b"one"), batch(b"two" * 1000), batch(b"three")]


@pytest.mark.parametrize("bytes_max", [1, 200, 3_300, 1 << 20])
def test_reading_goes_by_whole_frames_and_at_least_one(bytes_max: int) -> None:
    files = FaultFiles()
    bodies = [b"a" * 50, b"b" * 3_000, b"c", b"d" * 2_000]
    held, area = staged(files, *bodies), area_of(files)
    offset, found = 0, []
    while data := area.read(held, offset, bytes_max):
        got = [bytes(frame.body) for frame in frames_in(data)]
        assert len(got) == 1 or len(data) <= bytes_max
        found += got
        offset += len(data)
    assert (found, offset) == (bodies, held.size.bytes)
    with pytest.raises(InvalidArgument):
        area.read(held, offset + 1, bytes_max)


def test_what_was_never_finished_is_gone_after_a_restart() -> None:
    files = FaultFiles()
    area_of(files).begin(PART).append(frames(b"half"))
    files.kill()
    assert area_of(files).open([STAGED]) == ([], [])
    assert files.paths() == []


def test_a_part_that_a_dead_process_left_is_durable_once_it_is_found() -> None:
    files = FaultFiles()
    staged(files, b"one")
    files.faults.add(DiskFaultRule(DiskFault.SYNC_ERROR, 1.0, str(STAGED)))
    writer = area_of(files).begin(OTHER)
    writer.append(frames(b"two"))
    with pytest.raises(StorageBroken):
        writer.finish(1)
    files.faults.clear()
    files.kill()
    found, broken = area_of(files).open([STAGED])
    assert ([held.part for held in found], broken) == ([PART, OTHER], [])
    files.crash(Random(1), keep=0.0)
    assert area_of(files).open([STAGED]) == (found, [])


def test_a_part_can_be_finished_after_frames_for_which_there_was_no_room() -> None:
    files = FaultFiles()
    area = area_of(files)
    writer = area.begin(PART)
    writer.append(frames(b"one"))
    files.room_bytes = 100
    with pytest.raises(DiskFull):
        writer.append(frames(b"x" * 1_000, first=2))
    files.room_bytes = None
    held = writer.finish(1)
    assert area.open([STAGED]) == ([held], [])
    assert area.read(held, 0, 1 << 20) == frames(b"one")


@given(st.integers(0, 2**32), st.integers(0, 40))
def test_after_a_power_cut_an_acknowledged_part_is_whole_and_any_other_is_whole_or_gone(seed: int, until: int) -> None:
    rng, files = Random(seed), FaultFiles()
    acknowledged = None
    try:
        whole = FaultFiles()
        staged(whole, b"one", b"two" * 500)
        for operation in whole.operations[:until]:
            files.do(operation)
        if until >= len(whole.operations):
            acknowledged = PART
    finally:
        files.make_dir(STAGED)
    files.crash(rng)
    found, broken = area_of(files).open([STAGED])
    assert not broken
    if acknowledged is not None:
        assert [held.part for held in found] == [acknowledged]
    for held in found:
        assert area_of(files).verify(held) == []
        assert area_of(files).read(held, 0, 1 << 20) == frames(b"one", b"two" * 500)


@given(st.data())
def test_every_wrong_bit_is_found(data: st.DataObject) -> None:
    files = FaultFiles()
    held = staged(files, b"one", b"two" * 20)
    offset = data.draw(st.integers(0, len(files.content(held.path)) - 1))
    files.flip(held.path, offset, data.draw(st.integers(0, 7)))
    area = area_of(files)
    assert area.verify(held) != []
    found, broken = area.open([STAGED])
    if found:
        with pytest.raises(Damaged):
            area.read(held, len(area.read(held, 0, 1)), 1)
    else:
        assert broken[0].path == held.path


def test_one_file_that_cannot_be_read_does_not_keep_the_others_from_being_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = FaultFiles()
    held, area = staged(files, b"one"), area_of(files)
    other = structs.replace(PART, part="f" * 32)
    writer = area.begin(other)
    writer.append(frames(b"two"))
    good = writer.finish(2)
    area.begin(structs.replace(PART, part="e" * 32))
    really_open, really_names = files.open, files.names

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "open", lambda path: fail(path) if path == held.path else really_open(path))
    monkeypatch.setattr(files, "unlink", fail)
    elsewhere = Path("/broken/staged")
    files.make_dir(elsewhere)
    monkeypatch.setattr(files, "names", lambda path: fail(path) if path == elsewhere else really_names(path))
    found, broken = area.open([elsewhere, STAGED])
    assert found == [good]
    left = STAGED / (name_of(structs.replace(PART, part="e" * 32)) + ".tmp")
    assert [one.path for one in broken] == [elsewhere, held.path, left]
    assert all("Input/output error" in one.why for one in broken)


@pytest.mark.parametrize("size", [0, 5, 40])
def test_what_is_said_of_a_damaged_part_is_true_of_parts(size: int) -> None:
    files = FaultFiles()
    held = staged(files, b"one")
    files.open(held.path).truncate(size)
    ((broken,)) = area_of(files).open([STAGED])[1]
    assert "another holder" in broken.why
    assert "another replica" not in broken.why


def test_a_full_disk_and_a_failing_one_are_told_apart_and_nothing_is_acknowledged() -> None:
    files = FaultFiles()
    area = area_of(files)
    writer = area.begin(PART)
    files.room_bytes = 10
    with pytest.raises(DiskFull):
        writer.append(frames(b"x" * 100))
    files.room_bytes = None
    writer.append(frames(b"x" * 100))
    files.fail_sync = lambda path: True
    with pytest.raises(StorageBroken):
        writer.finish(1)
    writer.discard()
    files.fail_sync = lambda path: False
    assert area.open([STAGED]) == ([], [])


def test_frames_that_a_part_cannot_have_are_refused_and_change_nothing() -> None:
    files = FaultFiles()
    writer = area_of(files).begin(PART)
    writer.append(frames(b"one"))
    header, trailer = encode_frame(Entry(LLSN(2), Epoch(3), batch(b"two")), NO_TIME)
    in_a_stream = header + b"two" + trailer
    for wrong in (frames(b"again"), frames(b"later", first=3), in_a_stream):
        with pytest.raises(InvalidArgument):
            writer.append(wrong)
    for garbage in (b"garbage", frames(b"two", first=2)[:-1], frames(b"two", first=2) + b"x"):
        with pytest.raises(Damaged):
            writer.append(garbage)
    writer.append(frames(b"two", first=2))
    assert writer.finish(1).size == PartSize(2, 2, len(frames(b"one", b"two")))


@pytest.mark.parametrize("name", ["", "../../../etc/passwd", "0" * 31, "0" * 33, "G" * 32, "0" * 31 + "\n"])
def test_a_part_cannot_choose_where_it_lies(name: str) -> None:
    files = FaultFiles()
    with pytest.raises(InvalidArgument):
        area_of(files).begin(StagedPart(RunId(1), BatchNumber(1), 1, TopicId(1), name))
    assert files.paths() == []


def test_dropping_is_for_ever_and_leaves_the_others() -> None:
    files = FaultFiles()
    held = staged(files, b"one")
    area = area_of(files)
    other = StagedPart(RunId(3), BatchNumber(8), 1, TopicId(2), "f" * 32)
    writer = area.begin(other)
    writer.append(frames(b"two"))
    writer.finish(2)
    area.drop([held])
    files.crash(Random(1), keep=0.0)
    assert [found.part for found in area.open([STAGED])[0]] == [other]
    assert files.paths() == [STAGED / name_of(other)]
