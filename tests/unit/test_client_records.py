"""From what callers have to the bytes that are stored: what fits, what does not, and how that is said."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutwater.client.append.plain_arrow import (
    Plain,
    Single,
    Values,
    are_in_order,
    joined,
    owned,
    plain_body,
    values_of,
)
from cutwater.client.convert.conversion import to_batch
from cutwater.client.convert.encoding import Limits, encode, row_bytes
from cutwater.client.convert.schemas import (
    HEADERS,
    KEY_VALUE,
    TIMESTAMP,
    TopicSchema,
    decode_schema,
    encode_schema,
    grown_schema,
    new_schema,
)
from cutwater.client.convert.times import TIMES, time_us
from cutwater.client.errors import IncompatibleSchema, InvalidRecord, RecordTooLarge
from cutwater.errors import InvalidArgument
from cutwater.format.checksum import crc32c
from cutwater.format.projection import no_values, read_columns
from tests.times import at_us

PLAIN = TopicSchema("plain")
SCHEMA = pa.schema(
    [
        pa.field("user", pa.string(), nullable=False),
        pa.field("amount", pa.int32()),
        pa.field("at", pa.timestamp("us", "UTC"), nullable=False),
    ]
)
TYPED = TopicSchema("orders", [SCHEMA], "at")
NOW = 1_700_000_000_000_000
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
NOON_US = int(NOON.timestamp()) * 1_000_000


def plain(records: Any, **extra: Any) -> list[dict[str, Any]]:
    batch = to_batch(PLAIN, records, now_us=NOW, **extra)
    assert batch.schema.equals(KEY_VALUE)
    batch.validate(full=True)
    rows: list[dict[str, Any]] = batch.set_column(2, "timestamp", batch.column(2).view(pa.int64())).to_pylist()
    return rows


def row(value: bytes, key: bytes | None = None, timestamp: int = NOW, headers: Any = None) -> dict[str, Any]:
    return {"key": key, "value": value, "timestamp": timestamp, "headers": headers}


# Key and value.


@pytest.mark.parametrize(
    ("records", "values"),
    [
        (b"one", [b"one"]),
        (b"", [b""]),
        ("text", [b"text"]),
        (memoryview(b"view"), [b"view"]),
        ([b"a", "b", bytearray(b"c"), memoryview(b"d")], [b"a", b"b", b"c", b"d"]),
        ((b"a", b"b"), [b"a", b"b"]),
        ((value for value in (b"a", b"b")), [b"a", b"b"]),
        (pa.array([b"a", b"b"]), [b"a", b"b"]),
        (pa.array(["a", "b"], pa.large_string()), [b"a", b"b"]),
        (pa.chunked_array([[b"a"], [b"b", b"c"]]), [b"a", b"b", b"c"]),
        (pd.Series([b"a", "b"]), [b"a", b"b"]),
        (pd.Series(["a", "b"], dtype="string[pyarrow]"), [b"a", b"b"]),
        (pd.DataFrame({"value": pd.Series([b"a"], dtype=pd.ArrowDtype(pa.binary()))}), [b"a"]),
    ],
)
def test_values_of_many_kinds(records: Any, values: list[bytes]) -> None:
    assert plain(records) == [row(value) for value in values]


def test_key_timestamp_and_headers_for_all_or_for_each() -> None:
    assert plain([b"a", b"b"], key=b"k", timestamp=NOON, headers={"h": b"1"}) == [
        row(value, b"k", NOON_US, [("h", b"1")]) for value in (b"a", b"b")
    ]
    local = NOON.astimezone(timezone(timedelta(hours=5)))
    assert plain(
        [b"a", b"b", b"c"], key=[b"k", None, "l"], timestamp=[local, at_us(5), None], headers=[{"h": "x"}, None, {}]
    ) == [
        row(b"a", b"k", NOON_US, [("h", b"x")]),
        row(b"b", None, 5),
        row(b"c", b"l", NOW, []),
    ]
    times = pa.array([1, 2], pa.timestamp("ms"))
    assert [r["timestamp"] for r in plain([b"a", b"b"], timestamp=times)] == [1000, 2000]


def test_rows_and_tables_of_key_and_value() -> None:
    rows = [{"value": b"a", "key": b"k"}, {"value": "b", "timestamp": NOON, "headers": {"h": b"1"}}]
    expected = [row(b"a", b"k"), row(b"b", None, NOON_US, [("h", b"1")])]
    assert plain(rows) == expected
    assert plain(rows[0]) == expected[:1]
    table = pa.table({"value": [b"a", b"b"]})
    assert plain(table, key=[b"k", None]) == [row(b"a", b"k"), row(b"b")]
    assert plain(table.to_batches()[0]) == plain(pl.DataFrame({"value": [b"a", b"b"]})) == [row(b"a"), row(b"b")]
    assert plain(table.to_pandas()) == [row(b"a"), row(b"b")]


@pytest.mark.parametrize(
    ("records", "extra", "column", "at"),
    [
        ([b"a", 5], {}, "value", 1),
        ([b"a", None], {}, "value", 1),
        ([b"a", b"b"], {"key": [b"k", 1.5]}, "key", 1),
        ([b"a", b"b"], {"timestamp": [NOON, NOON.replace(tzinfo=None)]}, "timestamp", 1),
        ([b"a", b"b"], {"timestamp": [NOON, 2**63]}, "timestamp", 1),
        ([b"a", b"b"], {"timestamp": pa.array([None, 5])}, "timestamp", 1),
        ([b"a"], {"timestamp": ["noon"]}, "timestamp", 0),
        ([b"a", b"b"], {"headers": [None, {1: b"x"}]}, "headers", 1),
        ([b"a"], {"headers": [["x"]]}, "headers", 0),
        ([b"a", b"b"], {"headers": [None, {"a": "\ud800"}]}, "headers", 1),
        ([{"value": b"a"}, {"value": b"b", "other": 1}], {}, "other", 1),
        ([{"value": b"a"}, b"b"], {}, "", 1),
        (pa.table({"value": [b"a"], "other": [1]}), {}, "other", None),
        (pa.table({"key": [b"a"]}), {}, "value", None),
        (pa.array([b"a", None]), {}, "value", 1),
        (pa.array([1]), {}, "value", 0),
    ],
)
def test_what_does_not_fit_is_named(records: Any, extra: dict[str, Any], column: str, at: int | None) -> None:
    with pytest.raises(InvalidRecord) as caught:
        plain(records, **extra)
    assert (caught.value.column, caught.value.row) == (column, at)
    assert at is None or f"row {at}" in caught.value.message


@pytest.mark.parametrize("records", [[], (), pa.table({"value": pa.array([], pa.binary())}), pa.array([], pa.binary())])
def test_an_empty_batch_is_refused(records: Any) -> None:
    with pytest.raises(InvalidArgument, match="no record"):
        plain(records)


@pytest.mark.parametrize("records", [None, 5, object()])
def test_what_cannot_be_records_is_refused(records: Any) -> None:
    with pytest.raises(InvalidArgument, match="cannot be appended"):
        plain(records)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"key": 3}, r"key= is bytes or str.*not 3 \(int\): turn it into bytes"),
        ({"key": {"a": 1}}, r"key= is bytes or str.*not \{'a': 1\} \(dict\)"),
        ({"key": [3]}, r"column 'key', row 0: bytes or str are wanted, not 3 \(int\): write str\(...\).encode"),
        ({"key": "\ud800"}, "column 'key', row 0: this text cannot be stored as UTF-8"),
        ({"key": ["\ud800"]}, "column 'key', row 0: this text cannot be stored as UTF-8"),
        ({"timestamp": [pd.NaT]}, "column 'timestamp', row 0: NaT is no time: write None, or leave it out"),
        (
            {"timestamp": "yesterday"},
            r"argument 'timestamp': a time is a datetime.*not 'yesterday' \(str\): parse text",
        ),
        (
            {"timestamp": 1.5},
            r"argument 'timestamp': a time is a datetime.*not 1.5 \(float\): write datetime.fromtimestamp",
        ),
        ({"timestamp": b"x"}, r"argument 'timestamp': a time is a datetime.*not b'x' \(bytes\)"),
        ({"timestamp": True}, r"argument 'timestamp': a time is a datetime.*not True \(bool\)"),
        (
            {"timestamp": {"a": 1}},
            r"timestamp= is a datetime with a time zone, one for all.*one for each, not \{'a': 1\}",
        ),
        (
            {"timestamp": 2**63},
            r"argument 'timestamp': 9223372036854775808 is an integer.* cannot be told: give a datetime.*, UTC\)$",
        ),
        ({"timestamp": [5]}, r"'timestamp', row 0: 5 is an integer.*or Arrow timestamps, such as numbers.cast"),
        ({"headers": 3}, r"headers= is a dict of str to bytes.*'from': b'web'.*not 3 \(int\)"),
        ({"headers": {"a": 3}}, r"'headers', row 0: headers are a dict of str to bytes.*not \{'a': 3\}"),
    ],
)
def test_what_is_wrong_besides_values_gets_advice_of_its_own(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        plain(b"a", **extra)
    assert "cannot be appended" not in caught.value.message
    if "timestamp" in extra and not isinstance(extra["timestamp"], list | dict):
        with pytest.raises(InvalidRecord, match=r"^argument 'watermark': ") as caught:
            time_us(extra["timestamp"], "watermark")
        assert "Arrow" not in caught.value.message


def test_a_column_of_times_says_what_a_time_is() -> None:
    with pytest.raises(InvalidRecord, match=r"row 0: a time is a datetime.*not 'yesterday' \(str\)"):
        plain({"value": b"a", "timestamp": "yesterday"})
    for number in (1.5, 1.7e9):
        with pytest.raises(InvalidRecord, match=r"not 1.* \(float\): write datetime.fromtimestamp\(seconds, UTC\)"):
            plain({"value": b"a", "timestamp": number})
    with pytest.raises(InvalidRecord, match="column 'timestamp', row 1: 1700000000000000 is an integer"):
        plain(pa.table({"value": [b"a", b"b"], "timestamp": [None, NOW]}))
    with pytest.raises(InvalidRecord, match=r"write datetime\(2026, 1, 31, tzinfo=UTC\)"):
        plain({"value": b"a", "timestamp": date(2026, 1, 31)})
    with pytest.raises(InvalidRecord, match=r"row 1: a time is a datetime.*not 'soon' \(str\)"):
        plain(pd.DataFrame({"value": [b"a", b"b"], "timestamp": [None, "soon"]}))


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (pa.timestamp("s"), 1.5, r"a datetime with a time zone, not 1\.5 \(float\): write datetime"),
        (pa.string(), 5, r"text is wanted, not 5 \(int\): write str"),
        (pa.date32(), "2026-01-31", r"a date is wanted, not '2026-01-31' \(str\): write date\.fromisoformat"),
        (pa.float64(), "hot", r"the type is double, so a number is wanted, not 'hot' \(str\): give one, as with float"),
        (pa.int64(), "1.5", r"is int64, so a whole number is wanted, not '1.5' \(str\): give one, as with int\("),
        (pa.int8(), True, r"the type is int8, so a whole number is wanted, not True \(bool\): give one, as with int\("),
        (pa.decimal128(5, 2), "1", r"so a number is wanted, not '1' \(str\): give one, as with Decimal\("),
        (pa.bool_(), 1, r"the type is bool, so True or False is wanted, not 1 \(int\)"),
        (pa.list_(pa.int8()), ["x"], r"c\[0\]: the type is int8, so a whole number is wanted, not 'x' \(str\)"),
    ],
)
def test_what_a_column_wants_is_said(kind: pa.DataType, given: object, said: str) -> None:
    with pytest.raises(InvalidRecord, match=f"column 'c', row 0: .*{said}"):
        to_batch(TopicSchema("t", [pa.schema({"c": kind})]), [{"c": given}], now_us=NOW)


@pytest.mark.parametrize(
    ("given", "said"), [("hot", r"a whole number is wanted, not 'hot'"), ("9" * 20, "999' cannot be")]
)
def test_what_a_column_wants_is_said_of_text_in_arrow(given: str, said: str) -> None:
    with pytest.raises(InvalidRecord, match=f"column 'c', row 1: .*{said}"):
        to_batch(TopicSchema("t", [pa.schema({"c": pa.int64()})]), pa.table({"c": ["1", given]}), now_us=NOW)


def test_a_missing_value_says_what_its_column_is() -> None:
    columns = [pa.field("n", pa.int8(), nullable=False), pa.field("at", pa.timestamp("us", "UTC"))]
    topic, fine = TopicSchema("temps", [pa.schema(columns)], "at"), {"n": 1, "at": datetime.now(UTC)}
    with pytest.raises(
        InvalidRecord, match="column 'at', row 1: this is the event time of topic 'temps': give every row"
    ):
        to_batch(topic, [fine, {"n": 1}], now_us=NOW)
    with pytest.raises(InvalidRecord, match="column 'n', row 1: the column may not be null: give every row a value"):
        to_batch(topic, [fine, {**fine, "n": None}], now_us=NOW)


SECONDS, DAYS = pa.timestamp("s", "UTC"), pa.date32()
BERLIN = pa.timestamp("ms", "Europe/Berlin")
LAST_MS = int(datetime(9999, 12, 31, 23, 59, tzinfo=UTC).timestamp()) * 1_000


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (pa.timestamp("us"), [TIMES.start, TIMES.stop - 1], [TIMES.start - 1, TIMES.stop, NOW * 1_000]),
        (SECONDS, [TIMES.start // 10**6], [TIMES.stop // 10**6, 2**53, 2**62]),
        (pa.timestamp("ns"), [-(2**62), 2**62], []),
        (pa.timestamp("us", "No/Where"), [NOW], [TIMES.stop]),
        (BERLIN, [LAST_MS - 3_600_000], [LAST_MS, LAST_MS + 60_000]),
        (DAYS, [0], [2**30]),
    ],
)
def test_a_time_that_no_datetime_tells_is_refused_in_any_column(kind: Any, good: list[int], bad: list[int]) -> None:
    def times(*numbers: int) -> pa.Array:
        return pa.array(numbers, pa.int32() if kind is DAYS else pa.int64()).view(kind)

    topic = TopicSchema("times", [pa.schema({"at": kind})], "" if kind is DAYS else "at")
    assert to_batch(topic, pa.table({"at": times(*good)}), now_us=NOW).num_rows == len(good)
    for number in bad:
        with pytest.raises(InvalidRecord, match=f"{number} as .* is no time of the years 1 to 9999") as caught:
            to_batch(topic, pa.table({"at": times(0, 1, number, number, 2)}), now_us=NOW)
        assert (caught.value.column, caught.value.row) == ("at", 2)


LONGEST_MS = timedelta.max // timedelta(milliseconds=1)


@pytest.mark.parametrize(
    ("kind", "good", "bad", "said"),
    [
        (pa.duration("s"), [-LONGEST_MS // 1_000 + 86_400, LONGEST_MS // 1_000], [2**62, -(2**62)], "999,999,999 days"),
        (pa.duration("ms"), [LONGEST_MS, timedelta.min // timedelta(milliseconds=1)], [LONGEST_MS + 1], "999,999,999"),
        (pa.duration("us"), [2**62, -(2**62)], [], ""),
        (pa.time64("us"), [0, 86_400 * 10**6 - 1], [86_400 * 10**6, -1, 2**62], "no time of a day"),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_so_are_durations_and_times_of_a_day(
    kind: Any, good: list[int], bad: list[int], said: str, is_nested: bool
) -> None:
    def rows(*numbers: int) -> list[dict[str, Any]]:
        return [{"x": [one] if is_nested else one} for one in numbers]

    topic = TopicSchema("times", [pa.schema({"x": pa.list_(kind) if is_nested else kind})])
    assert len(to_batch(topic, rows(*good), now_us=NOW).to_pylist()) == len(good)
    for number in bad:
        with pytest.raises(InvalidRecord, match=f"{number} as .*{said}") as caught:
            to_batch(topic, rows(0, 1, number, number, 2), now_us=NOW)
        assert (caught.value.column, caught.value.row) == ("x", 2)


LOCAL = datetime(2026, 1, 2, 12)


@pytest.mark.parametrize("time", [LOCAL, 5, 5.0, Decimal(5), "2026-01-02"])
@pytest.mark.parametrize(
    ("around", "wrap"),
    [
        (lambda time: time, lambda one: one),
        (pa.list_, lambda one: [NOON, None, one]),
        (lambda time: pa.struct({"at": time, "n": pa.int64()}), lambda one: {"at": one}),
        (lambda time: pa.struct({"at": time, "n": pa.int64()}), lambda one: (one, 1)),
        (lambda time: pa.struct({"n": pa.int64(), "at": time}), lambda one: [("n", 1), ("at", one)]),
        (lambda time: pa.map_(pa.string(), pa.list_(time)), lambda one: {"a": [one]}),
        (lambda time: pa.map_(time, pa.int64()), lambda one: [(one, 1)]),
    ],
)
def test_a_time_that_may_mean_another_is_refused_at_any_depth(around: Any, wrap: Any, time: object) -> None:
    topic = TopicSchema("times", [pa.schema({"x": around(pa.timestamp("us", "UTC"))})])
    good = {"x": wrap(NOON)}
    assert to_batch(topic, [good, {"x": None}], now_us=NOW).num_rows == 2
    said = {LOCAL: "has no time zone", 5: "5 is an integer|a time is a datetime"}.get(time, "a time is a datetime")
    with pytest.raises(InvalidRecord, match=said) as caught:
        to_batch(topic, [good, {"x": wrap(time)}, {"x": wrap(time)}], now_us=NOW)
    assert (caught.value.column, caught.value.row) == ("x", 1)
    without_zone = TopicSchema("times", [pa.schema({"x": around(pa.timestamp("us"))})])
    assert to_batch(without_zone, [{"x": wrap(LOCAL)}], now_us=NOW).num_rows == 1


@pytest.mark.parametrize("given", [5, [5], [[5]]])
@pytest.mark.parametrize("kind", [pa.list_(pa.list_(pa.list_(pa.int8()))), pa.map_(pa.string(), pa.int8())])
def test_what_has_another_form_than_its_column_is_named(kind: pa.DataType, given: object) -> None:
    with pytest.raises(InvalidRecord, match=r"column 'x', row 0: .* (cannot be|is no pair)"):
        to_batch(TopicSchema("t", [pa.schema({"x": kind})]), [{"x": given}], now_us=NOW)


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("around", ["list", "fixed", "struct", "map"])
def test_so_is_one_inside_of_others(around: str, skip: int) -> None:
    time = pa.timestamp("us")
    kind, wrap = {
        "list": (pa.list_(time), lambda one: [0, one]),
        "fixed": (pa.list_(time, 2), lambda one: [0, one]),
        "struct": (pa.struct({"n": pa.int64(), "at": time}), lambda one: {"n": 1, "at": one}),
        "map": (pa.map_(pa.string(), pa.struct({"at": time})), lambda one: [("a", {"at": one})]),
    }[around]
    topic = TopicSchema("times", [pa.schema({"x": kind})])
    # What is before the slice, and after it, does not count.
    bad = TIMES.stop
    column = pa.array([wrap(bad), wrap(1), None, wrap(NOW), wrap(bad), wrap(bad)], kind)
    assert to_batch(topic, pa.table({"x": column.slice(1, 3)}), now_us=NOW).num_rows == 3
    with pytest.raises(InvalidRecord, match="no time of the years 1 to 9999") as caught:
        to_batch(topic, pa.table({"x": column.slice(1 + skip)}), now_us=NOW)
    assert (caught.value.column, caught.value.row) == ("x", 3 - skip)


@pytest.mark.parametrize(
    ("records", "extra"),
    [
        ([b"x", b"y"], {"timestamp": pa.array([NOW, TIMES.stop], TIMESTAMP)}),
        ([b"x", b"y"], {"timestamp": pa.array([0, 2**62], SECONDS)}),
        (pa.table({"value": [b"x", b"y"], "timestamp": pa.array([NOW, NOW * 1_000], TIMESTAMP)}), {}),
        (pd.DataFrame({"value": [b"x", b"y"], "timestamp": pd.array([0, 2**60], "timestamp[s, UTC][pyarrow]")}), {}),
        ([b"x", b"y"], {"timestamp": [NOON, datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))]}),
    ],
)
def test_so_is_one_of_key_and_value(records: Any, extra: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecord) as caught:
        plain(records, **extra)
    assert (caught.value.column, caught.value.row) == ("timestamp", 1)


def test_lengths_that_differ_and_columns_given_twice_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="2 records, but 1 in key="):
        plain([b"a", b"b"], key=[b"k"])
    with pytest.raises(InvalidArgument, match="column 'key' too"):
        plain([{"value": b"a", "key": b"k"}], key=b"l")


# Topics with a schema.

ROWS = [{"user": "ann", "amount": 5, "at": NOON}, {"user": "bob", "amount": None, "at": NOON + timedelta(seconds=1)}]


@pytest.mark.parametrize(
    "records",
    [
        ROWS,
        pa.Table.from_pylist(ROWS, SCHEMA),
        pa.Table.from_pylist(ROWS).to_batches()[0],
        pa.Table.from_pylist(ROWS).select(["at", "user", "amount"]),
        pd.DataFrame(ROWS),
        pd.DataFrame({"user": ["ann", "bob"], "amount": pd.array([5, None], "Int64"), "at": [r["at"] for r in ROWS]}),
        pl.DataFrame(ROWS),
        pa.table(
            {"user": pa.array(["ann", "bob"]).dictionary_encode(), "amount": [5, None], "at": [r["at"] for r in ROWS]}
        ),
    ],
    ids=lambda records: type(records).__name__,
)
def test_rows_of_many_kinds(records: Any) -> None:
    batch = to_batch(TYPED, records, now_us=NOW)
    assert batch.schema.equals(SCHEMA)
    assert batch.to_pylist() == ROWS
    encoded = encode(batch, TYPED, NOW, limits=Limits())
    assert (encoded.time_min, encoded.time_max, encoded.schema) == (NOON_US, NOON_US + 1_000_000, 1)


@pytest.mark.parametrize(
    ("records", "column", "at"),
    [
        ([ROWS[0], {"user": "bob", "amount": "many", "at": NOON}], "amount", 1),
        ([ROWS[0], {"user": "bob", "amount": 2**40, "at": NOON}], "amount", 1),
        ([ROWS[0], {"user": "bob", "amount": 1.5, "at": NOON}], "amount", 1),
        ([ROWS[0], {"user": "bob", "amount": Decimal("1.5"), "at": NOON}], "amount", 1),
        ([ROWS[0], {"user": "bob", "at": 1.5}], "at", 1),
        ([ROWS[0], {"user": "bob", "at": NOON.replace(tzinfo=None)}], "at", 1),
        ([ROWS[0], {"user": "bob"}], "at", 1),
        ([{"user": "bob"}], "at", None),
        ([ROWS[0], {"usr": "bob"}], "usr", 1),
        ([ROWS[0], {"user": None, "at": NOON}], "user", 1),
        (pa.table({"user": ["a"] * 9, "amount": [1] * 7 + [2**40, 1], "at": [NOON] * 9}), "amount", 7),
        (pd.DataFrame({"user": ["a", "b", "c"], "amount": [1, 2, "x"], "at": [NOON] * 3}), "amount", 2),
        (pd.DataFrame({"user": ["a", "b"], "amount": [1.0, 1.5], "at": [NOON] * 2}), "amount", 1),
        (pl.DataFrame({"user": ["a", None], "at": [NOON] * 2}), "user", 1),
        (pl.DataFrame({"user": ["a"], "at": [NOON], "size": [1]}), "size", None),
    ],
)
def test_a_mismatch_names_column_and_row(records: Any, column: str, at: int | None) -> None:
    with pytest.raises(InvalidRecord) as caught:
        to_batch(TYPED, records, now_us=NOW)
    assert (caught.value.column, caught.value.row) == (column, at)


def test_a_number_is_whole_where_one_is_wanted_also_inside_of_others() -> None:
    """Arrow would cut the fraction off."""
    kinds = {"l": pa.list_(pa.int64()), "s": pa.struct({"n": pa.int8()}), "m": pa.map_(pa.string(), pa.int32())}
    schema = TopicSchema("t", [pa.schema(list(kinds.items()))])
    fine = {"l": [1, 2.0, None], "s": {"n": 3.0}, "m": {"a": 4}}
    assert to_batch(schema, [fine], now_us=NOW).num_rows == 1
    for name, value in {"l": [1, 2.5], "s": {"n": 3.5}, "m": {"a": 4.5}}.items():
        with pytest.raises(InvalidRecord, match="round it, or let the column be double") as caught:
            to_batch(schema, [fine, {**fine, name: value}], now_us=NOW)
        assert (caught.value.column, caught.value.row) == (name, 1)


def test_key_and_value_have_no_place_in_a_topic_with_a_schema() -> None:
    for name, extra in {"key": b"k", "headers": {"a": b"b"}}.items():
        with pytest.raises(
            InvalidArgument, match=f"{name}= has no place: give it in a column of the records; there are "
        ):
            to_batch(TYPED, ROWS, now_us=NOW, **{name: extra})  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgument, match="timestamp= has no place: event time is the column 'at' of the records; "
    ):
        to_batch(TYPED, ROWS, timestamp=datetime.now(UTC), now_us=NOW)
    untimed = TopicSchema("t", [pa.schema({"n": pa.int8()})])
    with pytest.raises(InvalidArgument, match="timestamp= has no place: the topic has no column of event time, so the"):
        to_batch(untimed, [{"n": 1}], timestamp=datetime.now(UTC), now_us=NOW)
    with pytest.raises(InvalidRecord, match="a dict with the columns"):
        to_batch(TYPED, [b"bytes"], now_us=NOW)


# Schemas and how they grow.


def test_a_schema_comes_back_without_what_concerns_its_maker_only() -> None:
    made = pa.Schema.from_pandas(pd.DataFrame({"a": [1]}), preserve_index=False)
    assert made.metadata
    schema = new_schema(made, "")
    assert decode_schema(encode_schema(schema)).equals(schema, check_metadata=True)
    assert not schema.metadata
    assert new_schema({"a": pa.int64()}, "").equals(schema)
    assert new_schema("a bigint", "").equals(schema)


@pytest.mark.parametrize(
    ("schema", "event_time", "match"),
    [
        (pa.schema([]), "", "at least one column"),
        (pa.schema([("a", pa.int8()), ("a", pa.int8())]), "", "twice"),
        (pa.schema([("glsn", pa.int8())]), "", "cannot be named 'glsn'"),
        (pa.schema([("timestamp", pa.int64())]), "", "event_time='timestamp'"),
        (pa.schema([("a", pa.int64())]), "b", "no column of the schema"),
        (pa.schema([("a", pa.int64())]), "a", "must be a timestamp"),
        (pa.schema([("a", pa.list_(pa.dictionary(pa.int8(), pa.string())))]), "", "use string"),
        ({"a": pa.timestamp("us", "Mars/Olympus")}, "", "column 'a' .* no time zone 'Mars/Olympus'.*'Europe/Berlin'"),
        ({"a": pa.list_(pa.struct({"b": pa.timestamp("s", "+99:00")}))}, "", r"column 'a' .* no time zone '\+99:00'"),
        (5, "", "schema= is a pyarrow.Schema"),
    ],
)
def test_schemas_that_cannot_be(schema: Any, event_time: str, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        new_schema(schema, event_time)


def test_a_schema_grows_by_nullable_columns_only() -> None:
    grown = grown_schema(TYPED, SCHEMA.append(pa.field("note", pa.string())))
    assert grown.names == ["user", "amount", "at", "note"]
    for wrong, what in [
        (SCHEMA.append(pa.field("note", pa.string(), nullable=False)), "must be nullable"),
        (SCHEMA.remove(1), "'amount' is gone"),
        (SCHEMA.set(1, pa.field("amount", pa.int64())), "was int32 and would be int64"),
        (SCHEMA.set(0, pa.field("user", pa.string())), "was not null and would be null"),
    ]:
        with pytest.raises(IncompatibleSchema, match=what) as caught:
            grown_schema(TYPED, wrong)
        assert "present: user string not null" in caught.value.message
        assert "given:" in caught.value.message
    with pytest.raises(IncompatibleSchema, match="key and value"):
        grown_schema(PLAIN, SCHEMA)


def test_a_new_column_has_a_known_time_zone_and_an_old_one_is_left_alone() -> None:
    mars = pa.field("mars", pa.timestamp("us", "Mars/Olympus"))
    with pytest.raises(InvalidArgument, match=r"column 'mars' .* no time zone 'Mars/Olympus'"):
        grown_schema(TYPED, SCHEMA.append(mars))
    from_before = TopicSchema("t", [pa.schema([mars])])
    assert grown_schema(from_before, pa.schema([mars, ("note", pa.string())])).names == ["mars", "note"]


# Bodies and limits.


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_a_body_is_what_storage_nodes_can_project(compression: Any) -> None:
    batch = to_batch(
        PLAIN,
        [b"a" * 50] * 100,
        key=[b"%d" % i for i in range(100)],
        timestamp=[at_us(i) for i in range(100)],
        now_us=NOW,
    )
    encoded = encode(batch, PLAIN, NOW, limits=Limits(), compression=compression)
    assert (encoded.count, encoded.checksum, encoded.schema) == (100, crc32c(encoded.body), 0)
    assert (encoded.time_min, encoded.time_max) == (0, 99)
    assert read_columns(encoded.body, KEY_VALUE, KEY_VALUE.names).equals(batch)
    assert read_columns(encoded.body, KEY_VALUE, ["key"]).equals(batch.select(["key"]))


def test_parts_of_all_kinds_become_one_batch_in_their_order() -> None:
    some = pa.array([b"no", b"v1", b"", b"v3"], pa.binary())
    rows = to_batch(TopicSchema("t"), [b"r1", b"r2"], key=b"k", now_us=5)
    parts = [Single(b"s1", None, 3), Single(b"s2", b"k", 9), values_of(some[1:3], 4), values_of(some[3:], 2), rows]
    whole = joined(parts)
    assert whole.times is None
    values = [b"s1", b"s2", b"v1", b"", b"v3", b"r1", b"r2"]
    assert whole.rows.column("value").to_pylist() == values
    assert whole.rows.column("timestamp").cast(pa.int64()).to_pylist() == [3, 9, 4, 4, 2, 5, 5]
    assert whole.rows.schema.equals(KEY_VALUE)
    alike = joined(parts[2:4])
    assert alike.times == (2, 4)
    assert alike.rows.equals(whole.rows.slice(2, 3))
    whole.rows.validate(full=True)


NUMBERS = st.integers(-(2**63), 2**63 - 1)
SINGLES = st.builds(Single, st.binary(max_size=20), st.none() | st.binary(max_size=5), NUMBERS)
ARRAYS = st.lists(st.binary(max_size=20), min_size=1, max_size=20).map(lambda found: pa.array(found, pa.binary()))
WHOLE = st.builds(values_of, ARRAYS, NUMBERS)
SLICED = st.builds(
    lambda values, start, count: values[min(start, len(values) - 1) :][:count],
    *(ARRAYS, st.integers(0, 19), st.integers(1, 20)),
)
SLICES = st.builds(values_of, SLICED, NUMBERS)


def by_arrow(parts: Sequence[Single | Values]) -> pa.RecordBatch:
    """The same records, each of them made by Arrow."""
    keys, values, times = list[bytes | None](), list[bytes](), list[int]()
    for part in parts:
        if isinstance(part, Single):
            keys, values, times = [*keys, part.key], [*values, part.value], [*times, part.timestamp]
        else:
            ends = [end - part.start for end in memoryview(part.offsets).cast("i")]
            values += [bytes(part.data[ends[i] : ends[i + 1]]) for i in range(part.count)]
            keys, times = keys + [None] * part.count, times + [part.timestamp] * part.count
    key = pa.array(keys, pa.binary()) if any(key is not None for key in keys) else pa.nulls(len(keys), pa.binary())
    arrays = [key, pa.array(values, pa.binary()), pa.array(times, TIMESTAMP), no_values(len(keys), HEADERS)]
    return pa.RecordBatch.from_arrays(arrays, schema=KEY_VALUE)


@given(st.lists(SINGLES, min_size=1, max_size=40) | st.lists(WHOLE | SLICES, min_size=1, max_size=10))
def test_the_body_of_plain_records_is_what_arrow_would_write(parts: list[Single | Values]) -> None:
    rows, stamps = by_arrow(parts), [part.timestamp for part in parts]
    times = min(stamps), max(stamps)
    assert plain_body(parts) == Plain(rows.serialize().to_pybytes(), rows.num_rows, times)
    assert joined(parts) == (rows, times)


@given(st.lists(SLICED, min_size=1, max_size=3))
def test_slices_of_something_larger_are_cut_out(slices: list[pa.Array]) -> None:
    found = plain_body([owned(values_of(values, 5)) for values in slices])
    assert found is not None
    read = pa.ipc.read_record_batch(pa.py_buffer(found.body), KEY_VALUE)
    read.validate(full=True)
    assert read.column("value").equals(pa.concat_arrays(slices))


NUMBERS = st.integers(0, 12) | st.sampled_from([-(2**31), -1, 2**31 - 1])


@given(st.lists(NUMBERS, min_size=1, max_size=6) | st.lists(st.integers(0, 10), min_size=1).map(sorted), st.booleans())
def test_what_holds_together_is_what_arrow_says_holds_together(offsets: list[int], is_sliced: bool) -> None:
    """Of arrays that came from elsewhere, whose offsets nobody has looked at before."""
    memory = array("i", offsets)
    try:
        values = pa.Array.from_buffers(
            pa.binary(), len(offsets) - 1, [None, pa.py_buffer(memory), pa.py_buffer(b"x" * 10)]
        )
    except pa.ArrowException:
        return
    values = values[1:] if is_sliced else values
    try:
        values.validate(full=True)
        holds = len(values) > 0
    except pa.ArrowException:
        holds = False
    part = values_of(values, 5)
    assert (part is not None and are_in_order(part)) == holds


def test_many_singles_have_the_same_body_too() -> None:
    parts = [Single(b"%d" % i, None if i % 3 else b"key", i) for i in range(5_000)]
    found = plain_body(parts)
    assert found is not None
    assert found.body == by_arrow(parts).serialize().to_pybytes()
    assert plain_body([*parts, joined(parts).rows]) is None


def test_a_record_over_the_limit_is_named_and_nothing_is_encoded() -> None:
    limits = Limits(record_bytes_max=1000, batch_bytes_max=100_000)
    good = [b"x" * 1000] * 50
    for compression in (None, "zstd"):
        assert (
            encode(to_batch(PLAIN, good, now_us=NOW), PLAIN, NOW, limits=Limits(), compression=compression).count == 50
        )  # type: ignore[arg-type]
        with pytest.raises(RecordTooLarge) as caught:
            encode(to_batch(PLAIN, [*good, b"x" * 993], now_us=NOW), PLAIN, NOW, limits=limits, compression=compression)  # type: ignore[arg-type]
        assert (caught.value.row, caught.value.size, caught.value.limit) == (0, 1008, 1000)
    with pytest.raises(RecordTooLarge) as caught:
        encode(to_batch(PLAIN, [b"x" * 900] * 200, now_us=NOW), PLAIN, NOW, limits=limits)
    assert caught.value.row is None


def test_the_largest_of_many_is_found() -> None:
    rows: list[bytes] = [b"x"] * 70_000
    rows[4321] = b"y" * (1 << 20)
    with pytest.raises(RecordTooLarge) as caught:
        encode(to_batch(PLAIN, rows, now_us=NOW), PLAIN, NOW, limits=Limits())
    assert caught.value.row == 4321


NESTED = st.lists(
    st.fixed_dictionaries(
        {
            "s": st.none() | st.text(max_size=5),
            "l": st.none() | st.lists(st.binary(max_size=4), max_size=4),
            "m": st.none() | st.dictionaries(st.text(max_size=3), st.binary(max_size=3), max_size=3),
            "t": st.none() | st.fixed_dictionaries({"n": st.none() | st.integers(0, 9), "b": st.binary(max_size=3)}),
            "f": st.none() | st.lists(st.integers(0, 9), min_size=2, max_size=2),
        }
    ),
    min_size=1,
    max_size=20,
)
NESTED_SCHEMA = pa.schema(
    [
        ("s", pa.string()),
        ("l", pa.list_(pa.binary())),
        ("m", pa.map_(pa.string(), pa.binary())),
        ("t", pa.struct([("n", pa.int64()), ("b", pa.binary())])),
        ("f", pa.list_(pa.int32(), 2)),
    ]
)


@given(rows=NESTED, skip=st.integers(0, 5))
def test_the_bytes_of_each_row_are_counted_also_in_nested_columns(rows: list[dict[str, Any]], skip: int) -> None:
    def size(value: Any) -> int:
        if isinstance(value, bytes):
            return len(value)
        if isinstance(value, str):
            return len(value.encode())
        return sum(map(size, value))

    table = pa.Table.from_pylist(
        [{**r, "m": None if r["m"] is None else list(r["m"].items())} for r in rows], NESTED_SCHEMA
    )
    batch = table.combine_chunks().to_batches()[0].slice(min(skip, len(rows) - 1))
    rows = rows[min(skip, len(rows) - 1) :]
    assert row_bytes(batch.column("s")).to_pylist() == [size(r["s"] or "") for r in rows]
    assert row_bytes(batch.column("l")).to_pylist() == [size(r["l"] or []) for r in rows]
    assert row_bytes(batch.column("m")).to_pylist() == [size(list((r["m"] or {}).items())) for r in rows]
    assert row_bytes(batch.column("t")).to_pylist() == [8 + (len(r["t"]["b"]) if r["t"] else 0) for r in rows]
    assert row_bytes(batch.column("f")).to_pylist() == [8] * len(rows)


@pytest.mark.parametrize("kind", [HEADERS, pa.list_(pa.string()), pa.list_(pa.field("n", pa.int64(), nullable=False))])
def test_a_column_of_nulls_is_stored_small(kind: pa.DataType) -> None:
    """Also a slice of it. About four bytes per row is what a null of such a type takes."""
    for count in (1, 8, 9, 1_000):
        column = no_values(count, kind)
        column.validate(full=True)
        assert column.equals(pa.nulls(count, kind))
        for some in (column, column.slice(count // 2, 5)):
            assert pa.record_batch([some], names=["c"]).serialize().size < 5 * len(some) + 400
