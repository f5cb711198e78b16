"""Finds loopback addresses for servers that will be started on this machine.

A port that is free now may be taken before its server listens. So ports come from below the range that the system uses
for outgoing connections, and each port that is handed out is noted for some minutes: two clusters that start at the
same time, or one that starts while another one restarts a server, get different ports.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import tempfile
import time
from pathlib import Path

from cutwater.errors import Unavailable

PORT_MIN = 10_000
FIRST_EPHEMERAL_PORT = 32_768
"""Linux's default; other systems begin higher."""
PROBES_MAX = 100
NOTED_SECONDS = 600.0


def free_addresses(count: int) -> list[str]:
    """Return distinct loopback addresses on which no process listens."""
    first_ephemeral = _first_ephemeral_port()
    with contextlib.ExitStack() as probes:
        return [_probe(probes, first_ephemeral) for _ in range(count)]


def _probe(probes: contextlib.ExitStack, first_ephemeral: int) -> str:
    """Return a free address, which stays taken until the stack closes."""
    for _ in range(PROBES_MAX):
        port = random.SystemRandom().randrange(PORT_MIN, first_ephemeral)
        probe = probes.enter_context(contextlib.closing(socket.socket()))
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if _note(port):
                return f"127.0.0.1:{port}"
    raise Unavailable(f"of {PROBES_MAX} ports between {PORT_MIN} and {first_ephemeral}, none is free on 127.0.0.1")


def notes() -> Path:
    """Return the directory with an empty file for each port that was handed out to this user."""
    return Path(tempfile.gettempdir(), f"cutwater-ports-{os.getuid()}")


def _note(port: int) -> bool:
    """Return whether the port was not handed out lately, and note it. If it cannot be noted, any free port is
    accepted."""
    note = notes() / str(port)
    try:
        note.parent.mkdir(mode=0o700, exist_ok=True)
        os.close(os.open(note, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
    except FileExistsError:
        with contextlib.suppress(OSError):
            if time.time() - note.stat().st_mtime < NOTED_SECONDS:
                return False
            os.utime(note)
    except OSError:
        return True
    return True


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return FIRST_EPHEMERAL_PORT
    # Some systems use nearly all ports; then there is no useful range below.
    return first if first > 2 * PORT_MIN else FIRST_EPHEMERAL_PORT
