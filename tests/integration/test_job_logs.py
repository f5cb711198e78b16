"""Logs of jobs: appended without waiting, over absences of the log, and read by those who may describe the job."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from cutwater.client.async_client import AsyncClient
from cutwater.core.internal_topics import JOB_LOGS
from cutwater.core.jobs import job_decisions as j
from cutwater.core.jobs.agents import AgentDescription, AgentRoot
from cutwater.core.jobs.job_records import CheckpointPointer, RunEnd
from cutwater.core.jobs.job_registry import JobRegistry
from cutwater.core.jobs.job_spec import JobSpec
from cutwater.core.jobs.log_records import HEAD_BYTES, TAIL_BYTES
from cutwater.core.jobs.operations import Operation, OperationKind, steps_of
from cutwater.errors import InvalidArgument, NotFound, PermissionDenied
from cutwater.programs import job_logs
from cutwater.programs.job_logs import JobLogAppender, read_job_log
from cutwater.protocol.metadata_api import JOB_LOG, JobLogArguments
from cutwater.types import CutTime, JobEpoch, JobNumber
from tests.integration.access_cluster import access_cluster
from tests.integration.log_cluster import LogCluster, log_cluster

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

JOB, EPOCH = JobNumber(1), JobEpoch(1)


def begin_job(jobs: JobRegistry, now: CutTime, attempts: int = 1) -> None:
    """A job with attempts, as if it had been submitted and assigned."""
    operation = Operation(
        "0" * 32, OperationKind.SUBMIT, JOB, "fraud", steps_of(OperationKind.SUBMIT), begun=now, version=1
    )
    agent = AgentDescription("a", 4, checkpoint_roots=(AgentRoot("default"),))
    for decision in (
        j.RegisterAgent(agent, 7),
        j.BeginOperation(operation, JobSpec("0" * 64, "fraud.py:p")),
        j.AssignJob(JOB, "a", 7, EPOCH),
    ):
        jobs.apply(decision, now)
    for number in range(1, attempts + 1):
        if number > 1:
            jobs.apply(j.EndAttempt(JOB, EPOCH, number - 1, RunEnd.FAILED), now)
        jobs.apply(j.BeginAttempt(JOB, EPOCH, number, CheckpointPointer("default", "fraud")), now)


def begin(cluster: LogCluster, attempts: int = 1) -> None:
    assert cluster.metadata is not None
    assert cluster.metadata.term is not None
    state = cluster.metadata.term.layer.state
    begin_job(state.jobs, state.cut_time, attempts)


class Appending:
    """An appender with its task."""

    def __init__(self, log: AsyncClient) -> None:
        self.appender = JobLogAppender(log, seconds=0.02)
        self._task = asyncio.create_task(self.appender.append_for_ever())

    async def end(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self.appender.close(20.0)


async def test_what_attempts_print_is_read(tmp_path: Path) -> None:
    async with log_cluster(tmp_path) as cluster, cluster.client() as log:
        with pytest.raises(NotFound):
            await read_job_log(log, "fraud")
        begin(cluster, attempts=2)
        nothing = await read_job_log(log, "fraud")
        assert (nothing.text, nothing.attempt, nothing.is_running) == (b"", 2, True)
        appending = Appending(log)
        first, second = (appending.appender.log_of(JOB, EPOCH, number) for number in (1, 2))
        for number in range(50):
            first.write(b"first %d\n" % number)
            second.write(b"second %d\n" % number)
            await asyncio.sleep(0.002)
        first.end()
        other = appending.appender.log_of(JobNumber(2), EPOCH, 2)
        other.write(b"not of this job")
        while not (found := await read_job_log(log, "fraud")).text.endswith(b"second 49\n"):
            await asyncio.sleep(0.02)
        assert found.text == b"".join(b"second %d\n" % number for number in range(50))
        assert (found.attempt, found.is_running, found.end) == (2, True, len(found.text))
        second.write(b"more\n")
        await appending.end()
        more = await read_job_log(log, "fraud", offset=found.end, after=found.after)
        assert more.text == b"more\n"
        before = await read_job_log(log, "fraud", 1)
        assert before.text == b"".join(b"first %d\n" % number for number in range(50))
        assert not before.is_running
        assert (await read_job_log(log, "fraud", 9, epoch=1)).text == b""
        with pytest.raises(NotFound, match="no such attempt; the last ones are: 1 of epoch 1, 2 of epoch 1"):
            await read_job_log(log, "fraud", 9)
        with pytest.raises(InvalidArgument, match="1 to 1048576 bytes"):
            await log.repository.call(JOB_LOG, JobLogArguments("fraud", bytes_max=0), timeout_ms=5_000)
        (topic,) = [topic for topic in await log.topics(internal=True) if topic.name == JOB_LOGS.name]
        assert topic.retention.bytes == 1024**3


async def test_of_a_long_log_the_beginning_and_the_end_are_kept(tmp_path: Path) -> None:
    async with log_cluster(tmp_path) as cluster, cluster.client() as log:
        begin(cluster)
        appending = Appending(log)
        printed = b"".join(b"%07d\n" % number for number in range(600_000))
        writing = appending.appender.log_of(JOB, EPOCH, 1)
        for at in range(0, len(printed), 100_000):
            writing.write(printed[at : at + 100_000])
            await asyncio.sleep(0)
        await appending.end()
        found = await read_job_log(log, "fraud")
        assert found.end == len(printed)
        assert found.text.startswith(printed[:HEAD_BYTES])
        assert found.text.endswith(printed[-TAIL_BYTES // 2 :])
        assert b" bytes are left out]\n" in found.text
        assert len(found.text) <= HEAD_BYTES + TAIL_BYTES + 1_000
        stored = [len(record.value) async for record in log.subscribe(JOB_LOGS.name, follow=False)]
        assert sum(stored) <= HEAD_BYTES + 2 * TAIL_BYTES + 8 * len(stored)


async def test_an_agent_never_waits_and_nothing_is_lost_while_the_log_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_logs, "ASK_SECONDS", 1.0)
    async with log_cluster(tmp_path) as cluster, cluster.client(timeout=2.0) as log:
        begin(cluster)
        appending = Appending(log)
        writing = appending.appender.log_of(JOB, EPOCH, 1)
        writing.write(b"before\n")
        while not (await read_job_log(log, "fraud")).text:
            await asyncio.sleep(0.02)
        await cluster.stop_node(1)
        loop = asyncio.get_running_loop()
        for number in range(20):
            begun = loop.time()
            writing.write(b"while %d\n" % number)
            assert loop.time() - begun < 0.1
            await asyncio.sleep(0.02)
        await cluster.until(lambda: bool(appending.appender.trouble), "the log is missed")
        await cluster.start_node(1)
        writing.write(b"after\n")
        expected = b"before\n" + b"".join(b"while %d\n" % number for number in range(20)) + b"after\n"

        async def is_there() -> bool:
            return (await read_job_log(log, "fraud")).text == expected

        await cluster.until(is_there, "all of it is there, once")
        await appending.end()


async def test_logs_are_for_those_who_may_describe_the_job(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, metadata=2, nodes=1) as cluster:
        await cluster.secure()
        term = cluster.leader.term
        assert term is not None
        begin_job(term.layer.state.jobs, term.layer.state.cut_time)
        agent = await cluster.principal("agent", ("append,describe", "topic:_job_logs"))
        user = await cluster.principal("user", ("describe", "job:fraud"), ("read", "topic:*"))
        nobody = await cluster.principal("nobody", ("describe", "job:other"))
        async with cluster.client(agent) as log:
            appending = Appending(log)
            appending.appender.log_of(JOB, EPOCH, 1).write(b"printed")
            await appending.end()
            assert not appending.appender.trouble
            with pytest.raises(PermissionDenied):
                await read_job_log(log, "fraud")
        for address in cluster.addresses:
            # Also the one that does not lead.
            async with await AsyncClient.connect(f"cutwater://{address}", token=user) as log:
                assert (await read_job_log(log, "fraud")).text == b"printed"
                with pytest.raises((PermissionDenied, NotFound)):
                    await log.table(JOB_LOGS.name, timeout=5)
        async with cluster.client(nobody) as log:
            with pytest.raises(PermissionDenied):
                await read_job_log(log, "fraud")
