"""Dependencies point one way: this reads every import under ``src/cutwater`` and fails when an arrow turns round.

The rules are the table below, and nothing else. An import inside a function or under ``if TYPE_CHECKING`` is a
dependency like any other. A part that does not exist yet may already have its row; a part without a row is an error,
so a new package cannot slip in without anyone saying where it stands.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "cutwater"
SOURCE = Path(__file__).resolve().parents[2] / "src" / PACKAGE

# ---------------------------------------------------------------------------------------------------- the rules


@dataclass(frozen=True)
class Rule:
    """What one part may import. Parts are named without ``cutwater.``; a part may always import from itself."""

    parts: frozenset[str]
    """Parts of Cutwater; a dotted name opens one module of a part and no more."""
    outside_only: frozenset[str] | None = None
    """Top-level modules from elsewhere, as a complete list; without one, all but ``outside_never``."""
    outside_never: frozenset[str] = frozenset()
    """Top-level modules from elsewhere that are forbidden."""


PURE_MODULES = frozenset(
    "__future__ bisect collections dataclasses enum functools heapq itertools math msgspec operator typing".split()
)
"""What a state machine is made of: values in, values out."""

IMPURE_MODULES = frozenset(
    """
    asyncio concurrent contextvars ctypes datetime fcntl glob importlib io locale logging mmap multiprocessing os
    pathlib pickle platform queue random sched secrets select selectors shelve shutil signal socket socketserver sqlite3
    ssl subprocess sys tempfile threading time tracemalloc urllib uuid warnings zoneinfo
    aetcd grpc pandas prometheus_client pyarrow pydantic_settings rich starlette structlog typer uvicorn uvloop
    """.split()
)
"""Clocks, chance, files, sockets, threads, the process and its environment, and libraries that bring them along."""

VOCABULARY = frozenset({"types", "errors"})
TEXTS = frozenset({"schema_text", "durations"})
"""What users write as text, types of columns and durations, means the same wherever they write it."""
EVERYTHING = frozenset({"*"})

RULES: Mapping[str, Rule] = {
    "types": Rule(frozenset(), outside_only=PURE_MODULES),
    "errors": Rule(frozenset({"types"}), outside_only=PURE_MODULES),
    "schema_text": Rule(VOCABULARY, outside_only=PURE_MODULES | {"re", "pyarrow"}),
    "durations": Rule(VOCABULARY, outside_only=PURE_MODULES | {"re", "datetime"}),
    # Hashes of tokens are values, too; chance, from which tokens are made, is not.
    "core": Rule(VOCABULARY, outside_only=PURE_MODULES | {"hashlib", "hmac"}),
    # Bytes in, values out. Arrow is the form of bodies, and errors name paths of files.
    "format": Rule(VOCABULARY | {"core"}, outside_never=IMPURE_MODULES - {"pathlib", "pyarrow", "sys"}),
    # Descriptions of methods, and errors on their way; an error of TLS is one of them.
    "protocol": Rule(VOCABULARY | {"core"}, outside_never=IMPURE_MODULES - {"ssl", "sys"}),
    # For shells only, see ``PURE_PARTS``.
    "runtime": Rule(VOCABULARY),
    "storage": Rule(VOCABULARY | {"core", "format", "runtime"}),
    # Transport only: neither records nor decisions are known there.
    "wire": Rule(VOCABULARY | {"protocol", "runtime"}),
    # What both kinds of servers do about rights. Rules are values of the core.
    "access": Rule(VOCABULARY | {"core", "protocol", "wire", "runtime"}),
    "storagenode": Rule(
        VOCABULARY | {"core", "format", "protocol", "storage", "wire", "access", "runtime", "durations"}
    ),
    "metadata": Rule(VOCABULARY | {"core", "format", "protocol", "storage", "wire", "access", "runtime"}),
    "client": Rule(VOCABULARY | TEXTS | {"core", "format", "protocol", "wire", "runtime"}),
    # The servers and a client of them in one process, and which process that is.
    "embedded": Rule(
        VOCABULARY | {"core", "protocol.errors", "storage", "wire", "storagenode", "metadata", "client", "runtime"}
    ),
    "admin": Rule(VOCABULARY | {"core", "protocol", "wire", "client", "programs", "runtime"}),
    "web": Rule(VOCABULARY | {"client", "admin"}),
    # The cluster over HTTP, with the rights of callers. It never imports a program: there is no ``pipeline`` here. What
    # users give for a job is checked in the same words as on the command line.
    "service": Rule(
        VOCABULARY
        | TEXTS
        | {PACKAGE, "core", "protocol", "client", "admin", "programs", "runtime"}
        | {"wire.addresses", "wire.identity.handshake", "wire.identity.tls", "wire.listen"}
        | {"jobs.restarts", "jobs.spark_conf"}
    ),
    # Payload is Arrow on every path, and ``datetime`` is the type of a timestamp in a row, so both are values here. The
    # watermark is defined once, by the core, as a function of a position: nothing else of the core is open.
    "pipeline": Rule(
        VOCABULARY | TEXTS | {"core.read.watermark"}, outside_never=IMPURE_MODULES - {"pyarrow", "datetime"}
    ),
    # Programs as archives, in the log and on the disk of an agent. What runs them is above.
    "programs": Rule(VOCABULARY | {"core", "protocol", "client", "runtime"}),
    # A format for what pipelines keep, on files. It can be read where there is no Spark, and no cluster.
    "savepoints": Rule(
        VOCABULARY | TEXTS | {"core.read.watermark", "core.jobs.checkpoint_stores", "pipeline", "runtime"}
    ),
    # Jobs are processes that are looked after; what they run is a pipeline, errors travel as they do on the wire, and
    # metrics are served as those of servers are.
    "jobs": Rule(
        VOCABULARY | TEXTS | {"runtime", "pipeline", "protocol.errors", "wire.addresses", "wire.listen.metrics_http"}
    ),
    # The source reads ranges through the client, and opens an embedded log where nobody else has. A savepoint names the
    # version that made it.
    "spark": Rule(
        VOCABULARY
        | TEXTS
        | {PACKAGE, "core", "protocol", "wire", "client", "embedded", "pipeline", "savepoints", "jobs", "runtime"}
    ),
    # An agent is a client that starts processes of jobs. What it decides is in its own state machine; programs of users
    # are imported only by those processes, which have what runs and describes pipelines.
    "agent": Rule(
        VOCABULARY
        | TEXTS
        | {PACKAGE, "core", "protocol", "wire", "client", "pipeline", "savepoints", "jobs", "programs", "spark"}
        | {"runtime"}
    ),
    # The command line also starts the servers, the dashboard and the jobs, and tells of things in the same words.
    "cli": Rule(
        VOCABULARY
        | TEXTS
        | {PACKAGE, "embedded", "client", "admin", "storagenode", "metadata", "web", "pipeline", "jobs", "savepoints"}
        | {"agent", "spark", "runtime", "wire.listen.listen_checks", "wire.options", "wire.identity.tls", "core.text"}
        | {"wire.identity.certificate_files", "service", "core.jobs", "programs"}
    ),
    # The package itself holds the public names. They come without a JVM, so nothing of Spark is among them.
    PACKAGE: Rule(VOCABULARY | {"client", "embedded", "protocol.errors"}),
    # Shipped, and free to use whatever it tests. No other row may name it.
    "testing": Rule(EVERYTHING),
}

PURE_PARTS = frozenset({"types", "errors", "schema_text", "durations", "core", "format", "protocol", "pipeline"})
"""Parts that get time and results as arguments: ``runtime`` is not for them."""

ONLY_IN: Mapping[str, str] = {"pyspark": "spark", "py4j": "spark"}
"""Modules from elsewhere that a single part may import."""

# -------------------------------------------------------------------------------------------------- the checker


@dataclass(frozen=True)
class Violation:
    """One import that the rules forbid."""

    path: str
    line: int
    imported: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: import of {self.imported}: {self.reason}"


def violations(source: Path) -> list[Violation]:
    """Everything in ``source``, the directory of the package ``cutwater``, that the rules forbid."""
    paths = {_module_name(source, path): path for path in sorted(source.rglob("*.py"))}
    known = {PACKAGE, *(f"{PACKAGE}.{part}" for part in RULES), *paths}
    found = []
    for module, path in paths.items():
        shown = path.relative_to(source.parent.parent).as_posix()
        part = _part(module)
        if part not in RULES:
            found.append(Violation(shown, 1, module, f"{part} has no row in RULES; say there what it may import"))
            continue
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"), shown)
        for line, imported in sorted(set(_imports(tree, package, known))):
            reason = _objection(part, RULES[part], imported)
            if reason is not None:
                found.append(Violation(shown, line, imported, reason))
    return found


def _module_name(source: Path, path: Path) -> str:
    names = [PACKAGE, *path.relative_to(source).with_suffix("").parts]
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def _part(module: str) -> str:
    """The row of the table that speaks of a module of Cutwater."""
    names = module.split(".")
    return names[1] if len(names) > 1 else PACKAGE


def _imports(tree: ast.Module, package: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that is imported anywhere in a file of ``package``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level > 0:
                above = package.split(".")[: len(package.split(".")) - (node.level - 1)]
                base = ".".join([*above, *base.split(".")]).rstrip(".")
            for alias in node.names:
                # ``from cutwater import core`` imports a module; ``from cutwater.core import Replica`` names one.
                submodule = f"{base}.{alias.name}"
                yield node.lineno, submodule if submodule in known else base


def _objection(part: str, rule: Rule, imported: str) -> str | None:
    """Why a module of ``part`` may not import ``imported``, or None if it may."""
    top = imported.partition(".")[0]
    if top == PACKAGE:
        name = imported.removeprefix(f"{PACKAGE}.")
        if _part(imported) == part or rule.parts == EVERYTHING:
            return None
        if any(name == allowed or name.startswith(f"{allowed}.") for allowed in rule.parts):
            return None
        return f"of {PACKAGE}, {part} may import only {_listed({part} | rule.parts)}"
    if ONLY_IN.get(top, part) != part:
        return f"only {ONLY_IN[top]} may import {top}"
    if rule.outside_only is not None and top not in rule.outside_only:
        return f"from elsewhere, {part} may import only {_listed(rule.outside_only)}"
    if top in rule.outside_never:
        return f"{part} is pure and may not import {top}"
    return None


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names))


# ------------------------------------------------------------------------------------------- Cutwater as it stands


def test_no_arrow_turns_round() -> None:
    found = violations(SOURCE)
    assert not found, "\n" + "\n".join(map(str, found))


def test_the_rules_themselves_have_no_cycle() -> None:
    arrows = {part: {name.partition(".")[0] for name in rule.parts - EVERYTHING} for part, rule in RULES.items()}
    TopologicalSorter(arrows).prepare()


def test_nothing_but_testing_may_import_testing() -> None:
    assert [part for part, rule in RULES.items() if rule.parts & {"testing", *EVERYTHING}] == ["testing"]


def test_pure_parts_may_not_use_the_runtime() -> None:
    assert [part for part in PURE_PARTS if "runtime" in RULES[part].parts] == []


def test_importing_cutwater_does_not_look_for_pyspark() -> None:
    assert searches_for_pyspark(f"import {PACKAGE}") == []


# ------------------------------------------------------------------------------------ the checker on made-up trees


def package_of(root: Path, files: Mapping[str, str]) -> Path:
    """A package ``cutwater`` with the given files, path to text."""
    source = root / "src" / PACKAGE
    for name, text in files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return source


def found_in(root: Path, files: Mapping[str, str]) -> list[tuple[str, int, str]]:
    return [(found.path, found.line, found.imported) for found in violations(package_of(root, files))]


def test_a_tree_that_keeps_the_rules_passes(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from cutwater.client import Client\n",
        "types.py": "import enum\n",
        "errors.py": "from cutwater.types import GLSN\n",
        "core/__init__.py": "",
        "core/cut.py": "from collections.abc import Sequence\nfrom cutwater import types\nfrom . import seal\n",
        "core/seal.py": "from ..errors import Refused\nfrom cutwater.types import LLSN\n",
        "client/session.py": "import asyncio\nfrom cutwater.wire import codec\nfrom cutwater.core.cut import cut\n",
        "client/read.py": "from cutwater.format.entry_codec import Frame\n",
        "admin/trim.py": "from cutwater.core.requests import Catalog\nfrom cutwater.client import Client\n",
        "pipeline/graph.py": "import re\nfrom cutwater.types import EventTime\n",
        "spark/source.py": "from pyspark.sql import SparkSession\nfrom cutwater.pipeline import graph\n",
        "testing/simulate.py": "import random\nimport cutwater.core.cut\nfrom cutwater.spark import source\n",
    }
    assert found_in(tmp_path, files) == []


@pytest.mark.parametrize(
    ("name", "text", "imported"),
    [
        pytest.param("core/cut.py", "import cutwater.storage.segment", "cutwater.storage.segment", id="import"),
        pytest.param("core/cut.py", "from cutwater.wire import codec", "cutwater.wire", id="from-part"),
        pytest.param("core/cut.py", "from cutwater import storage", "cutwater.storage", id="from-package"),
        pytest.param("core/cut.py", "from ..storage import segment", "cutwater.storage", id="relative"),
        pytest.param("core/cut.py", "from .. import storage", "cutwater.storage", id="relative-package"),
        pytest.param("core/__init__.py", "from ..storage import segment", "cutwater.storage", id="relative-in-init"),
        pytest.param("core/cut.py", "from cutwater import Client", "cutwater", id="public-names"),
        pytest.param("core/cut.py", "def f(): import cutwater.wire", "cutwater.wire", id="in-function"),
        pytest.param("core/cut.py", "if TYPE_CHECKING: import cutwater.wire", "cutwater.wire", id="type-checking"),
        pytest.param("types.py", "from cutwater.core import cut", "cutwater.core", id="types-core"),
        pytest.param("types.py", "from cutwater.errors import Fenced", "cutwater.errors", id="types-errors"),
        pytest.param("core/cut.py", "from cutwater.format import x", "cutwater.format", id="core-format"),
        pytest.param("core/cut.py", "from cutwater.runtime import x", "cutwater.runtime", id="core-runtime"),
        pytest.param("format/bodies.py", "import cutwater.storage", "cutwater.storage", id="format-storage"),
        pytest.param("format/bodies.py", "import cutwater.protocol", "cutwater.protocol", id="format-protocol"),
        pytest.param("format/bodies.py", "import cutwater.runtime", "cutwater.runtime", id="format-runtime"),
        pytest.param("format/bodies.py", "import asyncio", "asyncio", id="format-asyncio"),
        pytest.param("protocol/methods.py", "import cutwater.wire", "cutwater.wire", id="protocol-wire"),
        pytest.param("protocol/methods.py", "import socket", "socket", id="protocol-socket"),
        pytest.param("wire/codec.py", "import cutwater.core", "cutwater.core", id="wire-core"),
        pytest.param("wire/codec.py", "import cutwater.storage", "cutwater.storage", id="wire-storage"),
        pytest.param("runtime/threads.py", "import cutwater.wire", "cutwater.wire", id="runtime-wire"),
        pytest.param("storage/segment.py", "import cutwater.wire", "cutwater.wire", id="storage-wire"),
        pytest.param("metadata/leader.py", "import cutwater.storagenode", "cutwater.storagenode", id="siblings"),
        pytest.param("client/session.py", "from cutwater import admin", "cutwater.admin", id="client-admin"),
        pytest.param("client/read.py", "import cutwater.storage.segment", "cutwater.storage.segment", id="one-module"),
        pytest.param("admin/trim.py", "import cutwater.cli", "cutwater.cli", id="admin-cli"),
        pytest.param("pipeline/graph.py", "import cutwater.spark", "cutwater.spark", id="pipeline-spark"),
        pytest.param("pipeline/graph.py", "import cutwater.runtime", "cutwater.runtime", id="pipeline-runtime"),
        pytest.param("spark/sink.py", "import cutwater.storage", "cutwater.storage", id="spark-storage"),
        pytest.param("core/cut.py", "from cutwater.testing import faults", "cutwater.testing", id="core-testing"),
        pytest.param("cli/sn.py", "from cutwater.testing import faults", "cutwater.testing", id="cli-testing"),
        pytest.param("core/cut.py", "import asyncio", "asyncio", id="core-asyncio"),
        pytest.param("core/cut.py", "from time import monotonic", "time", id="core-time"),
        pytest.param("core/cut.py", "import os.path", "os.path", id="core-os"),
        pytest.param("core/cut.py", "import some_library", "some_library", id="core-allow-list"),
        pytest.param("errors.py", "import logging", "logging", id="errors-logging"),
        pytest.param("pipeline/graph.py", "import random", "random", id="pipeline-random"),
        pytest.param("pipeline/graph.py", "import pyspark", "pyspark", id="pipeline-pyspark"),
        pytest.param("client/session.py", "from pyspark.sql import Row", "pyspark.sql", id="client-pyspark"),
        pytest.param("testing/spark.py", "import pyspark", "pyspark", id="testing-pyspark"),
        pytest.param("__init__.py", "from cutwater.spark import register", "cutwater.spark", id="package-spark"),
    ],
)
def test_a_turned_arrow_is_found(tmp_path: Path, name: str, text: str, imported: str) -> None:
    assert found_in(tmp_path, {name: f"# Says why.\n{text}\n"}) == [(f"src/{PACKAGE}/{name}", 2, imported)]


def test_a_part_without_a_rule_is_found(tmp_path: Path) -> None:
    assert found_in(tmp_path, {"utils.py": "import enum\n"}) == [("src/cutwater/utils.py", 1, "cutwater.utils")]


def test_the_message_says_where_what_and_what_would_be_allowed(tmp_path: Path) -> None:
    source = package_of(tmp_path, {"core/cut.py": "import cutwater.wire\n", "spark/sink.py": "import cutwater.cli\n"})
    assert [str(found) for found in violations(source)] == [
        "src/cutwater/core/cut.py:1: import of cutwater.wire: of cutwater, core may import only core, errors, types",
        "src/cutwater/spark/sink.py:1: import of cutwater.cli: "
        "of cutwater, spark may import only "
        "client, core, cutwater, durations, embedded, errors, jobs, "
        "pipeline, protocol, runtime, savepoints, schema_text, spark, types, wire",
    ]


# --------------------------------------------------------------------------------------- what an import really does

WATCH = """
import sys
searched = []
class Watcher:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            searched.append(name)
sys.meta_path.insert(0, Watcher())
{statement}
print(*searched)
"""


def searches_for_pyspark(statement: str) -> list[str]:
    """What of PySpark a fresh interpreter looks for when it runs ``statement``, installed or not."""
    command = [sys.executable, "-c", WATCH.format(statement=statement)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()


def test_a_search_for_pyspark_is_seen_also_where_it_is_caught_or_not_installed() -> None:
    statement = "try:\n    import pyspark.sql\nexcept ImportError:\n    pass"
    assert searches_for_pyspark(statement)[0] == "pyspark"
