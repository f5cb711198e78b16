"""The examples of docs/rest.md are run, with curl, against a service over a cluster."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.integration.service.rest_kit import served
from tests.integration.service.test_rest_jobs import jobs_over_http

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "rest.md").read_text(encoding="utf-8")
EXAMPLES = [
    line
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in re.sub(r"\\\n\s*", " ", block).splitlines()
    if line.startswith("curl ")
]


@pytest.mark.timeout(60)
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")
def test_the_examples_do_what_they_say(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as found:
            async with found.cluster.client("") as log:
                await log.create_topic("orders")
                await log.append("orders", [b"coffee", b"tea"])
                await log.create_topic("payments", schema="user string, amount bigint, at timestamp", event_time="at")
                at = datetime(2026, 1, 1, tzinfo=UTC)
                await log.append("payments", [{"user": "ann", "amount": number, "at": at} for number in range(9)])
            for example in EXAMPLES:
                command = shlex.split(example.replace("http://127.0.0.1:8300", found.serving.url))
                told = await asyncio.to_thread(
                    subprocess.run,
                    [*command, "--fail-with-body", "--max-time", "20"],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                assert told.returncode == 0, (example, told.stdout, told.stderr)
                assert told.stdout, example

    assert len(EXAMPLES) >= 5
    asyncio.run(run())


@pytest.mark.timeout(90)
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on this machine")
def test_a_job_is_submitted_upgraded_and_rolled_back_as_the_page_says(tmp_path: Path) -> None:
    (script,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "clicks.py").write_text("p = None\n")

    async def run() -> None:
        async with jobs_over_http(tmp_path) as jobs:
            told = await asyncio.to_thread(
                subprocess.run,
                ["bash", "-e", "-c", script.replace("http://127.0.0.1:8300", jobs.found.serving.url)],
                cwd=tmp_path,
                env={**os.environ, "EDITOR": "sed -i s/None/0/"},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert told.returncode == 0, (told.stdout, told.stderr)
            found = await jobs("GET", "/v1/jobs/clicks")
            assert (found["phase"], found["version"], found["versions"]) == ("stopped", 1, [1, 2])
            events = [json.loads(line[6:]) for line in told.stdout.splitlines() if line.startswith("data: ")]
            done = [event["kind"] for event in events if event["state"] == "done"]
            assert done == ["submit", "upgrade", "rollback", "stop"]

    asyncio.run(run())


def test_every_address_is_on_the_page() -> None:
    from cutwater.service.table import ROUTES

    assert [route.path for route in ROUTES if f"`{route.path}" not in PAGE and route.path not in PAGE] == []
