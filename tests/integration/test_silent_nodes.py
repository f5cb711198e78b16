"""Storage nodes that hang, as real processes that are stopped, and log streams that open later: clients that are
connected all the while, of every kind, go on as soon as the log does, and nothing is lost, doubled or made up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest

import cutwater
from cutwater.admin.local_cluster import LocalCluster
from cutwater.admin.operations import Admin
from cutwater.client.async_client import AsyncClient
from cutwater.errors import AppendUnknown, CutwaterError
from cutwater.types import Ack, Epoch, LogStreamId
from tests.integration.real_cluster import RECOVERY_SECONDS, TOPIC, resume, running_cluster, stop

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

REFRESH_SECONDS = 1.5
"""What clients may take once the log goes on: one look at the catalog, and what a busy machine adds."""
LEARN_SECONDS = 2.0
"""What clients may take to use a log stream that has opened, where a second is the goal."""
LARGE = b"x" * 100_000
"""So large that it travels alone."""
PAUSE_SECONDS = 0.005
LARGE_PAUSE_SECONDS = 0.05


class Recorder:
    """What every append came to. Values are unique, so the log tells whose they are."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self.taken: dict[bytes, Ack] = {}
        self.unknown: set[bytes] = set()
        self.failed: dict[bytes, CutwaterError] = {}
        self.last: dict[str, float] = {}
        """When an append of each kind was last begun that was acknowledged later."""
        self.streams: dict[str, set[LogStreamId]] = {}
        self.is_over = threading.Event()

    def value(self, kind: str) -> bytes:
        return f"{kind}-{next(self._numbers)}".encode()

    def note(self, kind: str, value: bytes, begun: float, outcome: Ack | CutwaterError) -> None:
        if isinstance(outcome, Ack):
            self.taken[value], self.last[kind] = outcome, begun
            self.streams.setdefault(kind, set()).add(outcome.stream)
        elif isinstance(outcome, AppendUnknown):
            self.unknown.add(value)
        else:
            self.failed[value] = outcome

    async def appends(self, kind: str, append: Callable[[bytes], Awaitable[Ack]], tail: bytes = b"") -> None:
        while not self.is_over.is_set():
            value, begun = self.value(kind) + tail, time.monotonic()
            try:
                self.note(kind, value, begun, await append(value))
            except CutwaterError as error:
                self.note(kind, value, begun, error)
            await asyncio.sleep(LARGE_PAUSE_SECONDS if tail else PAUSE_SECONDS)

    def blocking_appends(self, kind: str, append: Callable[[bytes], Ack]) -> None:
        while not self.is_over.is_set():
            value, begun = self.value(kind), time.monotonic()
            try:
                self.note(kind, value, begun, append(value))
            except CutwaterError as error:
                self.note(kind, value, begun, error)
            time.sleep(PAUSE_SECONDS)

    async def until_all_go_on(self, kinds: list[str], since: float, seconds: float) -> float:
        """Until something of each kind was acknowledged that was begun since; how long that took."""
        async with asyncio.timeout(seconds):
            while any(self.last.get(kind, 0.0) < since for kind in kinds):
                await asyncio.sleep(0.005)
        return time.monotonic() - since

    async def judge(self, log: AsyncClient) -> None:
        """Read everything: what was acknowledged is there once, at its place; what failed is not; the rest at most
        once; and nothing else is."""
        found = {record.glsn: record.value async for record in log.subscribe(TOPIC, follow=False)}
        times = Counter(found.values())
        for value, ack in self.taken.items():
            assert found.get(ack.glsn) == value, f"{value[:40]!r} was acknowledged as {ack}"
        doubled = [value[:40] for value, often in times.items() if often > 1]
        assert not doubled
        made_up = [(value[:40], str(self.failed[value])) for value in times if value in self.failed]
        assert not made_up, "these failed for certain, and are there"
        strange = [value[:40] for value in times if value not in self.taken and value not in self.unknown]
        assert not strange


@asynccontextmanager
async def started(tasks: list[asyncio.Task[None]], recorder: Recorder) -> AsyncIterator[None]:
    try:
        yield
    finally:
        recorder.is_over.set()
        await asyncio.gather(*tasks)


async def epochs(admin: Admin) -> dict[LogStreamId, tuple[Epoch, bool]]:
    return {info.stream: (info.epoch, info.is_open) for info in (await admin.catalog()).streams}


async def until_reopened(admin: Admin, before: dict[LogStreamId, tuple[Epoch, bool]]) -> float:
    async with asyncio.timeout(RECOVERY_SECONDS):
        while True:
            now = await epochs(admin)
            if all(now[stream][1] and now[stream][0] > epoch for stream, (epoch, _) in before.items()):
                return time.monotonic()
            await asyncio.sleep(0.02)


def connected(cluster: LocalCluster) -> str:
    return "cutwater://" + ",".join(cluster.addresses)


@pytest.fixture
def blocking(request: pytest.FixtureRequest) -> Iterator[Callable[[str], cutwater.Client]]:
    opened: list[cutwater.Client] = []

    def connect(url: str) -> cutwater.Client:
        opened.append(cutwater.connect(url, timeout=20))
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


@pytest.mark.parametrize("place", ["head", "tail"])
async def test_clients_go_on_when_a_storage_node_hangs(
    tmp_path: Path, place: str, blocking: Callable[[str], cutwater.Client]
) -> None:
    async with (
        running_cluster(tmp_path) as cluster,
        Admin(cluster.addresses, timeout_ms=30_000) as admin,
        await AsyncClient.connect(connected(cluster), timeout=20) as log,
    ):
        await log.create_topic(TOPIC, streams=2, replication=3)
        first = (await admin.catalog()).streams[0]
        node = first.chain[0 if place == "head" else -1]
        member = next(member for member in cluster.storage_nodes if member.id == node)
        other = await asyncio.to_thread(blocking, connected(cluster))
        recorder = Recorder()
        producer = await log.producer(TOPIC, id="async")
        blocking_producer = await asyncio.to_thread(other.producer, TOPIC, id="blocking")
        run = await log.open_run("query", key="key")
        batches = count()

        async def produce(value: bytes) -> Ack:
            return await (await producer.send(value))

        async def publish(value: bytes) -> Ack:
            batch = next(batches)
            while True:
                try:
                    part = await log.stage(run, batch, TOPIC, [value])
                    (group,) = await log.publish(run, batch, [part])
                    return Ack(group.glsn, 0, group.stream, group.count)  # type: ignore[arg-type]
                except CutwaterError as error:
                    if not error.retriable:
                        raise

        kinds: dict[str, Callable[[bytes], Awaitable[Ack]]] = {
            "plain": lambda value: log.append(TOPIC, value),
            "together": lambda value: log.append(TOPIC, value),
            "pinned": lambda value: log.append(TOPIC, value, stream=first.stream),
            "hasty": lambda value: log.append(TOPIC, value, timeout=0.2),
            "producer": produce,
            "publishing": publish,
            "thread": lambda value: asyncio.to_thread(other.append, TOPIC, value),
            "blocking producer": lambda value: asyncio.to_thread(lambda: blocking_producer.send(value).result(20)),
        }
        tasks = [asyncio.create_task(recorder.appends(kind, append)) for kind, append in kinds.items()]
        tasks.append(asyncio.create_task(recorder.appends("large", kinds["plain"], LARGE)))
        heard: dict[str, float] = {}

        async def follow() -> None:
            async for _ in log.subscribe(TOPIC, start="latest"):
                heard["subscriber"] = time.monotonic()

        async def read() -> None:
            while True:
                if recorder.taken:
                    ack = next(iter(recorder.taken.values()))
                    await log.read(ack.glsn, stream=ack.stream)
                    heard["reader"] = time.monotonic()
                await asyncio.sleep(0.02)

        readers = [asyncio.create_task(follow()), asyncio.create_task(read())]
        async with started(tasks, recorder):
            await recorder.until_all_go_on([*kinds, "large"], time.monotonic(), RECOVERY_SECONDS)
            before = await epochs(admin)
            stop(member)
            try:
                stopped = time.monotonic()
                reopened = await until_reopened(admin, before)
                took = await recorder.until_all_go_on([*kinds, "large"], reopened, 20.0)
                print(f"{place}: reopened after {reopened - stopped:.2f} s, all go on {took:.2f} s later")
                assert took < REFRESH_SECONDS
                await asyncio.sleep(max(0.0, reopened + 2 * REFRESH_SECONDS - time.monotonic()))
                assert min(heard["subscriber"], heard["reader"]) > reopened
                assert recorder.streams["plain"] == set(before)
            finally:
                resume(member)
            await recorder.until_all_go_on([*kinds, "large"], time.monotonic(), RECOVERY_SECONDS)
        for task in readers:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await producer.close()
        await asyncio.to_thread(blocking_producer.close)
        await recorder.judge(log)
        impatient = [(value, str(error)) for value, error in recorder.failed.items() if not value.startswith(b"hasty")]
        assert not impatient, "these had time enough to go elsewhere"


async def test_running_clients_use_log_streams_that_open_later(
    tmp_path: Path, blocking: Callable[[str], cutwater.Client]
) -> None:
    """After an operator has sealed and unsealed one, and after two more were added to the topic."""
    async with (
        running_cluster(tmp_path) as cluster,
        Admin(cluster.addresses, timeout_ms=30_000) as admin,
        await AsyncClient.connect(connected(cluster), timeout=20) as log,
    ):
        await log.create_topic(TOPIC, streams=3, replication=1)
        other = await asyncio.to_thread(blocking, connected(cluster))
        recorder = Recorder()
        tasks = [
            asyncio.create_task(recorder.appends("plain", lambda value: log.append(TOPIC, value))),
            asyncio.create_task(recorder.appends("large", lambda value: log.append(TOPIC, value), LARGE)),
            asyncio.create_task(asyncio.to_thread(recorder.blocking_appends, "thread", partial(other.append, TOPIC))),
        ]
        kinds = ["plain", "large", "thread"]

        async def until_used(streams: set[LogStreamId]) -> float:
            """How long it takes until all clients have used all of these log streams."""
            begun = time.monotonic()
            recorder.streams.clear()
            async with asyncio.timeout(RECOVERY_SECONDS):
                while not all(recorder.streams.get(kind, set()) >= streams for kind in kinds):
                    await asyncio.sleep(0.005)
            return time.monotonic() - begun

        async with started(tasks, recorder):
            streams = set(await epochs(admin))
            await until_used(streams)
            sealed = min(streams)
            await admin.seal(sealed)
            await asyncio.sleep(1.0)
            recorder.streams.clear()
            await asyncio.sleep(0.2)
            assert sealed not in recorder.streams["plain"]
            await admin.unseal(sealed)
            unsealed = await until_used({sealed})
            new = {await admin.add_stream(TOPIC) for _ in range(2)}
            added = await until_used(new)
            await until_used(streams | new)
            print(f"used {unsealed:.2f} s after the unseal, {added:.2f} s after two were added")
            assert unsealed < LEARN_SECONDS
            assert added < LEARN_SECONDS
        await recorder.judge(log)
        assert not recorder.failed
