"""Finds the name of a pipeline in its program without running it: by reading the text.

The name of a job is that of its pipeline, and only the agent that runs the job may import the program. So a command
takes the name from a call ``Pipeline("fraud", ...)`` that is written down, and otherwise from the name of the file. If
that is not right, the agent says so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import PurePath

from cutwater.core.jobs.job_spec import split_entry

_CLASS = "Pipeline"


def job_name(entry: str, source: str | None) -> str:
    """Return the name of the job of an entry such as ``fraud.py:p``. ``source`` is the text of that file, if there
    is."""
    file, variable = split_entry(entry)
    found = _names(source, variable) if source is not None else set()
    return found.pop() if len(found) == 1 else _stem(file)


def _stem(file: str) -> str:
    path = PurePath(file)
    return path.stem if path.suffix == ".py" else path.name.rpartition(".")[2]


def _names(source: str, variable: str) -> set[str]:
    """Return the names of the pipelines that a program makes; only those of this variable or function, if named."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # The agent reports it, with its line.
        return set()
    parts = list(_parts_of(tree, variable)) if variable else [tree]
    return {name for part in parts for node in ast.walk(part) if (name := _named(node))}


def _parts_of(tree: ast.Module, variable: str) -> Iterator[ast.AST]:
    for node in tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.FunctionDef) and node.name == variable:
            yield node
        if any(isinstance(target, ast.Name) and target.id == variable for target in targets):
            yield node


def _named(node: ast.AST) -> str:
    """Return the name in a call ``Pipeline("name", ...)``, ``cutwater.pipeline.Pipeline(name="name")``; otherwise
    nothing."""
    if not isinstance(node, ast.Call):
        return ""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called != _CLASS:
        return ""
    values = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "name")]
    return next((v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)), "")
