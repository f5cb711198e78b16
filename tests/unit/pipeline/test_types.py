"""Schemas as text, values in their one form, rows, keys and durations."""

from __future__ import annotations

import pickle
import struct
from collections import Counter, defaultdict
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutwater.durations import milliseconds
from cutwater.durations import shown as duration_shown
from cutwater.errors import InvalidArgument
from cutwater.pipeline.keyed_state.keys import KeyReader, key_bytes, key_group, key_of_bytes, slice_of
from cutwater.pipeline.rows import Row, RowType, inferred, row_class, untyped
from cutwater.pipeline.values import converter, decoded, encoded
from cutwater.schema_text import parse_schema, parse_type, shown

TIMESTAMP = pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("double", pa.float64()), ("BIGINT", pa.int64()), ("int", pa.int32()), ("integer", pa.int32()),
        ("short", pa.int16()), ("byte", pa.int8()), ("float", pa.float32()), ("boolean", pa.bool_()),
        ("string", pa.string()), ("varchar(10)", pa.string()), ("binary", pa.binary()), ("date", pa.date32()),
        ("timestamp", TIMESTAMP), ("timestamp_ntz", pa.timestamp("us")), ("decimal(12, 2)", pa.decimal128(12, 2)),
        ("decimal", pa.decimal128(10, 0)), ("array<string>", pa.list_(pa.string())),
        ("map<string, array<int>>", pa.map_(pa.string(), pa.list_(pa.int32()))),
        ("struct<a: int, b: struct<c: date>>", pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.date32())]))])),
        ("user string, at timestamp", pa.struct([("user", pa.string()), ("at", TIMESTAMP)])),
    ],
)  # fmt: skip
def test_types_as_spark_writes_them(text: str, kind: pa.DataType) -> None:
    assert parse_type(text) == kind
    assert parse_type(shown(kind)) == kind


def test_schemas_as_spark_writes_them() -> None:
    schema = parse_schema("user string NOT NULL COMMENT 'who, when', `a b` int, at: timestamp")
    assert schema == pa.schema([pa.field("user", pa.string(), False), ("a b", pa.int32()), ("at", TIMESTAMP)])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "a schema is a text"),
        ("user", "'the end' where a type is due"),
        ("user strng", "'strng' where a type is due"),
        ("user string at", "'at' where a comma or the end is due at character 13"),
        ("user string,", "'the end' where the name of a column is due"),
        ("a array<int", "'the end' where '>' is due"),
        ("a decimal(50)", r"decimal\(50,0\); a decimal has"),
        ("a decimal(x)", "'x' where a number is due"),
        ("a int, a int", "the column 'a' for the second time"),
        ("a int; b int", "an unexpected character at character 6"),
        ("a interval", "'interval' where a type is due; known types: boolean"),
    ],
)
def test_what_is_wrong_with_a_schema_and_where(text: str, found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        parse_schema(text)


FLOATS = st.floats(width=32, allow_nan=False)
VALUES = {
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "tinyint": st.integers(-128, 127),
    "double": st.floats(allow_nan=False),
    "float": FLOATS,
    "string": st.text(),
    "binary": st.binary(),
    "boolean": st.booleans(),
    "date": st.dates(),
    "timestamp": st.datetimes(timezones=st.just(UTC)),
    "timestamp_ntz": st.datetimes(),
    "decimal(20,3)": st.decimals(-(10**16), 10**16, places=3),
    "array<map<string,int>>": st.lists(st.dictionaries(st.text(), st.none() | st.integers(-5, 5))),
    "struct<a:array<timestamp>,b:double>": st.fixed_dictionaries(
        {"a": st.lists(st.datetimes(timezones=st.just(UTC))), "b": st.none() | st.floats(allow_nan=False)}
    ),
}


@pytest.mark.parametrize("text", VALUES)
def test_a_value_comes_back_from_arrow_as_it_was_made(text: str) -> None:
    kind = parse_type(text)
    convert = converter(kind)

    @given(st.lists(st.none() | VALUES[text]))
    def check(values: list[Any]) -> None:
        made = [convert(value) for value in values]
        assert made == values
        assert decoded(encoded(made, kind)) == made

    check()


@pytest.mark.parametrize(
    ("text", "given", "made"),
    [
        ("double", 3, 3.0),
        ("float", 0.1, struct.unpack("<f", struct.pack("<f", 0.1))[0]),
        ("timestamp", datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2))), datetime(2026, 1, 1, tzinfo=UTC)),
        ("decimal(5,1)", 7, Decimal("7.0")),
        ("binary", bytearray(b"x"), b"x"),
        ("array<double>", (1, 2), [1.0, 2.0]),
        ("struct<a:int,b:int>", {"a": 1}, {"a": 1, "b": None}),
    ],
)
def test_what_is_handed_over_takes_the_form_of_the_type(text: str, given: Any, made: Any) -> None:
    assert converter(parse_type(text))(given) == made


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("double", "1"), ("double", True), ("int", 2**31), ("int", 1.0), ("bigint", False), ("string", b"x"),
        ("binary", "x"), ("boolean", 1), ("date", datetime(2026, 1, 1)), ("timestamp", datetime(2026, 1, 1)),
        ("timestamp_ntz", datetime(2026, 1, 1, tzinfo=UTC)), ("timestamp", 1.5), ("decimal(3,1)", Decimal("123.4")),
        ("decimal(3,1)", 0.5), ("array<int>", "12"), ("map<string,int>", {None: 1}), ("struct<a:int>", {"b": 1}),
        ("float", 1e300),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(text: str, given: Any) -> None:
    with pytest.raises(InvalidArgument, match="is not a value of type"):
        converter(parse_type(text))(given)


def test_rows_have_columns_by_name_and_by_position() -> None:
    rows = RowType.of("user string, count bigint, `a-b` int, _x int")
    row = rows.make({"user": "u", "count": 3, "a-b": 4, "_x": 5})
    assert (row.user, row.count, row["a-b"], row["_x"], row[0]) == ("u", 3, 4, 5, "u")
    assert row._replace(count=9)._asdict() == {"user": "u", "count": 9, "a-b": 4, "_x": 5}
    assert pickle.loads(pickle.dumps(row)) == row
    with pytest.raises(AttributeError, match="no column 'usr': there are user, count"):
        _ = row.usr
    with pytest.raises(KeyError, match="no column 'usr': there are user, count"):
        _ = row["usr"]
    assert rows.from_columns(rows.to_arrays([row, row])) == [row, row]
    assert rows.from_columns(rows.to_arrays([])) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1, "c": 2}, "has the column 'c', which its schema does not: a bigint, b string"),
        ({"b": "x"}, "the column 'a' is null in a row, but the schema says not null"),
        ({"a": "x"}, "'x' is not a value of type bigint.*a row of a bigint, b string"),
        ("text", "return a dict or a row"),
        (5, "return a dict or a row"),
    ],
)
def test_rows_that_do_not_fit_are_refused(value: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        RowType.of("a bigint not null, b string").make(value)


def test_a_mapping_that_makes_values_up_is_taken_for_what_it_holds() -> None:
    columns = RowType.of("a bigint, b bigint")
    assert columns.make(defaultdict(int, a=1)) == (1, None)
    counter = Counter("aac")
    with pytest.raises(InvalidArgument, match="has the column 'c', which its schema does not"):
        columns.make(counter)
    assert dict(counter) == {"a": 2, "c": 1}


def test_reserved_and_double_columns_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="reserved"):
        RowType.of("_cw int")
    with pytest.raises(InvalidArgument, match="two columns have one name"):
        RowType(pa.schema([("a", pa.int32()), ("a", pa.int32())]))


def test_rows_without_a_schema() -> None:
    assert untyped({"a": 1}) == row_class(("a",))((1,))
    assert isinstance(untyped({"a": 1}), Row)
    assert inferred([{"a": 1}, {"b": "x"}, {"a": 2.5}]) == pa.schema([("a", pa.float64()), ("b", pa.string())])
    with pytest.raises(InvalidArgument, match=r"the column 'a' do not have one type.*Declare schema="):
        inferred([{"a": 1}, {"a": "x"}])


KEYS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.binary() | st.dates() | st.datetimes()
)
ANY_KEY = KEYS | st.datetimes(timezones=st.just(UTC)) | st.lists(KEYS, min_size=2, max_size=3).map(tuple)


@given(ANY_KEY, ANY_KEY)
def test_key_bytes_tell_keys_apart_and_give_them_back(one: Any, two: Any) -> None:
    assert key_of_bytes(key_bytes(one)) == one
    same = type(one) is type(two) and one == two and repr(one) == repr(two)
    assert (key_bytes(one) == key_bytes(two)) == same


PAIRS = st.tuples(st.text(), st.integers(0, 9))


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.lists(st.text()), st.lists(PAIRS))
def test_key_bytes_sort_as_values_do(integers: list[int], texts: list[str], pairs: list[tuple[str, int]]) -> None:
    assert sorted(integers, key=key_bytes) == sorted(integers)
    assert sorted(texts, key=key_bytes) == sorted(texts, key=str.encode)
    assert sorted(pairs, key=key_bytes) == sorted(pairs, key=lambda pair: (pair[0].encode(), pair[1]))


def test_key_groups_are_what_the_documentation_says() -> None:
    """CRC-32 of tag and body, modulo 128: these figures must never change, savepoints depend on them."""
    assert key_bytes("user-1") == b"\x03user-1"
    assert key_bytes(-1) == b"\x02\x7f" + b"\xff" * 7
    assert key_bytes(("a", 1)) == b"\x07\x03a\x00\x00\x02\x80" + b"\x00\xff" * 6 + b"\x01\x00\x00"
    assert [key_group(key_bytes(key)) for key in ("user-1", "", 0, 1, None)] == GROUPS


GROUPS = [84, 55, 114, 100, 13]


@given(st.integers(1, 200), st.integers(1, 300))
def test_slices_are_contiguous_and_cover_all_groups(slices: int, groups: int) -> None:
    found = [slice_of(group, slices, groups) for group in range(groups)]
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] < slices
    assert len(set(found)) == min(slices, groups)


@pytest.mark.parametrize("key", [1.5, ["a"], 2**63, object()])
def test_what_cannot_be_a_key(key: Any) -> None:
    with pytest.raises(InvalidArgument, match="cannot be a key"):
        key_bytes(key)


def test_the_columns_of_a_key() -> None:
    rows = RowType.of("a string, b bigint, c double, d date")
    row = rows.make({"a": "x", "b": 2, "c": 0.5, "d": date(2026, 1, 1)})
    assert KeyReader("a", "op").bind(rows)(row) == "x"
    assert KeyReader(["a", "b"], "op").bind(rows)(row) == ("x", 2)
    assert KeyReader(lambda r: r.b % 2, "op").bind(rows)(row) == 0
    with pytest.raises(InvalidArgument, match="'c' of type double cannot be a key"):
        KeyReader("c", "op").bind(rows)
    for mixed in (True, 1.0, ("a", False), object()):
        with pytest.raises(InvalidArgument, match="the key function gave"):
            KeyReader(lambda r, mixed=mixed: mixed, "op").bind(rows)(row)
    bad: Any
    for bad in (5, [], [1]):
        with pytest.raises(InvalidArgument, match="give a column, a list of columns, or a function"):
            KeyReader(bad, "op")


def test_durations() -> None:
    given: list[Any] = ["5s", "10 minutes", "500ms", "1h", "2 days", 7, timedelta(seconds=1), " 1 minute 30 s "]
    known = [5_000, 600_000, 500, 3_600_000, 172_800_000, 7, 1_000, 90_000]
    assert [milliseconds(value, "x") for value in given] == known
    assert [duration_shown(value) for value in (5_000, 600_000, 500, 0, 86_400_000)] == [
        "5s",
        "10m",
        "500ms",
        "0ms",
        "1d",
    ]
    bad: Any
    with pytest.raises(InvalidArgument, match="x is '5': a unit is missing, write '5ms', '5s' or '5m'"):
        milliseconds("5", "x")
    for bad in ("5 parsecs", "5s 1", "1m 5 parsecs", "", 1.5, True, None, timedelta(microseconds=1)):
        with pytest.raises(InvalidArgument, match="give whole milliseconds, a timedelta, or a text"):
            milliseconds(bad, "x")
    with pytest.raises(InvalidArgument, match="must be at least 0 ms"):
        milliseconds(-1, "x")
