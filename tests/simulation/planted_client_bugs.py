"""Bugs in the client library and in the wire that the simulator of shipped code must find. Each function returns what
to replace by what."""

from __future__ import annotations

from itertools import repeat

from msgspec import structs
from planted_bugs import Patch

from cutwater.client.append import batcher, pending, plain_arrow, router, sender
from cutwater.client.append.batcher import BatchQueue
from cutwater.client.append.sender import HeadCalls
from cutwater.client.async_client import AsyncClient
from cutwater.client.cluster.catalog_cache import Catalogs
from cutwater.client.produce.producer import AsyncProducer
from cutwater.client.produce.producer_queue import ProducerQueue
from cutwater.client.read import point_reads
from cutwater.client.read.point_reads import PointReads
from cutwater.client.read.positions import Positions
from cutwater.client.subscribe.stream_readers import Feed, _Reader
from cutwater.core.append_fate import AppendFate
from cutwater.errors import CutwaterError, DeadlineExceeded, Trimmed
from cutwater.protocol.errors import ConnectionLost
from cutwater.types import GLSN, Ack
from cutwater.wire import connection
from cutwater.wire.calls import outgoing_calls
from cutwater.wire.calls.credits import CreditPool
from cutwater.wire.calls.incoming_calls import IncomingCalls
from cutwater.wire.calls.outgoing_calls import Calling
from cutwater.wire.codec import FrameDecoder
from cutwater.wire.messages import FrameKind

# The wire.


def calls_forgotten_with_their_connection() -> list[Patch]:
    right = Calling.lost

    def lost(self, reason, cause):
        self._pending = {}
        right(self, reason, cause)

    return [(Calling, "lost", lost)]


def answers_dropped_after_a_reconnect() -> list[Patch]:
    right = IncomingCalls._send

    def send(self, call, outcome):
        hosts = self._methods.notices.setdefault("", {})
        first = hosts.setdefault(self.connection._address.rpartition(":")[0], self.connection)
        if first is self.connection or self.connection.peer.role != "client":
            right(self, call, outcome)

    return [(IncomingCalls, "_send", send)]


def number_of_a_cancelled_call_reused() -> list[Patch]:
    right_cancel, right_expire = Calling.cancel, Calling._expire

    def cancel(self, call):
        right_cancel(self, call)
        self._next = min(self._next, call)

    def expire(self, now):
        late = [call for call, entry in self._pending.items() if entry[0] <= now]
        left = right_expire(self, now)
        if late and not any(call > late[0] for call in (*self._pending, *self._streams)):
            self._next = late[0]
        return left

    return [(Calling, "cancel", cancel), (Calling, "_expire", expire)]


def lost_call_called_unsent() -> list[Patch]:
    def lost(reason, cause):
        return ConnectionLost(reason, outcome_unknown=False)

    return [(outgoing_calls, "_lost", lost)]


def torn_item_dropped() -> list[Patch]:
    class Forgetful(FrameDecoder):
        """Drops an item of a stream that comes in two pieces."""

        __slots__ = ("is_torn",)

        def feed(self, data):
            self.is_torn = self._position < len(self._data)
            super().feed(data)

        def next_frame(self):
            frame = super().next_frame()
            if frame is not None and frame.kind == FrameKind.STREAM_ITEM and self.is_torn:
                frame = super().next_frame()
            self.is_torn = self.is_torn and frame is None
            return frame

    return [(connection, "FrameDecoder", Forgetful)]


def credit_leaks() -> list[Patch]:
    def consumed(self, member, items, size):
        member.queued_items -= items
        member.queued_bytes -= size
        self.free_bytes += size

    return [(CreditPool, "consumed", consumed)]


# Appends.


def append_retried_after_a_lost_connection() -> list[Patch]:
    right = sender.is_definite
    return [(sender, "is_definite", lambda error: isinstance(error, ConnectionLost) or right(error))]


def unanswered_append_taken_for_absent() -> list[Patch]:
    right = pending.fate_of

    def fate_of(info, epoch, known_end):
        fate = right(info, epoch, known_end)
        return AppendFate.ABSENT if fate is AppendFate.UNDECIDED else fate

    return [(pending, "fate_of", fate_of)]


def abandoned_appends_sent_along() -> list[Patch]:
    def load(self, flight):
        return self._encode([append.part for append in flight.group])

    return [(BatchQueue, "load", load)]


def joined_appends_get_one_position() -> list[Patch]:
    def shares(ack, group):
        return list(map(Ack, repeat(ack.glsn), repeat(ack.llsn), repeat(ack.stream), [one.count for one in group]))

    return [(batcher, "shares", shares)]


def deadline_ignored_in_flight() -> list[Patch]:
    right = HeadCalls.post

    def waiting(self):
        yield self._queue, lambda append: DeadlineExceeded("late")

    def post(self, connection, info, batch, timeout_ms, on_answer, if_llsn=None):
        return right(self, connection, info, batch, 600_000, on_answer, if_llsn)

    return [(BatchQueue, "_waiting", waiting), (HeadCalls, "post", post)]


def callers_memory_sent_later() -> list[Patch]:
    return [
        (router, "owned", lambda part: part),
        (plain_arrow, "values_of", plain_arrow.values_of),
        (router, "values_of", lambda values, timestamp, owned_bytes_max=0: plain_arrow.values_of(values, timestamp)),
    ]


def killed_heads_appends_called_ok() -> list[Patch]:
    right = sender.Shipping._failed

    def failed(self, shipment, info, error):
        if isinstance(error, ConnectionLost) and error.outcome_unknown:
            llsn = self._pending.known_end(info) + 1
            ack = Ack(GLSN(self._catalogs.view.catalog.high_watermark + 1), llsn, info.stream, 1)
            self._end(shipment, ack)
        return right(self, shipment, info, error)

    return [(sender.Shipping, "_failed", failed)]


# Producers.


def group_lost_without_a_head() -> list[Patch]:
    right = AsyncProducer._depart

    def depart(self):
        if len(self._queue) and self._may_send() and self._head(self._session.stream) is None:
            self._queue.next_group(self._bytes_max)
        right(self)

    return [(AsyncProducer, "_depart", depart)]


def numbered_send_called_failed() -> list[Patch]:
    return [(ProducerQueue, "_late", lambda self, append: DeadlineExceeded("too late"))]


def flights_lost_with_their_connection() -> list[Patch]:
    right = AsyncProducer._answered

    def answered(self, kind, tag, flight, outcome):
        if isinstance(outcome, ConnectionLost) and flight is not None:
            self._session._unsettled.pop(tag.sequence, None)
            self._queue.flights.pop(tag.sequence, None)
        right(self, kind, tag, flight, outcome)

    return [(AsyncProducer, "_answered", answered)]


# Catalog and positions.


def fresh_catalog_was_under_way() -> list[Patch]:
    async def fresh(self, deadline):
        await self._wait(self._fetching or self._fetch(), deadline, is_last=True)
        return self.view

    return [(Catalogs, "fresh", fresh)]


def tail_from_the_cache() -> list[Patch]:
    async def tail(self, *, timeout=None):
        return (await self._catalogs.known(self._deadline(timeout))).catalog.high_watermark

    return [(AsyncClient, "tail", tail)]


def subscription_begins_one_early() -> list[Patch]:
    right = Positions.resolve

    async def resolve(self, selection, start, stop, follow, deadline):
        found = await right(self, selection, start, stop, follow, deadline)
        return structs.replace(found, start=GLSN(max(1, found.start - 1)))

    return [(Positions, "resolve", resolve)]


def subscription_resumes_one_late() -> list[Patch]:
    right = _Reader._follow

    async def follow(self, info, position):
        await right(self, info, GLSN(position + 1) if self._turn else position)

    return [(_Reader, "_follow", follow)]


def reopened_stream_not_followed() -> list[Patch]:
    right = Feed._take_catalog

    def take_catalog(self, view):
        before = set(self._readers)
        right(self, view)
        ended = self.__dict__.setdefault("ended", set())
        ended |= before - set(self._readers)
        for stream in ended & set(self._readers):
            self._readers.pop(stream).task.cancel()

    return [(Feed, "_take_catalog", take_catalog)]


# Reads.


def read_from_a_replica_that_is_behind() -> list[Patch]:
    def run_at(glsn, received):
        for run in point_reads.runs_of(received.value, received.body):
            if run.first_glsn <= glsn <= run.last_glsn:
                return run
        return None

    return [(point_reads, "_run_at", run_at)]


def read_complete_without_an_answer() -> list[Patch]:
    right = PointReads.ask

    async def ask(self, info, method, arguments, accept, deadline):
        try:
            return await right(self, info, method, arguments, accept, deadline)
        except Trimmed:
            raise
        except CutwaterError:
            return None

    return [(PointReads, "ask", ask)]
