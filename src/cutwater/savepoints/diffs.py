"""Compares two savepoints."""

from __future__ import annotations

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from msgspec import Struct

from cutwater.savepoints.savepoint import Savepoint

KEYS_SHOWN_MAX = 20


class OperatorDifference(Struct, frozen=True):
    """Counts of keys that only the second savepoint has, that only the first has, and that both have with different
    state or timers. ``examples`` are a few of these keys. ``states`` describes how the operator's states have
    changed."""

    uid: str
    added: int
    removed: int
    changed: int
    examples: tuple[str, ...]
    states: tuple[str, ...] = ()


class Difference(Struct, frozen=True):
    """The differences from a first savepoint to a second one. Operators without differences are left out."""

    glsn: int
    watermark_ms: int
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    operators: tuple[OperatorDifference, ...]

    @property
    def is_empty(self) -> bool:
        """Whether both have the same state, even if they were taken at different positions."""
        return not (self.only_first or self.only_second or self.operators)


def diff(first: Savepoint, second: Savepoint) -> Difference:
    """Compare the state of two savepoints, operator by operator and key by key."""
    one, other = first.manifest, second.manifest
    both = [uid for uid in one.by_uid if uid in other.by_uid]
    found = [_operator(first, second, uid) for uid in both]
    return Difference(
        other.glsn - one.glsn,
        other.watermark_ms - one.watermark_ms,
        tuple(uid for uid in one.by_uid if uid not in other.by_uid),
        tuple(uid for uid in other.by_uid if uid not in one.by_uid),
        tuple(own for own in found if own is not None),
    )


def _operator(first: Savepoint, second: Savepoint, uid: str) -> OperatorDifference | None:
    states = _states(first, second, uid)
    one, other = _by_key(first.table(uid)), _by_key(second.table(uid))
    if not states and one.equals(other):
        return None
    common = [name for name in one.column_names if name in other.column_names and name not in ("key", "key_group")]
    left = dict(_rows(one, common))
    right = dict(_rows(other, common))
    added = [key for key in right if key not in left]
    removed = [key for key in left if key not in right]
    changed = [key for key, row in left.items() if key in right and row != right[key]]
    if not (states or added or removed or changed):
        return None
    names = {data: str(key) for table in (one, other) for data, key in zip(*_names(table), strict=True)}
    examples = [
        f"{sign}{names[key]}"
        for sign, keys in (("+", added), ("-", removed), ("~", changed))
        for key in keys[:KEYS_SHOWN_MAX]
    ]
    return OperatorDifference(uid, len(added), len(removed), len(changed), tuple(examples), states)


def _states(first: Savepoint, second: Savepoint, uid: str) -> tuple[str, ...]:
    one, other = first.operator(uid).operator, second.operator(uid).operator
    told = [f"-{state.name}: {state}" for state in one.states if other.state(state.name) is None]
    for state in other.states:
        before = one.state(state.name)
        if before is None:
            told.append(f"+{state.name}: {state}")
        elif before != state:
            told.append(f"~{state.name}: {before} became {state}")
    return tuple(told)


def _by_key(table: pa.Table) -> pa.Table:
    return table.take(pc.sort_indices(table["key_bytes"]))


def _rows(table: pa.Table, names: list[str]) -> list[tuple[bytes, tuple[object, ...]]]:
    columns = [table[name].to_pylist() for name in names if name != "key_bytes"]
    return list(zip(table["key_bytes"].to_pylist(), zip(*columns, strict=True), strict=True))


def _names(table: pa.Table) -> tuple[list[bytes], list[object]]:
    keys = [None if key is None else tuple(key.values()) for key in table["key"].to_pylist()]
    shown = ["broadcast" if key is None else key[0] if len(key) == 1 else key for key in keys]
    return table["key_bytes"].to_pylist(), shown
