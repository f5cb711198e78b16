"""Reads what a checkpoint alone says about a pipeline: Spark's files there, and Cutwater's note beside them.

The note is written before the query first starts, and never changes. A program whose operators keep other state needs a
new checkpoint, and gets its state from a savepoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from cutwater.errors import CheckpointDamaged, InvalidArgument, NotFound, Refused
from cutwater.pipeline.clocks.rule_one import AnyClock, with_rule
from cutwater.savepoints.evolution import key_kinds, window_kind
from cutwater.savepoints.files import Files
from cutwater.savepoints.program import OperatorInfo, ProgramInfo
from cutwater.spark.pipeline.offsets import PipelineOffset

NOTE: Final = "cutwater.json"
FORMAT: Final = "cutwater-checkpoint"
ANEW: Final = (
    "To begin anew, without the earlier state, name another directory with --checkpoint (checkpoint=… in Python) and "
    "say either where in the log, after the input of the output that is there (--start), or that this output is to be "
    "published a second time (--replay-output)"
)
CHANGED: Final = (
    "a changed program starts from a savepoint, with a new checkpoint. Run the program as it was, take one with "
    "`cutwater pipeline stop` or `savepoint`, and then `cutwater pipeline run FILE --from-savepoint PATH`; in Python, "
    f"take_savepoint(checkpoint, target) and run(from_savepoint=…, checkpoint=…). {ANEW}"
)


def damaged(path: str, what: str) -> CheckpointDamaged:
    """Return the error for a damaged checkpoint. ``path`` is the file, or the directory if the file is not known."""
    return CheckpointDamaged(
        f"{path} is damaged: {what}. Another try changes nothing. Put back a copy of the whole checkpoint, made while "
        "the pipeline was stopped, or start from a savepoint with a new checkpoint (--from-savepoint, "
        f"--checkpoint; from_savepoint=…, checkpoint=… in Python). {ANEW}"
    )


class _Metadata(Struct, frozen=True):
    id: str


class Origin(Struct, frozen=True):
    """The savepoint that a checkpoint was started from, with its position and clocks. ``may_replay``: the user allows
    publishing output again that is past the savepoint."""

    savepoint: str
    id: str
    glsn: int
    clock: AnyClock | None
    may_replay: bool
    topics: dict[str, int] = {}
    trimmed: dict[str, int] = {}


class Note(Struct, frozen=True):
    """The contents of ``cutwater.json`` in a checkpoint. ``log`` is the key of the cluster."""

    format: str
    version: int
    pipeline: str
    slices: int
    parallelism: int
    log: str
    program: ProgramInfo
    versions: dict[str, str]
    origin: Origin | None = None


class FinishedBatch(Struct, frozen=True):
    """A finished micro-batch: its number, the offset up to which the log had been read, and the key of the query."""

    batch: int
    offset: PipelineOffset
    key: str


class Checkpoint:
    """A directory in which Spark keeps the progress and state of a pipeline."""

    def __init__(self, path: str, files: Files) -> None:
        self.path, self.files = path.rstrip("/"), files

    def note(self) -> Note | None:
        try:
            data = self.files.read(f"{self.path}/{NOTE}")
        except FileNotFoundError:
            return None
        try:
            plain: Any = msgspec.json.decode(data)
            if isinstance(plain, dict) and isinstance(plain.get("origin"), dict):
                plain["origin"]["clock"] = with_rule(plain["origin"].get("clock"))
            return msgspec.convert(plain, Note)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise damaged(f"{self.path}/{NOTE}", f"it is not what Cutwater writes there ({error})") from None

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
        """The id of the query, which is also the key of its run. None before its first start."""
        try:
            return msgspec.json.decode(self.files.read(f"{self.path}/metadata"), type=_Metadata).id
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise damaged(f"{self.path}/metadata", f"it does not name a query ({error})") from None

    def committed(self) -> list[int]:
        """Return the finished micro-batches that are still recorded, in order."""
        return self._numbers("commits")

    def planned(self) -> list[int]:
        return self._numbers("offsets")

    def _numbers(self, name: str) -> list[int]:
        return sorted(int(name) for name in self.files.list(f"{self.path}/{name}") if name.isdigit())

    def offset(self, batch: int) -> PipelineOffset:
        lines = self._lines(f"offsets/{batch}", 3)
        found: Any = lines[2]
        return PipelineOffset.of(found)

    def _lines(self, name: str, least: int) -> list[Any]:
        """Read a file of Spark's: its version, followed by values as JSON."""
        try:
            version, *rest = self.files.read(f"{self.path}/{name}").decode().splitlines()
            found = [version, *map(msgspec.json.decode, filter(None, rest))]
        except (ValueError, msgspec.DecodeError) as error:
            raise damaged(f"{self.path}/{name}", f"it is cut off, or something else ({error})") from None
        if len(found) < least:
            raise damaged(f"{self.path}/{name}", "it is cut off")
        return found

    def check(self) -> None:
        """Refuse a checkpoint from which no run can go on, as far as its small files tell. Spark checks the state
        itself."""
        planned, done = self.planned(), self.committed()
        if (planned or done) and self.key is None:
            raise damaged(f"{self.path}/metadata", "it is missing, and micro-batches are there")
        if done and done[-1] not in planned:
            raise damaged(f"{self.path}/offsets/{done[-1]}", "it is missing, and its micro-batch is done")
        for batch in planned[-2:]:
            self.offset(batch)
        if done:
            self._lines(f"commits/{done[-1]}", 2)

    def moved_from(self) -> str | None:
        """Return where this directory was when Spark last ran with it, or None if it is still there."""
        try:
            for directory in self._operators():
                for name in self._numbers(directory)[-1:]:
                    places = self._present(directory, name)[1]
                    if places:
                        return places[0]
        except FileNotFoundError:
            # Spark has removed a file that was listed, so it is running with this very directory.
            pass
        return None

    def follow_move(self) -> str | None:
        """Make Spark's own files name the current place. Spark stores the full paths of state schemas, so a moved
        directory would look for them in the old place, and a copy would share them. Returns the old place, or None."""
        moved = self.moved_from()
        if moved is None:
            return None
        for directory in self._operators():
            # The newest file comes last: as long as it names the old place, this is done again.
            for name in self._numbers(directory):
                metadata, places = self._present(directory, name)
                if places:
                    # Hadoop's checksum file beside it would no longer match.
                    self.files.delete(f"{self.path}/{directory}/.{name}.crc")
                    self.files.write(f"{self.path}/{directory}/{name}", b"v2\n" + msgspec.json.encode(metadata))
        return moved

    def _operators(self) -> list[str]:
        """Return the directories in which Spark records, per micro-batch, what each stateful operator is."""
        return [f"state/{operator}/_metadata/v2" for operator in self.files.list(f"{self.path}/state")]

    def _present(self, directory: str, name: int) -> tuple[Any, list[str]]:
        """Return one of these records with the current paths of schemas, and the other places that it names."""
        here, places = self.files.qualified(self.path), []
        version, metadata = self._lines(f"{directory}/{name}", 2)[:2]
        if version == "v2" and isinstance(metadata, dict):
            for store in metadata.get("stateStoreInfo", ()):
                paths = store.get("stateSchemaFilePaths", [])
                for index, path in enumerate(paths):
                    place, middle, rest = path.rpartition(f"/{directory.removesuffix('_metadata/v2')}_stateSchema/")
                    if middle and place != here:
                        places.append(place)
                        paths[index] = f"{here}{middle}{rest}"
        return metadata, places

    def point(self, batch: int | None = None) -> FinishedBatch:
        """Return a micro-batch whose state can be read: the last one, or the one with this number."""
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
            return FinishedBatch(batch, self.offset(batch), key)
        except FileNotFoundError:
            raise NotFound(f"the checkpoint {self.path} has just removed micro-batch {batch}: try again") from None


def require_same_program(path: str, before: ProgramInfo, after: ProgramInfo, way_out: str = CHANGED) -> None:
    """Refuse a program that keeps other state than the checkpoint has."""
    # The result of a function of a row has no declared type that could be compared.
    typed = {own.uid for own in before.operators if own.key} & {own.uid for own in after.operators if own.key}
    old, new = ({own.uid: _kept(own, own.uid in typed) for own in info.operators} for info in (before, after))
    was, now = (tuple(sorted(source.topic for source in info.sources)) for info in (before, after))
    if old == new and was == now:
        return
    told = _differences(old, new)
    if was != now:
        told.append(f"sources: {_listed(was)} before, {_listed(now)} now")
    way_out = way_out[0].upper() + way_out[1:]
    raise Refused(f"the checkpoint {path} is of a program that differs: {'; '.join(told)}. {way_out}")


def _differences(old: Mapping[str, dict[str, object]], new: Mapping[str, dict[str, object]]) -> list[str]:
    """Describe, operator by operator, what was kept before and what is kept now."""
    gone = [f"operator {uid!r} was there before, and is not now" for uid in sorted(old.keys() - new.keys())]
    added = [f"operator {uid!r} is new" for uid in sorted(new.keys() - old.keys())]
    changed = []
    for uid in sorted(old.keys() & new.keys()):
        for field, before in old[uid].items():
            after = new[uid][field]
            if before != after:
                words = _WORDS.get(field, field)
                changed.append(f"{words} of operator {uid!r}: {_listed(before)} before, {_listed(after)} now")
    return [*gone, *added, *changed]


_WORDS: Final = {
    "level": "the number of operators before it, that is the level,",
    "layout": "how state is kept",
    "partitions": "parallelism",
    "states": "states (name, kind, type)",
    "aggregates": "aggregates (name, function)",
    "key": "the types of the key",
}


def _listed(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(" ".join(item) if isinstance(item, tuple) else str(item) for item in value) or "none"
    return str(value) or "none"


def _kept(operator: OperatorInfo, is_typed: bool) -> dict[str, object]:
    """Return the properties that decide how state is kept. Other changes do not matter to the checkpoint."""
    return {
        "level": operator.level,
        "layout": operator.layout,
        "max_parallelism": operator.max_parallelism,
        "partitions": operator.partitions,
        "sources": operator.sources,
        "states": tuple((state.name, state.kind, state.stored) for state in operator.states),
        "aggregates": tuple(operator.aggregates.items()),
        "window": window_kind(operator),
        "key": tuple(key_kinds(operator)) if is_typed else (),
    }
