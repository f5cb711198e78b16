"""JSON that a command writes is JSON that a command reads: values of topics with a schema come back as they were."""

from __future__ import annotations

from decimal import Decimal
from math import inf, nan
from typing import Any

import pyarrow as pa
import pytest

from cutwater.cli.commands.append import _placed
from cutwater.cli.io.inputs import InputRecords
from cutwater.cli.io.ndjson import Rows
from cutwater.client.convert.json_values import encode
from cutwater.client.errors import RecordTooLarge
from cutwater.errors import InvalidArgument

STRUCT = pa.struct({"at": pa.timestamp("ms", "UTC"), "raw": pa.list_(pa.binary())})


def piece_of(*lines: bytes) -> InputRecords:
    return InputRecords(list(lines), range(1, len(lines) + 1), "it, line ")


def read(kind: pa.DataType, line: bytes) -> pa.Array:
    _, rows, _ = Rows(pa.schema({"c": kind}), None, None).of(piece_of(line))
    return pa.array([row["c"] for row in rows], kind)


@pytest.mark.parametrize(
    ("kind", "value", "json"),
    [
        (pa.binary(), b"abc", '"YWJj"'),
        (pa.binary(2), b"\xff\x00", '"/wA="'),
        (pa.large_binary(), b"", '""'),
        (pa.decimal128(5, 2), Decimal("1.25"), '"1.25"'),
        (pa.decimal256(60, 0), Decimal(10**59 + 1), f'"{10**59 + 1}"'),
        (pa.float64(), nan, '"NaN"'),
        (pa.float32(), inf, '"Infinity"'),
        (pa.float64(), -inf, '"-Infinity"'),
        (pa.float64(), -0.0, "-0.0"),
        (pa.timestamp("ns", "UTC"), 1_767_225_600_000_000_000, '"2026-01-01T00:00:00Z"'),
        (pa.timestamp("ns", "UTC"), -1, '"1969-12-31T23:59:59.999999999Z"'),
        (pa.timestamp("us", "UTC"), -1, '"1969-12-31T23:59:59.999999Z"'),
        (pa.timestamp("s", "UTC"), 0, '"1970-01-01T00:00:00Z"'),
        (pa.timestamp("ns", "Europe/Berlin"), 1, '"1970-01-01T01:00:00.000000001+01:00"'),
        (pa.timestamp("ns"), 1_000, '"1970-01-01T00:00:00.000001"'),
        (pa.timestamp("ms"), 1, '"1970-01-01T00:00:00.001000"'),
        (pa.date32(), 1, '"1970-01-02"'),
        (pa.time32("s"), 86_399, '"23:59:59"'),
        (pa.time64("us"), 1, '"00:00:00.000001"'),
        (pa.duration("us"), -1_500_000, '"-PT1.5S"'),
        (pa.duration("ns"), -90_061_000_000_001, '"-PT90061.000000001S"'),
        (pa.month_day_nano_interval(), pa.MonthDayNano([1, 2, 3]), "[1,2,3]"),
        (pa.map_(pa.string(), pa.binary()), {"a": b"x", "b": None}, '[["a","eA=="],["b",null]]'),
        (STRUCT, {"at": 1, "raw": [b"x", None]}, '{"at":"1970-01-01T00:00:00.001000Z","raw":["eA==",null]}'),
        (pa.list_(pa.float64()), [1.5, nan, None], '[1.5,"NaN",null]'),
        (pa.string(), "NaN", '"NaN"'),
        (pa.int64(), 9_007_199_254_740_993, "9007199254740993"),
        (pa.string(), None, "null"),
    ],
)
def test_what_is_written_is_read_back_as_it_was(kind: pa.DataType, value: Any, json: str) -> None:
    stored = pa.array([value], kind)
    line = encode({"c": stored.to_pylist()[0]})
    assert line.decode() == f'{{"c":{json}}}'
    assert encode({"c": read(kind, line).to_pylist()[0]}) == line
    # Beside decimals, numbers are read in another way.
    _, rows, _ = Rows(pa.schema({"c": kind, "d": pa.decimal128(3, 1)}), None, None).of(piece_of(line))
    assert encode({"c": pa.array([rows[0]["c"]], kind).to_pylist()[0]}) == line


@pytest.mark.parametrize(
    ("kind", "json", "value"),
    [
        (pa.decimal128(38, 18), b"1.000000000000000001", Decimal("1.000000000000000001")),
        (pa.decimal128(38, 18), b"12345678901234567890", Decimal(12345678901234567890)),
        (pa.decimal128(5, 2), b"1E2", Decimal(100)),
        (pa.list_(pa.decimal128(5, 2)), b'[1.10,"2"]', [Decimal("1.1"), Decimal(2)]),
        (pa.map_(pa.string(), pa.int64()), b'{"a": 1}', [("a", 1)]),
        (pa.duration("s"), b'"P1DT1H1M1S"', 90_061),
        (pa.timestamp("us", "UTC"), b'"1970-01-01T00:00:00.000001000Z"', 1),
        (pa.timestamp("us", "UTC"), b'"1970-01-01"', 0),
    ],
)
def test_what_people_write_is_taken_exactly(kind: pa.DataType, json: bytes, value: Any) -> None:
    assert read(kind, b'{"c": %b}' % json).equals(pa.array([value], kind))


@pytest.mark.parametrize(
    ("kind", "json", "told"),
    [
        (pa.binary(), b'"abc"', 'bytes in base64, such as "YWJj" for abc, are wanted, not "abc"'),
        (pa.binary(), b"7", "bytes in base64, .* are wanted, not 7"),
        (
            pa.decimal128(5, 2),
            b"1.255",
            "1.255 has more digits than decimal128.5, 2., which has 5, 2 of them after the point: round it",
        ),
        (pa.decimal128(5, 2), b"1e-999999999", "has more digits than decimal128.5, 2.,"),
        (pa.decimal128(5, 2), b"1e99999999999999999999", "exponent that is too large"),
        (pa.decimal128(5, 2), b'"NaN"', 'a decimal number, such as 1.25 or "1.25", is wanted, not "NaN"'),
        (pa.float64(), b'"nan"', '"NaN", "Infinity", "-Infinity", is wanted, not "nan"'),
        (
            pa.timestamp("us", "UTC"),
            b'"2026-01-01T00:00:00.123456789Z"',
            "more digits than the microseconds of timestamp.us, tz=UTC.: ",
        ),
        (pa.timestamp("us", "UTC"), b'"2026-01-01T12:00:00+00:00:00.5"', "the offset in .* has fractions of a second"),
        (pa.timestamp("ns"), b'"2026-01-01T12:00:00.5-01:00:00.0000005"', "the offset in .*: write one such as .02:00"),
        (pa.timestamp("ns", "UTC"), b'"3026-01-01T00:00:00Z"', "is beyond what timestamp.ns, tz=UTC. can hold: let"),
        (pa.timestamp("s", "UTC"), b"1", "a time is a text in ISO 8601"),
        (pa.time32("s"), b'"12:00:00.5"', "has more digits than the seconds of time32.s.: round it"),
        (pa.time32("s"), b'"noon"', "a time of day, such as 12:30:00, is wanted"),
        (pa.duration("s"), b'"P"', "a duration in ISO 8601, such as PT1.5S"),
        (pa.map_(pa.string(), pa.int64()), b"[1]", "an object, or a list of pairs, is wanted"),
        (pa.month_day_nano_interval(), b"1", "months, days and nanoseconds"),
        (pa.list_(pa.binary()), b'["!"]', "bytes in base64"),
    ],
)
def test_what_would_be_changed_is_refused(kind: pa.DataType, json: bytes, told: str) -> None:
    with pytest.raises(InvalidArgument, match=f"it, line 1.*{told}"):
        read(kind, b'{"c": %b}' % json)


@pytest.mark.parametrize(
    ("line", "told"),
    [(b'{"a":"\xff"}', "byte 0xff is not UTF-8"), (b"[" * 100_000, "it is nested too deeply")],
)
def test_bytes_that_are_no_json_name_their_line(line: bytes, told: str) -> None:
    with pytest.raises(InvalidArgument, match=f"it, line 2: this is not JSON: {told}"):
        Rows(None, None, None).of(piece_of(b"{}", line))


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        (pa.string(), 7, "a text, in quotes, is wanted, not 7"),
        (pa.int64(), "7", 'a whole number, without quotes, is wanted, not "7"'),
        (pa.int32(), 2**31, f"a whole number from -2147483648 to 2147483647 is wanted, not {2**31}"),
        (pa.uint8(), -1, "a whole number from 0 to 255 is wanted, not -1"),
        (pa.bool_(), 1, "true or false is wanted, not 1"),
        (pa.float64(), True, "a number, without quotes, is wanted, not true"),
        (pa.struct({"a": pa.list_(pa.int64())}), {"a": [1, {}]}, "a whole number, without quotes, is wanted, not {}"),
        (pa.struct({"a": pa.int64()}), {"a": None, "b": "x"}, ""),
        (pa.list_(pa.string()), "abc", 'a list is wanted, not "abc"'),
        (pa.int64(), 1.5, ""),
        (pa.string(), None, ""),
    ],
)
def test_a_value_of_another_kind_is_told_in_words_of_json(kind: pa.DataType, value: Any, told: str) -> None:
    assert Rows(pa.schema({"c": kind}), None, None).mismatch({"c": value}, "c") == told


def test_rows_have_no_keys() -> None:
    for key, field, option in (("k", None, "--key"), (None, "f", "--key-field")):
        with pytest.raises(InvalidArgument, match=f"its records have no key: leave out {option}$"):
            Rows(pa.schema({"c": pa.int64()}), key, field)


def test_a_record_that_is_too_large_is_told_by_its_line() -> None:
    def append() -> None:
        with _placed(piece_of(b"x", b"y")):
            raise RecordTooLarge(1, 20, 10)

    with pytest.raises(RecordTooLarge) as caught:
        append()
    assert caught.value.message.startswith("it, line 2: this record has 20 bytes, 10 is the most: split it")
