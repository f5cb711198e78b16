"""Filters of the REST API: parsed, computed by Arrow, bounded, and compared with the same test in Python."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from cutwater.errors import InvalidArgument
from cutwater.service.record_filter import CHARS_MAX, DEPTH_MAX, compile_filter

SCHEMA = pa.schema(
    {
        "amount": pa.int64(),
        "user": pa.string(),
        "at": pa.timestamp("us", "UTC"),
        "local": pa.timestamp("us"),
        "day": pa.date32(),
        "value": pa.binary(),
        "vip": pa.bool_(),
        "price": pa.decimal128(10, 2),
        "share": pa.float64(),
        "tags": pa.list_(pa.string()),
        "two words": pa.int32(),
    }
)
ROWS = [
    {
        "amount": number,
        "user": "it's" if number == 3 else "ann" if number % 2 else None,
        "at": datetime(2026, 1, 1, number, tzinfo=UTC),
        "local": datetime(2026, 1, 1, number),
        "day": datetime(2026, 1, 1 + number).date(),
        "value": b"x%d" % number,
        "vip": number > 5,
        "price": Decimal(number) / 4,
        "share": number / 2,
        "tags": [],
        "two words": number,
    }
    for number in range(10)
]
BATCH = pa.RecordBatch.from_pylist(ROWS, schema=SCHEMA)


def selected(text: str) -> list[int]:
    found: list[int] = BATCH.filter(compile_filter(text, SCHEMA)(BATCH)).column("amount").to_pylist()
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("amount > 7", [8, 9]),
        ("amount>=8 AND vip = true", [8, 9]),
        ("amount = 1 or amount = 2 and vip = true", [1]),
        ("(amount = 1 or amount = 7) and vip = true", [7]),
        ("not amount > 1", [0, 1]),
        ("amount <> 0 and amount != 1 and amount <= 3", [2, 3]),
        ("user = 'it''s'", [3]),
        ("user is null and amount < 5", [0, 2, 4]),
        ("user is not null and amount < 4", [1, 3]),
        ("amount in (1, 5, 77)", [1, 5]),
        ("amount not in (0,1,2,3,4,5,6,7)", [8, 9]),
        ("user not in ('it''s') and amount < 4", [1]),
        ("at >= '2026-01-01T08:00Z'", [8, 9]),
        ("at > '2026-01-01T10:00+02:00'", [9]),
        ("local < '2026-01-01T01:00'", [0]),
        ("day = '2026-01-03'", [2]),
        ("value in ('x4', 'x5')", [4, 5]),
        ("starts_with(value, 'x9')", [9]),
        ("ends_with(user, '''s')", [3]),
        ("contains(user, 'nn') and amount < 2", [1]),
        ("price = 0.25", [1]),
        ("price > '2.00'", [9]),
        ("share < 0.6", [0, 1]),
        ("share = -1e3", []),
        ("`two words` = 4", [4]),
    ],
)
def test_a_filter_selects_the_rows_that_it_says(text: str, expected: list[int]) -> None:
    assert selected(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("vip", "at its end: a comparison"),
        ("amount = 'five'", "cannot be compared"),
        ("amount = 1.5", "cannot be compared"),
        ("amount = true", "cannot be compared"),
        ("amount > 99999999999999999999", "no value of column"),
        ("price = 0.251", "no value of column"),
        ("at = 5", "cannot be compared"),
        ("at = 'yesterday'", "no value of column"),
        ("local = '2026-01-01T01:00Z'", "cannot be compared"),
        ("tags = 'a'", "cannot be compared"),
        ("vip > false", "no order"),
        ("starts_with(amount, '5')", "is about texts"),
        ("starts_with(user, 5)", "wants a text"),
        ("amunt = 5", "there is no column 'amunt'"),
        ("amount = 5 5", "'and' or 'or' is expected"),
        ("(amount = 5", r"'\)' is expected"),
        ("amount = ", "at its end: a value"),
        ("amount in ()", "a value is expected"),
        ('user = "ann"', "wrong at '\"ann\"'"),
        ("__import__('os')", "there is no column '__import__'"),
        ("user = 'open", "wrong at"),
        ("amount = 1; drop", "wrong at ';"),
        ("(" * 60 + "amount = 1" + ")" * 60, f"nested more than {DEPTH_MAX}"),
        ("not " * 60 + "amount = 1", f"nested more than {DEPTH_MAX}"),
        ("amount = 1 or " * 200 + "amount = 1", f"{CHARS_MAX} characters"),
        ("amount in (" + "1," * 200 + "1)", "more than 100 values"),
    ],
)
def test_what_is_no_filter_is_refused_with_the_place_and_the_reason(text: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        compile_filter(text, SCHEMA)


def test_filters_select_what_the_same_test_in_python_does() -> None:
    """Missing values count as in SQL: neither a comparison nor its opposite selects them."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)

    def made(depth: int) -> tuple[str, Any]:
        kind = chance.choice(["compare", "null", "in"] if depth == 0 else ["and", "or", "not", "compare", "null"])
        if kind in ("and", "or"):
            (left, of_left), (right, of_right) = made(depth - 1), made(depth - 1)
            text = f"({left}) {kind} ({right})"
            return text, lambda row: _joined(kind, of_left(row), of_right(row))
        if kind == "not":
            inner, of_inner = made(depth - 1)
            return f"not ({inner})", lambda row: None if of_inner(row) is None else not of_inner(row)
        if kind == "null":
            return "user is null", lambda row: row["user"] is None
        number, name = chance.randrange(10), chance.choice(["ann", "it's"])
        if kind == "in":
            return f"amount in ({number}, 3)", lambda row: row["amount"] in (number, 3)
        if chance.random() < 0.5:
            return f"amount <= {number}", lambda row: row["amount"] <= number
        quoted = name.replace("'", "''")
        return f"user = '{quoted}'", lambda row: None if row["user"] is None else row["user"] == name

    for _ in range(200):
        text, test = made(3)
        expected = [row["amount"] for row in ROWS if test(row)]
        assert selected(text) == expected, f"{text}; seed {seed}: replay with random.Random({seed})"


def _joined(kind: str, left: bool | None, right: bool | None) -> bool | None:
    decisive = kind == "or"
    if decisive in (left, right):
        return decisive
    return None if None in (left, right) else not decisive
