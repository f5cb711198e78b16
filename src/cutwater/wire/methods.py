"""What can be asked over a connection, and who answers.

Both sides share the descriptions, so types are the same on both and are checked where bytes arrive::

    READ = Method("read", ReadRequest, ReadAnswer)

    reply = await connection.call(READ, ReadRequest(...), timeout_ms=500)   # reply.value is a ReadAnswer

    @methods.answers(READ)
    def read(call: Call[ReadRequest]) -> Reply[ReadAnswer]:
        return Reply(ReadAnswer(...), body)

A handler that is a plain function answers at once, or returns ``LATER`` and answers through ``call.answer`` when it can;
neither costs a task. A coroutine function gets a task.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Raw

from cutwater.errors import AlreadyExists, InvalidArgument
from cutwater.wire.errors import MalformedFrame
from cutwater.wire.frames import Body, Payload

if TYPE_CHECKING:
    from cutwater.wire.connection import Connection
    from cutwater.wire.serving import Call
    from cutwater.wire.streams import StreamSender

A = TypeVar("A")
R = TypeVar("R")
DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)


class Reply(Generic[R]):
    """A value and the bytes that go with it, in either direction."""

    __slots__ = ("body", "value")

    def __init__(self, value: R, body: Payload = b"") -> None:
        self.value = value
        self.body = body


class Item(Generic[R]):
    """One item of a stream, received. ``body`` is one piece."""

    __slots__ = ("body", "value")

    def __init__(self, value: R, body: Body) -> None:
        self.value = value
        self.body = body


class Later(enum.Enum):
    """What a handler returns that will answer later."""

    LATER = 0


LATER: Final[Literal[Later.LATER]] = Later.LATER
