"""Defines the manifest of a savepoint: its contents, pipeline and position, and the checksums of all files.

It is JSON, so that people and other tools can read it. It is written last: a directory without a manifest is not a
savepoint.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
from msgspec import Struct

from cutwater.core.read.watermark import RULE, require_known_rule
from cutwater.errors import InvalidArgument, Refused, SavepointDamaged
from cutwater.pipeline.clocks.rule_one import AnyClock, with_rule
from cutwater.savepoints.program import OperatorInfo, SinkInfo, SourceInfo

FORMAT: Final = "cutwater-savepoint"
VERSION: Final = 2
"""Version 1 did not store the watermark rule of its clocks."""
VERSIONS: Final = (1, VERSION)
NAME: Final = "manifest.json"
UNFINISHED: Final = "unfinished.json"
"""This file exists from the start until the manifest is written: it identifies a half-written directory."""
STATE: Final = "state"


class FileInfo(Struct, frozen=True, forbid_unknown_fields=True):
    """A Parquet file. ``path`` is relative to the savepoint."""

    path: str
    bytes: int
    rows: int
    sha256: str


class OperatorState(Struct, frozen=True, forbid_unknown_fields=True):
    """The state of one operator: all rows of its files. ``dropped_late`` counts the late rows that it dropped, and
    ``late_sent`` the late rows that it sent to ``.late``. Both count from the pipeline's first beginning."""

    operator: OperatorInfo
    rows: int
    dropped_late: int
    files: tuple[FileInfo, ...]
    late_sent: int = 0


class RunPoint(Struct, frozen=True, forbid_unknown_fields=True):
    """How far the output had come: the batch of a run of the log (see ``docs/publishing.md``); −1 for none."""

    name: str
    key: str
    batch: int


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest. Everything at or below ``glsn`` of the log has been processed, and nothing above. ``clock``: the
    clocks there. ``watermark_ms``: the watermark of all sources together. ``ended``: the input ended there permanently.
    ``rule``: the watermark rule of its clocks."""

    format: str
    version: int
    id: str
    pipeline: str
    created: str
    glsn: int
    watermark_ms: int
    clock: AnyClock | None
    ended: bool
    slices: int
    parallelism: int
    run: RunPoint
    log: str
    """The key of the cluster that the positions belong to."""
    sources: tuple[SourceInfo, ...]
    sinks: tuple[SinkInfo, ...]
    operators: tuple[OperatorState, ...]
    versions: dict[str, str]
    checksum: str = ""
    """SHA-256 of the manifest with this field empty."""
    rule: int = RULE
    topics: dict[str, int] = {}
    """The numbers of the topics that were read. A topic that is created again under its name has another number."""
    trimmed: dict[str, int] = {}
    """The first positions of topics that were trimmed above ``glsn`` when the run began. Records before them do not
    count as lost."""

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
    """Encode a manifest with its checksum."""
    plain = msgspec.to_builtins(manifest)
    whole = {**plain, "checksum": _checksum(plain)}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


def decoded(data: bytes, where: str) -> Manifest:
    """Decode a manifest. Raises an error that says what is wrong with it."""
    try:
        plain: Any = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise damaged(f"{where}/{NAME}", f"it is not whole JSON ({error})") from None
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise InvalidArgument(f"{where} is no savepoint of Cutwater: its {NAME} is something else")
    made_by = plain.get("versions", {}).get("cutwater", "a newer one")
    if plain.get("version") not in VERSIONS:
        raise Refused(
            f"the savepoint {where} has version {plain.get('version')} of the format, and this Cutwater knows version "
            f"{VERSION}: use the Cutwater that made it, {made_by}"
        )
    whole = {"rule": 1, **plain, "clock": with_rule(plain.get("clock"))}
    require_known_rule(whole["rule"], f"the savepoint {where}", f"use the Cutwater that made it, {made_by}")
    if plain.get("checksum") != _checksum(plain):
        raise damaged(f"{where}/{NAME}", "it does not have the checksum that it names")
    try:
        return msgspec.convert(whole, Manifest)
    except msgspec.ValidationError as error:
        if "unknown field" in str(error):
            raise Refused(
                f"the savepoint {where} has a field that this Cutwater does not know ({error}): use the Cutwater that "
                f"made it, {made_by}"
            ) from None
        raise damaged(f"{where}/{NAME}", str(error)) from None


def damaged(path: str, what: str) -> SavepointDamaged:
    return SavepointDamaged(
        f"{path} is damaged: {what}. Nothing was loaded. Use another savepoint, or a copy of this one that `cutwater "
        "savepoint verify` finds intact"
    )


def _checksum(plain: dict[str, Any]) -> str:
    """Return the checksum of a manifest as it was written: older ones have fewer fields."""
    return hashlib.sha256(msgspec.json.encode({**plain, "checksum": ""})).hexdigest()
