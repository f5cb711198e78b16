"""Stores the chunks of a slice in Spark's state store, which is authoritative, and as files on the worker's own disk.

A chunk never changes and has a unique name that is never used again. For each slice, the state store has a small
*manifest* that names the chunks of each operator, and the chunks' bytes in pieces. A micro-batch reads the manifest,
maps the chunks on the local disk into memory, and reads only the others from the state store. So a local copy can be
missing, because the slice has moved to another machine, but it cannot be wrong.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.errors import Refused
from cutwater.pipeline.keyed_state.chunks import Chunk
from cutwater.spark.pipeline.envelope import packed

PIECE_BYTES: Final = 8 << 20
"""Bytes that go to the state store at a time."""

NO_QUERY: Final = f"none-{os.getpid()}"
"""Replaces the id of the query when there is no Spark."""
OLD_SECONDS: Final = 24 * 3_600
"""The copies of a query may be removed this long after its last chunk. If it still runs, it reads them from the state
store again."""

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class StoredChunk(Struct, frozen=True, array_like=True):
    """A stored chunk: its name and its size in bytes."""

    name: str
    size: int

    @property
    def pieces(self) -> int:
        return -(-self.size // PIECE_BYTES)


class SliceManifest(Struct, frozen=True, array_like=True):
    """The chunks of each operator by uid, oldest first, and how many late rows each operator has dropped."""

    chunks: dict[str, list[StoredChunk]]
    dropped_late: dict[str, int]


EMPTY: Final = SliceManifest({}, {})
_encode = msgspec.msgpack.Encoder().encode
decode_manifest = msgspec.msgpack.Decoder(SliceManifest).decode


class ChunkFiles:
    """Copies of chunks on this machine, for one query. They may be lost at any time."""

    def __init__(self, query: str) -> None:
        # Files written before the last boot of the machine may be torn, so they are ignored.
        boot = _BOOT.read_text().strip() if _BOOT.exists() else "unknown"
        self.path = directory() / f"{query}-{boot}"
        if not self.path.exists():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_old(self.path.parent)

    def read(self, chunk: StoredChunk) -> pa.RecordBatch | None:
        try:
            mapped = pa.memory_map(str(self.path / chunk.name))
        except FileNotFoundError:
            return None
        if mapped.size() != chunk.size:
            return None
        with pa.ipc.open_stream(mapped) as stream:
            return stream.read_next_batch()

    def write(self, name: str, data: bytes) -> None:
        unfinished = self.path / f".{name}.{os.getpid()}"
        try:
            unfinished.write_bytes(data)
        except FileNotFoundError:
            # An earlier driver of the same query has ended, and removed the copies (``forget``).
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished.write_bytes(data)
        with suppress(FileNotFoundError):
            unfinished.rename(self.path / name)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


def directory() -> Path:
    """Return a directory that only this user can access: a process that could write there could change the state of
    pipelines."""
    path = Path(tempfile.gettempdir()) / f"cutwater-state-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or path.is_symlink():
        path = Path(tempfile.mkdtemp(prefix="cutwater-state-"))
    return path


def forget(query: str) -> None:
    """Remove the copies of a query that has ended. A run that goes on with it reads the chunks from the state store."""
    for path in directory().glob(f"{query}-*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove_old(path: Path) -> None:
    """Remove the copies of queries that ended on another machine, or when the machine stopped."""
    for other in path.iterdir():
        with suppress(OSError):
            if time.time() - other.stat().st_mtime > OLD_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


class SliceState:
    """The chunks of one level in one slice during one micro-batch. ``manifest`` and ``pieces`` are Spark's state."""

    def __init__(self, manifest: Any, pieces: Any, files: ChunkFiles) -> None:
        self._manifest_state, self._pieces, self._files = manifest, pieces, files
        stored = manifest.get()
        self.manifest = EMPTY if stored is None else decode_manifest(stored[0])

    def chunks(self, pipeline: str, uids: Collection[str]) -> dict[str, list[Chunk]]:
        """Return the stored chunks of the operators of the level."""
        for uid in self.manifest.chunks:
            if uid not in uids:
                raise Refused(
                    f"pipeline {pipeline!r}: the checkpoint has state of the operator {uid!r}, which the program does "
                    "not have at this place: a changed program needs a new checkpoint"
                )
        return {uid: [self._read(chunk) for chunk in stored] for uid, stored in self.manifest.chunks.items()}

    def _read(self, stored: StoredChunk) -> Chunk:
        batch = self._files.read(stored)
        if batch is None:
            pieces = [self._pieces.getValue((stored.name, i))[0] for i in range(stored.pieces)]
            data = b"".join(pieces)
            self._files.write(stored.name, data)
            with pa.ipc.open_stream(data) as stream:
                batch = stream.read_next_batch()
        chunk = Chunk(batch)
        chunk.stored_as = stored
        return chunk

    def write(self, chunks: Mapping[str, Iterable[Chunk]], dropped_late: Mapping[str, int]) -> dict[str, int]:
        """Store these chunks in place of all others; many are stored already. Returns how many late rows were dropped
        so far, by uid."""
        kept = {uid: [self._stored(chunk) for chunk in own] for uid, own in chunks.items()}
        late = {
            uid: dropped_late.get(uid, 0) + self.manifest.dropped_late.get(uid, 0)
            for uid in {*dropped_late, *self.manifest.dropped_late}
        }
        made = SliceManifest({uid: own for uid, own in kept.items() if own}, late)
        if made == self.manifest:
            return late
        self._manifest_state.update((_encode(made),))
        names = {chunk.name for own in made.chunks.values() for chunk in own}
        for old in (chunk for own in self.manifest.chunks.values() for chunk in own):
            if old.name not in names:
                for i in range(old.pieces):
                    self._pieces.removeKey((old.name, i))
                self._files.remove(old.name)
        return late

    def add(self, uid: str, data: bytes | None, dropped_late: int) -> None:
        """Add a packed chunk of an operator from a savepoint, and the number of late rows that were dropped there."""
        chunks, late = dict(self.manifest.chunks), dict(self.manifest.dropped_late)
        if data is not None:
            chunks[uid] = [*chunks.get(uid, ()), self._keep(data)]
        if dropped_late:
            late[uid] = late.get(uid, 0) + dropped_late
        self.manifest = SliceManifest(chunks, late)
        self._manifest_state.update((_encode(self.manifest),))

    def _stored(self, chunk: Chunk) -> StoredChunk:
        if isinstance(chunk.stored_as, StoredChunk):
            return chunk.stored_as
        return self._keep(packed(chunk.batch))

    def _keep(self, data: bytes) -> StoredChunk:
        stored = StoredChunk(uuid4().hex, len(data))
        for i in range(stored.pieces):
            self._pieces.updateValue((stored.name, i), (data[i * PIECE_BYTES : (i + 1) * PIECE_BYTES],))
        self._files.write(stored.name, data)
        return stored
