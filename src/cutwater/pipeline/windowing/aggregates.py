"""Implements aggregates of windows: the built-in ones, as in ``"sum(amount)"``, and those that users write.

An aggregate folds rows into an *accumulator*, in the order of their positions. It never changes an accumulator that it
has returned, so a failed call can be undone by keeping the old one. Adding rows one by one or many at a time gives the
same accumulator, bit for bit: floating-point numbers are added one by one, from the left.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from functools import reduce
from itertools import accumulate
from math import isnan
from operator import add
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument
from cutwater.pipeline.rows import Row, RowType, reader
from cutwater.pipeline.values import converter, copier
from cutwater.schema_text import parse_type, shown

_BIGINT: Final = 1 << 63
_EXACT: Final = Context(prec=100)
"""Sums of decimals are exact: Python's own context would round them."""
_CALL: Final = re.compile(r"\s*(\w+)\s*\(\s*(\*|[^()]+?)\s*\)\s*")


class Aggregator(ABC):
    """Base class of users' aggregates. ``state`` and ``result_type`` are types, such as ``array<string>``."""

    state = ""
    result_type = ""

    @abstractmethod
    def create(self) -> Any:
        """Return the accumulator of an empty window."""

    @abstractmethod
    def add(self, accumulator: Any, row: Row) -> Any:
        """Return the accumulator with one more row."""

    @abstractmethod
    def merge(self, accumulator: Any, other: Any) -> Any:
        """Merge two accumulators into one, when session windows merge."""

    def result(self, accumulator: Any) -> Any:
        return accumulator


class Aggregate(ABC):
    """An aggregate for rows of one type. ``stored_type`` and ``result_type`` are None if rows are untyped."""

    stored_type: pa.DataType | None
    result_type: pa.DataType | None
    is_builtin = True

    def create(self) -> Any:
        return None

    @abstractmethod
    def add(self, accumulator: Any, rows: Sequence[Row]) -> Any:
        """Return the accumulator with more rows."""

    @abstractmethod
    def merge(self, accumulator: Any, other: Any) -> Any:
        """Merge two accumulators into one; the second one is of later rows."""

    def result(self, accumulator: Any) -> Any:
        return accumulator

    def pack(self, accumulator: Any) -> Any:
        """Convert an accumulator to a value of ``stored_type``."""
        return accumulator

    def unpack(self, value: Any) -> Any:
        return value


class _Builtin(Aggregate):
    """A built-in aggregate of a column. Nulls do not count, except for ``count(*)``, ``first`` and ``last``."""

    def __init__(self, column: str, kind: pa.DataType | None) -> None:
        self._all = column == "*"
        self._read = reader(column)
        self.stored_type = None if kind is None else self.stored(kind)
        self.result_type = None if kind is None else self.resulting(kind)

    def stored(self, kind: pa.DataType) -> pa.DataType:
        return kind

    def resulting(self, kind: pa.DataType) -> pa.DataType:
        return kind


class _Fold(_Builtin):
    """An aggregate of the values that are not null. It has no accumulator before the first of them."""

    def add(self, accumulator: Any, rows: Sequence[Row]) -> Any:
        values = [value for value in map(self._read, rows) if value is not None]
        return self.fold(accumulator, values) if values else accumulator

    @abstractmethod
    def fold(self, accumulator: Any, values: list[Any]) -> Any:
        """Return the accumulator, which may be None, with more values, of which there is at least one."""

    def merge(self, accumulator: Any, other: Any) -> Any:
        if other is None:
            return accumulator
        return other if accumulator is None else self.fold(accumulator, [other])


class _Count(_Builtin):
    def stored(self, kind: pa.DataType) -> pa.DataType:
        return pa.int64()

    resulting = stored

    def create(self) -> Any:
        return 0

    def add(self, accumulator: Any, rows: Sequence[Row]) -> Any:
        if self._all:
            return accumulator + len(rows)
        return accumulator + len(rows) - list(map(self._read, rows)).count(None)

    def merge(self, accumulator: Any, other: Any) -> Any:
        return accumulator + other


def _summed(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_decimal(kind):
        return pa.decimal128(min(kind.precision + 10, 38), kind.scale)
    raise InvalidArgument(f"a column of type {shown(kind)} cannot be added up: use a numeric one")


def _total(summed: pa.DataType | None, values: list[Any]) -> Any:
    """Return the sum, added from the left. It must fit its type after every value, however values are batched."""
    if isinstance(values[0], Decimal):
        total = reduce(_EXACT.add, values)
        limit: Any = None if summed is None else Decimal(10) ** (summed.precision - summed.scale)
    else:
        total = reduce(add, values)
        limit = _BIGINT if type(total) is int else None
    if limit is not None and sum(map(abs, values)) >= limit:
        for prefix in accumulate(values, _EXACT.add if isinstance(limit, Decimal) else add):
            if not -limit <= prefix < limit:
                raise InvalidArgument(
                    f"a sum is {prefix}, which is more than a {shown(summed or pa.int64())} holds: "
                    "make the column a wider decimal before"
                )
    return total


class _Sum(_Fold):
    def stored(self, kind: pa.DataType) -> pa.DataType:
        return _summed(kind)

    resulting = stored

    def fold(self, accumulator: Any, values: list[Any]) -> Any:
        return _total(self.stored_type, values if accumulator is None else [accumulator, *values])


class _Avg(_Fold):
    """The mean. The accumulator is (sum, count); the result is a double, as in Spark."""

    def stored(self, kind: pa.DataType) -> pa.DataType:
        return pa.struct([pa.field("sum", _summed(kind)), pa.field("count", pa.int64())])

    def resulting(self, kind: pa.DataType) -> pa.DataType:
        return pa.float64()

    def fold(self, accumulator: Any, values: list[Any]) -> Any:
        if accumulator is None:
            return self._sum(values), len(values)
        return self._sum([accumulator[0], *values]), accumulator[1] + len(values)

    def merge(self, accumulator: Any, other: Any) -> Any:
        if accumulator is None or other is None:
            return other if accumulator is None else accumulator
        return self._sum([accumulator[0], other[0]]), accumulator[1] + other[1]

    def _sum(self, values: list[Any]) -> Any:
        return _total(None if self.stored_type is None else self.stored_type.field("sum").type, values)

    def result(self, accumulator: Any) -> Any:
        return None if accumulator is None else float(accumulator[0] / accumulator[1])

    def pack(self, accumulator: Any) -> Any:
        return None if accumulator is None else {"sum": accumulator[0], "count": accumulator[1]}

    def unpack(self, value: Any) -> Any:
        return None if value is None else (value["sum"], value["count"])


def _place(value: Any) -> tuple[bool, Any]:
    """Return a sort key that puts NaN after all numbers, as in Spark."""
    return (True, 0.0) if isinstance(value, float) and isnan(value) else (False, value)


class _Min(_Fold):
    def __init__(self, column: str, kind: pa.DataType | None) -> None:
        super().__init__(column, kind)
        self._key = _place if kind is None or pa.types.is_floating(kind) else None

    def stored(self, kind: pa.DataType) -> pa.DataType:
        if pa.types.is_nested(kind):
            raise InvalidArgument(f"values of type {shown(kind)} have no order: min and max need a simple type")
        return kind

    def fold(self, accumulator: Any, values: list[Any]) -> Any:
        return min(values if accumulator is None else [accumulator, *values], key=self._key)


class _Max(_Min):
    def fold(self, accumulator: Any, values: list[Any]) -> Any:
        return max(values if accumulator is None else [accumulator, *values], key=self._key)


class _First(_Builtin):
    """The first value. The accumulator is a tuple of one value, because the first value may be null."""

    def stored(self, kind: pa.DataType) -> pa.DataType:
        return pa.struct([pa.field("value", kind)])

    def add(self, accumulator: Any, rows: Sequence[Row]) -> Any:
        return accumulator if accumulator is not None or not rows else (self._read(rows[0]),)

    def merge(self, accumulator: Any, other: Any) -> Any:
        return other if accumulator is None else accumulator

    def result(self, accumulator: Any) -> Any:
        return None if accumulator is None else accumulator[0]

    def pack(self, accumulator: Any) -> Any:
        return None if accumulator is None else {"value": accumulator[0]}

    def unpack(self, value: Any) -> Any:
        return None if value is None else (value["value"],)


class _Last(_First):
    def add(self, accumulator: Any, rows: Sequence[Row]) -> Any:
        return (self._read(rows[-1]),) if rows else accumulator

    def merge(self, accumulator: Any, other: Any) -> Any:
        return accumulator if other is None else other


class _CollectList(_Fold):
    """A list of all values. The accumulator is (list, length). The list is shared and grows in place unless it has
    already grown past this accumulator. So an older accumulator stays valid, and adding an element does not copy the
    others."""

    def stored(self, kind: pa.DataType) -> pa.DataType:
        return pa.list_(kind)

    resulting = stored

    def fold(self, accumulator: Any, values: list[Any]) -> Any:
        if accumulator is None:
            return values, len(values)
        items, length = accumulator
        if len(items) != length:
            items = items[:length]
        items.extend(values)
        return items, len(items)

    def merge(self, accumulator: Any, other: Any) -> Any:
        if accumulator is None or other is None:
            return other if accumulator is None else accumulator
        return self.fold(accumulator, other[0][: other[1]])

    def result(self, accumulator: Any) -> Any:
        return [] if accumulator is None else accumulator[0][: accumulator[1]]

    def pack(self, accumulator: Any) -> Any:
        return None if accumulator is None else self.result(accumulator)

    def unpack(self, value: Any) -> Any:
        return None if value is None else (value, len(value))


class _Own(Aggregate):
    """A user's aggregator. Its accumulator is kept in the form of its declared type."""

    is_builtin = False

    def __init__(self, aggregator: Aggregator, name: str) -> None:
        for attribute in ("state", "result_type"):
            if not getattr(aggregator, attribute):
                raise InvalidArgument(
                    f"the aggregator of {name!r} has no {attribute}: give it the type as a text, such as 'double'"
                )
        self._aggregator = aggregator
        self.stored_type = parse_type(aggregator.state)
        self.result_type = parse_type(aggregator.result_type)
        self._convert = converter(self.stored_type)
        self._copy = copier(self.stored_type) or (lambda value: value)

    def create(self) -> Any:
        return self._convert(self._aggregator.create())

    def add(self, accumulator: Any, rows: Sequence[Row]) -> Any:
        for row in rows:
            accumulator = self._convert(self._aggregator.add(self._copy(accumulator), row))
        return accumulator

    def merge(self, accumulator: Any, other: Any) -> Any:
        return self._convert(self._aggregator.merge(self._copy(accumulator), self._copy(other)))

    def result(self, accumulator: Any) -> Any:
        return self._aggregator.result(self._copy(accumulator))


_BUILTIN: Final[Mapping[str, type[_Builtin]]] = {
    "count": _Count, "sum": _Sum, "min": _Min, "max": _Max, "avg": _Avg, "first": _First, "last": _Last,
    "collect_list": _CollectList,
}  # fmt: skip


def check(name: str, given: str | Aggregator) -> None:
    """Refuse, while the pipeline is built, what cannot be an aggregate of any rows."""
    if isinstance(given, Aggregator):
        _Own(given, name)
    else:
        _parsed(name, given)


def bind(name: str, given: str | Aggregator, rows: RowType | None) -> Aggregate:
    """Return an aggregate for rows of a type."""
    if isinstance(given, Aggregator):
        return _Own(given, name)
    function, column = _parsed(name, given)
    if column == "*":
        return _Count("*", pa.int64())
    if rows is None:
        return function(column, None)
    return function(column, rows.type_of(column, repr(given)))


def _parsed(name: str, given: str) -> tuple[type[_Builtin], str]:
    match = _CALL.fullmatch(str(given))
    function = _BUILTIN.get(match[1].lower()) if match else None
    if match is None or function is None or (match[2] == "*" and function is not _Count):
        raise InvalidArgument(
            f"the aggregate {name!r} is {given!r}: write count(*) or one of "
            f"{', '.join(f'{known}(column)' for known in _BUILTIN)}, or give an Aggregator"
        )
    return function, match[2].strip("`")
