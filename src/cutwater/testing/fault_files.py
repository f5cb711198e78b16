"""An in-memory file layer that fails like a real one: the twin of ``storage.files.OsFiles``.

Every write and every change of a name is volatile until the sync that covers it. A crash keeps any part of what is
volatile: each write may survive whole, torn or not at all, independently of earlier writes; each change of a name may
survive or not. A sync can fail, after which the system calls the data clean although the disk may not have it. The disk
can be full; bits can flip. The given random number generator decides all of it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from random import Random

from msgspec import Struct

from cutwater.format.checksum import Buffer

SECTOR_BYTES = 512


# Records of operations, for replaying them.


class Written(Struct, frozen=True):
    inode: int
    offset: int
    data: bytes


class Shortened(Struct, frozen=True):
    inode: int
    size: int


class SyncedFile(Struct, frozen=True):
    inode: int


class Made(Struct, frozen=True):
    path: str
    inode: int


class Renamed(Struct, frozen=True):
    source: str
    target: str
    inode: int
    """The inode that had the old name. A crash may bring it back under the new one."""


class Removed(Struct, frozen=True):
    path: str


class SyncedNames(Struct, frozen=True):
    path: str


Operation = Written | Shortened | SyncedFile | Made | Renamed | Removed | SyncedNames


class _Inode:
    """``content`` is what readers see, ``platter`` is what is certainly on disk, ``volatile`` is the difference."""

    __slots__ = ("content", "platter", "volatile")

    def __init__(self) -> None:
        self.content = bytearray()
        self.platter = bytearray()
        self.volatile: list[Written | Shortened] = []

    def copy(self) -> _Inode:
        other = _Inode()
        other.content, other.platter = bytearray(self.content), bytearray(self.platter)
        other.volatile = list(self.volatile)
        return other


class FaultFiles:
    """Implements ``Files``."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        """All operations so far."""
        self.recording = True
        """Whether operations are recorded."""
        self.room_bytes: int | None = None
        """How many more bytes can be written before the disk is full; None means no limit."""
        self.fail_sync: Callable[[Path], bool] = lambda path: False
        """Called before each sync of a file; returns whether the sync fails."""
        self.rng = Random(0)
        """Decides which writes of a failed sync reach the disk after all."""
        self._inodes: dict[int, _Inode] = {}
        self._names: dict[str, int] = {}
        self._durable_names: dict[str, int] = {}
        self._volatile_names: list[Made | Renamed | Removed] = []
        self._dirs: set[str] = set()
        self._locks: set[str] = set()
        self._next_inode = 1

    def copy(self) -> FaultFiles:
        """Return a copy of the disk, with an empty list of operations."""
        other = copy(self)
        other.operations = []
        other._inodes = {number: inode.copy() for number, inode in self._inodes.items()}
        other._names, other._durable_names = dict(self._names), dict(self._durable_names)
        other._volatile_names, other._dirs, other._locks = list(self._volatile_names), set(self._dirs), set()
        return other

    # The interface.

    def open(self, path: Path) -> FaultFile:
        return FaultFile(self, path, self._inode_of(path))

    def _inode_of(self, path: Path) -> int:
        try:
            return self._names[str(path)]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path)) from None

    def create(self, path: Path) -> FaultFile:
        self._need(1)
        number = self._next_inode
        self.do(Made(str(path), number))
        return FaultFile(self, path, number)

    def rename(self, source: Path, target: Path) -> None:
        self.do(Renamed(str(source), str(target), self._inode_of(source)))

    def unlink(self, path: Path) -> None:
        if str(path) in self._names:
            self.do(Removed(str(path)))

    def sync_dir(self, path: Path) -> None:
        if self.fail_sync(path):
            raise OSError(errno.EIO, "input/output error", str(path))
        self.do(SyncedNames(str(path)))

    def names(self, path: Path) -> list[str]:
        inside = f"{path}/"
        if inside[:-1] not in self._dirs:
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(path))
        found = [name[len(inside) :] for name in (*self._names, *self._dirs) if name.startswith(inside)]
        return sorted(name for name in found if name and "/" not in name)

    def make_dir(self, path: Path) -> None:
        """Create a directory. It is durable at once: no code here depends on when."""
        if str(path) not in self._dirs:
            self._dirs.update(map(str, (path, *path.parents)))

    def remove_dir(self, path: Path) -> None:
        """Remove an empty directory. It is durable at once."""
        if self.names(path):
            raise OSError(errno.ENOTEMPTY, "directory not empty", str(path))
        self._dirs.discard(str(path))

    def close_to_others(self, path: Path) -> None:
        """Do nothing: a simulated disk has no users."""

    def real_path(self, path: Path) -> Path:
        return path

    def is_dir(self, path: Path) -> bool:
        return str(path) in self._dirs

    def exists(self, path: Path) -> bool:
        return str(path) in self._names or str(path) in self._dirs

    def lock(self, path: Path) -> FaultLock | None:
        name = str(path)
        if name in self._locks:
            return None
        if name not in self._names:
            self.create(path)
        self._locks.add(name)
        return FaultLock(self._locks, name)

    # Operations.

    def do(self, operation: Operation) -> None:
        """Carry out one operation, either replayed or new."""
        if self.recording:
            self.operations.append(operation)
        match operation:
            case Written() | Shortened():
                inode = self._inodes[operation.inode]
                _apply(inode.content, operation)
                inode.volatile.append(operation)
            case SyncedFile():
                inode = self._inodes[operation.inode]
                for change in inode.volatile:
                    _apply(inode.platter, change)
                inode.volatile.clear()
            case Made() | Renamed() | Removed():
                if isinstance(operation, Made):
                    self._inodes[operation.inode] = _Inode()
                    self._next_inode = operation.inode + 1
                self._name(self._names, operation)
                self._volatile_names.append(operation)
            case SyncedNames():
                self._sync_names(operation.path)

    @staticmethod
    def _name(names: dict[str, int], change: Made | Renamed | Removed) -> None:
        match change:
            case Made():
                names[change.path] = change.inode
            case Renamed():
                names.pop(change.source, None)
                names[change.target] = change.inode
            case Removed():
                names.pop(change.path, None)

    def _sync_names(self, directory: str) -> None:
        left = []
        for change in self._volatile_names:
            path = change.target if isinstance(change, Renamed) else change.path
            if path.rpartition("/")[0] == directory:
                self._name(self._durable_names, change)
            else:
                left.append(change)
        self._volatile_names = left

    def _need(self, size: int) -> None:
        if self.room_bytes is not None:
            if size > self.room_bytes:
                raise OSError(errno.ENOSPC, "no space left on device")
            self.room_bytes -= size

    # Faults.

    def crash(self, rng: Random, *, keep: float = 0.5, torn: bool = True) -> None:
        """Simulate a power failure: each volatile part survives with the probability ``keep``, and may be torn."""
        for inode in self._inodes.values():
            self._settle(inode, rng, keep, torn)
            inode.content = bytearray(inode.platter)
        for change in self._volatile_names:
            if rng.random() < keep:
                self._name(self._durable_names, change)
        self._names = dict(self._durable_names)
        self._volatile_names.clear()
        self._inodes = {number: self._inodes[number] for number in set(self._names.values())}
        self._locks.clear()

    def kill(self) -> None:
        """Kill the process but not the system: only locks are lost."""
        self._locks.clear()

    def evict(self) -> None:
        """Let readers see the content of the disk plus pending writes, without writes that a failed sync lost."""
        for inode in self._inodes.values():
            inode.content = bytearray(inode.platter)
            for change in inode.volatile:
                _apply(inode.content, change)

    def flip(self, path: Path, offset: int, bit: int = 0) -> None:
        """Flip one bit permanently."""
        inode = self._inodes[self._inode_of(path)]
        for data in (inode.content, inode.platter):
            if offset < len(data):
                data[offset] ^= 1 << bit

    def paths(self) -> list[Path]:
        return [Path(name) for name in sorted(self._names)]

    def content(self, path: Path) -> bytes:
        return bytes(self._inodes[self._inode_of(path)].content)

    def put(self, path: Path, content: bytes) -> None:
        """Create a durable file with this content."""
        self.make_dir(path.parent)
        number, self._next_inode = self._next_inode, self._next_inode + 1
        inode = self._inodes[number] = _Inode()
        inode.content, inode.platter = bytearray(content), bytearray(content)
        self._names[str(path)] = self._durable_names[str(path)] = number

    def fail(self, number: int) -> None:
        """Fail a sync: some of the writes are lost, and the system forgets that they were pending."""
        self._settle(self._inodes[number], self.rng, 0.5, torn=True)

    def _settle(self, inode: _Inode, rng: Random, keep: float, torn: bool) -> None:
        for change in inode.volatile:
            if rng.random() >= keep:
                continue
            if isinstance(change, Written) and torn and rng.random() < 0.3:
                for part in _tear(change, rng):
                    _apply(inode.platter, part)
            else:
                _apply(inode.platter, change)
        inode.volatile.clear()


class FaultFile:
    """Implements ``File``."""

    def __init__(self, files: FaultFiles, path: Path, inode: int) -> None:
        self.path = path
        self._files, self._inode = files, inode

    def _content(self) -> bytearray:
        try:
            return self._files._inodes[self._inode].content
        except KeyError:
            raise OSError(errno.EIO, "opened before the crash", str(self.path)) from None

    def size(self) -> int:
        return len(self._content())

    def pread(self, size: int, offset: int) -> bytes:
        return bytes(memoryview(self._content())[offset : offset + size])

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        data = b"".join(buffers)
        if not data:
            return
        growth = offset + len(data) - len(self._content())
        try:
            self._files._need(max(growth, 0))
        except OSError:
            # As much as fits is written before the system reports that the disk is full.
            fits = max(len(data) - growth + (self._files.room_bytes or 0), 0)
            self._files.do(Written(self._inode, offset, data[:fits]))
            raise
        self._files.do(Written(self._inode, offset, data))

    def truncate(self, size: int) -> None:
        self._files.do(Shortened(self._inode, size))

    def sync_data(self) -> None:
        self._content()
        if self._files.fail_sync(self.path):
            self._files.fail(self._inode)
            raise OSError(errno.EIO, "input/output error", str(self.path))
        self._files.do(SyncedFile(self._inode))

    def sync_all(self) -> None:
        self.sync_data()


class FaultLock:
    def __init__(self, locks: set[str], path: str) -> None:
        self._locks, self._path = locks, path

    def release(self) -> None:
        self._locks.discard(self._path)


def _apply(data: bytearray, change: Written | Shortened) -> None:
    if isinstance(change, Shortened):
        del data[change.size :]
        data.extend(bytes(change.size - len(data)))
        return
    end = change.offset + len(change.data)
    if len(data) < end:
        data.extend(bytes(end - len(data)))
    data[change.offset : end] = change.data


def _tear(change: Written, rng: Random) -> list[Written]:
    """Return some sectors of a write, or its first bytes."""
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
