"""What earlier versions have said over the wire is understood, and is still said in the same bytes; and a client of
that time gets the same answers.

Each conversation was recorded with the version in its name, by ``record.py``.
"""

from __future__ import annotations

import asyncio
import lzma
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from cutwater.format.entry_codec import encode_frame as encode_entry
from cutwater.format.entry_codec import frames_in
from cutwater.metadata.metrics import MetadataCollector
from cutwater.protocol import metadata_api, scan_api, storage_api
from cutwater.protocol.methods import Method, Notice, StreamMethod
from cutwater.storagenode.metrics import NodeCollector
from cutwater.wire.codec import FrameDecoder, encode_frame
from cutwater.wire.identity.handshake import ANY_CLUSTER, Endpoint, judge_proof, judge_welcome
from cutwater.wire.messages import (
    ENCODE,
    FIXED_BYTES,
    HEADERS,
    FrameKind,
    Hello,
    ItemHeader,
    NotifyHeader,
    OpenHeader,
    RequestHeader,
    Welcome,
    WireFrame,
)
from tests.integration.log_cluster import CLUSTER, LogCluster, with_log
from tests.upgrade import record
from tests.upgrade.surface import metrics_in

pytestmark = pytest.mark.timeout(60)

RECORDED = sorted(Path(__file__).parent.glob("*.conversation.xz"))
NAMES = [path.name.removesuffix(".conversation.xz") for path in RECORDED]

METHODS: dict[tuple[type, str], Any] = {
    (type(found), found.name): found
    for module in (metadata_api, scan_api, storage_api)
    for found in vars(module).values()
    if isinstance(found, Method | StreamMethod | Notice)
}
BODIES_OF_ENTRIES = {"read", "follow", "copy", "fetch", "stage"}
"""Methods whose bodies, of questions or of answers, are entries."""
NO_METHODS = {"dance": None, "ask": {"type": "Dance"}}
"""What the client without the library says on purpose although nobody understands it."""


@pytest.fixture(params=RECORDED, ids=NAMES, scope="module")
def recorded(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.msgpack.decode(lzma.decompress(request.param.read_bytes()), strict=True)
    return found


def decoded(data: bytes) -> WireFrame:
    decoder = FrameDecoder(1 << 24, 1 << 20)
    decoder.feed(data)
    found = decoder.next_frame()
    assert found is not None
    assert decoder.next_frame() is None
    assert not decoder.is_amid_frame
    return found


class Reader:
    """Understands the frames of one connection, in their order, and says each of them again."""

    def __init__(self) -> None:
        self._asked: dict[tuple[bool, int], Any] = {}
        """The methods of calls, by who asked and which number the call has."""
        self.greetings: dict[FrameKind, bytes] = {}
        self.seen: Counter[str] = Counter()

    def again(self, is_asker: bool, data: bytes) -> bytes:
        """The same frame, encoded anew from what it means."""
        frame = decoded(data)
        kind = FrameKind(frame.kind)
        self.seen[kind.name] += 1
        header = self._header(is_asker, kind, frame)
        return encode_frame(frame.kind, frame.call, b"" if HEADERS[kind] is None else ENCODE(header), bytes(frame.body))

    def _header(self, is_asker: bool, kind: FrameKind, frame: WireFrame) -> object:
        header = frame.header
        if kind in (FrameKind.HELLO, FrameKind.WELCOME, FrameKind.PROOF):
            self.greetings[kind] = bytes(header) if kind is not FrameKind.PROOF else header.signature
            return header if kind is FrameKind.PROOF else msgspec.msgpack.decode(header, type=GREETINGS[kind])
        if kind is FrameKind.REQUEST:
            argument = self._argument(Method, header, is_asker, frame)
            return RequestHeader(header.method, header.timeout_ms, argument)
        if kind is FrameKind.STREAM_OPEN:
            argument = self._argument(StreamMethod, header, is_asker, frame)
            return OpenHeader(header.method, header.timeout_ms, argument, header.items, header.bytes)
        if kind is FrameKind.NOTIFY:
            return NotifyHeader(header.method, self._argument(Notice, header, is_asker, frame))
        if kind is FrameKind.RESPONSE:
            return self._result(is_asker, frame, header)
        if kind is FrameKind.STREAM_ITEM:
            value = Raw(ENCODE(self._result(is_asker, frame, header.value)))
            return ItemHeader(header.backlog_items, header.backlog_bytes, value)
        return header

    def _argument(self, kind: type, header: Any, is_asker: bool, frame: WireFrame) -> Raw:
        method = METHODS.get((kind, header.method))
        if kind is not Notice:
            self._asked[is_asker, frame.call] = method
        if NO_METHODS.get(header.method, ...) == msgspec.msgpack.decode(header.argument):
            return Raw(header.argument)
        self.seen[f"{kind.__name__} {method.name}"] += 1
        argument = method.argument_of(header.argument)
        if method.name == "ask":
            self.seen[type(argument).__name__] += 1
        if method.name == "leader_says":
            self.seen[type(argument).__name__] += 1
        self._entries(method.name, frame)
        return Raw(ENCODE(argument))

    def _result(self, is_asker: bool, frame: WireFrame, raw: Any) -> Any:
        method = self._asked[not is_asker, frame.call]
        value = method.result_of(raw)
        self.seen[f"answer of {method.name}"] += 1
        self._entries(method.name, frame)
        return value

    def _entries(self, method: str, frame: WireFrame) -> None:
        if method in BODIES_OF_ENTRIES and len(frame.body):
            for entry in frames_in(frame.body):
                start, end = encode_entry(entry.entry, entry.header.running)
                assert start + bytes(entry.body) + end == bytes(entry.data)
                self.seen["entry"] += 1


GREETINGS: dict[FrameKind, type] = {FrameKind.HELLO: Hello, FrameKind.WELCOME: Welcome}


SHORTER = (record.old_hello(),)
"""Frames that the present code says with more fields: the greeting of version 1 ends before those of version 2."""


def differing(reader: Reader, frames: list[tuple[bool, bytes]]) -> Iterator[str]:
    for is_asker, data in frames:
        again = reader.again(is_asker, data)
        if again != data and data not in SHORTER:
            yield f"{data.hex(' ')}\nis now\n{again.hex(' ')}"


def test_every_frame_is_understood_and_said_in_the_same_bytes(recorded: dict[str, Any]) -> None:
    seen: Counter[str] = Counter()
    for connection in recorded["connections"]:
        reader = Reader()
        assert list(differing(reader, connection["frames"])) == []
        seen += reader.seen
    for name in SAID:
        assert seen[name], f"nobody said {name}"


SAID = (
    *("HELLO WELCOME PROOF REQUEST RESPONSE ERROR STREAM_OPEN STREAM_ITEM CANCEL NOTIFY GOAWAY entry".split()),
    *(f"Method {name}" for name in "ask join append read find event_time status stage finish_part verify".split()),
    *(f"answer of {name}" for name in "ask join append read find event_time status stage finish_part verify".split()),
    *(f"Notice {name}" for name in "report leader_says addresses replicate group_outcome".split()),
    "StreamMethod follow",
    "answer of follow",
    *("CatalogRequest CreateTopicRequest OpenProducerRequest CommitCursorRequest PublishRequest SealRequest".split()),
    *("CommitMessage CreateReplica SealReplica UnsealReplica TrimReplica DropReplica PublishGroup".split()),
)
"""What was said at least once, so that the test above means something."""


def test_proofs_of_that_time_hold(recorded: dict[str, Any]) -> None:
    """Signatures cover greetings as they travelled."""
    proved = 0
    for connection in recorded["connections"]:
        found = {FrameKind(record.kind_of(data)): bytes(data) for _, data in connection["frames"][:3]}
        if FrameKind.PROOF not in found:
            continue
        hello, welcome = (bytes(decoded(found[kind]).header) for kind in (FrameKind.HELLO, FrameKind.WELCOME))
        peer, wants_proof = judge_welcome(Endpoint(ANY_CLUSTER, "storage node"), hello, Raw(welcome), "")
        assert peer.server is not None
        assert wants_proof
        prover = judge_proof(hello, welcome, decoded(found[FrameKind.PROOF]).header.signature, "")
        assert prover.key == msgspec.msgpack.decode(hello, type=Hello).key.hex() != peer.server.key
        proved += 1
    assert proved >= 2


# The part of the client, said to servers of the present code.


VOLATILE = {
    *("glsn first_glsn last_glsn committed_glsn_offset high_watermark prev_high_watermark complete_through".split()),
    *("cut_time created_time created_at time since since_us silent_us age_us index oldest history".split()),
    *("revision address cluster_key leader_address leader_epoch incarnation".split()),
    *("volumes total_bytes free_bytes path checksum version applied_high_watermark decided".split()),
}
"""Fields that differ each time."""
AS_MANY_AS_IT_HAPPENS = {"events", "marks"}
WORDS = {"what", "reason", "next_step", "problem", "kind"}


def types_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: types_of(inner) for key, inner in value.items()}
    return type(value).__name__


def shape(value: Any, name: str = "") -> Any:
    """The value, with only the types of what differs each time."""
    if name in VOLATILE or name in WORDS:
        return type(value).__name__
    if name in AS_MANY_AS_IT_HAPPENS:
        assert value
        return types_of(value[0])
    if isinstance(value, dict):
        return {key: shape(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner, name) for inner in value]
    return value


EXACT_BODIES = {"read", "read typed", "read some columns", "follow"}
"""Steps whose answers have a body that is the same each time: stored entries."""


def answer_of(data: bytes) -> tuple[FrameKind, Any, bytes]:
    frame = decoded(data)
    kind = FrameKind(frame.kind)
    if kind in (FrameKind.PONG, FrameKind.STREAM_END):
        return kind, None, b""
    header_bytes = struct.unpack_from("<I", data, 4)[0]
    return kind, msgspec.msgpack.decode(data[FIXED_BYTES : FIXED_BYTES + header_bytes]), bytes(frame.body)


def check_same(name: str, before: bytes, now: bytes) -> None:
    kind, header, body = answer_of(before)
    kind_now, header_now, body_now = answer_of(now)
    assert kind_now == kind, f"{name}: {header} became {header_now}"
    if kind in (FrameKind.ERROR, FrameKind.GOAWAY):
        told = header if kind is FrameKind.ERROR else header[0]
        told_now = header_now if kind is FrameKind.ERROR else header_now[0]
        # Code, whether it may be tried again, and the names of its fields; words are for people.
        if told is None:
            assert told_now is None
            return
        assert (told_now[0], told_now[2], told_now[3].keys()) == (told[0], told[2], told[3].keys()), name
        return
    if kind is FrameKind.WELCOME:
        # Name and role; limits.
        assert (header_now[:5], header_now[6:]) == (header[:5], header[6:]), name
        return
    if kind is FrameKind.STREAM_ITEM:
        header, header_now = header[2], header_now[2]
    assert shape(header_now) == shape(header), name
    assert len(body_now) == len(body), name
    if name in EXACT_BODIES:
        assert body_now == body, name


def test_a_client_of_that_time_gets_the_same_answers(recorded: dict[str, Any], tmp_path: Path) -> None:
    def play(address: str) -> None:
        player = record.Player(address)
        try:
            for step in recorded["script"]:
                heard = player.play(step["whom"], step["sent"], len(step["heard"]))
                for before, now in zip(step["heard"], heard, strict=True):
                    check_same(step["name"], before, now)
        finally:
            player.close()

    async def test(cluster: LogCluster, _: object) -> None:
        await asyncio.to_thread(play, cluster.servers.removeprefix("cutwater://"))
        assert cluster.metadata is not None
        found = {"mr": MetadataCollector(cluster.metadata), "sn": NodeCollector(cluster.nodes[1])}
        for kind, collector in found.items():
            assert set(recorded["metrics"][kind]) - set(metrics_in(collector)) == set(), kind

    assert CLUSTER == record.CLUSTER_NUMBER
    with_log(tmp_path, test, nodes=2)
