"""A public class name means one thing in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "cutwater"


def shared(sources: dict[str, str]) -> dict[str, list[str]]:
    """Public names of classes that more than one module defines, with the modules."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, source in sorted(sources.items()):
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_public_classes_have_names_of_their_own() -> None:
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    assert shared(sources) == {}


def test_a_shared_name_is_found() -> None:
    sources = {"a.py": "class Run: ...\nclass _Own: ...", "b.py": "class Run: ...\nclass _Own: ..."}
    assert shared(sources) == {"Run": ["a.py", "b.py"]}
