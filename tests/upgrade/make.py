"""Makes the fixture: what a version of Cutwater leaves on disk, and what it reads there itself.

Later versions open the archive and compare (``test_files.py``). It is made once for each version, with the code of that
version, and never again; only names are used that every version has: the public ones, and the command line. Run it
with the package that is meant on the path, in a checkout of its tag:

    PYTHONPATH=src python tests/upgrade/make.py tests/upgrade/0.1.0.tar.xz

=================  =================================================================================================
in the archive
=================  =================================================================================================
``log/``           an embedded log that was closed and opened again: topics with and without a schema, compressed ones,
                   batches and single records, a producer, declarations, a trim, cursors, published and staged parts,
                   a log stream that is sealed, one that was unsealed again, one that is sealed for good
``cluster/``       a local cluster of a metadata node and three storage nodes that was stopped, without its logs
``expected.json``  what the version that made it reads there
=================  =================================================================================================

It works in ``/tmp/cutwater-upgrade``, and paths in the files are relative to that, but for those of the volumes that
storage nodes have told the cluster, which are absolute. The keys in the files were made for this and guard nothing.
"""

from __future__ import annotations

import base64
import datetime
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

import cutwater

LOG, CLUSTER = "log", "cluster"
PLACE = Path("/tmp/cutwater-upgrade")
"""A name that says nothing about the machine."""
SECOND = 1_000_000
MICROSECOND = datetime.timedelta(microseconds=1)
EVENT_TIME = 1_767_225_600 * SECOND
"""The beginning of 2026: the event time of the first record."""
FOREVER = datetime.timedelta(days=365 * 500)

TYPED = pa.schema(
    [
        pa.field("user", pa.string(), nullable=False),
        pa.field("amount", pa.int64()),
        pa.field("share", pa.float64()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("place", pa.struct({"x": pa.int32(), "y": pa.int32()})),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC"), nullable=False),
    ]
)
GROWN = TYPED.append(pa.field("country", pa.string()))
NUMBERS = pa.schema({"n": pa.int64(), "text": pa.string()})
CURSORS = ("billing", "ünïcode", "dropped", "never")
RUN = ("totals", "the key of a checkpoint")


def event_time(seconds: float) -> int:
    return EVENT_TIME + int(seconds * SECOND)


def moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(event_time(seconds) / SECOND, datetime.UTC)


def command(*arguments: str) -> str:
    """The command line, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "cutwater.cli", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout


def typed_row(number: int) -> dict[str, object]:
    return {
        "user": f"user {number}",
        "amount": None if number % 3 == 0 else number * 1_000,
        "share": number / 8,
        "tags": ["a", None, "ü"][: number % 4],
        "place": {"x": number, "y": -number},
        "price": f"{number}.25",
        "day": datetime.date(2026, 1, 1 + number),
        "at": moment(number),
    }


def table_of(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    from decimal import Decimal

    made = [{**row, "price": Decimal(str(row["price"]))} if "price" in row else row for row in rows]
    return pa.Table.from_pylist(made, schema=schema)


def numbers(some: list[int]) -> pa.Table:
    return pa.table({"n": some, "text": [f"row {n}" for n in some]}, schema=NUMBERS)


# The embedded log.


def fill(path: Path) -> list[Any]:
    """Everything that goes into a new log, the same each time but for positions, times and random keys. Returns the
    parts that are staged for a batch that is not published."""
    with cutwater.open(path) as log:
        _plain(log)
        _typed(log)
        _declared(log)
        first, second = log.topic("plain").streams[:2]
        sealed, other = log.create_topic("sealed", streams=2).streams
        for stream in (sealed, other):
            log.append("sealed", b"before", stream=stream, timestamp=moment(1))
        command("stream", "seal", str(first), "--servers", log.servers)
        command("stream", "unseal", str(first), "--servers", log.servers)
        log.append("plain", b"in a new epoch", stream=first, timestamp=moment(60))
        command("stream", "seal", str(sealed), "--servers", log.servers)
        log.change_topic("plain", streams=2)
        # A second client of the same log.
        with cutwater.open(path, compression="lz4") as squeezing:
            squeezing.append("squeezed", [b"lz4 " * 50] * 4, timestamp=moment(2))
            squeezing.append("squeezed", [b"\0" * 2_000], key=[b"k"], headers={"h": b"v"}, timestamp=moment(3))
    with cutwater.open(path, compression="zstd") as log:
        log.append("squeezed", [b"zstd " * 50] * 4, timestamp=moment(4))
        ack = log.append("plain", [b"after", b"opening"], stream=second, timestamp=moment(61))
        sent = log.tail()
        _producer(log, b"again")
        log.trim("produced", before=sent)
        log.delete_topic("deleted")
        log.trim("trimmed", before=log.append("trimmed", [b"kept", b"also"], timestamp=moment(9)).glsn)
        log.cursor("billing").commit(ack.glsn)
        log.cursor("ünïcode").commit(1)
        log.cursor("dropped").commit(2)
        log.cursor("dropped").drop()
        return _publish(log)


def _plain(log: cutwater.Client) -> None:
    first, second, third = log.create_topic("plain", streams=3).streams
    log.append("plain", b"one", timestamp=moment(0), stream=first)
    log.append("plain", "text", key="kéy", headers={"from": b"web", "ü": b"\0\xff"}, timestamp=moment(1), stream=second)
    log.append("plain", b"", key=b"", timestamp=moment(-5), stream=third)
    log.append(
        "plain",
        [b"a", b"b", b"c"],
        key=[b"k", None, b"l"],
        headers=[{"n": b"1"}, None, {}],
        timestamp=[moment(2), moment(4), moment(3)],
        stream=first,
    )
    log.append("plain", [b"%04d" % n for n in range(40)], key=b"many", timestamp=moment(5), stream=second)
    log.create_topic("deleted", retention=FOREVER)
    log.append("deleted", [b"gone"] * 3, timestamp=moment(0))
    log.create_topic(
        "trimmed", retention=cutwater.Retention(time_us=int(FOREVER.total_seconds()) * SECOND, bytes=1 << 40)
    )
    log.append("trimmed", [b"gone", b"too"], timestamp=moment(7))
    log.append("trimmed", b"as well", timestamp=moment(8))
    log.create_topic("squeezed")
    log.append("squeezed", b"plain", timestamp=moment(1))
    log.create_topic("produced", streams=2)
    _producer(log, b"sent")
    log.create_topic("empty", streams=2, event_time_ahead_max="1h", retention=datetime.timedelta(days=7))


def _producer(log: cutwater.Client, value: bytes) -> None:
    """Each opening is an epoch of the name, and each batch has a sequence."""
    with log.producer("produced", id="prodüçer-1") as producer:
        for number in range(3):
            producer.send([value, b"%d" % number], key=b"p", timestamp=moment(10 + number)).result()
        producer.send(value, headers={"h": b"v"}, timestamp=moment(13), watermark=moment(12)).result()
        producer.declare(watermark=moment(12.5)).result()


def _typed(log: cutwater.Client) -> None:
    log.create_topic("typed", schema=TYPED, event_time="at")
    log.append("typed", table_of([typed_row(n) for n in range(3)], TYPED))
    log.append("typed", table_of([typed_row(3)], TYPED))
    log.change_topic("typed", schema=GROWN)
    log.append("typed", table_of([{**typed_row(n), "country": [None, "DE"][n % 2]} for n in range(4, 8)], GROWN))
    for topic in ("totals", "sorted"):
        log.create_topic(topic, schema=NUMBERS, streams=2)


def _declared(log: cutwater.Client) -> None:
    """What decides about watermarks: events that are out of order, declarations, idleness, and time that passes."""
    first, second = log.create_topic("declared", streams=2).streams
    log.append("declared", b"1", timestamp=moment(10), stream=first)
    log.append("declared", b"2", timestamp=moment(20), stream=second, watermark=moment(15))
    log.append("declared", b"3", timestamp=moment(5), stream=first, watermark=moment(4))
    log.declare("declared", watermark=moment(18), stream=second)
    log.append("declared", b"4", timestamp=moment(30), stream=first, idle=True)
    log.declare("declared", idle=True, stream=second)
    # The log ticks after one second of silence.
    time.sleep(1.2)
    log.append("declared", b"5", timestamp=moment(40), stream=second)
    log.declare("declared", watermark=moment(38), idle=True)


def _publish(log: cutwater.Client) -> list[Any]:
    run = log.open_run(*RUN)
    parts = [log.stage(run, 0, "totals", numbers([1, 2])), log.stage(run, 0, "totals", numbers([3]))]
    for some in ([10, 30], [20]):
        positions = [n.to_bytes(8, "big") for n in some]
        parts.append(log.stage(run, 0, "sorted", numbers(some), positions=positions))
    log.publish(run, 0, parts, position=5)
    log.publish(run, 1, [log.stage(run, 1, "totals", numbers([4, 5]))])
    log.open_run("fenced", "first key")
    log.open_run("fenced", "second key")
    staged = [log.stage(run, 2, "totals", numbers([6, 7]))]
    for some in ([40], [50, 60]):
        positions = [n.to_bytes(8, "big") for n in some]
        staged.append(log.stage(run, 2, "sorted", numbers(some), positions=positions))
    return staged


# What is read there.


def plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, datetime.datetime | datetime.date):
        return value.isoformat()
    if isinstance(value, float | int | str | None):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "items"):
        return {str(key): plain(item) for key, item in value.items()}
    return str(value)


def record_of(record: cutwater.Record) -> dict[str, Any]:
    return {
        "topic": record.topic,
        "stream": record.stream,
        "glsn": record.glsn,
        "llsn": record.llsn,
        "key": plain(record.key),
        "value": plain(record.value),
        "headers": plain(record.headers),
        "row": plain(record.row),
        "timestamp_us": record.timestamp_us,
        "ingested_us": record.ingested_us,
    }


def topic_of(topic: cutwater.Topic) -> dict[str, Any]:
    return {
        "name": topic.name,
        "number": topic.number,
        "streams": list(topic.streams),
        "replication": topic.replication,
        "schema": None if topic.schema is None else [f"{f.name} {f.type} {f.nullable}" for f in topic.schema],
        "event_time": topic.event_time,
        "retention": msgspec.to_builtins(topic.retention),
        "trimmed_before": topic.trimmed_before,
        "event_time_ahead_max": plain(topic.event_time_ahead_max and topic.event_time_ahead_max.total_seconds()),
    }


def refused_at(log: cutwater.Client, glsn: int) -> str:
    """The code of the error that reading this position gives; empty if there is a record."""
    try:
        log.read(glsn)
    except cutwater.CutwaterError as error:
        return error.code
    return ""


STRATEGIES: dict[str, dict[str, Any]] = {
    "default": {},
    "bound 2s": {"bound": "2s"},
    "idle after 500ms": {"idle_after": "500ms"},
    "punctuated": {"punctuated": True},
}


def watermarks(log: cutwater.Client, topic: str, positions: list[int]) -> dict[str, list[str | None]]:
    return {
        name: [plain(log.watermark(topic, at=glsn, **strategy)) for glsn in positions]
        for name, strategy in STRATEGIES.items()
    }


def state(log: cutwater.Client, tail: int | None = None) -> dict[str, Any]:
    """All that a client can ask about a log, up to this position."""
    tail = log.tail() if tail is None else tail
    topics = log.topics()
    records = {
        topic.name: [record_of(r) for r in log.subscribe(topic.name, stop=tail + 1, follow=True)] for topic in topics
    }
    some = [record for found in records.values() for record in found]
    glsns = sorted(record["glsn"] for record in some)
    declared = [record["glsn"] for record in records.get("declared", [])]
    times = sorted({record["ingested_us"] for record in some})
    positions = [0, *sorted({glsn + step for glsn in declared for step in (0, 1, 2)})]
    return {
        "cluster": log.cluster,
        "cluster_key": log.cluster_key(),
        "tail": tail,
        "topics": [topic_of(topic) for topic in topics],
        "records": records,
        "no_record_at": {str(g): refused_at(log, g) for g in range(1, tail + 1) if g not in set(glsns)},
        "found_at": [
            [us, log.find(datetime.datetime.fromtimestamp(0, datetime.UTC) + us * MICROSECOND)] for us in times
        ],
        "positions": positions,
        "watermarks": watermarks(log, "declared", positions) if declared else {},
        "cursors": {name: log.cursor(name).get() for name in CURSORS},
        "runs": [msgspec.to_builtins(run) for name in ("totals", "fenced") for run in log.find_runs(name)],
    }


# The cluster.


def fill_cluster(path: Path) -> dict[str, Any]:
    # So few that there is a snapshot.
    os.environ["CUTWATER_MR_START_SNAPSHOT_EVERY"] = "16"
    command("cluster", "start", "--dir", str(path), "--storage-nodes", "3")
    try:
        servers = json.loads((path / "cluster.json").read_text())["servers"]
        with cutwater.connect(servers) as log:
            log.create_topic("t", streams=2)
            log.create_topic("typed", schema=NUMBERS, replication=2)
            for stream in log.topic("t").streams:
                log.append("t", [b"1", b"2"], key=b"k", timestamp=moment(1), stream=stream)
            log.append("typed", numbers([1, 2, 3]))
            with log.producer("t", id="p") as producer:
                producer.send(b"once", timestamp=moment(2)).result()
            log.cursor("billing").commit(2)
            return state(log)
    finally:
        command("cluster", "stop", "--dir", str(path))


# The archive.


def members(place: Path) -> Iterator[Path]:
    for part in (LOG, CLUSTER):
        for path in sorted((place / part).rglob("*")):
            if not path.name.endswith((".log", "-wal", "-shm")):
                yield path


def pack(place: Path, expected: dict[str, Any], target: Path) -> None:
    """Nothing of the machine is in it: neither users nor times nor absolute paths."""
    with tarfile.open(target, "w:xz", preset=9) as archive:
        data = (json.dumps(expected, indent=1, ensure_ascii=False, sort_keys=True) + "\n").encode()
        about = tarfile.TarInfo("expected.json")
        about.size = len(data)
        archive.addfile(about, io.BytesIO(data))
        for path in members(place):
            info = archive.gettarinfo(path, path.relative_to(place).as_posix())
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            if path.is_dir():
                archive.addfile(info)
                continue
            content = path.read_bytes()
            assert str(Path.home()).encode() + b"/" not in content, path
            archive.addfile(info, io.BytesIO(content))


def main() -> None:
    target = Path(sys.argv[1]).resolve()
    print(f"cutwater {cutwater.__version__} of {Path(cutwater.__file__).parent}")
    PLACE.mkdir()
    with chdir(PLACE):
        os.environ["XDG_STATE_HOME"] = str(PLACE / "state")
        staged = fill(Path(LOG))
        with cutwater.open(LOG) as log:
            expected: dict[str, Any] = {"version": cutwater.__version__, LOG: state(log)}
        expected[LOG]["staged"] = [msgspec.to_builtins(part) for part in staged]
        expected[CLUSTER] = fill_cluster(Path(CLUSTER))
        pack(PLACE, expected, target)
    shutil.rmtree(PLACE)
    print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
