"""Files and directories of a simulated disk: what programs see, what is on the disk, and the changes in between.

A change has two times: when it happens, and when it is on the disk for certain. Both may lie ahead, because code that
waits for a slow sync runs to its end at once. A crash undoes what would have happened later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from random import Random

from msgspec import Struct

SECTOR_BYTES = 512
OLD_VERSIONS_MAX = 16
TORN_SHARE = 0.3
"""How many of the writes that a crash leaves are torn."""


# Records of operations, for replaying them.


class Written(Struct, frozen=True):
    inode: int
    offset: int
    data: bytes


class Resized(Struct, frozen=True):
    """A file got another length. Bytes that are added are zeros."""

    inode: int
    size: int


class SyncedFile(Struct, frozen=True):
    inode: int
    everything: bool
    """Also that the file was shortened."""


class Made(Struct, frozen=True):
    path: str
    inode: int


class MadeDir(Struct, frozen=True):
    path: str


class Renamed(Struct, frozen=True):
    source: str
    target: str


class Removed(Struct, frozen=True):
    path: str


class SyncedNames(Struct, frozen=True):
    path: str


Operation = Written | Resized | SyncedFile | Made | MadeDir | Renamed | Removed | SyncedNames


class FileChange:
    """A change of a file that may not be on the disk yet."""

    __slots__ = ("at", "durable_at", "landed", "operation", "shortens")

    def __init__(self, operation: Written | Resized, at: float, *, shortens: bool = False) -> None:
        self.operation, self.at, self.shortens = operation, at, shortens
        self.durable_at = math.inf
        self.landed: tuple[FileInode, int] | None = None
        """Where a misdirected write goes: the file and the offset."""

    def piece(self, operation: Written | Resized) -> FileChange:
        """Return a part of this change."""
        other = FileChange(operation, self.at, shortens=self.shortens)
        other.durable_at, other.landed = self.durable_at, self.landed
        return other

    def pieces(self, rng: Random) -> list[FileChange]:
        """Return what a crash leaves of a torn write: some of its sectors, or its first bytes."""
        return [self.piece(written) for written in _tear(self.operation, rng)]


class FileInode:
    """``content`` is what programs see, ``platter`` is what is certainly on the disk, ``changes`` is the difference."""

    __slots__ = ("__weakref__", "bad_blocks", "changes", "content", "holder", "number", "old", "platter")

    def __init__(self, number: int, content: bytes = b"") -> None:
        self.number = number
        self.content, self.platter = bytearray(content), bytearray(content)
        self.changes: list[FileChange] = []
        self.old: deque[tuple[int, bytes]] = deque(maxlen=OLD_VERSIONS_MAX)
        """What the last writes replaced, and where. Only kept if reads can be stale."""
        self.bad_blocks: set[int] = set()
        """Blocks that cannot be read."""
        self.holder: object | None = None
        """The lock on this file, if any."""

    def fold(self, now: float) -> None:
        """Put on the platter what is there for certain."""
        done = 0
        for change in self.changes:
            if change.durable_at > now:
                break
            self._land(change)
            done += 1
        if done:
            del self.changes[:done]

    def sync(self, at: float, *, everything: bool) -> None:
        """Make all changes durable at this time; that the file was shortened only if ``everything`` is."""
        for change in self.changes:
            # Another thread may sync the file before a slow one has come as far as this change.
            if change.at <= at and (everything or not change.shortens):
                change.durable_at = min(change.durable_at, at)

    def fail(self, at: float, rng: Random) -> None:
        """Fail a sync: some writes are on the disk, and no later sync writes the others.

        The length is not data: the file system keeps it in its journal until it is on the disk, or goes down.
        """
        left: list[FileChange] = []
        for change in self.changes:
            if change.durable_at <= at or change.at > at or isinstance(change.operation, Resized):
                left.append(change)
                continue
            for piece in _survivors(change, rng, 0.5, torn=True):
                piece.durable_at = at
                left.append(piece)
        self.changes = left

    def lose_power(self, now: float, rng: Random, keep: float, *, torn: bool) -> None:
        """Keep what is certainly on the disk at this time, and some of the rest. Call ``evict`` afterwards."""
        for change in self.changes:
            if change.at > now:
                continue
            if change.durable_at <= now:
                self._land(change)
            else:
                for piece in _survivors(change, rng, keep, torn=torn):
                    self._land(piece)
        self.changes.clear()
        self.old.clear()

    def lose_process(self, now: float) -> None:
        """Undo what would have happened after this time."""
        happened = [change for change in self.changes if change.at <= now]
        if len(happened) < len(self.changes):
            self.changes = happened
            self.evict()

    def evict(self) -> None:
        """Read the content from the disk again. Changes that the system forgot are gone."""
        self.content = bytearray(self.platter)
        for change in self.changes:
            apply(self.content, change.operation)

    def _land(self, change: FileChange) -> None:
        operation = change.operation
        if change.landed is None:
            apply(self.platter, operation)
        elif isinstance(operation, Written):
            other, offset = change.landed
            data = operation.data[: max(len(other.platter) - offset, 0)]
            other.platter[offset : offset + len(data)] = data

    def remember(self, offset: int, size: int) -> None:
        """Keep what is there before it is overwritten."""
        self.old.append((offset, bytes(self.content[offset : offset + size]).ljust(size, b"\0")))


class DirInode:
    """``entries`` are the names that programs see, ``durable`` those that are certainly on the disk."""

    __slots__ = ("durable", "entries")

    def __init__(self) -> None:
        self.entries: dict[str, Inode] = {}
        self.durable: dict[str, Inode] = {}


Inode = FileInode | DirInode


class NameSet(Struct, frozen=True):
    """One name that leads to an inode from now on (``new``), or no longer does (``old``)."""

    directory: DirInode
    name: str
    old: Inode | None
    new: Inode | None

    def apply(self, names: dict[str, Inode]) -> None:
        if self.new is not None:
            names[self.name] = self.new
        elif names.get(self.name) is self.old:
            del names[self.name]


class NameChange:
    """Names that change together. They are durable when ``home`` is synced."""

    __slots__ = ("at", "durable_at", "home", "sets")

    def __init__(self, home: DirInode, sets: tuple[NameSet, ...], at: float) -> None:
        self.home, self.sets, self.at = home, sets, at
        self.durable_at = math.inf

    def show(self) -> None:
        for one in self.sets:
            one.apply(one.directory.entries)

    def land(self) -> None:
        for one in self.sets:
            one.apply(one.directory.durable)


class Names:
    """All directories of a disk, and the changes of names that may not be on it yet."""

    def __init__(self) -> None:
        self.root = DirInode()
        self.changes: list[NameChange] = []

    def change(self, home: DirInode, sets: tuple[NameSet, ...], at: float) -> None:
        change = NameChange(home, sets, at)
        change.show()
        self.changes.append(change)

    def sync(self, directory: DirInode, at: float) -> None:
        """Make the names in a directory durable, and what happened before to a name that a file came from."""
        left: set[tuple[int, str]] = set()
        for change in reversed(self.changes):
            if change.at > at:
                # A slow thread has not come as far as this.
                continue
            places = {(id(one.directory), one.name) for one in change.sets}
            if change.home is directory or not left.isdisjoint(places):
                change.durable_at = min(change.durable_at, at)
                left |= places

    def fold(self, now: float) -> None:
        left = []
        for change in self.changes:
            if change.durable_at <= now:
                change.land()
            else:
                left.append(change)
        self.changes = left

    def lose_power(self, now: float, rng: Random, keep: float) -> None:
        for change in self.changes:
            if change.at <= now and (change.durable_at <= now or rng.random() < keep):
                change.land()
        self.changes = []
        for directory in self.directories():
            directory.entries = dict(directory.durable)

    def lose_process(self, now: float) -> None:
        happened = [change for change in self.changes if change.at <= now]
        if len(happened) == len(self.changes):
            return
        self.changes = happened
        for directory in self.directories():
            directory.entries = dict(directory.durable)
        for change in happened:
            change.show()

    def directories(self) -> list[DirInode]:
        """Return all directories that have a name, now or after a crash."""
        waiting = [self.root]
        for change in self.changes:
            waiting += [one.new for one in change.sets if isinstance(one.new, DirInode)]
        found: dict[int, DirInode] = {}
        while waiting:
            directory = waiting.pop()
            if id(directory) not in found:
                found[id(directory)] = directory
                names = (*directory.entries.values(), *directory.durable.values())
                waiting += [inode for inode in names if isinstance(inode, DirInode)]
        return list(found.values())

    def files(self) -> list[FileInode]:
        """Return all files that have a name, now or after a crash."""
        inodes = [one.new for change in self.changes for one in change.sets]
        for directory in self.directories():
            inodes += [*directory.entries.values(), *directory.durable.values()]
        found = {inode.number: inode for inode in inodes if isinstance(inode, FileInode)}
        return [found[number] for number in sorted(found)]


def copied(names: Names) -> Names:
    """Return a copy of a whole disk."""
    made: dict[int, Inode] = {}

    def copy_of(inode: Inode) -> Inode:
        there = made.get(id(inode))
        if there is not None:
            return there
        if isinstance(inode, FileInode):
            return _copied_file(inode, made, copy_of)
        directory = made[id(inode)] = DirInode()
        directory.entries = {name: copy_of(one) for name, one in inode.entries.items()}
        directory.durable = {name: copy_of(one) for name, one in inode.durable.items()}
        return directory

    def directory_of(inode: DirInode) -> DirInode:
        directory = copy_of(inode)
        assert isinstance(directory, DirInode)
        return directory

    other = Names()
    other.root = directory_of(names.root)
    for change in names.changes:
        sets = tuple(
            NameSet(directory_of(one.directory), one.name, one.old and copy_of(one.old), one.new and copy_of(one.new))
            for one in change.sets
        )
        again = NameChange(directory_of(change.home), sets, change.at)
        again.durable_at = change.durable_at
        other.changes.append(again)
    return other


def _copied_file(inode: FileInode, made: dict[int, Inode], copy_of: Callable[[Inode], Inode]) -> FileInode:
    other = made[id(inode)] = FileInode(inode.number)
    other.content, other.platter = bytearray(inode.content), bytearray(inode.platter)
    other.bad_blocks, other.old = set(inode.bad_blocks), inode.old.copy()
    for change in inode.changes:
        again = change.piece(change.operation)
        if change.landed is not None:
            target = copy_of(change.landed[0])
            assert isinstance(target, FileInode)
            again.landed = target, change.landed[1]
        other.changes.append(again)
    return other


def apply(data: bytearray, change: Written | Resized) -> None:
    if isinstance(change, Resized):
        del data[change.size :]
        data.extend(bytes(change.size - len(data)))
        return
    end = change.offset + len(change.data)
    if len(data) < end:
        data.extend(bytes(end - len(data)))
    data[change.offset : end] = change.data


def _survivors(change: FileChange, rng: Random, keep: float, *, torn: bool) -> list[FileChange]:
    if rng.random() >= keep:
        return []
    if torn and isinstance(change.operation, Written) and rng.random() < TORN_SHARE:
        return change.pieces(rng)
    return [change]


def _tear(change: Written | Resized, rng: Random) -> list[Written]:
    assert isinstance(change, Written)
    data = change.data
    if rng.random() < 0.5:
        return [Written(change.inode, change.offset, data[: rng.randrange(len(data) + 1)])]
    parts = []
    start = 0
    while start < len(data):
        end = min(len(data), start + SECTOR_BYTES - (change.offset + start) % SECTOR_BYTES)
        if rng.random() < 0.5:
            parts.append(Written(change.inode, change.offset + start, data[start:end]))
        start = end
    return parts
