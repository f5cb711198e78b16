"""Rules for names. Topic names also appear in files, URLs, metrics and on command lines."""

from __future__ import annotations

from cutwater.core.text import is_token_text
from cutwater.errors import InvalidArgument

NAME_LENGTH_MAX = 255
_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")
_LATER = _LETTERS | frozenset(".-")
"""Characters that may follow the first character of a topic name."""
RESERVED_PREFIX = "_"
"""Names of internal topics begin with this. Earlier versions let users create such topics; these stay usable."""


def check_topic_name(name: str) -> None:
    check_name("topic", name)
    if name[0] not in _LETTERS or not _LATER.issuperset(name):
        raise InvalidArgument(
            f"{name!r} cannot be the name of a topic: it has letters from A to Z, digits, '.', '_' and '-', and does "
            "not begin with '.' or '-'"
        )


def is_reserved(name: str) -> bool:
    """Whether only the cluster itself creates topics of this name. Patterns never match such a name."""
    return name.startswith(RESERVED_PREFIX)


def check_not_reserved(name: str) -> None:
    """Check that users may create a topic of this name."""
    if is_reserved(name):
        raise InvalidArgument(
            f"{name!r} cannot be the name of a new topic: names that begin with {RESERVED_PREFIX!r} are reserved for "
            "topics of the cluster itself; choose a name that begins with a letter or a digit"
        )


def check_name(kind: str, name: str) -> None:
    """Check the rules for all names. Names of cursors and producers appear in messages only and have no further
    rules."""
    if not isinstance(name, str):
        raise InvalidArgument(f"the name of a {kind} is text, not {name!r} ({type(name).__name__})")
    if is_token_text(name):
        raise InvalidArgument(
            f"this is a whole token, with its secret, and no name of a {kind}: others may have seen it, so revoke it "
            "and make another one"
        )
    if not 1 <= len(name) <= NAME_LENGTH_MAX:
        raise InvalidArgument(f"the name of a {kind} has 1 to {NAME_LENGTH_MAX} characters, not {len(name)}")
    if not name.isprintable():
        raise InvalidArgument(f"{name!r} cannot be the name of a {kind}: it has characters that cannot be printed")
