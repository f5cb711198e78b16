"""Opens savepoints: reads their description, verifies them, and returns their state as tables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from io import BytesIO
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from msgspec import json

from cutwater.errors import AlreadyExists, InvalidArgument, NotFound, Refused
from cutwater.pipeline.keyed_state.keys import key_bytes
from cutwater.savepoints.files import Files, LocalFiles, is_local, local
from cutwater.savepoints.manifest import NAME, STATE, UNFINISHED, FileInfo, Manifest, OperatorState, damaged, decoded
from cutwater.savepoints.tables import as_type, table_schema

Path = str | os.PathLike[str]

_PLAIN: Final = re.compile(r"[A-Za-z0-9-]+")


class Savepoint:
    """One savepoint. It never changes, so what was read once stays true."""

    def __init__(self, path: str, manifest: Manifest, files: Files) -> None:
        self.path, self.manifest, self._files = path, manifest, files

    def verify(self) -> None:
        """Compare every file with the manifest. Raises ``SavepointDamaged`` for the first file that differs."""
        found = self._files.look(f"{self.path}/{file.path}" for file in self.manifest.files)
        for file in self.manifest.files:
            path = f"{self.path}/{file.path}"
            seen = found.get(path)
            if seen is None:
                raise damaged(path, "it is missing")
            if seen.bytes != file.bytes:
                raise damaged(path, f"it has {seen.bytes} bytes instead of {file.bytes}")
            if seen.sha256 != file.sha256 or seen.rows != file.rows:
                raise damaged(path, "its checksum is not the one in the manifest")

    def table(self, uid: str, key: Any = None) -> pa.Table:
        """Return the state of an operator, one row per key; with ``key`` (a tuple for several columns) only that row.

        Each file is checked against its checksum as it is read.
        """
        table = pa.concat_tables(list(self.parts(uid)))
        if key is not None:
            table = table.filter(pc.equal(table["key_bytes"], pa.scalar(key_bytes(key), pa.binary())))
        return table

    def parts(self, uid: str) -> Iterator[pa.Table]:
        """Yield the state of an operator in parts, at least one, of which none is larger than a file."""
        state = self.operator(uid)
        schema = table_schema(state.operator)
        yield schema.empty_table()
        yield from (self._read(file, schema) for file in state.files if file.rows)

    def operator(self, uid: str) -> OperatorState:
        found = self.manifest.by_uid.get(uid)
        if found is None:
            known = ", ".join(self.manifest.by_uid) or "none"
            raise NotFound(f"the savepoint {self.path} has no operator {uid!r}: it has {known}")
        return found

    def content(self, file: FileInfo) -> bytes:
        """Read a file and check it against its checksum."""
        path = f"{self.path}/{file.path}"
        try:
            data = self._files.read(path)
        except FileNotFoundError:
            raise damaged(path, "it is missing") from None
        if sha256(data).hexdigest() != file.sha256:
            raise damaged(path, "its checksum is not the one in the manifest")
        return data

    def _read(self, file: FileInfo, schema: pa.Schema) -> pa.Table:
        # Read in this thread only: a process that ends while Arrow's threads are starting is sometimes aborted.
        table = pq.ParquetFile(BytesIO(self.content(file)), pre_buffer=False).read(use_threads=False)
        return pa.Table.from_arrays([as_type(table[field.name], field.type) for field in schema], schema=schema)

    def __repr__(self) -> str:
        made = self.manifest
        return f"Savepoint({self.path!r}: pipeline {made.pipeline!r} at GLSN {made.glsn}, {made.created})"


def open_savepoint(path: Path, *, files: Files | None = None) -> Savepoint:
    """Open a savepoint. The manifest is read now, and the state only when it is requested."""
    place, files = place_of(path, files)
    try:
        data = files.read(f"{place}/{NAME}")
    except (FileNotFoundError, NotADirectoryError):
        if files.exists(f"{place}/{UNFINISHED}"):
            raise Refused(
                f"{place} is a half-written savepoint: the process that took it has failed, or still runs. Take "
                "another one; `cutwater savepoint delete` removes this one"
            ) from None
        if not files.exists(place):
            raise NotFound(f"there is no directory {place}: name that of a savepoint") from None
        raise NotFound(
            f"{place} is no savepoint: it has no {NAME}. Name the directory of one savepoint, not the one above it"
        ) from None
    return Savepoint(place, decoded(data, place), files)


def list_savepoints(directory: Path, *, files: Files | None = None) -> dict[str, Savepoint | str]:
    """Return the savepoints in a directory by name, oldest first. For an incomplete one, the value is the reason as
    text."""
    place, files = place_of(directory, files)
    names = files.list(place)
    if NAME in names or UNFINISHED in names:
        raise InvalidArgument(f"{place} is itself a savepoint: give the directory that it is in")
    # No path exists below a file, not even ``FILE/.``.
    if not names and not files.exists(f"{place}/."):
        raise NotFound(f"there is no directory {place}: give one that savepoints were taken into")
    found: dict[str, Savepoint | str] = {}
    for name in names:
        path = f"{place}/{name}"
        if files.exists(f"{path}/{NAME}") or files.exists(f"{path}/{UNFINISHED}"):
            try:
                found[name] = open_savepoint(path, files=files)
            except (InvalidArgument, NotFound, Refused) as error:
                found[name] = error.message
    return dict(sorted(found.items(), key=_age))


def delete_savepoint(path: Path, *, files: Files | None = None) -> None:
    """Remove a savepoint, whether complete, damaged or half-written. Refuses other directories."""
    place, files = place_of(path, files)
    has_manifest, is_half = files.exists(f"{place}/{NAME}"), files.exists(f"{place}/{UNFINISHED}")
    if not has_manifest and not is_half:
        raise NotFound(f"{place} is no savepoint, so it is not deleted: it has neither {NAME} nor {UNFINISHED}")
    strange = set(files.list(place)) - {NAME, UNFINISHED, STATE, f".{NAME}.unfinished", f".{UNFINISHED}.unfinished"}
    if strange:
        raise Refused(
            f"{place} also has {', '.join(sorted(strange))}, which no savepoint has: move that elsewhere, then delete"
        )
    # Without its manifest it is no longer a savepoint, even if the deletion stops halfway.
    if has_manifest and not is_half:
        files.write(f"{place}/{UNFINISHED}", b"{}\n")
    for name in (NAME, STATE):
        files.delete(f"{place}/{name}")
    files.delete(place)


def begin(place: str, files: Files, what: Mapping[str, Any]) -> None:
    """Claim a directory for a savepoint that is about to be written."""
    if files.exists(f"{place}/{NAME}"):
        raise AlreadyExists(f"{place} is a savepoint already, and savepoints never change: choose another directory")
    if files.list(place):
        raise AlreadyExists(
            f"{place} is not empty: choose another directory; a half-written savepoint is removed by `cutwater "
            "savepoint delete`"
        )
    files.write(f"{place}/{UNFINISHED}", json.encode(what) + b"\n")


def directory_of(uid: str) -> str:
    """Return where the state of an operator is in a savepoint: its uid if that is a safe name, else a name like it."""
    if _PLAIN.fullmatch(uid) and len(uid) <= 100:
        return f"{STATE}/{uid}"
    plain = re.sub(r"[^A-Za-z0-9-]+", "-", uid)[:80]
    return f"{STATE}/{plain}-{sha256(uid.encode()).hexdigest()[:8]}"


def place_of(path: Path, files: Files | None) -> tuple[str, Files]:
    text = os.fspath(path).rstrip("/") or "/"
    if files is None:
        if not is_local(text):
            raise InvalidArgument(
                f"{text} is not on this machine: it is read through Spark, by cutwater.spark.savepoints.open_savepoint"
            )
        return os.path.abspath(local(text)), LocalFiles()
    return (os.path.abspath(local(text)) if isinstance(files, LocalFiles) else text), files


def _age(item: tuple[str, Savepoint | str]) -> tuple[str, str]:
    name, found = item
    return (found.manifest.created if isinstance(found, Savepoint) else "", name)
