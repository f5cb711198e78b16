"""The manifest of a savepoint: what it holds, of which pipeline, at which position; and the checksums of all of it.

It is JSON, so that people and other tools can read it, and it is written last: a directory without one is no savepoint.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
from msgspec import Struct

from cutwater.errors import InvalidArgument, Refused, SavepointDamaged
from cutwater.pipeline.clock import ClockSnapshot
from cutwater.savepoints.program import OperatorInfo, SinkInfo, SourceInfo

FORMAT: Final = "cutwater-savepoint"
VERSION: Final = 1
NAME: Final = "manifest.json"
UNFINISHED: Final = "unfinished.json"
"""Is there from the first moment, and goes when the manifest is there: it tells what a half-written directory is."""
STATE: Final = "state"


class FileInfo(Struct, frozen=True):
    """A Parquet file. ``path`` is relative to the savepoint."""

    path: str
    bytes: int
    rows: int
    sha256: str


class OperatorState(Struct, frozen=True):
    """The state of one operator: all rows of its files. ``dropped_late``: rows it dropped because they were late."""

    operator: OperatorInfo
    rows: int
    dropped_late: int
    files: tuple[FileInfo, ...]


class RunPoint(Struct, frozen=True):
    """How far the output had come: the batch of a run of the log (see ``docs/publishing.md``); −1 for none."""

    name: str
    key: str
    batch: int


class Manifest(Struct, frozen=True):
    """Everything at or below ``glsn`` of the log has been processed, and nothing above. ``clock``: the clocks there;
    ``watermark_ms``: the minimum over all sources. ``ended``: the input ended there, for good.
    """

    format: str
    version: int
    id: str
    pipeline: str
    created: str
    glsn: int
    watermark_ms: int
    clock: ClockSnapshot | None
    ended: bool
    slices: int
    parallelism: int
    run: RunPoint
    log: str
    """The key of the cluster whose positions these are."""
    sources: tuple[SourceInfo, ...]
    sinks: tuple[SinkInfo, ...]
    operators: tuple[OperatorState, ...]
    versions: dict[str, str]
    checksum: str = ""
    """SHA-256 of the manifest with this field empty."""

    @property
    def by_uid(self) -> dict[str, OperatorState]:
        return {state.operator.uid: state for state in self.operators}

    @property
    def files(self) -> tuple[FileInfo, ...]:
        return tuple(file for state in self.operators for file in state.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def encoded(manifest: Manifest) -> bytes:
    """As it is written, with its checksum."""
    whole = msgspec.structs.replace(manifest, checksum=_checksum(manifest))
    return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


def decoded(data: bytes, where: str) -> Manifest:
    """What was written, or an error that says what is wrong with it."""
    try:
        plain: Any = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise damaged(f"{where}/{NAME}", f"it is not whole JSON ({error})") from None
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise InvalidArgument(f"{where} is no savepoint of Cutwater: its {NAME} is something else")
    if plain.get("version") != VERSION:
        raise Refused(
            f"the savepoint {where} has version {plain.get('version')} of the format, and this Cutwater knows version "
            f"{VERSION}: use the Cutwater that made it, {plain.get('versions', {}).get('cutwater', 'a newer one')}"
        )
    try:
        manifest = msgspec.convert(plain, Manifest)
    except msgspec.ValidationError as error:
        raise damaged(f"{where}/{NAME}", str(error)) from None
    if manifest.checksum != _checksum(manifest):
        raise damaged(f"{where}/{NAME}", "it does not have the checksum that it names")
    return manifest


def damaged(path: str, what: str) -> SavepointDamaged:
    return SavepointDamaged(
        f"{path} is damaged: {what}. Nothing was loaded. Use another savepoint, or a copy of this one that `cutwater "
        "savepoint verify` finds intact"
    )


def _checksum(manifest: Manifest) -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(manifest, checksum=""))).hexdigest()
