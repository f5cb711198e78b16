"""Carries errors from a worker through Spark, which passes on text only, to the caller that runs the pipeline.

A worker encodes the error into its message. The driver finds it again among the stack traces of two languages.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from msgspec import Struct, msgpack

from cutwater import errors
from cutwater.errors import CutwaterError
from cutwater.protocol.errors import WireError, from_wire, to_wire
from cutwater.spark.savepoint.checkpoints import damaged
from cutwater.spark.session.session import jvm_end

_MARK: Final = re.compile(r"\[cutwater:([A-Za-z0-9+/=]+)\]")
_CAUSE_CHARS_MAX: Final = 400


class _Told(Struct):
    """An error as it travels between servers, with all of its text."""

    error: WireError
    message: str
    notes: list[str]


class WorkerFailed(Exception):
    """Raised in a worker in place of a Cutwater error; its text carries that error."""


@contextmanager
def told() -> Iterator[None]:
    """Let Cutwater errors reach the driver with all their fields."""
    try:
        yield
    except CutwaterError as error:
        what = _Told(to_wire(error), error.message, list(getattr(error, "__notes__", ())))
        text = b64encode(msgpack.encode(what)).decode()
        raise WorkerFailed(f"{error} [cutwater:{text}]") from error


def heard(text: str) -> CutwaterError | None:
    """Return the error that a worker encoded into a text of Spark's, or None."""
    found = _MARK.search(text)
    if found is None:
        return None
    what = msgpack.decode(b64decode(found[1]), type=_Told)
    error = from_wire(what.error)
    error.message = what.message
    error.args = (what.message,)
    for note in what.notes:
        error.add_note(note)
    return error


_DAMAGE: Final = re.compile(
    r"STREAMING_CHECKPOINT_MISSING_METADATA_FILE|MISSING_STATE_DIRECTORY|CANNOT_READ_STREAMING_STATE_FILE"
    r"|Incomplete log file|Failed to read log file|_stateSchema/\S* does not exist|CANNOT_LOAD_STATE_STORE"
    r"|FAILED_TO_READ_OPERATOR_METADATA"
)
"""What Spark says about a checkpoint that no further attempt can read."""
_PASSING: Final = re.compile(
    r"Interrupted|ClosedChannel|Timeout|timed out|Connect|Socket|UnknownHost|No space left|Too many open files"
    r"|OutOfMemory|Killed|Cancel|Unavailable|Throttl|AccessDenied|Permission",
    re.IGNORECASE,
)
"""Temporary reasons why state cannot be read, though it is not damaged."""
_CAUSES_MAX: Final = 10


def _causes(error: Exception) -> list[str]:
    """Return the causes of an error that the JVM names. The text of the error has only the outermost one."""
    found: list[str] = []
    with suppress(Exception):
        origin: Any = getattr(error, "_origin", None)
        while origin is not None and len(found) < _CAUSES_MAX:
            found.append(str(origin.toString()))
            origin = origin.getCause()
    return found


def _damage(error: Exception, checkpoint: str) -> CutwaterError | None:
    """Return an error that names the checkpoint file that Spark cannot read, or None if Spark reports something
    else."""
    text = "\n".join((str(error), *_causes(error)))
    if not _DAMAGE.search(text) or ("CANNOT_LOAD_STATE_STORE" in text and _PASSING.search(text)):
        return None
    place = checkpoint.removeprefix("file://").removeprefix("file:")
    named = re.search(rf"{re.escape(place)}/[^\s'\",;:]+", text) if place else None
    path = named[0].rstrip(".") if named else f"{place}/state" if "STATE" in text else place
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    what = next((line for line in lines if _DAMAGE.search(line)), lines[0])
    last = lines[-1] if _causes(error) and lines[-1] != what else ""
    return damaged(path, f"Spark cannot read it ({'; '.join(filter(None, (what, last)))[:_CAUSE_CHARS_MAX]})")


@contextmanager
def translated(pipeline: str, checkpoint: str = "") -> Iterator[None]:
    """Translate Spark's exceptions to Cutwater errors that say what went wrong, instead of eighty lines of two
    languages. ``checkpoint`` is the directory that the query runs with."""
    try:
        yield
    except Exception as error:
        is_sparks = type(error).__module__.startswith(("pyspark", "py4j"))
        if isinstance(error, CutwaterError) or not (is_sparks or isinstance(error, ConnectionError | EOFError)):
            raise
        gone = jvm_end()
        if gone is not None:
            raise errors.Unavailable(
                f"pipeline {pipeline!r}: {gone}. The checkpoint is as it was: start the program again, in a new "
                "process, to go on from there"
            ) from None
        if not is_sparks:
            raise
        raise heard(str(error)) or _damage(error, checkpoint) or of_spark(str(error), pipeline) from None


def of_spark(text: str, pipeline: str) -> CutwaterError:
    """Return Spark's own error message without its stack traces."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("\tat ", "  File "))]
    last = next((line for line in reversed(lines) if re.match(r"^\w[\w.]*(Error|Exception|Exit)\b", line)), lines[0])
    return errors.Unavailable(
        f"pipeline {pipeline!r}: Spark ended the query: {lines[0][:_CAUSE_CHARS_MAX]}; {last[:_CAUSE_CHARS_MAX]}. The "
        "checkpoint is as it was: run the pipeline again to go on from there"
    )
