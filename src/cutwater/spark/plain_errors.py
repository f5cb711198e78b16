"""Errors as someone who writes PySpark code gets to see them: what is wrong, without the way from there to here.

Spark makes a text of what is raised in a Python process, with the stack of that process before the message, and shows
it below its own. The messages of ``cutwater.errors`` say what to do about it, so nothing but the last frame is kept of
the stack. Errors of other kinds are bugs, and keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import ParamSpec, TypeVar

from cutwater.errors import CutwaterError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def plainly(called_by_spark: Callable[P, R]) -> Callable[P, R]:
    @wraps(called_by_spark)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return called_by_spark(*args, **kwargs)
        except CutwaterError as error:
            raise error.with_traceback(None) from None

    return called


def each_plainly(items: Iterable[T]) -> Iterator[T]:
    """The same for what Spark takes one after the other."""
    try:
        yield from items
    except CutwaterError as error:
        raise error.with_traceback(None) from None
