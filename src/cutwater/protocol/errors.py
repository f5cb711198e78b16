"""Errors of the wire, and how errors travel.

These classes belong to the tree of ``cutwater.errors``: each has a stable code, and ``retriable``.

::

    InvalidArgument
     ├─ FrameTooLarge      frame_too_large    a message exceeds what the receiver takes; nothing was done
     └─ UnknownMethod      unknown_method     the peer does not know the method; it may be of another version
    Refused
     ├─ WrongCluster       wrong_cluster      the peer belongs to another cluster
     ├─ WrongVersion       wrong_version      no protocol version that both sides speak
     ├─ Unauthenticated    unauthenticated    the peer rejects our credentials
     ├─ Unproven           unproven           only servers of the cluster may do this, and the peer did not prove to be
     │                                        one; or a server is not the expected one
     └─ Untrusted          untrusted          TLS failed: a certificate is missing, expired or of another authority
    Unavailable
     ├─ ConnectionLost     connection_lost    the connection is gone; says whether the outcome is unknown  (retriable)
     └─ CannotListen       cannot_listen      the address is in use, or not of this machine                (retriable)
    ProtocolViolation
     └─ MalformedFrame     malformed_frame    bytes that are no frame; the connection is closed
    CutwaterError
     └─ InternalError      internal_error     a bug at the peer; the incident is in its log

An error travels as ``WireError``: code, message, retriable, fields, history. It comes back as the class of that code
with the same fields. If this side does not know the code, or a field that the class declares is missing, it comes back
as the nearest base class that fits: in the end a ``CutwaterError`` with that code. An error that is too large for the
peer loses its history first, then its fields, then part of its message, but it always arrives.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from ssl import SSLError
from typing import Any

import msgspec
from msgspec import Raw, Struct

from cutwater.errors import CutwaterError, InvalidArgument, ProtocolViolation, Refused, Unavailable

HEADER_BYTES_MIN = 512
"""Every side takes at least this much, so that it can be told any error."""
CODE_CHARS_MAX = 40
MESSAGE_CHARS_MAX = 4_096
MESSAGE_CHARS_SHORT = 80
HISTORY_LINES_MAX = 32
HISTORY_LINE_CHARS_MAX = 512
FIELDS_MAX = 16
FIELD_CHARS_MAX = 1_024


class FrameTooLarge(InvalidArgument):
    code = "frame_too_large"

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"{what} of {size} bytes exceeds the limit of {limit} bytes: send less at once")
        self.what, self.size, self.limit = what, size, limit


class UnknownMethod(InvalidArgument):
    code = "unknown_method"


class WrongCluster(Refused):
    code = "wrong_cluster"

    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(f"this is cluster {actual}, not {expected}: check the address and the cluster id")
        self.expected, self.actual = expected, actual


class WrongVersion(Refused):
    code = "wrong_version"


class Unauthenticated(Refused):
    code = "unauthenticated"


class Unproven(Refused):
    code = "unproven"


class Untrusted(Refused):
    code = "untrusted"


class ConnectionLost(Unavailable):
    """The connection is gone.

    ``outcome_unknown``: the request had been handed to the connection, so it may or may not have been carried out.
    Otherwise it was never sent, and nothing was done.
    """

    code = "connection_lost"
    ended_greeting = False
    """The other side accepted the connection and closed it before it greeted. It may want TLS, or trust nothing that it
    was shown, or just be starting."""

    def __init__(self, message: str, *, outcome_unknown: bool) -> None:
        super().__init__(message)
        self.outcome_unknown = outcome_unknown


class CannotListen(Unavailable):
    code = "cannot_listen"


class MalformedFrame(ProtocolViolation):
    code = "malformed_frame"


class InternalError(CutwaterError):
    code = "internal_error"

    def __init__(self, message: str, *, incident: str) -> None:
        super().__init__(f"{message}: its log has the cause under incident {incident}")
        self.incident = incident


def why_lost(address: str, exc: Exception | None, *, is_greeting: bool, has_tls: bool) -> Untrusted | ConnectionLost:
    """Return the error for the end of a connection. ``is_greeting``: this side connected and was not greeted yet."""
    if isinstance(exc, SSLError):
        return Untrusted(f"TLS with {address} failed: {exc}")
    message = f"the connection to {address} was {f'lost: {exc}' if exc is not None else 'closed'}"
    if is_greeting:
        # With TLS 1.3 there is no other sign that a certificate was refused, or that the other side wants TLS.
        message += "; it may want " + (
            "a client certificate, or not trust the one it got" if has_tls else "TLS, which was not used"
        )
    lost = ConnectionLost(message, outcome_unknown=True)
    if is_greeting:
        lost.ended_greeting = True
    return lost


class WireError(Struct, frozen=True, array_like=True):
    """An error as it travels. ``fields`` is a map of names to plain values."""

    code: str
    message: str
    retriable: bool
    fields: Raw
    history: tuple[str, ...] = ()


Scalar = bool | int | float | str | None
_FIELDS_DECODER = msgspec.msgpack.Decoder(dict[str, Scalar | list[Scalar]])
_ENCODER = msgspec.msgpack.Encoder()
_NO_FIELDS = Raw(_ENCODER.encode({}))
_INTEGERS = range(-(2**63), 2**64)
_OWN_NAMES = frozenset({"message", "history"})


def to_wire(error: CutwaterError) -> WireError:
    """Return the error as data. Long texts are cut off, and fields that are no plain values are left out."""
    fields = {name: value for name, value in vars(error).items() if name not in _OWN_NAMES and _travels(name, value)}
    return WireError(
        error.code[:CODE_CHARS_MAX],
        error.message[:MESSAGE_CHARS_MAX],
        error.retriable,
        Raw(_ENCODER.encode(dict(list(fields.items())[:FIELDS_MAX]))),
        tuple(line[:HISTORY_LINE_CHARS_MAX] for line in error.history[-HISTORY_LINES_MAX:]),
    )


def encode_error(error: CutwaterError, bytes_max: int) -> bytes:
    """Encode the error in at most ``bytes_max`` bytes, which must be at least ``HEADER_BYTES_MIN``."""
    wire = to_wire(error)
    encoded = _ENCODER.encode(wire)
    if len(encoded) > bytes_max:
        encoded = _ENCODER.encode(WireError(wire.code, wire.message, wire.retriable, wire.fields))
    if len(encoded) > bytes_max:
        short = wire.message[:MESSAGE_CHARS_SHORT] + " …"
        encoded = _ENCODER.encode(WireError(wire.code, short, wire.retriable, _NO_FIELDS))
    return encoded


def from_wire(wire: WireError) -> CutwaterError:
    """Return the error as an exception of its class. Never fails: invalid parts are left out."""
    try:
        fields = _FIELDS_DECODER.decode(wire.fields) if wire.fields else {}
    except (msgspec.MsgspecError, ValueError, RecursionError):
        fields = {}
    known = _class_of(wire.code)
    cls: type[CutwaterError] = known or CutwaterError
    while any(fields.get(name) is None for name in declared_fields(cls)):
        cls = next(base for base in cls.__mro__[1:] if issubclass(base, CutwaterError))
    error = cls.__new__(cls, wire.message)
    error.message = wire.message[:MESSAGE_CHARS_MAX]
    error.history = tuple(line[:HISTORY_LINE_CHARS_MAX] for line in wire.history[-HISTORY_LINES_MAX:])
    for name, value in list(fields.items())[:FIELDS_MAX]:
        if _travels(name, value) and name not in _OWN_NAMES and not hasattr(cls, name):
            error.__dict__[name] = value
    if cls is not known:
        error.__dict__.update(code=wire.code[:CODE_CHARS_MAX], retriable=wire.retriable)
    return error


def declared_fields(cls: type[CutwaterError]) -> tuple[str, ...]:
    """Return the parameters of the constructor of an error class that are kept as fields."""
    parameters = inspect.signature(cls.__init__).parameters
    return tuple(name for name in parameters if name not in _OWN_NAMES | {"self"})


_CLASSES: dict[str, type[CutwaterError]] = {}


def _class_of(code: str) -> type[CutwaterError] | None:
    if code not in _CLASSES:
        # A module with further classes may have been imported since the last call. A class without its own code is
        # private to the module that defines it.
        _CLASSES.update((cls.code, cls) for cls in _tree(CutwaterError) if "code" in vars(cls))
    return _CLASSES.get(code)


def _tree(cls: type[CutwaterError]) -> Iterator[type[CutwaterError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _tree(child)


def _travels(name: str, value: Any) -> bool:
    if not name.isidentifier() or name.startswith("_"):
        return False
    if isinstance(value, list | tuple):
        return len(value) <= FIELDS_MAX and all(_is_scalar(one) for one in value)
    return _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= FIELD_CHARS_MAX
    if isinstance(value, int):
        return value in _INTEGERS
    return value is None or isinstance(value, float)
