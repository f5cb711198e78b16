"""Names that programs and people rely on stay: what an earlier version had, the present one has too.

The lists were made by the version in their name, with ``surface.py``. Additions are welcome.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.upgrade import surface

LISTS = sorted(Path(__file__).parent.glob("*.surface.json"))


@pytest.fixture(scope="module")
def present() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(surface.surface()))
    return found


def gone(before: Any, now: Any, where: str) -> Iterator[str]:
    """Where something is missing, or is not what it was. Lists, too, may only grow."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name, value in before.items():
            if name in now:
                yield from gone(value, now[name], f"{where} › {name}")
            else:
                yield f"{where} › {name}"
    elif isinstance(before, list) and isinstance(now, list):
        # What had to be said before may be left out now.
        yield from (f"{where}: {i}" for i in before if i not in now and f"{i}=" not in now and i != "required")
    elif before != now:
        yield f"{where}: {before} became {now}"


@pytest.mark.parametrize("path", LISTS, ids=[path.name.removesuffix(".surface.json") for path in LISTS])
def test_nothing_is_gone(path: Path, present: dict[str, Any]) -> None:
    before = json.loads(path.read_text())
    assert len(before["names"]["cutwater"]) > 50
    assert len(before["commands"]) > 40
    assert list(gone(before, present, "")) == []


@pytest.mark.parametrize("path", LISTS, ids=[path.name.removesuffix(".surface.json") for path in LISTS])
def test_nothing_more_has_to_be_said(path: Path, present: dict[str, Any]) -> None:
    """A parameter, argument or option that is new may be left out."""
    before = json.loads(path.read_text())
    for package, names in before["names"].items():
        for name, about in names.items():
            now = present["names"][package][name]
            calls = {"": about.get("parameters", []), **about.get("members", {})}
            new = {"": now.get("parameters", []), **now.get("members", {})}
            for member, known in calls.items():
                required = [p for p in new[member] if p not in known and not p.endswith("=") and p[0] != "*"]
                assert required == [], f"{package}.{name}.{member}"
    for command, options in before["commands"].items():
        more = present["commands"][command].keys() - options.keys()
        assert [name for name in more if present["commands"][command][name][-1] == "required"] == [], command
