"""Measures the wire: client and server in two processes on loopback, next to the barest thing that does the same.

Processor time is that of both processes together. ``make bench`` includes ``lines()``; run alone, it prints them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, TypeVar

from msgspec import Struct

from cutwater.protocol.methods import Method, StreamMethod
from cutwater.runtime.event_loop import run
from cutwater.types import ClusterId
from cutwater.wire.calls.handlers import Methods, ReplyWithBody
from cutwater.wire.calls.incoming_calls import Call
from cutwater.wire.calls.streams import SharedCredit, StreamSender
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.listen.server import listen

T = TypeVar("T")

SMALL = b"x" * 100
LARGE = bytes(1_000_000)
IN_FLIGHT = 64
FEW_IN_FLIGHT = 4
LARGE_IN_FLIGHT = 4
ROUNDS = 5
LARGE_COUNT = 400
CPU_TARGET_US = 40

ECHO = Method[None, None]("echo", None, None)
ECHO_LATER = Method[None, None]("echo_in_a_task", None, None)
TAKE = Method[None, int]("take", None, int)
GIVE = StreamMethod[int, None]("give", int, None)
CPU = Method[None, float]("cpu", None, float)

methods = Methods()


@methods.answers(ECHO)
def echo(call: Call[None]) -> ReplyWithBody[None]:
    return ReplyWithBody(None, call.body)


@methods.answers(ECHO_LATER)
async def echo_in_a_task(call: Call[None]) -> ReplyWithBody[None]:
    return ReplyWithBody(None, call.body)


@methods.answers(TAKE)
def take(call: Call[None]) -> int:
    return len(call.body)


@methods.streams_to(GIVE)
async def give(call: Call[int], out: StreamSender[None]) -> None:
    for left in range(call.argument, 0, -1):
        await out.send(None, LARGE, backlog_items=left - 1, backlog_bytes=(left - 1) * len(LARGE))


@methods.answers(CPU)
def cpu(call: Call[None]) -> float:
    return time.process_time()


# ----------------------------------------------------------------------------------------------- the other process


async def _serve(tell: Callable[[int], None]) -> None:
    listener = await listen(Endpoint(ClusterId(1), "bench", "server", methods), "127.0.0.1", 0)
    tell(listener.port)
    await asyncio.Event().wait()


class _BareEcho(asyncio.Protocol):
    """The least that a protocol of asyncio does for a message: extract it, send it back."""

    def __init__(self, count: int = 0, done: asyncio.Future[None] | None = None) -> None:
        self.left, self.done = count, done
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        data = self.data + data
        end = len(data) - len(data) % len(SMALL)
        for start in range(0, end, len(SMALL)):
            self.transport.write(data[start : start + len(SMALL)])
        self.data = data[end:]
        if self.done is not None:
            self.left -= end // len(SMALL)
            if self.left <= 0 and not self.done.done():
                self.done.set_result(None)


async def _serve_bare(tell: Callable[[int], None]) -> None:
    server = await asyncio.get_running_loop().create_server(_BareEcho, "127.0.0.1", 0)
    tell(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _serve_socket(tell: Callable[[int], None]) -> None:
    """Receive large messages and acknowledge each with a byte, with nothing but blocking sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        tell(listening.getsockname()[1])
        sock, _ = listening.accept()
        buffer = memoryview(bytearray(len(LARGE)))
        with sock:
            while True:
                received = 0
                while received < len(buffer):
                    count = sock.recv_into(buffer[received:])
                    if count == 0:
                        return
                    received += count
                sock.sendall(b".")


def _child(kind: str, pipe: Any) -> None:
    def tell(port: int) -> None:
        pipe.send(port)
        if kind != "wire":
            _answer_cpu(pipe)

    if kind == "socket":
        _serve_socket(tell)
    else:
        run(_serve(tell) if kind == "wire" else _serve_bare(tell))


def _answer_cpu(pipe: Any) -> None:
    """Answer requests for the processor time through the pipe, from a thread, in a process without the protocol."""

    def answer() -> None:
        while pipe.recv():
            pipe.send(time.process_time())

    threading.Thread(target=answer, daemon=True).start()


@contextmanager
def _process(kind: str) -> Iterator[tuple[int, Any]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(kind, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv(), ours
    finally:
        process.kill()
        process.join()
        ours.close()


def _asked(pipe: Any) -> float:
    pipe.send(True)
    return float(pipe.recv())


# ------------------------------------------------------------------------------------------------------ this process


async def _with_connection(port: int, work: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
    connection = await connect(Endpoint(ClusterId(1), "bench", "client"), "127.0.0.1", port, timeout_ms=5_000)
    try:
        return await work(connection)
    finally:
        await connection.close()


def _cpu_per_call(
    method: Method[None, None], count: int, in_flight: int = IN_FLIGHT
) -> Callable[[Connection], Coroutine[Any, Any, float]]:
    async def work(connection: Connection) -> float:
        async def both_clocks() -> float:
            return time.process_time() + (await connection.call(CPU, None, timeout_ms=5_000)).value

        async def caller(calls: int) -> None:
            for _ in range(calls):
                await connection.call(method, None, SMALL, timeout_ms=60_000)

        await caller(1_000)
        before = await both_clocks()
        await asyncio.gather(*(caller(count // in_flight) for _ in range(in_flight)))
        return (await both_clocks() - before) / count * 1e6

    return work


async def _bare_cpu(port: int, pipe: Any, count: int, in_flight: int = IN_FLIGHT) -> float:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: _BareEcho(count, done), "127.0.0.1", port)
    before = time.process_time() + _asked(pipe)
    for _ in range(in_flight):
        transport.write(SMALL)
    await done
    spent = time.process_time() + _asked(pipe) - before
    transport.close()
    return spent / count * 1e6


class Bulk(Struct):
    """Large messages, each of which was checked to be complete."""

    rate: float
    """Megabytes per second by the clock."""
    cpu_us: float
    """Processor time of both processes for a megabyte."""


async def _bulk(connection: Connection, work: Callable[[], Coroutine[Any, Any, None]]) -> Bulk:
    async def both_clocks() -> float:
        return time.process_time() + (await connection.call(CPU, None, timeout_ms=5_000)).value

    before, started = await both_clocks(), time.perf_counter()
    await work()
    seconds = time.perf_counter() - started
    megabytes = LARGE_COUNT * len(LARGE) / 1e6
    return Bulk(megabytes / seconds, (await both_clocks() - before) / megabytes * 1e6)


async def _take(connection: Connection) -> Bulk:
    async def caller(calls: int) -> None:
        for _ in range(calls):
            received = await connection.call(TAKE, None, LARGE, timeout_ms=60_000)
            assert received.value == len(LARGE)

    async def work() -> None:
        await asyncio.gather(*(caller(LARGE_COUNT // LARGE_IN_FLIGHT) for _ in range(LARGE_IN_FLIGHT)))

    return await _bulk(connection, work)


async def _give(connection: Connection) -> Bulk:
    """Receive a stream of large items, with room for a few of them."""

    async def work() -> None:
        room = SharedCredit(2 * LARGE_IN_FLIGHT, LARGE_IN_FLIGHT * (len(LARGE) + 100))
        count = 0
        async with connection.open_stream(GIVE, LARGE_COUNT, credit=room) as stream:
            async for item in stream:
                assert len(item.body) == len(LARGE)
                count += 1
        assert count == LARGE_COUNT

    return await _bulk(connection, work)


def _sockets(port: int, pipe: Any) -> Bulk:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        before, started = time.process_time() + _asked(pipe), time.perf_counter()
        for i in range(LARGE_COUNT + LARGE_IN_FLIGHT):
            if i < LARGE_COUNT:
                sock.sendall(LARGE)
            if i >= LARGE_IN_FLIGHT:
                got = sock.recv(1)
                assert got == b"."
        seconds = time.perf_counter() - started
        megabytes = LARGE_COUNT * len(LARGE) / 1e6
        return Bulk(megabytes / seconds, (time.process_time() + _asked(pipe) - before) / megabytes * 1e6)


def _small_row(name: str, cost: float, reference: float) -> str:
    return f"| {name} | {cost:.1f} µs | {cost / reference:.1f} | CPU |"


def _bulk_row(name: str, rounds: list[Bulk], reference: float) -> str:
    cpu = median(one.cpu_us for one in rounds)
    rates = sorted(one.rate for one in rounds)
    return f"| {name} | {cpu:.0f} µs | {cpu / reference:.2f} | {rates[0]:.0f} to {rates[-1]:.0f} MB/s |"


def lines(count: int = 64_000) -> list[str]:
    """Return a section of the benchmark report, in Markdown."""
    small: dict[str, list[float]] = defaultdict(list)
    bulk: dict[str, list[Bulk]] = defaultdict(list)
    for _ in range(ROUNDS):
        with _process("bare") as (port, pipe):
            small["bare"].append(run(_bare_cpu(port, pipe, count)))
            small["bare few"].append(run(_bare_cpu(port, pipe, count // 4, FEW_IN_FLIGHT)))
            small["bare alone"].append(run(_bare_cpu(port, pipe, count // 8, 1)))
        with _process("wire") as (port, _):
            small["call"].append(run(_with_connection(port, _cpu_per_call(ECHO, count))))
            small["task"].append(run(_with_connection(port, _cpu_per_call(ECHO_LATER, count))))
            small["few"].append(run(_with_connection(port, _cpu_per_call(ECHO, count // 4, FEW_IN_FLIGHT))))
            small["alone"].append(run(_with_connection(port, _cpu_per_call(ECHO, count // 8, 1))))
            bulk["take"].append(run(_with_connection(port, _take)))
            bulk["give"].append(run(_with_connection(port, _give)))
        with _process("socket") as (port, pipe):
            bulk["socket"].append(_sockets(port, pipe))
    cost = {name: median(values) for name, values in small.items()}
    bare, few, alone = cost["bare"], cost["bare few"], cost["bare alone"]
    sockets = median(one.cpu_us for one in bulk["socket"])
    return [
        "## Wire",
        "",
        f"Client and server in two processes on loopback, {len(SMALL)} bytes there and back; processor time of both "
        f"together; the target is {CPU_TARGET_US} µs. With many in flight the bare protocol is no lower bound: it "
        "writes each message by itself, while a connection writes once per turn of the event loop. With one in flight "
        "nothing is shared, and both figures more than double when the processes run on different cores.",
        "",
        "| what | per message | ratio | limit |",
        "| --- | ---: | ---: | --- |",
        _small_row(f"bare asyncio protocol that echoes, {IN_FLIGHT} in flight (reference)", bare, bare),
        _small_row(f"call, handler answers at once, {IN_FLIGHT} in flight", cost["call"], bare),
        _small_row(f"call, handler is a coroutine, {IN_FLIGHT} in flight", cost["task"], bare),
        _small_row(f"bare, {FEW_IN_FLIGHT} in flight (reference)", few, few),
        _small_row(f"call, handler answers at once, {FEW_IN_FLIGHT} in flight", cost["few"], few),
        _small_row("bare, one in flight (reference)", alone, alone),
        _small_row("call, handler answers at once, one in flight", cost["alone"], alone),
        "",
        f"Bodies of 1 MB, {LARGE_IN_FLIGHT} in flight. Compare the processor time: the rate, given as the lowest and "
        "highest of all rounds, has differed between runs by more than a factor of two.",
        "",
        "| what | CPU per MB | ratio | rate |",
        "| --- | ---: | ---: | ---: |",
        _bulk_row("blocking sockets, one byte back (reference)", bulk["socket"], sockets),
        _bulk_row("requests", bulk["take"], sockets),
        _bulk_row("stream with credit", bulk["give"], sockets),
        "",
    ]


def main() -> int:
    print("\n".join(lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
