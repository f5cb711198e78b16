"""Each fault of the simulated disk: it strikes where it is told to, and does what it says."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest

from cutwater.storage.files import BLOCK_BYTES, lenient_pread, make_readable
from cutwater.testing.disk_faults import DiskFault, DiskFaultRule, ProcessDied
from cutwater.testing.fault_files import DISK_BYTES, FaultFile, FaultFiles

HOME = Path("/disk")
A, B = HOME / "a", HOME / "b"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def disk(*rules: DiskFaultRule, clock: Clock | None = None) -> FaultFiles:
    """A disk with a durable directory. The rules begin to hold afterwards."""
    files = FaultFiles(Random(1), clock=clock or Clock())
    files.make_dir(HOME)
    for rule in rules:
        files.faults.add(rule)
    return files


def durable(files: FaultFiles, path: Path, content: bytes) -> FaultFile:
    files.put(path, content)
    return files.open(path)


def always(fault: DiskFault, pattern: str = "*") -> DiskFaultRule:
    return DiskFaultRule(fault, 1.0, pattern)


def test_a_rule_strikes_by_path_and_probability_and_is_counted() -> None:
    files = disk(DiskFaultRule(DiskFault.READ_ERROR, 0.5, "*/a"))
    one, other = durable(files, A, b"abc"), durable(files, B, b"abc")
    failed = 0
    told = set()
    for _ in range(100):
        assert other.pread(3, 0) == b"abc"
        try:
            assert one.pread(3, 0) == b"abc"
        except OSError as error:
            told.add((error.errno, error.filename))
            failed += 1
    assert told == {(errno.EIO, str(A))}
    assert 30 < failed < 70
    assert files.faults.struck == {(DiskFault.READ_ERROR, "pread"): failed}
    files.faults.clear()
    assert one.pread(3, 0) == b"abc"


def test_the_same_numbers_give_the_same_faults() -> None:
    def run() -> tuple[list[str], bytes]:
        files = disk(*(DiskFaultRule(fault, 0.3) for fault in DiskFault))
        seen = []
        file = durable(files, A, bytes(5_000))
        for i in range(200):
            try:
                file.pwritev([b"%d" % i], i * 20)
                seen.append(file.pread(5_000, 0).hex())
                file.sync_data()
            except OSError as error:
                seen.append(str(error))
        files.crash(Random(3))
        return seen, files.content(A)

    assert run() == run()


@pytest.mark.parametrize("call", ["create", "rename", "unlink", "remove_dir", "make_dir", "truncate"])
def test_a_change_that_fails_changes_nothing(call: str) -> None:
    files = disk()
    file = durable(files, A, b"abc")
    files.make_dir(HOME / "d")
    files.faults.add(always(DiskFault.WRITE_ERROR))
    calls = {
        "create": lambda: files.create(B),
        "rename": lambda: files.rename(A, B),
        "unlink": lambda: files.unlink(A),
        "remove_dir": lambda: files.remove_dir(HOME / "d"),
        "make_dir": lambda: files.make_dir(HOME / "e"),
        "truncate": lambda: file.truncate(1),
    }
    with pytest.raises(OSError, match="Input/output error"):
        calls[call]()
    assert files.faults.struck[DiskFault.WRITE_ERROR, call] == 1
    assert (files.names(HOME), files.content(A)) == (["a", "d"], b"abc")


@pytest.mark.parametrize(("fault", "number"), [(DiskFault.WRITE_ERROR, errno.EIO), (DiskFault.FULL, errno.ENOSPC)])
def test_a_write_that_fails_may_be_half_done(fault: DiskFault, number: int) -> None:
    files = disk(always(fault, "*/a"))
    written = set()
    for _ in range(50):
        file = durable(files, A, b"")
        with pytest.raises(OSError) as error:
            file.pwritev([b"abc", b"def"], 0)
        assert error.value.errno == number
        assert b"abcdef".startswith(files.content(A))
        written.add(len(files.content(A)))
    assert written == {0, 1, 2, 3, 4, 5}


def test_a_full_disk_takes_what_fits() -> None:
    files = disk()
    file = durable(files, A, b"abc")
    files.room_bytes = 2
    assert files.free_space(A).free_bytes == 2
    with pytest.raises(OSError, match="No space left"):
        file.pwritev([b"123456"], 2)
    assert files.content(A) == b"ab123"
    files.room_bytes = None
    assert files.free_space(A).free_bytes == DISK_BYTES


def test_a_flipped_read_is_wrong_in_one_bit_and_only_once() -> None:
    files = disk(always(DiskFault.FLIPPED_READ))
    file = durable(files, A, bytes(100))
    data = file.pread(100, 0)
    assert sum(byte.bit_count() for byte in data) == 1
    assert files.content(A) == bytes(100)


def test_a_stale_read_shows_what_was_there_before_a_write() -> None:
    files = disk(DiskFaultRule(DiskFault.STALE_READ, 0.5))
    file = durable(files, A, b"a" * 10)
    file.pwritev([b"bbb"], 2)
    file.pwritev([b"cccc"], 8)
    found = {file.pread(10, 0) for _ in range(50)}
    assert found == {b"aabbbaaacc", b"aaaaaaaacc", b"aabbbaaaaa"}
    assert file.pread(3, 9) in (b"ccc", b"a\0\0")


def test_a_misdirected_read_shows_another_sector() -> None:
    files = disk(always(DiskFault.MISDIRECTED_READ))
    content = b"a" * 512 + b"b" * 512 + b"c" * 100
    file = durable(files, A, content)
    found = {file.pread(300, 600) for _ in range(50)}
    assert found == {b"a" * 300, b"b" * 300, b"c" * 100 + bytes(200)}
    assert files.content(A) == content


def test_a_misdirected_write_shows_when_the_cache_is_gone() -> None:
    files = disk()
    content = bytes([1]) * 4_096
    one, _ = durable(files, A, content), durable(files, B, content)
    files.faults.add(always(DiskFault.MISDIRECTED_WRITE))
    one.pwritev([b"\2" * 512], 0)
    files.faults.clear()
    one.sync_data()
    assert one.pread(512, 0) == b"\2" * 512
    files.evict()
    wrong = files.content(A) + files.content(B)
    assert wrong.count(2) == 512
    assert len(wrong) == 8_192
    assert wrong.index(2) % 512 == 0


def test_bits_flip_at_rest_when_a_file_is_synced() -> None:
    files = disk()
    file = durable(files, A, bytes(1_000))
    files.faults.add(always(DiskFault.FLIP_AT_REST))
    file.sync_data()
    files.crash(Random(1))
    assert sum(byte.bit_count() for byte in files.content(A)) == 1


def test_a_failed_sync_loses_pages_and_the_next_one_does_not_say_so() -> None:
    lost = 0
    for seed in range(40):
        files = disk()
        files.rng = Random(seed)
        file = durable(files, A, b"old")
        file.pwritev([b"new"], 0)
        files.faults.add(always(DiskFault.SYNC_ERROR))
        with pytest.raises(OSError, match="Input/output error"):
            file.sync_data()
        files.faults.clear()
        file.sync_data()
        assert file.pread(3, 0) == b"new", "the cache still shows it"
        files.evict()
        lost += file.pread(3, 0) != b"new"
    assert 5 < lost < 35


def test_a_forgotten_sync_of_the_directory_loses_names() -> None:
    found = set()
    for seed in range(40):
        files = disk()
        files.put(A, b"old")
        files.create(HOME / "t").pwritev([b"new"], 0)
        files.open(HOME / "t").sync_all()
        files.rename(HOME / "t", A)
        files.crash(Random(seed))
        found.add((tuple(path.name for path in files.paths()), files.content(A)))
    assert found == {(("a",), b"old"), (("a", "t"), b"old"), (("a",), b"new")}


def test_directories_are_renamed_and_removed_with_what_is_in_them() -> None:
    files = disk()
    files.make_dir(HOME / "d.new")
    files.create(HOME / "d.new" / "x").sync_all()
    files.sync_dir(HOME / "d.new")
    files.rename(HOME / "d.new", HOME / "d")
    copy = files.copy()
    copy.crash(Random(1), keep=0.0)
    assert copy.paths() == [HOME / "d.new" / "x"]
    files.sync_dir(HOME)
    files.unlink(HOME / "d" / "x")
    files.remove_dir(HOME / "d")
    assert files.names(HOME) == []
    files.crash(Random(1), keep=0.0)
    assert files.paths() == [HOME / "d" / "x"]


def test_unreadable_blocks_fail_until_they_are_overwritten_as_a_whole() -> None:
    files = disk()
    content = bytes([7]) * 3 * BLOCK_BYTES
    file = durable(files, A, content)
    files.spoil(A, BLOCK_BYTES + 5)
    with pytest.raises(OSError, match="Input/output error"):
        file.pread(10, 2 * BLOCK_BYTES - 1)
    with pytest.raises(OSError, match="Input/output error"):
        file.pwritev([b"x"], BLOCK_BYTES)
    assert lenient_pread(file, 3 * BLOCK_BYTES, 0).count(0) == BLOCK_BYTES
    make_readable(file, 1, BLOCK_BYTES)
    file.pwritev([b"x"], BLOCK_BYTES)
    assert file.pread(2, BLOCK_BYTES) == b"x\0"


def test_a_lock_is_gone_when_its_process_is_and_cannot_be_released_by_a_dead_one() -> None:
    files = disk()
    lock = files.lock(A)
    assert lock is not None
    assert files.lock(A) is None
    files.kill()
    again = files.lock(A)
    assert again is not None
    lock.release()
    assert files.lock(A) is None
    again.release()
    assert files.lock(A) is not None


# Time.


SLOW = DiskFaultRule(DiskFault.SLOW_SYNC, 1.0, "*", (5.0, 5.0))


def slow_step(clock: Clock) -> FaultFiles:
    """As a worker does it: data, a sync that takes five seconds, and then a mark and a rename that rely on it."""
    files = disk(clock=clock)
    file = durable(files, A, bytes(8))
    files.faults.add(SLOW)
    file.pwritev([b"data"], 0)
    file.sync_data()
    files.faults.clear()
    file.pwritev([b"mark"], 4)
    files.rename(A, B)
    return files


def test_a_slow_sync_charges_its_time_once() -> None:
    files = slow_step(Clock())
    assert files.charged_seconds == files.now == 5.0
    assert files.take_charged_seconds() == 5.0
    assert files.take_charged_seconds() == files.now == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_power_that_goes_during_a_slow_sync_takes_what_would_have_followed(seed: int) -> None:
    clock = Clock()
    files = slow_step(clock)
    files.take_charged_seconds()
    clock.now = 4.9
    files.crash(Random(seed))
    assert files.content(A)[4:] == bytes(4)
    assert not files.exists(B)


def test_another_thread_syncs_nothing_that_a_slow_one_has_not_done_yet() -> None:
    clock = Clock()
    files = slow_step(clock)
    files.take_charged_seconds()
    clock.now = 1.0
    files.sync_dir(A.parent)
    files.open(B).sync_all()
    clock.now = 4.9
    files.kill()
    assert files.content(A) == b"data" + bytes(4)
    assert not files.exists(B)


def test_during_a_slow_sync_data_may_be_lost_and_afterwards_not() -> None:
    lost = 0
    for seed in range(40):
        clock = Clock()
        files = slow_step(clock)
        clock.now = 4.9
        files.crash(Random(seed), torn=False)
        lost += files.content(A)[:4] == bytes(4)
        clock = Clock()
        files = slow_step(clock)
        clock.now = 5.0
        files.crash(Random(seed))
        assert files.content(files.paths()[0])[:4] == b"data"
    assert 5 < lost < 35


def test_a_process_that_dies_during_a_slow_sync_never_did_what_follows() -> None:
    clock = Clock()
    files = slow_step(clock)
    clock.now = 4.9
    files.kill()
    assert files.content(A) == b"data" + bytes(4)
    clock = Clock()
    files = slow_step(clock)
    clock.now = 5.1
    files.kill()
    assert files.content(B) == b"datamark"


def test_a_hung_sync_takes_minutes() -> None:
    files = disk(always(DiskFault.HUNG_SYNC, "*/a"))
    durable(files, B, b"").sync_all()
    assert files.charged_seconds == 0.0
    durable(files, A, b"").sync_all()
    assert files.take_charged_seconds() >= 60.0
    files.sync_dir(HOME)
    assert files.charged_seconds == 0.0


# Death.


def work(files: FaultFiles, tried: list[str]) -> None:
    try:
        for number in range(3):
            tried.append("create")
            file = files.create(HOME / str(number))
            tried.append("write")
            file.pwritev([b"abc"], 0)
            tried.append("sync")
            file.sync_all()
    finally:
        with pytest.raises(ProcessDied):
            files.unlink(HOME / "0")
        with pytest.raises(ProcessDied):
            files.exists(HOME)


@pytest.mark.parametrize("last", range(1, 9))
def test_a_process_dies_at_the_nth_operation_and_does_nothing_more(last: int) -> None:
    files = disk()
    deaths: list[int] = []
    tried: list[str] = []
    files.on_death = lambda: deaths.append(1)
    files.die_at = files.calls + last
    with pytest.raises(ProcessDied):
        work(files, tried)
    assert (len(tried), deaths) == (last, [1])
    files.kill()
    assert len(files.names(HOME)) == -(-(last - 1) // 3)
    files.create(HOME / "alive")


def test_a_write_during_which_the_process_dies_is_done_in_part() -> None:
    found = set()
    for seed in range(40):
        files = disk()
        files.rng = Random(seed)
        file = durable(files, A, b"")
        files.die_at = files.calls + 1
        with pytest.raises(ProcessDied):
            file.pwritev([b"abc"], 0)
        files.kill()
        with pytest.raises(OSError, match="opened by a process that died"):
            file.size()
        found.add(files.content(A))
    assert found == {b"", b"a", b"ab", b"abc"}
