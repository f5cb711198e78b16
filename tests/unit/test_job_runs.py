"""One attempt at an agent: before it has a process, and what it prints at its end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cutwater.agent import agent_events as e
from cutwater.agent import job_runs
from cutwater.agent.job.job_messages import JobEnds
from cutwater.agent.job_runs import NOT_STARTED, JobRun
from cutwater.core.jobs.job_records import JobVersion, RunEnd, StartPoint
from cutwater.core.jobs.job_requests import AssignedJob
from cutwater.jobs.messages import Told
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


class EndingRun(JobRun):
    """Its process says how the program ended, and exits."""

    said: JobEnds | None = None
    reason = "ended with exit code 0"

    async def _attempt(self) -> e.JobGone:
        if self.said is not None:
            self._line(msgspec.json.encode(self.said))
            assert self._lingering is not None
            self._lingering.cancel()
        return e.JobGone(self.wanted.key, self.reason)


@pytest.mark.parametrize(
    ("said", "reason", "told"),
    [
        (JobEnds(RunEnd.FAILED, Told("pipeline_failed", "boom")), "ended with exit code 0", "failed: pipeline_failed"),
        (JobEnds(RunEnd.FINISHED), "ended with exit code 0", "finished"),
        (JobEnds(RunEnd.FINISHED), "was killed (SIGKILL)", "finished; its process was killed (SIGKILL)"),
        (None, "ended with exit code 0", "ended with exit code 0"),
    ],
)
def test_the_log_of_an_attempt_ends_with_what_its_program_said(said: JobEnds | None, reason: str, told: str) -> None:
    printed = bytearray()
    gone: list[e.AgentEvent] = []

    async def ended() -> None:
        log = SimpleNamespace(write=printed.extend, end=lambda: None)
        services: Any = SimpleNamespace(agent="a", logs=SimpleNamespace(log_of=lambda *_: log))
        run = EndingRun(services, WANTED, 1, gone.append)
        run.said, run.reason = said, reason
        await run.task

    asyncio.run(ended())
    assert printed.decode() == f"[agent a] attempt 1 of epoch 1: {told}\n"
    assert gone[-1] == e.JobGone(WANTED.key, reason)
