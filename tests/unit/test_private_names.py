"""Nothing under ``src`` or ``benchmarks`` uses a private name of the standard library or of another package.

Such names change without notice. This reads the sources and reports, as far as that can be told without running them:

1. an import of a private module or name from elsewhere,
2. a private attribute of an imported module, class or function from elsewhere,
3. a private attribute that no class of ours has, so that it belongs to an object from elsewhere,
4. a private attribute of a class of ours that its base class from elsewhere has too.

``EXCEPTIONS`` lists what is documented although its name begins with an underscore, and what has no public way.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = frozenset({"cutwater", "benchmarks"})
GENERATED = "_pb2.py"

EXCEPTIONS: dict[str, tuple[str, ...]] = {
    "": ("os._exit", "_asdict", "_fields", "_make", "_replace"),
    # PySpark has no public way to its JVM, and none to the plan of a data frame.
    "src/cutwater/spark/": ("_gateway", "_jdf", "_jsc", "_jvm"),
    # The module asyncio exports it for event loops of others; there is no other name for it.
    "src/cutwater/testing/virtual/": ("asyncio._set_running_loop",),
}
"""By the beginning of the path: attributes, or names with their module, that may be used there."""


def is_private(name: str) -> bool:
    """Whether it begins with an underscore. ``__this__`` and ``_this_`` are how Python and ``enum`` name hooks."""
    return name.startswith("_") and name != "_" and not name.endswith("_")


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS


def attributes_of(tree: ast.Module) -> Iterator[str]:
    """Private names that classes and modules of this file define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def dotted(node: ast.expr) -> str:
    """``a.b.c`` if that is what the expression is, otherwise nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


class Checker:
    """Checks one file. ``known`` are the names that classes of ours define anywhere."""

    def __init__(self, source: str, path: str, known: Iterable[str]) -> None:
        self.tree = ast.parse(source)
        self.path, self.known = path, frozenset(known)
        self.allowed = {name for start, names in EXCEPTIONS.items() if path.startswith(start) for name in names}
        self.imported: dict[str, str] = {}
        """Name in this file → the module, class or function from elsewhere that it stands for."""

    def findings(self) -> list[str]:
        found = [*self._imports(), *self._attributes(), *self._bases()]
        return [f"{self.path}:{line}: {what}" for line, what in sorted(set(found))]

    def _imports(self) -> Iterator[tuple[int, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [(alias.name, alias.asname or alias.name.partition(".")[0]) for alias in node.names]
                self._note(names, is_whole=True)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
                self._note(names, is_whole=False)
            else:
                continue
            for full, _ in names:
                if not is_ours(full) and any(map(is_private, full.split("."))):
                    yield node.lineno, f"imports {full}"

    def _note(self, names: list[tuple[str, str]], *, is_whole: bool) -> None:
        for full, name in names:
            if not is_ours(full):
                self.imported[name] = name if is_whole and full.partition(".")[0] == name else full

    def _attributes(self) -> Iterator[tuple[int, str]]:
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr) or node.attr in self.allowed:
                continue
            chain = dotted(node)
            if chain.partition(".")[0] in self.imported:
                if self._full(chain) not in self.allowed:
                    yield node.lineno, f"uses {self._full(chain)}"
            elif node.attr not in self.known:
                yield node.lineno, f"uses {node.attr}, which no class of ours has"

    def _full(self, chain: str) -> str:
        root, dot, rest = chain.partition(".")
        return f"{self.imported.get(root, root)}{dot}{rest}"

    def _bases(self) -> Iterator[tuple[int, str]]:
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                name = dotted(base)
                if name.partition(".")[0] not in self.imported:
                    continue
                theirs = private_attributes(self._full(name))
                for inner in ast.walk(node):
                    for own in _defined_by(inner):
                        if own in theirs:
                            yield inner.lineno, f"{node.name}.{own} is also one of {self._full(name)}"


def _defined_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
        yield node.attr
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


@cache
def private_attributes(name: str) -> frozenset[str]:
    """Private attributes of a class from elsewhere: of the class itself, and those that its methods set."""
    module, _, rest = name.rpartition(".")
    try:
        cls: Any = getattr(importlib.import_module(module), rest)
    except (ImportError, AttributeError, ValueError):
        return frozenset()
    if not inspect.isclass(cls):
        return frozenset()
    found = set(dir(cls))
    for base in cls.__mro__:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        found |= {own for node in ast.walk(tree) for own in _defined_by(node)}
    return frozenset(filter(is_private, found))


def files() -> list[Path]:
    found = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    return sorted(path for path in found if not path.name.endswith(GENERATED))


def test_no_private_name_from_elsewhere_is_used() -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files()}
    known = {name for source in sources.values() for name in attributes_of(ast.parse(source))}
    assert len(known) > 1_000
    assert [one for path, source in sources.items() for one in Checker(source, path, known).findings()] == []


# What is found, and what is not.

OWN = """
import asyncio
class Ours:
    limit: int
    def __init__(self) -> None:
        self._kept = 1
"""


def found(source: str, path: str = "src/cutwater/a.py") -> list[str]:
    whole = OWN + source
    findings = Checker(whole, path, attributes_of(ast.parse(whole))).findings()
    return [finding.partition(": ")[2] for finding in findings]


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("from concurrent.futures._base import FINISHED", "imports concurrent.futures._base.FINISHED"),
        ("import typer._completion_shared", "imports typer._completion_shared"),
        ("import _thread", "imports _thread"),
        ("from threading import _MainThread", "imports threading._MainThread"),
        ("def f():\n    from selectors import _BaseSelectorImpl", "imports selectors._BaseSelectorImpl"),
        ("import threading\nthreading._shutdown()", "uses threading._shutdown"),
        ("import concurrent.futures as c\nc.thread._threads_queues", "uses concurrent.futures.thread._threads_queues"),
        ("from asyncio import Task\nTask._step", "uses asyncio.Task._step"),
        ("def f(transport):\n    return transport._loop", "uses _loop, which no class of ours has"),
        ("def f(ours):\n    return ours.socket()._sock", "uses _sock, which no class of ours has"),
        ("def f(future):\n    future._state = 1", "uses _state, which no class of ours has"),
        (
            "from concurrent.futures import Future\nclass F(Future[int]):\n    def g(self):\n        self._result = 1",
            "F._result is also one of concurrent.futures.Future",
        ),
        (
            "import threading\nclass T(threading.Thread):\n    def _bootstrap(self): ...",
            "T._bootstrap is also one of threading.Thread",
        ),
        ("class P(asyncio.Transport):\n    def g(self):\n        self._extra = 1", "P._extra is also one of"),
    ],
)
def test_what_is_private_elsewhere_is_found(source: str, what: str) -> None:
    (finding,) = found(source)
    assert finding.startswith(what)


@pytest.mark.parametrize(
    "source",
    [
        "def f(ours):\n    return ours._kept",
        "from cutwater.client.client import _private",
        "import os\nos._exit(1)",
        "def f(row):\n    return row._asdict()",
        "import enum\nclass E(enum.Enum):\n    @classmethod\n    def _missing_(cls, value): ...",
        "class P(asyncio.Transport):\n    def g(self):\n        self._mine = self._kept",
        "for _ in range(3): ...",
    ],
)
def test_what_is_ours_or_documented_is_not(source: str) -> None:
    assert found(source) == []


def test_an_exception_holds_in_its_folder_only() -> None:
    assert found("def f(frame):\n    return frame._jdf", "src/cutwater/spark/a.py") == []
    assert found("def f(frame):\n    return frame._jdf") == ["uses _jdf, which no class of ours has"]
