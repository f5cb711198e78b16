"""Describes an exception in a user's function: what it is, and where in the user's own files it was raised."""

from __future__ import annotations

import traceback
from types import FrameType
from typing import Final

from cutwater.errors import PipelineFailed
from cutwater.pipeline.position import glsn_of

_OURS: Final = __file__.removesuffix("pipeline/failures.py")
_STANDARD: Final = traceback.__file__.removesuffix("traceback.py")
_INSTALLED: Final = ("/site-packages/", "/dist-packages/")
_NEVER_THEIRS: Final = ("/pyspark/", "/pyspark.zip/", "/pyarrow/")


def located(error: BaseException) -> str:
    """Return the exception as Python names it, and in brackets the place in the user's code, if any."""
    what, where = f"{type(error).__name__}: {error}", place(error)
    return f"{what} ({where})" if where else what


def stopped(error: Exception, on: str, *, pipeline: str, uid: str, when: int, letters: bool = True) -> PipelineFailed:
    """Return the error that ends a run. ``letters``: dead letters are a way out."""
    way_out = ", or ask for dead_letters=True, which sets such records aside" if letters else ""
    return PipelineFailed(
        f"{located(error)}, on {on}. Nothing of this call is kept. Repair the function and run again, which "
        f"goes on from the last checkpoint if there is one{way_out}",
        pipeline=pipeline,
        uid=uid,
        glsn=glsn_of(when),
    )


def place(error: BaseException) -> str:
    """Return the innermost line of the user's own code in the traceback, and the outermost one if that is in another
    function: ``bug.py, line 4, in f``. Empty if there is none."""
    found = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_theirs(_file(frame))]
    # Installed libraries count only if nothing else is left: the user may be the author of one.
    own = [(frame, line) for frame, line in found if not _is_installed(_file(frame))] or found
    if not own:
        return ""
    first, last = own[0], own[-1]
    if first[0].f_code is last[0].f_code:
        return _shown(*last)
    return f"{_shown(*last)}, called from {_shown(*first)}"


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _is_installed(file: str) -> bool:
    return any(part in file for part in _INSTALLED)


def _is_theirs(file: str) -> bool:
    if file.startswith((_OURS, "<frozen ")) or any(part in f"/{file}" for part in _NEVER_THEIRS):
        return False
    return _is_installed(file) or not file.startswith(_STANDARD)


def _shown(frame: FrameType, line: int) -> str:
    """Return a file by its name alone, unless many files have that name."""
    folder, _, name = _file(frame).rpartition("/")
    if name == "__init__.py":
        name = f"{folder.rpartition('/')[2]}/{name}"
    return f"{name}, line {line}, in {frame.f_code.co_name}"
