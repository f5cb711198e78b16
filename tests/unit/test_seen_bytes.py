"""How much a column is for its readers, held against what Python counts value by value."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from cutwater.format.seen_bytes import is_shared, seen_bytes, stored_type

Random = random.Random
PLAIN = (pa.string(), pa.large_binary(), pa.string_view(), pa.int32(), pa.float64(), pa.null())


def a_kind(rng: Random, depth: int = 0) -> pa.DataType:
    if depth == 3 or rng.random() < 0.3:
        return rng.choice(PLAIN)
    inside = a_kind(rng, depth + 1)
    makers = (
        pa.list_,
        pa.large_list,
        pa.list_view,
        pa.large_list_view,
        lambda kind: pa.list_(kind, 2),
        lambda kind: pa.map_(pa.string(), kind),
        lambda kind: pa.struct([("a", kind), ("b", a_kind(rng, depth + 1))]),
    )
    return rng.choice(makers)(inside)


def a_value(rng: Random, kind: pa.DataType) -> Any:
    types = pa.types
    if types.is_null(kind) or rng.random() < 0.1:
        return None
    if types.is_struct(kind):
        return {field.name: a_value(rng, field.type) for field in kind}
    if types.is_map(kind):
        return [("k" * i, a_value(rng, kind.item_type)) for i in range(rng.randrange(4))]
    if types.is_nested(kind):
        count = kind.list_size if types.is_fixed_size_list(kind) else rng.randrange(4)
        return [a_value(rng, kind.value_type) for _ in range(count)]
    if types.is_integer(kind) or types.is_floating(kind):
        return rng.randrange(100)
    return "x" * rng.randrange(30)


def counted(value: Any, kind: pa.DataType) -> float:
    """What stands for a null in columns of fixed size is counted, too."""
    types, kind = pa.types, stored_type(kind)
    if types.is_null(kind):
        return 0
    if types.is_struct(kind):
        return sum(counted(value and value[field.name], field.type) for field in kind)
    if types.is_fixed_size_list(kind):
        return sum(counted(one, kind.value_type) for one in value or [None] * kind.list_size)
    if types.is_map(kind):
        return sum(len(key) + counted(one, kind.item_type) for key, one in value or ())
    if types.is_nested(kind):
        places = len(value or ()) if "view" in str(kind).split("<", 1)[0] else 0
        return places + sum(counted(one, kind.value_type) for one in value or ())
    return len(value or "") if not types.is_primitive(kind) else kind.bit_width / 8


@pytest.mark.parametrize("seed", range(40))
def test_it_is_what_python_counts(seed: int) -> None:
    rng = Random(seed)
    for _ in range(10):
        kind = a_kind(rng)
        values = [a_value(rng, kind) for _ in range(rng.randrange(10))]
        column = pa.array(values, kind)
        assert seen_bytes(column) == sum(counted(value, kind) for value in values), f"seed {seed}: {kind} {values}"
        start = rng.randrange(len(values) + 1)
        assert seen_bytes(column.slice(start)) == sum(counted(value, kind) for value in values[start:])


@pytest.mark.parametrize("seed", range(20))
def test_views_that_share_values(seed: int) -> None:
    rng = Random(seed)
    kind = a_kind(rng, 1)
    inner = pa.array([a_value(rng, kind) for _ in range(6)], kind)
    for _ in range(3):
        count = rng.randrange(1, 8)
        starts = [rng.randrange(len(inner)) for _ in range(count)]
        sizes = [rng.randrange(len(inner) - start + 1) for start in starts]
        inner = pa.ListViewArray.from_arrays(pa.array(starts, pa.int32()), pa.array(sizes, pa.int32()), inner)
        values = inner.to_pylist()
        assert seen_bytes(inner) == sum(counted(value, inner.type) for value in values)


def test_runs_and_unions() -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([3, 10], pa.int32()), pa.array(["four", "x" * 100]))
    assert seen_bytes(runs) == 3 * 4 + 7 * 100
    assert seen_bytes(pa.StructArray.from_arrays([runs], ["r"])) == 712
    halves = pa.ListArray.from_arrays(pa.array([0, 5, 10], pa.int32()), runs)
    assert seen_bytes(halves) == 712
    assert seen_bytes(halves.slice(1)) == 500
    codes, places = pa.array([0, 0, 1, 0], pa.int8()), pa.array([0, 0, 1, 1], pa.int32())
    parts = [pa.array(["x" * 9, "y"]), pa.array([1, 2], pa.int64())]
    assert seen_bytes(pa.UnionArray.from_dense(codes, places, parts)) == 9 + 9 + 8 + 1
    sparse = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), parts)
    assert seen_bytes(sparse) == 9 + 8


def test_most_columns_share_nothing() -> None:
    for kind in (pa.string(), pa.list_(pa.struct([("a", pa.int8())])), pa.map_(pa.string(), pa.binary())):
        assert not is_shared(kind)
    for kind in (
        pa.string_view(),
        pa.list_(pa.binary_view()),
        pa.list_view(pa.int8()),
        pa.struct([("r", pa.run_end_encoded(pa.int32(), pa.int8()))]),
        pa.dense_union([pa.field("a", pa.int32())]),
        pa.opaque(pa.string_view(), "a", "b"),
    ):
        assert is_shared(kind)
