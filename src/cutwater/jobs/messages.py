"""Defines the messages between the supervisor of a job and its program, and the requests to the supervisor: lines of
JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw, Struct

from cutwater.errors import CutwaterError
from cutwater.jobs.job_file import Restored
from cutwater.protocol.errors import WireError, from_wire

LINE_BYTES_MAX = 1 << 20
ERROR_CHARS_MAX = 20_000
"""Users' functions may raise anything, and one line must hold it."""


class HeldBy(Struct, frozen=True, omit_defaults=True):
    """The log stream that holds the watermark back: the furthest behind of the active log streams, in the furthest
    behind of the active sources. Times are cut times, in seconds since 1970."""

    topic: str
    stream: int
    watermark_ms: int | None
    """How far its event time has come; None if it has said nothing yet."""
    since: float
    """When the watermark last moved; 0 if it never moved."""
    spoke_at: float
    """The time of the last entry of the log stream, or of its creation."""


class Progress(Struct, frozen=True, omit_defaults=True):
    """How far a pipeline has come. Times are in seconds since 1970, durations in seconds."""

    batch: int
    glsn: int
    tail: int
    records_per_second: float
    lag_records: int | None
    """Unread records of its topics; None if unknown, because the records to count were trimmed."""
    lag_seconds: float
    """Upper bound of the age of the oldest unread record."""
    watermark_ms: int | None
    state_rows: int
    state_bytes: int
    checkpoint_at: float
    """When the last micro-batch was committed."""
    dropped_late: dict[str, int] = {}
    """Rows that were too late for their windows and were dropped, by uid, since the pipeline first began."""
    late_sent: dict[str, int] = {}
    """Rows that were too late for their windows and went to ``.late``, by uid."""
    held_by: HeldBy | None = None
    done: int = -1
    """The last micro-batch that is done; -1 if there is none. ``batch`` may be one that waits for input."""
    left_timers: dict[str, int] = {}
    """Timers that did not fire when the input ended, by uid, because their keys had reached the limit."""


class Told(Struct, frozen=True):
    """An error that is sent between processes."""

    code: str
    message: str
    retriable: bool = False
    is_hopeless: bool = False

    @classmethod
    def of(cls, error: CutwaterError, *, is_hopeless: bool = False) -> Told:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        message = error.message + notes
        if len(message) > ERROR_CHARS_MAX:
            message = f"{message[:ERROR_CHARS_MAX]}… and {len(message) - ERROR_CHARS_MAX} characters more"
        return cls(error.code, message, error.retriable, is_hopeless)

    def error(self) -> CutwaterError:
        return from_wire(WireError(self.code, self.message, self.retriable, Raw(b"")))


# ---------------------------------------------------------------------------------------------- to the program


class Start(Struct, frozen=True, tag=True, omit_defaults=True):
    """How to run the program, by the names of ``run_pipeline``. ``until`` is a position, "now", or a time as text."""

    checkpoint: str
    output: str = ""
    """The file for all further output."""
    master: str = ""
    parallelism: int | None = None
    until: int | str | None = None
    drain: bool = False
    drain_firings: int = 10
    trigger: str | None = None
    start: str = "earliest"
    max_records_per_trigger: int | None = None
    from_savepoint: str | None = None
    goes_on: bool = False
    """An earlier start asked for the savepoint. If the checkpoint has begun, with the savepoint or otherwise, it stays
    as it is."""
    replay_output: bool = False
    allow_non_restored_state: bool = False
    retain: int | None = None
    conf: dict[str, str] = {}
    """Settings of Spark on top of ours; ``spark_conf.check_conf`` has checked them."""
    job_epoch: int = 0
    """The assignment of the job that runs the program; 0 without a job service."""
    threads_max: int | None = None
    """How many tasks may work at once if Spark runs in the driver; None for the parallelism."""


class TakeSavepoint(Struct, frozen=True, tag="Savepoint"):  # the tag is part of the messages: it stays
    """Take a savepoint and keep running. Sent to the program and to the supervisor. ``seconds`` is the time limit."""

    target: str
    seconds: float


class Stop(Struct, frozen=True, tag=True, omit_defaults=True):
    """Stop, with ``savepoint`` after taking one. If ``seconds`` pass first, the pipeline keeps running. ``goes_on``: if
    the savepoint cannot be taken, the program tells so with ``Taken`` and runs on; otherwise it fails."""

    savepoint: str | None
    seconds: float
    goes_on: bool = False


ToProgram: TypeAlias = Start | TakeSavepoint | Stop

# -------------------------------------------------------------------------------------------- from the program


TELLS_LOG = "CUTWATER_TELLS_LOG"
"""Environment variable of a program: it must report the key of its log before it is told where its checkpoint is."""
PROGRAM_ARGUMENTS = "CUTWATER_PROGRAM_ARGUMENTS"
"""Environment variable of a program: the arguments of the pipeline's function, as JSON."""
PROGRAM_ARCHIVE = "CUTWATER_PROGRAM_ARCHIVE"
"""Environment variable of a program: the zip that it was unpacked from, for Spark's workers on other machines."""


class Loaded(Struct, frozen=True, tag=True):
    """The file is loaded. ``log`` is the key of its cluster, if requested."""

    pipeline: str
    log: str = ""


class Running(Struct, frozen=True, tag=True):
    """The pipeline runs. The values are the actual ones, which may differ from the requested ones. ``until``: the end
    as a position, so that a restart ends there too. ``from_savepoint``: what the checkpoint began with. ``restored``:
    what this start went on from. ``ui``: the address of Spark's pages, if they are served."""

    jvm: int
    parallelism: int
    until: int | None = None
    from_savepoint: str | None = None
    restored: Restored | None = None
    ui: str = ""


class Moved(Struct, frozen=True, tag=True):
    progress: Progress


class SavedPoint(Struct, frozen=True):
    """The position of a savepoint in the log and in its run, and its size."""

    glsn: int
    batch: int
    bytes: int


class Taken(Struct, frozen=True, tag=True):
    """The requested savepoint has been taken, or has failed with ``error``."""

    target: str
    error: Told | None = None
    saved: SavedPoint | None = None


class Ended(Struct, frozen=True, tag=True):
    """The program has ended. ``is_finished``: it reached its end and was not stopped."""

    is_finished: bool
    savepoint: str | None = None
    saved: SavedPoint | None = None


class Failed(Struct, frozen=True, tag=True):
    error: Told


FromProgram: TypeAlias = Loaded | Running | Moved | Taken | Ended | Failed

# ---------------------------------------------------------------------------------------------- to the supervisor


class Describe(Struct, frozen=True, tag=True):
    pass


class Cancel(Struct, frozen=True, tag=True):
    pass


class Rescale(Struct, frozen=True, tag=True):
    """Stop with a savepoint, and go on from it with ``parallelism`` tasks."""

    parallelism: int
    savepoint: str
    seconds: float


Request: TypeAlias = Describe | TakeSavepoint | Stop | Cancel | Rescale


class Answer(Struct, frozen=True, omit_defaults=True):
    savepoint: str | None = None
    progress: Progress | None = None
    error: Told | None = None


def line(message: Any) -> bytes:
    return msgspec.json.encode(message) + b"\n"


read_to_program = msgspec.json.Decoder(ToProgram).decode
read_from_program = msgspec.json.Decoder(FromProgram).decode
read_request = msgspec.json.Decoder(Request).decode
read_answer = msgspec.json.Decoder(Answer).decode


READ_BYTES = 1 << 16


class Lines:
    """Cuts incoming data into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> list[bytes]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            raise ValueError(f"a line of more than {LINE_BYTES_MAX} bytes")
        return whole


def first_line(read: Callable[[], bytes]) -> bytes:
    """Return the first line of what ``read`` returns; empty if the other end closes before."""
    lines = Lines()
    while data := read():
        if whole := lines.add(data):
            return whole[0]
    return b""
