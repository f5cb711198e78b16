"""Shows Cutwater errors to PySpark users without the stack trace that leads to them.

Spark converts an exception of a Python process to text, with the stack of that process before the message, and shows it
below its own stack. The messages of ``cutwater.errors`` say what to do, so only the last frame of the stack is kept.
Other exceptions are bugs, and keep their stack.
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
    """Do the same for an iterator that Spark consumes."""
    try:
        yield from items
    except CutwaterError as error:
        raise error.with_traceback(None) from None
