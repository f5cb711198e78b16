"""What earlier versions have left on disk is opened, and says the same; and it is still written in the same bytes.

Each archive was made by the version in its name, with ``make.py``.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from typer.testing import CliRunner

import cutwater
from cutwater.admin import local_cluster
from cutwater.admin.free_ports import free_addresses
from cutwater.admin.local_cluster import LocalCluster
from cutwater.cli.framework.exit_codes import Settings
from cutwater.cli.main import app
from cutwater.client.cluster.credentials import ANYONE
from cutwater.client.cluster.holder_file import with_secret
from cutwater.core.order.decisions import AddNode
from cutwater.core.order.state import OrderState
from cutwater.core.replica.deduplication import DedupCheckpoint
from cutwater.core.replica.recovery import HardState
from cutwater.format import entry_codec
from cutwater.format.entry_codec import EntryFrame
from cutwater.metadata.stores import encoding
from cutwater.metadata.stores.open_store import open_store
from cutwater.runtime import processes
from cutwater.storage import format as layout
from cutwater.storage import part_files
from cutwater.storage.node_identity import NodeIdentity
from cutwater.types import BatchKind, ClusterId, DecisionIndex, MetadataNodeId, Part, StorageNodeId
from tests.upgrade import make

pytestmark = pytest.mark.timeout(180)

ARCHIVES = sorted(Path(__file__).parent.glob("*.tar.xz"))
NAMES = [path.name.removesuffix(".tar.xz") for path in ARCHIVES]
DETERMINED = ("declared", "plain", "sealed", "squeezed", "trimmed", "typed")
"""Topics whose entries are in the same log streams each time; of others the servers choose the log stream."""


def command(*arguments: str) -> str:
    """The command line in this process, which is quicker than one of its own."""
    done = CliRunner().invoke(app, list(arguments))
    Settings.is_json = False
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    return done.stdout


def unpacked(archive: Path, place: Path) -> dict[str, Any]:
    """What is expected there."""
    shutil.unpack_archive(archive, place)
    expected: dict[str, Any] = json.loads((place / "expected.json").read_text())
    return expected


@pytest.fixture(params=ARCHIVES, ids=NAMES)
def made_before(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return tmp_path, unpacked(request.param, tmp_path)


@pytest.fixture(params=ARCHIVES, ids=NAMES, scope="module")
def untouched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """For tests that only read the files."""
    place = tmp_path_factory.mktemp("untouched")
    return place, unpacked(request.param, place)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Topic by topic, so that a failure shows where it differs."""
    found = json.loads(json.dumps(found))
    for topic, records in expected["records"].items():
        assert found["records"].pop(topic) == records, topic
    assert found.pop("records") == {}
    for name, value in expected.items():
        if name not in ("records", "staged"):
            assert found.pop(name) == value, name
    assert found == {}


# The embedded log.


def test_an_embedded_log_says_what_it_said_and_goes_on(made_before: tuple[Path, dict[str, Any]]) -> None:
    place, told = made_before
    path, expected = place / make.LOG, told[make.LOG]
    keys = {file: file.read_bytes() for file in path.rglob("*key")}
    assert len(keys) == 2
    with cutwater.open(path) as log:
        same(make.state(log, expected["tail"]), expected)
        goes_on(log, expected)
        # Before the node asks about what was staged too long ago, which it does after a minute.
        publishes_what_was_staged(log, expected)
        tail = log.tail()
        after = make.state(log, tail)
    with cutwater.open(path) as log:
        same(make.state(log, tail), after)
        report = json.loads(command("verify", "--path", str(path), "-o", "json"))
        assert (report["findings"], report["replicas"] > 10, report["groups"]) == ([], True, 5), report
        found = asyncio.run(
            local_cluster.health(LocalCluster(log.servers, [], []), access=with_secret(log.servers, ANYONE))
        )
        assert found == [], "what the doctor says"
    assert {file: file.read_bytes() for file in path.rglob("*key")} == keys


def goes_on(log: cutwater.Client, expected: dict[str, Any]) -> None:
    ends: dict[int, int] = {}
    for records in expected["records"].values():
        for record in records:
            ends[record["stream"]] = max(ends.get(record["stream"], 0), record["llsn"])
    first, second = log.topic("plain").streams
    for stream in (first, second):
        ack = log.append("plain", [b"new", b"newer"], headers={"h": b"v"}, stream=stream)
        assert (ack.llsn, ack.glsn > expected["tail"]) == (ends[stream] + 1, True)
    row = {**make.typed_row(9), "country": "FR"}
    typed = log.append("typed", make.table_of([row], make.GROWN))
    assert log.read(typed.glsn)["country"] == "FR"
    with log.producer("produced", id="prodüçer-1") as producer:
        sent = producer.send(b"new", key=b"p").result()
    assert (log.read(sent.glsn).value, sent.stream) == (b"new", expected["records"]["produced"][0]["stream"])
    sealed, other = log.topic("sealed").streams
    with pytest.raises(cutwater.CutwaterError):
        log.append("sealed", b"x", stream=sealed, timeout=0.3)
    assert log.append("sealed", b"x", stream=other).llsn == ends[other] + 1
    assert log.declare("declared", watermark=make.moment(100))
    with pytest.raises(cutwater.NotFound):
        log.append("deleted", b"x")
    log.cursor("billing").commit(sent.glsn)
    assert log.cursor("billing").get() == sent.glsn


def publishes_what_was_staged(log: cutwater.Client, expected: dict[str, Any]) -> None:
    (run,) = log.find_runs(make.RUN[0])
    assert log.open_run(*make.RUN).run == run.run
    again = log.publish(run, 1, [])
    assert [(group.topic, group.count) for group in again] == [("totals", 2)]
    parts = msgspec.convert(expected["staged"], list[Part])
    published = {group.topic: group for group in log.publish(run, 2, parts)}
    assert {topic: group.count for topic, group in published.items()} == {"totals": 2, "sorted": 3}
    numbers = {topic: log.table(topic, start=group.glsn)["n"].to_pylist() for topic, group in published.items()}
    assert numbers == {"totals": [6, 7], "sorted": [40, 50, 60]}
    with pytest.raises(cutwater.RunFenced):
        log.publish(log.find_runs("fenced")[0], 0, [])


# The cluster.


async def move(directory: Path) -> None:
    """The addresses of that time may be in use. Let the servers have listened elsewhere, as they note it."""
    cluster = local_cluster.load(directory)
    members = [*cluster.metadata, *cluster.storage_nodes]
    for member, address in zip(members, free_addresses(len(members)), strict=True):
        member.address = address
    cluster.servers = f"cutwater://{cluster.metadata[0].address}"
    store = await open_store(f"sqlite:{directory / 'metadata.sqlite'}", cluster=ClusterId(local_cluster.CLUSTER_ID))
    try:
        loaded = await store.load()
        state = OrderState(loaded.snapshot, loaded.decisions)
        known = [(state.nodes[StorageNodeId(member.id)], member.address) for member in cluster.storage_nodes]
        moves = [AddNode(node.node, address, node.key, node.volumes, node.server_key) for node, address in known]
        epoch = await store.acquire(MetadataNodeId(1), "", loaded.leader.epoch)
        await store.append(epoch, DecisionIndex(state.index), tuple(moves))
    finally:
        await store.close()
    cluster.save(directory)


@pytest.fixture
def cluster_made_before(made_before: tuple[Path, dict[str, Any]]) -> Iterator[tuple[Path, dict[str, Any]]]:
    place, told = made_before
    directory = place / make.CLUSTER
    asyncio.run(move(directory))
    try:
        yield directory, told[make.CLUSTER]
    finally:
        processes.stop(local_cluster.load(directory).running(), 5.0)


def test_a_cluster_starts_says_what_it_said_and_goes_on(cluster_made_before: tuple[Path, dict[str, Any]]) -> None:
    directory, expected = cluster_made_before
    keys = {file: file.read_bytes() for file in directory.rglob("*key")}
    assert len(keys) == 4
    with cutwater.connect(local_cluster.start(directory).servers, timeout=60) as log:
        same(make.state(log, expected["tail"]), expected)
        acks = [log.append("t", b"new", stream=stream) for stream in log.topic("t").streams]
        acks.append(log.append("typed", make.numbers([4])))
        assert all(log.read(ack.glsn).llsn == ack.llsn for ack in acks)
    report = json.loads(command("verify", "--dir", str(directory), "-o", "json"))
    assert (report["findings"], report["replicas"]) == ([], 8)
    local_cluster.stop(directory)
    assert {file: file.read_bytes() for file in directory.rglob("*key")} == keys


# Bytes.


def frames_of(path: Path) -> Iterator[EntryFrame]:
    """Of a segment."""
    data = path.read_bytes()
    offset = layout.decode_header(data, layout.SEGMENT, path).data_start
    while (header := entry_codec.decode_header(data, offset)) is not None:
        yield EntryFrame(header, memoryview(data)[offset : offset + header.frame_bytes])
        offset += header.frame_bytes
    assert not any(data[offset:]), "behind the last frame is room, and nothing else"


def check_frame(frame: EntryFrame) -> None:
    assert frame.problem is None
    header, trailer = entry_codec.encode_frame(frame.entry, frame.header.running)
    assert header + bytes(frame.body) + trailer == bytes(frame.data)


def check_growing(path: Path, magic: bytes) -> bytes:
    """Header and marks of a file that grows."""
    data, sector = path.read_bytes(), layout.SECTOR_BYTES
    header = layout.encode_header(magic, layout.decode_header(data, magic, path))
    assert (data[:sector], data[3 * sector : 4 * sector]) == (header, header)
    marks = [data[i * sector : (i + 1) * sector] for i in (1, 2)]
    found = [mark for mark in map(layout.decode_mark, marks) if mark is not None]
    assert found
    assert [layout.encode_mark(mark) for mark in found] == [mark for mark in marks if any(mark)]
    return data


def check_segment(path: Path) -> None:
    data = check_growing(path, layout.SEGMENT)
    start = layout.decode_header(data, layout.SEGMENT, path).data_start
    for at in range(layout.HEADER_BYTES, start, layout.POINT_BYTES):
        stored = data[at : at + layout.POINT_BYTES]
        point = layout.decode_point(stored)
        assert (b"" if point is None else layout.encode_point(*point)) == (stored if any(stored) else b"")
    for frame in frames_of(path):
        check_frame(frame)


def check_commits(path: Path) -> None:
    data, size = check_growing(path, layout.COMMITS), layout.CONTEXT_BYTES
    records = [data[at : at + size] for at in range(layout.HEADER_BYTES, len(data), size)]
    assert any(map(any, records))
    for number, stored in enumerate(record for record in records if any(record)):
        context = layout.decode_context(stored, number)
        assert context is not None
        assert layout.encode_context(context, number) == stored


def check_part(path: Path) -> None:
    """A staged part: header, frames, end."""
    data = path.read_bytes()
    start = layout.whole_bytes(data[: layout.WHOLE_START_BYTES], path)
    body = layout.decode_whole(data[:start], layout.STAGED, path)
    header = msgspec.msgpack.decode(body, type=part_files._Header)
    assert layout.encode_whole(layout.STAGED, msgspec.msgpack.encode(header)) == data[:start]
    end = len(data) - part_files.END_BYTES
    size, staged_us = part_files._decode_end(data[end:], path)
    assert part_files._encode_end(size, staged_us) == data[end:]
    frames = list(entry_codec.frames_in(data[start:end]))
    assert (len(frames), sum(frame.header.count for frame in frames)) == (size.entries, size.rows)
    for frame in frames:
        check_frame(frame)


def check_node(path: Path) -> None:
    data = path.read_bytes()
    identity = layout.decode_struct(data, layout.NODE, path, NodeIdentity)
    assert layout.encode_struct(layout.NODE, identity) == data


def check_small(path: Path, magic: bytes, kind: type) -> None:
    data = path.read_bytes()
    assert layout.encode_struct(magic, layout.decode_struct(data, magic, path, kind)) == data


def check_store(path: Path) -> None:
    """Every record of the store of decisions; and a snapshot of all of them can be made."""
    records, batches = stored_in(path)
    where = str(path)
    again = {
        "identity": lambda data: encoding.encode_record(encoding.decode_record(data, where, encoding.StoreIdentity)),
        "leader": _leader_again,
        "member": lambda data: encoding.encode_record(encoding.decode_record(data, where, encoding.MemberRecord)),
        "snapshot": _snapshot_again,
    }
    for name, data in records.items():
        assert again[name.partition("/")[0]](data) == data, name
    for data in batches:
        batch = encoding.decode_batch(data, where)
        assert encoding.encode_batch(batch.epoch, batch.first, batch.decisions) == data
    decisions = [decision for data in batches for decision in encoding.decode_batch(data, where).decisions]
    if "snapshot" not in records:
        made = OrderState(None, tuple(decisions)).snapshot()
        data = encoding.encode_snapshot(encoding.LeaderEpoch(1), made)
        assert encoding.decode_snapshot(data, where) == made


def _leader_again(data: bytes) -> bytes:
    leader = encoding.decode_leader(data, "leader")
    return encoding.encode_record(encoding.LeaderRecord(leader.node, leader.address), leader.epoch)


def _snapshot_again(data: bytes) -> bytes:
    epoch = encoding.header_of(data, "snapshot", encoding.StoredKind.SNAPSHOT).epoch
    return encoding.encode_snapshot(epoch, encoding.decode_snapshot(data, "snapshot"))


def stored_in(path: Path) -> tuple[dict[str, bytes], list[bytes]]:
    database = sqlite3.connect(f"file:{path}?immutable=1", uri=True)
    try:
        records = dict(database.execute("SELECT name, data FROM records").fetchall())
        return records, [data for (data,) in database.execute("SELECT data FROM batches ORDER BY first")]
    finally:
        database.close()


CHECKS: dict[str, Callable[[Path], None]] = {
    r".*/\d{10}-\d{20}\.entries": check_segment,
    r".*/\d{10}-\d{20}\.commits": check_commits,
    r".*/staged/\d+-\d+-\d+-[0-9a-f]{32}\.part": check_part,
    r".*/manifest": lambda path: check_small(path, layout.MANIFEST, layout.ReplicaManifest),
    r".*/state": lambda path: check_small(path, layout.HARD_STATE, HardState),
    r".*/dedup": lambda path: check_small(path, layout.DEDUP, DedupCheckpoint),
    r".*/node(\.copy)?": check_node,
    r".*/metadata\.sqlite": check_store,
    r".*/(server-key|metadata\.sqlite\.(key|lock)|lock|cluster\.json)": lambda path: None,
}
"""By the names of files. Keys are compared above; locks hold nothing, and the description is for people."""


def test_every_file_would_be_written_in_the_same_bytes(untouched: tuple[Path, dict[str, Any]]) -> None:
    place, _ = untouched
    seen: Counter[str] = Counter()
    for path in sorted(path for part in (make.LOG, make.CLUSTER) for path in (place / part).rglob("*")):
        if path.is_file():
            (kind,) = (kind for kind in CHECKS if re.fullmatch(kind, path.as_posix()))
            CHECKS[kind](path)
            seen[kind] += 1
    assert seen.keys() == CHECKS.keys()


def test_the_archive_has_every_form_of_an_entry(untouched: tuple[Path, dict[str, Any]]) -> None:
    place, _ = untouched
    frames = [frame for path in (place / make.LOG).rglob("*.entries") for frame in frames_of(path)]
    headers = [frame.header for frame in frames]
    assert {frame.data[4] for frame in frames} == {1, 2, 3}
    assert {header.kind for header in headers} == set(BatchKind)
    assert {header.schema for header in headers} >= {0, 1, 2}
    assert {header.epoch for header in headers} >= {1, 2}
    for holds in (
        lambda header: header.producer is not None,
        lambda header: header.declared is not None,
        lambda header: header.group is not None,
        lambda header: header.more,
        lambda header: header.idle,
        lambda header: header.running.idle,
        lambda header: header.running.declared is not None,
        lambda header: header.checked,
    ):
        assert len({bool(holds(header)) for header in headers}) == 2 or all(map(holds, headers))
    records, _ = stored_in(place / make.CLUSTER / "metadata.sqlite")
    assert "snapshot" in records


# The same inputs again.


def form_of(path: Path) -> object:
    """What a file says of its format, whatever else is in it."""
    if path.name == "metadata.sqlite":
        database = sqlite3.connect(f"file:{path}?immutable=1", uri=True)
        try:
            schema = sorted(database.execute("SELECT name, sql FROM sqlite_master").fetchall(), key=str)
            pragmas = [database.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")]
            return schema, pragmas, sorted(name for (name,) in database.execute("SELECT name FROM records"))
        finally:
            database.close()
    if path.name.endswith(("key", "lock")):
        return path.stat().st_mode, path.read_bytes()[:27] if path.name.endswith("key") else b""
    # Magic and version.
    return path.stat().st_mode, path.read_bytes()[:12]


def forms_in(place: Path) -> Counter[tuple[str, str]]:
    """The files, apart from names that are random."""
    return Counter(
        (re.sub(r"[0-9a-f]{32}", "<random>", path.relative_to(place).as_posix()), repr(form_of(path)))
        for path in place.rglob("*")
        if path.is_file()
    )


def entries_of(place: Path, told: dict[str, Any]) -> dict[str, list[object]]:
    """The entries of topics, as far as they are determined; bodies as they are stored, unless they are compressed."""
    found: dict[str, list[object]] = {}
    for topic in DETERMINED:
        for stream in sorted({record["stream"] for record in told["records"][topic]}):
            (path,) = place.rglob(f"lsid={stream}/*.entries")
            for frame in frames_of(path):
                header = structs.replace(frame.header, epoch=0, header_crc=0)
                if topic == "squeezed":
                    header = structs.replace(header, checksum=0, body_bytes=0)
                body = b"" if topic == "squeezed" else bytes(frame.body)
                found.setdefault(topic, []).append((stream, header, body))
    return found


POSITIONS = ("stream", "glsn", "llsn", "ingested_us")


def contents_of(told: dict[str, Any]) -> dict[str, list[str]]:
    """The records without what differs each time."""
    found = {}
    for topic, records in told["records"].items():
        # Rows without event time have that of the clock.
        left_out = (*POSITIONS, "timestamp_us") if topic in ("totals", "sorted") else POSITIONS
        found[topic] = sorted(
            json.dumps({n: v for n, v in r.items() if n not in left_out}, sort_keys=True) for r in records
        )
    return found


def test_a_new_log_has_the_same_files_in_the_same_formats(
    untouched: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, told = untouched
    path = tmp_path / make.LOG
    monkeypatch.setattr(make, "command", command)
    make.fill(path)
    with cutwater.open(path) as log:
        state = json.loads(json.dumps(make.state(log)))
    expected = told[make.LOG]
    assert contents_of(state) == contents_of(expected)
    assert {t["name"]: t for t in state["topics"]}.keys() == {t["name"]: t for t in expected["topics"]}.keys()
    before, now = forms_in(place / make.LOG), forms_in(path)
    assert ({*before} - {*now}, {*now} - {*before}) == (set(), set())
    entries, earlier = entries_of(path, state), entries_of(place / make.LOG, expected)
    for topic in DETERMINED:
        assert entries[topic] == earlier[topic], topic
