"""Finds rows of state in a savepoint by what users write: the uid of an operator, and a key as texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from cutwater.errors import InvalidArgument, NotFound
from cutwater.savepoints.savepoint import Savepoint
from cutwater.savepoints.tables import key_fields


def uids_of(savepoint: Savepoint, uid: str | None) -> list[str]:
    """Return the operators of a savepoint, or the one with this uid."""
    if uid:
        savepoint.operator(uid)
    return [uid] if uid else list(savepoint.manifest.by_uid)


def rows_of_key(savepoint: Savepoint, uid: str, key: Sequence[str]) -> pa.Table:
    """Return the rows of an operator that have a key, which is given as a text for each of its columns. Without a key,
    return all rows. Raises if the key has none."""
    if not key:
        return savepoint.table(uid)
    wanted = list(_wanted(savepoint, uid, key))
    found = savepoint.operator(uid)
    rows = pa.concat_tables([_with(part, wanted) for part in savepoint.parts(uid)])
    if not rows.num_rows:
        known = f"{found.rows} key{'' if found.rows == 1 else 's'}"
        raise NotFound(f"operator {uid!r} has nothing of the key {', '.join(key)} in this savepoint: it has {known}")
    return rows


def _with(rows: pa.Table, wanted: Sequence[tuple[str, pa.Scalar]]) -> pa.Table:
    for name, value in wanted:
        rows = rows.filter(pc.equal(pc.struct_field(rows["key"], name), value))
    return rows


def first_rows(savepoint: Savepoint, uid: str, key: Sequence[str], count: int) -> pa.Table:
    """Return up to ``count`` rows, and read no more files than needed for them."""
    if key:
        return rows_of_key(savepoint, uid, key).slice(0, count)
    found: list[pa.Table] = []
    left = count
    for part in savepoint.parts(uid):
        found.append(part.slice(0, max(0, left)))
        left -= part.num_rows
        if left <= 0:
            break
    return pa.concat_tables(found)


def _wanted(savepoint: Savepoint, uid: str, key: Sequence[str]) -> Iterator[tuple[str, pa.Scalar]]:
    fields = key_fields(savepoint.operator(uid).operator)
    if len(key) != len(fields):
        names = ", ".join(f"{field.name} ({field.type})" for field in fields)
        raise InvalidArgument(f"a key of {uid!r} is {names}: say --key {len(fields)} times, not {len(key)}")
    for field, text in zip(fields, key, strict=True):
        try:
            yield field.name, pc.cast(pa.scalar(text), field.type)
        except pa.ArrowInvalid as error:
            raise InvalidArgument(f"{text!r} is no {field.type}, which {field.name} is: {error}") from None
