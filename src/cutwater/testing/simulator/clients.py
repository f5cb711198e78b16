"""Simulated clients: appenders, producers, subscribers, readers, an operator. They use the core as a client does."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from cutwater.core import append_fate
from cutwater.core import requests as r
from cutwater.core.producer_session import (
    AskFate,
    AskMetadata,
    Fate,
    Phase,
    ProducerSession,
    SendBatch,
    SessionEffect,
    Settled,
    Withdrawn,
)
from cutwater.core.read.merge_reader import RUN_OVERHEAD_BYTES, MergeReader, ReadAnswer
from cutwater.errors import (
    AppendUnknown,
    CutwaterError,
    InvalidArgument,
    NotLeader,
    NotSealed,
    ProducerFenced,
    SequenceExpired,
    SequenceReused,
    StreamSealed,
    Trimmed,
)
from cutwater.testing.checkers.record import AppendOp, CursorOp, ReadOp, SimOutcome, Subscribed, TailOp
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.simulator.protocol import AppendCall, FateCall, ReadCall, Return, SimAppendAnswer, SimCall
from cutwater.testing.simulator.world import Address, Process, World
from cutwater.types import (
    GLSN,
    LLSN,
    MILLISECOND,
    BatchKind,
    EventTime,
    LogStreamId,
    ProducerId,
    Revision,
    Sequence,
    TopicId,
)

Callback = Callable[[Any], None]
"""Gets the value or the error of a call, or None when no answer came in time."""


class SimClient(Process):
    """A client with deadlines for its calls, a cached catalog, and a way to find the metadata leader."""

    def __init__(self, world: World) -> None:
        self.number, self.record = world.next_client(), world.record
        super().__init__(world, ("client", self.number))
        self.rng = Random(f"client/{world.seed}/{self.number}")
        self.catalog = r.Catalog(Revision(0), GLSN(0), 0, (), ())  # type: ignore[arg-type]
        self.stopping = False
        self._calls: dict[int, Callback] = {}
        self._next_call = 0
        self._leader = 1

    def on_message(self, source: Address, message: Any) -> None:
        if isinstance(message, Return):
            callback = self._calls.pop(message.call_id, None)
            if callback is not None:
                callback(message.outcome)

    def call(self, target: Address, body: object, timeout_us: int, callback: Callback) -> int:
        """Send a call; return its number, for ``is_pending`` and ``cancel``."""
        self._next_call += 1
        call_id = self._next_call
        self._calls[call_id] = callback
        self.send(target, SimCall(call_id, body))
        self.after(timeout_us, self._timeout, call_id)
        return call_id

    def is_pending(self, call_id: int) -> bool:
        return call_id in self._calls

    def cancel(self, call_id: int) -> None:
        self._calls.pop(call_id, None)

    def _timeout(self, call_id: int) -> None:
        callback = self._calls.pop(call_id, None)
        if callback is not None:
            callback(None)

    def ask(self, request: r.Request, callback: Callback, timeout_us: int = 150 * MILLISECOND) -> None:
        """Ask the metadata repository. Without an answer, or if the node does not lead, ask another node next time."""

        def answered(outcome: Any) -> None:
            if outcome is None or isinstance(outcome, NotLeader):
                self._leader = self._leader % self.world.options.metadata_nodes + 1
            callback(outcome)

        self.call(("mr", self._leader), request, timeout_us, answered)

    def refresh(self, then: Callable[[], None] | None = None) -> None:
        def answered(outcome: Any) -> None:
            if isinstance(outcome, r.Catalog):
                self._take_newer(outcome)
            if then is not None:
                then()

        self.ask(r.CatalogRequest(), answered)

    def ask_tail(self, then: Callback = lambda outcome: None) -> None:
        """Ask for the catalog, and record the tail in it."""
        invoked = self.world.now

        def answered(outcome: Any) -> None:
            if isinstance(outcome, r.Catalog):
                self._take_newer(outcome)
                tail = TailOp(invoked, self.world.now, outcome.high_watermark, outcome.revision)
                self.record.tails.append(tail)
            then(outcome)

        self.ask(r.CatalogRequest(), answered)

    def _take_newer(self, catalog: r.Catalog) -> None:
        if catalog.revision >= self.catalog.revision:
            self.catalog = catalog

    def stream(self, stream: LogStreamId) -> r.StreamInfo | None:
        return next((info for info in self.catalog.streams if info.stream == stream), None)

    def event_time(self) -> EventTime:
        """Return an event time around now, somewhat out of order."""
        return EventTime(self.world.now + self.rng.randint(-200, 50) * MILLISECOND)


class Appender(SimClient):
    """Appends to any open stream, one batch at a time. It sends a batch again only if the batch certainly was not
    taken: because its epoch has ended, before any answer came, at a position that was committed before it was sent."""

    SLOW_US = 40 * MILLISECOND
    """Without an answer for this long it refreshes the catalog, and repeats that."""
    MOVES_MAX = 3

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._ends: dict[LogStreamId, LLSN] = {}
        """The last LLSN of each log stream that acknowledgements show to be committed."""

    def on_start(self) -> None:
        self.refresh(self._next)

    def _next(self) -> None:
        if self.stopping:
            return
        streams = self._open_streams()
        if not streams:
            self.after(20 * MILLISECOND, self.refresh, self._next)
            return
        op = self.record.new_entry(self.world.now, self.rng.choice((1, 1, 2, 3)), self.event_time())
        self._send(op, self.rng.choice(streams), self.MOVES_MAX)

    def _open_streams(self) -> list[r.StreamInfo]:
        return [info for info in self.catalog.streams if info.is_open and info.chain]

    def _send(self, op: AppendOp, info: r.StreamInfo, moves: int) -> None:
        call = AppendCall(info.stream, info.epoch, op.batch)
        timeout = self.rng.choice((60, 200, 500)) * MILLISECOND
        known_end = max(info.committed_end, self._ends.get(info.stream, LLSN(0)))
        number = self.call(("sn", info.chain[0]), call, timeout, lambda outcome: self._done(op, outcome))

        def look() -> None:
            if self.is_pending(number):
                self.refresh(settle)
                self.after(self.SLOW_US, look)

        def settle() -> None:
            fate = append_fate.fate_of(self.stream(info.stream), info.epoch, known_end)
            if not self.is_pending(number) or fate is append_fate.AppendFate.PENDING:
                return
            self.cancel(number)
            streams = self._open_streams()
            if fate is append_fate.AppendFate.UNDECIDED:
                self._done(op, None)
            elif streams and moves:
                self.world.trace("moved", op.payload, info.stream)
                self._send(op, self.rng.choice(streams), moves - 1)
            else:
                self._done(op, StreamSealed(f"log stream {info.stream} was sealed before it took the append"))

        self.after(self.SLOW_US, look)

    def _done(self, op: AppendOp, outcome: Any) -> None:
        op.completed = self.world.now
        is_old = False
        if isinstance(outcome, SimAppendAnswer):
            op.outcome, op.ack = SimOutcome.OK, outcome.ack
            self._ends[outcome.ack.stream] = LLSN(outcome.ack.llsn + outcome.ack.count - 1)
            is_old = append_fate.is_out_of_date(self.catalog.revision, Revision(outcome.revision))
        elif outcome is None or isinstance(outcome, AppendUnknown):
            op.outcome = SimOutcome.UNKNOWN
        else:
            op.outcome = SimOutcome.FAIL
        self.world.trace("append", op.payload, op.outcome.value, op.ack.glsn if op.ack else 0)
        pause = int(self.rng.random() * 2 * self.world.options.append_pause_us)
        if op.outcome is SimOutcome.OK and not is_old:
            self.after(pause, self._next)
        else:
            self.after(pause, self.refresh, self._next)


class SimProducer(SimClient):
    """A named producer with a few batches in flight."""

    RETRY_US = 120 * MILLISECOND
    IN_FLIGHT_MAX = 3

    def __init__(self, world: World, name: str, topic: str) -> None:
        super().__init__(world)
        self.session = ProducerSession(ProducerId(name), topic, self.number)
        self._ops: dict[Sequence, AppendOp] = {}
        self._seen_closed = 0
        self._topic: TopicId | None = None
        """Known once the catalog has had the producer's log stream."""

    def on_start(self) -> None:
        self.refresh(lambda: self._do(self.session.start()))
        self._tick()
        self.after(int(self.rng.random() * self.world.options.append_pause_us), self._next)

    def _next(self) -> None:
        ready = self.session.phase is Phase.READY and len(self.session.unsettled) < self.IN_FLIGHT_MAX
        if ready and not self.stopping:
            count = self.rng.choice((1, 1, 2, 3))
            op = self.record.new_entry(self.world.now, count, self.event_time())
            op.producer = self.session.producer
            self._submit(op)
        self.after(int(self.rng.random() * 2 * self.world.options.append_pause_us), self._next)

    def _submit(self, op: AppendOp) -> None:
        op.sequence, effects = self.session.submit(op.batch)
        self._ops[op.sequence] = op
        self._do(effects)

    def _tick(self) -> None:
        """Check for progress from time to time, and repeat the current step if there is none."""
        self.after(self.RETRY_US, self._tick)
        waits = bool(self.session.unsettled) or self.session.phase is not Phase.READY
        if waits and not self.session.is_over:
            self.refresh(self._nudge)

    def _our_stream(self) -> r.StreamInfo | None:
        info = self.stream(self.session.stream)
        if info is not None:
            self._topic = info.topic
        return info

    def _nudge(self) -> None:
        session, info = self.session, self._our_stream()
        topics = {topic.topic for topic in self.catalog.topics}
        if self._topic is not None and self._topic not in topics:
            session.topic_deleted()
        self._seen_closed = self._seen_closed + 1 if info is not None and not info.is_open else 0
        effects: list[SessionEffect] = []
        if info is not None and info.is_open:
            effects = session.stream_reopened(info.stream)
        elif info is not None and self._seen_closed >= 2:
            effects = session.stream_closed(info.stream, info.epoch)
        self._do(effects or session.retry())

    def _do(self, effects: list[SessionEffect]) -> None:
        for effect in effects:
            match effect:
                case SendBatch():
                    self._send(effect)
                case AskFate():
                    self._ask_fate(effect)
                case AskMetadata():
                    self._ask_metadata(effect.request)
                case Settled():
                    op = self._ops[effect.sequence]
                    op.outcome, op.ack, op.completed = SimOutcome.OK, effect.ack, self.world.now
                    self.world.trace("produced", op.payload, effect.ack.glsn)
                case Withdrawn():
                    self._take_back(effect)

    def _take_back(self, withdrawn: Withdrawn) -> None:
        ops = [self._ops.pop(sequence) for sequence in withdrawn.sequences]
        for op in ops:
            if op.sequence in withdrawn.refused:
                op.outcome, op.completed = SimOutcome.FAIL, self.world.now
                self.world.trace("refused", op.payload)
            else:
                self._submit(op)

    def _send(self, effect: SendBatch) -> None:
        info = self._our_stream()
        if info is None or not info.is_open:
            return
        batch, tag = effect.batch, effect.batch.producer
        assert tag is not None

        def answered(outcome: Any) -> None:
            if isinstance(outcome, SimAppendAnswer):
                if batch.kind is BatchKind.FENCE:
                    self._do(self.session.fence_committed(tag, Sequence(outcome.last_sequence)))
                else:
                    self._do(self.session.acked(tag.sequence, outcome.ack))
            elif isinstance(outcome, ProducerFenced):
                self.session.fenced(tag)
            elif isinstance(outcome, InvalidArgument):
                self._do(self.session.refused(tag))
            elif isinstance(outcome, (SequenceReused, SequenceExpired)):
                raise Violation("9 exactly once", f"producer {self.session.producer}: {outcome}")

        self.call(("sn", info.chain[0]), AppendCall(effect.stream, info.epoch, batch), 400 * MILLISECOND, answered)

    def _ask_fate(self, effect: AskFate) -> None:
        info = self.stream(effect.stream)
        if info is None or not info.replicas:
            return

        def answered(outcome: Any) -> None:
            if isinstance(outcome, Fate):
                self._do(self.session.fate_known(outcome))

        target = self.rng.choice(info.replicas)
        call = FateCall(effect.stream, effect.stream_epoch, self.session.producer)
        self.call(("sn", target), call, 100 * MILLISECOND, answered)

    def _ask_metadata(self, request: r.OpenProducerRequest | r.MoveProducerRequest | r.RenewProducerRequest) -> None:
        def answered(outcome: Any) -> None:
            if isinstance(outcome, r.ProducerGrant):
                self._do(self.session.granted(outcome))
            elif not isinstance(request, r.OpenProducerRequest) and isinstance(outcome, ProducerFenced):
                self.session.fenced(request)
            elif isinstance(request, r.MoveProducerRequest) and isinstance(outcome, NotSealed):
                self._do(self.session.move_refused(request))

        self.ask(request, answered)


class Subscriber(SimClient):
    """Follows the first topic, or all topics, from the first record on."""

    POLL_US = 25 * MILLISECOND
    BYTES_MAX = 16 * RUN_OVERHEAD_BYTES
    """Small, so that streams wait for each other."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        topics = frozenset([TopicId(1)]) if self.number % 2 else None
        self.subscription = MergeReader(topics or (), GLSN(1), bytes_max=self.BYTES_MAX)
        self.seen = self.record.subscribers[self.number] = Subscribed(topics, [], [], {})
        self._reading: set[LogStreamId] = set()

    def on_start(self) -> None:
        self._poll()
        self._refresh()

    def _refresh(self) -> None:
        self.refresh(self._take_catalog)
        self.after(100 * MILLISECOND, self._refresh)

    def _take_catalog(self) -> None:
        if self.seen.topics is None:
            self.subscription.topics = frozenset(topic.topic for topic in self.catalog.topics)
        if self.catalog.revision:
            self._feed(lambda: self.subscription.take_catalog(self.catalog))
        self.seen.ended.update(self.subscription.take_ended())

    def _poll(self) -> None:
        self.after(self.POLL_US, self._poll)
        if self.subscription.needs_catalog:
            self.refresh(self._take_catalog)
        for info, position in self.subscription.wants():
            if info.stream not in self._reading and info.replicas and self.subscription.has_room(info.stream):
                self._reading.add(info.stream)
                self._read(info.stream, self.rng.choice(info.replicas), position)

    def _read(self, stream: LogStreamId, node: int, position: GLSN) -> None:
        def answered(outcome: Any) -> None:
            self._reading.discard(stream)
            if isinstance(outcome, ReadAnswer):
                self._feed(lambda: self.subscription.take_answer(outcome))
            elif isinstance(outcome, Trimmed):
                self._feed(lambda: self.subscription.take_trimmed(stream, outcome.first_left))

        self.call(("sn", node), ReadCall(stream, position, 8), 80 * MILLISECOND, answered)

    def _feed(self, take: Callable[[], None]) -> None:
        try:
            take()
            while self._hand_on():
                pass
        except CutwaterError as error:
            raise Violation("7 subscribe", str(error)) from error
        self.seen.through = GLSN(self.subscription.next_glsn - 1)

    def _hand_on(self) -> bool:
        """Take ready records; return whether there may be more."""
        try:
            runs = self.subscription.take_ready()
        except Trimmed as error:
            self.seen.gaps.append((error.asked, error.first_left))
            return True
        self.seen.runs += runs
        return bool(runs)


class Reader(SimClient):
    """Reads acknowledged records back from any replica, and asks for the tail."""

    def on_start(self) -> None:
        self.refresh(self._next)

    def _next(self) -> None:
        self.after(self.rng.randint(10, 40) * MILLISECOND, self._next)
        if self.rng.random() < 0.4:
            self.ask_tail()
        else:
            self._read_back()

    def _read_back(self) -> None:
        if not self.record.appends:
            return
        op = self.rng.choice(self.record.appends[-60:])
        info = self.stream(op.ack.stream) if op.ack else None
        if op.ack is None or info is None or not info.replicas:
            return
        invoked = self.world.now
        target = self.rng.choice(info.replicas)
        stream = op.ack.stream

        def answered(outcome: Any) -> None:
            read = ReadOp(op, target, stream, invoked, self.world.now, None)
            if isinstance(outcome, ReadAnswer):
                read.run = outcome.runs[0] if outcome.runs else None
                read.error = "" if outcome.runs else "not_yet_committed"
            elif isinstance(outcome, Trimmed):
                read.error, read.first_left = outcome.code, outcome.first_left
            else:
                read.error = outcome.code if isinstance(outcome, CutwaterError) else "timeout"
            self.record.reads.append(read)

        self.call(("sn", target), ReadCall(stream, op.ack.glsn, 1), 60 * MILLISECOND, answered)


class CursorKeeper(SimClient):
    """Commits a cursor at the tail and reads its position, at random."""

    def on_start(self) -> None:
        self._next()

    def _next(self) -> None:
        self.after(self.rng.randint(3, 12) * MILLISECOND, self._commit if self.rng.random() < 0.5 else self._read)

    def _commit(self) -> None:
        invoked = self.world.now

        def answered(outcome: Any) -> None:
            if isinstance(outcome, r.Catalog):
                tail = outcome.high_watermark
                self.ask(r.CommitCursorRequest(self._name, tail), lambda outcome: committed(tail, outcome))
            else:
                self._next()

        def committed(glsn: GLSN, outcome: Any) -> None:
            if isinstance(outcome, r.Done):
                self.record.cursors.append(CursorOp(self._name, invoked, self.world.now, glsn, is_read=False))
            self._next()

        self.ask_tail(answered)

    def _read(self) -> None:
        invoked = self.world.now

        def answered(outcome: Any) -> None:
            if isinstance(outcome, r.CursorAt):
                glsn = outcome.glsn or GLSN(0)
                self.record.cursors.append(CursorOp(self._name, invoked, self.world.now, glsn, is_read=True))
            self._next()

        self.ask(r.ReadCursorRequest(self._name), answered)

    @property
    def _name(self) -> str:
        return f"cursor {self.number}"


class Operator(SimClient):
    """Changes the cluster on request of the nemesis."""

    def on_start(self) -> None:
        self.refresh()

    def request(self, request: r.Request, then: Callback | None = None) -> None:
        def answered(outcome: Any) -> None:
            kind = type(outcome).__name__
            self.world.trace("operator", type(request).__name__, kind)
            if then is not None:
                then(outcome)

        self.ask(request, answered)

    def insist(self, request: r.Request, then: Callback = lambda outcome: None) -> None:
        """Repeat the request until it is done."""

        def answered(outcome: Any) -> None:
            if outcome is None or (isinstance(outcome, CutwaterError) and outcome.retriable):
                self.after(30 * MILLISECOND, self.insist, request, then)
            else:
                then(outcome)

        self.ask(request, answered)
