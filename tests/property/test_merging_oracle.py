"""The merge of ordered parts against sorting everything at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutwater.client.convert.encoding import Limits
from cutwater.core.publish.staged import PartOrder
from cutwater.errors import Damaged, InvalidArgument
from cutwater.format import merging
from cutwater.format.entry_codec import BODY_BYTES_MAX
from cutwater.format.merging import POSITION, Blocks

SCHEMA = pa.schema([pa.field("part", pa.int64()), pa.field("row", pa.int64()), POSITION])
Row = tuple[int, int, bytes]

positions = st.binary(max_size=3)


@st.composite
def parts(draw: st.DrawFn) -> list[list[list[Row]]]:
    """Parts, each sorted and cut into blocks."""
    found = []
    for number in range(draw(st.integers(1, 6))):
        rows = [(number, i, at) for i, at in enumerate(sorted(draw(st.lists(positions, min_size=1, max_size=12))))]
        cuts = sorted(draw(st.sets(st.integers(1, len(rows)), max_size=4)) | {0, len(rows)})
        found.append([rows[a:b] for a, b in pairwise(cuts)])
    return found


def block(rows: list[Row]) -> pa.RecordBatch:
    columns = [list(column) for column in zip(*rows, strict=True)]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def rows_of(blocks: Blocks) -> list[Row]:
    return [tuple(row.values()) for one in blocks for row in one.to_pylist()]  # type: ignore[misc]


def in_order(given: list[list[list[Row]]]) -> list[Row]:
    return sorted((row for part in given for rows in part for row in rows), key=lambda row: (row[2], row[0], row[1]))


@given(parts())
def test_rows_come_by_position_then_part_then_as_staged(given: list[list[list[Row]]]) -> None:
    assert rows_of(merging.merge([iter([block(rows) for rows in part]) for part in given])) == in_order(given)


@given(parts(), st.integers(2, 3), st.integers(1, 200))
def test_in_bounds_the_order_is_the_same(given: list[list[list[Row]]], fan_in: int, entry_bytes: int) -> None:
    kept = 0

    def keep(blocks: Blocks) -> Callable[[], Blocks]:
        nonlocal kept
        kept += 1
        found = list(blocks)
        return lambda: iter(found)

    sources = [lambda part=part: iter([block(rows) for rows in part]) for part in given]
    merged = merging.merge_in_bounds(sources, merging.WINDOW_BYTES // fan_in, keep)
    entries = list(merging.in_entries(merged, entry_bytes))
    assert rows_of(iter(entries)) == in_order(given)
    assert bool(kept) == (len(given) > fan_in)


@given(st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0, 1, 90, 300])), min_size=1, max_size=10))
def test_no_entry_is_much_larger_than_it_should_be_unless_a_single_row_is(runs: list[tuple[int, int]]) -> None:
    """Rows of a size follow each other, so that the average size of a block says nothing."""
    schema = pa.schema([pa.field("value", pa.binary()), POSITION])
    values = [bytes(size) for count, size in runs for _ in range(count)]
    rows = pa.RecordBatch.from_arrays([pa.array(values), pa.array([b""] * len(values))], schema=schema)
    entries = list(merging.in_entries(iter([rows]), 100))
    assert [value for entry in entries for value in entry.column(0).to_pylist()] == values
    assert all(entry.nbytes <= 200 or entry.num_rows == 1 for entry in entries)


def test_an_entry_that_no_reader_could_be_sent_is_refused() -> None:
    assert Limits().batch_bytes_max == BODY_BYTES_MAX
    schema = pa.schema([pa.field("value", pa.binary()), POSITION])
    rows = pa.RecordBatch.from_arrays([pa.array([bytes(BODY_BYTES_MAX)]), pa.array([b""])], schema=schema)
    with pytest.raises(InvalidArgument, match="no reader"):
        merging.to_batch(rows, merging.form_of(order(schema, 1)), 1)


def order(schema: pa.Schema, number: int, event_time: str = "", compression: str = "") -> PartOrder:
    return PartOrder(schema.serialize().to_pybytes(), number, event_time, compression)


def test_a_part_of_an_older_schema_is_merged_with_nulls() -> None:
    old = merging.form_of(order(pa.schema([pa.field("a", pa.int64()), POSITION]), 1))
    new = merging.form_of(order(pa.schema([pa.field("b", pa.string()), pa.field("a", pa.int64()), POSITION]), 2))
    common = merging.common_form([old, new])
    assert common is new
    rows = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([b"x"])], schema=old.schema)
    assert merging.adapt(rows, common).to_pylist() == [{"b": None, "a": 1, POSITION.name: b"x"}]


@pytest.mark.parametrize("compression", ["", "lz4", "zstd"])
def test_entries_have_no_positions_and_the_times_of_their_rows(compression: str) -> None:
    at = pa.timestamp("ms", "UTC")
    form = merging.form_of(order(pa.schema([pa.field("at", at), POSITION]), 3, "at", compression))
    rows = pa.RecordBatch.from_arrays([pa.array([5, 2], at), pa.array([b"x", b"y"])], schema=form.schema)
    batch = merging.to_batch(rows, form, 77)
    assert (batch.count, batch.schema, batch.time_min, batch.time_max) == (2, 3, 2_000, 5_000)
    assert pa.ipc.read_record_batch(pa.py_buffer(batch.body), form.rows).column(0).cast(pa.int64()).to_pylist() == [
        5,
        2,
    ]
    plain = merging.form_of(order(pa.schema([pa.field("at", at), POSITION]), 3))
    assert merging.to_batch(rows, plain, 77).time_max == 77


def test_what_cannot_be_merged_is_told_at_once() -> None:
    form = merging.form_of(order(SCHEMA, 1))
    good = block([(1, 1, b"a"), (1, 2, b"b")])
    body = good.serialize().to_pybytes()
    assert merging.read_block(body, form, 2) == good
    assert merging.check_order(good, b"a") == b"b"
    with pytest.raises(InvalidArgument, match="sort them first"):
        merging.check_order(good, b"aa")
    with pytest.raises(InvalidArgument, match="sort them first"):
        merging.check_order(block([(1, 1, b"b"), (1, 2, b"a")]), None)
    nothing = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([1]), pa.array([None], pa.binary())], schema=SCHEMA)
    with pytest.raises(InvalidArgument, match="without"):
        merging.check_order(nothing, None)
    for wrong in (b"garbage", body[:-8]):
        with pytest.raises(Damaged):
            merging.read_block(wrong, form, 2)
    with pytest.raises(Damaged, match="2 rows, not 3"):
        merging.read_block(body, form, 3)
    for wrong_order in (
        PartOrder(b"garbage", 1),
        order(pa.schema([POSITION]), 1),
        order(pa.schema([pa.field("a", pa.int64()), pa.field("b", pa.int64())]), 1),
        order(SCHEMA, 1, "at"),
        order(SCHEMA, 1, "", "gzip"),
    ):
        with pytest.raises(InvalidArgument):
            merging.form_of(wrong_order)


@given(st.data())
def test_whatever_bytes_come_they_are_rows_or_refused(data: st.DataObject) -> None:
    schema = pa.schema([pa.field("text", pa.string()), pa.field("list", pa.list_(pa.binary())), POSITION])
    form = merging.form_of(order(schema, 1))
    rows = pa.RecordBatch.from_arrays(
        [pa.array(["ä", None, "bc"]), pa.array([[b"x", b"y"], [], None]), pa.array([b"1", b"2", b"3"])], schema=schema
    )
    body = bytearray(rows.serialize().to_pybytes())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        block = merging.read_block(bytes(body), form, 3, is_new=True)
        merging.check_order(block, None)
    except (Damaged, InvalidArgument):
        return
    # Whatever passes can be worked with.
    assert sum(one.num_rows for one in merging.in_entries(merging.merge([iter([block]), iter([rows])]), 50)) == 6
    assert merging.to_batch(block, form, 1).count == 3
