"""Checks that arguments are of the right kind, and names them in errors as the caller does. Further limits, such as how
many log streams a topic may have, are checked where the argument is used."""

from __future__ import annotations

import os
from operator import index

from cutwater.errors import InvalidArgument

NUMBER_MAX = 2**63 - 1
"""The largest number that can be sent."""


def check_number(name: str, given: object, what: str) -> int:
    """Return the argument as an integer. ``what`` describes it, with an article or a plural: ``a number of log
    streams``."""
    try:
        if isinstance(given, bool):
            raise TypeError
        number = index(given)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(f"{name}= is {what}, such as 3, not {given!r} ({type(given).__name__})") from None
    if abs(number) > NUMBER_MAX:
        raise InvalidArgument(f"{name}= is {what}, and {number} is too large for one")
    return number


def check_topic(given: object) -> None:
    if not isinstance(given, str):
        raise InvalidArgument(f"a topic is a name, such as 'orders', not {given!r} ({type(given).__name__})")


def check_not_called(cls: type, given: tuple[object, ...]) -> None:
    """Raise an error that tells a caller of the class itself how a client is made."""
    if not given or isinstance(given[0], str | os.PathLike):
        owner = "cutwater" if cls.__name__ == "Client" else f"await cutwater.{cls.__name__}"
        raise TypeError(
            f"{cls.__name__}() is not called: {owner}.open('./data') opens the log in a directory, and "
            f"{owner}.connect('cutwater://HOST:PORT') connects to a cluster"
        )
