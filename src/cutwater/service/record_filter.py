"""Filters of records: a small language, parsed here and computed by Arrow. Nothing of it is ever executed as a program.

::

    amount > 5 and (country in ('DE', 'FR') or not vip = true) and at >= '2026-01-31T12:00Z' and starts_with(user, 'a')

A comparison has a column on its left and a value on its right. Texts are in single quotes, which are doubled inside
(``'it''s'``); times are texts in ISO 8601, UTC unless they say otherwise; a name that is no word is in backquotes. A
comparison with a value that is missing selects nothing: ``amount is null`` asks for those.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument

CHARS_MAX = 2_000
DEPTH_MAX = 32
VALUES_MAX = 100

_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)|(?P<text>'(?:[^']|'')*')|(?P<quoted>`[^`]+`)"
    r"|(?P<word>[A-Za-z_]\w*)|(?P<mark><=|>=|!=|<>|=|<|>|\(|\)|,))",
    re.ASCII,
)
RowFilter = Callable[[pa.RecordBatch], Any]
"""Returns for each row of a batch whether it is selected: true, false or null."""

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_ORDERED = frozenset({"<", "<=", ">", ">="})
_FUNCTIONS: dict[str, Callable[[Any, str], Any]] = {
    "starts_with": pc.starts_with,
    "ends_with": pc.ends_with,
    "contains": pc.match_substring,
}
_KEYWORDS = frozenset({"and", "or", "not", "in", "is", "null", "true", "false"})


class FilterToken(NamedTuple):
    kind: str
    text: str
    at: int


def compile_filter(text: str, schema: pa.Schema) -> RowFilter:
    """Return a filter for batches that have these columns. Raises ``InvalidArgument``, which says what is wrong."""
    return _Parser(text, schema).whole()


def _tokens(text: str) -> list[FilterToken]:
    if len(text) > CHARS_MAX:
        raise InvalidArgument(f"a filter has {CHARS_MAX} characters at most, not {len(text)}")
    found: list[FilterToken] = []
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise InvalidArgument(f"the filter is wrong at {text[at:].strip()[:20]!r}")
        kind, part = match.lastgroup, match[match.lastgroup]
        if kind == "word" and part.lower() in _KEYWORDS:
            kind, part = "keyword", part.lower()
        found.append(FilterToken(kind, part, match.start(match.lastgroup)))
        at = match.end()
    return found


class _Parser:
    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text, self._schema = text, schema
        self._left = _tokens(text)
        self._left.reverse()
        self._depth = 0

    def whole(self) -> RowFilter:
        if not self._left:
            raise InvalidArgument("the filter is empty: write one such as amount > 5")
        found = self._either()
        if self._left:
            raise self._wrong("the end, 'and' or 'or' is expected")
        return found

    def _either(self) -> RowFilter:
        found = self._both()
        while self._takes("keyword", "or"):
            found = _joined(pc.or_kleene, found, self._both())
        return found

    def _both(self) -> RowFilter:
        found = self._negated()
        while self._takes("keyword", "and"):
            found = _joined(pc.and_kleene, found, self._negated())
        return found

    def _negated(self) -> RowFilter:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise InvalidArgument(f"the filter is nested more than {DEPTH_MAX} times")
        try:
            if not self._takes("keyword", "not"):
                return self._term()
            inner = self._negated()
            return lambda batch: pc.invert(inner(batch))
        finally:
            self._depth -= 1

    def _term(self) -> RowFilter:
        if self._takes("mark", "("):
            found = self._either()
            self._needs("mark", ")")
            return found
        token = self._next("a column is expected")
        if token.kind == "word" and token.text in _FUNCTIONS and self._takes("mark", "("):
            return self._function(token.text)
        field = self._column(token)
        return self._about(field)

    def _function(self, name: str) -> RowFilter:
        field = self._column(self._next("a column is expected"))
        if not (_is_text(field.type) or _is_bytes(field.type)):
            raise InvalidArgument(f"{name} is about texts, and {field.name!r} is {field.type}")
        self._needs("mark", ",")
        value = self._value()
        self._needs("mark", ")")
        if not isinstance(value, str):
            raise InvalidArgument(f"{name} wants a text in single quotes")
        function, column = _FUNCTIONS[name], field.name
        return lambda batch: function(batch.column(column), value)

    def _about(self, field: pa.Field) -> RowFilter:
        column = field.name
        if self._takes("keyword", "is"):
            is_not = self._takes("keyword", "not")
            self._needs("keyword", "null")
            test = pc.is_valid if is_not else pc.is_null
            return lambda batch: test(batch.column(column))
        is_not = self._takes("keyword", "not")
        if is_not or (self._left and self._left[-1][:2] == ("keyword", "in")):
            self._needs("keyword", "in")
            values = pa.array(self._values(field), field.type)
            return lambda batch: _is_in(batch.column(column), values, is_not=is_not)
        token = self._next("a comparison is expected")
        if token.kind != "mark" or token.text not in _COMPARISONS:
            self._left.append(token)
            raise self._wrong("a comparison (=, !=, <, <=, >, >=), 'in' or 'is null' is expected")
        value = _literal(field, self._value())
        if token.text in _ORDERED and pa.types.is_boolean(field.type):
            raise InvalidArgument(f"{field.name!r} is true or false, and has no order")
        compare, scalar = _COMPARISONS[token.text], pa.scalar(value, field.type)
        return lambda batch: compare(batch.column(column), scalar)

    def _values(self, field: pa.Field) -> list[Any]:
        self._needs("mark", "(")
        found = [_literal(field, self._value())]
        while self._takes("mark", ","):
            found.append(_literal(field, self._value()))
            if len(found) > VALUES_MAX:
                raise InvalidArgument(f"the filter lists more than {VALUES_MAX} values")
        self._needs("mark", ")")
        return found

    def _value(self) -> Any:
        token = self._next("a value is expected")
        if token.kind == "text":
            return token.text[1:-1].replace("''", "'")
        if token.kind == "number":
            return int(token.text) if token.text.lstrip("-").isdigit() else Decimal(token.text)
        if token.kind == "keyword" and token.text in ("true", "false"):
            return token.text == "true"
        self._left.append(token)
        raise self._wrong("a value is expected: a number, a text in single quotes, true or false")

    def _column(self, token: FilterToken) -> pa.Field:
        if token.kind not in ("word", "quoted"):
            self._left.append(token)
            raise self._wrong("a column is expected")
        name = token.text.strip("`")
        if self._schema.names.count(name) != 1:
            raise InvalidArgument(f"there is no column {name!r} to filter by: columns are {_listed(self._schema)}")
        return self._schema.field(name)

    def _next(self, wanted: str) -> FilterToken:
        if not self._left:
            raise self._wrong(wanted)
        return self._left.pop()

    def _takes(self, kind: str, text: str) -> bool:
        if self._left and self._left[-1][:2] == (kind, text):
            self._left.pop()
            return True
        return False

    def _needs(self, kind: str, text: str) -> None:
        if not self._takes(kind, text):
            raise self._wrong(f"{text!r} is expected")

    def _wrong(self, wanted: str) -> InvalidArgument:
        where = f"at {self._text[self._left[-1].at :][:20]!r}" if self._left else "at its end"
        return InvalidArgument(f"the filter is wrong {where}: {wanted}")


def _joined(join: Callable[[Any, Any], Any], left: RowFilter, right: RowFilter) -> RowFilter:
    return lambda batch: join(left(batch), right(batch))


def _is_in(column: pa.Array, values: pa.Array, *, is_not: bool) -> Any:
    found = pc.is_in(column, values)
    return pc.and_(pc.invert(found), pc.is_valid(column)) if is_not else found


def _listed(schema: pa.Schema) -> str:
    return ", ".join(schema.names)


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string())


def _is_bytes(kind: pa.DataType) -> bool:
    return kind in (pa.binary(), pa.large_binary())


def _literal(field: pa.Field, value: Any) -> Any:
    """Return a value in the type of its column. It must be exactly that value there."""
    kind = field.type
    try:
        found = _converted(kind, value)
        if found is not None:
            pa.scalar(found, kind)
            return found
    except (pa.ArrowException, ValueError, OverflowError, InvalidOperation) as error:
        raise InvalidArgument(f"{value!s:.80} is no value of column {field.name!r}, {kind}: {error}") from None
    raise InvalidArgument(f"{value!s:.80} cannot be compared with column {field.name!r}, which is {kind}")


def _converted(kind: pa.DataType, value: Any) -> Any:
    types, is_number = pa.types, isinstance(value, int | Decimal) and not isinstance(value, bool)
    if types.is_boolean(kind):
        return value if isinstance(value, bool) else None
    if types.is_integer(kind):
        return value if isinstance(value, int) and not isinstance(value, bool) else None
    if types.is_floating(kind):
        return float(value) if is_number else None
    if types.is_decimal(kind):
        return Decimal(value) if is_number or isinstance(value, str) else None
    if not isinstance(value, str):
        return None
    if _is_text(kind):
        return value
    if _is_bytes(kind):
        return value.encode()
    if types.is_timestamp(kind):
        found = datetime.fromisoformat(value)
        if kind.tz is None:
            return found.replace(tzinfo=None) if found.tzinfo is None else None
        return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    if types.is_date(kind):
        return datetime.fromisoformat(value).date()
    return None
