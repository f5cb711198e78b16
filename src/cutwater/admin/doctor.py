"""Checks whether a machine is fit for Cutwater: each check says what it found and, if something is wrong, what to
do."""

from __future__ import annotations

import ctypes
import enum
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from msgspec import Struct

from cutwater.admin.local_etcd import SERVER_ADVICE, find_etcd

PYTHON_MIN = (3, 11)
JAVA_MIN = 17
JAVA_SECONDS_MAX = 10.0
PORTS = {7001: "mr start", 7101: "sn start"}
ROOM_BYTES_MIN = 64 * 1024 * 1024
ROOM_BYTES_WISHED = 1024 * 1024 * 1024
SYNCS = 50
SYNC_BYTES = 4_096
SYNC_MS_WISHED = 20.0
FILES_MIN = 256
FILES_WISHED = 4_096
CLOCK_SECONDS = 0.1
CLOCK_SECONDS_OFF_MAX = 0.05
YEAR_2024 = 1_704_067_200.0
_UNSYNCHRONIZED = 0x40
"""``STA_UNSYNC`` in the status of ``adjtimex``."""
_TIMEX_BYTES = 512
"""Larger than ``struct timex`` on any system."""
_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}


class Verdict(enum.StrEnum):
    OK = "ok"
    NOTE = "note"
    """Not needed, or only needed for some purposes."""
    WARNING = "warning"
    """It works, but not well."""
    WRONG = "wrong"
    """Essential: Cutwater will not work."""


class Check(Struct, frozen=True):
    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def check_machine(directory: Path) -> Iterator[Check]:
    """Run all checks of this machine; ``directory`` is where data would lie."""
    yield check_python()
    yield from check_packages()
    yield check_java()
    yield check_etcd()
    yield from check_ports()
    yield check_files()
    yield check_clock()
    yield check_time_sync()
    yield from check_disk(directory)


def check_python() -> Check:
    found = (
        f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    if sys.version_info < PYTHON_MIN:
        return Check("Python", Verdict.WRONG, found, f"install Python {'.'.join(map(str, PYTHON_MIN))} or newer")
    return Check("Python", Verdict.OK, found)


def check_packages() -> Iterator[Check]:
    """Check the packages that Cutwater and its extras need; the versions are useful in a problem report."""
    yield Check("cutwater", Verdict.OK, metadata.version("cutwater"))
    for requirement in metadata.requires("cutwater") or ():
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        if extra is not None and extra[1] == "dev":
            continue
        what = f"package {name}"
        try:
            yield Check(what, Verdict.OK, metadata.version(name))
        except metadata.PackageNotFoundError:
            if extra is not None:
                advice = f"only needed for {extra[1]}: pip install 'cutwater[{extra[1]}]'"
                yield Check(what, Verdict.NOTE, "not installed", advice)
            else:
                yield Check(what, Verdict.WRONG, "not installed", f"pip install {name}")


def check_java() -> Check:
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    advice = f"only needed for Spark: install Java {JAVA_MIN} or newer"
    if program is None:
        return Check("Java", Verdict.NOTE, "not found", advice)
    try:
        done = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=JAVA_SECONDS_MAX, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check("Java", Verdict.NOTE, f"{program} does not run: {error}", advice)
    told = (done.stderr or done.stdout).partition("\n")[0]
    version = re.search(r'"(?:1\.)?(\d+)', told)
    if version is None or int(version[1]) < JAVA_MIN:
        return Check("Java", Verdict.NOTE, f"{told} ({program})", advice)
    return Check("Java", Verdict.OK, f"{told} ({program})")


def check_etcd() -> Check:
    program = find_etcd()
    if program is None:
        advice = f"only needed for several metadata nodes: {SERVER_ADVICE}"
        return Check("etcd", Verdict.NOTE, "not found", advice)
    return Check("etcd", Verdict.OK, str(program))


def check_ports() -> Iterator[Check]:
    """Check the ports on which servers listen by default."""
    for port, command in PORTS.items():
        with socket.socket() as probe:
            # The same option as servers set: a port whose last connection ended a moment ago is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                advice = f"`cutwater {command}` listens there unless --listen says otherwise"
                yield Check(f"port {port}", Verdict.NOTE, f"not free: {error.strerror}", advice)
            else:
                yield Check(f"port {port}", Verdict.OK, "free")


def check_files() -> Check:
    """Check the limit of open files: each log stream of a storage node has a few files open, each client a
    connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)}, can be raised to {_limit(hard)}"
    if soft != resource.RLIM_INFINITY and soft < FILES_WISHED:
        verdict = Verdict.WRONG if soft < FILES_MIN else Verdict.WARNING
        return Check("open files", verdict, found, f"ulimit -n {FILES_WISHED}, or LimitNOFILE= in the service's unit")
    return Check("open files", Verdict.OK, found)


def _limit(value: int) -> str:
    return "without limit" if value == resource.RLIM_INFINITY else str(value)


def check_clock() -> Check:
    """Check the clock. Safety does not depend on it, but people look for records by time."""
    wall, monotonic = time.time(), time.monotonic()
    time.sleep(CLOCK_SECONDS)
    off = abs((time.time() - wall) - (time.monotonic() - monotonic))
    found = f"wall and monotonic clock differ by {off * 1_000:.3f} ms over {CLOCK_SECONDS * 1_000:.0f} ms"
    if wall < YEAR_2024:
        return Check("clock", Verdict.WARNING, time.strftime("%Y-%m-%d", time.gmtime(wall)), "set the clock")
    if off > CLOCK_SECONDS_OFF_MAX:
        return Check("clock", Verdict.WARNING, found, "something sets the clock by jumps: let it be slewed")
    return Check("clock", Verdict.OK, found)


def check_time_sync() -> Check:
    """Ask the kernel whether its clock is synchronized."""
    name = "time synchronization"
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return Check(name, Verdict.NOTE, "this system does not tell")
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    if adjtimex(timex) < 0:
        return Check(name, Verdict.NOTE, f"the kernel does not tell: {os.strerror(ctypes.get_errno())}")
    # ``modes`` is an int, then come ``offset``, ``freq``, ``maxerror`` and ``esterror`` as longs, then ``status``.
    longs = ctypes.sizeof(ctypes.c_long)
    status = ctypes.c_int.from_buffer(timex, 5 * longs).value
    if status & _UNSYNCHRONIZED:
        return Check(name, Verdict.NOTE, "the kernel's clock is not synchronized", "run chrony or systemd-timesyncd")
    error_us = ctypes.c_long.from_buffer(timex, 3 * longs).value
    return Check(name, Verdict.OK, f"synchronized, off by at most {error_us / 1_000:.0f} ms")


def check_disk(directory: Path) -> Iterator[Check]:
    name = f"disk of {directory}"
    try:
        usage = shutil.disk_usage(directory)
        taken_ms = sync_ms(directory)
    except OSError as error:
        advice = "name a directory that exists and may be written"
        yield Check(name, Verdict.WRONG, f"cannot be used: {error.strerror}", advice)
        return
    yield _room(name, usage.free, usage.total)
    found = f"median of {SYNCS} fdatasync of {SYNC_BYTES} bytes: {taken_ms:.3f} ms"
    kind = file_system(directory)
    if kind in _MEMORY_FILE_SYSTEMS:
        advice = "records are lost with the power: put data on a disk"
        yield Check("fsync", Verdict.WARNING, f"{found}, but it is {kind}, which is memory", advice)
    elif taken_ms > SYNC_MS_WISHED:
        yield Check("fsync", Verdict.WARNING, found, "every append waits for it: use a faster disk")
    else:
        yield Check("fsync", Verdict.OK, found + (f" on {kind}" if kind else ""))


def _room(name: str, free: int, total: int) -> Check:
    found = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"
    if free < ROOM_BYTES_WISHED:
        verdict = Verdict.WRONG if free < ROOM_BYTES_MIN else Verdict.WARNING
        return Check(name, verdict, found, "make room: below 64 MiB, storage nodes refuse appends")
    return Check(name, Verdict.OK, found)


def sync_ms(directory: Path) -> float:
    """Measure a sync as in a group commit: some bytes at the end of a file, and a sync."""
    data = b"\0" * SYNC_BYTES
    sync = getattr(os, "fdatasync", os.fsync)
    taken = []
    with tempfile.TemporaryFile(dir=directory, prefix="cutwater-doctor-", buffering=0) as file:
        for _ in range(SYNCS):
            file.write(data)
            begun = time.perf_counter()
            sync(file.fileno())
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken) * 1_000


def file_system(directory: Path) -> str | None:
    """Return the kind of file system; None if the system does not say."""
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    path = directory.resolve()
    best, kind = -1, None
    for line in mounts:
        _, point, found, *_ = line.split(" ")
        if path.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), found
    return kind
