"""A connection: both sides may send requests and answer them, within limits.

``Connection`` is an asyncio protocol. It does not depend on sockets, so the same code runs over TCP, TLS and memory.

Back pressure works in two ways. A side that only answers requests stops reading while its answers pile up, so the
operating system alone slows down a peer that reads slowly. A side that waits for answers or has unsent notices must
keep reading. Otherwise two busy sides could wait for each other for ever. When too much has piled up, it refuses
requests instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar, cast

from msgspec import Raw

from cutwater.errors import (
    CutwaterError,
    DeadlineExceeded,
    ProtocolViolation,
    QuotaExceeded,
    ResourceExhausted,
    Unavailable,
)
from cutwater.protocol.errors import ConnectionLost, Unproven, encode_error, from_wire, why_lost
from cutwater.protocol.methods import Method, Notice, Payload, Received, StreamMethod
from cutwater.runtime.event_loop import receive_buffer
from cutwater.wire.calls.incoming_calls import IncomingCalls, unforeseen
from cutwater.wire.calls.metering import CallMeter
from cutwater.wire.calls.outbox import Outbox
from cutwater.wire.calls.outgoing_calls import Calling
from cutwater.wire.calls.streams import WINDOW_BYTES, WINDOW_ITEMS, SharedCredit, StreamReceiver
from cutwater.wire.codec import FrameDecoder
from cutwater.wire.identity.auth import Authenticator
from cutwater.wire.identity.handshake import Endpoint, Expect, Greeting, Peer
from cutwater.wire.identity.server_certificates import Wants
from cutwater.wire.inprocess_transport import FrameQueue, InProcessTransport
from cutwater.wire.keepalive import Keepalive, KeepaliveVerdict
from cutwater.wire.messages import ENCODE, FrameKind, WireFrame
from cutwater.wire.options import Budget
from cutwater.wire.states import ConnectionSnapshot, ConnectionState

_log = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")


class Connection(asyncio.BufferedProtocol):
    """One connection with a peer.

    ``client.connect`` or a listener makes it. Users get it only when it is open.

    With ``token``, this side is the one that connects; otherwise it is the one that accepts. The listener sets
    ``on_open`` and ``on_closed``. ``expect`` checks the server at the other end before this side proves anything to it.
    ``dialled`` is the address of that server.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        token: str | None = None,
        gateway: str = "",
        expect: Expect | None = None,
        dialled: str = "",
        authenticate: Authenticator | None = None,
        wants: Wants | None = None,
        budget: Budget | None = None,
        on_open: Callable[[Connection], None] | None = None,
        on_closed: Callable[[Connection], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.options = options = endpoint.options
        self.state = ConnectionState.GREETING
        self.peer: Peer | None = None
        self.error: CutwaterError | None = None
        """Why the connection failed. Either side may have found the error."""
        self._greeting = Greeting(endpoint, token, expect, dialled, authenticate, wants, gateway)
        self._on_open = on_open
        self._on_closed = on_closed
        self._loop = loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = loop.create_future()
        self._closed: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._address = "a peer"
        self._has_tls = False
        self._outbox = outbox = Outbox(
            loop,
            options.send_high_bytes,
            options.send_bytes_max,
            options.handshake_bytes_max,
            self._settled,
            self._overflow,
        )
        self._calling = Calling(loop, outbox)
        self._calling.refusal = self._not_open
        self._serving = IncomingCalls(self, loop, outbox, endpoint.methods, budget or Budget(options.call_bytes_max))
        limit = options.handshake_bytes_max
        self._from_bytes = FrameDecoder(limit, limit, self._admit)
        self._decoder: FrameDecoder | FrameQueue = self._from_bytes
        self._is_direct = False
        self._is_deaf = False
        """Received frames are left alone: answers pile up, or the connection failed."""
        self._is_choked = False
        """Reading has stopped because answers pile up."""
        self._told_until = 0
        """Position in the sent bytes (``Outbox.position``) at which the last notice ends."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._drained: asyncio.Future[None] | None = None
        self._has_said_goaway = False
        self._has_heard_goaway = False
        self._heard = True
        self._keepalive: Keepalive
        self._scratch = receive_buffer()
        self._on: list[Callable[[WireFrame], None]] = [self._out_of_place] * (max(FrameKind) + 1)
        self._on[FrameKind.HELLO] = self._on[FrameKind.WELCOME] = self._on[FrameKind.PROOF] = self._greet
        self._on[FrameKind.GOAWAY] = self._take_goaway

    def __repr__(self) -> str:
        peer = self.peer
        if peer is None:
            return f"<Connection {self.state.value}, {self._address}>"
        return f"<Connection {self.state.value}, {peer.role!r} {peer.name!r} at {peer.address}>"

    # Public interface.

    @property
    def opened(self) -> asyncio.Future[None]:
        """Done when the handshake has succeeded or failed. Cancelling this future does not affect other waiters."""
        return asyncio.shield(self._opened)

    @property
    def closed(self) -> asyncio.Future[None]:
        """Done when the connection has closed.

        Each access returns a new future, so cancelling one does not affect other waiters. Keep the future instead of
        asking for it repeatedly, and use ``is_closed`` where a test is enough.
        """
        return asyncio.shield(self._closed)

    @property
    def is_closed(self) -> bool:
        return self._closed.done()

    async def call(self, method: Method[A, R], argument: A, body: Payload = b"", *, timeout_ms: int) -> Received[R]:
        """Send a request and wait for the answer, at most ``timeout_ms``.

        If the waiting task is cancelled, the handler is cancelled too.
        """
        future: asyncio.Future[WireFrame] = self._loop.create_future()
        number = self._calling.start(method.name, argument, body, timeout_ms, future)
        if self._is_choked:
            self._unchoke()
        try:
            frame = await future
        except asyncio.CancelledError:
            self._calling.cancel(number)
            if future.done() and not future.cancelled():
                # The call failed in the same turn. Retrieve the exception, or asyncio would log it as never retrieved.
                future.exception()
            raise
        return Received(method.result_of(frame.header), frame.body)

    def begin(
        self,
        method: Method[A, R],
        argument: A,
        body: Payload = b"",
        *,
        timeout_ms: int,
        on_answer: Callable[[Received[R] | CutwaterError], None],
    ) -> int:
        """Send a request and call ``on_answer`` with the outcome. This needs no task and no future.

        Returns a number for ``cancel``. After ``cancel``, ``on_answer`` is not called.
        """

        def sink(outcome: WireFrame | CutwaterError) -> None:
            if isinstance(outcome, CutwaterError):
                on_answer(outcome)
                return
            try:
                received = Received(method.result_of(outcome.header), outcome.body)
            except CutwaterError as error:
                on_answer(error)
            else:
                on_answer(received)

        number = self._calling.start(method.name, argument, body, timeout_ms, sink)
        if self._is_choked:
            self._unchoke()
        return number

    def cancel(self, number: int) -> None:
        self._calling.cancel(number)

    def open_stream(
        self,
        method: StreamMethod[A, R],
        argument: A,
        body: Payload = b"",
        *,
        credit: SharedCredit | None = None,
        timeout_ms: int | None = None,
    ) -> StreamReceiver[R]:
        """Open a stream.

        ``credit`` is the room for the items of this stream, which other streams may share. ``timeout_ms`` limits the
        stream as a whole; without it, the stream may last as long as the connection.
        """
        room = credit
        if room is None:
            room = SharedCredit(WINDOW_ITEMS, WINDOW_BYTES, item_bytes_max=self.options.frame_bytes_max)
        stream = self._calling.open(method, argument, body, timeout_ms, room)
        if self._is_choked:
            self._unchoke()
        return stream

    def notify(self, notice: Notice[A], argument: A, body: Payload = b"", *, is_alone: bool = False) -> None:
        """Send a notice, which has no answer.

        If this raises, the notice was not sent. Otherwise it arrives, unless the connection is lost. ``is_alone``: this
        turn will probably send nothing else, so the notice is written without waiting for more.
        """
        if self._calling.refusal is not None:
            raise self._calling.refusal()
        outbox = self._outbox
        if outbox.is_busy and outbox.is_full:
            raise ResourceExhausted(
                f"{notice.name}: {outbox.size} bytes wait already for {self._address}, which reads too slowly",
                retry_ms=self.options.retry_ms,
            )
        outbox.send(FrameKind.NOTIFY, 0, ENCODE((notice.name, argument)), body, is_alone=is_alone)
        self._told_until = outbox.position
        if self._is_choked:
            self._unchoke()

    def flush(self) -> None:
        """Write everything that was sent in this turn now. Call this before waiting for something else."""
        self._outbox.flush()

    def snapshot(self) -> ConnectionSnapshot:
        return ConnectionSnapshot(
            self.state,
            self._calling.count,
            self._calling.bytes,
            self._serving.count,
            self._serving.bytes,
            self._serving.refused,
            self._outbox.size,
            self._decoder.held_bytes,
            self._decoder.frames,
        )

    async def close(self, *, timeout_ms: int = 5_000) -> None:
        """Stop sending and accepting requests, wait until the requests under way are answered, and close."""
        deadline = self._loop.time() + timeout_ms / 1_000
        try:
            if self.state is ConnectionState.OPEN:
                self._begin_closing()
            if self.state is ConnectionState.CLOSING and self._drained is not None:
                waiting = {self._drained, self.closed}
                await asyncio.wait(waiting, timeout=timeout_ms / 1_000, return_when="FIRST_COMPLETED")
            if self._transport is not None and self.state is not ConnectionState.FAILED:
                self._outbox.flush()
                self._transport.close()
            if self.state is not ConnectionState.CLOSED:
                await asyncio.wait({self.closed}, timeout=max(deadline - self._loop.time(), 0.1))
        finally:
            # A caller that is cancelled while closing must not leave a connection open that has no owner.
            self.abort()
        await self.closed

    def recheck(self) -> None:
        """End calls of the peer that it has lost the right to."""
        self._serving.recheck()

    def use_meter(self, meter: CallMeter | None) -> None:
        """Limit the calls of the peer from now on."""
        self._serving.use_meter(meter)

    @property
    def is_metered(self) -> bool:
        return self._serving.meter is not None

    @property
    def streams_sent(self) -> int:
        """How many streams are being sent to the peer."""
        return self._serving.streams

    def abort(self) -> None:
        """Close at once, without waiting for answers."""
        if self._transport is not None:
            self._transport.abort()
        elif self.state is not ConnectionState.CLOSED:
            self.connection_lost(None)

    def fail(self, error: CutwaterError) -> None:
        """End the connection because of what the peer did: send the peer the error, and process no more frames."""
        if self.state in (ConnectionState.FAILED, ConnectionState.CLOSED):
            return
        if self.peer is not None and not isinstance(error, Unproven | QuotaExceeded):
            # Peers that have not greeted are logged by the listener, and peers that fail to prove that they are servers
            # by a guard. Both limit how often they log. Metrics count those that a quota refuses.
            _log.info("%r closed: %s", self, error.message)
        self._fall(error)
        told = encode_error(error, self._outbox.header_bytes_max - 1)
        self._outbox.send(FrameKind.GOAWAY, 0, ENCODE((Raw(told),)))
        self._outbox.flush()
        transport = self._transport
        if transport is not None and not transport.is_closing():
            # Closing at once could discard the GOAWAY, since there may be unread bytes of the peer.
            if transport.can_write_eof():
                transport.write_eof()
            transport.resume_reading()

    # Callbacks from the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        if self.state is ConnectionState.CLOSED:
            # The connection was given up while it was being made.
            transport.abort()
            return
        self._transport = transport
        address = transport.get_extra_info("peername")
        self._address = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
        self._has_tls = transport.get_extra_info("ssl_object") is not None
        if isinstance(transport, InProcessTransport):
            self._decoder = transport.inbox
            transport.inbox.limit(self.options.handshake_bytes_max, self._admit)
        self._outbox.attach(transport)
        transport.set_write_buffer_limits(self.options.send_high_bytes, self.options.send_low_bytes)
        self._later("handshake", self.options.handshake_ms_max, self._handshake_is_late)
        try:
            hello = self._greeting.begin(transport)
        except CutwaterError as error:
            return self.fail(error)
        if hello:
            self._outbox.send(FrameKind.HELLO, 0, hello)

    def get_buffer(self, sizehint: int) -> memoryview:
        self._is_direct = False
        if self._from_bytes.large is not None and self.state is not ConnectionState.FAILED:
            target = self._from_bytes.target()
            if target is not None:
                self._is_direct = True
                return target
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        if self._is_direct:
            self._from_bytes.filled(nbytes)
        elif self.state is not ConnectionState.FAILED:
            self._from_bytes.feed(self._scratch[:nbytes].tobytes())
        self._process()

    def frames_received(self) -> None:
        self._heard = True
        if self.state is ConnectionState.FAILED and isinstance(self._decoder, FrameQueue):
            self._decoder.clear()
        self._process()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._outbox.pause()
        self._choke()

    def resume_writing(self) -> None:
        self._outbox.resume()
        self._serving.wake_streams()
        if self._is_choked:
            self._unchoke()

    def _settled(self) -> None:
        """Runs one turn after much was written. A transport that cannot keep up has called ``pause_writing`` by now."""
        if self._is_deaf and not self._is_choked and self.state in (ConnectionState.OPEN, ConnectionState.CLOSING):
            self._listen_again()
        if not self._outbox.is_paused:
            self._serving.wake_streams()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.state is ConnectionState.CLOSED:
            return
        if self.state is not ConnectionState.FAILED:
            is_greeting = self.state is ConnectionState.GREETING and bool(self._greeting.hello)
            self._fall(why_lost(self._address, exc, is_greeting=is_greeting, has_tls=self._has_tls))
        self.state = ConnectionState.CLOSED
        self._transport = None
        self._outbox.detach()
        for timer in self._timers.values():
            timer.cancel()
        self._closed.set_result(None)
        if self._on_closed is not None:
            self._on_closed(self)

    # Processing of frames.

    def _process(self) -> None:
        if self._is_deaf:
            return
        decoder, on, outbox, serving = self._decoder, self._on, self._outbox, self._serving
        outbox.will_flush = True
        try:
            while (frame := decoder.next_frame()) is not None:
                on[frame.kind](frame)
                if serving.reserved:
                    serving.release()
                if outbox.is_busy:
                    self._rest()
                if self._is_deaf:
                    break
        except CutwaterError as error:
            self.fail(error)
        except Exception as error:
            self.fail(unforeseen(f"{self!r}", error))
        finally:
            outbox.flush()

    def _admit(self, kind: int, call: int, size: int) -> bool:
        """Return whether to receive a large frame.

        Unrequested frames count against the budget that all connections share. A request for which there is no room is
        skipped and refused.
        """
        if kind in (FrameKind.RESPONSE, FrameKind.STREAM_ITEM):
            return self._calling.expects(kind, call)
        is_request = kind in (FrameKind.REQUEST, FrameKind.STREAM_OPEN)
        if self._serving.reserve(size, is_request=is_request):
            return True
        if not is_request:
            # A notice has no answer, so ending the connection is the only way to say that it was not accepted.
            raise self._serving.exhausted(f"there is no room now for a message of {size} bytes")
        return False

    def _out_of_place(self, frame: WireFrame) -> None:
        raise ProtocolViolation(f"a {FrameKind(frame.kind).name} frame has no place while {self.state.value}")

    def _require_transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    def _rest(self) -> None:
        """Much waits to be written: stop reading for this turn, or until the peer has read."""
        if self._outbox.is_paused:
            self._choke()
        elif self.state in (ConnectionState.OPEN, ConnectionState.CLOSING):
            # The next turn shows whether the transport can keep up.
            self._is_deaf = True
            self._require_transport().pause_reading()

    def _choke(self) -> None:
        outbox = self._outbox
        is_telling = self._told_until > outbox.position - outbox.size
        if self.state in (ConnectionState.OPEN, ConnectionState.CLOSING) and self._calling.is_idle and not is_telling:
            self._is_choked = self._is_deaf = True
            self._require_transport().pause_reading()

    def _unchoke(self) -> None:
        """Read again.

        A side that waits for an answer must read, however much it has just written: its peer may do the same.
        """
        self._is_choked = False
        if self._outbox.is_paused or not self._outbox.is_busy:
            self._listen_again()

    def _listen_again(self) -> None:
        if self._transport is not None and self.state is not ConnectionState.FAILED:
            self._is_deaf = False
            self._transport.resume_reading()
            self._loop.call_soon(self._process)

    # Handshake.

    def _greet(self, frame: WireFrame) -> None:
        reply, peer = self._greeting.take(frame, self._require_transport(), self._address)
        if reply is not None:
            kind, header = reply
            self._outbox.send(kind, 0, header)
        if peer is not None:
            self._open(peer)

    def _open(self, peer: Peer) -> None:
        self.peer = peer
        self.state = ConnectionState.OPEN
        self._decoder.frame_bytes_max = self.options.frame_bytes_max
        self._decoder.header_bytes_max = self.options.header_bytes_max
        self._outbox.frame_bytes_max = peer.limits.frame_bytes_max
        self._outbox.header_bytes_max = peer.limits.header_bytes_max
        self._take_everything()
        self._calling.limits = peer.limits
        self._calling.refusal = None
        self._timers.pop("handshake").cancel()
        self._keepalive = Keepalive(self.options.ping_ms / 1_000, self.options.frame_ms_max / 1_000, self._loop.time())
        self._later("tick", self.options.ping_ms, self._tick)
        self._opened.set_result(None)
        if self._on_open is not None:
            self._on_open(self)

    def _take_everything(self) -> None:
        on, calling, serving, outbox = self._on, self._calling, self._serving, self._outbox
        on[FrameKind.HELLO] = on[FrameKind.WELCOME] = on[FrameKind.PROOF] = self._out_of_place
        on[FrameKind.REQUEST] = serving.request
        on[FrameKind.STREAM_OPEN] = serving.stream_open
        on[FrameKind.NOTIFY] = serving.notify
        on[FrameKind.CANCEL] = serving.cancel
        on[FrameKind.CREDIT] = serving.credit
        on[FrameKind.RESPONSE] = calling.response
        on[FrameKind.ERROR] = calling.error
        on[FrameKind.STREAM_ITEM] = calling.stream_item
        on[FrameKind.BLOCKED] = calling.blocked
        on[FrameKind.STREAM_END] = calling.stream_end
        on[FrameKind.PING] = lambda frame: outbox.send(FrameKind.PONG, frame.call, b"")
        on[FrameKind.PONG] = lambda frame: None

    def _handshake_is_late(self) -> None:
        self.fail(DeadlineExceeded(f"there was no handshake within {self.options.handshake_ms_max} ms"))

    # Closing.

    def _begin_closing(self) -> None:
        self.state = ConnectionState.CLOSING
        self._drained = self._loop.create_future()
        self._calling.refusal = self._not_open
        self._serving.refusal = lambda: Unavailable("this side is closing, so nothing was done: ask elsewhere")
        self._calling.on_idle = self._serving.on_idle = self._check_drained
        self._serving.end_streams()
        self._calling.cancel_streams(self._not_open())
        self._say_goaway()
        self._check_drained()

    def _say_goaway(self) -> None:
        if not self._has_said_goaway:
            self._has_said_goaway = True
            self._outbox.send(FrameKind.GOAWAY, 0, ENCODE((None,)))

    def _take_goaway(self, frame: WireFrame) -> None:
        wire = frame.header.error
        if wire is not None or self.state is ConnectionState.GREETING:
            error = from_wire(wire) if wire is not None else Unavailable("the peer is closing")
            self._fall(error)
            if self._transport is not None:
                self._transport.close()
            return
        self._has_heard_goaway = True
        self._calling.refusal = self._not_open
        self._say_goaway()
        self._check_drained()

    def _check_drained(self) -> None:
        """Finish ``close`` once both sides have said that they send no more requests, and every request is answered."""
        is_idle = self._has_heard_goaway and self._calling.is_idle and self._serving.is_idle
        if is_idle and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _fall(self, error: CutwaterError) -> None:
        """Enter the state FAILED, from which the connection can only close. Every waiting caller gets an error."""
        self.state = ConnectionState.FAILED
        self.error = error
        self._calling.refusal = self._not_open
        self._calling.on_idle = self._serving.on_idle = None
        self._is_choked, self._is_deaf = False, True
        self._later("linger", self.options.linger_ms_max, self.abort)
        for name in ("handshake", "tick"):
            if name in self._timers:
                self._timers.pop(name).cancel()
        if not self._opened.done():
            self._opened.set_result(None)
        self._calling.lost(error.message, error)
        self._serving.lost()

    def _not_open(self) -> ConnectionLost:
        if self.error is not None:
            lost = ConnectionLost(f"the connection is gone: {self.error.message}", outcome_unknown=False)
            lost.__cause__ = self.error
            return lost
        return ConnectionLost(f"{self._address} is closing: connect again, or elsewhere", outcome_unknown=False)

    def _overflow(self, size: int) -> None:
        if self.state not in (ConnectionState.FAILED, ConnectionState.CLOSED):
            error = ResourceExhausted(
                f"{size} bytes wait to be read by {self._address}, more than the limit of {self._outbox.bytes_max}",
                retry_ms=self.options.retry_ms,
            )
            _log.warning("%r cut off: %s", self, error.message)
            self._fall(error)
            self.abort()

    # Timers.

    def _tick(self) -> None:
        """Check whether the peer is still there, once per ``ping_ms``."""
        self._later("tick", self.options.ping_ms, self._tick)
        decoder = self._decoder
        verdict = self._keepalive.judge(
            self._loop.time(),
            heard=self._heard,
            unsent=self._outbox.size,
            frames=decoder.frames,
            is_amid_frame=decoder.is_amid_frame and not self._is_choked,
        )
        self._heard = False
        if verdict is KeepaliveVerdict.ASK:
            self._outbox.send(FrameKind.PING, 0, b"")
        elif verdict is KeepaliveVerdict.STUCK:
            self.fail(DeadlineExceeded(f"a message did not arrive within {self.options.frame_ms_max} ms"))
        elif verdict is KeepaliveVerdict.GONE:
            message = f"{self._address} has not been heard of for {2 * self.options.ping_ms} ms"
            self._fall(ConnectionLost(message, outcome_unknown=True))
            self.abort()

    def _later(self, name: str, delay_ms: int, callback: Callable[[], None]) -> None:
        self._timers[name] = self._loop.call_later(delay_ms / 1_000, callback)
