"""Errors travel as data and come back as themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import Raw, msgpack

from cutwater import errors
from cutwater.errors import (
    CutwaterError,
    InvalidArgument,
    NotLeader,
    Refused,
    ResourceExhausted,
    SequenceError,
    SequenceGap,
    Trimmed,
    Unavailable,
    WrongEpoch,
)
from cutwater.protocol import errors as wire_errors
from cutwater.protocol.errors import (
    FIELDS_MAX,
    HEADER_BYTES_MIN,
    HISTORY_LINES_MAX,
    MESSAGE_CHARS_MAX,
    ConnectionLost,
    WireError,
    WrongCluster,
    declared_fields,
    encode_error,
    from_wire,
    to_wire,
)
from cutwater.types import GLSN, Epoch, LogStreamId, Sequence


def tree(cls: type[CutwaterError] = CutwaterError) -> Iterator[type[CutwaterError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from tree(child)


def there_and_back(error: CutwaterError) -> CutwaterError:
    return from_wire(msgpack.decode(msgpack.encode(to_wire(error)), type=WireError))


SHIPPED = [cls for cls in tree() if cls.__module__ in (errors.__name__, wire_errors.__name__)]


def made(cls: type[CutwaterError]) -> CutwaterError:
    """An error of a class, whatever its constructor wants."""
    values: dict[str, Any] = {"what": "a thing", "incident": "abc", "outcome_unknown": True}
    names = [name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "history")]
    arguments = {name: "what happened" if name == "message" else values.get(name, 7) for name in names}
    return cls(**arguments)


@pytest.mark.parametrize("cls", SHIPPED, ids=lambda cls: cls.__name__)
def test_every_error_of_the_tree_comes_back_as_itself(cls: type[CutwaterError]) -> None:
    error = made(cls)
    back = there_and_back(error)
    assert type(back) is cls
    assert (str(back), back.code, back.retriable, vars(back)) == (str(error), cls.code, cls.retriable, vars(error))
    assert back.args == (error.message,)


@pytest.mark.parametrize("cls", SHIPPED, ids=lambda cls: cls.__name__)
def test_every_field_that_a_constructor_wants_is_kept(cls: type[CutwaterError]) -> None:
    """That is how the receiving side knows what a class promises."""
    assert set(declared_fields(cls)) <= set(vars(made(cls)))


def test_codes_of_the_wire_follow_the_rules_of_the_tree() -> None:
    codes = [cls.code for cls in SHIPPED]
    assert len(set(codes)) == len(codes)
    assert all("code" in vars(cls) for cls in SHIPPED)


def test_fields_and_history_come_along() -> None:
    error = WrongEpoch(LogStreamId(3), Epoch(4), Epoch(5), history=("opened", "sealed"))
    back = there_and_back(error)
    assert isinstance(back, WrongEpoch)
    assert (back.stream, back.given, back.current, back.history) == (3, 4, 5, ("opened", "sealed"))
    trimmed = there_and_back(Trimmed(GLSN(5), GLSN(9)))
    assert isinstance(trimmed, Trimmed)
    assert trimmed.first_left == 9


def test_an_unknown_code_is_kept() -> None:
    back = from_wire(WireError("from_the_future", "what?", True, Raw(msgpack.encode({"hint": "wait"}))))
    assert type(back) is CutwaterError
    assert (back.code, back.retriable, str(back)) == ("from_the_future", True, "what?")
    assert vars(back)["hint"] == "wait"
    assert (CutwaterError.code, CutwaterError.retriable) == ("cutwater_error", False)
    # It can be passed on without losing anything.
    assert there_and_back(back).code == "from_the_future"


def test_without_a_promised_field_it_is_the_nearest_class_that_promises_less() -> None:
    back = from_wire(WireError("sequence_gap", "a gap", False, Raw(msgpack.encode({}))))
    assert type(back) is SequenceError
    assert not isinstance(back, SequenceGap)
    assert back.code == "sequence_gap"
    assert type(from_wire(WireError("resource_exhausted", "m", True, Raw(b"\x80")))) is Unavailable


def test_a_known_class_does_not_believe_what_the_peer_says_of_its_nature() -> None:
    back = from_wire(WireError("invalid_argument", "m", True, Raw(b"\x80")))
    assert type(back) is InvalidArgument
    assert not back.retriable


@pytest.mark.parametrize(
    "fields",
    [
        {"with_traceback": 1},
        {"__class__": "x"},
        {"_private": 1},
        {"code": "other", "retriable": True, "args": [1], "message": "x", "history": ["y"]},
        {"no name": 1},
        {f"field{i}": i for i in range(1_000)},
        {"text": "x" * 100_000},
        {"nested": {"a": 1}},
        [1, 2],
        None,
        7,
    ],
    ids=lambda fields: str(fields)[:30],
)
def test_hostile_fields_are_left_out(fields: object) -> None:
    back = from_wire(WireError("refused", "no", False, Raw(msgpack.encode(fields))))
    assert type(back) is Refused
    assert (back.code, back.retriable, back.message, back.history, back.args) == ("refused", False, "no", (), ("no",))
    assert callable(back.with_traceback)
    assert len(vars(back)) <= FIELDS_MAX + 2
    assert all(not name.startswith("_") for name in vars(back))


def test_fields_that_are_no_message_pack_are_left_out() -> None:
    assert type(from_wire(WireError("refused", "no", False, Raw(b"\xc1")))) is Refused


def test_what_is_too_long_is_cut_off() -> None:
    error = CutwaterError("m" * 100_000, history=tuple(str(i) * 1_000 for i in range(1_000)))
    wire = to_wire(error)
    assert len(wire.message) == MESSAGE_CHARS_MAX
    assert len(wire.history) == HISTORY_LINES_MAX
    assert wire.history[-1].startswith("999")
    assert len(msgpack.encode(wire)) < 64 * 1024


def test_what_is_no_plain_value_stays_behind() -> None:
    error = CutwaterError("m")
    error.__dict__.update(plain=1, huge=2**70, thing=object(), inner={"a": 1}, pair=(1, "x"))
    assert msgpack.decode(to_wire(error).fields) == {"plain": 1, "pair": [1, "x"]}


def test_a_class_that_was_made_later_is_found() -> None:
    assert type(from_wire(WireError("made_in_a_test", "m", True, Raw(b"\x80")))) is CutwaterError

    class MadeInATest(NotLeader):
        code = "made_in_a_test"

    assert type(from_wire(WireError("made_in_a_test", "m", True, Raw(b"\x80")))) is MadeInATest


def test_messages_say_what_to_do() -> None:
    assert "try again in 50 ms" in str(there_and_back(ResourceExhausted("full", retry_ms=50)))
    assert "check the address" in str(WrongCluster(1, 2))
    lost = there_and_back(ConnectionLost("gone", outcome_unknown=True))
    assert isinstance(lost, ConnectionLost)
    assert lost.outcome_unknown
    gap = there_and_back(SequenceGap("a gap", expected=Sequence(4)))
    assert isinstance(gap, SequenceGap)
    assert gap.expected == 4


def test_an_error_that_is_no_error_is_refused_by_its_type() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgpack.decode(msgpack.encode(("code", 7, True, {})), type=WireError)


def test_an_error_fits_into_what_the_peer_takes() -> None:
    error = ResourceExhausted("m" * 3_000, retry_ms=7)
    error.history = ("h" * 500,) * 30
    for bytes_max, keeps in ((100_000, ("history", "retry_ms")), (5_000, ("retry_ms",)), (HEADER_BYTES_MIN, ())):
        encoded = encode_error(error, bytes_max)
        assert len(encoded) <= bytes_max
        back = from_wire(msgpack.decode(encoded, type=WireError))
        assert (back.code, back.retriable) == ("resource_exhausted", True)
        assert bool(back.history) == ("history" in keeps)
        assert getattr(back, "retry_ms", None) == (7 if "retry_ms" in keeps else None)


def test_the_worst_error_fits_into_the_least_that_a_peer_may_take() -> None:
    error = CutwaterError("\U0001f30a" * 5_000)
    error.__dict__["code"] = "\U0001f30a" * 5_000
    assert len(encode_error(error, HEADER_BYTES_MIN - 1)) < HEADER_BYTES_MIN
