"""Parses schemas as text: Spark's column lists (``user string, at timestamp``) and types (``array<double>``) to Arrow
types.

The text means the same to Arrow as to Spark, so that one declaration serves both: ``timestamp`` is an instant in
microseconds UTC, ``timestamp_ntz`` a local one, ``int`` has 32 bits and ``bigint`` 64. Types that a row cannot carry in
both systems (intervals, variants) are refused by name.
"""

from __future__ import annotations

import re
from typing import Final, NoReturn

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument

TIMESTAMP: Final = pa.timestamp("us", "UTC")

_SIMPLE: Final = {
    **dict.fromkeys(("boolean", "bool"), pa.bool_()),
    **dict.fromkeys(("tinyint", "byte"), pa.int8()),
    **dict.fromkeys(("smallint", "short"), pa.int16()),
    **dict.fromkeys(("int", "integer"), pa.int32()),
    **dict.fromkeys(("bigint", "long"), pa.int64()),
    **dict.fromkeys(("float", "real"), pa.float32()),
    "double": pa.float64(),
    **dict.fromkeys(("string", "varchar", "char"), pa.string()),
    "binary": pa.binary(),
    "date": pa.date32(),
    **dict.fromkeys(("timestamp", "timestamp_ltz"), TIMESTAMP),
    "timestamp_ntz": pa.timestamp("us"),
}
_DECIMALS: Final = ("decimal", "dec", "numeric")
_NESTED: Final = ("array", "map", "struct")
_TOKEN: Final = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|('(?:[^'\\]|\\.)*')|(\w+)|([<>(),:]))")


def parse_type(text: str) -> pa.DataType:
    """Parse one type, such as ``double`` or ``map<string, array<int>>``; a list of columns is a struct."""
    if not str(text).strip():
        raise InvalidArgument(f"a type is a text such as 'double' or 'array<string>', not {text!r}")
    return _Parser(text).whole_type()


def parse_schema(text: str) -> pa.Schema:
    """Parse a list of columns, such as ``user string, at timestamp not null``."""
    if not str(text).strip():
        raise InvalidArgument(f"a schema is a text such as 'user string, at timestamp', not {text!r}")
    return _Parser(text).whole_schema()


def shown(kind: pa.DataType) -> str:
    """Format an Arrow type so that this module can parse it; other types as Arrow names them."""
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_map(kind):
        return f"map<{shown(kind.key_type)},{shown(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"array<{shown(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{','.join(f'{quoted(field.name)}:{shown(field.type)}' for field in kind)}>"
    return next((name for name, simple in _SIMPLE.items() if simple == kind), str(kind))


def shown_columns(schema: pa.Schema) -> str:
    """Format the columns of a schema so that this module can parse them."""
    return ", ".join(
        f"{quoted(field.name)} {shown(field.type)}{'' if field.nullable else ' not null'}" for field in schema
    )


def quoted(name: str) -> str:
    """Quote the name of a column, if necessary, so that this module can parse it."""
    return name if re.fullmatch(r"\w+", name) else "`" + name.replace("`", "``") + "`"


class _Parser:
    """Parses from left to right; an error says where it stopped."""

    def __init__(self, text: str) -> None:
        self._text = text = str(text)
        self._tokens: list[tuple[int, str]] = []
        self._next = 0
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                self._fail("an unexpected character", len(text) - len(text[at:].lstrip()))
            self._tokens.append((match.start(match.lastindex or 0), match[0].strip()))
            at = match.end()

    def whole_type(self) -> pa.DataType:
        if len(self._tokens) > 1 and self._tokens[1][1] not in ("<", "("):
            return pa.struct(list(self.whole_schema()))
        kind = self._type()
        self._end()
        return kind

    def whole_schema(self) -> pa.Schema:
        fields = self._fields("")
        self._end()
        return pa.schema(fields)

    def _fields(self, closing: str) -> list[pa.Field]:
        fields: list[pa.Field] = []
        while True:
            name = self._name()
            if any(field.name == name for field in fields):
                self._fail(f"the column {name!r} for the second time")
            self._accept(":")
            kind = self._type()
            nullable = not self._accept("not", "null")
            if self._accept("comment"):
                self._take()
            fields.append(pa.field(name, kind, nullable))
            if not self._accept(","):
                break
        if closing:
            self._expect(closing)
        return fields

    def _type(self) -> pa.DataType:
        at = self._next
        word = self._take().lower()
        if word in _NESTED:
            return self._nested(word)
        if word in _DECIMALS:
            return self._decimal()
        if word not in _SIMPLE:
            self._next = at
            known = ", ".join([*_SIMPLE, "decimal(p,s)", "array<…>", "map<…,…>", "struct<…>"])
            self._fail(f"{word or 'the end'!r} where a type is due; known types: {known}")
        if word in ("varchar", "char") and self._peek() == "(":
            self._arguments(1)
        return _SIMPLE[word]

    def _nested(self, word: str) -> pa.DataType:
        self._expect("<")
        if word == "struct":
            return pa.struct(self._fields(">"))
        kind = self._type()
        if word == "map":
            self._expect(",")
            kind = pa.map_(kind, self._type())
        else:
            kind = pa.list_(kind)
        self._expect(">")
        return kind

    def _decimal(self) -> pa.DataType:
        precision, scale = self._arguments(2) if self._peek() == "(" else (10, 0)
        if not 1 <= precision <= 38 or not 0 <= scale <= precision:
            self._fail(f"decimal({precision},{scale}); a decimal has 1 to 38 digits and a scale of 0 to as many")
        return pa.decimal128(precision, scale)

    def _arguments(self, most: int) -> tuple[int, int]:
        self._expect("(")
        found: list[int] = []
        while len(found) < most:
            word = self._take()
            if not word.isdigit():
                self._next -= 1
                self._fail(f"{word or 'the end'!r} where a number is due")
            found.append(int(word))
            if not self._accept(","):
                break
        self._expect(")")
        return found[0], found[1] if len(found) > 1 else 0

    def _name(self) -> str:
        word = self._take()
        if word.startswith("`"):
            return word[1:-1].replace("``", "`")
        if not re.fullmatch(r"\w+", word):
            self._next -= 1
            self._fail(f"{word or 'the end'!r} where the name of a column is due")
        return word

    def _accept(self, *words: str) -> bool:
        """Take these words if they come next."""
        upcoming = [text.lower() for _, text in self._tokens[self._next : self._next + len(words)]]
        if upcoming != list(words):
            return False
        self._next += len(words)
        return True

    def _peek(self) -> str:
        return self._tokens[self._next][1] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        word = self._peek()
        self._next += 1
        return word

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            self._fail(f"{self._peek() or 'the end'!r} where {sign!r} is due")

    def _end(self) -> None:
        if self._peek():
            self._fail(f"{self._peek()!r} where a comma or the end is due")

    def _fail(self, found: str, at: int | None = None) -> NoReturn:
        if at is None:
            at = self._tokens[self._next][0] if self._next < len(self._tokens) else len(self._text)
        raise InvalidArgument(
            f"the schema {self._text!r} has {found} at character {at + 1}: "
            "write columns as 'name type, name type', types as in Spark SQL"
        )
