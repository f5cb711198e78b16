"""``python -O`` leaves asserts out: what they say must not do anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "cutwater"
CHANGES = frozenset(
    "acquire add append appendleft apply clear discard extend handle insert pop popitem popleft put read recv release "
    "remove send setdefault take update write".split()
)
"""Methods that change what they belong to."""


def changes(source: str) -> Iterator[int]:
    """The lines of asserts that call a method which changes something, or bind a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                calls = isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute)
                if isinstance(part, ast.NamedExpr | ast.Await) or (calls and part.func.attr in CHANGES):  # type: ignore[attr-defined]
                    yield node.lineno


def test_asserts_change_nothing() -> None:
    found = {str(path): lines for path in SOURCE.rglob("*.py") if (lines := list(changes(path.read_text())))}
    assert found == {}


def test_one_that_does_is_found() -> None:
    assert list(changes("assert groups\nassert groups.pop().glsn is None\nassert (n := 1)")) == [2, 3]
