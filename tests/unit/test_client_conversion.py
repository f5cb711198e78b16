"""What is converted, what is refused because a value would be changed, and where it is said to be."""

from __future__ import annotations

import re
import warnings
from collections import deque
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from cutwater.client.convert.conversion import to_batch
from cutwater.client.convert.schemas import TopicSchema, new_schema
from cutwater.client.errors import InvalidRecord
from cutwater.errors import InvalidArgument

NOON = datetime(2026, 1, 2, 12, 0, 0, 123_456, tzinfo=UTC)
FINE = pd.Timestamp("2026-01-02T12:00:00.123456789Z")
WHO = pa.struct([("name", pa.string()), ("age", pa.int32())])


def stored(kind: pa.DataType, records: Any) -> list[Any]:
    """What becomes of column ``c``."""
    batch = to_batch(TopicSchema("t", [pa.schema({"c": kind})]), records, now_us=0)
    batch.validate(full=True)
    return list(batch.column(0).to_pylist())


def refused(kind: pa.DataType, records: Any) -> InvalidRecord:
    with pytest.raises(InvalidRecord) as caught:
        stored(kind, records)
    assert caught.value.column == "c"
    return caught.value


def dicts(*values: Any) -> list[dict[str, Any]]:
    return [{"c": value} for value in values]


def arrow(*values: Any) -> pa.Table:
    return pa.table({"c": pa.array(values)})


def frame(*values: Any) -> pd.DataFrame:
    return pd.DataFrame({"c": values})


# Members of structs.


@pytest.mark.parametrize("given", [dicts, arrow, frame, lambda *values: pl.DataFrame({"c": values})])
def test_an_unknown_member_is_refused_and_a_lacking_one_is_null(given: Any) -> None:
    assert stored(WHO, given({"age": 3}, None)) == [{"name": None, "age": 3}, None]
    error = refused(WHO, given({"nmae": "ann", "age": 3}))
    assert "there is no field 'nmae'" in error.message
    assert "struct<name: string, age: int32>" in error.message
    # Dicts have their own names, a column of Arrow has them in its type.
    assert error.row in (0, None)
    lists = pa.list_(WHO)
    assert stored(lists, given([{"age": 3}])) == [[{"name": None, "age": 3}]]
    assert "there is no field 'nmae'" in refused(lists, given([{"nmae": "ann"}])).message


def test_the_place_inside_is_named() -> None:
    lines = pa.struct({"lines": pa.list_(pa.struct({"price": pa.int8()}))})
    fine, bad = {"lines": [{"price": 1}]}, {"lines": [{"price": 1}, {"price": 300}]}
    assert "row 1: c.lines[1].price: 300 cannot be int8" in refused(lines, dicts(fine, bad)).message
    assert "row 1: c.lines[1].price: 300 cannot be int8" in refused(lines, arrow(fine, bad)).message
    # What is before a slice, and after it, does not count.
    column = arrow(bad, fine, bad)["c"]
    assert stored(lines, pa.table({"c": column.slice(1, 1)})) == [fine]
    maps = pa.map_(pa.string(), WHO)
    error = refused(maps, dicts({"a": {"age": 1}}, {"b": {"age": 1}, "d": {"age": 1.5}}))
    assert "row 1: c['d'].age: 1.5 cannot be int32" in error.message
    assert "row 0: c['b']: there is no field 'x'" in refused(maps, dicts({"b": {"x": 1}})).message


# The index of a pandas frame.

SALES = TopicSchema("sales", [pa.schema([("user", pa.string()), ("day", pa.int64()), ("amount", pa.float64())])])


class _Frame(pd.DataFrame):  # type: ignore[misc]
    pass


def test_the_index_of_a_frame_is_a_column_if_it_has_a_name() -> None:
    frame = pd.DataFrame({"user": ["bob", "ann", "bob"], "day": [1, 1, 2], "amount": [1.0, 2.0, 4.0]})
    of_users = to_batch(SALES, frame.groupby("user")[["amount"]].sum(), now_us=0)
    assert of_users.to_pylist() == [
        {"user": "ann", "day": None, "amount": 2.0},
        {"user": "bob", "day": None, "amount": 5.0},
    ]
    both = to_batch(SALES, frame.groupby(["user", "day"]).sum(), now_us=0)
    assert both.column("day").to_pylist() == [1, 1, 2]
    assert both.column("user").to_pylist() == ["ann", "bob", "bob"]
    # Without a name it is nothing, and neither is one that is a column as well.
    assert to_batch(SALES, frame[frame.amount > 1], now_us=0).num_rows == 2
    assert to_batch(SALES, _Frame(frame[frame.amount > 1]), now_us=0).num_rows == 2
    assert to_batch(SALES, frame.set_index("user", drop=False), now_us=0).to_pylist() == frame.to_dict("records")
    with pytest.raises(InvalidRecord, match=r"'who': it is the index.*reset_index\(drop=True\)"):
        to_batch(SALES, frame.set_index("user").rename_axis("who"), now_us=0)


# Values that would be changed.


@pytest.mark.parametrize(
    ("kind", "fine", "bad"),
    [
        (pa.float32(), [1.5, 0.1, float("inf"), 3.4e38], [1e300, -1e39]),
        (pa.float16(), [1.5], [1e10, 2049]),
        (pa.int64(), [2.0, 3], [2.5]),
        (pa.bool_(), [True], [7, 0.5]),
        (pa.decimal128(5, 2), [1, Decimal("1.25")], [1.999, 1.255, Decimal("1.999")]),
        (pa.float64(), [2**53], [2**53 + 1]),
        (pa.timestamp("ms", "UTC"), [NOON.replace(microsecond=5_000)], [NOON]),
        (pa.timestamp("s", "UTC"), [NOON.replace(microsecond=0)], [NOON]),
        (pa.timestamp("us", "UTC"), [NOON, FINE.floor("us"), None], [FINE]),
        (pa.timestamp("ns", "UTC"), [FINE], [datetime(3000, 1, 1, tzinfo=UTC)]),
        (pa.time32("s"), [time(1, 2, 3)], [time(1, 2, 3, 4)]),
        (pa.time64("us"), [time(1, 2, 3, 4)], [NOON]),
        (pa.duration("s"), [timedelta(seconds=1)], [timedelta(seconds=1.5)]),
        (pa.duration("us"), [timedelta(seconds=1)], [pd.Timedelta(1, "ns")]),
        (
            pa.date32(),
            [date(2026, 1, 2), datetime(2026, 1, 2)],
            [datetime(2026, 1, 2, 3), datetime(1, 1, 1, tzinfo=UTC)],
        ),
        (pa.date64(), [date(2026, 1, 2)], [datetime(2026, 1, 2, 3)]),
        (pa.list_(pa.string()), [["abc"]], ["abc"]),
    ],
    ids=lambda one: str(one) if isinstance(one, pa.DataType) else "",
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_what_would_be_changed_is_refused(kind: pa.DataType, fine: list[Any], bad: list[Any], is_nested: bool) -> None:
    def values(*given: Any) -> Any:
        return [[one] for one in given] if is_nested else given

    wanted = pa.list_(kind) if is_nested else kind
    for value in bad:
        error = refused(wanted, dicts(*values(*fine, value)))
        assert error.row == len(fine), error
        assert error.message.count("c[0]") == is_nested
        assert refused(wanted, frame(*values(value))).row == 0
        if isinstance(value, pd.Timestamp | pd.Timedelta):
            # Others would have cut it off already.
            continue
        for given in (arrow(*values(value)), pl.DataFrame({"c": values(value)}, strict=False)):
            assert refused(wanted, given).row == 0
    for value in fine:
        (found,) = stored(wanted, dicts(*values(value)))
        found = found[0] if is_nested else found
        expected = value.date() if pa.types.is_date(kind) and isinstance(value, datetime) else value
        assert found == (pytest.approx(expected) if kind == pa.float32() else expected)


def test_text_becomes_a_number_if_it_says_no_more_than_that() -> None:
    assert stored(pa.int64(), arrow("7", "-7", "0")) == [7, -7, 0]
    assert stored(pa.float64(), arrow("0.5", "1e3", "inf")) == [0.5, 1e3, float("inf")]
    for kind, text in [
        (pa.int64(), "007"),
        (pa.int64(), "0x1F"),
        (pa.float64(), "007"),
        (pa.float64(), "1e400"),
        (pa.decimal128(5, 2), "-007.5"),
    ]:
        for given in (arrow("1", text), arrow(b"1", text.encode()), pl.DataFrame({"c": ["1", text]})):
            assert refused(kind, given).row == 1


def test_large_whole_numbers_stay_exact() -> None:
    for given in (dicts(1, 12345678901234567890123), arrow(Decimal(1), Decimal(2**60 + 1))):
        error = refused(pa.float64(), given)
        assert error.row == 1
        assert "whole numbers are exact up to 9007199254740992" in error.message
    # The nearest there is, which Arrow itself does not find for each of them.
    tenths = [Decimal(i) / 10 for i in range(100)]
    assert stored(pa.float64(), arrow(*tenths)) == list(map(float, tenths))
    assert stored(pa.list_(pa.float64()), arrow(tenths)) == [list(map(float, tenths))]
    assert "from -9223372036854775808 to 9223372036854775807" in refused(pa.int64(), dicts(2**64)).message


@pytest.mark.parametrize("given", ["", b""])
@pytest.mark.parametrize("kind", [WHO, pa.map_(pa.string(), pa.int32()), pa.list_(pa.int32())])
def test_text_is_nothing_else(kind: pa.DataType, given: Any) -> None:
    """Arrow would take an empty one for a value without members."""
    assert "is wanted, not" in refused(kind, dicts(given)).message


def test_a_time_in_nanoseconds_is_one_in_every_zone() -> None:
    for kind in (pa.timestamp("ns"), pa.timestamp("ns", "Europe/Berlin")):
        for extreme in (2**63 - 1, -(2**63)):
            assert refused(kind, pa.table({"c": pa.array([0, extreme]).view(kind)})).row == 1


@pytest.mark.parametrize(
    ("around", "wrap"),
    [
        (lambda kind: kind, lambda one: one),
        (pa.list_, lambda one: [one, one]),
        (lambda kind: pa.struct({"x": kind}), lambda one: {"x": one}),
        (lambda kind: pa.map_(pa.string(), kind), lambda one: [("a", one)]),
    ],
)
def test_lists_become_lists_of_fixed_size(around: Any, wrap: Any) -> None:
    """Where one is null, Arrow itself would read beyond the end of its memory, and sometimes crash."""
    kind, source = around(pa.list_(pa.timestamp("us"), 2)), around(pa.list_(pa.timestamp("us")))
    pair = [datetime(2026, 1, 1), None]
    for values in ([wrap(None)], [wrap(None), wrap(pair), None, wrap(pair)]):
        assert stored(kind, pa.table({"c": pa.array(values, source)})) == values
    assert refused(kind, pa.table({"c": pa.array([wrap(None), wrap(pair), wrap(pair * 2)], source)})).row == 2


def test_arrays_of_numpy_are_not_taken_for_numbers_of_another_unit() -> None:
    kind = pa.list_(pa.timestamp("us"))
    times = np.array(["2026-01-02T03:04:05"], "M8[us]")
    assert stored(kind, dicts(times)) == [[datetime(2026, 1, 2, 3, 4, 5)]]
    error = refused(kind, dicts(times, times.astype("M8[ms]")))
    assert (error.row, ".astype('datetime64[us]')" in error.message) == (1, True)


def _arrays() -> list[np.ndarray[Any, Any]]:
    numbers = (0, -1, 127, 128, 255, 2049, 2**24 + 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
    fractions = (-0.0, 2.5, 65_519.0, 1e30, 1e300, 2.0**53, float("inf"), float("nan"))
    whole = [np.iinfo(name) for name in ("i1", "i4", "i8", "u1", "u4", "u8")]
    found = [np.array([1, n], own.dtype) for own in whole for n in numbers if own.min <= n <= own.max]
    with warnings.catch_warnings(action="ignore"):
        found += [np.array([1.0, n], name) for name in ("f2", "f4", "f8", "g") for n in fractions]
    times = ("2026-01-02", "2026-01-02T03:04:05", "NaT")
    for unit in ("D", "s", "ms", "us", "ns"):
        found += [np.array(["2026-01-01", time], f"M8[{unit}]") for time in times]
        found += [np.array([1, n], f"m8[{unit}]") for n in (2, 10**6)]
    found += [np.array([], "f4"), np.array([True, False]), np.array([1, 1 + 1j]), np.array(["a", "b"])]
    found.append(np.array([1, None, 2.5], object))
    return [*found, *(np.concatenate([array[:1]] * 40 + [array[1:]]) for array in found)]


LEAVES = [
    *(pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.decimal128(10, 2)),
    *(pa.timestamp("us"), pa.timestamp("s"), pa.date32(), pa.date64(), pa.duration("us"), pa.duration("s")),
    *(pa.time64("us"), pa.bool_(), pa.string()),
]


@pytest.mark.parametrize("leaf", LEAVES, ids=str)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_an_array_of_numpy_is_stored_or_refused_as_a_list_of_its_items_is(leaf: pa.DataType) -> None:
    """Of most long arrays only the first item is looked at; of a list, each one."""

    def outcome(given: Any) -> str:
        try:
            return repr(stored(pa.list_(leaf), dicts([], given)))
        except InvalidRecord as error:
            return str(error)

    outcomes = {array.dtype.str + repr(array): (outcome(array), outcome(list(array))) for array in _arrays()}
    assert {name: both for name, both in outcomes.items() if both[0] != both[1]} == {}
    assert len({own.startswith("[[]") for own, _ in outcomes.values()}) == 2, "some are stored, and some are refused"


class _Datetime(datetime):
    pass


class _Date(date):
    pass


class _Timedelta(timedelta):
    pass


def _of_own_type(value: Any) -> Any:
    """The same value, of a type that shows nothing about it."""
    if isinstance(value, datetime):
        return _Datetime.combine(value.date(), value.timetz())
    if isinstance(value, date):
        return _Date(value.year, value.month, value.day)
    return _Timedelta(value.days, value.seconds, value.microseconds)


TEMPORAL = [
    *(pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "UTC")),
    *(pa.date32(), pa.date64(), pa.duration("s"), pa.duration("us"), pa.time64("us")),
]


@pytest.mark.parametrize("kind", TEMPORAL, ids=str)
def test_times_are_stored_or_refused_one_by_one_as_a_whole_column_is(kind: pa.DataType) -> None:
    """If the types of a column show that no value can be wrong, the values are not looked at."""
    local = NOON.replace(tzinfo=None)
    times = [NOON, local, NOON.replace(microsecond=0), local.replace(microsecond=0), datetime(2026, 1, 2)]
    durations = [timedelta(1), timedelta(microseconds=5), timedelta(seconds=-1)]
    for value in (*times, date(2026, 1, 2), *durations):
        assert _stored_first(kind, value, None) == _stored_first(kind, _of_own_type(value), None), value


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int64(), pa.uint64()], ids=str)
def test_numbers_are_stored_or_refused_one_by_one_as_a_whole_column_is(kind: pa.DataType) -> None:
    for value in (0, -1, 127, 128, 255, 2**63 - 1, 2**63, 2**64 - 1, 2**64, True, "7", b"7", np.int8(5), None):
        # Where there is a float, each value is looked at.
        assert _stored_first(kind, value) == _stored_first(kind, value, 1.0), value


def _stored_first(kind: pa.DataType, *values: Any) -> str:
    """What is stored of the first value, or the row that is refused."""
    try:
        return repr(stored(kind, dicts(*values))[0])
    except InvalidRecord as error:
        return f"refused: row {error.row}"


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_the_largest_numbers_of_numpy_do_not_become_negative(kind: pa.DataType) -> None:
    large = np.uint64(2**64 - 1)
    assert stored(kind, dicts(np.uint64(5), None)) == [5.0, None]
    for wanted, value in [
        (kind, large),
        (pa.list_(kind), [np.uint64(5), large]),
        (pa.list_(kind), [1.5, None, large]),
        (pa.list_(kind), deque([1.5, np.ulonglong(2**64 - 1)])),
        (pa.list_(kind), np.array([5, 2**64 - 1], "u8")),
        (pa.list_(kind), np.array([1.5, large], object)),
        (pa.list_(kind), pd.Series([2**64 - 1], dtype="uint64")),
        (pa.list_(kind, 1), (large,)),
        (pa.list_(pa.list_(kind)), [[], [large]]),
        (pa.struct({"x": kind}), {"x": large}),
        (pa.map_(pa.string(), kind), {"a": large}),
    ]:
        error = refused(wanted, dicts(None, value))
        assert (error.row, "whole numbers are exact up to" in error.message) == (1, True), wanted


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_columns_of_data_frames_are_lists(kind: pa.DataType) -> None:
    for column in (pl.Series([1.5, 2.5]), pd.Series([1.5, 2.5]), pd.array([1.5, 2.5], "Float64"), deque([1.5, 2.5])):
        assert stored(pa.list_(kind), dicts(column)) == [[1.5, 2.5]], type(column)


@pytest.mark.parametrize("kind", [pa.int8(), pa.int64(), pa.date32(), pa.time64("us")])
@pytest.mark.parametrize("number", [np.complex128(1 + 2j), np.complex64(1 + 2j)])
def test_an_imaginary_part_is_not_lost(kind: pa.DataType, number: Any) -> None:
    for wanted, value in [(kind, number), (pa.list_(kind), [number]), (pa.list_(kind), np.array([number]))]:
        error = refused(wanted, dicts(None, value))
        assert (error.row, "give a whole number" in error.message) == (1, True)


@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.timestamp("ns"), pa.timestamp("s", "Europe/Berlin")])
@pytest.mark.parametrize("number", [0, 1_769_860_800_000, np.int64(5), np.int8(5), -1])
@pytest.mark.parametrize("is_nested", [False, True])
def test_an_integer_is_no_time(kind: pa.DataType, number: Any, is_nested: bool) -> None:
    wanted, values = (pa.list_(kind), [[], None, [None, number]]) if is_nested else (kind, [None, None, number])
    givens = [dicts(*values), arrow(*values), frame(*values), pl.DataFrame({"c": values}, strict=False)]
    if not is_nested:
        givens += [pd.DataFrame({"c": pd.array(values, dtype=name)}) for name in ("Int64", "int64[pyarrow]")]
        givens.append(pa.table({"c": pa.array(values, pa.int32() if number < 2**31 else pa.uint64())}))
    for given in givens:
        error = refused(wanted, given)
        # What pandas makes of integers and None are floats.
        told = r"{}\)? is an integer, and whether it counts seconds|a time is a datetime with a time zone, not {}.0 "
        assert re.search(told.replace("{}", f"{int(number)}"), error.message)
        assert error.row == 2
        assert ("c[1]: " in error.message) == is_nested
    assert stored(kind, pa.table({"c": pa.nulls(2, pa.int64())})) == [None, None]


# Rules inside of nested values.


@pytest.mark.parametrize(
    ("kind", "fine", "bad", "path"),
    [
        (pa.list_(pa.field("item", pa.int32(), nullable=False)), [[1], None, []], [1, None], "c[1]"),
        (pa.list_(pa.field("item", pa.int32(), nullable=False), 2), [[1, 2], None], [1, None], "c[1]"),
        (pa.struct([pa.field("n", pa.int32(), nullable=False)]), [{"n": 1}, None], {"n": None}, "c.n"),
        (pa.struct([pa.field("n", pa.int32(), nullable=False)]), [{"n": 1}, None], {}, "c.n"),
        (
            pa.list_(pa.struct([("s", pa.struct([pa.field("n", pa.int8(), nullable=False)]))])),
            [[{"s": {"n": 1}}, {"s": None}, None], None],
            [{"s": {"n": 1}}, {"s": {"n": None}}],
            "c[1].s.n",
        ),
        (
            pa.map_(pa.string(), pa.field("n", pa.int32(), nullable=False)),
            [[("a", 1)], None],
            [("a", 1), ("b", None)],
            "c[1].value",
        ),
        (
            pa.map_(pa.string(), pa.list_(pa.field("n", pa.int32(), nullable=False))),
            [[("a", [1])], None],
            [("a", [1]), ("b", [1, None])],
            "c[1].value[1]",
        ),
    ],
)
def test_what_is_demanded_inside_is_demanded(kind: pa.DataType, fine: list[Any], bad: Any, path: str) -> None:
    assert stored(kind, dicts(*fine)) == fine
    column = pa.array([bad, *fine, bad, bad], kind)
    assert stored(kind, pa.table({"c": column.slice(1, len(fine))})) == fine
    tables = [pa.table({"c": column.slice(1)})]
    if not pa.types.is_map(kind) and bad:
        # Columns of other types, which demand nothing.
        assert stored(kind, arrow(*fine)) == fine
        tables.append(arrow(*fine, bad))
    for given in (dicts(*fine, bad), *tables):
        error = refused(kind, given)
        assert error.row == len(fine)
        assert f"{path}: this may not be null: give a value" in error.message


@pytest.mark.parametrize("around", [lambda kind: kind, pa.list_, lambda kind: pa.struct({"x": kind})])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (pa.dense_union([pa.field("a", pa.int32()), pa.field("b", pa.string())]), "use a struct"),
        (pa.run_end_encoded(pa.int32(), pa.int64()), "use int64"),
        (pa.list_view(pa.int64()), "use a list of int64"),
        (pa.large_list_view(pa.int64()), "use a list of int64"),
    ],
)
def test_unions_runs_and_list_views_are_no_columns(around: Any, kind: pa.DataType, said: str) -> None:
    with pytest.raises(InvalidArgument, match=f"column 'c' is .*{said}"):
        new_schema({"c": around(kind)}, "")


# Frames, and how pandas says that there is nothing.


def test_categories_of_polars_are_text() -> None:
    given = ["a", None, "b"]
    for kind in (pl.Categorical, pl.Enum(["a", "b"])):
        assert stored(pa.string(), pl.DataFrame({"c": given}, schema={"c": kind})) == given
        nested = pl.DataFrame({"c": [[{"x": one}] for one in given]}, schema={"c": pl.List(pl.Struct({"x": kind}))})
        assert stored(pa.list_(pa.struct({"x": pa.string()})), nested) == [[{"x": one}] for one in given]
    assert stored(pa.string(), pd.DataFrame({"c": pd.Categorical(given)})) == given
    assert stored(pa.int64(), pa.table({"c": pa.array([1, 1, 2]).dictionary_encode()})) == [1, 1, 2]


def test_a_lazy_frame_is_refused_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InvalidArgument, match="cannot be appended"):
            stored(pa.string(), pl.DataFrame({"c": ["x"]}).lazy())


def test_what_pandas_calls_missing_is_null() -> None:
    for kind, value in [
        (pa.timestamp("us", "UTC"), NOON),
        (pa.date32(), NOON.date()),
        (pa.duration("s"), timedelta(1)),
    ]:
        assert stored(kind, dicts(value, pd.NaT)) == [value, None]
        assert stored(kind, frame(value, pd.NaT)) == [value, None]
    assert stored(pa.int64(), dicts(1, pd.NA)) == [1, None]
    assert "c[0]: NaT is how pandas says" in refused(pa.list_(pa.date32()), dicts([pd.NaT])).message


def test_intervals_keep_their_nanoseconds() -> None:
    assert stored(pa.month_day_nano_interval(), dicts(pd.Timedelta(1, "ns"))) == [pa.MonthDayNano([0, 0, 1])]


def test_hints_fit() -> None:
    for unit, given in [("us", dicts(FINE)), ("us", frame(FINE)), ("ns", dicts(datetime(3000, 1, 1, tzinfo=UTC)))]:
        assert "for its beginning" not in refused(pa.timestamp(unit, "UTC"), given).message
    error = refused(pa.timestamp("us", "UTC"), dicts(FINE))
    assert "finer than microseconds: round it, as with .floor('us')" in error.message


def test_prices_become_decimals_and_back() -> None:
    """Arrow's own way from decimals to floats does not come back to each of them."""
    prices = [i / 100 for i in range(1, 1_000)]
    wanted = [Decimal(i) / 100 for i in range(1, 1_000)]
    for kind in (pa.decimal64(10, 2), pa.decimal128(10, 2), pa.decimal128(18, 6), pa.decimal256(60, 3)):
        for given in (arrow(*prices), frame(*prices), pa.table({"c": pa.array(prices, pa.float32())})):
            assert stored(kind, given) == wanted
        # Whole numbers have room if they are small, whatever their type could hold.
        assert stored(kind, arrow(1, -7, None)) == [1, -7, None]
        assert refused(kind, arrow(1.25, 1 / 3)).row == 1
    for given in (arrow(1, 2**32 + 1), arrow(Decimal(1), Decimal(2**32 + 1))):
        assert refused(pa.decimal32(5, 0), given).row == 1
    assert stored(pa.float16(), pa.table({"c": pa.array([1], pa.decimal32(5, 1))})) == [1]


def test_text_of_whole_numbers_stays_exact() -> None:
    for kind, whole_max in ((pa.float32(), 2**24), (pa.float64(), 2**53)):
        assert stored(kind, arrow(str(whole_max), str(-whole_max), None)) == [whole_max, -whole_max, None]
        assert refused(kind, arrow("1.5", str(whole_max + 1))).row == 1


MAP = pa.map_(pa.string(), pa.int64())


@pytest.mark.parametrize("given", [[None], [("a", 1), None], (None,), np.array([None]), [pd.NA], [float("nan")]])
@pytest.mark.parametrize("around", [lambda kind: kind, pa.list_])
def test_a_map_has_only_pairs(around: Any, given: Any) -> None:
    """Arrow ends the process where there is nothing in the place of one."""
    value = given if around(MAP) == MAP else [given]
    for records in (dicts({}, value) if around(MAP) == MAP else dicts([], value), pd.DataFrame({"c": [None, value]})):
        error = refused(around(MAP), records)
        assert (error.row, "is no pair" in error.message) == (1, True)


def test_pairs_of_a_map_may_be_dicts() -> None:
    assert stored(MAP, dicts([{"key": "a", "value": 1}])) == [[("a", 1)]]
    assert "c['a']: 1.5 cannot be int64" in refused(MAP, dicts([{"key": "a", "value": 1.5}])).message
    assert "no field 'x'" in refused(MAP, dicts([{"key": "a", "value": 1, "x": 2}])).message


def test_sets_fill_no_rows_but_their_own() -> None:
    kind = pa.list_(pa.int64(), 2)
    assert stored(kind, dicts({1, 2}, None, [3, 4])) == [[1, 2], None, [3, 4]]
    assert refused(kind, dicts([1, 2], {1, 2, 3}, {4})).row == 1


@pytest.mark.parametrize("make", [pa.list_view, pa.large_list_view])
def test_list_views_become_lists(make: Any) -> None:
    """Arrow makes lists of them that begin where they end."""
    values = [[1, 2], None, [], [3]]
    column = pa.array(values, make(pa.int64()))
    for kind in (pa.list_(pa.int32()), pa.large_list(pa.int64())):
        assert stored(kind, pa.table({"c": column})) == values
        assert stored(kind, pa.table({"c": column.slice(1)})) == values[1:]
        inside = pa.StructArray.from_arrays([column], ["x"])
        assert "c.x: it is a" in refused(pa.struct({"x": kind}), pa.table({"c": inside})).message
        assert stored(inside.type, pa.table({"c": inside})) == [{"x": one} for one in values]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (pa.int64(), dicts(10**5000)),
        (pa.int64(), dicts(Decimal("1E+30"))),
        (pa.list_(pa.int64()), dicts(np.array(5))),
        (pa.float16(), dicts(np.int64(4097))),
        (pa.int8(), pa.table({"c": pa.array([0]).view(pa.timestamp("us", "Mars/Olympus"))})),
        (pa.int8(), pa.table({"c": pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([[1]]))})),
        (pa.string(), pd.DataFrame({"c": pd.period_range("2026", periods=1, freq="D")})),
    ],
)
def test_whatever_does_not_fit_is_named(kind: pa.DataType, given: Any) -> None:
    assert refused(kind, given).row in (0, None)


def test_an_index_with_one_name_twice_is_refused() -> None:
    index = pd.MultiIndex.from_tuples([("a", "b")], names=["user", "user"])
    with pytest.raises(InvalidRecord, match="'user': it is there twice"):
        to_batch(SALES, pd.DataFrame({"amount": [1.0]}, index=index), now_us=0)


def test_the_wrong_one_among_many_is_found() -> None:
    count = 50_000
    assert refused(pa.float32(), dicts(*[1.0] * count, 1e300)).row == count
    assert f"c[{count}]: " in refused(pa.list_(pa.float32()), dicts([1.0] * count + [1e300])).message
    # Of arrays of NumPy, their type says enough.
    vectors = list(np.zeros((100, 10_000), "f4"))
    assert stored(pa.list_(pa.float32()), dicts(*vectors[:1])) == [[0.0] * 10_000]
    times = list(np.zeros((100, 10_000), "M8[us]"))
    to_batch(TopicSchema("t", [pa.schema({"c": pa.list_(pa.timestamp("us"))})]), frame(*times), now_us=0)


def test_objects_of_polars_and_zones_of_times_of_a_day_are_refused() -> None:
    objects = pl.DataFrame({"c": pl.Series([object()], dtype=pl.Object)})
    with pytest.raises(InvalidRecord, match="column 'c': its type is Object"):
        to_batch(TopicSchema("t", [pa.schema({"c": pa.binary()})]), objects, now_us=0)
    assert "has a time zone" in refused(pa.time64("us"), dicts(time(1), time(1, tzinfo=UTC))).message
