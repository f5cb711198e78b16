"""The simulated disk against the real file system, and against what its guarantees say of a crash.

Each seed is one test, so the name of a failed one is the command that replays it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cutwater.storage.files import File, Lock, OsFiles, StorageFiles
from cutwater.testing.fault_files import FaultFiles

SEEDS = 40
STEPS = 250
PLACES = ["a", "b", "d", "e", "d/a", "d/b", "d/e", "e/a", "e/d", "d/e/a", "a/b", "missing/a"]
LOCKS = ["lock", "d/lock", "missing/lock"]


class Side:
    """The same calls go to two of these."""

    def __init__(self, files: StorageFiles, root: Path) -> None:
        self.files, self.root = files, root
        self.open: list[File] = []
        self.locks: list[Lock] = []

    def keep(self, file: File) -> int:
        self.open.append(file)
        return len(self.open)

    def lock(self, path: str) -> bool:
        lock = self.files.lock(self.root / path)
        if lock is not None:
            self.locks.append(lock)
        return lock is not None


class Twins:
    def __init__(self, directory: Path, seed: int) -> None:
        self.rng = Random(f"files/{seed}")
        self.fake = FaultFiles()
        self.fake.make_dir(Path("/disk"))
        self.sides = [Side(OsFiles(), directory), Side(self.fake, Path("/disk"))]
        self.done: list[str] = []

    def both(self, what: str, call: Callable[[Side], Any]) -> Any:
        self.done.append(what)
        outcomes: list[Any] = []
        for side in self.sides:
            try:
                outcomes.append(call(side))
            except OSError as error:
                outcomes.append((type(error), error.errno, str(error.filename).removeprefix(str(side.root))))
        assert outcomes[0] == outcomes[1], "\n".join(self.done[-12:])
        return outcomes[0]

    def step(self) -> None:
        kind = self.rng.choices(
            ["file", "create", "open", "rename", "unlink", "make", "remove", "look", "sync", "lock", "release"],
            [10, 5, 4, 5, 3, 4, 2, 2, 1, 1, 1],
        )[0]
        getattr(self, kind)()

    def place(self) -> str:
        return self.rng.choice(PLACES)

    def create(self) -> None:
        path = self.place()
        self.both(f"create {path}", lambda side: side.keep(side.files.create(side.root / path)))

    def open(self) -> None:
        path = self.place()
        self.both(f"open {path}", lambda side: side.keep(side.files.open(side.root / path)))

    def rename(self) -> None:
        source, target = self.place(), self.place()
        self.both(f"rename {source} {target}", lambda side: side.files.rename(side.root / source, side.root / target))

    def unlink(self) -> None:
        path = self.place()
        self.both(f"unlink {path}", lambda side: side.files.unlink(side.root / path))

    def make(self) -> None:
        path = self.rng.choice(["d", "e", "d/e", "a", "d/a", "e/d"])
        self.both(f"make_dir {path}", lambda side: side.files.make_dir(side.root / path))

    def remove(self) -> None:
        path = self.place()
        self.both(f"remove_dir {path}", lambda side: side.files.remove_dir(side.root / path))

    def look(self) -> None:
        path = self.rng.choice([*PLACES, "."])
        self.both(f"names {path}", lambda side: side.files.names(side.root / path))
        self.both(f"is_dir {path}", lambda side: side.files.is_dir(side.root / path))
        self.both(f"exists {path}", lambda side: side.files.exists(side.root / path))

    def sync(self) -> None:
        path = self.place()
        self.both(f"sync_dir {path}", lambda side: side.files.sync_dir(side.root / path))

    def lock(self) -> None:
        path = self.rng.choice(LOCKS)
        self.both(f"lock {path}", lambda side: side.lock(path))

    def release(self) -> None:
        if self.sides[0].locks:
            at = self.rng.randrange(len(self.sides[0].locks))
            self.both("release", lambda side: side.locks.pop(at).release())

    def file(self) -> None:
        count = len(self.sides[0].open)
        if not count:
            return
        at, offset, size = self.rng.randrange(count), self.rng.randrange(3_000), self.rng.randrange(1_500)
        kind = self.rng.choice(["read", "write", "write", "write", "truncate", "size", "sync_data", "sync_all"])
        if kind == "read":
            self.both(f"pread {at}", lambda side: side.open[at].pread(size, offset))
        elif kind == "write":
            sizes = [self.rng.choice((0, 1, 300, 1_000)) for _ in range(self.rng.choice((1, 2, 5, 1_100)))][:1_100]
            buffers = [self.rng.randbytes(size % 7 if len(sizes) > 9 else size) for size in sizes]
            self.both(f"pwritev {at}", lambda side: side.open[at].pwritev(buffers, offset))
        elif kind == "truncate":
            self.both(f"truncate {at} {offset}", lambda side: side.open[at].truncate(offset))
        else:
            self.both(f"{kind} {at}", lambda side: getattr(side.open[at], kind)())

    def compare(self) -> None:
        """The same names with the same content. What a lock writes into its file is not compared."""
        real: dict[str, bytes | None] = {}
        for directory, directories, files in os.walk(self.sides[0].root):
            path = Path(directory).relative_to(self.sides[0].root)
            real |= {str(path / name): None for name in directories}
            real |= {str(path / name): (Path(directory) / name).read_bytes() for name in files}
        fake = tree(self.fake, Path("/disk"))
        for content in (real, fake):
            content |= {name: b"" for name in content if name.endswith("lock")}
        assert real == fake, "\n".join(self.done[-12:])


def tree(files: FaultFiles, root: Path) -> dict[str, bytes | None]:
    """All names below a directory; None is a directory."""
    found: dict[str, bytes | None] = {}
    waiting = [root]
    while waiting:
        directory = waiting.pop()
        for name in files.names(directory):
            path = directory / name
            is_dir = files.is_dir(path)
            found[str(path.relative_to(root))] = None if is_dir else files.content(path)
            waiting += [path] if is_dir else []
    return found


@pytest.mark.parametrize("seed", range(SEEDS))
def test_without_faults_it_is_like_real_files(seed: int, tmp_path: Path) -> None:
    twins = Twins(tmp_path, seed)
    for number in range(STEPS):
        twins.step()
        if number % 10 == 0:
            twins.compare()
    twins.compare()


# What survives a crash.


class Versions:
    """What may be in a file: everything since the last sync of all of it."""

    def __init__(self) -> None:
        self.seen: list[bytes] = [b""]
        self.shrunk = False
        self.pinned: dict[int, int] = {}
        """Bytes that are synced although something earlier, a shorter length, is not."""
        self._since_shrink: dict[int, int] = {}

    def change(self, content: bytes, written: range | None) -> None:
        if written is None:
            self.shrunk = self.shrunk or len(content) < len(self.seen[-1])
            self.pinned.clear()
            self._since_shrink.clear()
        else:
            for at in written:
                self.pinned.pop(at, None)
                self._since_shrink[at] = content[at]
        self.seen.append(content)

    def sync(self, *, everything: bool) -> None:
        if everything or not self.shrunk:
            self.seen, self.shrunk = self.seen[-1:], False
            self.pinned.clear()
            self._since_shrink.clear()
        else:
            self.pinned |= self._since_shrink

    def may_be(self, content: bytes) -> bool:
        sizes = [len(one) for one in self.seen]
        if not min(sizes) <= len(content) <= max(sizes):
            return False
        if any(at >= len(content) or content[at] != byte for at, byte in self.pinned.items()):
            return False
        for at, byte in enumerate(content):
            possible = {one[at] if at < len(one) else 0 for one in self.seen}
            if byte not in possible:
                return False
        return True


class CrashModel:
    """Files in two directories, and what each name may lead to after a crash."""

    NAMES = tuple(Path(f"/{directory}/{name}") for directory in "xy" for name in "abc")

    def __init__(self, seed: int) -> None:
        self.rng = Random(f"crash/{seed}")
        self.files = FaultFiles()
        for directory in "xy":
            self.files.make_dir(Path(f"/{directory}"))
        self.open: dict[Path, tuple[File, Versions]] = {}
        self.may: dict[Path, list[Versions | None]] = {path: [None] for path in self.NAMES}
        """What each name led to since the last sync of its directory. The last one is what it leads to now."""

    def step(self) -> None:
        kind = self.rng.choices(
            ["create", "write", "truncate", "sync", "rename", "unlink", "names"], [3, 8, 2, 4, 3, 1, 2]
        )
        getattr(self, kind[0])()

    def create(self) -> None:
        path = self.rng.choice([path for path in self.NAMES if path not in self.open] or [None])
        if path is not None:
            self.open[path] = (self.files.create(path), Versions())
            self.may[path].append(self.open[path][1])

    def some(self) -> tuple[Path, File, Versions] | None:
        if not self.open:
            return None
        path = self.rng.choice(list(self.open))
        return path, *self.open[path]

    def write(self) -> None:
        if some := self.some():
            path, file, versions = some
            offset, data = self.rng.randrange(1_200), self.rng.randbytes(self.rng.choice((1, 40, 700, 1_300)))
            file.pwritev([data], offset)
            versions.change(self.files.content(path), range(offset, offset + len(data)))

    def truncate(self) -> None:
        if some := self.some():
            path, file, versions = some
            file.truncate(self.rng.randrange(2_000))
            versions.change(self.files.content(path), None)

    def sync(self) -> None:
        if some := self.some():
            _, file, versions = some
            everything = self.rng.random() < 0.5
            file.sync_all() if everything else file.sync_data()
            versions.sync(everything=everything)

    def rename(self) -> None:
        if some := self.some():
            source, target = some[0], self.rng.choice(self.NAMES)
            if source != target:
                self.files.rename(source, target)
                self.open[target] = self.open.pop(source)
                self.may[target].append(self.open[target][1])
                self.may[source].append(None)

    def unlink(self) -> None:
        if some := self.some():
            self.files.unlink(some[0])
            del self.open[some[0]]
            self.may[some[0]].append(None)

    def names(self) -> None:
        directory = Path(self.rng.choice(("/x", "/y")))
        self.files.sync_dir(directory)
        for path in self.NAMES:
            if path.parent == directory:
                # A file that was moved to another directory is also there until that one is synced.
                self.may[path] = self.may[path] if self.moved_away(path) else self.may[path][-1:]

    def moved_away(self, path: Path) -> bool:
        """Whether this name went with a file that got a name in the other directory, which is not synced."""
        gone = [versions for versions in self.may[path][:-1] if versions is not None]
        others = [other for other in self.NAMES if other.parent != path.parent]
        return any(versions in self.may[other][1:] for versions in gone for other in others)

    def check(self) -> None:
        """Nothing is there that was never written, and nothing is missing that was synced."""
        found = set(self.files.paths())
        assert found <= set(self.NAMES)
        for path, candidates in self.may.items():
            if path in found:
                content = self.files.content(path)
                assert any(one is not None and one.may_be(content) for one in candidates), path
            else:
                assert None in candidates, f"{path} is lost"


@pytest.mark.parametrize("seed", range(150))
def test_a_crash_keeps_what_was_synced_and_invents_nothing(seed: int) -> None:
    model = CrashModel(seed)
    for _ in range(60):
        model.step()
        if model.rng.random() < 0.2:
            # The next crash is one of a copy, so that the history goes on.
            disk, model.files = model.files, model.files.copy()
            model.files.crash(model.rng, keep=model.rng.choice((0.0, 0.5, 1.0)), torn=model.rng.random() < 0.5)
            model.check()
            model.files = disk


def test_every_loss_that_is_allowed_does_happen() -> None:
    """The check above would hold for a disk that loses nothing, too."""
    lost = torn = renamed = kept = 0
    for seed in range(200):
        files = FaultFiles()
        files.make_dir(Path("/x"))
        file = files.create(Path("/x/a"))
        file.pwritev([bytes(1_024)], 0)
        file.sync_all()
        files.sync_dir(Path("/x"))
        file.pwritev([b"\1" * 1_024], 0)
        files.rename(Path("/x/a"), Path("/x/b"))
        files.crash(Random(seed))
        (path,) = files.paths()
        renamed += path.name == "b"
        count = files.content(path).count(1)
        lost, torn, kept = lost + (count == 0), torn + (0 < count < 1_024), kept + (count == 1_024)
    assert min(lost, torn, kept, renamed, 200 - renamed) > 10
