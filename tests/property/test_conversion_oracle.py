"""Whatever is accepted into a column reads back equal, and whatever is refused is refused because of the row that is
named; on random types and values, of Python, Arrow and pandas."""

from __future__ import annotations

import struct
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from math import isnan
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutwater.client.convert.conversion import to_batch
from cutwater.client.convert.schemas import TopicSchema
from cutwater.client.errors import InvalidRecord

UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
LEAVES = [
    *(pa.bool_(), pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64()),
    *(pa.decimal128(5, 2), pa.decimal128(38, 0), pa.decimal128(38, 10), pa.decimal256(60, 3)),
    *(pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.date32(), pa.date64()),
    *(pa.timestamp(unit, zone) for unit in UNITS for zone in (None, "UTC", "Europe/Berlin")),
    *(pa.duration(unit) for unit in UNITS),
    *(pa.time32("s"), pa.time32("ms"), pa.time64("us")),
]
NOON = datetime(2026, 1, 2, 12)
VALUES = [
    *(True, False, 0, 1, 7, -1, 127, 128, 255, 256, 2049, 2**24 + 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64),
    *(10**22, 86_400_000, 0.0, -0.0, 1.0, 2.0, 0.1, 1.5, 1.25, 1.999, 1e10, 2.0**53, 1e18, 3.5e38, 1e300, 65520.0),
    *(float("inf"), float("-inf"), float("nan")),
    *map(Decimal, ("0", "1", "2.00", "1.25", "1.255", "1.999", "0.1", "999.99", "1000", "18014398509481985", "1E+20")),
    *("", "0", "7", "-7", "007", "0x1F", "1.5", "1e3", "1e400", "nan", "inf", "true", "1", "text", "ä"),
    *("2026-01-02", "2026-01-02 12:00:00.5", "2026-01-02T12:00:00Z", "2026-01-02T12:00:00.123456+01:00"),
    *(b"", b"7", b"text", b"\xff"),
    *(date(2026, 1, 2), date(1, 1, 1), date(3000, 1, 1)),
    *(NOON, NOON.replace(hour=0), NOON.replace(microsecond=5_000), NOON.replace(microsecond=5), datetime(3000, 1, 1)),
    *(NOON.replace(tzinfo=UTC), NOON.replace(microsecond=5, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)),
    *(pd.Timestamp(NOON), pd.Timestamp("2026-01-02T12:00:00.123456789Z"), pd.NaT),
    *(time(), time(1, 2, 3), time(1, 2, 3, 5_000), time(1, 2, 3, 5)),
    *(
        timedelta(),
        timedelta(1),
        timedelta(seconds=1.5),
        timedelta(microseconds=5),
        timedelta.max,
        pd.Timedelta(5, "ns"),
    ),
]

leaf_types = st.sampled_from(LEAVES)
types = leaf_types | st.recursive(
    leaf_types,
    lambda inner: st.one_of(
        st.builds(lambda kind, is_null: pa.list_(pa.field("item", kind, nullable=is_null)), inner, st.booleans()),
        st.builds(lambda kind: pa.list_(kind, 2), inner),
        st.builds(
            lambda one, other, is_null: pa.struct([pa.field("a", one, nullable=is_null), ("b", other)]),
            *(inner, leaf_types, st.booleans()),
        ),
        st.builds(lambda kind: pa.map_(pa.string(), kind), inner),
    ),
    max_leaves=3,
)
leaves = st.none() | st.sampled_from(VALUES)


def values_for(kind: pa.DataType, leaf: st.SearchStrategy[Any] = leaves) -> st.SearchStrategy[Any]:
    """Values of the form of a type, whose leaves may be anything."""
    if pa.types.is_struct(kind):
        members = {field.name: values_for(field.type, leaf) for field in kind}
        found: st.SearchStrategy[Any] = st.fixed_dictionaries({}, optional={**members, "c": leaf})
    elif pa.types.is_map(kind):
        found = st.lists(st.tuples(st.sampled_from("xyz"), values_for(kind.item_type, leaf)), max_size=2)
    elif pa.types.is_nested(kind):
        found = st.lists(values_for(kind.value_type, leaf), min_size=1, max_size=3)
    else:
        return leaf
    return st.none() | found | found | leaf


@st.composite
def python_rows(draw: st.DrawFn) -> tuple[pa.DataType, list[Any]]:
    kind = draw(types)
    # Many of one kind, so that some are accepted.
    chosen = draw(st.lists(leaves, min_size=1, max_size=3))
    return kind, draw(st.lists(values_for(kind, st.sampled_from(chosen)), min_size=1, max_size=4))


def with_leaves(kind: pa.DataType, leaf: pa.DataType) -> pa.DataType:
    """A type of the same form."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(with_leaves(field.type, leaf)).with_nullable(True) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(pa.string(), with_leaves(kind.item_type, leaf))
    return pa.list_(with_leaves(kind.value_type, leaf)) if pa.types.is_nested(kind) else leaf


def fitting(leaf: pa.DataType) -> list[Any]:
    """What Arrow itself keeps in a column of this type."""
    found = []
    for value in VALUES:
        try:
            if is_same(leaf, value, pa.array([value], leaf).to_pylist()[0]):
                found.append(value)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
            continue
    return found


@st.composite
def arrow_columns(draw: st.DrawFn) -> tuple[pa.DataType, pa.Array]:
    kind, leaf = draw(types), draw(leaf_types)
    source = with_leaves(kind, leaf)
    nothing = st.none()
    chosen = st.sampled_from(draw(st.lists(st.sampled_from(FITTING[leaf]), min_size=1, max_size=3)))

    def value(kind: pa.DataType) -> st.SearchStrategy[Any]:
        if pa.types.is_struct(kind):
            return nothing | st.fixed_dictionaries({field.name: value(field.type) for field in kind})
        if pa.types.is_map(kind):
            return nothing | st.lists(st.tuples(st.sampled_from("xyz"), value(kind.item_type)), max_size=2)
        return nothing | (st.lists(value(kind.value_type), max_size=3) if pa.types.is_nested(kind) else chosen)

    column = pa.array(draw(st.lists(value(source), min_size=1, max_size=5)), source)
    return kind, column.slice(draw(st.integers(0, len(column) - 1)))


def nanoseconds(value: Any, kind: pa.DataType) -> int | None:
    """A time, a date, a time of a day or a duration as a number; what has no zone is in UTC."""
    if isinstance(value, pd.Timestamp | pd.Timedelta):
        return int(value.asm8.astype("int64")) * UNITS[value.unit]
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        delta = (value if value.tzinfo is not None else value.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    elif isinstance(value, date):
        delta = timedelta((value - date(1970, 1, 1)).days)
    elif isinstance(value, time):
        delta = datetime.combine(date.min, value) - datetime.min
    elif isinstance(value, timedelta):
        delta = value
    elif isinstance(value, int | float | Decimal) and value == int(value):
        unit = 86_400 * 10**9 if pa.types.is_date32(kind) else UNITS["ms" if pa.types.is_date64(kind) else kind.unit]
        return int(value) * unit
    else:
        return None
    return delta // timedelta(microseconds=1) * 1_000


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal)


def is_same(kind: pa.DataType, given: Any, found: Any) -> bool:
    """Whether what was found is what was given, said of a column of this type."""
    if given is None or given is pd.NaT:
        return found is None
    if found is None:
        return False
    if pa.types.is_struct(kind):
        return set(given) <= set(kind.names) and all(is_same(f.type, given.get(f.name), found[f.name]) for f in kind)
    if pa.types.is_map(kind):
        pairs = zip(given, found, strict=True)
        return all(one[0] == other[0] and is_same(kind.item_type, one[1], other[1]) for one, other in pairs)
    if pa.types.is_nested(kind):
        return len(given) == len(found) and all(map(lambda *pair: is_same(kind.value_type, *pair), given, found))
    if pa.types.is_timestamp(kind) and is_number(given):
        # Its unit is not known.
        return False
    if pa.types.is_temporal(kind):
        if isinstance(given, datetime) and not pa.types.is_timestamp(kind):
            return pa.types.is_date(kind) and given.tzinfo is None and given == datetime.combine(found, time())
        return nanoseconds(given, kind) == nanoseconds(found, kind)
    if pa.types.is_floating(kind):
        return is_same_float(kind.bit_width, float(given) if isinstance(given, str | bytes) else given, float(found))
    if isinstance(given, datetime | date | time | timedelta):
        # As text, or as a number: what Arrow makes of it is looked at by nobody here.
        return True
    if isinstance(given, bytes) and is_number(found):
        given = given.decode()
    if isinstance(found, bool):
        return given == found if is_number(given) else str(given).lower() in (("false", "0"), ("true", "1"))[found]
    if isinstance(given, bool):
        return str(given).lower() == found if isinstance(found, str) else given == found
    if is_number(given) and isinstance(found, str):
        return is_told(float(given), float(found))
    if isinstance(given, float) and isinstance(found, Decimal):
        return is_told(given, float(found))
    if isinstance(given, str) and is_number(found):
        return Decimal(given) == found and given.lstrip("-")[:2] not in ("00", "0x")
    if isinstance(given, str | bytes) and isinstance(found, str | bytes):
        return (given.encode() if isinstance(given, str) else given) == (
            found.encode() if isinstance(found, str) else found
        )
    return bool(given == found)


def is_told(given: float, found: float) -> bool:
    """Whether digits tell this number, of 64 bits or of fewer."""
    largest = {16: 6e4, 32: 3e38, 64: float("inf")}
    return any(is_same_float(bits, found, given) for bits in largest if not abs(found) > largest[bits])


def is_same_float(bits: int, given: Any, found: float) -> bool:
    """Rounded as IEEE 754 has it, except that whole numbers stay exact."""
    if isinstance(given, int) or (isinstance(given, Decimal) and given == int(given)):
        return given == found
    given = float(given)
    if isnan(given):
        return isnan(found)
    form = {16: "e", 32: "f", 64: "d"}[bits]
    return bool(struct.unpack(form, struct.pack(form, given))[0] == found)


FITTING = {kind: fitting(kind) for kind in LEAVES}


def check_refused(topic: TopicSchema, records: Any, error: InvalidRecord) -> None:
    """The row that is named is wrong by itself."""
    assert error.column == "x"
    row = error.row
    if row is None:
        # What is wrong is the type.
        return
    itself = records.slice(row, 1) if isinstance(records, pa.Table) else records[row : row + 1]
    with pytest.raises(InvalidRecord):
        to_batch(topic, itself, now_us=0)


def check(kind: pa.DataType, records: Any, rows: list[Any]) -> None:
    topic = TopicSchema("t", [pa.schema({"x": kind})])
    try:
        batch = to_batch(topic, records, now_us=0)
    except InvalidRecord as error:
        check_refused(topic, records, error)
        return
    batch.validate(full=True)
    found = batch.column(0).to_pylist()
    for one, other in zip(rows, found, strict=True):
        assert is_same(kind, one, other), (kind, one, other)


@given(python_rows())
def test_python_values_read_back_equal(drawn: tuple[pa.DataType, list[Any]]) -> None:
    kind, rows = drawn
    check(kind, [{"x": row} for row in rows], rows)


@given(arrow_columns())
def test_arrow_columns_read_back_equal(drawn: tuple[pa.DataType, pa.Array]) -> None:
    kind, column = drawn
    check(kind, pa.table({"x": column}), column.to_pylist())


@given(leaf_types, leaf_types, st.data())
def test_pandas_series_read_back_equal(kind: pa.DataType, source: pa.DataType, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.sampled_from(FITTING[source]), min_size=1, max_size=4))
    frame = pa.table({"x": pa.array(rows, source)}).to_pandas()
    # NaN is null to pandas.
    check(kind, frame, [None if value is pd.NaT or value != value else value for value in frame["x"].tolist()])  # noqa: PLR0124
