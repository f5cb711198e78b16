"""The docstring of ``cutwater.errors`` is the documented tree: it must say what the classes say."""

from __future__ import annotations

import inspect
import re

import pytest

from cutwater import errors
from cutwater.errors import CutwaterError

CLASSES = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__
]  # fmt: skip

LINE = re.compile(
    r"^    (?P<indent>[ │]*)[├└]─ (?P<name>\w+) +(?P<code>[a-z_]+) +(?P<text>\S.*?)(?P<mark> +\(retriable\))?$"
)


def _documented() -> dict[str, tuple[str, str, bool]]:
    """Name → (parent, code, retriable), as the drawing has it."""
    assert errors.__doc__ is not None
    found: dict[str, tuple[str, str, bool]] = {}
    parents = ["CutwaterError"]
    for line in errors.__doc__.splitlines():
        match = LINE.match(line)
        assert (match is None) == ("─ " not in line), f"not a line of the tree: {line!r}"
        if match is None:
            continue
        depth = len(match["indent"]) // 4
        parents[depth + 1 :] = [match["name"]]
        assert match["name"] not in found
        found[match["name"]] = (parents[depth], match["code"], match["mark"] is not None)
    return found


DOCUMENTED = _documented()


def test_every_error_is_in_the_tree_and_no_other() -> None:
    assert "\n    CutwaterError\n" in (errors.__doc__ or "")
    assert sorted(DOCUMENTED) == sorted(cls.__name__ for cls in CLASSES if cls is not CutwaterError)


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not CutwaterError], ids=lambda cls: cls.__name__)
def test_parent_code_and_mark_are_as_drawn(cls: type[CutwaterError]) -> None:
    assert DOCUMENTED[cls.__name__] == (cls.__base__.__name__ if cls.__base__ else "", cls.code, cls.retriable)


def test_codes_are_unique_and_follow_the_names() -> None:
    codes = [cls.code for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    for cls in CLASSES:
        assert cls.code == re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        assert "code" in vars(cls), "a code is stable only if it is not inherited"


def test_an_error_tells_how_it_got_there() -> None:
    """'Errors of the core carry the recent ``history`` of the object concerned'."""
    plain = CutwaterError("broken")
    assert str(plain) == "broken"
    told = CutwaterError("broken", history=("first", "then"))
    assert (told.message, told.history) == ("broken", ("first", "then"))
    assert str(told).splitlines()[0] == "broken"
    assert [line.strip() for line in str(told).splitlines()[2:]] == ["first", "then"]
