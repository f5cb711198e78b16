"""Records a conversation: every frame between clients, storage nodes and a metadata node, on its way through proxies.

``test_conversation.py`` decodes what an earlier version said, encodes it again, and says the part of a client to
servers of the present code. Run it with the package that is meant on the path, in a checkout of its tag:

    PYTHONPATH=src python tests/upgrade/record.py tests/upgrade/0.1.0.conversation.xz

The file is MessagePack, compressed: a map of

===============  =====================================================================================================
``version``      of Cutwater
``script``       questions of a client that does without the library, to a cluster that was just made; of each its name,
                 whom it asks (``metadata``, or the number of a log stream, for its head), the frames that it sends, and
                 those that come back
``connections``  everything else, by connection: to whom it was made, and pairs of "from the side that connected" and a
                 frame, in the order in which they passed
``metrics``      names and types of what both kinds of servers show to Prometheus
===============  =====================================================================================================

Keys and tokens in it were made for this and guard nothing.
"""

from __future__ import annotations

import asyncio
import datetime
import lzma
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import pyarrow as pa

import cutwater

PLACE = Path("/tmp/cutwater-upgrade")
"""It is in the frames, and says nothing about the machine."""
HOST = "127.0.0.1"
CLUSTER_NUMBER = 7
FIXED = struct.Struct("<IIQBB")
HELLO, WELCOME, REQUEST, STREAM_OPEN, STREAM_ITEM, CANCEL, PING, GOAWAY = 1, 2, 3, 6, 7, 11, 13, 15
LIMITS = [16 << 20, 1 << 20, 1_024, 64 << 20]
TIMEOUT_MS = 10_000
EVENT_TIME = 1_767_225_600_000_000
KEY_VALUE = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("timestamp", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("headers", pa.map_(pa.string(), pa.binary())),
    ]
)
TYPED = pa.schema([pa.field("n", pa.int64()), pa.field("at", pa.timestamp("us", "UTC"), nullable=False)])


def frame(kind: int, call: int, header: Any = None, body: bytes = b"", *, empty: bool = False) -> bytes:
    """``empty``: a kind without a header."""
    encoded = b"" if empty else msgspec.msgpack.encode(header)
    return FIXED.pack(len(body), len(encoded), call, kind, 0) + encoded + body


def kind_of(data: bytes) -> int:
    return data[16]


def header_of(data: bytes) -> Any:
    size = FIXED.unpack_from(data)[1]
    return msgspec.msgpack.decode(data[FIXED.size : FIXED.size + size])


class Splitter:
    """Bytes in, frames out."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> list[bytes]:
        self._data += data
        found = []
        while len(self._data) >= FIXED.size:
            body, header, *_ = FIXED.unpack_from(self._data)
            end = FIXED.size + body + header
            if len(self._data) < end:
                break
            found.append(self._data[:end])
            self._data = self._data[end:]
        return found


# A client without the library.


class Raw:
    """Says frames to a server and hears frames."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        self._splitter, self._frames = Splitter(), []

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> bytes:
        while not self._frames:
            data = self._socket.recv(1 << 16)
            assert data, "the server has closed the connection"
            self._frames += self._splitter.feed(data)
        return self._frames.pop(0)

    def close(self) -> None:
        self._socket.close()

    def ask(self, call: int, method: str, argument: Any) -> Any:
        self.send(frame(REQUEST, call, [method, TIMEOUT_MS, argument]))
        return header_of(self.receive())


def hello(role: str = "client", token: str = "") -> bytes:
    return frame(HELLO, 0, ["cutwater", 1, 2, CLUSTER_NUMBER, role, "", token, LIMITS, b"", b"", ""])


def old_hello() -> bytes:
    """As version 1 of the protocol says it."""
    return frame(HELLO, 0, ["cutwater", 1, 1, 0, "client", "", "", LIMITS])


def greeted(address: str) -> Raw:
    connection = Raw(address)
    connection.send(hello())
    assert kind_of(connection.receive()) == WELCOME
    return connection


def catalog_at(address: str) -> dict[str, Any]:
    connection = greeted(address)
    try:
        found: dict[str, Any] = connection.ask(1, "ask", {"type": "CatalogRequest"})
        return found
    finally:
        connection.close()


def until(holds: Callable[[], Any], what: str) -> Any:
    for _ in range(600):
        with suppress(OSError, AssertionError, KeyError, TypeError, ValueError):
            found = holds()
            if found:
                return found
        time.sleep(0.05)
    raise AssertionError(f"not within 30 s: {what}")


def head_of(metadata: str, stream: int) -> str:
    """Where the head of a log stream listens, as soon as it takes appends."""

    def look() -> str:
        catalog = catalog_at(metadata)
        (found,) = (s for s in catalog["streams"] if s["stream"] == stream and s["is_open"])
        (node,) = (n for n in catalog["nodes"] if n["node"] == found["chain"][0])
        return str(node["address"])

    return str(until(look, f"log stream {stream} is open"))


def batch_of(schema: pa.Schema, columns: list[Any], times: list[int], number: int, **more: Any) -> tuple[Any, bytes]:
    """A batch as it is told in an append, and its body."""
    body = pa.record_batch(columns, schema=schema).serialize().to_pybytes()
    told = {
        "count": len(times),
        "body": b"",
        "checksum": int(google_crc32c.value(body)),
        "time_min": min(times),
        "time_max": max(times),
        "kind": 0,
        "producer": None,
        "declared": None,
        "schema": number,
        "more": False,
        "group": None,
        "idle": False,
        "checked": False,
    }
    return {**told, **more}, body


def plain_batch(values: list[bytes], **more: Any) -> tuple[Any, bytes]:
    times = [EVENT_TIME + i for i in range(len(values))]
    nothing = pa.nulls(len(values), KEY_VALUE.field("headers").type)
    columns = [pa.array([b"k"] * len(values)), pa.array(values), pa.array(times, KEY_VALUE.field(2).type), nothing]
    return batch_of(KEY_VALUE, columns, times, 0, **more)


def script() -> list[tuple[str, str | int, list[bytes], int]]:
    """Name, whom to ask, what to say, and how many frames to wait for; the same each time. The first topic has log
    stream 1, the second one log stream 2."""
    calls = iter(range(1, 1_000))
    steps: list[tuple[str, str | int, list[bytes], int]] = []

    def ask(whom: str | int, name: str, method: str, argument: Any, body: bytes = b"") -> None:
        steps.append((name, whom, [frame(REQUEST, next(calls), [method, TIMEOUT_MS, argument], body)], 1))

    def request(kind: str, **fields: Any) -> None:
        ask("metadata", kind, "ask", {"type": kind, **fields})

    def append(name: str, stream: int, batch: tuple[Any, bytes], epoch: int = 1, if_llsn: int | None = None) -> None:
        argument = {"stream": stream, "epoch": epoch, "batch": batch[0], "if_llsn": if_llsn}
        ask(stream, name, "append", argument, batch[1])

    forever = {"time_us": 0, "bytes": 0}
    steps.append(("a client of version 1", "new metadata", [old_hello()], 1))
    steps.append(
        (
            "a client of another cluster",
            "new metadata",
            [hello().replace(b"\x02\x07\xa6client", b"\x02\x08\xa6client")],
            1,
        )
    )
    ask("metadata", "who_leads", "who_leads", None)
    rest = {"retention": forever, "event_time_ahead_us": 0}
    request("CreateTopicRequest", name="plain", streams=1, replication=1, schema=b"", event_time="", **rest)
    schema = TYPED.serialize().to_pybytes()
    request("CreateTopicRequest", name="typed", streams=1, replication=1, schema=schema, event_time="at", **rest)
    append("append plain", 1, plain_batch([b"one", b"two"]))
    append("append with a watermark", 1, plain_batch([b"three"], declared=EVENT_TIME - 5, idle=True))
    columns = [pa.array([1, None]), pa.array([EVENT_TIME, EVENT_TIME + 9], TYPED.field("at").type)]
    append("append typed", 2, batch_of(TYPED, columns, [EVENT_TIME, EVENT_TIME + 9], 1))
    append("append on a condition", 1, plain_batch([b"four"]), if_llsn=4)
    append("append on a condition that does not hold", 1, plain_batch([b"five"]), if_llsn=4)
    append("append to an epoch that is over", 1, plain_batch([b"five"]), epoch=9)
    append("append with a checksum that is wrong", 1, plain_batch([b"five"], checksum=1))
    read = {"stream": 1, "from_glsn": 1, "bytes_max": 1 << 20, "projection": {}}
    ask(1, "read", "read", read)
    ask(2, "read typed", "read", {**read, "stream": 2})
    picked = {1: {"schema": schema, "columns": ["n"], "event_time": "at"}}
    ask(2, "read some columns", "read", {**read, "stream": 2, "projection": picked})
    ask(1, "find", "find", {"stream": 1, "time": 0, "bytes_max": 0})
    ask(1, "event_time", "event_time", {"stream": 1, "at": 1 << 40})
    ask(1, "measure", "measure", {"stream": 1, "positions": [0, 1 << 40]})
    ranged = {"stream": 1, "from_glsn": 1, "to_glsn": 1 << 40}
    ask(1, "heads", "heads", {**ranged, "heads_max": 100, "with_idle": True})
    ask(1, "groups", "groups", {**ranged, "heads_max": 100, "with_idle": False})
    more = {"projection": {}, "opens_files": False, "file_bytes_max": 0, "tells_checked": True}
    ask(1, "scan", "scan", {**ranged, "bytes_max": 1 << 20, **more})
    for method in ("status", "describe", "staged", "verify_staged"):
        ask(1, method, method, None)
    ask(1, "verify", "verify", 1)
    follow = {"stream": 1, "from_glsn": 1, "bytes_max": 1 << 20, "projection": {}}
    call = next(calls)
    opened = frame(STREAM_OPEN, call, ["follow", 0, follow, 100, 1 << 20])
    steps.append(("follow", 1, [opened], 1))
    steps.append(("end of follow", 1, [frame(CANCEL, call, empty=True)], 0))
    request("OpenProducerRequest", producer="p", topic="plain", session=12_345)
    request("CommitCursorRequest", cursor="c", glsn=2)
    request("ReadCursorRequest", cursor="c")
    request("DropCursorRequest", cursor="c")
    request("ReadCursorRequest", cursor="c")
    begin = {"position": None, "key": "", "batch": -1, "replay": False, "what": ""}
    request("OpenRunRequest", name="totals", key="k", once=False, start=begin, is_question=False)
    request("PublishRequest", run=1, batch=0, parts=[], position=None)
    request("CatalogRequest")
    request("DescribeRequest")
    request("EventsRequest", after=0)
    request("ClockRequest", after=0, limit=100)
    request("TrimRequest", topic="plain", before=2)
    request("DeleteTopicRequest", name="nowhere")
    request("JoinRequest", node=1, address="", key="", volumes=[], server_key="", asked_at="")
    ask("metadata", "a method that nobody knows", "dance", None)
    ask("metadata", "an argument that makes no sense", "ask", {"type": "Dance"})
    ask("metadata", "what only servers may ask", "meet", {"node": 1})
    steps.append(("ping", "metadata", [frame(PING, 77, empty=True)], 1))
    steps.append(("goodbye", "metadata", [frame(GOAWAY, 0, [None])], 1))
    return steps


class Player:
    """Says a script to a cluster."""

    def __init__(self, metadata: str) -> None:
        self._metadata = metadata
        self._connections: dict[str | int, Raw] = {}

    def play(self, whom: str | int, sent: list[bytes], count: int) -> list[bytes]:
        """The frames that come back."""
        connection = self._to(whom)
        for data in sent:
            connection.send(data)
        found: list[bytes] = []
        while len(found) < count:
            heard = connection.receive()
            # What else a stream has to say comes when it likes.
            if not (kind_of(heard) == STREAM_ITEM and kind_of(sent[0]) != STREAM_OPEN):
                found.append(heard)
        if whom == "new metadata":
            connection.close()
        return found

    def _to(self, whom: str | int) -> Raw:
        if whom == "new metadata":
            return Raw(self._metadata)
        if whom not in self._connections:
            address = head_of(self._metadata, whom) if isinstance(whom, int) else self._metadata
            self._connections[whom] = greeted(address)
        return self._connections[whom]

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


# Proxies.


class Proxies:
    """Pass everything on, and keep it; on an event loop in a thread of its own."""

    def __init__(self) -> None:
        self.connections: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def add(self, name: str, target: int) -> str:
        """Where a proxy listens that leads to this port."""

        async def start() -> int:
            server = await asyncio.start_server(lambda r, w: self._accept(name, target, r, w), HOST, 0)
            return int(server.sockets[0].getsockname()[1])

        return f"{HOST}:{asyncio.run_coroutine_threadsafe(start(), self._loop).result()}"

    async def _accept(self, name: str, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inward, outward = await asyncio.open_connection(HOST, target)
        except OSError:
            writer.close()
            return
        frames: list[tuple[bool, bytes]] = []
        self.connections.append({"to": name, "frames": frames})
        await asyncio.gather(
            self._pump(reader, outward, True, frames), self._pump(inward, writer, False, frames), return_exceptions=True
        )

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_asker: bool, frames: list[Any]
    ) -> None:
        splitter = Splitter()
        while data := await reader.read(1 << 16):
            frames += [(is_asker, found) for found in splitter.feed(data)]
            writer.write(data)
        writer.close()


# The cluster.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def command(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cutwater.cli", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)


class Cluster:
    """A metadata node and two storage nodes, each behind a proxy."""

    def __init__(self, proxies: Proxies) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self.metrics: list[int] = []
        port = free_port()
        self.metadata = proxies.add("metadata", port)
        store = f"sqlite:{PLACE / 'metadata.sqlite'}"
        self._start("mr", 1, "--store", store, "--listen", f"{HOST}:{port}", "--advertise", self.metadata)
        self.servers = f"cutwater://{self.metadata}"
        for number in (1, 2):
            port, volume = free_port(), PLACE / f"sn{number}"
            volume.mkdir()
            address = proxies.add(f"node {number}", port)
            where = ("--metadata", self.metadata, "--listen", f"{HOST}:{port}", "--advertise", address)
            self._start("sn", number, "--volumes", str(volume), *where, "--reserve-mib", "0")
            until(lambda port=port: socket.create_connection((HOST, port)).close() is None, "it listens")
            command("sn", "add", address, "--servers", self.servers)

    def _start(self, kind: str, number: int, *arguments: str) -> None:
        self.metrics.append(free_port())
        told = ("--cluster-id", str(CLUSTER_NUMBER), "--id", str(number), "--metrics", f"{HOST}:{self.metrics[-1]}")
        with (PLACE / f"{kind}{number}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "cutwater.cli", kind, "start", *told, *arguments], stdout=log, stderr=log
                )
            )

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            process.wait(20)


def metrics_at(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics") as answer:
        text = answer.read().decode()
    return sorted(line.removeprefix("# TYPE ") for line in text.splitlines() if line.startswith("# TYPE cutwater_"))


def session(servers: str) -> None:
    """What the library says, for nearly everything that it can do."""
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    with cutwater.connect(servers, compression="zstd", cluster=CLUSTER_NUMBER) as log:
        first, second = log.create_topic("orders", streams=2, replication=2).streams
        ack = log.append("orders", b"one", key=b"k", headers={"h": b"v"}, timestamp=at, stream=first)
        with log.subscribe("orders", start=ack.glsn) as following:
            log.append("orders", [b"two"] * 3, timestamp=at, stream=second)
            assert next(following).value == b"one"
            log.append("orders", b"five", timestamp=at, stream=first, watermark=at, if_llsn=2)
            assert [next(following).value for _ in range(4)][-1] == b"five"
        log.declare("orders", watermark=at, idle=True)
        log.create_topic("payments", schema=TYPED, event_time="at", replication=2)
        log.append("payments", pa.table({"n": [1, 2], "at": [EVENT_TIME, EVENT_TIME]}).cast(TYPED))
        log.change_topic("payments", schema=TYPED.append(pa.field("more", pa.string())))
        log.table("payments", columns=["n"])
        log.read(ack.glsn)
        log.find(at)
        log.watermark("orders", punctuated=True)
        log.cursor("c").commit(ack.glsn)
        log.cursor("c").get()
        with log.producer("orders", id="billing-1") as producer:
            producer.send(b"once", timestamp=at).result()
            producer.send([b"once"] * 2, timestamp=at).result()
        run = log.open_run("sums", "key")
        parts = [log.stage(run, 0, "orders", [b"a", b"b"]), log.stage(run, 0, "payments", [{"n": 3, "at": at}])]
        log.publish(run, 0, parts, position=ack.glsn)
        log.find_runs("sums")
        log.trim("orders", before=ack.glsn + 1)
        for refused in (lambda: log.read(ack.glsn), lambda: log.append("nowhere", b"x"), lambda: log.read(1 << 40)):
            with suppress(cutwater.CutwaterError):
                refused()
        log.delete_topic("payments")
    for asked in (("seal", str(first)), ("unseal", str(first)), ("describe", str(first))):
        command("stream", *asked, "--servers", servers)
    for other in (("verify",), ("run", "list"), ("cluster", "events")):
        command(*other, "--servers", servers)


def main() -> None:
    target = Path(sys.argv[1]).resolve()
    print(f"cutwater {cutwater.__version__} of {Path(cutwater.__file__).parent}")
    PLACE.mkdir()
    proxies = Proxies()
    cluster = Cluster(proxies)
    try:
        player = Player(cluster.metadata)
        steps = [
            {"name": name, "whom": whom, "sent": sent, "heard": player.play(whom, sent, count)}
            for name, whom, sent, count in script()
        ]
        player.close()
        session(cluster.servers)
        metrics = {"mr": metrics_at(cluster.metrics[0]), "sn": metrics_at(cluster.metrics[1])}
    finally:
        cluster.stop()
    told = {
        "version": cutwater.__version__,
        "script": steps,
        "connections": proxies.connections,
        "metrics": metrics,
    }
    data = msgspec.msgpack.encode(told)
    assert str(Path.home()).encode() + b"/" not in data
    target.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    shutil.rmtree(PLACE)
    frames = sum(len(connection["frames"]) for connection in proxies.connections)
    print(f"{target.name}: {frames} frames of {len(proxies.connections)} connections, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
