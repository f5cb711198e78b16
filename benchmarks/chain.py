"""The references of ``benchmarks.log``: bare chains of processes that store records on every disk, without Cutwater.

They have no order among several chains, no recovery and no identity: this is what the log adds. They use blocking
sockets, which cost the least. Data that arrives during a sync goes into the next one. There are two kinds:

- *in order*, the simplest: each process receives, verifies checksums, writes, calls ``fdatasync``, and then forwards
  the messages that it has received, one by one; the last process tells the client how many it has.
- *overlapping*, the fastest: each process forwards everything that it has received in one piece, before it writes it,
  and another of its threads syncs meanwhile, so all disks work at the same time. After its data each process sends down
  the chain how much of it is durable, and the last one tells the client how much is durable everywhere.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import google_crc32c
from msgspec import Struct

HEADER = struct.Struct("<II")
"""Length and CRC32C of the body. Length 0 is a mark: the number counts the messages that are durable up to here."""
COUNT = struct.Struct("<Q")
RECEIVE_BYTES = 4 * 1024 * 1024
TIMEOUT_SECONDS = 60.0
"""Limit for all waiting: a benchmark that hangs does not show why."""
WRITE_PIECES_MAX = 1_000
"""Maximum number of pieces in one ``writev``."""


class ChainFigures(Struct, frozen=True):
    """The results of one run of the client."""

    messages: int
    begun: float
    ended: float
    latencies: list[float]
    """Seconds of each message, if only one was in flight at a time."""


def _write_all(file: int, pieces: Sequence[bytes | memoryview]) -> None:
    for start in range(0, len(pieces), WRITE_PIECES_MAX):
        some = pieces[start : start + WRITE_PIECES_MAX]
        if os.writev(file, some) != sum(map(len, some)):
            raise OSError("the disk did not take all of a write")


class _InOrder:
    """One process of a chain that does one step after the other."""

    def __init__(self, path: Path, above: socket.socket, below: socket.socket, *, is_last: bool) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._above, self._below, self._is_last = above, below, is_last

    def run(self) -> None:
        buffer = memoryview(bytearray(RECEIVE_BYTES))
        filled = durable = 0
        while size := self._above.recv_into(buffer[filled:]):
            filled += size
            end = 0
            messages: list[memoryview] = []
            while filled - end >= HEADER.size:
                length, number = HEADER.unpack_from(buffer, end)
                start, after = end + HEADER.size, end + HEADER.size + length
                if after > filled:
                    break
                if google_crc32c.value(bytes(buffer[start:after])) != number:
                    raise ValueError("a message was damaged on the way")
                messages.append(buffer[end:after])
                end = after
            if not messages:
                continue
            _write_all(self._file, messages)
            os.fdatasync(self._file)
            durable += len(messages)
            for message in [COUNT.pack(durable)] if self._is_last else messages:
                self._below.sendall(message)
            buffer[: filled - end] = buffer[end:filled]
            filled -= end


class _Overlapping:
    """One process of a chain whose disks work at the same time. It receives from ``above`` and sends to ``below``; the
    last process sends to the client, which only gets counts."""

    def __init__(self, path: Path, above: socket.socket, below: socket.socket, *, is_first: bool, is_last: bool):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._above, self._below = above, below
        self._is_first, self._is_last = is_first, is_last
        self._sending = threading.Lock()
        self._marked = 0
        """Number of messages that are durable in all processes before this one."""
        self._durable = 0
        self._told = 0
        self._written: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        """Header and body of each message. The client limits the queue: no more can wait than it has in flight."""

    def run(self) -> None:
        writer = threading.Thread(target=self._write, daemon=True)
        writer.start()
        try:
            self._receive()
        finally:
            self._written.put(None)
            writer.join(TIMEOUT_SECONDS)
            os.close(self._file)

    def _receive(self) -> None:
        buffer = memoryview(bytearray(RECEIVE_BYTES))
        filled = 0
        while size := self._above.recv_into(buffer[filled:]):
            filled += size
            start = unsent = 0
            pieces: list[bytes] = []
            while filled - start >= HEADER.size:
                length, number = HEADER.unpack_from(buffer, start)
                end = start + HEADER.size + length
                if not length:
                    self._marked = number
                    self._hand_on(buffer[unsent:start])
                    unsent = end
                elif end > filled:
                    break
                else:
                    body = bytes(buffer[start + HEADER.size : end])
                    if google_crc32c.value(body) != number:
                        raise ValueError("a message was damaged on the way")
                    pieces += (HEADER.pack(length, number), body)
                start = end
            self._hand_on(buffer[unsent:start])
            if pieces:
                self._written.put(pieces)
            else:
                self._tell()
            if start:
                buffer[: filled - start] = buffer[start:filled]
                filled -= start

    def _hand_on(self, messages: memoryview) -> None:
        if messages and not self._is_last:
            with self._sending:
                self._below.sendall(messages)

    def _write(self) -> None:
        while (pieces := self._written.get()) is not None:
            while len(pieces) < WRITE_PIECES_MAX and not self._written.empty():
                more = self._written.get()
                if more is None:
                    return
                pieces += more
            _write_all(self._file, pieces)
            os.fdatasync(self._file)
            self._durable += len(pieces) // 2
            self._tell()

    def _tell(self) -> None:
        """Send how much is durable here and in all processes before."""
        with self._sending:
            everywhere = self._durable if self._is_first else min(self._durable, self._marked)
            if everywhere > self._told:
                self._told = everywhere
                self._below.sendall(COUNT.pack(everywhere) if self._is_last else HEADER.pack(0, everywhere))


def _serve(path: Path, below: int, tell: Connection, is_first: bool, is_last: bool, overlaps: bool) -> None:
    """Run one process: connect down the chain, listen, and serve the one connection that arrives."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(("127.0.0.1", below)) as out:
        tell.send(listening.getsockname()[1])
        listening.settimeout(TIMEOUT_SECONDS)
        above, _ = listening.accept()
        with above:
            above.settimeout(None)
            out.settimeout(None)
            _tune(above)
            _tune(out)
            if overlaps:
                _Overlapping(path, above, out, is_first=is_first, is_last=is_last).run()
            else:
                _InOrder(path, above, out, is_last=is_last).run()


def _tune(sock: socket.socket) -> None:
    # Buffer sizes are left to the kernel, which lets them grow further than a program may.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Chain:
    """A running chain, and its client."""

    def __init__(self, pids: list[int], out: socket.socket, back: socket.socket) -> None:
        self.pids = pids
        self._out, self._back = out, back
        self._sent = self._acked = 0
        self._rest = b""

    def run(self, message: bytes, in_flight: int, seconds: float) -> ChainFigures:
        """Send the same message repeatedly for ``seconds``, and wait until all are durable everywhere."""
        framed = HEADER.pack(len(message), google_crc32c.value(message)) + message
        first, latencies = self._acked, list[float]()
        begun = now = time.monotonic()
        while now < begun + seconds:
            while self._sent - self._acked < in_flight:
                self._out.sendall(framed)
                self._sent += 1
            self._hear()
            before, now = now, time.monotonic()
            if in_flight == 1:
                latencies.append(now - before)
        while self._acked < self._sent:
            self._hear()
        return ChainFigures(self._acked - first, begun, time.monotonic(), latencies)

    def _hear(self) -> None:
        data = self._rest + self._back.recv(4096)
        whole = len(data) - len(data) % COUNT.size
        if whole:
            (self._acked,) = COUNT.unpack_from(data, whole - COUNT.size)
        elif len(data) == len(self._rest):
            raise ConnectionError("the chain ended early")
        self._rest = data[whole:]


@contextmanager
def chain(folder: Path, length: int, *, overlaps: bool) -> Iterator[Chain]:
    """Run a chain of ``length`` processes, whose files are in ``folder``: ``chain0``, ``chain1``, …"""
    folder.mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    with ExitStack() as stack:
        stack.callback(_end, processes)
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.settimeout(TIMEOUT_SECONDS)
        port: int = listening.getsockname()[1]
        back: socket.socket | None = None
        for place in reversed(range(length)):
            told, tell = spawn.Pipe(duplex=False)
            arguments = (folder / f"chain{place}", port, tell, place == 0, place == length - 1, overlaps)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            processes.append(process)
            if not told.poll(TIMEOUT_SECONDS):
                raise TimeoutError("a process of the bare chain did not start")
            port = told.recv()
            if back is None:
                back = stack.enter_context(listening.accept()[0])
        assert back is not None
        out = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        for sock in (out, back):
            sock.settimeout(TIMEOUT_SECONDS)
            _tune(sock)
        yield Chain([process.pid or 0 for process in reversed(processes)], out, back)


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()
