"""Defines rows: what a user's function gets for a record, and returns.

A ``Row`` is a tuple with the names of its columns: ``row.amount`` or ``row["amount"]``. A function may return a row or
a dict. ``RowType`` makes rows of a schema from what functions return, and converts between rows and Arrow columns.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from keyword import iskeyword
from operator import attrgetter, call, itemgetter
from typing import Any, Final, cast

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument
from cutwater.pipeline.values import converter, decoded, encoded
from cutwater.schema_text import parse_schema, shown

RESERVED_COLUMN: Final = "_cw"
"""The column that carries a record's position and times next to its payload."""
LOG_TIME: Final = "timestamp"
"""The column in which the log provides event time. Rows that are written need not have it."""


class Row(tuple[Any, ...]):
    """A record's columns, by position and by name."""

    __slots__ = ()
    _fields: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        # Called only if the columns have no attribute of that name: a wrong name, or one that Python cannot write.
        if name not in self._fields:
            raise AttributeError(self._no_column(name))
        return self[name]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            try:
                return tuple.__getitem__(self, self._fields.index(index))
            except ValueError:
                raise KeyError(self._no_column(index)) from None
        return tuple.__getitem__(self, index)

    def _no_column(self, name: str) -> str:
        return f"no column {name!r}: there are {', '.join(self._fields)}"

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changed: Any) -> Row:
        return row_class(self._fields)(tuple((self._asdict() | changed).values()))

    def __repr__(self) -> str:
        return f"Row({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._fields, tuple(self))


def _restore(names: tuple[str, ...], values: tuple[Any, ...]) -> Row:
    return row_class(names)(values)


@lru_cache(maxsize=1_024)
def row_class(names: tuple[str, ...]) -> Callable[[Iterable[Any]], Row]:
    """Return the class of rows with these columns. Attributes of a ``namedtuple`` are read without Python code."""
    plain = namedtuple("Row", names, rename=True)  # type: ignore[misc]
    lent = {name: plain.__dict__[name] for name in names if name in plain._fields}
    made = type("Row", (Row,), {"__slots__": (), "_fields": names, **lent})
    return cast("Callable[[Iterable[Any]], Row]", made)


def reader(*names: str) -> Callable[[Row], Any]:
    """Return a function that reads a column of a row, or several as a tuple, as fast as the interpreter can."""
    plain = all(name.isidentifier() and not name.startswith("_") and not iskeyword(name) for name in names)
    return attrgetter(*names) if plain else itemgetter(*names)


def untyped(value: Any) -> Row:
    """Make a row of a stream that declares no schema: the columns are those of the value itself."""
    if isinstance(value, Row):
        return value
    columns = _mapping(value)
    return row_class(tuple(columns))(columns.values())


class RowType:
    """A schema, with the conversions from values to its rows and from its rows to Arrow."""

    def __init__(self, schema: pa.Schema) -> None:
        if RESERVED_COLUMN in schema.names:
            raise InvalidArgument(f"the column name {RESERVED_COLUMN!r} is reserved: choose another one")
        if len(set(schema.names)) != len(schema.names):
            raise InvalidArgument(f"two columns have one name in the schema {', '.join(schema.names)}")
        self.schema = schema
        self.names: tuple[str, ...] = tuple(schema.names)
        self.row = row_class(self.names)
        self._name_set = frozenset(self.names)
        self._converters = [converter(field.type) for field in schema]
        self._values: Callable[[Any], Iterable[Any]] = itemgetter(*self.names) if self.names else tuple
        self._required = [field.name for field in schema if not field.nullable]
        # A getter of one column returns the value alone, not a tuple.
        self._simple_size = len(self.names) if len(self.names) > 1 and not self._required else -1

    @classmethod
    def of(cls, given: str | pa.Schema | RowType) -> RowType:
        """Make a row type from a schema as users write it."""
        if isinstance(given, RowType):
            return given
        if isinstance(given, pa.Schema):
            return cls(given)
        return cls(parse_schema(given))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowType) and self.schema.equals(other.schema)

    def __hash__(self) -> int:
        return hash(self.names)

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {shown(field.type)}" for field in self.schema)

    def type_of(self, name: str, asker: str) -> pa.DataType:
        if name not in self.names:
            raise InvalidArgument(f"{asker} names the column {name!r}, which is not there: there are {self}")
        return self.schema.field(name).type

    def make(self, value: Any) -> Row:
        """Make a row of this type from what a function returned. A missing column is null."""
        if type(value) is not dict:
            value = _mapping(value)
        if len(value) == self._simple_size:
            # If all columns are there, there are no others. Other cases are handled below.
            try:
                return self.row(map(call, self._converters, self._values(value)))
            except (KeyError, InvalidArgument):
                pass
        row = self.of_values(map(value.get, self.names))
        if self._required or value.keys() != self._name_set:
            self._check_names(value)
        return row

    def of_values(self, values: Iterable[Any]) -> Row:
        """Make a row of this type from a value for each column, in order."""
        values = iter(values)
        try:
            return self.row(map(call, self._converters, values))
        except InvalidArgument as error:
            name = self.names[-1 - sum(1 for _ in values)]
            raise InvalidArgument(f"the column {name!r}: {error.message} (a row of {self})") from None

    def _check_names(self, value: Mapping[str, Any]) -> None:
        unknown = [name for name in value if name not in self.names]
        if unknown:
            raise InvalidArgument(f"a row has the column {unknown[0]!r}, which its schema does not: {self}")
        for name in self._required:
            if value.get(name) is None:
                raise InvalidArgument(f"the column {name!r} is null in a row, but the schema says not null: {self}")

    def from_columns(self, columns: Iterable[pa.Array | pa.ChunkedArray]) -> list[Row]:
        """Make rows from Arrow columns that have this type's schema."""
        return list(map(self.row, zip(*map(decoded, columns), strict=True)))

    def to_arrays(self, rows: list[Row]) -> list[pa.Array]:
        """Make Arrow columns from rows of this type."""
        columns: Iterable[tuple[Any, ...]] = zip(*rows, strict=True) if rows else [()] * len(self.names)
        return [encoded(column, field.type) for column, field in zip(columns, self.schema, strict=True)]


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Row):
        return value._asdict()
    if isinstance(value, Mapping):
        # Unlike a defaultdict, a plain dict makes up no values on access.
        return dict(value)
    raise InvalidArgument(f"a function returned {value!r}: return a dict or a row, or yield several")


def inferred(rows: list[Mapping[str, Any]]) -> pa.Schema:
    """Infer the schema of rows. A column without any value accepts any type."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    fields = []
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            kind = pa.array(values).type
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise InvalidArgument(
                f"the values of the column {name!r} do not have one type: {error}. Declare schema= at the source"
            ) from None
        fields.append(pa.field(name, kind))
    return pa.schema(fields)
