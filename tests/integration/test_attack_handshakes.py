"""An attack on real servers: hundreds of connections that never finish their handshake, plain and with TLS. Meanwhile
new clients connect and append, and a storage node that lost its connections joins again, in bounded time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import trustme

import cutwater
from tests.integration.sn_process import NodeProcess, run
from tests.integration.test_tls import Pki, server, signed

pytestmark = pytest.mark.timeout(180)

ATTACK = Path(__file__).with_name("attack_connections.py")
CONNECTIONS = 450
CONNECT_AND_APPEND_SECONDS = 10.0
"""Without the attack it takes about 50 ms; the machine of a test may be busy."""
REJOIN_SECONDS = 20.0


@contextmanager
def attacked(address: str, mode: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(ATTACK), address, str(CONNECTIONS), mode]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def connect(address: str, files: Pki | None) -> cutwater.Client:
    tls = None if files is None else cutwater.tls_context(files.ca, certificate=files.certificate, key=files.key)
    return cutwater.connect(f"cutwater://{address}", tls=tls, timeout=30)


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_silent_connections_keep_nobody_out(tmp_path: Path, is_tls: bool) -> None:
    files = signed(tmp_path, trustme.CA(), "all", "127.0.0.1") if is_tls else None
    flags = files.flags if files is not None else []
    volume = tmp_path / "volume"
    volume.mkdir()
    where = ["--cluster-id", "1", "--id", "1", "--store", f"sqlite:{tmp_path / 'metadata.sqlite'}"]
    with ExitStack() as stack:
        metadata = stack.enter_context(server("mr", "start", *where, "--listen", "127.0.0.1:0", *flags))
        node = stack.enter_context(NodeProcess(1, [volume], metadata, tmp_path / "node.log", *flags))
        told = run("sn", "add", node.serving["address"], "--servers", f"cutwater://{metadata}", *flags)
        assert told.returncode == 0, told.stderr
        with connect(metadata, files) as log:
            log.create_topic("orders", replication=1)
            log.append("orders", b"before")
        for address in (metadata, node.serving["address"]):
            stack.enter_context(attacked(address, "mixed"))
        # Servers hold no more than they may, however many connections are up.
        assert descriptors(node.pid) < CONNECTIONS
        for number in range(3):
            started = time.monotonic()
            with connect(metadata, files) as log:
                log.append("orders", b"during %d" % number)
            assert time.monotonic() - started < CONNECT_AND_APPEND_SECONDS
        # The node loses its connections, and makes new ones under attack.
        node.kill()
        node.start()
        started = time.monotonic()
        with connect(metadata, files) as log:
            log.append("orders", b"after")
            assert time.monotonic() - started < REJOIN_SECONDS
            values = [record.value for record in log.subscribe("orders", follow=False)]
        assert values == [b"before", b"during 0", b"during 1", b"during 2", b"after"]


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
