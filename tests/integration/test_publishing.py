"""Publishing staged batches through real servers, files and sockets: whole, once, in order, and by the leader alone."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from msgspec import structs

import cutwater
from cutwater.admin.operations import Admin
from cutwater.admin.publish_audit import verify_published
from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.metadata_client import parse_servers
from cutwater.client.publish.runs import Published, Run
from cutwater.core.requests import DescribeRequest, Description, DropRunRequest, SealRequest, UnsealRequest
from cutwater.errors import (
    BatchDiffers,
    CutwaterError,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Refused,
    RunFenced,
    StagedExpired,
)
from cutwater.format import merging
from cutwater.types import GLSN, InputRange, LogStreamId, Part
from tests.integration.log_cluster import ORDER, LogCluster, seeded, with_log

pytestmark = pytest.mark.timeout(100)

MIB = 1024 * 1024
SCHEMA = pa.schema({"n": pa.int64(), "text": pa.string()})
TIME = pa.timestamp("us", tz="UTC")


def rows(numbers: list[int], width: int = 20) -> pa.Table:
    return pa.table({"n": numbers, "text": [f"{n:0{width}}" for n in numbers]}, schema=SCHEMA)


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "big")


def groups_in(table: pa.Table, published: Published) -> list[int]:
    """The numbers that lie where a group is said to be."""
    numbers, glsns = table["n"].to_pylist(), table["glsn"].to_pylist()
    start = glsns.index(published.glsn)
    assert glsns[start : start + published.count] == list(range(published.glsn, published.glsn + published.count))
    return numbers[start : start + published.count]


async def verified(cluster: LogCluster, *, forgets: bool = False) -> tuple[int, list[str]]:
    """How many groups are in the log, and what is wrong with them. The metadata repository may forget its runs."""
    async with Admin(parse_servers(cluster.servers)) as admin:

        async def describe() -> Description:
            description = await admin.describe()
            return structs.replace(description, runs=(), last_run=0) if forgets else description

        ranges = await admin.ranges()
        try:
            groups, findings = await verify_published(ranges, describe, timeout=10)
        finally:
            await ranges.close()
        return groups, [finding.what for finding in findings]


def test_a_batch_of_two_topics_and_several_parts_is_published_as_it_was_decided_first(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("plain", schema=SCHEMA, streams=2)
        await log.create_topic("sorted", schema=SCHEMA, streams=2)
        run = await log.open_run("totals", "one checkpoint")
        assert (run.last_batch, (await log.open_run("totals", "one checkpoint")).run) == (-1, run.run)
        shuffled = list(range(5_000))
        seeded().shuffle(shuffled)
        for batch in range(3):
            base = batch * 10_000
            plain = [await log.stage(run, batch, "plain", rows([base + i for i in part])) for part in ([1, 2], [0])]
            ordered = []
            for i in range(3):
                own = sorted(base + n for n in shuffled[i::3])
                ordered.append(await log.stage(run, batch, "sorted", rows(own), positions=[key_of(n) for n in own]))
            assert (await log.table("plain")).num_rows == 3 * batch
            published = await log.publish(run, batch, [*plain, *ordered])
            assert [(group.topic, group.count) for group in published] == [("plain", 3), ("sorted", 5_000)]
            assert groups_in(await log.table("plain"), published[0]) == [base + i for i in (1, 2, 0)]
            assert groups_in(await log.table("sorted"), published[1]) == [base + i for i in range(5_000)]
            again = [await log.stage(run, batch, "plain", rows([666]))]
            assert await log.publish(run, batch, again) == published
        assert await log.publish(run, 0, []) == ()
        assert await log.publish(run, 3, []) == ()
        assert (await log.open_run("totals", "one checkpoint")).last_batch == 3
        assert (await log.table("plain")).num_rows == 9
        assert (await log.table("sorted"))["text"].to_pylist()[-1] == f"{24_999:020}"
        # Neighbouring batches take turns with the log streams.
        assert len(set((await log.table("plain"))["stream"].to_pylist())) == 2
        # What is in the log is what was decided.
        assert await verified(cluster) == (6, [])
        await log.trim("sorted", before=published[1].glsn + 1)
        # The last group is cut by the trim, and those before it are gone.
        assert await verified(cluster) == (4, [])
        _, (finding, *_) = await verified(cluster, forgets=True)
        assert re.fullmatch("at GLSN [0-9]+: batch 2 of run 1 was never decided: there has been no such run", finding)

    with_log(tmp_path, test, nodes=3)


def test_records_of_key_and_value_and_compressed_ones(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("kv")
        async with cluster.client(compression="zstd") as squeezed:
            run = await squeezed.open_run("", "a key")
            first = pa.table({"key": [b"a", b"c"], "value": [b"1", b"3"], "timestamp": pa.array([5, 7], TIME)})
            second = pa.table({"key": [b"b"], "value": [b"2"], "timestamp": pa.array([6], TIME)})
            parts = [
                await squeezed.stage(run, 0, "kv", first, positions=[b"1", b"3"]),
                await squeezed.stage(run, 0, "kv", second, positions=pa.array([b"2"])),
            ]
            (published,) = await squeezed.publish(run, 0, parts)
            records = [record async for record in log.subscribe("kv", follow=False)]
            assert [(r.key, r.value, r.timestamp_us) for r in records] == [
                (b"a", b"1", 5),
                (b"b", b"2", 6),
                (b"c", b"3", 7),
            ]
            assert records[0].glsn == published.glsn
            with pytest.raises(InvalidArgument, match="alike"):
                await squeezed.publish(run, 1, [parts[0], await squeezed.stage(run, 1, "kv", [b"x"])])

    with_log(tmp_path, test)


def test_large_rows_next_to_each_other_can_be_read(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("kv")
        run = await log.open_run("", "a key")
        small = 8_000
        values = [b"x" * 1_000_000] * 7 + [b"s"] * small
        positions = [b"a"] * 7 + [b"b%08d" % i for i in range(small)]
        parts = [await log.stage(run, 0, "kv", values, positions=positions) for _ in range(3)]
        (published,) = await log.publish(run, 0, parts)
        records = [record async for record in log.subscribe("kv", follow=False)]
        assert len(records) == published.count
        assert [len(record.value) for record in records] == [1_000_000] * 21 + [1] * 3 * small

    with_log(tmp_path, test)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_group_far_larger_than_what_is_held_in_memory(
    tmp_path: Path, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also appends go on while it is published, before and after it."""
    monkeypatch.setattr(merging, "WINDOW_BYTES", MIB)
    count, parts = 42_000, 6

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", schema=SCHEMA)
        run = await log.open_run("", "a key")
        staged = []
        for i in range(parts):
            numbers = list(range(i, count, parts))
            positions = [key_of(n) for n in numbers] if ordered else None
            async with await log.stager(run, 0, "t", ordered=ordered) as stager:
                for at in range(0, len(numbers), 2_000):
                    some = slice(at, at + 2_000)
                    await stager.write(rows(numbers[some], 1_000), positions=positions and positions[some])
                staged.append(await stager.finish())
        stop = asyncio.Event()

        async def append_meanwhile() -> int:
            appended = 0
            while not stop.is_set():
                await log.append("t", rows([-1]))
                appended += 1
            return appended

        appending = asyncio.create_task(append_meanwhile())
        (published,) = await log.publish(run, 0, staged)
        stop.set()
        appended = await appending
        table = await log.table("t")
        assert table.num_rows == count + appended
        expected = list(range(count)) if ordered else [n for i in range(parts) for n in range(i, count, parts)]
        assert groups_in(table, published) == expected
        assert sum(part.bytes for part in staged if part) > 40 * MIB
        statuses = [server.node.replicas[published.stream].replica for server in cluster.nodes.values()]
        await cluster.until(lambda: len({replica.committed_end for replica in statuses}) == 1, "all replicas have it")
        assert not list(tmp_path.glob("volume*/*/*/staged/*.tmp"))

    with_log(tmp_path, test, nodes=2)


def test_a_log_stream_that_is_sealed_and_opened_again_and_again_takes_each_group_once(tmp_path: Path) -> None:
    """Attempts that were broken off leave nothing behind, neither in the log nor in the way of the next one."""
    rng, batches, count = seeded(), 4, 20_000

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", schema=SCHEMA)
        stream = (await log.topic("t")).streams[0]
        run = await log.open_run("", "a key")

        async def disturb() -> None:
            seconds_max = 0.3
            while True:
                await asyncio.sleep(rng.random() * seconds_max)
                # So that also a machine with other things to do has the time for a whole group, sooner or later.
                seconds_max *= 1.1
                await cluster.ask(SealRequest(stream))
                await cluster.ask(UnsealRequest(stream))

        disturbing = asyncio.create_task(disturb())
        try:
            for batch in range(batches):
                numbers = [batch * count + i for i in range(count)]
                half = count // 2
                staged = [
                    await log.stage(run, batch, "t", rows(some, 1_000)) for some in (numbers[:half], numbers[half:])
                ]
                await log.publish(run, batch, staged, timeout=60)
        finally:
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
        assert (await log.table("t"))["n"].to_pylist() == list(range(batches * count))

    with_log(tmp_path, test, nodes=2)


async def final_seal(cluster: LogCluster, stream: LogStreamId) -> None:
    await cluster.ask(SealRequest(stream, final=True))


def test_parts_are_had_from_other_holders_when_the_group_goes_elsewhere(tmp_path: Path) -> None:
    """The log stream for which the parts were staged is sealed for good, and one of the holders is gone."""

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", schema=SCHEMA, streams=2, replication=2)
        catalog = (await log.topic("t")).name and log._catalogs.view
        run = await log.open_run("", "a key")
        part = await log.stage(run, 0, "t", rows(list(range(1_000))))
        assert part is not None
        others = [s for s in catalog.streams.values() if s.stream != part.hint and not set(s.chain) & set(part.holders)]
        assert others, "two of the four nodes hold nothing of the part"
        await final_seal(cluster, part.hint)
        await cluster.stop_node(part.holders[0])
        (published,) = await log.publish(run, 0, [part])
        assert published.stream != part.hint
        assert groups_in(await log.table("t"), published) == list(range(1_000))
        copied = sum(server.node.counters.parts_copied for server in cluster.nodes.values())
        assert copied == (published.stream in {s.stream for s in others})

    with_log(tmp_path, test, nodes=4)


def test_a_holder_that_is_lost_while_rows_are_staged_is_done_without(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", schema=SCHEMA)
        run = await log.open_run("", "a key")
        table = rows(list(range(60_000)), 500)
        stager = await log.stager(run, 0, "t")
        await stager.write(table.slice(0, 10))
        staging = asyncio.create_task(log.stage(run, 0, "t", table))

        def busiest() -> int:
            return max(cluster.nodes, key=lambda number: cluster.nodes[number].staging.bytes)

        await cluster.until(lambda: cluster.nodes[busiest()].staging.bytes > MIB, "part of it is there")
        victim = busiest()
        await cluster.stop_node(victim)
        part = await staging
        assert part is not None
        assert victim not in part.holders
        with pytest.raises(CutwaterError):
            # Whoever stages row by row has to begin anew.
            await stager.finish()
        await stager.close()
        holder = cluster.nodes[part.holders[0]]
        await cluster.until(lambda: holder.staging.parts == 1, "what was given up is gone")
        (published,) = await log.publish(run, 0, [part])
        assert groups_in(await log.table("t"), published) == list(range(60_000))

    with_log(tmp_path, test, nodes=3)


def damage(cluster: LogCluster, node: int, part: Part, *, at: float) -> None:
    """One bit of a part is wrong where one holder has it."""
    path = cluster.nodes[node].staging.held[part.part].path
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_damaged_is_put_together_from_all_holders_before_the_group_begins(
    tmp_path: Path, ordered: bool
) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", schema=SCHEMA)
        run = await log.open_run("", "a key")
        numbers = list(range(100_000))
        positions = [key_of(n) for n in numbers] if ordered else None
        part = await log.stage(run, 0, "t", rows(numbers, 100), positions=positions)
        assert part is not None
        head, other = part.holders
        # Far enough from each other to be in different entries, and near enough to be read together.
        damage(cluster, head, part, at=0.5)
        damage(cluster, other, part, at=0.65)
        (published,) = await log.publish(run, 0, [part])
        assert groups_in(await log.table("t"), published) == numbers
        server = cluster.nodes[head]
        assert (server.node.counters.damage_met, server.node.counters.groups_failed) == (1, 0)
        assert server.node.replicas[published.stream].replica.hard_state.epoch == 1
        # What was put together is whole, and counts once.
        held = server.staging.held[part.part]
        assert server.staging._files.verify(held) == []
        assert server.staging.bytes == part.bytes
        assert [path.name for path in tmp_path.glob(f"volume{head}/*/*/staged/*")] == [held.path.name]

    with_log(tmp_path, test, nodes=2)


def test_a_part_that_is_damaged_everywhere_does_not_disturb_its_log_stream(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", schema=SCHEMA)
        run = await log.open_run("", "a key")
        part = await log.stage(run, 0, "t", rows(list(range(100_000)), 100))
        assert part is not None
        for node in part.holders:
            damage(cluster, node, part, at=0.9)
        publishing = asyncio.create_task(log.publish(run, 0, [part]))
        head = cluster.nodes[part.holders[0]]
        for n in range(200):
            await log.append("t", rows([n]))
        await cluster.until(lambda: head.node.counters.groups_failed >= 2, "it was tried and tried again")

        description: Description = await cluster.ask(DescribeRequest())
        (group,) = description.runs[0].unpublished
        assert "no holder can provide staged part" in group.why
        assert head.node.replicas[part.hint].replica.hard_state.epoch == 1
        assert (await log.table("t"))["n"].to_pylist() == list(range(200))
        assert head.staging.bytes == part.bytes
        # An operator brings one copy back; there is no hurry, and no need to do anything else.
        damage(cluster, part.holders[1], part, at=0.9)
        (published,) = await publishing
        assert groups_in(await log.table("t"), published) == list(range(100_000))

    with_log(tmp_path, test, nodes=2)


def test_a_part_that_nobody_has_is_told_and_published_when_it_is_back(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", schema=SCHEMA)
        run = await log.open_run("lost", "a key")
        part = await log.stage(run, 0, "t", rows([1, 2, 3]))
        assert part is not None
        staging = cluster.nodes[1].staging
        held = staging.held.pop(part.part)
        with pytest.raises(DeadlineExceeded):
            await log.publish(run, 0, [part], timeout=1)

        async def is_told() -> bool:
            description: Description = await cluster.ask(DescribeRequest())
            (group,) = description.runs[0].unpublished
            return "no holder can provide staged part" in group.why and part.part in group.why

        await cluster.until(is_told, "the description says what is missing")
        # The log stream itself is not disturbed.
        await log.append("t", rows([0]))
        staging.held[part.part] = held
        (published,) = await log.publish(run, 0, [])
        assert groups_in(await log.table("t"), published) == [1, 2, 3]

    with_log(tmp_path, test)


def test_a_run_whose_rows_are_lost_for_good_can_be_dropped(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", schema=SCHEMA)
        run = await log.open_run("lost", "a key")
        part = await log.stage(run, 0, "t", rows([1, 2, 3]))
        assert part is not None
        del cluster.nodes[1].staging.held[part.part]
        waiting = asyncio.create_task(log.publish(run, 0, [part], timeout=60))

        async def is_told() -> bool:
            description: Description = await cluster.ask(DescribeRequest())
            return any(group.why for known in description.runs for group in known.unpublished)

        await cluster.until(is_told, "the batch is decided")
        await cluster.ask(DropRunRequest(run.run))
        with pytest.raises(RunFenced, match="start the query with a new checkpoint"):
            await waiting
        await log.append("t", rows([0]))
        other = await log.open_run("lost", "another key")
        (published,) = await log.publish(other, 0, [await log.stage(other, 0, "t", rows([4]))])
        assert groups_in(await log.table("t"), published) == [4]

    with_log(tmp_path, test)


def test_what_is_no_run_batch_or_part_is_said(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", schema=SCHEMA)
        run = await log.open_run("typed", "a key")
        part = await log.stage(run, 0, "t", rows([1]))
        given: Any = log
        with pytest.raises(InvalidArgument, match="the name of a run is a text of at most 255 characters, not None"):
            await given.open_run(None, "a key")
        with pytest.raises(InvalidArgument, match=r"the key of a run is a text .* not 7"):
            await given.open_run("typed", 7)
        for batch in ("0", 1.0, None, True, -1):
            with pytest.raises(InvalidArgument, match="batches are numbered from 0"):
                await given.publish(run, batch, [part])
        for wrong in ("a key", None, part):
            with pytest.raises(InvalidArgument, match="a run is what open_run returns"):
                await given.publish(wrong, 0, [part])
            with pytest.raises(InvalidArgument, match="a run is what open_run returns"):
                await given.stage(wrong, 0, "t", rows([1]))
        for parts in (part, 7, None, "parts", [part, "part"]):
            with pytest.raises(InvalidArgument, match=r"parts as stage\(\) returns them"):
                await given.publish(run, 0, parts)
        with pytest.raises(InvalidArgument, match="was staged for batch 0 of run 1, not for batch 1 of run 1"):
            await log.publish(run, 1, [part])
        assert [group.count for group in await log.publish(run, 0, [part, None])] == [1]

    with_log(tmp_path, test)


def test_what_is_published_is_dropped_and_what_is_never_decided_expires(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", schema=SCHEMA)
        run = await log.open_run("", "a key")
        staging = cluster.nodes[1].staging
        assert cluster.metadata is not None
        first = await log.stage(run, 0, "t", rows([1]))
        await log.publish(run, 0, [first])
        await cluster.until(lambda: not staging.held, "the published part is dropped")
        second = await log.stage(run, 1, "t", rows([2]))
        await cluster.until(lambda: not staging.held, "the part that nobody publishes expires")
        with pytest.raises(StagedExpired):
            await log.publish(run, 1, [second])
        assert (await log.table("t"))["n"].to_pylist() == [1]
        again = await log.open_run("", "a key")
        assert (again.run, again.generation > run.generation) == (run.run, True)
        await log.publish(again, 1, [await log.stage(again, 1, "t", rows([3]))])
        assert (await log.table("t"))["n"].to_pylist() == [1, 3]
        assert not list(tmp_path.glob("volume*/*/*/staged/*.part")) or staging.held

    order = structs.replace(ORDER, staged_expire_after_us=1_000_000)
    with_log(tmp_path, test, order=order, staged_ask_seconds=0.2)


def test_a_newer_run_fences_the_older_one_of_its_name(tmp_path: Path) -> None:
    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", schema=SCHEMA)
        old = await log.open_run("totals", "old checkpoint")
        part = await log.stage(old, 0, "t", rows([1]))
        new = await log.open_run("totals", "new checkpoint")
        assert new.run > old.run
        with pytest.raises(RunFenced):
            await log.publish(old, 0, [part])
        with pytest.raises(RunFenced):
            await log.open_run("totals", "old checkpoint")
        await log.publish(new, 0, [await log.stage(new, 0, "t", rows([2]))])
        assert (await log.table("t"))["n"].to_pylist() == [2]
        nameless = [await log.open_run("", f"key {i}", once=True) for i in range(2)]
        for i, run in enumerate(nameless):
            await log.publish(run, 0, [await log.stage(run, 0, "t", rows([i]))])
        await log.delete_topic("t")
        await log.create_topic("t", schema=SCHEMA)
        with pytest.raises(NotFound):
            await log.publish(new, 1, [structs.replace(part, generation=new.generation)] if part else [])

    with_log(tmp_path, test)


def stage_elsewhere(servers: str, run: Run, number: int) -> bytes:
    """What a task does, in a process of its own."""
    with cutwater.connect(servers) as log, log.stager(run, 0, "t", ordered=True) as stager:
        for n in range(number, 1_000, 4):
            stager.write(rows([n]), positions=[key_of(n)])
        return msgspec.msgpack.encode(stager.finish())


def test_several_processes_stage_and_one_publishes_in_an_embedded_log(tmp_path: Path) -> None:
    with cutwater.open(tmp_path / "log") as log:
        log.create_topic("t", schema=SCHEMA)
        run = log.open_run("totals", "a checkpoint")
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as tasks:
            staged = [tasks.submit(stage_elsewhere, log.servers, run, i) for i in range(4)]
            parts = [msgspec.msgpack.decode(task.result(60), type=Part) for task in staged]
        assert log.table("t").num_rows == 0
    # All of it is still there when the log is opened again.
    with cutwater.open(tmp_path / "log") as log:
        (published,) = log.publish(log.open_run("totals", "a checkpoint"), 0, parts)
        assert groups_in(log.table("t"), published) == list(range(1_000))


def test_an_earlier_assignment_of_a_job_is_refused_wherever_it_comes(tmp_path: Path) -> None:
    """Both have the same key: a paused driver, and its successor."""

    async def test(cluster: LogCluster, log: AsyncClient) -> None:
        await log.create_topic("t", schema=SCHEMA)
        await log.append("t", rows([8, 9]))
        old = await log.open_run("job", "key", job_epoch=3)
        assert (old.job_epoch, old.last_input) == (3, None)
        await log.publish(old, 0, [await log.stage(old, 0, "t", rows([1]))], read=InputRange(GLSN(0), GLSN(1)))
        paused = [await log.stage(old, 1, "t", rows([2, 3]))]
        stager = await log.stager(old, 1, "t")
        await stager.write(rows([4]))

        new = await log.open_run("job", "key", job_epoch=4)
        assert (new.run, new.generation, new.last_batch, new.job_epoch) == (old.run, old.generation + 1, 0, 4)
        assert new.last_input == InputRange(GLSN(0), GLSN(1))
        with pytest.raises(RunFenced):
            await log.open_run("job", "key", job_epoch=3)
        with pytest.raises(RunFenced):
            await log.check_run("job", "key", job_epoch=3)
        with pytest.raises(Refused, match="belongs to the job"):
            await log.open_run("job", "key")
        with pytest.raises(RunFenced):
            await log.publish(old, 1, paused)
        with pytest.raises(StagedExpired):
            await log.publish(new, 1, paused)
        # The storage nodes know the new assignment from its first part.
        part = await log.stage(new, 1, "t", rows([2]))
        with pytest.raises(RunFenced):
            await stager.finish()
        with pytest.raises(RunFenced):
            await log.stage(old, 1, "t", rows([5]))
        with pytest.raises(RunFenced):
            await log.stage(structs.replace(old, job_epoch=0), 1, "t", rows([5]))
        await log.publish(new, 1, [part], read=InputRange(GLSN(1), GLSN(2)))
        with pytest.raises(BatchDiffers, match=r"GLSN 2 to 2.*GLSN 2 to 1"):
            await log.publish(new, 1, [part], read=InputRange(GLSN(1), GLSN(1)))
        assert (await log.table("t"))["n"].to_pylist() == [8, 9, 1, 2]
        (run,) = await log.find_runs("job")
        assert (run.job_epoch, run.last_input) == (4, InputRange(GLSN(1), GLSN(2)))
        # The leader stays of the same opinion, and so do the nodes.
        await cluster.restart_node(1)
        with pytest.raises(RunFenced):
            await log.open_run("job", "key", job_epoch=3)

    with_log(tmp_path, test)
