"""In the place of an agent: runs a watchdog and a job with processes of several kinds, until it is killed.

``python watched_agent.py LEASE_MS RENEWALS`` prints a line of JSON with its processes, and renews so often.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys

from cutwater.agent.processes.watchdog import VARIABLE, now_ms
from cutwater.agent.processes.watchdog_link import WatchdogLink

START_MS = 60_000
"""How long the processes of the job may take to start."""
JOB = """
import os, subprocess, sys, time
plain = subprocess.Popen(["sleep", "1000"])
session = subprocess.Popen(["sleep", "1000"], start_new_session=True)
# Without the mark, in another session, and a child of nobody any more.
script = "import subprocess as s; print(s.Popen(['sleep', '1000'], stdout=s.DEVNULL, start_new_session=True).pid)"
marked = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
hidden = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
print(os.getpid(), plain.pid, session.pid, marked.stdout.strip(), hidden.pid, flush=True)
time.sleep(1000)
"""


async def main(lease_ms: int, renewals: int) -> None:
    mark = secrets.token_hex(16)
    lost = asyncio.Event()
    link = WatchdogLink(mark, lost.set)
    await link.start()
    link.set_deadline(now_ms() + START_MS)
    # Until the watchdog has heard of it, it kills what is started.
    await link.answered()
    job = subprocess.Popen(
        [sys.executable, "-c", JOB],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, VARIABLE: f"{mark}:7:1;"},
    )
    link.add(job.pid)
    assert job.stdout is not None
    pids = [int(pid) for pid in job.stdout.readline().split()]
    deadline = now_ms() + lease_ms
    link.set_deadline(deadline)
    await link.answered()
    print(json.dumps({"watchdog": link.pid, "job": pids, "deadline_ms": deadline}), flush=True)
    for _ in range(renewals):
        await asyncio.sleep(lease_ms / 3_000)
        link.set_deadline(now_ms() + lease_ms)
    await lost.wait()
    print("lost", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
