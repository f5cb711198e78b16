"""Programs in the log: stored once, found by their hash, and kept over trims, whoever dies between two steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cutwater.client.async_client import AsyncClient
from cutwater.core.internal_topics import PROGRAMS
from cutwater.core.jobs.job_requests import FetchProgramPlaceRequest, ProgramPlaces
from cutwater.core.order import program_trims
from cutwater.core.requests import InternalTopics, MakeJobTopicRequest, TrimRequest
from cutwater.errors import CutwaterError, Damaged, InvalidArgument, NotFound, PermissionDenied, Refused
from cutwater.programs.packing import sha256_of
from cutwater.programs.program_store import RECORD_BYTES, fetch_program, run_name, store_program
from cutwater.protocol.metadata_api import CHECK_PROGRAM, CheckProgram
from cutwater.storage.replica.segment_log import SegmentOptions
from cutwater.types import GLSN
from tests import soak
from tests.integration.access_cluster import access_cluster
from tests.integration.log_cluster import LogCluster, log_cluster, seeded, with_log
from tests.integration.real_cluster import kill, restart, running_cluster

pytestmark = pytest.mark.timeout(300)


def some_bytes(rng: random.Random, size: int) -> bytes:
    return rng.randbytes(size)


async def places(log: AsyncClient, sha256: str) -> tuple[Any, ...]:
    answer = await log.repository.ask(FetchProgramPlaceRequest(sha256), ProgramPlaces, timeout_ms=10_000)
    return answer.places


async def publish(log: AsyncClient, name: str, records: list[bytes]) -> None:
    await log.repository.ask(MakeJobTopicRequest(PROGRAMS.name), InternalTopics, timeout_ms=10_000)
    run = await log.open_run(name, f"{name}:{random.SystemRandom().randrange(10**12)}", once=True)
    await log.publish(run, 0, [await log.stage(run, 0, PROGRAMS.name, records)])


async def is_intact(log: AsyncClient, sha256: str) -> bool:
    return (await log.repository.call(CHECK_PROGRAM, CheckProgram(sha256), timeout_ms=10_000)).is_intact


def test_a_program_is_stored_once_and_found_by_its_hash(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        rng = seeded()
        data = some_bytes(rng, 3 * RECORD_BYTES + 17)
        sha256 = await store_program(log, data)
        assert sha256 == sha256_of(data)
        (place,) = await places(log, sha256)
        assert place.rows == 4
        await log.append(PROGRAMS.name, b"something else")
        assert await store_program(log, data) == sha256
        assert await places(log, sha256) == (place,), "it was not stored again"
        assert await fetch_program(log, sha256) == data
        small = await store_program(log, b"x")
        assert await fetch_program(log, small) == b"x"
        assert [topic.name for topic in await log.topics()] == []
        records = [
            len(record.value) async for record in log.subscribe(PROGRAMS.name, start=place.glsn, stop=place.glsn + 4)
        ]
        assert records == [RECORD_BYTES] * 3 + [17]
        for wrong in (b"", bytes(64 * 1024 * 1024 + 1)):
            with pytest.raises(InvalidArgument):
                await store_program(log, wrong)
        with pytest.raises(NotFound, match="is not stored"):
            await fetch_program(log, "0" * 64)
        with pytest.raises(InvalidArgument, match="no internal topic of jobs"):
            await log.repository.ask(MakeJobTopicRequest("_audit"), InternalTopics, timeout_ms=10_000)

    with_log(tmp_path, test)


def test_two_that_store_the_same_program_both_succeed(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        data = some_bytes(seeded(), 2 * RECORD_BYTES)
        async with cluster.client() as other:
            found = await asyncio.gather(*(store_program(one, data) for one in (log, other, log, other)))
        assert set(found) == {sha256_of(data)}
        assert await fetch_program(log, found[0]) == data

    with_log(tmp_path, test)


def test_other_bytes_under_the_name_of_a_program_are_never_taken_for_it(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        data = some_bytes(seeded(), RECORD_BYTES + 1)
        sha256 = sha256_of(data)
        await publish(log, run_name(sha256), [b"another", b"program"])
        assert len(await places(log, sha256)) == 1
        assert not await is_intact(log, sha256)
        with pytest.raises(Damaged, match="no copy of it has this hash"):
            await fetch_program(log, sha256)
        await store_program(log, data)
        assert await is_intact(log, sha256)
        for _ in range(2):
            await publish(log, run_name(sha256), [b"again"])
        assert await fetch_program(log, sha256) == data
        await store_program(log, data)
        assert len(await places(log, sha256)) == 4, "it was not stored again"
        await publish(log, "program:nothing", [b"x"])
        many = sha256_of(b"x" * 2_000)
        await publish(log, run_name(many), [b"x"] * 2_000)
        assert not await is_intact(log, many), "no program has so many records"
        with pytest.raises(Damaged):
            await fetch_program(log, many)

    with_log(tmp_path, test)


# Trims.


@pytest.mark.asyncio
async def test_live_programs_are_copied_before_a_trim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = seeded()
    async with log_cluster(tmp_path, nodes=3) as cluster, cluster.client() as log:
        named, dead, new = [await store_program(log, some_bytes(rng, RECORD_BYTES + i)) for i in range(3)]
        assert cluster.metadata is not None
        assert cluster.metadata.term is not None
        state = cluster.metadata.term.layer.state
        # As if the first two were stored two days ago, and a job named one of them.
        old_until = (await places(log, dead))[0].glsn
        monkeypatch.setattr(state.clock, "last_until", lambda time: old_until)
        monkeypatch.setattr(state.jobs, "programs", lambda: {named})
        assert set(program_trims.live_programs(state)) == {named, new}
        end = await log.tail() + 1
        with pytest.raises(Refused, match="would take 2 programs that versions of jobs name"):
            # Past the keeper, as a bug might.
            await cluster.metadata.term.decide(TrimRequest(PROGRAMS.name, GLSN(end)))
        await log.trim(PROGRAMS.name, before=end)
        for sha256 in (named, new):
            assert sha256_of(await fetch_program(log, sha256)) == sha256
            (place,) = await places(log, sha256)
            assert place.glsn >= end
        with pytest.raises(NotFound, match="is not stored"):
            await fetch_program(log, dead)
        assert not await places(log, dead)
        # Nothing is copied that is behind the position already.
        await log.trim(PROGRAMS.name, before=end + 1)
        assert len(await places(log, named)) == 1


@pytest.mark.asyncio
async def test_a_program_of_which_only_other_bytes_are_left_stops_a_trim(tmp_path: Path) -> None:
    async with log_cluster(tmp_path) as cluster, cluster.client() as log:
        await publish(log, run_name("0" * 64), [b"not it"])
        with pytest.raises(Refused, match="is live, and no copy of it has its hash"):
            await log.trim(PROGRAMS.name, before=await log.tail() + 1)
        # The same at the end only: the real one is copied behind it.
        data = b"real"
        sha256 = await store_program(log, data)
        await publish(log, run_name(sha256), [b"not it"])
        place = (await places(log, sha256))[1]
        with suppress(Refused):
            await log.trim(PROGRAMS.name, before=place.glsn)
        assert await fetch_program(log, sha256) == data


@pytest.mark.asyncio
async def test_a_topic_with_much_that_is_dead_is_trimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = seeded()
    segments = SegmentOptions(segment_bytes=512 * 1024)
    async with log_cluster(tmp_path, segments=segments) as cluster, cluster.client() as log:
        kept = await store_program(log, some_bytes(rng, 1_000))
        dead = [await store_program(log, some_bytes(rng, RECORD_BYTES)) for _ in range(3)]
        assert cluster.metadata is not None
        assert cluster.metadata.term is not None
        term = cluster.metadata.term
        keeper = term.programs
        await keeper.look()
        assert len(await places(log, dead[0])) == 1, "all of it is new"
        monkeypatch.setattr(term.layer.state.clock, "last_until", lambda time: GLSN(10**9))
        monkeypatch.setattr(term.layer.state.jobs, "programs", lambda: {kept})
        await keeper.look()
        assert len(await places(log, dead[0])) == 1, "it is not much"
        monkeypatch.setattr(keeper, "_dead_bytes_max", 1_000_000)
        await keeper.look()
        assert [await places(log, sha256) for sha256 in dead] == [(), (), ()]
        assert sha256_of(await fetch_program(log, kept)) == kept
        # What is left of segments does not lead to the next trim.
        trimmed = await places(log, kept)
        await keeper.look()
        assert await places(log, kept) == trimmed


class Killed(Exception):
    """The leader died here."""


@pytest.mark.asyncio
@pytest.mark.parametrize("step", range(8))
async def test_the_leader_dies_between_two_steps_of_a_trim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Whatever the last step was, the program is there, and the same trim goes on under the next leader."""
    async with log_cluster(tmp_path) as cluster, cluster.client() as log:
        data = b"a program" * 1_000
        sha256 = await store_program(log, data)
        end = await log.tail() + 1
        assert cluster.metadata is not None
        assert cluster.metadata.term is not None
        keeper, term = cluster.metadata.term.programs, cluster.metadata.term
        left = [step]

        async def counted(work: Callable[..., Any], *given: Any, **more: Any) -> Any:
            """Die before the next step, or after it."""
            for is_after in (False, True):
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                if not is_after:
                    result = await work(*given, **more)
            return result

        decide, publishes, reads = term.decide, keeper._stager._stage, keeper._read
        monkeypatch.setattr(keeper._stager, "_decide", lambda request: counted(decide, request))
        monkeypatch.setattr(keeper._stager, "_stage", lambda *given: counted(publishes, *given))
        monkeypatch.setattr(keeper, "_read", lambda *given, **more: counted(reads, *given, **more))
        with suppress(Killed):
            await keeper.decide(TrimRequest(PROGRAMS.name, GLSN(end)))
        await cluster.stop_metadata()
        await cluster.start_metadata()
        assert await fetch_program(log, sha256, timeout=20) == data
        await log.trim(PROGRAMS.name, before=end)
        assert await fetch_program(log, sha256) == data
        assert all(place.glsn >= end for place in await places(log, sha256))


@pytest.mark.asyncio
async def test_programs_outlive_kills_of_every_server_under_trims(tmp_path: Path) -> None:
    """Real processes: the leader and storage nodes die at random moments while programs are stored and trimmed."""
    rng = seeded()
    kills = soak.rounds(3, 40)
    async with running_cluster(tmp_path, storage_nodes=3) as cluster:
        stored: dict[str, bytes] = {}
        is_over = asyncio.Event()

        async def store() -> None:
            async with await AsyncClient.connect(cluster.servers) as log:
                while not is_over.is_set():
                    data = some_bytes(rng, rng.randrange(1, 3 * RECORD_BYTES))
                    with suppress(CutwaterError):
                        stored[await store_program(log, data, timeout=20)] = data
                    await asyncio.sleep(0.3)

        async def trim() -> None:
            async with await AsyncClient.connect(cluster.servers) as log:
                while not is_over.is_set():
                    with suppress(CutwaterError):
                        await log.trim(PROGRAMS.name, before=await log.tail() + 1, timeout=10)
                    await asyncio.sleep(0.1)

        works = [asyncio.create_task(store()), asyncio.create_task(trim())]
        for _ in range(kills):
            await asyncio.sleep(rng.uniform(0.2, 1.0))
            member = rng.choice([*cluster.metadata, *cluster.metadata, *cluster.storage_nodes])
            kill(member)
            await restart(tmp_path, cluster, member)
        await asyncio.sleep(1.0)
        is_over.set()
        await asyncio.gather(*works)
        assert stored
        async with await AsyncClient.connect(cluster.servers) as log:
            for sha256, data in stored.items():
                assert await fetch_program(log, sha256, timeout=60) == data


# Rights.


@pytest.mark.asyncio
async def test_submitters_store_programs_and_agents_read_them(tmp_path: Path) -> None:
    async with access_cluster(tmp_path, metadata=2, nodes=1) as cluster:
        await cluster.secure()
        submitter = await cluster.principal("submitter", ("job-submit", "job:fraud"))
        agent = await cluster.principal("agent", ("run-jobs", "cluster"))
        user = await cluster.principal("user", ("read,append", "topic:*"), ("publish", "run:orders*"))
        data = b"a program" * 1_000
        async with cluster.client(user) as log:
            with pytest.raises(PermissionDenied):
                await store_program(log, data)
            with pytest.raises(PermissionDenied):
                await is_intact(log, sha256_of(data))
        for address in cluster.addresses:
            # The second time, it is there: only a metadata node can know that it is intact.
            async with await AsyncClient.connect(f"cutwater://{address}", token=submitter) as log:
                sha256 = await store_program(log, data)
                assert len(await places(log, sha256)) == 1
                with pytest.raises(PermissionDenied):
                    await log.table(PROGRAMS.name, timeout=5)
                with pytest.raises(PermissionDenied):
                    await log.trim(PROGRAMS.name, before=2)
        async with cluster.client(agent) as log:
            assert await fetch_program(log, sha256) == data
            with pytest.raises(PermissionDenied):
                await store_program(log, b"of an agent")
        async with cluster.client(user) as log:
            with pytest.raises((PermissionDenied, NotFound)):
                await log.table(PROGRAMS.name, timeout=5)
        # The leader copies as itself, also for an operator that neither reads nor publishes programs.
        operator = await cluster.principal("operator", ("trim", f"topic:{PROGRAMS.name}"))
        async with cluster.client(operator) as log, cluster.client(agent) as reader:
            end = await log.tail() + 1
            await log.trim(PROGRAMS.name, before=end)
            assert await fetch_program(reader, sha256) == data
            assert (await places(reader, sha256))[0].glsn >= end
