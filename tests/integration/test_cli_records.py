"""Records on the command line: real commands against an embedded log and against a small local cluster."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import cutwater as library
from cutwater.admin import local_cluster
from cutwater.runtime import processes

pytestmark = pytest.mark.timeout(180)

COMMAND = [sys.executable, "-m", "cutwater.cli"]
SECONDS = 90
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("CUTWATER_")}


def cutwater(*arguments: str, given: str | bytes = "", code: int = 0, cwd: Path | None = None, **variables: str) -> str:
    """What it printed; with an exit code, also what it said on standard error."""
    data = given.encode() if isinstance(given, str) else given
    environment = ENVIRONMENT | {"XDG_CONFIG_HOME": "/nonexistent"} | variables
    done = subprocess.run(
        [*COMMAND, *arguments],
        input=data,
        capture_output=True,
        timeout=SECONDS,
        check=False,
        cwd=cwd,
        env=environment,
    )
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return (done.stdout if code == 0 else done.stdout + done.stderr).decode()


def as_json(*arguments: str, **more: Any) -> Any:
    return json.loads(cutwater(*arguments, "-o", "json", **more))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def log(path: str) -> Iterator[library.Client]:
    """Open here, so that commands connect to it."""
    with library.open(path) as client:
        yield client


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("cluster")
    started = local_cluster.start(directory, storage_nodes=2)
    try:
        yield directory
    finally:
        processes.stop([member.pid for member in started.processes() if member.pid], 10.0)


# An embedded log that nobody has open.


def test_a_log_is_made_written_and_read_by_commands_alone(tmp_path: Path) -> None:
    (tmp_path / "cutwater.toml").write_text('path = "data"\n[subscribe]\noutput = "value"\n')
    told = cutwater("append", "t", given="a\n\nb", code=30, cwd=tmp_path)
    assert "there is no log in data: `cutwater append TOPIC --create --path data` makes one" in told
    assert not (tmp_path / "data").exists()
    # Nothing is advised that would be refused.
    told = cutwater("append", "t", "--path", ".", code=30, cwd=tmp_path)
    assert "there is no log in ., but other files (cutwater.toml): name the directory of a log" in told
    told = cutwater("append", "t", "--create", given="a\n\nb", cwd=tmp_path)
    assert told.startswith("appended 3 records to topic 't', GLSN ")
    assert cutwater("subscribe", "t", cwd=tmp_path) == "a\n\nb\n"
    # What is said closer counts: the environment more than the file, the command line more than both.
    assert json.loads(cutwater("subscribe", "t", "-n", "1", cwd=tmp_path, CUTWATER_OUTPUT="json"))["value"] == "a"
    far = {"CUTWATER_SERVERS": "cutwater://127.0.0.1:1"}
    assert "no server listens" in cutwater("tail", "--timeout", "0.5", code=34, cwd=tmp_path, **far)
    assert int(cutwater("tail", "--path", "data", cwd=tmp_path, **far)) >= 3
    told = cutwater("config", "show", "--origin", cwd=tmp_path, CUTWATER_TIMEOUT="5", CUTWATER_SERVER="x")
    assert "cutwater.toml [subscribe]" in told
    assert "CUTWATER_TIMEOUT" in told
    assert "CUTWATER_SERVER, which no command knows" in told
    told = cutwater("cluster", "health", "--dir", "data", code=30, cwd=tmp_path)
    assert "holds an embedded log, and no local cluster: commands about records and topics take --path" in told


# Appending.


def test_append_says_where_the_records_are(log: library.Client, path: str, tmp_path: Path) -> None:
    told = as_json("append", "said", "--create", "--path", path, "--key", "k", given="1\n2\n3\n")
    assert (told["topic"], told["records"], told["bytes"]) == ("said", 3, 3)
    found = list(log.subscribe("said", follow=False))
    assert [(record.key, record.value) for record in found] == [(b"k", b"1"), (b"k", b"2"), (b"k", b"3")]
    assert (told["first_glsn"], told["last_glsn"]) == (found[0].glsn, found[-1].glsn)
    (tmp_path / "a").write_bytes(b"one\nrecord\xff\n")
    (tmp_path / "b").write_bytes(b"")
    cutwater("append", "said", str(tmp_path / "a"), str(tmp_path / "b"), "--path", path)
    cutwater("append", "said", str(tmp_path / "a"), "-", "--format", "lines", "--path", path, given="last")
    values = [record.value for record in log.subscribe("said", start=told["last_glsn"] + 1, follow=False)]
    assert values == [b"one\nrecord\xff\n", b"", b"one", b"record\xff", b"last"]


def test_a_bar_on_a_terminal_shows_how_far_it_is(path: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"x\n" * 1_000)
    ours, theirs = pty.openpty()
    command = [*COMMAND, "append", "barred", str(tmp_path / "lines"), "--format", "lines", "--create", "--path", path]
    seen = b""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, timeout=SECONDS, check=True)
        while select.select([ours], [], [], 0)[0]:
            seen += os.read(ours, 65_536)
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"appending" in seen
    assert b"appended 1000 records to topic 'barred'" in done.stdout


def test_json_becomes_records_or_rows(log: library.Client, path: str) -> None:
    log.create_topic("json")
    given = '{"id": 1, "name": "x"}\n\n{"id": 2}\n'
    cutwater("append", "json", "--format", "ndjson", "--key-field", "id", "--path", path, given=given)
    found = list(log.subscribe("json", follow=False))
    assert [(record.key, record.value) for record in found] == [(b"1", b'{"id": 1, "name": "x"}'), (b"2", b'{"id": 2}')]
    columns = ("--schema", "at timestamp not null, n bigint", "--event-time", "at")
    assert as_json("topic", "create", "rows", *columns, "--path", path)["topic"] == "rows"
    schema = pa.schema([pa.field("at", pa.timestamp("us", "UTC"), nullable=False), pa.field("n", pa.int64())])
    assert (log.topic("rows").schema, log.topic("rows").event_time) == (schema, "at")
    columns = {topic["name"]: topic["columns"] for topic in as_json("topic", "list", "--path", path)}
    assert columns["rows"] == "at timestamp not null, n bigint"
    assert as_json("topic", "describe", "rows", "--path", path)["topic"]["columns"] == columns["rows"]
    told = cutwater("append", "rows", "--path", path, given="a line\n", code=2)
    assert "topic 'rows' has columns (at timestamp not null, n bigint)" in told
    assert "say --format ndjson" in told
    told = cutwater("topic", "describe", "rows", "--path", path)
    assert "topic 'rows': 1 log stream, replication 1" in told
    assert "records are: at timestamp not null, n bigint; event time is at" in told
    row = '{"at":"2026-01-31T12:00:00Z","n":9007199254740993}\n'
    cutwater("append", "rows", "--format", "ndjson", "--path", path, given=row)
    assert cutwater("subscribe", "rows", "-o", "value", "--path", path) == row
    told = cutwater("append", "rows", "--format", "ndjson", "--path", path, given=row + '{"n":1,"m":2}\n', code=2)
    assert "standard input, line 2, column 'm': topic 'rows' has no such column" in told
    assert "code invalid_record" in told
    told = cutwater(
        "append",
        "rows",
        "--format",
        "ndjson",
        "--path",
        path,
        given=row.replace(":9", ':"9').replace("}", '"}'),
        code=2,
    )
    assert "standard input, line 1, column 'n': a whole number, without quotes, is wanted, not" in told
    told = cutwater("append", "rows", "--format", "ndjson", "--path", path, given='{"at":1777636800000}\n', code=2)
    assert "column 'at': a time is a text in ISO 8601" in told


def test_what_subscribe_prints_can_be_appended_again(log: library.Client, path: str) -> None:
    schema = pa.schema(
        {"raw": pa.binary(), "price": pa.decimal128(5, 2), "x": pa.float64(), "at": pa.timestamp("ns", "UTC")}
    )
    log.create_topic("printed", schema=schema)
    log.create_topic("again", schema=schema)
    rows = [[b"abc", None], [Decimal("1.25"), None], [float("nan"), 0.1], [1_767_225_600_000_000_001, 0]]
    log.append("printed", pa.table([pa.array(c, f.type) for c, f in zip(rows, schema, strict=True)], schema=schema))
    printed = cutwater("subscribe", "printed", "-o", "value", "--path", path)
    cutwater("append", "again", "--format", "ndjson", "--path", path, given=printed)
    first, second = (log.table(name, columns=schema.names) for name in ("printed", "again"))
    # No NaN equals itself.
    assert [str(row) for row in first.to_pylist()] == [str(row) for row in second.to_pylist()]


def test_what_was_appended_before_an_error_is_told(log: library.Client, path: str) -> None:
    log.create_topic("half")
    given = b"fine\n" * 3 + b"x" * (2 << 20)
    told = cutwater("append", "half", "--path", path, given=given, code=2)
    assert told.startswith("appended 3 records to topic 'half'")
    assert "error: standard input, line 4: a record has at most 1048576 bytes" in told
    assert "code record_too_large, exit code 2" in told
    # Also before there is anything to append.
    told = cutwater("append", "nope", "--path", path, code=30)
    assert told.startswith("error: there is no topic 'nope'")


def test_a_named_producer_appends_in_order(log: library.Client, path: str) -> None:
    lines = "".join(f"{i}\n" for i in range(60_000))
    told = as_json("append", "produced", "--create", "--producer", "p", "--path", path, given=lines)
    assert told["records"] == 60_000
    assert cutwater("subscribe", "produced", "-o", "value", "--path", path) == lines


def test_lines_of_an_endless_input_are_appended_as_they_come(log: library.Client, path: str) -> None:
    log.create_topic("endless")
    command = [*COMMAND, "append", "endless", "--path", path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT) as child:
        try:
            assert child.stdin is not None
            with log.subscribe("endless") as subscription:
                for line in (b"first", b"second"):
                    child.stdin.write(line + b"\n")
                    child.stdin.flush()
                    assert [record.value for record in subscription.take(timeout=SECONDS)] == [line]
            # Whoever asks politely for an end is told the same as after Ctrl-C.
            child.send_signal(signal.SIGTERM)
            told, _ = child.communicate(timeout=SECONDS)
        finally:
            child.kill()
    # Whether the second one was acknowledged before the signal came, nobody can say.
    assert re.match(rb"appended [12] records? to topic 'endless'", told)
    assert child.returncode == 130


@pytest.mark.usefixtures("plain_signals")
def test_whoever_interrupts_an_append_before_it_has_got_anything_need_not_doubt(log: library.Client, path: str) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "append", "silent", "--create", "--path", path]
    try:
        with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, env=ENVIRONMENT) as child:
            try:
                while not any(topic.name == "silent" for topic in log.topics()):
                    assert child.poll() is None
                    time.sleep(0.01)
                # It is certainly waiting for input as soon as it has taken a line without its end.
                os.write(ours, b"never sent\x04")
                while select.select([theirs], [], [], 0)[0]:
                    assert child.poll() is None
                    time.sleep(0.01)
                child.send_signal(signal.SIGINT)
                told, _ = child.communicate(timeout=SECONDS)
            finally:
                child.kill()
    finally:
        os.close(ours)
        os.close(theirs)
    assert (told, child.returncode) == (b"nothing was appended to topic 'silent'\n", 130)


# Reading.


@pytest.fixture(scope="module")
def glsns(log: library.Client) -> list[int]:
    """Of records ``0`` to ``9``, appended one after the other."""
    log.create_topic("ten")
    return [log.append("ten", b"%d" % i, key=b"k").glsn for i in range(10)]


def test_subscribe_from_anywhere_to_anywhere(log: library.Client, path: str, glsns: list[int]) -> None:
    def values(*arguments: str) -> list[str]:
        return cutwater("subscribe", "ten", "--path", path, "-o", "value", *arguments).split()

    assert values() == [str(i) for i in range(10)]
    assert values("--start", str(glsns[3]), "--stop", str(glsns[5])) == ["3", "4"]
    assert values("--start", "latest", "--stop", "1") == []
    time = log.read(glsns[8]).ingested_at.isoformat()
    assert values("--start", f"@{time}", "-n", "1", "--follow") == ["8"]
    assert cutwater("find", f"@{time}", "ten", "--path", path).strip() == str(glsns[8])


def test_read_and_its_errors(log: library.Client, path: str, glsns: list[int]) -> None:
    assert cutwater("read", str(glsns[4]), "-o", "key-value", "--path", path) == "k\t4\n"
    told = as_json("read", str(glsns[4]), "--path", path)
    assert (told["glsn"], told["topic"], told["key"], told["value"]) == (glsns[4], "ten", "k", "4")
    wrong = json.loads(cutwater("read", "999999999", "-o", "json", "--path", path, code=37))["error"]
    assert (wrong["code"], wrong["retriable"], wrong["exit_code"]) == ("not_yet_committed", True, 37)


@pytest.mark.usefixtures("plain_signals")
def test_following_ends_quietly(log: library.Client, path: str) -> None:
    log.create_topic("followed")
    log.append("followed", b"old")
    command = [*COMMAND, "subscribe", "followed", "-f", "-o", "value", "--path", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"old\n"
            log.append("followed", b"new")
            assert child.stdout.readline() == b"new\n"
            child.send_signal(signal.SIGINT)
            assert child.communicate(timeout=SECONDS) == (b"", b"")
        finally:
            child.kill()
    assert child.returncode == 130
    # The reader goes away, as ``head`` does.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as child:
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            assert child.stdout.readline() == b"old\n"
            child.stdout.close()
            log.append("followed", b"newer")
            assert (child.stderr.read(), child.wait(SECONDS)) == (b"", 0)
        finally:
            child.kill()


def test_an_output_that_is_full_is_told(log: library.Client, path: str) -> None:
    # So it is noticed only when everything is printed.
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, "tail", "--path", path],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment,
            timeout=SECONDS,
            check=False,
        )
    assert done.stderr.startswith(b"error: standard output cannot be written: No space left on device\n")
    assert done.returncode == 2


def test_a_subscriber_opens_the_log_when_its_holder_has_closed_it(tmp_path: Path) -> None:
    command = [*COMMAND, "subscribe", "t", "-f", "-o", "value", "--path", str(tmp_path)]
    with library.open(tmp_path) as first:
        first.create_topic("t")
        first.append("t", b"one")
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"one\n"
            first.close()
            with library.open(tmp_path) as second:
                second.append("t", b"two")
                assert child.stdout.readline() == b"two\n"
        finally:
            child.terminate()
            child.communicate(timeout=SECONDS)


def test_cursors(log: library.Client, path: str, glsns: list[int]) -> None:
    assert "there is no cursor 'c'" in cutwater("cursor", "get", "c", "--path", path, code=30)
    cutwater("cursor", "commit", "c", str(glsns[2]), "--path", path)
    assert log.cursor("c").get() == glsns[2]
    assert as_json("cursor", "get", "c", "--path", path) == {"cursor": "c", "glsn": glsns[2]}
    cutwater("cursor", "drop", "c", "--path", path)
    assert log.cursor("c").get() is None


# A cluster.


def test_runs_of_an_embedded_log(tmp_path: Path) -> None:
    where = ("--path", str(tmp_path))
    with library.open(tmp_path) as log:
        log.create_topic("published")
        run = log.open_run("totals", "a checkpoint")
        log.publish(run, 0, [log.stage(run, 0, "published", b"x")])
        log.stage(run, 1, "published", b"not published")
        with pytest.raises(library.OutputExists, match="`cutwater run forget totals`"):
            log.open_run("totals", "another checkpoint")
        # By the process that has it open.
        (found,) = as_json("run", "list", *where)
        assert (found["name"], found["last_batch"], found["staged"][0]["node"]) == ("totals", 0, 1)
        assert not found["staged"][0]["trouble"]
    told = cutwater("run", "describe", str(run.run), *where)
    assert f"run {run.run} of 'totals': may publish" in told
    assert "staged on storage node 1: " in told
    assert "forgot that 'totals' has published 1 row" in cutwater("run", "forget", "totals", *where)
    assert "holds nothing up" in cutwater("run", "drop", str(run.run), "--lose-rows", *where, code=32)
    with library.open(tmp_path) as log:
        assert log.open_run("totals", "another checkpoint").run > run.run
    assert "there is no log in" in cutwater("run", "list", "--path", str(tmp_path / "mistyped"), code=30)
    assert not (tmp_path / "mistyped").exists()


def test_a_cluster_by_directory_and_by_address(cluster: Path) -> None:
    servers = local_cluster.load(cluster).servers
    cutwater("append", "c", "--create", "--dir", str(cluster), given="x\ny\n")
    assert cutwater("subscribe", "c", "-o", "value", "--servers", servers) == "x\ny\n"
    told = cutwater("tail", "--servers", servers, "--dir", str(cluster), code=2)
    assert "--servers and --dir each name a log, and several were said in the command: say one" in told
    told = cutwater("tail", code=2, CUTWATER_DIR=str(cluster), CUTWATER_PATH="data")
    assert "CUTWATER_DIR and CUTWATER_PATH are set, and each names a log: unset one, or say --dir or --path" in told
    assert f"embedded log: say --dir {cluster}" in cutwater("tail", "--path", str(cluster), code=2)
    assert "holds a local cluster" in cutwater("append", "c", "--create", "--path", str(cluster), code=2)


def test_doctor_looks_at_machine_and_cluster(cluster: Path, tmp_path: Path) -> None:
    checks = {check["name"]: check for check in as_json("doctor", str(tmp_path), "--dir", str(cluster))}
    assert {"Python", "package pyarrow", "Java", "etcd", "port 7001", "open files", "clock", "fsync"} <= set(checks)
    assert checks["Python"]["verdict"] == checks["cluster"]["verdict"] == "ok"
    assert "median of 50 fdatasync of 4096 bytes" in checks["fsync"]["found"]
    assert list(tmp_path.iterdir()) == []
    told = cutwater("doctor", str(tmp_path / "none"), "--servers", "cutwater://127.0.0.1:1", code=3)
    assert "cannot be used: No such file or directory" in told
    assert "the metadata repository does not answer" in told


def test_verify_finds_a_flipped_bit_and_a_silent_node(cluster: Path) -> None:
    where = ("--dir", str(cluster))
    cutwater("append", "v", "--create", *where, given="precious\n" * 1_000)
    assert cutwater("verify", *where).startswith("all is intact: ")
    segment = _segment_with(cluster / "sn2", b"precious")
    with segment.open("r+b") as file:
        at = segment.read_bytes().index(b"precious")
        file.seek(at)
        file.write(b"P")
    told = json.loads(cutwater("verify", *where, "-o", "json", code=20))
    assert [(finding["node"], finding["is_damage"]) for finding in told["findings"]] == [(2, True)]
    node = local_cluster.load(cluster).storage_nodes[0]
    os.kill(node.pid, signal.SIGKILL)
    told = cutwater("verify", *where, code=34)
    assert "could not be verified" in told


def _segment_with(volume: Path, text: bytes) -> Path:
    """The file of a storage node that holds these bytes."""
    return next(path for path in sorted(volume.rglob("*")) if path.is_file() and text in path.read_bytes())


# Completion.


def test_shells_can_complete() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_CUTWATER_COMPLETE=complete_" + shell in cutwater("completion", shell)
    words = {"COMP_WORDS": "cutwater subscribe --fol", "COMP_CWORD": "2", "_CUTWATER_COMPLETE": "complete_bash"}
    assert cutwater(**words).split() == ["--follow"]
    words["COMP_WORDS"], words["COMP_CWORD"] = "cutwater top", "1"
    assert cutwater(**words).split() == ["topic"]
    assert "Did you mean 'append', 'agent'?" in cutwater("apend", code=2)


# Measuring.


def bench_topics(log: library.Client) -> list[str]:
    return [topic.name for topic in log.topics() if "bench" in topic.name]


def test_bench_measures_and_leaves_nothing(log: library.Client, path: str) -> None:
    told = as_json("bench", "--path", path, "--seconds", "0.2", "--mib", "1", "--concurrent", "8")
    assert told["is_complete"]
    assert told["fdatasync_ms"] > 0
    assert [part["what"].split(",")[0] for part in told["parts"]] == [
        "append batches of 1000 records",
        "append single records",
        "append single records",
        "subscribe",
        "subscribe",
    ]
    assert all(part["records"] > 0 and part["seconds"] > 0 for part in told["parts"])
    # Bounded in bytes: one append in flight may go beyond what is allowed.
    assert sum(part["records"] for part in told["parts"][:3]) * 100 < 2 * 2**20
    assert bench_topics(log) == []


def test_bench_without_a_log_makes_one_and_removes_it(tmp_path: Path) -> None:
    told = cutwater("bench", "--seconds", "0.1", "--mib", "1", cwd=tmp_path)
    assert "records/s" in told
    assert "for comparison: fdatasync of 4096 bytes" in told
    assert list(tmp_path.iterdir()) == []
    assert "there is no log in nowhere" in cutwater("bench", "--path", "nowhere", code=30, cwd=tmp_path)
    assert "error: no log can be made in the current directory" in cutwater("bench", code=2, cwd=Path("/proc"))


@pytest.mark.usefixtures("plain_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_bench_deletes_its_topic_when_it_is_interrupted(log: library.Client, path: str, number: int) -> None:
    command = [*COMMAND, "bench", "--path", path, "--seconds", "60", "-o", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            deadline = time.monotonic() + SECONDS
            while not bench_topics(log):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            # Whoever is impatient is not left with more than others.
            process.send_signal(number)
            process.send_signal(signal.SIGINT)
            time.sleep(0.002)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130
    assert not json.loads(out)["is_complete"]
    assert bench_topics(log) == []


# Declaring.


def test_declarations_are_positions_without_records(log: library.Client, path: str) -> None:
    log.create_topic("declared", streams=2)
    told = as_json("append", "declared", "--path", path, "--idle", "--watermark", "2026-01-01", given="1\n")
    assert (told["records"], len(told["declared"])) == (1, 2)
    told = as_json("topic", "declare", "declared", "--path", path, "--watermark", "2026-01-02T00:00:00Z")
    assert (told["watermark"], told["idle"]) == ("2026-01-02T00:00:00Z", False)
    assert sorted(ack["stream"] for ack in told["declared"]) == list(log.topic("declared").streams)
    assert log.watermark("declared", punctuated=True) == datetime(2026, 1, 2, tzinfo=UTC)
    said = cutwater("read", str(told["declared"][0]["glsn"]), "--path", path, code=38)
    assert "holds no record: it declares the watermark 2026-01-02T00:00:00+00:00" in said
    assert "give --watermark TIME, --idle or both" in cutwater("topic", "declare", "declared", "--path", path, code=2)
    told = as_json("append", "declared", "--path", path, "--producer", "declaring", "--idle")
    assert (told["records"], len(told["declared"])) == (0, 1)
    assert [record.value for record in log.subscribe("declared", follow=False)] == [b"1"]
