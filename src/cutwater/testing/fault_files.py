"""An in-memory file layer that fails like a real one: the twin of ``storage.files.OsFiles``.

Every write and every change of a name is volatile until the sync that covers it. A crash keeps any part of what is
volatile: each write may survive whole, torn or not at all, independently of earlier writes; each change of a name may
survive or not. A sync can fail, after which the system calls the data clean although the disk may not have it. The disk
can be full; bits can flip; ``disk_faults.py`` lists all faults. The given random number generator decides all of it.

Time is virtual. A slow sync charges its seconds to the code that waits for it, which runs to its end at once. Take them
with ``take_charged_seconds`` and delay the effects of that code by as much. Until that time has passed, the disk treats
what came after the sync as not done yet: if the process dies or the power goes meanwhile, it never happened.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from random import Random
from weakref import WeakValueDictionary

from cutwater.format.checksum import Buffer
from cutwater.runtime.system import Space
from cutwater.storage.files import BLOCK_BYTES
from cutwater.testing.disk_faults import DiskFault, DiskFaultRule, DiskFaults, ProcessDied
from cutwater.testing.disk_inodes import (
    SECTOR_BYTES,
    DirInode,
    FileChange,
    FileInode,
    Inode,
    Made,
    MadeDir,
    Names,
    NameSet,
    Operation,
    Removed,
    Renamed,
    Resized,
    SyncedFile,
    SyncedNames,
    Written,
    apply,
    copied,
)

DISK_BYTES = 1 << 40
"""Free space of a disk without a limit."""

PROCESS_ID = b"1\n"
"""What a lock writes into its file."""


class FaultFiles:
    """Implements ``StorageFiles``. One thread may use it."""

    def __init__(
        self,
        rng: Random | None = None,
        rules: Iterable[DiskFaultRule] = (),
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.faults = DiskFaults(rng or Random(0), rules)
        self.clock = clock
        """Returns the virtual time in seconds."""
        self.operations: list[Operation] = []
        """All operations so far."""
        self.recording = True
        """Whether operations are recorded."""
        self.room_bytes: int | None = None
        """How many more bytes can be written before the disk is full; None means no limit."""
        self.device = 1
        """Tells this disk from others in ``free_space``."""
        self.strays = 0.3
        """Share of misdirected writes that go to another file."""
        self.fail_sync: Callable[[Path], bool] = lambda path: False
        """Called before each sync; returns whether the sync fails."""
        self.calls = 0
        """How many file operations were begun."""
        self.die_at: int | None = None
        """The process dies when this operation begins, or in the middle of it if it is a write."""
        self.on_death: Callable[[], None] = lambda: None
        """Called when the process dies of ``die_at``."""
        self.charged_seconds = 0.0
        """How long slow operations have taken since ``take_charged_seconds``."""
        self._is_dead = False
        self._boot = 0
        """Changes when the process dies. Files that were opened before cannot be used any more."""
        self._names = Names()
        self._inodes: WeakValueDictionary[int, FileInode] = WeakValueDictionary()
        self._next_inode = 1
        self._locks: list[FaultLock] = []

    def copy(self) -> FaultFiles:
        """Return a copy of the disk, with an empty list of operations and no locks."""
        other = copy(self)
        other.operations, other._locks = [], []
        other.faults = DiskFaults(self.faults.rng, self.faults.rules)
        other._names = copied(self._names)
        other._inodes = WeakValueDictionary({inode.number: inode for inode in other._names.files()})
        return other

    @property
    def rng(self) -> Random:
        """Decides everything but what survives a crash."""
        return self.faults.rng

    @rng.setter
    def rng(self, rng: Random) -> None:
        self.faults.rng = rng

    @property
    def now(self) -> float:
        """When the present operation happens."""
        return self.clock() + self.charged_seconds

    def take_charged_seconds(self) -> float:
        """Return how long slow operations have taken since the last call."""
        seconds, self.charged_seconds = self.charged_seconds, 0.0
        return seconds

    # The interface.

    def open(self, path: Path) -> FaultFile:
        self._begin()
        return FaultFile(self, path, self._file(path))

    def create(self, path: Path) -> FaultFile:
        self._begin()
        directory, name = self._place(path)
        there = directory.entries.get(name)
        if isinstance(there, DirInode):
            raise _error(errno.EISDIR, path)
        self._strike_change("create", path)
        if there is None:
            self._need(1, path)
            self.do(Made(str(path), self._next_inode))
        else:
            self.do(Resized(there.number, 0))
        return FaultFile(self, path, self._file(path))

    def rename(self, source: Path, target: Path) -> None:
        self._begin()
        try:
            self._place(source)
            directory, name = self._place(target)
            inode = self._lookup(source)
        except OSError as error:
            raise _error(error.errno or 0, source, target) from None
        there = directory.entries.get(name)
        if inode is there:
            return
        if f"{source}/".startswith(f"{target}/"):
            raise _error(errno.ENOTEMPTY, source, target)
        if isinstance(inode, DirInode):
            if f"{target}/".startswith(f"{source}/"):
                raise _error(errno.EINVAL, source, target)
            if isinstance(there, FileInode):
                raise _error(errno.ENOTDIR, source, target)
            if there is not None and there.entries:
                raise _error(errno.ENOTEMPTY, source, target)
        elif isinstance(there, DirInode):
            raise _error(errno.EISDIR, source, target)
        self._strike_change("rename", target)
        self.do(Renamed(str(source), str(target)))

    def unlink(self, path: Path) -> None:
        self._begin()
        try:
            inode = self._lookup(path)
        except FileNotFoundError:
            return
        if isinstance(inode, DirInode):
            raise _error(errno.EISDIR, path)
        self._strike_write_error("unlink", path)
        self.do(Removed(str(path)))

    def remove_dir(self, path: Path) -> None:
        self._begin()
        if self._dir(path).entries:
            raise _error(errno.ENOTEMPTY, path)
        self._strike_write_error("remove_dir", path)
        self.do(Removed(str(path)))

    def sync_dir(self, path: Path) -> None:
        self._begin()
        self._dir(path)
        self.charged_seconds += self.faults.seconds("sync_dir", path)
        if self.fail_sync(path) or self.faults.strikes(DiskFault.SYNC_ERROR, "sync_dir", path):
            raise _error(errno.EIO, path)
        self.do(SyncedNames(str(path)))

    def names(self, path: Path) -> list[str]:
        self._begin()
        directory = self._dir(path)
        if self.faults.strikes(DiskFault.READ_ERROR, "names", path):
            raise _error(errno.EIO, path)
        return sorted(directory.entries)

    def make_dir(self, path: Path) -> None:
        if self.is_dir(path):
            return
        self.make_dir(path.parent)
        self.make_one_dir(path)
        self.sync_dir(path.parent)

    def make_one_dir(self, path: Path) -> None:
        """Make a directory. Its name is durable after ``sync_dir``."""
        self._begin()
        directory, name = self._place(path)
        if name in directory.entries:
            raise _error(errno.EEXIST, path)
        self._strike_change("make_dir", path)
        self._need(1, path)
        self.do(MadeDir(str(path)))

    def close_to_others(self, path: Path) -> None:
        """Do nothing: a simulated disk has no users."""

    def real_path(self, path: Path) -> Path:
        return path

    def is_dir(self, path: Path) -> bool:
        return isinstance(self._found(path), DirInode)

    def exists(self, path: Path) -> bool:
        return self._found(path) is not None

    def lock(self, path: Path) -> FaultLock | None:
        self._begin()
        if not self.exists(path):
            self.create(path)
        inode = self._file(path)
        if inode.holder is not None:
            return None
        lock = FaultLock(inode)
        self._locks.append(lock)
        # The id of the process is only for messages, so a failed write does not matter.
        with suppress(OSError):
            file = FaultFile(self, path, inode)
            file.truncate(0)
            file.pwritev([PROCESS_ID], 0)
        return lock

    def free_space(self, path: Path) -> Space:
        """Answer ``system.free_space`` for a path on this disk."""
        self._lookup(path)
        return Space(DISK_BYTES, DISK_BYTES if self.room_bytes is None else self.room_bytes, self.device)

    # Paths.

    def _lookup(self, path: Path | str, parent: str | None = None) -> Inode:
        """Return what is at ``path``, or at ``parent`` on the way to it."""
        inode: Inode = self._names.root
        for name in (str(path) if parent is None else parent).split("/"):
            if not name or name == ".":
                continue
            if not isinstance(inode, DirInode):
                raise _error(errno.ENOTDIR, path)
            there = inode.entries.get(name)
            if there is None:
                raise _error(errno.ENOENT, path)
            inode = there
        return inode

    def _found(self, path: Path) -> Inode | None:
        self._check_alive()
        try:
            return self._lookup(path)
        except OSError:
            return None

    def _file(self, path: Path | str) -> FileInode:
        inode = self._lookup(path)
        if isinstance(inode, DirInode):
            raise _error(errno.EISDIR, path)
        return inode

    def _dir(self, path: Path | str) -> DirInode:
        inode = self._lookup(path)
        if not isinstance(inode, DirInode):
            raise _error(errno.ENOTDIR, path)
        return inode

    def _place(self, path: Path | str) -> tuple[DirInode, str]:
        """Return the directory of a name, which exists, and the name, which may not."""
        parent, _, name = str(path).rpartition("/")
        directory = self._lookup(path, parent)
        if not isinstance(directory, DirInode):
            raise _error(errno.ENOTDIR, path)
        return directory, name

    # Operations.

    def do(self, operation: Operation) -> None:
        """Carry out one operation, either replayed or new."""
        if self.recording:
            self.operations.append(operation)
        match operation:
            case Written() | Resized() | SyncedFile():
                inode = self._inodes.get(operation.inode)
                # A file without a name is gone after a crash. Only a process that has it open sees it until then.
                if inode is not None:
                    self._change_file(inode, operation)
            case SyncedNames():
                self._names.sync(self._dir(operation.path), self.now)
                self._names.fold(self.clock())
            case Made() | MadeDir() | Renamed() | Removed():
                self._change_names(operation)

    def _change_file(self, inode: FileInode, operation: Written | Resized | SyncedFile) -> None:
        if isinstance(operation, SyncedFile):
            inode.sync(self.now, everything=operation.everything)
            inode.fold(self.clock())
            return
        change = FileChange(operation, self.now)
        if isinstance(operation, Resized):
            change.shortens = operation.size < len(inode.content)
        elif self.faults.has(DiskFault.STALE_READ):
            inode.remember(operation.offset, len(operation.data))
        apply(inode.content, operation)
        inode.changes.append(change)

    def _change_names(self, operation: Made | MadeDir | Renamed | Removed) -> None:
        if isinstance(operation, Renamed):
            source, old_name = self._place(operation.source)
            target, new_name = self._place(operation.target)
            inode = source.entries[old_name]
            gone = NameSet(source, old_name, inode, None)
            self._names.change(target, (gone, NameSet(target, new_name, None, inode)), self.now)
            return
        directory, name = self._place(operation.path)
        if isinstance(operation, Removed):
            one = NameSet(directory, name, directory.entries[name], None)
        elif isinstance(operation, MadeDir):
            one = NameSet(directory, name, None, DirInode())
        else:
            made = self._inodes[operation.inode] = FileInode(operation.inode)
            self._next_inode = operation.inode + 1
            one = NameSet(directory, name, None, made)
        self._names.change(directory, (one,), self.now)

    def _need(self, size: int, path: Path) -> None:
        if self.room_bytes is not None:
            if size > self.room_bytes:
                raise _error(errno.ENOSPC, path)
            self.room_bytes -= size

    # Faults.

    def _begin(self) -> None:
        """Begin an operation, at which the process may die."""
        self._check_alive()
        self.calls += 1
        if self.is_last_call:
            self.die()

    def _check_alive(self) -> None:
        if self._is_dead:
            raise ProcessDied("it is dead already")

    @property
    def is_last_call(self) -> bool:
        return self.die_at is not None and self.calls >= self.die_at

    def die(self) -> None:
        """Let the process die. Nothing can be done with the files until ``kill`` or ``crash``."""
        self._is_dead = True
        self.on_death()
        raise ProcessDied(f"killed at file operation {self.calls}")

    def _strike_change(self, operation: str, path: Path) -> None:
        """Let a change of names fail that may need room."""
        self._strike_write_error(operation, path)
        if self.faults.strikes(DiskFault.FULL, operation, path):
            raise _error(errno.ENOSPC, path)

    def _strike_write_error(self, operation: str, path: Path) -> None:
        if self.faults.strikes(DiskFault.WRITE_ERROR, operation, path):
            raise _error(errno.EIO, path)

    def crash(self, rng: Random, *, keep: float = 0.5, torn: bool = True) -> None:
        """Simulate a power failure: each volatile part survives with the probability ``keep``, and may be torn."""
        now = self.clock()
        for inode in self._names.files():
            inode.lose_power(now, rng, keep, torn=torn)
        self._names.lose_power(now, rng, keep)
        self.evict()
        self._inodes = WeakValueDictionary({inode.number: inode for inode in self._names.files()})
        self._end_process()

    def kill(self) -> None:
        """Kill the process but not the system: only locks are lost, and what it had not done yet."""
        now = self.clock()
        for inode in self._names.files():
            inode.lose_process(now)
        self._names.lose_process(now)
        self._end_process()

    def _end_process(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks.clear()
        self._boot += 1
        self._is_dead, self.die_at, self.charged_seconds = False, None, 0.0

    def evict(self) -> None:
        """Let readers see the content of the disk plus pending writes, without writes that a failed sync lost."""
        for inode in self._names.files():
            inode.fold(self.clock())
            inode.evict()

    def flip(self, path: Path, offset: int, bit: int = 0) -> None:
        """Flip one bit permanently."""
        _flip(self._file(path), offset, bit)

    def spoil(self, path: Path, offset: int) -> None:
        """Make the block at this offset unreadable, until it is overwritten as a whole."""
        self._file(path).bad_blocks.add(offset // BLOCK_BYTES)

    def paths(self) -> list[Path]:
        """Return the paths of all files."""
        found: list[Path] = []
        waiting: list[tuple[Path, DirInode]] = [(Path("/"), self._names.root)]
        while waiting:
            path, directory = waiting.pop()
            for name, inode in directory.entries.items():
                if isinstance(inode, DirInode):
                    waiting.append((path / name, inode))
                else:
                    found.append(path / name)
        return sorted(found)

    def content(self, path: Path) -> bytes:
        return bytes(self._file(path).content)

    def put(self, path: Path, content: bytes) -> None:
        """Create a durable file with this content."""
        self.make_dir(path.parent)
        directory, name = self._place(path)
        inode = self._inodes[self._next_inode] = FileInode(self._next_inode, content)
        self._next_inode += 1
        directory.entries[name] = directory.durable[name] = inode

    def other_place(self, inode: FileInode) -> tuple[FileInode, int]:
        """Choose where a misdirected write goes: a sector of this file or of another one."""
        target = inode if self.rng.random() >= self.strays else self.rng.choice(self._names.files())
        return target, self.rng.randrange(len(target.platter) // SECTOR_BYTES + 1) * SECTOR_BYTES


class FaultFile:
    """Implements ``File``."""

    def __init__(self, files: FaultFiles, path: Path, inode: FileInode) -> None:
        self.path = path
        self._files, self._opened, self._boot = files, inode, files._boot

    def _inode(self) -> FileInode:
        if self._boot != self._files._boot:
            raise OSError(errno.EBADF, "opened by a process that died", str(self.path))
        return self._opened

    def size(self) -> int:
        return len(self._inode().content)

    def pread(self, size: int, offset: int) -> bytes:
        inode, faults = self._inode(), self._files.faults
        self._files._begin()
        end = min(offset + size, len(inode.content))
        if faults.strikes(DiskFault.READ_ERROR, "pread", self.path) or self._bad_blocks(offset, end):
            raise _error(errno.EIO, self.path)
        data = bytes(memoryview(inode.content)[offset:end])
        if data and faults.strikes(DiskFault.STALE_READ, "pread", self.path):
            data = _stale(inode, data, offset, faults.rng)
        if data and faults.strikes(DiskFault.MISDIRECTED_READ, "pread", self.path):
            data = _misread(inode, len(data), faults.rng)
        if data and faults.strikes(DiskFault.FLIPPED_READ, "pread", self.path):
            at = faults.rng.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1 << faults.rng.randrange(8)]) + data[at + 1 :]
        return data

    def _bad_blocks(self, start: int, end: int) -> list[int]:
        """Return the unreadable blocks in this range."""
        bad = self._opened.bad_blocks
        return [block for block in bad if start < (block + 1) * BLOCK_BYTES and block * BLOCK_BYTES < end]

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        inode, files, data = self._inode(), self._files, b"".join(buffers)
        files._check_alive()
        files.calls += 1
        if files.is_last_call:
            self._write(data[: files.rng.randrange(len(data) + 1)], offset)
            files.die()
        if not data:
            return
        self._strike(DiskFault.WRITE_ERROR, errno.EIO, data, offset)
        self._strike(DiskFault.FULL, errno.ENOSPC, data, offset)
        end = offset + len(data)
        for block in self._bad_blocks(offset, end):
            if offset > block * BLOCK_BYTES or end < min((block + 1) * BLOCK_BYTES, len(inode.content)):
                raise _error(errno.EIO, self.path)
            inode.bad_blocks.discard(block)
        growth = end - len(inode.content)
        try:
            files._need(max(growth, 0), self.path)
        except OSError:
            # As much as fits is written before the system reports that the disk is full.
            self._write(data[: max(len(data) - growth + (files.room_bytes or 0), 0)], offset)
            raise
        self._write(data, offset)

    def _strike(self, fault: DiskFault, number: int, data: bytes, offset: int) -> None:
        """Let a write fail, perhaps in the middle."""
        rng = self._files.rng
        if self._files.faults.strikes(fault, "pwritev", self.path):
            if rng.random() < 0.5:
                self._write(data[: rng.randrange(len(data))], offset)
            raise _error(number, self.path)

    def _write(self, data: bytes, offset: int) -> None:
        if data:
            files, inode = self._files, self._opened
            files.do(Written(inode.number, offset, data))
            if files.faults.strikes(DiskFault.MISDIRECTED_WRITE, "pwritev", self.path):
                inode.changes[-1].landed = files.other_place(inode)

    def truncate(self, size: int) -> None:
        inode, files = self._inode(), self._files
        files._begin()
        files._strike_write_error("truncate", self.path)
        files.do(Resized(inode.number, size))

    def sync_data(self) -> None:
        self._sync(everything=False)

    def sync_all(self) -> None:
        self._sync(everything=True)

    def _sync(self, *, everything: bool) -> None:
        inode, files = self._inode(), self._files
        files._begin()
        files.charged_seconds += files.faults.seconds("sync", self.path)
        if files.fail_sync(self.path) or files.faults.strikes(DiskFault.SYNC_ERROR, "sync", self.path):
            inode.fail(files.now, files.rng)
            raise _error(errno.EIO, self.path)
        files.do(SyncedFile(inode.number, everything))
        if inode.platter and files.faults.strikes(DiskFault.FLIP_AT_REST, "sync", self.path):
            _flip(inode, files.rng.randrange(len(inode.platter)), files.rng.randrange(8))


class FaultLock:
    def __init__(self, inode: FileInode) -> None:
        self._inode = inode
        self.owner: object = None
        """The process that has it, where several processes use the disk."""
        inode.holder = self

    def release(self) -> None:
        if self._inode.holder is self:
            self._inode.holder = None


def _error(number: int, path: Path | str, other: Path | None = None) -> OSError:
    """Return the error that the operating system would raise."""
    if other is None:
        return OSError(number, os.strerror(number), str(path))
    return OSError(number, os.strerror(number), str(path), None, str(other))


def _flip(inode: FileInode, offset: int, bit: int) -> None:
    for data in (inode.content, inode.platter):
        if offset < len(data):
            data[offset] ^= 1 << bit


def _misread(inode: FileInode, size: int, rng: Random) -> bytes:
    """Return as many bytes from the beginning of another sector."""
    at = rng.randrange(len(inode.content) // SECTOR_BYTES + 1) * SECTOR_BYTES
    return bytes(memoryview(inode.content)[at : at + size]).ljust(size, b"\0")


def _stale(inode: FileInode, data: bytes, offset: int, rng: Random) -> bytes:
    """Return the data as it was before one of the last writes there."""
    end = offset + len(data)
    old = [(at, there) for at, there in inode.old if at < end and offset < at + len(there)]
    if not old:
        return data
    at, there = rng.choice(old)
    first, last = max(at, offset), min(at + len(there), end)
    return data[: first - offset] + there[first - at : last - at] + data[last - offset :]
