"""What the commands for records are made of: times, inputs, JSON in and out; and that starting loads little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer import rich_utils
from typer.testing import CliRunner

from cutwater.admin import doctor, local_cluster, local_etcd
from cutwater.cli.commands.subscribe import LOOKS_BEFORE_WORD, _Printing
from cutwater.cli.framework import target
from cutwater.cli.framework.target import LogTarget
from cutwater.cli.framework.times import parse_position, parse_start, parse_time
from cutwater.cli.io import inputs
from cutwater.cli.io.inputs import InputRecords
from cutwater.cli.io.ndjson import Rows
from cutwater.cli.io.record_output import RecordOutput, as_json, write_records
from cutwater.cli.main import ENTRIES, app, load
from cutwater.client.read.records import Record
from cutwater.errors import DeadlineExceeded, InvalidArgument, NotFound
from cutwater.types import GLSN, LLSN, LogStreamId

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)

# Following.


def test_who_follows_nodes_that_are_down_is_told_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    troubles = ["", *["no storage node"] * 9, "", *["again"] * (LOOKS_BEFORE_WORD - 1)]

    class Subscription(AbstractContextManager[Any]):
        trouble = ""
        skipped_records = 0

        def take(self, timeout: float) -> list[Any]:
            if not troubles:
                return []
            self.trouble = troubles.pop(0)
            raise DeadlineExceeded("nothing came")

        def __exit__(self, *_: object) -> None:
            pass

    client: Any = SimpleNamespace(subscribe=lambda *_, **__: Subscription())
    assert _Printing(["t"], 1, None, True, RecordOutput.TEXT, None, 1.0).run(client, lambda: False)
    assert capsys.readouterr() == ("", "still waiting: no storage node\n")


# Times and positions.


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("@2026-01-02T03:04:05Z", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("@2026-01-02T03:04:05", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2026-01-02T03:04:05+02:00", datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC)),
        ("@2026-01-02", datetime(2026, 1, 2, tzinfo=UTC)),
        ("@-5m", NOW - timedelta(minutes=5)),
        ("@-1h30m", NOW - timedelta(minutes=90)),
        ("@-1.5d", NOW - timedelta(hours=36)),
        ("@-250ms", NOW - timedelta(milliseconds=250)),
    ],
)
def test_times(text: str, found: datetime) -> None:
    assert parse_time(text, NOW) == found


@pytest.mark.parametrize("text", ["@", "@-5", "@-5w", "@5m", "@yesterday", "@-99999999999999d", "0", "-1", "1.5", "x"])
def test_what_is_no_position_says_what_is_one(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"write .*@2026-01-31T12:00Z.*or 'earliest' or 'latest'"):
        parse_start(text, NOW)


def test_positions() -> None:
    assert parse_position("17", NOW) == parse_start("17", NOW) == 17
    assert parse_start("@-1s", NOW) == NOW - timedelta(seconds=1)
    assert (parse_start("earliest", NOW), parse_start("latest", NOW)) == ("earliest", "latest")


# Inputs.


def test_lines_go_as_soon_as_they_are_complete() -> None:
    out, into = os.pipe()
    with open(out, "rb", buffering=0), open(into, "wb", buffering=0) as writer:
        pieces = inputs.lines(out, "it")
        writer.write(b"a\nb\nhal")
        assert next(pieces).records == [b"a", b"b"]
        writer.write(b"f\n\n")
        piece = next(pieces)
        assert (piece.records, piece.place(0), piece.place(1)) == ([b"half", b""], "it, line 3", "it, line 4")
        writer.write(b"end")
        writer.close()
        assert [(piece.records, piece.place(0)) for piece in pieces] == [([b"end"], "it, line 5")]


@given(st.lists(st.binary(max_size=40), max_size=60).map(b"\n".join), st.integers(1, 16), st.integers(1, 5))
def test_lines_are_the_lines_whatever_the_pieces(data: bytes, read_bytes: int, records_max: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "READ_BYTES", read_bytes)
        patch.setattr(inputs, "PIECE_BYTES", 3 * read_bytes)
        patch.setattr(inputs, "RECORDS_MAX", records_max)
        out, into = os.pipe()
        with open(out, "rb", buffering=0):
            with open(into, "wb", buffering=0) as writer:
                writer.write(data)
            pieces = list(inputs.lines(out, "it"))
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert [record for piece in pieces for record in piece.records] == expected
    assert [place for piece in pieces for place in piece.places] == list(range(1, len(expected) + 1))
    assert all(len(piece.records) <= records_max for piece in pieces)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"short\n" + b"x" * (inputs.RECORD_BYTES_MAX + 1))
    with (
        inputs.opened(tmp_path / "long") as fd,
        pytest.raises(InvalidArgument, match=r"long, line 2: a record has at most"),
    ):
        list(inputs.lines(fd, "long"))
    with pytest.raises(InvalidArgument, match="a record has at most"):
        list(inputs.whole_files([tmp_path / "long"]))


def test_files_go_together_as_long_as_they_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "PIECE_BYTES", 10)
    paths = [tmp_path / name for name in "abcd"]
    for path, size in zip(paths, (4, 6, 0, 20), strict=True):
        path.write_bytes(path.name.encode() * size)
    pieces = list(inputs.whole_files(paths))
    assert [[len(record) for record in piece.records] for piece in pieces] == [[4, 6, 0], [20]]
    assert pieces[1].place(0) == str(paths[3])
    assert inputs.total_bytes(paths) == 30
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        list(inputs.whole_files([tmp_path / "none"]))


# JSON in.


def piece_of(*lines: str) -> InputRecords:
    return InputRecords([line.encode() for line in lines], range(1, len(lines) + 1), "it, line ")


def test_json_for_a_topic_of_bytes_stays_as_it_is() -> None:
    piece, records, keys = Rows(None, None, "id").of(piece_of(' {"id": "a", "b": 1.0}', "", '{"id": 7}'))
    assert (records, keys, piece.place(1)) == ([b'{"id": "a", "b": 1.0}', b'{"id": 7}'], ["a", "7"], "it, line 3")
    assert Rows(None, "k", None).of(piece_of("[1]"))[1:] == ([b"[1]"], "k")


def test_json_for_a_topic_with_a_schema_becomes_rows() -> None:
    schema = pa.schema({"at": pa.timestamp("us", "UTC"), "day": pa.date32(), "n": pa.int64()})
    _, rows, keys = Rows(schema, None, None).of(piece_of('{"at": "2026-01-31T12:00:00", "day": "2026-01-31", "n": 1}'))
    assert (rows, keys) == ([{"at": NOW, "day": date(2026, 1, 31), "n": 1}], None)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: this is not JSON"),
        ("[]", "line 2: a text or a number is wanted as field 'id', not null"),
        ('{"id": {}}', "line 2: a text or a number is wanted as field 'id', not {}"),
    ],
)
def test_what_is_wrong_with_a_line_of_json_names_the_line(line: str, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        Rows(None, None, "id").of(piece_of('{"id": 1}', line))


def test_a_time_that_is_none_names_line_and_column() -> None:
    rows = Rows(pa.schema({"at": pa.timestamp("us", "UTC"), "day": pa.date32()}), None, None)
    with pytest.raises(InvalidArgument, match=r"line 1, column 'at': a time in ISO 8601, .*, is wanted, not .soon."):
        rows.of(piece_of('{"at": "soon"}'))
    with pytest.raises(
        InvalidArgument, match=r"line 1, column 'day': a date, such as 2026-01-31, is wanted, not .soon."
    ):
        rows.of(piece_of('{"day": "soon"}'))
    with pytest.raises(
        InvalidArgument, match=r"line 1, column 'at': .* more digits than the microseconds of .*: round it"
    ):
        rows.of(piece_of('{"at": "2026-01-31T12:00:00.123456789Z"}'))
    assert rows.of(piece_of('{"at": "2026-01-31T12:00:00.123456000Z"}'))[1][0]["at"].microsecond == 123_456


# Records out.


def record(key: bytes | None, value: bytes, **more: object) -> Record:
    return Record(GLSN(7), LLSN(3), LogStreamId(2), "t", key, value, 1_000_000, 2_000_000, **more)  # type: ignore[arg-type]


def test_bytes_that_are_no_text_are_base64_and_say_so() -> None:
    told = as_json(record(b"k\xff", b"v", headers={"a": b"x", "b": b"\xff"}))
    assert {name: told[name] for name in ("key_base64", "value", "headers")} == {
        "key_base64": "a/8=",
        "value": "v",
        "headers": {"a": "x", "b_base64": "/w=="},
    }
    assert "key" not in told
    assert as_json(record(None, b""))["key"] is None


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (RecordOutput.TEXT, b"7\t1970-01-01 00:00:01.000\tt\tk\\xff\ta\\x1b[2J\\nb\n"),
        (RecordOutput.VALUE, b"a\x1b[2J\nb\n"),
        (RecordOutput.KEY_VALUE, b"k\xff\ta\x1b[2J\nb\n"),
    ],
)
def test_a_record_as_a_line(output: RecordOutput, line: bytes, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_records([record(b"k\xff", b"a\x1b[2J\nb")], output)
    assert capfdbinary.readouterr().out == line


def test_a_row_is_json(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    row = record(None, b"", row={"at": NOW, "n": 1, "raw": b"\xff"})
    for output in (RecordOutput.VALUE, RecordOutput.JSON):
        write_records([row], output)
    value, everything = capfdbinary.readouterr().out.splitlines()
    assert json.loads(value) == {"at": "2026-01-31T12:00:00Z", "n": 1, "raw": "/w=="}
    assert json.loads(everything)["row"] == json.loads(value)


# Which log.


def test_the_disk_is_that_of_the_log_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogTarget(servers="cutwater://far:1", directory=Path("cluster"), path=Path("embedded"))
    for name, disk in (("directory", Path("cluster")), ("path", Path("embedded")), ("servers", None)):
        said = {"servers": "DEFAULT_MAP", "directory": "", "path": "", name: "COMMANDLINE"}
        monkeypatch.setattr(target, "_said", said)
        assert log.disk == disk


# Starting.


def test_what_etcd_takes_is_said_at_once_and_the_same_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_etcd, "find_etcd", lambda: None)
    monkeypatch.setattr(doctor, "find_etcd", lambda: None)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(NotFound) as told:
        local_cluster.start(tmp_path / "new", metadata=3)
    assert not (tmp_path / "new").exists()
    for advice in (local_etcd.SERVER_ADVICE, local_etcd.PACKAGE_ADVICE):
        assert advice in told.value.message
    assert local_etcd.SERVER_ADVICE in doctor.check_etcd().advice
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert local_etcd.SERVER_ADVICE in " ".join(readme.split())


def test_version_help_and_completion_load_no_command() -> None:
    """Neither the client nor a server, and none of the libraries that take long to load."""
    program = """
import sys
from cutwater.cli import main
PARTS = ("client", "admin", "storage", "wire", "format", "protocol", "runtime")
try:
    main.main()
finally:
    print(sorted(name for name in sys.modules if name.split(".")[0] in ("pyarrow", "structlog", "asyncio", "uvloop")
                 or name.startswith(tuple(f"cutwater.{part}" for part in PARTS))))
"""
    for arguments, told in ((["--version"], "cutwater "), (["--help"], "Print the records of topics")):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=True
        )
        assert told in done.stdout
        assert done.stdout.splitlines()[-1] == "[]"


def _names_of_commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, below in command.commands.items():
        yield from _names_of_commands(below, (*path, name))


def test_help_shows_options_and_environment_variables_whole_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", 80)
    found = [each for name in ENTRIES for each in _names_of_commands(load(name), (name,))]
    for path, command in found:
        told = CliRunner().invoke(app, [*path, "--help"]).output
        assert max(map(len, told.splitlines())) <= 80
        shown = set(told.split())
        for option in command.params:
            if option.param_type_name == "option":
                names = {option.envvar or "_".join(("CUTWATER", *path, option.name)).upper().replace("-", "_")}
                assert names | set(option.opts) <= shown, path


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["append", "-o", "json"], "Missing argument 'TOPIC'"),
        (["subscribe", "t", "-n", "abc", "--output=json"], "'-n': 'abc': "),
        (["topic", "list", "--nope", "-ojson"], "No such option: --nope"),
        (["topic", "nope", "-o", "json"], "No such command 'nope'"),
        (["nope", "-o", "json"], "No such command 'nope'"),
    ],
)
def test_wrong_usage_is_told_to_programs_as_json(args: list[str], told: str) -> None:
    done = CliRunner().invoke(app, args)
    error = json.loads(done.stderr)["error"]
    assert (done.exit_code, error["code"], error["exit_code"]) == (2, "invalid_argument", 2)
    assert told in error["message"]


def test_a_wrong_value_from_the_environment_names_the_variable() -> None:
    done = CliRunner().invoke(app, ["tail"], env={"CUTWATER_TIMEOUT": "abc", "CUTWATER_OUTPUT": "json"})
    assert json.loads(done.stderr)["error"]["message"].startswith("Invalid value for CUTWATER_TIMEOUT: 'abc': ")


def test_commands_that_handle_no_records_load_no_arrow() -> None:
    """To list topics or jobs should not take longer than to ask for them."""
    program = """
import sys
from cutwater.cli.main import ENTRIES, load
for name in ENTRIES:
    if name not in ("append", "bench", "savepoint"):
        load(name)
print(sorted(sys.modules.keys() & {"pyarrow", "numpy", "pandas", "pyspark"}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("read", "abc"), "a GLSN is a whole number from 1 on, not 'abc'"),
        (("read", "0"), "a GLSN is a whole number from 1 on, not '0'"),
        (("topic", "create", "t", "--event-time-ahead-max", "5"), "--event-time-ahead-max is '5': a unit is missing"),
        (("topic", "declare", "t", "--watermark", "yesterday"), "'yesterday' is no time: write 2026-01-31T12:00Z"),
        (("find", "@yesterday"), "'@yesterday' is no time: write @2026-01-31T12:00Z"),
    ],
)
def test_words_that_mean_nothing_are_refused_in_the_words_of_the_command(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, [*words, "--path", str(tmp_path / "log")])
    said = f"{done.output} {done.exception}"
    assert told in " ".join(said.replace("│", " ").split()), said
    assert not (tmp_path / "log").exists()
