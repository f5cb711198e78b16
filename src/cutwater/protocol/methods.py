"""Describes methods: a name, the type of the argument, and the type of the result.

Both sides share the descriptions, so both have the same types, which are checked where bytes arrive::

    READ = Method("read", ReadRequest, ReadAnswer)

    got = await connection.call(READ, ReadRequest(...), timeout_ms=500)     # got.value is a ReadAnswer, got.body bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from cutwater.errors import InvalidArgument
from cutwater.protocol.errors import MalformedFrame

A = TypeVar("A")
R = TypeVar("R")

_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)

Body = bytes | bytearray | memoryview
"""Received bytes: small bodies as ``bytes``, large ones as a view of the buffer they were received into."""

Payload = Body | Sequence[Body]
"""Bytes to send. Pieces are sent one after another, without being joined first, and must not change meanwhile."""


class Received(Struct, Generic[R], eq=False):
    """The result of a call, or one item of a stream."""

    value: R
    body: Body


class _Described(Generic[A, R]):
    """A name, the type of the argument, and the type of the result."""

    __slots__ = ("_decode_argument", "_decode_result", "name")

    def __init__(self, name: str, argument: Any, result: Any) -> None:
        self.name = name
        self._decode_argument = msgspec.msgpack.Decoder(argument).decode
        self._decode_result = msgspec.msgpack.Decoder(result).decode

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def argument_of(self, raw: Raw) -> A:
        try:
            return self._decode_argument(raw)  # type: ignore[no-any-return]
        except _DECODE_ERRORS as error:
            raise InvalidArgument(f"{self.name}: the argument is not as expected: {error}") from None

    def result_of(self, raw: Raw | bytes) -> R:
        try:
            return self._decode_result(raw)  # type: ignore[no-any-return]
        except _DECODE_ERRORS as error:
            raise MalformedFrame(f"{self.name}: the answer is not as expected: {error}") from None


class Method(_Described[A, R]):
    """A method with one request and one answer."""

    def __init__(self, name: str, argument: type[A] | Any, answer: type[R] | Any) -> None:
        super().__init__(name, argument, answer)


class StreamMethod(_Described[A, R]):
    """A method with one request and a stream of items, which ends or goes on until the caller cancels it."""

    def __init__(self, name: str, argument: type[A] | Any, item: type[R] | Any) -> None:
        super().__init__(name, argument, item)


class Notice(_Described[A, None]):
    """A message without an answer."""

    def __init__(self, name: str, argument: type[A] | Any) -> None:
        super().__init__(name, argument, None)
