"""How long the REST service takes to list many jobs.

A metadata node, a storage node and the service are processes; the jobs wait, since there is no agent. The
lists with access control are those of an administrator and of a principal that may see every second job.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cutwater.admin import local_cluster
from cutwater.admin.cluster_certificates import owner_access
from cutwater.admin.cluster_security import save_token, secure_local
from cutwater.admin.operations import Admin
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.runtime import processes
from cutwater.runtime.event_loop import run

JOBS = 1_000
CALLS = 40
AT_ONCE = 16
GOAL_MS = 300
SPEC = JobSpec("0" * 64, "fraud.py:p", {"region": "eu"}, parallelism=4)
OWN, READER = "rest-service", "reader"


def lines() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as directory:
        found = measured(Path(directory))
    yield "## REST service"
    yield ""
    yield f"`GET /v1/jobs?limit={JOBS}` over HTTP on loopback, with {JOBS} jobs; {CALLS} calls one after the other."
    yield f"Goal: under {GOAL_MS} ms."
    yield ""
    yield "| access control, caller | jobs in the answer | KiB | median | slowest |"
    yield "| --- | --- | --- | --- | --- |"
    for what, (count, size, took) in found.items():
        yield (
            f"| {what} | {count} | {size / 1024:.0f} | {took[len(took) // 2] * 1e3:.0f} ms | {took[-1] * 1e3:.0f} ms |"
        )


def measured(directory: Path) -> dict[str, tuple[int, int, list[float]]]:
    """Return by caller how many jobs it was told, in how many bytes, and the times, the shortest first."""
    found = {}
    with ExitStack() as stack:
        cluster = local_cluster.start(directory, storage_nodes=1)
        stack.callback(_stop, directory)
        run(_submit(Admin(cluster.addresses)))
        with _service(directory) as port:
            found["off"] = _listed(port, "")
        secured = secure_local(directory, mode=AccessMode.ENFORCED)
        run(_let_see(directory, Admin(cluster.addresses, access=owner_access(directory))))
        with _service(directory, "--own-token-file", str(directory / OWN)) as port:
            found["enforced, administrator"] = _listed(port, Path(secured.token_file).read_text().strip())
            found["enforced, may see half of them"] = _listed(port, (directory / READER).read_text().strip())
    return found


def _stop(directory: Path) -> None:
    processes.stop([member.pid for member in local_cluster.load(directory).processes() if member.pid], 10.0)


async def _submit(admin: Admin) -> None:
    async with admin:
        names = [f"{'seen' if number % 2 else 'hidden'}-{number:04}" for number in range(JOBS)]
        for at in range(0, JOBS, AT_ONCE):
            await asyncio.gather(*(admin.jobs.submit(name, SPEC) for name in names[at : at + AT_ONCE]))


async def _let_see(directory: Path, admin: Admin) -> None:
    async with admin:
        for name in (OWN, READER):
            save_token(directory / name, (await admin.control.create_token(name)).token)
        await admin.control.allow(READER, ("describe",), "job:seen-*")


@contextmanager
def _service(directory: Path, *flags: str) -> Iterator[int]:
    command = ["service", "start", "--dir", str(directory), "--listen", "127.0.0.1:0", "-o", "json", *flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "cutwater.cli", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        yield int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def _listed(port: int, token: str) -> tuple[int, int, list[float]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    took, body = [], b""
    for _ in range(CALLS):
        begun = time.perf_counter()
        connection.request("GET", f"/v1/jobs?limit={JOBS}", headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        took.append(time.perf_counter() - begun)
        assert answer.status == 200, body
    connection.close()
    return len(json.loads(body)["items"]), len(body), sorted(took)
