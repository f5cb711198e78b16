"""What the wire costs: client and server in two processes on loopback, next to the barest thing that does the same.

Processor time is that of both processes together. ``make bench`` includes ``lines()``; run alone, it prints them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from cutwater.types import ClusterId
from cutwater.wire.client import connect
from cutwater.wire.connection import Connection
from cutwater.wire.handshake import Endpoint
from cutwater.wire.loops import run
from cutwater.wire.methods import Method, Methods, Reply, StreamMethod
from cutwater.wire.server import listen
from cutwater.wire.serving import Call
from cutwater.wire.streams import SharedCredit, StreamSender

SMALL = b"x" * 100
LARGE = bytes(1_000_000)
IN_FLIGHT = 64
LARGE_IN_FLIGHT = 4
ROUNDS = 3
CPU_TARGET_US = 40

ECHO = Method[None, None]("echo", None, None)
ECHO_LATER = Method[None, None]("echo_in_a_task", None, None)
TAKE = Method[None, None]("take", None, None)
GIVE = StreamMethod[int, None]("give", int, None)
CPU = Method[None, float]("cpu", None, float)

methods = Methods()


@methods.answers(ECHO)
def echo(call: Call[None]) -> Reply[None]:
    return Reply(None, call.body)


@methods.answers(ECHO_LATER)
async def echo_in_a_task(call: Call[None]) -> Reply[None]:
    return Reply(None, call.body)


@methods.answers(TAKE)
def take(call: Call[None]) -> None:
    return None


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
    """The least that a protocol of asyncio does for a message: cut it out, send it back."""

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
    """Processes that do not speak the protocol tell their processor time through the pipe, from a thread."""
    import threading  # noqa: PLC0415

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


async def _with_connection(port: int, work: Callable[[Connection], Coroutine[Any, Any, float]]) -> float:
    connection = await connect(Endpoint(ClusterId(1), "bench", "client"), "127.0.0.1", port, timeout_ms=5_000)
    try:
        return await work(connection)
    finally:
        await connection.close()


def _cpu_per_call(method: Method[None, None], count: int) -> Callable[[Connection], Coroutine[Any, Any, float]]:
    async def work(connection: Connection) -> float:
        async def both_clocks() -> float:
            return time.process_time() + (await connection.call(CPU, None, timeout_ms=5_000)).value

        async def caller(calls: int) -> None:
            for _ in range(calls):
                await connection.call(method, None, SMALL, timeout_ms=60_000)

        await caller(1_000)
        before = await both_clocks()
        await asyncio.gather(*(caller(count // IN_FLIGHT) for _ in range(IN_FLIGHT)))
        return (await both_clocks() - before) / count * 1e6

    return work


async def _bare_cpu(port: int, pipe: Any, count: int) -> float:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: _BareEcho(count, done), "127.0.0.1", port)
    before = time.process_time() + _asked(pipe)
    for _ in range(IN_FLIGHT):
        transport.write(SMALL)
    await done
    spent = time.process_time() + _asked(pipe) - before
    transport.close()
    return spent / count * 1e6


async def _take_rate(connection: Connection) -> float:
    """Megabytes per second of large requests."""
    count = 400

    async def caller(calls: int) -> None:
        for _ in range(calls):
            await connection.call(TAKE, None, LARGE, timeout_ms=60_000)

    started = time.perf_counter()
    await asyncio.gather(*(caller(count // LARGE_IN_FLIGHT) for _ in range(LARGE_IN_FLIGHT)))
    return count / (time.perf_counter() - started)


async def _give_rate(connection: Connection) -> float:
    """Megabytes per second of a stream of large items, with room for a few of them."""
    count = 400
    started = time.perf_counter()
    room = SharedCredit(2 * LARGE_IN_FLIGHT, LARGE_IN_FLIGHT * (len(LARGE) + 100), 1)
    async with connection.open_stream(GIVE, count, credit=room) as stream:
        async for item in stream:
            assert len(item.body) == len(LARGE)
    return count / (time.perf_counter() - started)


def _socket_rate(port: int) -> float:
    count = 400
    with socket.create_connection(("127.0.0.1", port)) as sock:
        started = time.perf_counter()
        for i in range(count + LARGE_IN_FLIGHT):
            if i < count:
                sock.sendall(LARGE)
            if i >= LARGE_IN_FLIGHT:
                sock.recv(1)
        return count / (time.perf_counter() - started)


def lines(count: int = 64_000) -> list[str]:
    """A section of the benchmark report, in Markdown."""
    figures: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        with _process("bare") as (port, pipe):
            figures.setdefault("bare", []).append(run(_bare_cpu(port, pipe, count)))
        with _process("wire") as (port, _):
            for name, work in {
                "call": _cpu_per_call(ECHO, count),
                "task": _cpu_per_call(ECHO_LATER, count),
                "take": _take_rate,
                "give": _give_rate,
            }.items():
                figures.setdefault(name, []).append(run(_with_connection(port, work)))
        with _process("socket") as (port, _):
            figures.setdefault("socket", []).append(_socket_rate(port))
    middle = {name: median(values) for name, values in figures.items()}
    bare, sockets = middle["bare"], middle["socket"]
    return [
        "## Wire",
        "",
        f"Client and server in two processes on loopback, {len(SMALL)} bytes there and back, {IN_FLIGHT} in flight; "
        f"processor time of both together. The target is {CPU_TARGET_US} µs.",
        "",
        "| what | per message | ratio | limit |",
        "| --- | ---: | ---: | --- |",
        f"| bare asyncio protocol that echoes (reference) | {bare:.1f} µs | 1 | CPU |",
        f"| call, handler answers at once | {middle['call']:.1f} µs | {middle['call'] / bare:.1f} | CPU |",
        f"| call, handler is a coroutine | {middle['task']:.1f} µs | {middle['task'] / bare:.1f} | CPU |",
        "",
        f"Bodies of 1 MB, {LARGE_IN_FLIGHT} in flight:",
        "",
        "| what | rate | ratio | limit |",
        "| --- | ---: | ---: | --- |",
        f"| blocking sockets, one byte back (reference) | {sockets:.0f} MB/s | 1 | CPU |",
        f"| requests | {middle['take']:.0f} MB/s | {middle['take'] / sockets:.2f} | CPU |",
        f"| stream with credit | {middle['give']:.0f} MB/s | {middle['give'] / sockets:.2f} | CPU |",
        "",
    ]


def main() -> int:
    print("\n".join(lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
