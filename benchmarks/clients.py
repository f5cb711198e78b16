"""The clients of ``benchmarks.log``: separate processes that append or read for some time and return figures."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from msgspec import Struct

from cutwater import embedded
from cutwater.admin.load_test import AppendLoad, Figures, append_for, read_for
from cutwater.client.async_client import AsyncClient
from cutwater.client.client import Client
from cutwater.runtime.event_loop import new_event_loop, run
from cutwater.types import Ack

P = ParamSpec("P")
R = TypeVar("R")

JOB_SECONDS_MAX = 900.0


def together(parts: Sequence[Figures]) -> Figures:
    """Combine the figures of several processes that ran at the same time."""
    return Figures(
        sum(part.records for part in parts),
        min(part.begun for part in parts),
        max(part.ended for part in parts),
        [latency for part in parts for latency in part.latencies],
    )


# Through asyncio, against a cluster.


def append(servers: str, load: AppendLoad, start_at: float, seconds: float) -> Figures:
    return run(_append(servers, load, start_at, seconds))


async def _append(servers: str, load: AppendLoad, start_at: float, seconds: float) -> Figures:
    async with await AsyncClient.connect(servers) as log:
        await log.append(load.topic, load.made())
        await asyncio.sleep(start_at - time.monotonic())
        return await append_for(log, load, seconds)


def read(servers: str, topic: str, as_batches: bool, seconds: float) -> Figures:
    """Read from the beginning, to the end or for ``seconds``."""
    return run(_read(servers, topic, as_batches, seconds))


async def _read(servers: str, topic: str, as_batches: bool, seconds: float) -> Figures:
    async with await AsyncClient.connect(servers) as log:
        return await read_for(log, topic, as_batches, seconds)


# Embedded, on the caller's event loop.

_on_loops: dict[str, tuple[asyncio.Runner, AsyncClient]] = {}
"""Open logs of this process, by path. Their loops do not run between two jobs, so jobs must not be far apart."""


def open_on_loop(path: str, topics: dict[str, int]) -> None:
    async def prepare() -> AsyncClient:
        log = await AsyncClient.open(path, exclusive=True)
        for topic, streams in topics.items():
            await log.create_topic(topic, streams=streams)
        return log

    runner = asyncio.Runner(loop_factory=new_event_loop)
    _on_loops[path] = runner, runner.run(prepare())


def close_on_loop(path: str) -> None:
    runner, log = _on_loops.pop(path)
    with runner:
        runner.run(log.close())


def append_on_loop(path: str, load: AppendLoad, seconds: float) -> Figures:
    runner, log = _on_loops[path]
    return runner.run(append_for(log, load, seconds))


# Embedded: the log, its client and the caller's threads in one process.

_embedded: dict[str, Client] = {}
"""Open logs of this process, by path."""


def open_embedded(path: str, topics: dict[str, int]) -> None:
    """Open a log. ``topics``: names, and the number of log streams of each."""
    log = _embedded[path] = embedded.open(Path(path), exclusive=True)
    for topic, streams in topics.items():
        log.create_topic(topic, streams=streams)


def close_embedded(path: str) -> None:
    _embedded.pop(path).close()


def append_embedded(path: str, load: AppendLoad, seconds: float) -> Figures:
    """Append from as many threads as there are appends in flight."""
    log = _embedded[path]
    records = load.made()
    log.append(load.topic, records)

    def one_after_the_other(begun: float) -> tuple[int, list[float]]:
        count, latencies = 0, list[float]()
        while (sent := time.monotonic()) < begun + seconds:
            count += log.append(load.topic, records).count
            latencies.append(time.monotonic() - sent)
        return count, latencies

    with ThreadPoolExecutor(load.in_flight) as threads:
        begun = time.monotonic()
        found = list(threads.map(one_after_the_other, [begun] * load.in_flight))
    latencies = [latency for _, some in found for latency in some]
    return Figures(sum(count for count, _ in found), begun, time.monotonic(), latencies)


def send_embedded(path: str, load: AppendLoad, seconds: float) -> Figures:
    """Append through a producer, from one thread."""
    records = load.made()
    waiting: deque[Future[Ack]] = deque()
    with _embedded[path].producer(load.topic, id="bench") as producer:
        begun, count = time.monotonic(), 0
        while time.monotonic() < begun + seconds:
            while len(waiting) < load.in_flight:
                waiting.append(producer.send(records))
            count += waiting.popleft().result().count
        count += sum(future.result().count for future in waiting)
        return Figures(count, begun, time.monotonic(), [])


def fill_embedded(path: str, load: AppendLoad, records: int) -> Figures:
    """Append ``records`` records, in appends of the same size."""
    log, made, each = _embedded[path], load.made(), max(load.rows, 1)
    with ThreadPoolExecutor(load.in_flight) as threads:
        begun = time.monotonic()
        for _ in threads.map(lambda _: log.append(load.topic, made, timeout=JOB_SECONDS_MAX), range(records // each)):
            pass
    return Figures(records, begun, time.monotonic(), [])


# The processes.


class Worker:
    """A process that runs jobs, one after the other."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._process.pid or 0

    def begin(self, job: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Callable[[], R]:
        """Begin a job; return a function that waits for its outcome."""
        self._pipe.send((job, args, kwargs))

        def outcome() -> R:
            if not self._pipe.poll(JOB_SECONDS_MAX):
                raise TimeoutError(f"{job.__name__} did not end within {JOB_SECONDS_MAX:g} s")
            result = self._pipe.recv()
            if isinstance(result, Failure):
                raise RuntimeError(f"{job.__name__} failed in its process: {result.told}")
            return result  # type: ignore[no-any-return]

        return outcome

    def call(self, job: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self.begin(job, *args, **kwargs)()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


class Failure(Struct, frozen=True):
    """An error as text: not every exception can be sent between processes."""

    told: str


def _work(pipe: Connection) -> None:
    while True:
        try:
            job, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            result: Any = job(*args, **kwargs)
        except Exception as error:
            result = Failure(repr(error))
        pipe.send(result)


@contextmanager
def workers(count: int) -> Iterator[list[Worker]]:
    found: list[Worker] = []
    try:
        for _ in range(count):
            found.append(Worker())
        for outcome in [worker.begin(os.getpid) for worker in found]:
            outcome()
        yield found
    finally:
        for worker in found:
            worker.end()
