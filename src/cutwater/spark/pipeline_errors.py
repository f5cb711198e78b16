"""Errors on their way from a worker to whoever runs the pipeline, through Spark, which knows texts only.

A worker writes what the error is into its message; the driver finds it again among the stack traces of two languages.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from msgspec import Struct, msgpack

from cutwater import errors
from cutwater.errors import CutwaterError, PipelineFailed
from cutwater.types import GLSN

_MARK: Final = re.compile(r"\[cutwater:([A-Za-z0-9+/=]+)\]")
_CAUSE_CHARS_MAX: Final = 400


class _Told(Struct):
    kind: str
    message: str
    notes: list[str]
    pipeline: str = ""
    uid: str = ""
    glsn: int = 0


class WorkerFailed(Exception):
    """Raised in a worker in the place of an error of ours, which its text carries."""


@contextmanager
def told() -> Iterator[None]:
    """Let errors of ours reach the driver whole."""
    try:
        yield
    except CutwaterError as error:
        what = _Told(type(error).__name__, error.message, list(getattr(error, "__notes__", ())))
        if isinstance(error, PipelineFailed):
            what.pipeline, what.uid, what.glsn = error.pipeline, error.uid, int(error.glsn)
        text = b64encode(msgpack.encode(what)).decode()
        raise WorkerFailed(f"{error} [cutwater:{text}]") from error


def heard(text: str, pipeline: str) -> CutwaterError | None:
    """The error that a worker wrote into a text of Spark's, if one did."""
    found = _MARK.search(text)
    if found is None:
        return None
    what = msgpack.decode(b64decode(found[1]), type=_Told)
    error: CutwaterError
    if what.kind == PipelineFailed.__name__:
        error = PipelineFailed("", pipeline=what.pipeline, uid=what.uid, glsn=GLSN(what.glsn))
    else:
        kind = getattr(errors, what.kind, CutwaterError)
        error = kind.__new__(kind)
        CutwaterError.__init__(error, "")
    error.message = what.message
    error.args = (what.message,)
    for note in what.notes:
        error.add_note(note)
    return error


def of_spark(text: str, pipeline: str) -> CutwaterError:
    """What Spark itself has to say, without its stack traces."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("\tat ", "  File "))]
    last = next((line for line in reversed(lines) if re.match(r"^\w[\w.]*(Error|Exception|Exit)\b", line)), lines[0])
    return errors.Unavailable(
        f"pipeline {pipeline!r}: Spark ended the query: {lines[0][:_CAUSE_CHARS_MAX]}; {last[:_CAUSE_CHARS_MAX]}. The "
        "checkpoint is as it was: run the pipeline again to go on from there"
    )
