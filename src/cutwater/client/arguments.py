"""Whether an argument is of the kind that it has to be, said in the caller's words. What it may be beyond that, such as
how many log streams a topic may have, is known where it is used."""

from __future__ import annotations

import os
from operator import index

from cutwater.errors import InvalidArgument

NUMBER_MAX = 2**63 - 1
"""No number that is sent is larger."""


def check_number(name: str, given: object, what: str) -> int:
    """``what`` it is, with an article or a plural: ``a number of log streams``."""
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
    """Whoever guesses that a client is made by calling its class is told how one is made."""
    if not given or isinstance(given[0], str | os.PathLike):
        owner = "cutwater" if cls.__name__ == "Client" else f"await cutwater.{cls.__name__}"
        raise TypeError(
            f"{cls.__name__}() is not called: {owner}.open('./data') opens the log in a directory, and "
            f"{owner}.connect('cutwater://HOST:PORT') connects to a cluster"
        )
