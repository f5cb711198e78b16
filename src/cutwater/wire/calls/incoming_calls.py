"""The calls that this side answers: limits, handlers, cancellation, and errors of handlers.

The calls being served are limited in number and in bytes. Beyond that, a request is refused with ``ResourceExhausted``
before any handler sees it. A call counts until its handler is done with it, also when its caller has given up.

Bytes of a large message are reserved before it is received. A call that keeps the message takes over the reservation;
otherwise the connection releases it as soon as the message was handled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec import Struct

from cutwater.errors import CutwaterError, PermissionDenied, ProtocolViolation, ResourceExhausted, Unavailable
from cutwater.protocol.errors import InternalError, UnknownMethod, encode_error
from cutwater.protocol.methods import Body, Payload
from cutwater.runtime import system
from cutwater.runtime.deadline_watch import DeadlineWatch
from cutwater.wire.calls.handlers import LATER, Methods, ReplyWithBody
from cutwater.wire.calls.metering import CallMeter, size_of, with_answer_limit
from cutwater.wire.calls.outbox import Outbox
from cutwater.wire.calls.streams import StreamSender
from cutwater.wire.identity.access_guard import Guard
from cutwater.wire.messages import ENCODE, FrameKind, OpenHeader, RequestHeader, WireFrame
from cutwater.wire.options import Budget

if TYPE_CHECKING:
    from cutwater.wire.connection import Connection

_log = logging.getLogger(__name__)

METHOD_CHARS_SHOWN = 64

A = TypeVar("A")


class Notification(Struct, Generic[A], eq=False):
    """A notice from the peer."""

    connection: Connection
    argument: A
    body: Body


class Call(Struct, Generic[A], eq=False):
    """A request from the peer. ``deadline`` is in the time of the event loop.

    A handler that returned ``LATER`` must call ``answer`` or ``fail`` once, also after the call was cancelled: until
    then it counts as being served.
    """

    _serving: IncomingCalls
    number: int
    argument: A
    body: Body
    size: int
    deadline: float
    is_answered: bool = False
    is_cancelled: bool = False
    is_started: bool = False
    is_waiting: bool = False
    """The meter has not let it begin yet."""
    task: asyncio.Task[None] | None = None
    sender: StreamSender[Any] | None = None
    guard: Guard | None = None
    _on_cancel: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<Call {self.number}, {self.size} bytes>"

    @property
    def connection(self) -> Connection:
        return self._serving.connection

    def answer(self, value: Any = None, body: Payload = b"") -> None:
        self._serving.finish(self, ReplyWithBody(value, body))

    def fail(self, error: CutwaterError) -> None:
        self._serving.finish(self, error)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Set a function to call when the caller gives up, its deadline passes, or the connection is lost."""
        self._on_cancel = callback

    def cancel(self) -> None:
        """Cancel the call: its answer is no longer needed."""
        if self.is_cancelled:
            return
        self.is_cancelled = True
        if self.task is not None:
            self.stop()
        elif self._on_cancel is not None:
            try:
                self._on_cancel()
            except Exception:
                _log.exception("what was to be done when a call is cancelled failed")

    def recheck(self) -> None:
        """End the call if its caller has lost the right to it. A call that has not begun is checked when it begins."""
        if self.guard is None or self.is_waiting or (self.task is not None and not self.is_started):
            return
        try:
            self.guard.check_again(self.connection.peer, self.argument, is_stream=self.sender is not None)
        except CutwaterError as error:
            self.fail(error)
            self.cancel()

    def stop(self) -> None:
        """Cancel the task. A task that has not begun will never run, so its call is ended here."""
        assert self.task is not None
        self.task.cancel()
        if not self.is_started:
            self.fail(Unavailable("this side is closing: nothing was done"))


class IncomingCalls:
    """The requests and streams of the peer that are being served.

    If ``refusal`` is set, new requests fail with the error that it returns. ``on_idle`` is called whenever the last
    call is done.
    """

    __slots__ = (
        "_budget",
        "_calls",
        "_is_lost",
        "_loop",
        "_methods",
        "_options",
        "_outbox",
        "_watch",
        "bytes",
        "connection",
        "meter",
        "on_idle",
        "refusal",
        "refused",
        "reserved",
    )

    def __init__(
        self, connection: Connection, loop: asyncio.AbstractEventLoop, outbox: Outbox, methods: Methods, budget: Budget
    ) -> None:
        self.connection = connection
        self._loop = loop
        self._outbox = outbox
        self._methods = methods
        self._options = connection.options
        self._budget = budget
        self._calls: dict[int, Call[Any]] = {}
        self.bytes = 0
        """Bytes of requests that are being received or served."""
        self._is_lost = False
        self._watch = DeadlineWatch(loop, self._expire)
        self.reserved = 0
        """Bytes of the large message that is being received or handled."""
        self.refused = 0
        self.on_idle: Callable[[], None] | None = None
        self.refusal: Callable[[], CutwaterError] | None = None
        self.meter: CallMeter | None = None
        """Limits what a client under a quota uses. Read for every call, so it is an attribute."""

    @property
    def is_idle(self) -> bool:
        return not self._calls

    @property
    def count(self) -> int:
        return len(self._calls)

    # Frames from the peer.

    def reserve(self, size: int, *, is_request: bool) -> bool:
        """Reserve room for a large message that is about to be received. Returns False if there is no room."""
        if (is_request and self.bytes + size > self._options.call_bytes_max) or not self._budget.take(size):
            return False
        self.bytes += size
        self.reserved = size
        return True

    def release(self) -> None:
        size, self.reserved = self.reserved, 0
        self._give_back(size)

    def request(self, frame: WireFrame) -> None:
        objection = self._objection(frame, self._methods.requests)
        if objection is not None:
            self._tell(frame.call, objection)
            return
        header: RequestHeader = frame.header
        method, handler, needs_task, guard = self._methods.requests[header.method]
        deadline = self._loop.time() + header.timeout_ms / 1_000
        call: Call[Any] = Call(self, frame.call, header.argument, frame.body, frame.size, deadline)
        call.guard = guard
        if self.meter is not None and guard is not None and guard.is_for_clients:
            self._begin_metered(self.meter, call, method, handler, needs_task, guard)
            return
        outcome: Any
        try:
            if guard is not None:
                guard.check(self.connection.peer)
            if needs_task:
                self._keep(call)
                call.task = self._loop.create_task(self._run(call, method, handler, guard))
                return
            call.argument = method.argument_of(header.argument)
            if guard is not None:
                guard.check_argument(self.connection.peer, call.argument)
            outcome = handler(call)
        except CutwaterError as error:
            outcome = error
        except Exception as error:
            outcome = unforeseen(method.name, error)
        if call.is_answered:
            return
        if outcome is LATER:
            self._keep(call)
            if self._is_lost:
                # The handler itself ended the connection.
                call.cancel()
            return
        call.is_answered = True
        self._send(call, outcome)

    def _begin_metered(
        self,
        meter: CallMeter,
        call: Call[Any],
        method: Any,
        handler: Callable[[Call[Any]], Any],
        needs_task: bool,
        guard: Guard,
    ) -> None:
        """Serve a call when the meter lets it begin. While it waits it counts against the limits."""

        def begin() -> None:
            call.is_waiting = False
            call._on_cancel = None
            if needs_task:
                call.task = self._loop.create_task(self._run(call, method, handler, guard))
                return
            try:
                outcome = handler(self._with_argument(call, method, guard))
            except CutwaterError as error:
                outcome = error
            except Exception as error:
                outcome = unforeseen(method.name, error)
            if outcome is not LATER:
                self.finish(call, outcome)

        self._keep(call)
        call.is_waiting = True
        meter.enter(call, begin, brings_data=guard.brings_data)

    def _with_argument(self, call: Call[Any], method: Any, guard: Guard | None) -> Call[Any]:
        """Decode the argument of a call, and check that its caller may make it."""
        call.argument = method.argument_of(call.argument)
        if guard is not None:
            guard.check_argument(self.connection.peer, call.argument)
            if self.meter is not None and guard.has_answer_limit:
                call.argument = with_answer_limit(call.argument, self.meter.answer_bytes_max)
        return call

    def stream_open(self, frame: WireFrame) -> None:
        objection = self._objection(frame, self._methods.streams)
        if objection is not None:
            self._tell(frame.call, objection)
            return
        header: OpenHeader = frame.header
        method, handler, guard = self._methods.streams[header.method]
        if guard is not None:
            try:
                guard.check(self.connection.peer)
            except CutwaterError as error:
                self._tell(frame.call, error)
                return
        deadline = self._loop.time() + header.timeout_ms / 1_000 if header.timeout_ms else inf
        call: Call[Any] = Call(self, frame.call, header.argument, frame.body, frame.size, deadline)
        call.guard = guard
        sender = call.sender = StreamSender(
            self._outbox, frame.call, header.items, header.bytes, self._options.stall_ms_max
        )
        self._keep(call)
        if self.meter is not None and guard is not None and guard.is_for_clients:
            call.is_waiting = True
            sender.meter = self.meter
        call.task = self._loop.create_task(self._run(call, method, lambda call: handler(call, sender), guard))

    def notify(self, frame: WireFrame) -> None:
        entry = self._methods.notices.get(frame.header.method)
        if entry is None:
            _log.warning("%s told %s, which is not known here", self.connection, _shown(frame.header.method))
            return
        notice, handler, guard = entry
        if guard is not None:
            # A notice has no answer, so ending the connection is the only way to refuse it.
            guard.check(self.connection.peer)
        try:
            argument = notice.argument_of(frame.header.argument)
        except CutwaterError:
            _log.exception("%s told %r, which is not as expected", self.connection, notice.name)
            return
        if self.meter is not None and not self.meter.takes_notice(frame.size):
            # It has no answer, and says nothing that the servers would not find out.
            return
        if guard is not None:
            try:
                guard.check_argument(self.connection.peer, argument)
            except PermissionDenied as error:
                # It has been counted. The other calls of this connection may well be allowed.
                _log.debug("%s told %r in vain: %s", self.connection, notice.name, error.message)
                return
        try:
            handler(Notification(self.connection, argument, frame.body))
        except Exception:
            _log.exception("%s told %r, and its handler failed", self.connection, notice.name)

    def cancel(self, frame: WireFrame) -> None:
        call = self._calls.get(frame.call)
        if call is not None:
            call.cancel()

    def credit(self, frame: WireFrame) -> None:
        call = self._calls.get(frame.call)
        if call is not None and call.sender is not None:
            call.sender.granted(frame.header.items, frame.header.bytes)

    # Admission and results.

    def _objection(self, frame: WireFrame, methods: dict[str, Any]) -> CutwaterError | None:
        """Return why a request is not served, or None. No handler has seen it, so nothing was done."""
        options, size = self._options, frame.size - self.reserved
        if self.refusal is not None:
            return self.refusal()
        if len(self._calls) >= options.calls_max:
            return self.exhausted(f"{options.calls_max} calls of this connection are being served")
        if (
            frame.skipped
            or self.bytes + size > options.call_bytes_max
            or self._budget.used + size > self._budget.bytes_max
        ):
            return self.exhausted(f"there is no room now for a request of {frame.size} bytes")
        if self._outbox.is_busy and self._outbox.is_full:
            return self.exhausted(f"{self._outbox.size} bytes of answers wait to be read")
        if frame.call in self._calls:
            raise ProtocolViolation(f"call {frame.call} was made twice")
        method = frame.header.method
        if method not in methods:
            return UnknownMethod(f"{_shown(method)} is not known here: the versions of both sides may differ")
        return None

    def exhausted(self, message: str) -> ResourceExhausted:
        """Count a refusal, and return the error for it."""
        self.refused += 1
        return ResourceExhausted(message, retry_ms=self._options.retry_ms)

    def _tell(self, call: int, error: CutwaterError) -> None:
        self._outbox.send(FrameKind.ERROR, call, encode_error(error, self._outbox.header_bytes_max))

    def _keep(self, call: Call[Any]) -> None:
        """Keep a call that goes on after this turn. From now on it counts against the limits."""
        if self.reserved:
            self.reserved = 0
        else:
            self.bytes += call.size
            self._budget.used += call.size
        self._calls[call.number] = call
        if call.deadline < self._watch.armed:
            self._watch.note(call.deadline)

    def _give_back(self, size: int) -> None:
        self.bytes -= size
        self._budget.give_back(size)

    async def _run(
        self, call: Call[Any], method: Any, handler: Callable[[Call[Any]], Any], guard: Guard | None
    ) -> None:
        call.is_started = True
        try:
            if call.is_waiting and self.meter is not None:
                await self.meter.enter_stream(call)
            call.is_waiting = False
            self.finish(call, await handler(self._with_argument(call, method, guard)))
        except CutwaterError as error:
            self.finish(call, error)
        except asyncio.CancelledError:
            self.finish(call, Unavailable(f"{method.name} was stopped here, possibly half-way: this side is closing"))
            raise
        except Exception as error:
            self.finish(call, unforeseen(method.name, error))

    def finish(self, call: Call[Any], outcome: Any) -> None:
        """End a call with the result of its handler, or with an error, and send it to the peer."""
        if call.is_answered:
            return
        call.is_answered = True
        if self._calls.get(call.number) is call:
            del self._calls[call.number]
            self._give_back(call.size)
        if not call.is_cancelled:
            self._send(call, outcome)
        if self.on_idle is not None and not self._calls:
            self.on_idle()

    def _send(self, call: Call[Any], outcome: Any) -> None:
        try:
            if isinstance(outcome, CutwaterError):
                self._tell(call.number, outcome)
            elif call.sender is not None:
                self._outbox.send(FrameKind.STREAM_END, call.number, b"")
            elif type(outcome) is ReplyWithBody:
                value = ENCODE(outcome.value)
                if self.meter is not None:
                    self.meter.sent(len(value) + size_of(outcome.body))
                self._outbox.send(FrameKind.RESPONSE, call.number, value, outcome.body, is_alone=not self._calls)
            else:
                value = ENCODE(outcome)
                if self.meter is not None:
                    self.meter.sent(len(value))
                self._outbox.send(FrameKind.RESPONSE, call.number, value, is_alone=not self._calls)
        except CutwaterError as error:
            self._tell(call.number, error)
        except Exception as error:
            # The value cannot be encoded, which is a bug in the handler.
            self._tell(call.number, unforeseen("an answer", error))

    # Streams and the end of the connection.

    def wake_streams(self) -> None:
        """Wake streams that wait, since the transport has room again."""
        for call in self._calls.values():
            if call.sender is not None:
                call.sender.wake()

    def recheck(self) -> None:
        """End calls whose caller has lost the right to them."""
        for call in list(self._calls.values()):
            call.recheck()

    @property
    def streams(self) -> int:
        """How many streams are being sent, without those that may not begin yet."""
        return sum(call.sender is not None and not call.is_waiting for call in self._calls.values())

    def use_meter(self, meter: CallMeter | None) -> None:
        """Limit calls from now on, and streams that are open already."""
        self.meter = meter
        for call in self._calls.values():
            if call.sender is not None:
                call.sender.meter = meter

    def end_streams(self) -> None:
        """Stop all streams because this side is closing: they would go on for ever, so receivers must go elsewhere."""
        for call in list(self._calls.values()):
            if call.sender is not None:
                call.stop()

    def lost(self) -> None:
        """Cancel all calls: the connection is gone, and no peer waits for their answers."""
        self._is_lost = True
        self._watch.stop()
        self.release()
        for call in list(self._calls.values()):
            call.cancel()

    def _expire(self, now: float) -> float:
        for call in [call for call in self._calls.values() if call.deadline <= now]:
            call.cancel()
        return min((call.deadline for call in self._calls.values() if not call.is_cancelled), default=inf)


def _shown(method: str) -> str:
    """Shorten a name that the peer made up, for messages."""
    return repr(method[:METHOD_CHARS_SHOWN])


def unforeseen(name: str, error: Exception) -> InternalError:
    """Return an error that tells the peer of an unforeseen failure without details. The details go to the log."""
    incident = system.token_hex(4)
    _log.error("incident %s: %s failed", incident, name, exc_info=error)
    return InternalError(f"{name} failed at the peer", incident=incident)
