"""A connection: both sides may ask, both may answer, and each is held to its limits.

It is a protocol of asyncio that knows nothing of sockets, so the same code runs over TCP, TLS and memory.

Who stops reading, and when. A side that only answers stops reading while its answers pile up; so a slow reader is
slowed down by the operating system, and by nothing else. A side that waits for answers, or has notices to tell, must
keep reading, or two busy sides could wait for each other for ever; it refuses requests instead, once too much has
piled up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from msgspec import Raw
from msgspec.structs import replace

from cutwater.errors import CutwaterError, DeadlineExceeded, ProtocolViolation, ResourceExhausted, Unavailable
from cutwater.protocol.errors import ConnectionLost, Unproven, encode_error, from_wire, why_lost
from cutwater.protocol.methods import Method, Notice, Payload, Received, StreamMethod
from cutwater.runtime.event_loop import receive_buffer
from cutwater.wire.calls.incoming_calls import Serving, unforeseen
from cutwater.wire.calls.outbox import Outbox
from cutwater.wire.calls.outgoing_calls import Calling
from cutwater.wire.calls.streams import WINDOW_BYTES, WINDOW_ITEMS, SharedCredit, StreamReceiver
from cutwater.wire.codec import FrameDecoder
from cutwater.wire.frame_transport import FrameProtocol, FrameQueue, FrameTransport
from cutwater.wire.identity.auth import ANONYMOUS, Authenticator, Credentials, Identity
from cutwater.wire.identity.handshake import (
    Endpoint,
    Expect,
    Peer,
    accepted_at,
    encode_hello,
    encode_proof,
    judge_hello,
    judge_proof,
    judge_welcome,
)
from cutwater.wire.keepalive import Keepalive, Verdict
from cutwater.wire.messages import ENCODE, Frame, Kind, Welcome
from cutwater.wire.options import Budget
from cutwater.wire.states import Snapshot, State

_log = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")


class Connection(FrameProtocol):
    """Made by ``client.connect``, by a listener, or by a ``MemoryNetwork``; open as soon as anyone gets to see it.

    ``token`` makes this the side that connects; otherwise it is the one that accepts. ``refusal``: greet nobody, just
    say why. ``on_open`` and ``on_closed`` are for the listener. ``expect`` judges the server that was connected to,
    before this side proves anything to it; ``dialled`` is the address of that server.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        token: str | None = None,
        expect: Expect | None = None,
        dialled: str = "",
        authenticate: Authenticator | None = None,
        budget: Budget | None = None,
        refusal: CutwaterError | None = None,
        on_open: Callable[[Connection], None] | None = None,
        on_closed: Callable[[Connection], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.options = options = endpoint.options
        self.state = State.GREETING
        self.peer: Peer | None = None
        self.error: CutwaterError | None = None
        """Why it failed, in the words of whichever side found out."""
        self._hello = None
        if token is not None:
            self._hello = encode_hello(endpoint, token, is_proof_wanted=expect is not None, dialled=dialled)
        self._expect = expect
        self._unproven: tuple[Peer, bytes, bytes] | None = None
        """A server that connected and has yet to prove which one it is; HELLO and WELCOME, which its proof is about."""
        self._authenticate = authenticate
        self._refusal = refusal
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
        self._serving = Serving(self, loop, outbox, endpoint.methods, budget or Budget(options.call_bytes_max))
        limit = options.handshake_bytes_max
        self._from_bytes = FrameDecoder(limit, limit, self._admit)
        self._decoder: FrameDecoder | FrameQueue = self._from_bytes
        self._is_direct = False
        self._is_deaf = False
        """What was received is left alone: an authenticator is at work, answers pile up, or it failed."""
        self._is_choked = False
        """Answers pile up."""
        self._told_until = 0
        """Where in all that was ever sent the last notice ends."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._judging: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._has_said_goaway = False
        self._has_heard_goaway = False
        self._heard = True
        self._keepalive: Keepalive
        self._scratch = receive_buffer()
        self._on: list[Callable[[Frame], None]] = [self._out_of_place] * (max(Kind) + 1)
        self._on[Kind.HELLO] = self._take_hello
        self._on[Kind.WELCOME] = self._take_welcome
        self._on[Kind.GOAWAY] = self._take_goaway

    @property
    def greeting_ms_max(self) -> int:
        """How long the peer may take before this side has said its first word."""
        return self.options.handshake_ms_max if self._refusal is None else self.options.linger_ms_max

    def __repr__(self) -> str:
        peer = self.peer
        if peer is None:
            return f"<Connection {self.state.value}, {self._address}>"
        return f"<Connection {self.state.value}, {peer.role!r} {peer.name!r} at {peer.address}>"

    # What users do with it.

    @property
    def opened(self) -> asyncio.Future[None]:
        """Done when both sides have greeted, or will not. Whoever gives up waiting disturbs no one else."""
        return asyncio.shield(self._opened)

    @property
    def closed(self) -> asyncio.Future[None]:
        """Done when it is over. Each time another one, so that whoever cancels it does no harm to others; take it once,
        and ask ``is_closed`` where that is enough."""
        return asyncio.shield(self._closed)

    @property
    def is_closed(self) -> bool:
        return self._closed.done()

    async def call(self, method: Method[A, R], argument: A, body: Payload = b"", *, timeout_ms: int) -> Received[R]:
        """Ask and wait for the answer, at most ``timeout_ms``. If the waiting task is cancelled, so is the handler."""
        future: asyncio.Future[Frame] = self._loop.create_future()
        number = self._calling.start(method.name, argument, body, timeout_ms, future)
        if self._is_choked:
            self._unchoke()
        try:
            frame = await future
        except asyncio.CancelledError:
            self._calling.cancel(number)
            if future.done() and not future.cancelled():
                # It failed in the same turn. Nobody will look at the error, which must not be reported as forgotten.
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
        """Ask, and have a function called with the outcome. Costs no task and no future. Returns a number to
        ``cancel`` it with; then the function is not called."""

        def sink(outcome: Frame | CutwaterError) -> None:
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
        """Ask for a stream. ``credit`` is the room for its items, alone or shared with other streams; ``timeout_ms``
        is for the stream as a whole, and without it the stream may last as long as the connection."""
        room = credit
        if room is None:
            room = SharedCredit(WINDOW_ITEMS, WINDOW_BYTES, item_bytes_max=self.options.frame_bytes_max)
        stream = self._calling.open(method, argument, body, timeout_ms, room)
        if self._is_choked:
            self._unchoke()
        return stream

    def notify(self, notice: Notice[A], argument: A, body: Payload = b"", *, is_alone: bool = False) -> None:
        """Tell something. If this raises, it was not told; otherwise it arrives, unless the connection is lost.
        ``is_alone``: nothing else is likely to be told in this turn, so there is nothing to wait for."""
        if self._calling.refusal is not None:
            raise self._calling.refusal()
        outbox = self._outbox
        if outbox.is_busy and outbox.is_full:
            raise ResourceExhausted(
                f"{notice.name}: {outbox.size} bytes wait already for {self._address}, which reads too slowly",
                retry_ms=self.options.retry_ms,
            )
        outbox.send(Kind.NOTIFY, 0, ENCODE((notice.name, argument)), body, is_alone=is_alone)
        self._told_until = outbox.position
        if self._is_choked:
            self._unchoke()

    def flush(self) -> None:
        """Let go of what was sent in this turn now, as whoever is about to wait for something does."""
        self._outbox.flush()

    def snapshot(self) -> Snapshot:
        return Snapshot(
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
        """Ask nothing more, take no more requests, let what was asked be answered, and close."""
        deadline = self._loop.time() + timeout_ms / 1_000
        try:
            if self.state is State.OPEN:
                self._begin_closing()
            if self.state is State.CLOSING and self._drained is not None:
                waiting = {self._drained, self.closed}
                await asyncio.wait(waiting, timeout=timeout_ms / 1_000, return_when="FIRST_COMPLETED")
            if self._transport is not None and self.state is not State.FAILED:
                self._outbox.flush()
                self._transport.close()
            if self.state is not State.CLOSED:
                await asyncio.wait({self.closed}, timeout=max(deadline - self._loop.time(), 0.1))
        finally:
            # Whoever is cancelled while closing must not leave a connection behind that nobody knows any more.
            self.abort()
        await self.closed

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
        elif self.state is not State.CLOSED:
            self.connection_lost(None)

    def fail(self, error: CutwaterError) -> None:
        """The peer did what ends the connection: tell it why, and listen no more."""
        if self.state in (State.FAILED, State.CLOSED):
            return
        if self.peer is not None and not isinstance(error, Unproven):
            # A listener logs peers that have not greeted, and a guard those that are no servers; neither lets them fill
            # the log.
            _log.info("%r closed: %s", self, error.message)
        self._fall(error)
        told = encode_error(error, self._outbox.header_bytes_max - 1)
        self._outbox.send(Kind.GOAWAY, 0, ENCODE((Raw(told),)))
        self._outbox.flush()
        transport = self._transport
        if transport is not None and not transport.is_closing():
            # To close at once could throw away what was just written, since there may be unread bytes of the peer.
            if transport.can_write_eof():
                transport.write_eof()
            transport.resume_reading()

    # What the transport says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        if self.state is State.CLOSED:
            # It was given up while it was being made.
            transport.abort()
            return
        self._transport = transport
        address = transport.get_extra_info("peername")
        self._address = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)
        self._has_tls = transport.get_extra_info("ssl_object") is not None
        if isinstance(transport, FrameTransport):
            self._decoder = transport.inbox
            transport.inbox.limit(self.options.handshake_bytes_max, self._admit)
        self._outbox.attach(transport)
        transport.set_write_buffer_limits(self.options.send_high_bytes, self.options.send_low_bytes)
        if self._refusal is not None:
            self.fail(self._refusal)
            return
        self._later("handshake", self.options.handshake_ms_max, self._handshake_is_late)
        if self._hello is not None:
            self._outbox.send(Kind.HELLO, 0, self._hello)

    def get_buffer(self, sizehint: int) -> memoryview:
        self._is_direct = False
        if self._from_bytes.large is not None and self.state is not State.FAILED:
            target = self._from_bytes.target()
            if target is not None:
                self._is_direct = True
                return target
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        if self._is_direct:
            self._from_bytes.filled(nbytes)
        elif self.state is not State.FAILED:
            self._from_bytes.feed(self._scratch[:nbytes].tobytes())
        self._process()

    def frames_received(self) -> None:
        self._heard = True
        if self.state is State.FAILED and isinstance(self._decoder, FrameQueue):
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
        """A turn after much was written: if the transport could not keep up, it has said so by now."""
        if self._is_deaf and not self._is_choked and self.state in (State.OPEN, State.CLOSING):
            self._listen_again()
        if not self._outbox.is_paused:
            self._serving.wake_streams()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.state is State.CLOSED:
            return
        if self.state is not State.FAILED:
            self._fall(self._why_lost(exc))
        self.state = State.CLOSED
        self._transport = None
        self._outbox.detach()
        for timer in self._timers.values():
            timer.cancel()
        self._closed.set_result(None)
        if self._on_closed is not None:
            self._on_closed(self)

    # How frames are taken.

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
        """Whether a large frame is received. What nobody asked for is counted, so that all connections together take
        no more than they may; a request that finds no room is passed over and refused."""
        if kind in (Kind.RESPONSE, Kind.STREAM_ITEM):
            return self._calling.expects(kind, call)
        is_request = kind in (Kind.REQUEST, Kind.STREAM_OPEN)
        if self._serving.reserve(size, is_request=is_request):
            return True
        if not is_request:
            # It has no answer, so there is no other way to say that it was not taken.
            raise self._serving.exhausted(f"there is no room now for a message of {size} bytes")
        return False

    def _out_of_place(self, frame: Frame) -> None:
        raise ProtocolViolation(f"a {Kind(frame.kind).name} frame has no place while {self.state.value}")

    def _require_transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    def _rest(self) -> None:
        """Much waits to be written. Read on, or let the peer read first?"""
        if self._outbox.is_paused:
            self._choke()
        elif self.state in (State.OPEN, State.CLOSING):
            # The next turn tells whether the transport can keep up.
            self._is_deaf = True
            self._require_transport().pause_reading()

    def _choke(self) -> None:
        outbox = self._outbox
        is_telling = self._told_until > outbox.position - outbox.size
        if self.state in (State.OPEN, State.CLOSING) and self._calling.is_idle and not is_telling:
            self._is_choked = self._is_deaf = True
            self._require_transport().pause_reading()

    def _unchoke(self) -> None:
        """Whoever waits for an answer reads, however much it has just written: its peer may do the same."""
        self._is_choked = False
        if self._outbox.is_paused or not self._outbox.is_busy:
            self._listen_again()

    def _listen_again(self) -> None:
        if self._transport is not None and self.state is not State.FAILED:
            self._is_deaf = False
            self._transport.resume_reading()
            self._loop.call_soon(self._process)

    # The handshake.

    def _take_hello(self, frame: Frame) -> None:
        if self._hello is not None:
            self._out_of_place(frame)
        transport = self._require_transport()
        theirs, welcome, peer = judge_hello(self.endpoint, frame.header, self._address, accepted_at(transport))
        self._on[Kind.HELLO] = self._out_of_place
        hello = bytes(frame.header) if welcome.nonce else b""
        if self._authenticate is None:
            self._welcome(hello, welcome, peer, ANONYMOUS)
            return
        certificate = transport.get_extra_info("peercert") or {}
        shown = Credentials(theirs.role, theirs.name, theirs.token, certificate, self._address)
        identity = self._authenticate(shown)
        if isinstance(identity, Identity):
            self._welcome(hello, welcome, peer, identity)
            return
        self._is_deaf = True
        transport.pause_reading()
        self._judging = self._loop.create_task(self._judge(hello, welcome, peer, identity))

    async def _judge(self, hello: bytes, welcome: Welcome, peer: Peer, identity: Awaitable[Identity]) -> None:
        try:
            self._welcome(hello, welcome, peer, await identity)
        except CutwaterError as error:
            self.fail(error)
        except Exception:
            _log.exception("%r: its authenticator failed", self)
            self.fail(Unavailable("this side cannot tell at the moment who the peer is: try again later"))
        else:
            self._listen_again()

    def _welcome(self, hello: bytes, welcome: Welcome, peer: Peer, identity: Identity) -> None:
        """Clients are in now; one that says it is a server has to prove which one first."""
        if self.state is not State.GREETING:
            return
        encoded = ENCODE(welcome)
        self._outbox.send(Kind.WELCOME, 0, encoded)
        peer = replace(peer, identity=identity)
        if hello:
            self._unproven = peer, hello, encoded
            self._on[Kind.PROOF] = self._take_proof
        else:
            self._open(peer)

    def _take_proof(self, frame: Frame) -> None:
        assert self._unproven is not None
        peer, hello, welcome = self._unproven
        self._unproven = None
        self._open(replace(peer, server=judge_proof(hello, welcome, frame.header.signature, self._address)))

    def _take_welcome(self, frame: Frame) -> None:
        hello = self._hello
        if hello is None:
            self._out_of_place(frame)
            return
        peer, is_proof_wanted = judge_welcome(self.endpoint, hello, frame.header, self._address)
        if self._expect is not None:
            self._expect(peer.server)
        if is_proof_wanted and self.endpoint.key is not None:
            self._outbox.send(Kind.PROOF, 0, encode_proof(self.endpoint.key, hello, bytes(frame.header)))
        self._open(peer)

    def _open(self, peer: Peer) -> None:
        self.peer = peer
        self.state = State.OPEN
        self._decoder.frame_bytes_max = self.options.frame_bytes_max
        self._decoder.header_bytes_max = self.options.header_bytes_max
        self._outbox.frame_bytes_max = peer.limits.frame_bytes_max
        self._outbox.header_bytes_max = peer.limits.header_bytes_max
        self._take_everything()
        self._calling.allow(peer.limits)
        self._calling.refusal = None
        self._timers.pop("handshake").cancel()
        self._keepalive = Keepalive(self.options.ping_ms / 1_000, self.options.frame_ms_max / 1_000, self._loop.time())
        self._later("tick", self.options.ping_ms, self._tick)
        self._opened.set_result(None)
        if self._on_open is not None:
            self._on_open(self)

    def _take_everything(self) -> None:
        on, calling, serving, outbox = self._on, self._calling, self._serving, self._outbox
        on[Kind.HELLO] = on[Kind.WELCOME] = on[Kind.PROOF] = self._out_of_place
        on[Kind.REQUEST] = serving.request
        on[Kind.STREAM_OPEN] = serving.stream_open
        on[Kind.NOTIFY] = serving.notify
        on[Kind.CANCEL] = serving.cancel
        on[Kind.CREDIT] = serving.credit
        on[Kind.RESPONSE] = calling.response
        on[Kind.ERROR] = calling.error
        on[Kind.STREAM_ITEM] = calling.stream_item
        on[Kind.BLOCKED] = calling.blocked
        on[Kind.STREAM_END] = calling.stream_end
        on[Kind.PING] = lambda frame: outbox.send(Kind.PONG, frame.call, b"")
        on[Kind.PONG] = lambda frame: None

    def _handshake_is_late(self) -> None:
        self.fail(DeadlineExceeded(f"there was no handshake within {self.options.handshake_ms_max} ms"))

    # The end.

    def _begin_closing(self) -> None:
        self.state = State.CLOSING
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
            self._outbox.send(Kind.GOAWAY, 0, ENCODE((None,)))

    def _take_goaway(self, frame: Frame) -> None:
        wire = frame.header.error
        if wire is not None or self.state is State.GREETING:
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
        """Both sides have said that they ask nothing more, and everything that was asked is answered."""
        is_idle = self._has_heard_goaway and self._calling.is_idle and self._serving.is_idle
        if is_idle and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _fall(self, error: CutwaterError) -> None:
        """From here on there is nothing but the end. Everyone who waits is told."""
        self.state = State.FAILED
        self.error = error
        self._calling.refusal = self._not_open
        self._calling.on_idle = self._serving.on_idle = None
        self._is_choked, self._is_deaf = False, True
        self._later("linger", self.options.linger_ms_max, self.abort)
        for name in ("handshake", "tick"):
            if name in self._timers:
                self._timers.pop(name).cancel()
        if self._judging is not None:
            self._judging.cancel()
        if not self._opened.done():
            self._opened.set_result(None)
        self._calling.lost(error.message, error)
        self._serving.lost()

    def _why_lost(self, exc: Exception | None) -> CutwaterError:
        is_greeting = self.state is State.GREETING and self._hello is not None
        return why_lost(self._address, exc, is_greeting=is_greeting, has_tls=self._has_tls)

    def _not_open(self) -> ConnectionLost:
        if self.error is not None:
            lost = ConnectionLost(f"the connection is gone: {self.error.message}", outcome_unknown=False)
            lost.__cause__ = self.error
            return lost
        return ConnectionLost(f"{self._address} is closing: connect again, or elsewhere", outcome_unknown=False)

    def _overflow(self, size: int) -> None:
        if self.state not in (State.FAILED, State.CLOSED):
            error = ResourceExhausted(
                f"{size} bytes wait to be read by {self._address}, more than the limit of {self._outbox.bytes_max}",
                retry_ms=self.options.retry_ms,
            )
            _log.warning("%r cut off: %s", self, error.message)
            self._fall(error)
            self.abort()

    # Time.

    def _tick(self) -> None:
        """Once per ``ping_ms``: is the peer still there?"""
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
        if verdict is Verdict.ASK:
            self._outbox.send(Kind.PING, 0, b"")
        elif verdict is Verdict.STUCK:
            self.fail(DeadlineExceeded(f"a message did not arrive within {self.options.frame_ms_max} ms"))
        elif verdict is Verdict.GONE:
            message = f"{self._address} has not been heard of for {2 * self.options.ping_ms} ms"
            self._fall(ConnectionLost(message, outcome_unknown=True))
            self.abort()

    def _later(self, name: str, delay_ms: int, callback: Callable[[], None]) -> None:
        self._timers[name] = self._loop.call_later(delay_ms / 1_000, callback)
