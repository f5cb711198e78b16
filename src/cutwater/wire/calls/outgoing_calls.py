"""The calls that this side makes: the receiver of each answer, the deadline, and the bytes under way.

Every call has a deadline, and every call that was begun ends exactly once: with its answer, the peer's error, the
deadline, a cancellation by the caller, or the loss of the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import inf
from typing import Any

from cutwater.errors import (
    CutwaterError,
    DeadlineExceeded,
    InvalidArgument,
    ProtocolViolation,
    QuotaExceeded,
    ResourceExhausted,
)
from cutwater.protocol.errors import ConnectionLost, MalformedFrame, from_wire
from cutwater.protocol.methods import Payload, StreamMethod
from cutwater.runtime.deadline_watch import DeadlineWatch
from cutwater.wire.calls.outbox import Outbox
from cutwater.wire.calls.streams import SharedCredit, StreamReceiver
from cutwater.wire.messages import ENCODE, FrameKind, PeerLimits, WireFrame

_log = logging.getLogger(__name__)

TIMEOUT_MS_MAX = 2**40

Sink = asyncio.Future[WireFrame] | Callable[[WireFrame | CutwaterError], None]
"""Receives the outcome of a call. A function costs no turn of the event loop."""


class Calling:
    """The calls and streams of this side that have not ended yet.

    If ``refusal`` is set, new calls fail with the error that it returns. ``on_idle`` is called whenever the last call
    has ended.
    """

    __slots__ = (
        "_loop",
        "_next",
        "_outbox",
        "_pending",
        "_streams",
        "_watch",
        "bytes",
        "limits",
        "on_idle",
        "refusal",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, outbox: Outbox) -> None:
        self._loop = loop
        self._outbox = outbox
        self.limits = PeerLimits(0, 0, 0, 0)
        """Those of the peer, once they are known."""
        self._next = 1
        self._pending: dict[int, tuple[float, Sink, int, str]] = {}
        """Call → deadline, receiver of the outcome, size of the request, name of the method."""
        self._streams: dict[int, tuple[float, StreamReceiver[Any]]] = {}
        self.bytes = 0
        """Bytes of requests that have no answer yet."""
        self._watch = DeadlineWatch(loop, self._expire)
        self.on_idle: Callable[[], None] | None = None
        self.refusal: Callable[[], CutwaterError] | None = None

    @property
    def is_idle(self) -> bool:
        return not self._pending and not self._streams

    @property
    def count(self) -> int:
        return len(self._pending) + len(self._streams)

    def start(self, method: str, argument: Any, body: Payload, timeout_ms: int, sink: Sink) -> int:
        """Begin a call. If this raises, nothing was sent."""
        if not 1 <= timeout_ms <= TIMEOUT_MS_MAX:
            raise _senseless_timeout(method, timeout_ms)
        header = ENCODE((method, int(timeout_ms), argument))
        size = len(header) + (len(body) if type(body) is bytes else _payload_bytes(body))
        self._admit(method, size)
        call = self._next
        self._outbox.send(FrameKind.REQUEST, call, header, body, is_alone=not self._pending)
        self._next = call + 1
        deadline = self._loop.time() + timeout_ms / 1_000
        self._pending[call] = deadline, sink, size, method
        self.bytes += size
        if deadline < self._watch.armed:
            self._watch.note(deadline)
        return call

    def open(
        self, method: StreamMethod[Any, Any], argument: Any, body: Payload, timeout_ms: int | None, credit: SharedCredit
    ) -> StreamReceiver[Any]:
        if timeout_ms is not None and not 1 <= timeout_ms <= TIMEOUT_MS_MAX:
            raise _senseless_timeout(method.name, timeout_ms)
        self._admit(method.name, 0)
        call = self._next
        stream = StreamReceiver(method, self._outbox, call, credit, self._forget)
        items, size = stream.begin()
        try:
            header = ENCODE((method.name, int(timeout_ms or 0), argument, items, size))
            self._outbox.send(FrameKind.STREAM_OPEN, call, header, body)
        except BaseException:
            stream.end(None)
            raise
        self._next = call + 1
        deadline = inf if timeout_ms is None else self._loop.time() + timeout_ms / 1_000
        self._streams[call] = deadline, stream
        self._watch.note(deadline)
        return stream

    def _admit(self, method: str, size: int) -> None:
        if self.refusal is not None:
            raise self.refusal()
        if len(self._pending) + len(self._streams) >= self.limits.calls_max:
            raise ResourceExhausted(
                f"{method}: {self.limits.calls_max} calls are on their way, more than the peer serves at a time",
                retry_ms=10,
            )
        if self.bytes + size > self.limits.call_bytes_max:
            raise ResourceExhausted(
                f"{method}: {self.bytes} bytes of requests are on their way and {size} more exceed "
                f"the {self.limits.call_bytes_max} that the peer takes at a time",
                retry_ms=10,
            )
        if self._outbox.is_busy and self._outbox.is_full:
            raise ResourceExhausted(
                f"{method}: {self._outbox.size} bytes wait already for the peer, which reads too slowly", retry_ms=10
            )

    def cancel(self, call: int) -> None:
        """Cancel a call whose answer the caller no longer wants."""
        if self._take(call) is not None:
            self._outbox.send(FrameKind.CANCEL, call, b"")

    def _take(self, call: int) -> Sink | None:
        """End a call. Returns the receiver of the outcome, which the code that calls this must notify."""
        entry = self._pending.pop(call, None)
        if entry is None:
            return None
        self.bytes -= entry[2]
        if self.on_idle is not None and not self._pending and not self._streams:
            self.on_idle()
        return entry[1]

    def _forget(self, call: int) -> StreamReceiver[Any] | None:
        """Cancel a stream."""
        stream = self._end_stream(call)
        if stream is not None:
            self._outbox.send(FrameKind.CANCEL, call, b"")
        return stream

    def _end_stream(self, call: int) -> StreamReceiver[Any] | None:
        entry = self._streams.pop(call, None)
        if self.on_idle is not None and not self._pending and not self._streams:
            self.on_idle()
        return None if entry is None else entry[1]

    # Frames from the peer.

    def expects(self, kind: int, call: int) -> bool:
        """Return whether a call or stream waits for a frame that is about to be received."""
        return call in (self._streams if kind == FrameKind.STREAM_ITEM else self._pending)

    def response(self, frame: WireFrame) -> None:
        sink = self._take(frame.call)
        if sink is None:
            self._check_known(frame.call)
        elif isinstance(sink, asyncio.Future):
            if not sink.done():
                sink.set_result(frame)
        else:
            _tell(sink, frame)

    def error(self, frame: WireFrame) -> None:
        error = from_wire(frame.header)
        sink = self._take(frame.call)
        if sink is not None:
            _fail(sink, error)
            return
        stream = self._end_stream(frame.call)
        if stream is not None:
            stream.end(error)
        else:
            self._check_known(frame.call)

    def stream_item(self, frame: WireFrame) -> None:
        self._for_stream(frame, lambda stream: stream.item(frame))

    def blocked(self, frame: WireFrame) -> None:
        self._for_stream(frame, lambda stream: stream.blocked(frame.header))

    def _for_stream(self, frame: WireFrame, tell: Callable[[StreamReceiver[Any]], None]) -> None:
        entry = self._streams.get(frame.call)
        if entry is None:
            self._check_known(frame.call)
            return
        try:
            tell(entry[1])
        except (MalformedFrame, ResourceExhausted) as error:
            # These errors end the stream only. All other errors end the connection.
            self._forget(frame.call)
            entry[1].end(error)

    def stream_end(self, frame: WireFrame) -> None:
        stream = self._end_stream(frame.call)
        if stream is not None:
            stream.end(None)
        else:
            self._check_known(frame.call)

    def _check_known(self, call: int) -> None:
        """Raise if the call was never made. An answer may come after the caller gave up."""
        if call >= self._next:
            raise ProtocolViolation(f"an answer came to call {call}, which was never made")

    # Closing.

    def cancel_streams(self, error: CutwaterError) -> None:
        """End all streams with an error, so that readers do not take this for the regular end of the stream."""
        for call in list(self._streams):
            stream = self._forget(call)
            if stream is not None:
                stream.end(error)

    def lost(self, reason: str, cause: CutwaterError | None) -> None:
        """End every call and stream, as the connection is gone. Requests may or may not have been carried out."""
        self._watch.stop()
        pending, self._pending = self._pending, {}
        streams, self._streams = self._streams, {}
        self.bytes = 0
        for _, sink, _, _ in pending.values():
            _fail(sink, _lost(reason, cause))
        for _, stream in streams.values():
            stream.end(_lost(reason, cause))

    def _expire(self, now: float) -> float:
        for call, entry in [item for item in self._pending.items() if item[1][0] <= now]:
            sink = self._take(call)
            if sink is not None:
                self._outbox.send(FrameKind.CANCEL, call, b"")
                _fail(sink, DeadlineExceeded(f"{entry[3]}: no answer came in time; it may or may not be carried out"))
        for call in [call for call, (deadline, _) in self._streams.items() if deadline <= now]:
            stream = self._forget(call)
            if stream is not None:
                stream.end(DeadlineExceeded("the time of this stream is up"))
        return min(
            min((entry[0] for entry in self._pending.values()), default=inf),
            min((deadline for deadline, _ in self._streams.values()), default=inf),
        )


def _senseless_timeout(method: str, timeout_ms: int) -> InvalidArgument:
    return InvalidArgument(f"{method}: a timeout is 1 to {TIMEOUT_MS_MAX} ms, not {timeout_ms}")


def _lost(reason: str, cause: CutwaterError | None) -> CutwaterError:
    if isinstance(cause, QuotaExceeded):
        # The connection found no place at the server, which has begun nothing of what came over it.
        return QuotaExceeded(cause.subject, cause.limit, cause.quota, cause.retry_after)
    error = ConnectionLost(reason, outcome_unknown=True)
    if not isinstance(cause, ConnectionLost):
        error.__cause__ = cause
    return error


def _fail(sink: Sink, error: CutwaterError) -> None:
    if not isinstance(sink, asyncio.Future):
        _tell(sink, error)
    elif not sink.done():
        sink.set_exception(error)


def _tell(sink: Callable[[WireFrame | CutwaterError], None], outcome: WireFrame | CutwaterError) -> None:
    try:
        sink(outcome)
    except Exception:
        _log.exception("the callback for an answer failed")


def _payload_bytes(body: Payload) -> int:
    pieces = body if isinstance(body, list | tuple) else (body,)
    return sum(memoryview(piece).nbytes for piece in pieces)
