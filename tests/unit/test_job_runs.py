"""One attempt at an agent, before it has a process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cutwater.agent import agent_events as e
from cutwater.agent import job_runs
from cutwater.agent.job_runs import NOT_STARTED, JobRun
from cutwater.core.jobs.job_records import JobVersion, StartPoint
from cutwater.core.jobs.job_requests import AssignedJob
from cutwater.types import JobEpoch
from tests.unit.job_kit import CHECKPOINT, J1, SPEC

WANTED = e.StartJob(
    (J1, JobEpoch(1)), AssignedJob(J1, "fraud", "", JobEpoch(1), JobVersion(1, SPEC), StartPoint()), 1, CHECKPOINT
)


class PreparedRun(JobRun):
    """Its place is ready."""

    async def _attempt(self) -> e.JobGone:
        place: Any = SimpleNamespace(place=None, python="", key="1-1-1")
        return await self._supervised(place, None)  # type: ignore[arg-type]


def test_no_process_begins_when_the_job_is_killed_just_before(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []

    class Process:
        def __init__(self, *_: object) -> None:
            pass

        async def start(self, *command: object) -> None:
            started.append(command)
            raise AssertionError

    monkeypatch.setattr(job_runs, "JobProcess", Process)
    gone: list[e.AgentEvent] = []

    async def killed() -> None:
        async def answered() -> None:
            # The lease ends while the watchdog is waited for.
            run.kill()

        log = SimpleNamespace(write=lambda data: None, end=lambda: None)
        services: Any = SimpleNamespace(
            agent="a",
            mark_of=str,
            logs=SimpleNamespace(log_of=lambda *_: log),
            watchdog=SimpleNamespace(answered=answered),
            workshop=SimpleNamespace(options=SimpleNamespace(job_process="job"), environment_of=lambda place: {}),
        )
        run = PreparedRun(services, WANTED, 1, gone.append)
        await run.task

    asyncio.run(killed())
    assert (gone, started) == ([e.JobGone(WANTED.key, NOT_STARTED)], [])
