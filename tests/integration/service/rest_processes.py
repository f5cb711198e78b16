"""A cluster and a service as processes, started by their commands, and an agent that runs no programs."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from cutwater.admin import local_cluster
from cutwater.admin.cluster_certificates import authority_file
from cutwater.cli.main import app
from cutwater.client.cluster.credentials import ANYONE, Access
from cutwater.runtime import processes
from cutwater.wire.identity.tls import client_tls
from tests.integration.agent_double import AgentDouble

ZIP = {"Content-Type": "application/zip"}


def zipped(**files: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(f"{name}.py"), text)
    return out.getvalue()


PROGRAM = zipped(fraud='raise SystemExit("nobody imports this here")')
SHA256 = hashlib.sha256(PROGRAM).hexdigest()


class RestProcesses:
    """``url`` is where the service listens. ``token`` is that of the administrator; empty without access control."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.url, self.token = directory, "", ""
        self.metrics: str | None = None
        self.service_pid = 0

    def cutwater(self, *words: object) -> str:
        result = CliRunner().invoke(app, [*map(str, words), "--dir", str(self.directory)], catch_exceptions=False)
        assert result.exit_code == 0, (words, result.output)
        return result.output

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=30, **options)


@contextmanager
def rest_processes(
    directory: Path, *, is_secure: bool = False, has_real_agent: bool = False, flags: tuple[str, ...] = ()
) -> Iterator[RestProcesses]:
    """Yield a service that may change things, over a cluster with one storage node and the agent ``a1``. With
    ``has_real_agent``, the agent is ``agent-1``, which runs programs."""
    found = RestProcesses(directory / "cluster")
    with ExitStack() as stack:
        stack.callback(_stop, found)
        agents = ["--agents", 1] if has_real_agent else []
        found.cutwater("cluster", "start", "--storage-nodes", 1, *agents, *(["--secure"] if is_secure else []))
        own: list[str] = []
        access = ANYONE
        if is_secure:
            found.token = (found.directory / "admin.token").read_text().strip()
            for name in ("rest-service", "agent-a1"):
                found.cutwater("token", "create", name, "--save", directory / f"{name}.token")
            found.cutwater("acl", "allow", "agent-a1", "run-jobs", "cluster")
            own = ["--own-token-file", str(directory / "rest-service.token")]
            agent_token = (directory / "agent-a1.token").read_text().strip()
            access = Access(client_tls(authority_file(found.directory)), agent_token)
        told, found.service_pid = stack.enter_context(_service(found.directory, [*own, *flags]))
        found.url, found.metrics = told["url"], told["metrics"]
        if not has_real_agent:
            stack.enter_context(AgentDouble(local_cluster.load(found.directory).servers, access=access))
        yield found


@contextmanager
def _service(directory: Path, flags: list[str]) -> Iterator[tuple[Any, int]]:
    words = ["service", "start", "--dir", str(directory), "--listen", "127.0.0.1:0", "--allow-submit", "-o", "json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTWATER_TOKEN")}
    with open(directory.parent / "service.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cutwater.cli", *words, *flags], stdout=subprocess.PIPE, stderr=log, env=environment
        )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline()), process.pid
    finally:
        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout is not None
        process.stdout.close()


def _stop(found: RestProcesses) -> None:
    if (found.directory / "cluster.json").exists():
        members = local_cluster.load(found.directory).processes()
        processes.stop([member.pid for member in members if member.pid], 10.0)
