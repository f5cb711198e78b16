"""Staged parts on the volumes of a storage node: files of frames that do not belong to a log stream yet.

::

    <volume>/cid=<cid>/snid=<snid>/staged/
        <run>-<batch>-<generation>-<part>.part        a part, complete under this name
        <run>-<batch>-<generation>-<part>.part.tmp    a part that is being written, or was when the node died

A part is written under a temporary name, and is renamed when it is complete and synced. So a part with its final name
was acknowledged, or may have been. Other files were not, and are removed at the next start. Frames are numbered within
the part: the first record has number 1. These are blocking file operations, for threads that may wait for a disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from struct import Struct as Layout

from msgspec import Struct, structs

from cutwater.core.publish.staged import PartSize, StagedPart
from cutwater.errors import Damaged, InvalidArgument
from cutwater.format.checksum import Buffer, crc32c
from cutwater.format.entry_codec import (
    BODY_BYTES_MAX,
    HEADER_BYTES_MAX,
    EntryFrame,
    FrameHeader,
    decode_header,
    frames_in,
)
from cutwater.format.errors import DamagedFile, DiskFull, StorageBroken
from cutwater.storage.files import TEMPORARY, File, OsFiles, StorageFiles, is_full
from cutwater.storage.format import STAGED, WHOLE_START_BYTES, decode_struct, encode_struct, whole_bytes
from cutwater.storage.results import StorageFinding
from cutwater.types import Batch

SUFFIX = ".part"
PART_HEADER_BYTES_MAX = 1024 * 1024
"""Nearly all of it is the schema, for very many columns."""
VERIFY_BYTES = 4 * 1024 * 1024

_END = Layout("<8sQQQq")
_END_MAGIC = b"CWSTGEND"
_CRC = Layout("<I")
END_BYTES = _END.size + _CRC.size
"""Size of the end of a part, which contains the size of the part and when it was staged."""

_PART = re.compile(r"[0-9a-f]{32}")
_ADVICE = "it is had from another holder, if there is one"


class Held(Struct, frozen=True):
    """A complete part on the disk of this node. ``staged_us`` is the time of staging, by the clock of this node."""

    part: StagedPart
    size: PartSize
    staged_us: int
    path: Path
    data_start: int
    checked: bool = False
    """Whether the content was checked before the part counted as staged. Older versions did not check it."""


class _Header(StagedPart, frozen=True):
    """The header of a file."""

    checked: bool = False


class StagingFiles:
    """Reads and writes staged parts.

    ``place`` returns the directory for a new part, and keeps its volume from being removed until the part is begun
    there. The directory need not exist.
    """

    def __init__(self, place: Callable[[], AbstractContextManager[Path]], files: StorageFiles | None = None) -> None:
        self._place = place
        self._files = files or OsFiles()

    def open(self, directories: Iterable[Path]) -> tuple[list[Held], list[CannotUse]]:
        """Find the parts, and the files that cannot be used.

        Removes unfinished files, so no part may be written at the same time.
        """
        found: list[Held] = []
        broken: list[CannotUse] = []
        for directory in directories:
            if not self._files.is_dir(directory):
                continue
            try:
                # A process that died may have left the name of a part that is not durable yet.
                self._files.sync_dir(directory)
                names = self._files.names(directory)
            except OSError as error:
                broken.append(CannotUse(directory, f"{directory} cannot be used ({error}): {_ADVICE}"))
                continue
            for name in names:
                path = directory / name
                try:
                    if name.endswith(SUFFIX + TEMPORARY):
                        self._files.unlink(path)
                    elif name.endswith(SUFFIX):
                        found.append(self._open(path))
                except Damaged as error:
                    broken.append(CannotUse(path, error.message))
                except OSError as error:
                    broken.append(CannotUse(path, f"{path} cannot be removed ({error}): remove it"))
        return found, broken

    def begin(self, part: StagedPart, *, checked: bool = False) -> PartWriter:
        check_part(part)
        with self._place() as directory, _at(directory):
            self._files.make_dir(directory)
            return PartWriter(self._files, part, directory / (name_of(part) + TEMPORARY), checked)

    def read(self, held: Held, offset: int, bytes_max: int) -> bytes:
        """Read whole frames from this offset on: at least one, otherwise at most ``bytes_max``, and nothing at the end.

        Each frame is verified.
        """
        left = held.size.bytes - offset
        if not 0 <= offset <= held.size.bytes:
            raise InvalidArgument(
                f"staged part {held.part.part} has {held.size.bytes} bytes, there is no byte {offset}"
            )
        if not left:
            return b""
        try:
            file = self._files.open(held.path)
            data = file.pread(min(left, max(bytes_max, HEADER_BYTES_MAX)), held.data_start + offset)
            end = _whole_frames(data, bytes_max)
            if end > len(data):
                data += file.pread(min(left, end) - len(data), held.data_start + offset + len(data))
        except OSError as error:
            raise DamagedFile(held.path, str(error), _ADVICE) from error
        data = data[:end]
        try:
            for _ in frames_in(data):
                pass
        except Damaged as error:
            raise DamagedFile(held.path, f"{error.message}, at offset {offset}", _ADVICE) from error
        return data

    def drop(self, parts: Sequence[Held]) -> list[tuple[Held, str]]:
        """Remove parts permanently. Returns those that could not be removed, and why."""
        failed: list[tuple[Held, str]] = []
        removed: dict[Path, list[Held]] = {}
        for held in parts:
            try:
                self._files.unlink(held.path)
                removed.setdefault(held.path.parent, []).append(held)
            except OSError as error:
                failed.append((held, f"{held.path}: {error}"))
        for directory, gone in removed.items():
            try:
                self._files.sync_dir(directory)
            except OSError as error:
                # They may reappear after a crash. Then the node asks about them again.
                failed += [(held, f"{directory}: {error}") for held in gone]
        return failed

    def frames(self, held: Held) -> Iterator[EntryFrame]:
        """Yield all frames of a part. Raises ``Damaged`` at the first difference from what was staged."""
        if self._open(held.path) != held:
            raise DamagedFile(held.path, "it is not what it was when it was staged", _ADVICE)
        size = PartSize()
        while size.bytes < held.size.bytes:
            data = self.read(held, size.bytes, VERIFY_BYTES)
            try:
                size = _grown(size, len(data), frames_in(data, is_verified=True))
            except InvalidArgument as error:
                raise DamagedFile(held.path, error.message, _ADVICE) from error
            yield from frames_in(data, is_verified=True)
        if size != held.size:
            raise DamagedFile(held.path, f"it holds {size}, not {held.size}", _ADVICE)

    def verify(self, held: Held) -> list[StorageFinding]:
        """Read all of a part and check it."""
        try:
            for _ in self.frames(held):
                pass
        except Damaged as error:
            return [StorageFinding(str(held.path), error.message)]
        return []

    def _open(self, path: Path) -> Held:
        try:
            return self._open_as_is(path)
        except OSError as error:
            raise DamagedFile(path, str(error), _ADVICE) from error
        except DamagedFile as error:
            # The usual advice for damaged files, to copy from a peer, does not help here.
            raise DamagedFile(path, error.what, _ADVICE) from error

    def _open_as_is(self, path: Path) -> Held:
        file = self._files.open(path)
        start = file.pread(WHOLE_START_BYTES, 0)
        header_bytes = min(whole_bytes(start, path), PART_HEADER_BYTES_MAX)
        data = start + file.pread(header_bytes - len(start), len(start))
        found = decode_struct(data, STAGED, path, _Header)
        part = StagedPart(**{name: getattr(found, name) for name in StagedPart.__struct_fields__})
        end_at = file.size() - END_BYTES
        size, staged_us = _decode_end(file.pread(END_BYTES, max(end_at, 0)), path)
        if path.name != name_of(part) or header_bytes + size.bytes != end_at:
            raise DamagedFile(path, "its header, its length and its name contradict each other")
        return Held(part, size, staged_us, path, header_bytes, found.checked)


class CannotUse(Struct, frozen=True):
    """A file that is damaged or cannot be read. It is left where it is."""

    path: Path
    why: str


class PartWriter:
    """Writes one part. Only one thread may use it at a time."""

    def __init__(self, files: StorageFiles, part: StagedPart, path: Path, checked: bool = False) -> None:
        self.part, self.size = part, PartSize()
        self._files, self._path, self._checked = files, path, checked
        header = encode_struct(STAGED, _Header(**structs.asdict(part), checked=checked))
        if len(header) > PART_HEADER_BYTES_MAX:
            raise InvalidArgument(f"a schema has at most {PART_HEADER_BYTES_MAX} bytes, this one {len(header)}")
        self._data_start = len(header)
        self._file: File = files.create(path)
        self._file.pwritev([header], 0)

    def append(self, data: Buffer, *, is_verified: bool = False) -> None:
        """Append whole frames, which are checked. ``is_verified``: the caller has verified them."""
        size = _grown(self.size, len(data), frames_in(data, is_verified=is_verified))
        with _at(self._path.parent):
            self._file.pwritev([data], self._data_start + self.size.bytes)
        self.size = size

    def finish(self, staged_us: int) -> Held:
        """Complete the part. It is durable on return."""
        size, path = self.size, self._path.with_name(self._path.name.removesuffix(TEMPORARY))
        with _at(path.parent):
            # The file is longer than its frames if there was no room for some that were given up.
            self._file.truncate(self._data_start + size.bytes)
            self._file.pwritev([_encode_end(size, staged_us)], self._data_start + size.bytes)
            self._file.sync_all()
            self._files.rename(self._path, path)
            self._files.sync_dir(path.parent)
        return Held(self.part, size, staged_us, path, self._data_start, self._checked)

    def so_far(self) -> Held:
        """Return what is written so far, so that the writer can read it again. Nothing of it is durable."""
        return Held(self.part, self.size, 0, self._path, self._data_start)

    def discard(self) -> None:
        with _at(self._path.parent):
            self._files.unlink(self._path)


def _grown(size: PartSize, added_bytes: int, frames: Iterable[EntryFrame]) -> PartSize:
    """Return the size of a part with these frames added. Each must be allowed in a part and follow the one before."""
    entries, rows = size.entries, size.rows
    for frame in frames:
        _check_staged(frame.header, rows)
        entries, rows = entries + 1, rows + frame.header.count
    return PartSize(entries, rows, size.bytes + added_bytes)


def _check_staged(header: FrameHeader, rows: int) -> None:
    if header.first_llsn != rows + 1:
        raise InvalidArgument(f"record {rows + 1} of the part is expected, and {header.first_llsn} came")
    if header.body_bytes > BODY_BYTES_MAX:
        raise InvalidArgument(f"a staged entry has at most {BODY_BYTES_MAX} bytes, this one {header.body_bytes}")
    entry = header.entry(b"")
    batch = entry.batch
    expected = Batch(batch.count, b"", batch.checksum, batch.time_min, batch.time_max, schema=batch.schema)
    if entry.epoch or batch != expected:
        raise InvalidArgument("a staged entry holds records and nothing else: no producer, epoch, watermark or group")


def name_of(part: StagedPart) -> str:
    return f"{part.run}-{part.batch}-{part.generation}-{part.part}{SUFFIX}"


def check_part(part: StagedPart) -> None:
    """Raise if the name or a number of the part is invalid."""
    if not _PART.fullmatch(part.part):
        raise InvalidArgument(f"a part is named by 32 hexadecimal digits, not {part.part[:64]!r}")
    for what, number in (("run", part.run), ("batch", part.batch), ("generation", part.generation)):
        if not 0 <= number < 1 << 63:
            raise InvalidArgument(f"the number of the {what} is {number}: it is from 0 to 2**63 - 1")


def _encode_end(size: PartSize, staged_us: int) -> bytes:
    end = _END.pack(_END_MAGIC, size.entries, size.rows, size.bytes, staged_us)
    return end + _CRC.pack(crc32c(end))


def _decode_end(data: bytes, path: Path) -> tuple[PartSize, int]:
    if len(data) != END_BYTES or crc32c(data[: _END.size]) != int.from_bytes(data[_END.size :], "little"):
        raise DamagedFile(path, "the checksum of its last bytes is wrong")
    magic, entries, rows, size, staged_us = _END.unpack_from(data)
    if magic != _END_MAGIC:
        raise DamagedFile(path, "it does not end as a staged part does")
    return PartSize(entries, rows, size), staged_us


def _whole_frames(data: bytes, bytes_max: int) -> int:
    """Return where the last frame ends that lies within ``bytes_max``, or where the first one ends if none does."""
    end = 0
    while end < len(data):
        header = decode_header(data, end)
        if header is None or (end and end + header.frame_bytes > bytes_max):
            break
        end += header.frame_bytes
    # Without an intact header the length is unknown. The verification of the frames reports it.
    return end or len(data)


@contextmanager
def _at(directory: Path) -> Iterator[None]:
    """Turn errors of the file system into errors of Cutwater."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise DiskFull(f"{directory}: no room is left ({error.strerror}): make room there") from error
        raise StorageBroken(f"{directory} cannot be written ({error}): stage again") from error
