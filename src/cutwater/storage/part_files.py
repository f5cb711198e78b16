"""Staged parts on the volumes of a storage node: files of frames that belong to no log stream yet.

::

    <volume>/cid=<cid>/snid=<snid>/staged/
        <run>-<batch>-<generation>-<part>.part        a part, complete under this name
        <run>-<batch>-<generation>-<part>.part.tmp    one that is being written, or was when the node died

A part is written under a temporary name and gets its own when it is complete and synced. So what has its name was
acknowledged, or may have been; anything else was not and is removed at the next start. Frames are numbered within the
part: the first record has number 1. All of this is plain file work, for threads that may wait for a disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from struct import Struct as Layout

import msgspec
from msgspec import Struct, structs

from cutwater.core.publish.staged import PartSize, StagedPart
from cutwater.errors import Damaged, InvalidArgument
from cutwater.format.checksum import Buffer, crc32c
from cutwater.format.entry_codec import BODY_BYTES_MAX, HEADER_BYTES_MAX, Frame, FrameHeader, decode_header, frames_in
from cutwater.format.errors import DamagedFile, DiskFull, StorageBroken
from cutwater.storage.files import TEMPORARY, File, Files, OsFiles, is_full
from cutwater.storage.format import STAGED, WHOLE_START_BYTES, decode_whole, encode_whole, whole_bytes
from cutwater.storage.interface import Finding
from cutwater.types import Batch

SUFFIX = ".part"
PART_HEADER_BYTES_MAX = 1024 * 1024
"""Of which nearly all is a schema with very many columns."""
VERIFY_BYTES = 4 * 1024 * 1024

_END = Layout("<8sQQQq")
_END_MAGIC = b"CWSTGEND"
_CRC = Layout("<I")
END_BYTES = _END.size + _CRC.size
"""What closes a part: how much there is of it, and when it was staged."""

_PART = re.compile(r"[0-9a-f]{32}")
_ADVICE = "it is had from another holder, if there is one"


class Held(Struct, frozen=True):
    """A complete part that is on disk here. ``staged_us`` is when, by the clock of this node."""

    part: StagedPart
    size: PartSize
    staged_us: int
    path: Path
    data_start: int
    checked: bool = False
    """Whether all that is in it was found to be sound before it counted as staged. Older versions did not look."""


class _Header(StagedPart, frozen=True):
    """What a file begins with."""

    checked: bool = False


class StagingFiles:
    """``place`` says where a new part goes, and keeps the volume from being taken away until the part is begun there.
    The directory need not exist."""

    def __init__(self, place: Callable[[], AbstractContextManager[Path]], files: Files | None = None) -> None:
        self._place = place
        self._files = files or OsFiles()

    def open(self, directories: Iterable[Path]) -> tuple[list[Held], list[CannotUse]]:
        """What is there, and what cannot be used. What was never finished is removed: nobody may be writing there."""
        found: list[Held] = []
        broken: list[CannotUse] = []
        for directory in directories:
            if not self._files.is_dir(directory):
                continue
            try:
                names = self._files.names(directory)
            except OSError as error:
                broken.append(CannotUse(directory, f"{directory} cannot be read ({error}): {_ADVICE}"))
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
        """Whole frames from this offset on, at least one and otherwise at most ``bytes_max``; nothing at the end. Each
        is verified."""
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
        """Remove parts for ever; which of them could not be removed, and why."""
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
                # They may be there again after a crash, and are then asked about again.
                failed += [(held, f"{directory}: {error}") for held in gone]
        return failed

    def frames(self, held: Held) -> Iterator[Frame]:
        """All of a part, frame by frame. Raises ``Damaged`` at what is not as it was when it was staged."""
        if self._open(held.path) != held:
            raise DamagedFile(held.path, "it is not what it was when it was staged", _ADVICE)
        progress = _Progress(PartSize())
        while progress.size.bytes < held.size.bytes:
            data = self.read(held, progress.size.bytes, VERIFY_BYTES)
            try:
                progress.take(data)
            except InvalidArgument as error:
                raise DamagedFile(held.path, error.message, _ADVICE) from error
            yield from frames_in(data)
        if progress.size != held.size:
            raise DamagedFile(held.path, f"it holds {progress.size}, not {held.size}", _ADVICE)

    def verify(self, held: Held) -> list[Finding]:
        """Read all of a part and check it."""
        try:
            for _ in self.frames(held):
                pass
        except Damaged as error:
            return [Finding(str(held.path), error.message)]
        return []

    def _open(self, path: Path) -> Held:
        try:
            return self._open_as_is(path)
        except OSError as error:
            raise DamagedFile(path, str(error), _ADVICE) from error
        except DamagedFile as error:
            # What is said of other files in this form, to learn from a peer, does not help here.
            raise DamagedFile(path, error.what, _ADVICE) from error

    def _open_as_is(self, path: Path) -> Held:
        file = self._files.open(path)
        start = file.pread(WHOLE_START_BYTES, 0)
        header_bytes = min(whole_bytes(start, path), PART_HEADER_BYTES_MAX)
        header = decode_whole(start + file.pread(header_bytes - len(start), len(start)), STAGED, path)
        try:
            found = msgspec.msgpack.decode(header, type=_Header)
        except msgspec.MsgspecError as error:
            raise DamagedFile(path, f"its checksum is right but its content is not: {error}", _ADVICE) from error
        part = StagedPart(found.run, found.batch, found.generation, found.topic, found.part, found.order)
        end_at = file.size() - END_BYTES
        size, staged_us = _decode_end(file.pread(END_BYTES, max(end_at, 0)), path)
        if path.name != name_of(part) or header_bytes + size.bytes != end_at:
            raise DamagedFile(path, "its header, its length and its name contradict each other", _ADVICE)
        return Held(part, size, staged_us, path, header_bytes, found.checked)


class CannotUse(Struct, frozen=True):
    """A file that is damaged, or cannot be read; it is left where it is."""

    path: Path
    why: str


class PartWriter:
    """One part that is being written, by one thread at a time."""

    def __init__(self, files: Files, part: StagedPart, path: Path, checked: bool = False) -> None:
        self.part, self.size = part, PartSize()
        self._files, self._path, self._checked = files, path, checked
        header = encode_whole(STAGED, msgspec.msgpack.encode(_Header(**structs.asdict(part), checked=checked)))
        if len(header) > PART_HEADER_BYTES_MAX:
            raise InvalidArgument(f"a schema has at most {PART_HEADER_BYTES_MAX} bytes, this one {len(header)}")
        self._data_start = len(header)
        self._file: File = files.create(path)
        self._file.pwritev([header], 0)

    def append(self, data: Buffer) -> None:
        """These whole frames, which are checked."""
        progress = _Progress(self.size)
        progress.take(data)
        with _at(self._path.parent):
            self._file.pwritev([data], self._data_start + self.size.bytes)
        self.size = progress.size

    def finish(self, staged_us: int) -> Held:
        """The part is complete; durable when this returns."""
        size, path = self.size, self._path.with_name(self._path.name.removesuffix(TEMPORARY))
        with _at(path.parent):
            self._file.pwritev([_encode_end(size, staged_us)], self._data_start + size.bytes)
            self._file.sync_all()
            self._files.rename(self._path, path)
            self._files.sync_dir(path.parent)
        return Held(self.part, size, staged_us, path, self._data_start, self._checked)

    def so_far(self) -> Held:
        """What is there, for whoever writes it to read it again. Nothing is durable."""
        return Held(self.part, self.size, 0, self._path, self._data_start)

    def discard(self) -> None:
        with _at(self._path.parent):
            self._files.unlink(self._path)


class _Progress:
    """Counts frames, and checks that each is one that a part may have and follows the one before."""

    def __init__(self, size: PartSize) -> None:
        self.size = size

    def take(self, data: Buffer) -> None:
        entries, rows = self.size.entries, self.size.rows
        for frame in frames_in(data):
            _check_staged(frame.header, rows)
            entries, rows = entries + 1, rows + frame.header.count
        self.size = PartSize(entries, rows, self.size.bytes + len(data))


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
    """Raise if this cannot name a part."""
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
        raise DamagedFile(path, "the checksum of its last bytes is wrong", _ADVICE)
    magic, entries, rows, size, staged_us = _END.unpack_from(data)
    if magic != _END_MAGIC:
        raise DamagedFile(path, "it does not end as a staged part does", _ADVICE)
    return PartSize(entries, rows, size), staged_us


def _whole_frames(data: bytes, bytes_max: int) -> int:
    """Where the last frame ends that is wholly within ``bytes_max``; where the first one ends, if none is."""
    end = 0
    while end < len(data):
        header = decode_header(data, end)
        if header is None or (end and end + header.frame_bytes > bytes_max):
            break
        end += header.frame_bytes
    # Without an intact header nothing can be said of it; whoever verifies it will.
    return end or len(data)


@contextmanager
def _at(directory: Path) -> Iterator[None]:
    """Errors of the file system become ours here."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise DiskFull(f"{directory}: no room is left ({error.strerror}): make room there") from error
        raise StorageBroken(f"{directory} cannot be written ({error}): stage again") from error
