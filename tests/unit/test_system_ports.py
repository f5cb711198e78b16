"""Code of the log reaches clocks, chance, threads and files through ports only, so all of it can be simulated.

This reads the syntax of every module of the log. A use of the standard library that goes past ``runtime.system`` or
past ``storage.files`` would still work, but a simulated run would depend on the real machine from then on.
"""

from __future__ import annotations

import ast
import asyncio
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cutwater.runtime import system
from cutwater.runtime.system import Space, System

SOURCE = Path(__file__).resolve().parents[2] / "src" / "cutwater"
PARTS = ("core", "storage", "storagenode", "metadata", "wire", "client", "embedded.py")
PARTS_ON_FILES = (
    "storage",
    "storagenode",
    "metadata/stores",
    "wire/identity/server_keys.py",
    "wire/inprocess_transport.py",
    "client/cluster/holder_file.py",
    "client/cluster/log_directory.py",
    "client/read",
    "embedded.py",
)
"""Parts that reach files only through ``storage.files`` or ``runtime.local_files``."""

# ---------------------------------------------------------------------------------------------------- the rules

INSTEAD: Mapping[str, str] = {
    "time": "system.monotonic, wall_time_ns or thread_time",
    "datetime.datetime.now": "system.wall_time_ns",
    "datetime.datetime.utcnow": "system.wall_time_ns",
    "datetime.datetime.today": "system.wall_time_ns",
    "datetime.date.today": "system.wall_time_ns",
    "secrets": "system.token_bytes, token_hex or random_bits",
    "random": "system.random",
    "uuid": "system.token_hex",
    "os.urandom": "system.token_bytes",
    "os.getrandom": "system.token_bytes",
    "threading.Thread": "system.worker, or run_in_executor of the event loop",
    "threading.Timer": "call_later of the event loop",
    "queue": "system.worker",
    "os.statvfs": "system.free_space",
    "shutil.disk_usage": "system.free_space",
    "socket.create_server": "system.listen",
    "os.getpid": "system.process_id",
    "os.kill": "system.lives_on",
    "cutwater.runtime.processes": "system.started_at or lives_on",
    "cutwater.runtime.daemon_executor.DaemonExecutor": "system.executor",
}
"""What no module of the log uses, a module or something in it, and what it uses instead."""

REPLACED = frozenset({"cutwater.runtime.system.monotonic", "cutwater.runtime.system.wall_time_ns"})
"""Variables that a simulated system replaces: code uses them as ``system.monotonic()`` and imports none of them."""

INSTEAD_ON_FILES: Mapping[str, str] = dict.fromkeys(("open", "os", "fcntl", "shutil", "tempfile", "io.open"), "files")
"""What the parts that keep the data of storage nodes do not use either."""

METHODS_ON_FILES = frozenset(
    """
    chmod glob hardlink_to is_file is_symlink iterdir lstat mkdir read_bytes read_text readlink resolve rglob rmdir
    samefile stat symlink_to touch write_bytes write_text
    """.split()
)
"""Methods of paths that go to the real file system and that ``StorageFiles`` has under another name, or not at all."""

EXCEPTIONS: Mapping[tuple[str, str], str] = {
    ("storage/files.py", "os"): "implements the file layer on the operating system",
    ("storage/files.py", "fcntl"): "implements the file layer on the operating system",
    ("storage/files.py", ".mkdir"): "implements the file layer on the operating system",
    ("storage/files.py", ".rmdir"): "implements the file layer on the operating system",
    ("storage/files.py", "os.getpid"): "implements the file layer on the operating system",
    ("metadata/stores/sqlite_engine.py", "os"): "implements the engine on the operating system",
    ("embedded.py", "os"): "names the types of paths, and makes texts of them",
    ("client/loop_thread.py", "threading.Thread"): "runs a whole event loop, for programs without one",
    ("client/loop_thread.py", "os.getpid"): "notices that this is another process than the one that started the loop",
    ("client/loop_thread.py", "cutwater.runtime.daemon_executor.DaemonExecutor"): "runs a whole event loop",
    ("wire/listen/metrics_http.py", "threading.Thread"): "names the type of the thread of Prometheus' HTTP server",
    ("storagenode/start.py", "threading.Thread"): "waits for signals of a real process",
    ("storagenode/start.py", "threading.Timer"): "ends a real process whose event loop hangs",
}

# -------------------------------------------------------------------------------------------------- the checker


def uses(source: str, rules: Mapping[str, str], methods: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Yield the line and the rule of everything in a module that a rule names."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    """What each name stands for, with its module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                imported[name] = alias.name if alias.asname else name
                if alias.name.partition(".")[0] in rules:
                    yield node.lineno, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                full = imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from ((node.lineno, rule) for rule in (*rules, *REPLACED) if rule in (full, node.module))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (full := _full_name(node, imported)) in rules:
            yield node.lineno, full
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
            yield node.lineno, f".{node.func.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open" in rules:
            yield node.lineno, "open"


def _full_name(node: ast.expr, imported: Mapping[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, imported)}.{node.attr}"
    return imported.get(node.id, "") if isinstance(node, ast.Name) else ""


def found() -> dict[tuple[str, str], int]:
    """Return the file, the rule and the line of everything in the log that goes past the ports."""
    result: dict[tuple[str, str], int] = {}
    for part in PARTS:
        path = SOURCE / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            rules, methods = INSTEAD, frozenset[str]()
            if f"{file.relative_to(SOURCE).as_posix()}/".startswith(tuple(f"{place}/" for place in PARTS_ON_FILES)):
                rules, methods = {**INSTEAD, **INSTEAD_ON_FILES}, METHODS_ON_FILES
            for line, rule in uses(file.read_text(encoding="utf-8"), rules, methods):
                result.setdefault((file.relative_to(SOURCE).as_posix(), rule), line)
    return result


# ------------------------------------------------------------------------------------------- Cutwater as it stands


def test_code_of_the_log_goes_through_the_ports() -> None:
    past = {place: line for place, line in found().items() if place not in EXCEPTIONS}
    every = {**INSTEAD, **INSTEAD_ON_FILES, **dict.fromkeys(REPLACED, "from cutwater.runtime import system")}
    assert not past, "\n" + "\n".join(
        f"src/cutwater/{file}:{line}: {rule}: use {every.get(rule, 'files')} instead"
        for (file, rule), line in past.items()
    )


def test_every_exception_is_needed() -> None:
    assert sorted(EXCEPTIONS.keys() - found().keys()) == []


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("import time", "time"),
        ("from time import monotonic", "time"),
        ("import time as clock", "time"),
        ("import random", "random"),
        ("from secrets import token_hex as hex", "secrets"),
        ("import threading\nthreading.Thread(target=print)", "threading.Thread"),
        ("import threading as t\nt.Timer(1, print)", "threading.Timer"),
        ("from threading import Thread", "threading.Thread"),
        ("import os\nos.urandom(8)", "os.urandom"),
        ("from os import statvfs", "os.statvfs"),
        ("from datetime import datetime\ndatetime.now()", "datetime.datetime.now"),
        ("import datetime\ndatetime.date.today()", "datetime.date.today"),
        ("def f():\n    import queue", "queue"),
        ("from cutwater.runtime.system import monotonic", "cutwater.runtime.system.monotonic"),
    ],
)
def test_a_use_of_the_machine_is_found(source: str, rule: str) -> None:
    assert rule in {rule for _, rule in uses(source, INSTEAD)}


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("open('x')", "open"),
        ("import os", "os"),
        ("import os.path", "os"),
        ("def f(path): path.write_text('')", ".write_text"),
        ("def f(path): return [*path.parent.iterdir()]", ".iterdir"),
    ],
)
def test_a_use_of_real_files_is_found(source: str, rule: str) -> None:
    assert rule in {rule for _, rule in uses(source, INSTEAD_ON_FILES, METHODS_ON_FILES)}


def test_locks_names_and_methods_of_ports_are_no_uses() -> None:
    source = """
import threading
from cutwater.runtime import system
lock = threading.Lock()
def f(files, time, path):
    files.open(path)
    files.remove_dir(path)
    return system.random().random() + system.monotonic() + time.end
"""
    assert list(uses(source, {**INSTEAD, **INSTEAD_ON_FILES}, METHODS_ON_FILES)) == []


# ------------------------------------------------------------------------------------------------- the system


class Standing(System):
    """A system in which time stands still and nothing is random."""

    def monotonic(self) -> float:
        return 5.0

    def token_bytes(self, size: int) -> bytes:
        return b"\x01" * size

    def free_space(self, path: Path) -> Space:
        return Space(10, 3, 1)


def test_another_system_can_be_used_and_be_put_back(tmp_path: Path) -> None:
    standing = Standing()
    before = system.use(standing)
    try:
        assert (system.monotonic(), system.token_hex(2), system.token_bytes(1)) == (5.0, "0101", b"\x01")
        assert system.free_space(tmp_path) == Space(10, 3, 1)
    finally:
        assert system.use(before) is standing
    assert system.monotonic() != 5.0
    assert len(system.token_hex(16)) == 32
    assert system.token_hex(16) != system.token_hex(16)
    space = system.free_space(tmp_path)
    assert 0 < space.free_bytes <= space.total_bytes
    assert space.device == tmp_path.stat().st_dev


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use") as refused:
            asyncio.run(system.listen("127.0.0.1", port, 8))
        assert refused.value.filename == f"127.0.0.1:{port}"


def test_all_sockets_of_a_name_have_one_port() -> None:
    sockets = asyncio.run(system.listen("localhost", 0, 8))
    try:
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        assert not any(sock.getblocking() for sock in sockets)
    finally:
        for sock in sockets:
            sock.close()
