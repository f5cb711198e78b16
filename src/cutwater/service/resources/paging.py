"""Pages of lists that the cluster gives as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct

from cutwater.errors import InvalidArgument
from cutwater.service.routes import Page

T = TypeVar("T")

PAGE_MAX = 1_000
Limit = Annotated[int, Meta(ge=1, le=PAGE_MAX, description="How many items the answer may have.")]
Position = Annotated[int, Meta(ge=1, le=2**62)]
NUMBER_IN_PATH = {"type": "integer", "minimum": 1, "maximum": 2**53}


class PageQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """``after``: the last item of the page before, which its answer names as ``next``."""

    after: Annotated[str, Meta(max_length=255)] = ""
    limit: Limit = 100


class NumberedQuery(Struct, frozen=True, forbid_unknown_fields=True):
    after: Annotated[int, Meta(ge=0, le=2**62)] = 0
    limit: Limit = 100


def page_of(items: Iterable[T], query: Any, key: Callable[[T], Any]) -> Page[T]:
    """Return the items after ``query.after``, in the order of their keys, which are numbers or texts."""
    found = sorted((item for item in items if key(item) > query.after), key=key)
    some = tuple(found[: query.limit])
    return Page(some, str(key(some[-1])) if len(found) > len(some) else None)


def number_of(path: dict[str, str], name: str) -> int:
    """Return a number in the path of an address."""
    text = path[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) >= 1):
        raise InvalidArgument(f"{name} is a whole number from 1 on, not {text[:80]!r}")
    return int(text)
