"""What is known of a pipeline from its checkpoint alone: what Spark keeps there, and a note of ours beside it.

The note is written before the query first starts, and never changes: a program whose operators keep something else
needs a new checkpoint, to which its state comes by a savepoint.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from cutwater.errors import InvalidArgument, NotFound, Refused
from cutwater.pipeline.clock import ClockSnapshot
from cutwater.savepoints.evolution import key_kinds, window_kind
from cutwater.savepoints.files import Files
from cutwater.savepoints.program import OperatorInfo, ProgramInfo
from cutwater.spark.pipeline_planning import Offset

NOTE: Final = "cutwater.json"
FORMAT: Final = "cutwater-checkpoint"
ANEW: Final = (
    "To begin anew, without the state of before, remove that directory, or name another one with --checkpoint or "
    "--jobs-dir (checkpoint=… in Python): the log is read from its beginning, or from --start, and output that is "
    "there already is written a second time"
)
CHANGED: Final = (
    "a changed program starts from a savepoint, with a new checkpoint. Run the program as it was, take one with "
    "`cutwater pipeline stop` or `savepoint`, and then `cutwater pipeline run FILE --from-savepoint PATH`; in Python, "
    f"take_savepoint(checkpoint, target) and run(from_savepoint=…, checkpoint=…). {ANEW}"
)


class Origin(Struct, frozen=True):
    """The savepoint that a checkpoint was started from, and the position and clocks there. ``may_replay``: whoever
    started it wants output again that is past the savepoint.
    """

    savepoint: str
    id: str
    glsn: int
    clock: ClockSnapshot | None
    may_replay: bool


class Note(Struct, frozen=True):
    """``log`` is the key of the cluster."""

    format: str
    version: int
    pipeline: str
    slices: int
    parallelism: int
    log: str
    program: ProgramInfo
    versions: dict[str, str]
    origin: Origin | None = None


class Point(Struct, frozen=True):
    """A micro-batch that is done: its number, where the log had been read to, and the key of the query."""

    batch: int
    offset: Offset
    key: str


class Checkpoint:
    """A directory that Spark keeps a pipeline in."""

    def __init__(self, path: str, files: Files) -> None:
        self.path, self.files = path.rstrip("/"), files

    def note(self) -> Note | None:
        try:
            data = self.files.read(f"{self.path}/{NOTE}")
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=Note)
        except msgspec.DecodeError as error:
            raise InvalidArgument(f"{self.path}/{NOTE} is not what Cutwater writes there: {error}") from None

    def write(self, note: Note) -> None:
        self.files.write(f"{self.path}/{NOTE}", msgspec.json.format(msgspec.json.encode(note), indent=2) + b"\n")

    def require_note(self) -> Note:
        note = self.note()
        if note is None:
            if not self.files.list(self.path):
                raise NotFound(f"there is no checkpoint in {self.path}: name the directory that the pipeline runs with")
            raise InvalidArgument(
                f"{self.path} is not the checkpoint of a pipeline: it has no {NOTE}. Only pipelines have savepoints"
            )
        return note

    @property
    def key(self) -> str | None:
        """The id of the query, which its run has as a key; None before its first start."""
        try:
            return str(msgspec.json.decode(self.files.read(f"{self.path}/metadata"))["id"])
        except FileNotFoundError:
            return None

    def committed(self) -> list[int]:
        """The micro-batches that are done and still told of, in order."""
        return self._numbers("commits")

    def planned(self) -> list[int]:
        return self._numbers("offsets")

    def _numbers(self, name: str) -> list[int]:
        return sorted(int(name) for name in self.files.list(f"{self.path}/{name}") if name.isdigit())

    def offset(self, batch: int) -> Offset:
        text = self.files.read(f"{self.path}/offsets/{batch}").decode()
        found: Any = msgspec.json.decode(text.split("\n")[2])
        return Offset.of(found)

    def point(self, batch: int | None = None) -> Point:
        """A micro-batch of which the state can be read: the last one, or the one with this number."""
        known = self.committed()
        key = self.key
        if not known or key is None:
            raise Refused(f"the pipeline in {self.path} has not finished a micro-batch yet: wait for the first one")
        if batch is None:
            batch = known[-1]
        if batch not in known:
            raise NotFound(
                f"the checkpoint {self.path} does not have micro-batch {batch} any more, or not yet: it has {known[0]} "
                f"to {known[-1]}. run(retain=N) decides how many are kept"
            )
        try:
            return Point(batch, self.offset(batch), key)
        except FileNotFoundError:
            raise NotFound(f"the checkpoint {self.path} has just removed micro-batch {batch}: try again") from None


def require_same_program(path: str, before: ProgramInfo, after: ProgramInfo, way_out: str = CHANGED) -> None:
    """Refuse a program that keeps something else than the checkpoint has."""
    # What a function makes of a row has no declared type that could be compared.
    typed = {own.uid for own in before.operators if own.key} & {own.uid for own in after.operators if own.key}
    old, new = (
        tuple(_kept(own, own.uid in typed) for own in sorted(info.operators, key=lambda own: own.uid))
        for info in (before, after)
    )
    topics = (
        tuple(sorted(source.topic for source in before.sources)),
        tuple(sorted(source.topic for source in after.sources)),
    )
    if old == new and topics[0] == topics[1]:
        return
    changed = {own.uid for own in set(old) ^ set(new)} if old != new else set()
    what = f"the operators {', '.join(sorted(changed))}" if changed else f"the sources, {topics[0]} and {topics[1]}"
    raise Refused(f"the checkpoint {path} is of a program that differs in {what}: {way_out}")


class _Kept(Struct, frozen=True):
    uid: str
    level: int
    layout: str
    max_parallelism: int
    partitions: int
    sources: tuple[str, ...]
    states: tuple[tuple[str, str, str], ...]
    aggregates: tuple[tuple[str, str], ...]
    window: str
    key: tuple[str, ...]


def _kept(operator: OperatorInfo, is_typed: bool) -> _Kept:
    """What decides how state is kept; whatever else changes, the checkpoint goes on."""
    return _Kept(
        operator.uid,
        operator.level,
        operator.layout,
        operator.max_parallelism,
        operator.partitions,
        operator.sources,
        tuple((state.name, state.kind, state.stored) for state in operator.states),
        tuple(operator.aggregates.items()),
        window_kind(operator),
        tuple(key_kinds(operator)) if is_typed else (),
    )
