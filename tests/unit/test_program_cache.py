"""The cache of an agent: made once, intact at each use, removed only when nobody uses it, whoever dies."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cutwater.errors import CutwaterError, Damaged, DeadlineExceeded, InvalidArgument, Unavailable
from cutwater.programs.content_cache import LEFT, TEMPORARY, CacheLease, ContentCache, leased, remove_tree
from cutwater.programs.packing import PackedProgram, pack_program
from cutwater.programs.program_cache import ProgramCache

SECONDS = 20.0


def write(text: str, made: list[str] | None = None) -> object:
    def make(place: Path) -> None:
        if made is not None:
            made.append(text)
        (place / "content").write_text(text)

    return make


def reads(text: str) -> object:
    return lambda place: (place / "content").read_text() == text


def use(cache: ContentCache, text: str, made: list[str] | None = None) -> object:
    return cache.use(text, write(text, made), reads(text), seconds=SECONDS)  # type: ignore[arg-type]


def test_an_entry_is_made_once_and_again_when_it_is_damaged(tmp_path: Path) -> None:
    cache, made = ContentCache(tmp_path / "cache", bytes_max=1_000), list[str]()
    with use(cache, "a", made) as lease:
        (lease.path / "content").write_text("b")
    with use(cache, "a", made) as lease:
        assert (lease.path / "content").read_text() == "a"
    with use(ContentCache(tmp_path / "cache", bytes_max=1_000), "a", made):
        assert made == ["a", "a"]
    assert cache.names() == ["a"]


def test_unused_entries_go_and_used_ones_stay(tmp_path: Path) -> None:
    cache = ContentCache(tmp_path / "cache", bytes_max=25)
    kept = use(cache, "1" * 10)
    for name in ("2", "3", "4"):
        use(cache, name * 10).release()
        time.sleep(0.01)
    assert cache.names() == ["1" * 10, "4" * 10]
    kept.release()
    use(cache, "5" * 10).release()
    assert cache.names() == ["4" * 10, "5" * 10]
    assert not [name for name in os.listdir(tmp_path / "cache") if name.startswith((TEMPORARY, LEFT))]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    cache = ContentCache(tmp_path / "cache", bytes_max=100)

    def fail(place: Path) -> None:
        (place / "half").write_text("")
        raise OSError(28, "No space left on device")

    with pytest.raises(Unavailable, match="No space left on device"):
        cache.use("a", fail, lambda place: True, seconds=SECONDS)
    assert cache.names() == []
    use(cache, "a").release()
    with pytest.raises(InvalidArgument, match="cannot be used as a cache"):
        ContentCache(tmp_path / "cache" / "a" / "content", bytes_max=100)


def test_one_makes_and_the_others_wait(tmp_path: Path) -> None:
    made: list[str] = []
    begun = threading.Event()

    def slow(place: Path) -> None:
        begun.set()
        time.sleep(0.2)
        write("a", made)(place)  # type: ignore[operator]

    def work() -> None:
        cache = ContentCache(tmp_path / "cache", bytes_max=100)
        cache.use("a", slow, reads("a"), seconds=SECONDS).release()  # type: ignore[arg-type]

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(SECONDS)
    with pytest.raises(DeadlineExceeded, match="still making"):
        ContentCache(tmp_path / "cache", bytes_max=100).use("a", slow, lambda place: True, seconds=0.0)
    for thread in threads:
        thread.join()
    assert made == ["a"]


USER = """
import random, sys
from pathlib import Path
from cutwater.programs.content_cache import ContentCache
rng, cache = random.Random(int(sys.argv[2])), ContentCache(Path(sys.argv[1]), bytes_max=2_500)
print("ready", flush=True)
while True:
    name = str(rng.randrange(6)) * 1_000
    def make(place):
        (place / "content").write_text(name[:500])
        with open(place / "content", "a") as file:
            file.write(name[500:])
    with cache.use(name[:3], make, lambda place: (place / "content").read_text() == name, seconds=20) as lease:
        for _ in range(3):
            assert (lease.path / "content").read_text() == name
    print("used", flush=True)
"""


def test_a_caller_that_is_cancelled_holds_nothing_when_the_thread_has_ended(tmp_path: Path) -> None:
    cache = ContentCache(tmp_path / "cache", bytes_max=5)
    begun, goes_on = threading.Event(), threading.Event()

    def make(place: Path) -> None:
        begun.set()
        assert goes_on.wait(SECONDS)
        (place / "content").write_text("1" * 10)

    async def cancelled() -> None:
        task = asyncio.create_task(leased(lambda _: cache.use("1", make, lambda place: True, seconds=SECONDS)))
        await asyncio.to_thread(begun.wait, SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        goes_on.set()
        give_up = time.monotonic() + SECONDS
        while "1" not in cache.names():
            await asyncio.sleep(0.01)
        # Nobody holds it, so it goes when another one comes.
        while "1" in cache.names():
            assert time.monotonic() < give_up
            await asyncio.sleep(0.01)
            use(cache, "2" * 10).release()
            remove_tree(cache.root / ("2" * 10))

    asyncio.run(cancelled())


def test_callers_that_wait_for_an_entry_keep_the_threads_of_the_loop_free(tmp_path: Path) -> None:
    """They end processes of jobs, which must not wait for an installation."""
    cache, goes_on = ContentCache(tmp_path / "cache", bytes_max=5), threading.Event()
    threads_of_loop = (os.cpu_count() or 1) + 4

    def use_it(given_up: threading.Event) -> CacheLease:
        return cache.use("1", lambda _: bool(goes_on.wait(SECONDS)), lambda _: True, seconds=SECONDS, given_up=given_up)

    async def waiting() -> None:
        tasks = [asyncio.create_task(leased(use_it)) for _ in range(min(threads_of_loop, 31))]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(SECONDS / 2):
            await asyncio.to_thread(str)
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks[1:], return_exceptions=True)
        goes_on.set()
        (await tasks[0]).release()

    asyncio.run(waiting())


def test_processes_that_are_killed_leave_whole_entries(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"replay: set seed = {seed} in this test")
    rng = random.Random(seed)
    root = tmp_path / "cache"
    users = []
    for number in range(3):
        command = [sys.executable, "-c", USER, str(root), str(seed + number)]
        users.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    for user in users:
        assert user.stdout is not None
        assert user.stdout.readline() == b"ready\n"
    time.sleep(rng.uniform(0.3, 0.6))
    for user in users:
        alive = user.poll() is None
        user.kill()
        _, errors = user.communicate()
        assert alive, errors.decode()
    cache = ContentCache(root, bytes_max=2_500)
    assert not [name for name in os.listdir(root) if name.startswith((TEMPORARY, LEFT))]
    for name in cache.names():
        assert (root / name / "content").read_text() == name[0] * 1_000


# Programs.


@pytest.fixture
def packed(tmp_path: Path) -> PackedProgram:
    program = tmp_path / "program"
    (program / "rules").mkdir(parents=True)
    (program / "fraud.py").write_text("import rules\n")
    (program / "rules" / "__init__.py").write_text("MOST = 3\n")
    return pack_program(program)


def test_a_program_is_fetched_once_and_intact_at_each_use(tmp_path: Path, packed: PackedProgram) -> None:
    fetched: list[str] = []

    async def fetch(sha256: str) -> bytes:
        fetched.append(sha256)
        return packed.data

    async def test() -> None:
        cache = ProgramCache(tmp_path / "cache")
        first = await cache.use(packed.sha256, fetch, seconds=SECONDS)
        second = await ProgramCache(tmp_path / "cache").use(packed.sha256, fetch, seconds=SECONDS)
        assert first.directory == second.directory
        assert (first.directory / "fraud.py").read_text() == "import rules\n"
        assert first.archive.read_bytes() == packed.data
        first.release()
        second.release()
        assert fetched == [packed.sha256]
        # Root, as who tests may run, can write anywhere; others cannot.
        (first.directory / "rules").chmod(0o755)
        (first.directory / "rules" / "__pycache__").mkdir()
        (first.directory / "rules" / "__pycache__" / "evil.pyc").write_bytes(b"x")
        (await cache.use(packed.sha256, fetch, seconds=SECONDS)).release()
        assert not (first.directory / "rules" / "__pycache__").exists()
        assert len(fetched) == 1
        (first.directory / "fraud.py").chmod(0o644)
        (first.directory / "fraud.py").write_text("import ruler\n")
        third = await cache.use(packed.sha256, fetch, seconds=SECONDS)
        assert (third.directory / "fraud.py").read_text() == "import rules\n"
        assert len(fetched) == 2
        third.release()

    asyncio.run(test())
    remove_tree(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_other_bytes_than_were_asked_for_are_not_unpacked(tmp_path: Path, packed: PackedProgram) -> None:
    async def fetch(sha256: str) -> bytes:
        return packed.data + b"x"

    async def test() -> None:
        cache = ProgramCache(tmp_path / "cache")
        with pytest.raises(Damaged, match="has another hash"):
            await cache.use(packed.sha256, fetch, seconds=SECONDS)
        with pytest.raises(CutwaterError):
            await cache.use("f" * 64, fetch, seconds=SECONDS)
        assert os.listdir(tmp_path / "cache") == []

    asyncio.run(test())
