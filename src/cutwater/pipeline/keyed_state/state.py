"""Defines keyed state: ``ValueState``, ``ListState`` and ``MapState`` as a function declares them and as it uses them.

A declaration is an attribute of the function's class. In an operator, the function has the *bound* state under the same
name, which always shows the values of the current key. Values that a function writes are converted to the declared type
at once. Values that it reads are copies, which it may keep and change.

With ``ttl``, a value expires when the watermark reaches the time of its last write plus ``ttl``. The time of a write is
the event time of the record or timer, or the watermark if that is later. For lists and maps, this applies to each
element.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from operator import setitem
from typing import Any, Protocol

import pyarrow as pa  # type: ignore[import-untyped]

from cutwater.durations import Duration, milliseconds
from cutwater.durations import shown as duration_shown
from cutwater.errors import InvalidArgument
from cutwater.pipeline.context import Context
from cutwater.pipeline.values import converter, copier, decoded, encoded
from cutwater.schema_text import parse_type, shown

_STAMP = "at"
_STAMPED = "value"


class StateHolder(Protocol):
    """Holds the raw values that a bound state shows, and the list of actions that undo changes."""

    _values: Any
    _undo: list[Any]
    timestamp: int

    @property
    def watermark(self) -> int: ...


class State(ABC):
    """A declaration of state. ``name`` is the name of the attribute."""

    kind = ""
    _written = "set(…)"

    def __init__(self, schema: str | pa.DataType, ttl: Duration | None = None) -> None:
        self.name = ""
        self.type: pa.DataType = parse_type(schema) if isinstance(schema, str) else schema
        self.ttl_ms = None if ttl is None else milliseconds(ttl, "the ttl of a state", least=1)
        self.convert = converter(self.type)
        self.copy = copier(self.type)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InvalidArgument(
            f"the state {self.__dict__.get('name')!r} is read outside a key: "
            "it has values only while an operator calls the function"
        )

    def __set__(self, function: object, value: object) -> None:
        """Refuse an assignment: the value would belong to no key and would hide the state."""
        raise InvalidArgument(
            f"the state {self.name!r} cannot be assigned to, as it has a value for each key: write "
            f"self.{self.name}.{self._written}"
        )

    @property
    @abstractmethod
    def stored_type(self) -> pa.DataType:
        """The Arrow type of the value that is kept for one key."""

    @abstractmethod
    def bind(self, holder: StateHolder, slot: int) -> Any:
        """Return what a function uses: the state of the current key of ``holder``."""

    def pack(self, raw: Any) -> Any:
        """Convert a raw value to a value of ``stored_type``."""
        return raw

    def unpack(self, value: Any) -> Any:
        return value

    def packed(self, raws: Sequence[Any]) -> pa.Array:
        """Convert the raw values of many keys to a column."""
        return encoded(list(map(self.pack, raws)), self.stored_type)

    def unpacked(self, column: pa.Array) -> list[Any]:
        return list(map(self.unpack, decoded(column)))

    @abstractmethod
    def plain(self, raw: Any, watermark: int) -> Any:
        """Return a raw value as a user would see it under a watermark; None if nothing is left."""

    def alive(self, stamp: int, watermark: int) -> bool:
        return self.ttl_ms is None or watermark < stamp + self.ttl_ms

    def _element_type(self, kind: pa.DataType) -> pa.DataType:
        if self.ttl_ms is None:
            return kind
        return pa.struct([pa.field(_STAMP, pa.int64()), pa.field(_STAMPED, kind)])

    def __str__(self) -> str:
        ttl = "" if self.ttl_ms is None else f", ttl {duration_shown(self.ttl_ms)}"
        return f"{self.name}: {self.kind} {shown(self.type)}{ttl}"


def _stamped(pair: tuple[int, Any]) -> dict[str, Any]:
    return {_STAMP: pair[0], _STAMPED: pair[1]}


def _pair(stamped: dict[str, Any]) -> tuple[int, Any]:
    return stamped[_STAMP], stamped[_STAMPED]


class ValueState(State):
    """One value per key: ``get``, ``set``, ``clear``."""

    kind = "value"

    def __init__(self, schema: str | pa.DataType, default: Any = None, ttl: Duration | None = None) -> None:
        super().__init__(schema, ttl)
        self.default = self.convert(default)

    @property
    def stored_type(self) -> pa.DataType:
        return self._element_type(self.type)

    def bind(self, holder: StateHolder, slot: int) -> Any:
        return _Value(self, holder, slot) if self.ttl_ms is None else _ExpiringValue(self, holder, slot)

    def packed(self, raws: Sequence[Any]) -> pa.Array:
        if self.ttl_ms is None:
            return encoded(raws, self.type)
        stamps = pa.array([None if raw is None else raw[0] for raw in raws], pa.int64())
        values = encoded([None if raw is None else raw[1] for raw in raws], self.type)
        return pa.StructArray.from_arrays([stamps, values], fields=list(self.stored_type), mask=stamps.is_null())

    def unpacked(self, column: pa.Array) -> list[Any]:
        if self.ttl_ms is None:
            return decoded(column)
        stamps, values = column.flatten()
        pairs = zip(stamps.to_pylist(), decoded(values), strict=True)
        return [None if pair[0] is None else pair for pair in pairs]

    def plain(self, raw: Any, watermark: int) -> Any:
        if raw is None or self.ttl_ms is None:
            return raw
        return raw[1] if self.alive(raw[0], watermark) else None


class ListState(State):
    """A list per key: ``get``, ``append``, ``extend``, ``set``, ``clear``; it can be iterated and has a length."""

    kind = "list"

    @property
    def stored_type(self) -> pa.DataType:
        return pa.list_(self._element_type(self.type))

    def bind(self, holder: StateHolder, slot: int) -> Any:
        return _List(self, holder, slot)

    def pack(self, raw: Any) -> Any:
        return raw if raw is None or self.ttl_ms is None else [_stamped(pair) for pair in raw]

    def unpack(self, value: Any) -> Any:
        return value if value is None or self.ttl_ms is None else [_pair(stamped) for stamped in value]

    def plain(self, raw: Any, watermark: int) -> Any:
        if raw is None or self.ttl_ms is None:
            return raw
        return [value for stamp, value in raw if self.alive(stamp, watermark)] or None


class MapState(State):
    """A map per key: ``get``, ``put``, ``remove``, ``clear``, ``in``; it is iterated in the order of its keys."""

    kind = "map"
    _written = "put(key, …)"

    def __init__(self, key: str | pa.DataType, value: str | pa.DataType, ttl: Duration | None = None) -> None:
        super().__init__(value, ttl)
        self.key_type: pa.DataType = parse_type(key) if isinstance(key, str) else key
        self.convert_key = converter(self.key_type)
        if pa.types.is_nested(self.key_type):
            raise InvalidArgument(f"the keys of a map are {shown(self.key_type)}: they must be of a simple type")

    @property
    def stored_type(self) -> pa.DataType:
        return pa.map_(self.key_type, self._element_type(self.type))

    def bind(self, holder: StateHolder, slot: int) -> Any:
        return _Map(self, holder, slot)

    def pack(self, raw: Any) -> Any:
        return raw if raw is None or self.ttl_ms is None else {key: _stamped(pair) for key, pair in raw.items()}

    def unpack(self, value: Any) -> Any:
        return value if value is None or self.ttl_ms is None else {key: _pair(pair) for key, pair in value.items()}

    def plain(self, raw: Any, watermark: int) -> Any:
        if raw is None or self.ttl_ms is None:
            return raw
        return {key: value for key, (stamp, value) in raw.items() if self.alive(stamp, watermark)} or None


class BroadcastState(MapState):
    """A map of which every slice has a copy: ``process_broadcast`` writes it, ``process`` reads it."""

    kind = "broadcast map"


def declared_states(function: object) -> list[State]:
    """Return the states that a function's class declares, in the order of their names."""
    found = {
        name: value
        for cls in reversed(type(function).__mro__)
        for name, value in vars(cls).items()
        if isinstance(value, State)
    }
    return [found[name] for name in sorted(found)]


# ------------------------------------------------------------------------------------------------------ bound states


class _Value:
    __slots__ = ("_convert", "_copy", "_default", "_holder", "_slot")

    def __init__(self, state: ValueState, holder: StateHolder, slot: int) -> None:
        self._holder = holder
        self._slot = slot
        self._convert = state.convert
        self._copy = state.copy
        self._default = state.default

    def get(self) -> Any:
        """Return the value, or the default if none is set."""
        value = self._holder._values[self._slot]
        if value is None:
            value = self._default
        return value if self._copy is None else self._copy(value)

    def set(self, value: Any) -> None:
        """Replace the value; None clears it."""
        holder, slot = self._holder, self._slot
        values = holder._values
        holder._undo.append((setitem, values, slot, values[slot]))
        values[slot] = self._convert(value)

    def clear(self) -> None:
        self.set(None)


class _Stamping:
    """Common part of the states with elements or with a time to live."""

    __slots__ = ("_convert", "_copy", "_holder", "_slot", "_state")

    def __init__(self, state: Any, holder: StateHolder, slot: int) -> None:
        self._state = state
        self._holder = holder
        self._slot = slot
        self._convert = state.convert
        self._copy = state.copy

    def _made(self, value: Any) -> Any:
        value = self._convert(value)
        if self._state.ttl_ms is None:
            return value
        return max(self._holder.timestamp, self._holder.watermark), value

    def _shown(self, raw: Any) -> Any:
        value = raw if self._state.ttl_ms is None else raw[1]
        return value if self._copy is None else self._copy(value)

    def _alive(self, raw: Any) -> bool:
        return self._state.ttl_ms is None or self._state.alive(raw[0], self._holder.watermark)

    def _raw(self) -> Any:
        return self._holder._values[self._slot]

    def _replace(self, raw: Any) -> None:
        values = self._holder._values
        self._holder._undo.append((setitem, values, self._slot, values[self._slot]))
        values[self._slot] = raw

    def clear(self) -> None:
        self._replace(None)


class _ExpiringValue(_Stamping):
    __slots__ = ()

    def get(self) -> Any:
        """Return the value, or the default if none is set or it has expired."""
        raw = self._raw()
        if raw is not None and self._alive(raw):
            return self._shown(raw)
        return self._state.default if self._copy is None else self._copy(self._state.default)

    def set(self, value: Any) -> None:
        self._replace(None if value is None else self._made(value))


class _List(_Stamping):
    __slots__ = ()

    def get(self) -> list[Any]:
        """Return all elements, oldest first."""
        return [self._shown(raw) for raw in self._raw() or () if self._alive(raw)]

    def append(self, value: Any) -> None:
        made = self._made(value)
        raw = self._raw()
        if raw is None:
            self._replace([made])
            return
        self._holder._undo.append((raw.pop,))
        raw.append(made)

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            self.append(value)

    def set(self, values: Iterable[Any]) -> None:
        """Replace all elements."""
        self._replace([self._made(value) for value in values] or None)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __len__(self) -> int:
        raw = self._raw()
        return sum(map(self._alive, raw)) if raw else 0


def put_raw(holder: StateHolder, slot: int, key: Any, made: Any) -> None:
    """Set an element of the current key's map, as it is kept."""
    raw = holder._values[slot]
    if raw is None:
        holder._undo.append((setitem, holder._values, slot, None))
        holder._values[slot] = {key: made}
        return
    old = raw.get(key)
    holder._undo.append((raw.pop, key) if old is None else (setitem, raw, key, old))
    raw[key] = made


def remove_raw(holder: StateHolder, slot: int, key: Any) -> None:
    """Remove an element of the current key's map, which must exist."""
    raw = holder._values[slot]
    if len(raw) == 1:
        holder._undo.append((setitem, holder._values, slot, raw))
        holder._values[slot] = None
        return
    holder._undo.append((setitem, raw, key, raw[key]))
    del raw[key]


class _Map(_Stamping):
    __slots__ = ()

    def get(self, key: Any, default: Any = None) -> Any:
        raw = (self._raw() or {}).get(self._state.convert_key(key))
        return self._shown(raw) if raw is not None and self._alive(raw) else default

    def put(self, key: Any, value: Any) -> None:
        key = self._state.convert_key(key)
        if key is None or value is None:
            raise InvalidArgument(f"the map state {self._state.name!r} takes neither null keys nor null values")
        put_raw(self._holder, self._slot, key, self._made(value))

    def remove(self, key: Any) -> None:
        """Remove a key, which need not exist."""
        key = self._state.convert_key(key)
        if key in (self._raw() or ()):
            remove_raw(self._holder, self._slot, key)

    def __contains__(self, key: Any) -> bool:
        raw = (self._raw() or {}).get(self._state.convert_key(key))
        return raw is not None and self._alive(raw)

    def items(self) -> list[tuple[Any, Any]]:
        """Return all pairs, in the order of the keys."""
        raw = self._raw() or {}
        return [(key, self._shown(raw[key])) for key in sorted(raw) if self._alive(raw[key])]

    def keys(self) -> list[Any]:
        return [key for key, _ in self.items()]

    def values(self) -> list[Any]:
        return [value for _, value in self.items()]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def __len__(self) -> int:
        raw = self._raw()
        return sum(map(self._alive, raw.values())) if raw else 0


class BroadcastHolder:
    """Holds the broadcast state of a slice. Except in ``process_broadcast``, ``_undo`` refuses changes."""

    def __init__(self, context: Context, values: list[Any]) -> None:
        self._context = context
        self._values = values
        self._undo: Any = _READ_ONLY

    def open_for_writing(self, writing: bool) -> None:
        self._undo = self._context._undo if writing else _READ_ONLY

    @property
    def timestamp(self) -> int:
        return self._context.timestamp

    @property
    def watermark(self) -> int:
        return self._context.watermark


class _ReadOnly:
    def append(self, _: Any) -> None:
        raise InvalidArgument(
            "broadcast state is written outside process_broadcast: there, every slice sees the change"
        )


_READ_ONLY = _ReadOnly()
