"""Table of handlers: the functions that answer requests, streams and notices on a connection.

::

    @methods.answers(READ)
    def read(call: Call[ReadRequest]) -> Reply[ReadAnswer]:
        return Reply(ReadAnswer(...), body)

A handler that is a plain function answers at once, or returns ``LATER`` and calls ``call.answer`` later; neither needs
a task. A coroutine function gets a task, which is cancelled when the caller gives up.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from msgspec import Struct

from cutwater.errors import AlreadyExists, InvalidArgument
from cutwater.protocol.access import MethodAccess
from cutwater.protocol.methods import Method, Notice, Payload, StreamMethod
from cutwater.wire.identity.access_guard import NO_JUDGE, ClientJudge, Guard
from cutwater.wire.identity.server_book import ServerBook

if TYPE_CHECKING:
    from cutwater.wire.calls.incoming_calls import Call, Notification
    from cutwater.wire.calls.streams import StreamSender

A = TypeVar("A")
R = TypeVar("R")


class ReplyWithBody(Struct, Generic[R], eq=False):
    """Return value of a handler that sends a body along with its value."""

    value: R
    body: Payload = b""


class Later(enum.Enum):
    """Return value of a handler that will answer later."""

    LATER = 0


LATER: Final[Literal[Later.LATER]] = Later.LATER


Handler = Callable[["Call[A]"], R | ReplyWithBody[R] | Later | Awaitable[R | ReplyWithBody[R]]]
StreamHandler = Callable[["Call[A]", "StreamSender[R]"], Awaitable[None]]
NoticeHandler = Callable[["Notification[A]"], None]


class Methods:
    """The handlers of methods. Any number of connections may share one table.

    A server gives ``access``, which says which peers may call each method, and the ``book`` of servers. Then only
    methods in ``access`` can be added.
    """

    __slots__ = ("_access", "_book", "_judge", "notices", "requests", "streams")

    def __init__(
        self,
        access: Mapping[str, MethodAccess] | None = None,
        book: ServerBook | None = None,
        judge: ClientJudge = NO_JUDGE,
    ) -> None:
        self._access, self._book, self._judge = access, book or ServerBook(), judge
        self.requests: dict[str, tuple[Method[Any, Any], Callable[[Any], Any], bool, Guard | None]] = {}
        """Name → description, handler, whether the handler needs a task, and its guard, if it has one."""
        self.streams: dict[str, tuple[StreamMethod[Any, Any], Callable[[Any, Any], Any], Guard | None]] = {}
        self.notices: dict[str, tuple[Notice[Any], Callable[[Any], None], Guard | None]] = {}

    def answers(self, method: Method[A, R]) -> Callable[[Handler[A, R]], Handler[A, R]]:
        def register(handler: Handler[A, R]) -> Handler[A, R]:
            guard = self._guard(method.name)
            self.requests[method.name] = method, handler, inspect.iscoroutinefunction(handler), guard
            return handler

        return register

    def streams_to(self, method: StreamMethod[A, R]) -> Callable[[StreamHandler[A, R]], StreamHandler[A, R]]:
        def register(handler: StreamHandler[A, R]) -> StreamHandler[A, R]:
            self.streams[method.name] = method, handler, self._guard(method.name)
            return handler

        return register

    def hears(self, notice: Notice[A]) -> Callable[[NoticeHandler[A]], NoticeHandler[A]]:
        def register(handler: NoticeHandler[A]) -> NoticeHandler[A]:
            self.notices[notice.name] = notice, handler, self._guard(notice.name)
            return handler

        return register

    def names(self) -> frozenset[str]:
        return frozenset((*self.requests, *self.streams, *self.notices))

    def _guard(self, name: str) -> Guard | None:
        if name in self.names():
            raise AlreadyExists(f"{name} has a handler already")
        if self._access is None:
            return None
        if name not in self._access:
            raise InvalidArgument(
                f"{name} is not in the table of methods and their callers (protocol/method_access.py): enter it there"
            )
        access = self._access[name]
        is_unguarded = access.is_for_clients and self._judge is NO_JUDGE
        return None if is_unguarded else Guard(name, access, self._book, judge=self._judge)
