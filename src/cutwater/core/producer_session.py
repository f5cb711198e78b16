"""The client's side of a named producer: every batch once, in order, even if messages get lost.

The session numbers batches and keeps them until their fate is known. It

1. opens with a fence in its stream, so that nothing of an earlier holder of the name can enter afterwards;
2. repeats unsettled batches on the *same* stream, in order, where deduplication gives the same answer again;
3. changes streams only by a decision of the metadata repository, after the old stream is sealed and a replica that is
   sealed at the end of that epoch has told the fate of every sequence;
4. believes that a batch was refused for its content only behind a fence of its own next epoch. The check may depend on
   the time, so another attempt of the same batch may have been taken, or may still be. Behind the fence no attempt is
   taken: a batch that the fence does not count is not in the log, and its number is free for the next batch.

Late answers do no harm: every step of a session has its own epoch or question, and an answer to another one is ignored.
"""

from __future__ import annotations

import enum

from msgspec import Struct, structs

from cutwater.core.replica.deduplication import WINDOW_BATCHES_MAX, Remembered
from cutwater.core.requests import MoveProducerRequest, OpenProducerRequest, ProducerGrant, RenewProducerRequest
from cutwater.errors import NotFound, ProducerFenced, ProtocolViolation, ResourceExhausted
from cutwater.types import (
    Ack,
    Batch,
    BatchKind,
    Epoch,
    EventTime,
    LogStreamId,
    ProducerEpoch,
    ProducerId,
    ProducerTag,
    Sequence,
)

IN_FLIGHT_BATCHES_MAX = WINDOW_BATCHES_MAX // 2
"""Half of what a replica remembers, in number and in distance, so a repeated batch is always recognised."""


class Fate(Struct, frozen=True):
    """What a sealed replica knows of a producer at the end of an epoch."""

    stream: LogStreamId
    stream_epoch: Epoch
    last_sequence: Sequence
    batches: tuple[Remembered, ...]


class Phase(enum.Enum):
    OPENING = "waits for its epoch"
    FENCING = "waits for its fence to be committed"
    READY = "sends"
    SETTLING = "waits to hear the fate of its batches in a sealed stream"
    MOVING = "waits for another stream"
    RENEWING = "waits for its next epoch, because a batch was refused"
    FENCED = "another holder has opened the name"
    GONE = "its topic was deleted"


class SendBatch(Struct, frozen=True):
    stream: LogStreamId
    batch: Batch


class AskFate(Struct, frozen=True):
    """Ask a replica of this stream that is sealed in this epoch."""

    stream: LogStreamId
    stream_epoch: Epoch


class AskMetadata(Struct, frozen=True):
    request: OpenProducerRequest | MoveProducerRequest | RenewProducerRequest


class Settled(Struct, frozen=True):
    """The batch with this sequence is in the log."""

    sequence: Sequence
    ack: Ack


class Withdrawn(Struct, frozen=True):
    """These batches are not in the log and never will be, under these numbers. The ``refused`` ones were refused for
    their content, the others came behind them. The caller submits those that it still wants again, in this order."""

    sequences: tuple[Sequence, ...]
    refused: frozenset[Sequence]


SessionEffect = SendBatch | AskFate | AskMetadata | Settled | Withdrawn


class ProducerSession:
    """One opening of a producer's name. Methods take an event and return effects."""

    def __init__(self, producer: ProducerId, topic: str, session: int) -> None:
        """``session`` must differ from that of every other opening: a random number will do."""
        self.producer, self.topic, self.session = producer, topic, session
        self.phase = Phase.OPENING
        self.last_sequence = Sequence(0)
        self._grant = ProducerGrant(ProducerEpoch(0), LogStreamId(0), Sequence(0))
        """The stream and the epoch for appends; nothing is granted under epoch 0."""
        self._is_open = False
        """Whether a fence was ever committed. Before that, the numbers of earlier holders are not known."""
        self._first_epoch = ProducerEpoch(0)
        """The session's first epoch. No other session had the name since, so all later epochs are its own."""
        self._question: AskFate | None = None
        self._wish: MoveProducerRequest | RenewProducerRequest | None = None
        self._unsettled: dict[Sequence, Batch] = {}
        self._taken = Sequence(0)
        """The last sequence that the last fence counted: unsettled batches up to here are in the log."""
        self._refused: dict[Sequence, ProducerEpoch] = {}
        """Unsettled batches of which an attempt was refused for its content, and the epoch of that attempt."""

    @property
    def stream(self) -> LogStreamId:
        """The stream to which the session appends; 0 before it is known."""
        return self._grant.stream

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be sent. The fate of unsettled batches then remains unknown."""
        return self.phase in (Phase.FENCED, Phase.GONE)

    @property
    def epoch(self) -> ProducerEpoch:
        """The epoch that was granted last; 0 before the first grant."""
        return self._grant.epoch

    @property
    def has_room(self) -> bool:
        """Whether another batch may be submitted before one of the present ones is settled."""
        is_far = self._distance() >= IN_FLIGHT_BATCHES_MAX
        return self._is_open and len(self._unsettled) < IN_FLIGHT_BATCHES_MAX and not is_far

    @property
    def unsettled(self) -> tuple[Sequence, ...]:
        return tuple(self._unsettled)

    # Opening.

    def start(self) -> list[SessionEffect]:
        return [AskMetadata(OpenProducerRequest(self.producer, self.topic, self.session))]

    def granted(self, grant: ProducerGrant) -> list[SessionEffect]:
        """Take the epoch and the stream that the metadata repository granted, and put the fence there.

        An open session takes only the next epoch, which it asked for itself. A later epoch means that another session
        has used the same numbers meanwhile.
        """
        if self._is_open:
            is_asked = self.phase in (Phase.MOVING, Phase.RENEWING)
            is_next = is_asked and grant.epoch == self._grant.epoch + 1
        else:
            is_next = not self.is_over and grant.epoch > self._grant.epoch
        if not is_next:
            return []
        self._grant, self.phase = grant, Phase.FENCING
        return [self._fence()]

    def fence_committed(self, fence: ProducerTag, last_sequence: Sequence) -> list[SessionEffect]:
        """Go on after the fence is committed. Nothing of an older epoch comes after it. Unsettled batches may now be
        sent (again), up to the first batch that was refused under an older epoch and is not in the log."""
        if self.phase is not Phase.FENCING or fence.epoch != self._grant.epoch:
            return []
        if not self._is_open:
            self._is_open, self._first_epoch = True, fence.epoch
        self.phase, self._taken = Phase.READY, last_sequence
        self.last_sequence = max(self.last_sequence, last_sequence)
        withdrawn = self._withdraw(fence.epoch)
        return [*self._resend(), *withdrawn, *self._renew()]

    # Sending.

    def submit(self, batch: Batch) -> tuple[Sequence, list[SessionEffect]]:
        """Number a batch and send it."""
        if self.phase is Phase.FENCED:
            raise ProducerFenced(f"producer {self.producer!r} was opened again elsewhere: stop using it")
        if self.phase is Phase.GONE:
            raise NotFound(f"the topic of producer {self.producer!r} was deleted: open it on another one")
        if not self.has_room:
            raise ResourceExhausted(
                f"producer {self.producer!r} has {len(self._unsettled)} batches under way", retry_ms=10
            )
        self.last_sequence = sequence = Sequence(self.last_sequence + 1)
        self._unsettled[sequence] = batch
        return sequence, [self._send(sequence, batch)] if self.phase is Phase.READY else []

    def acked(self, sequence: Sequence, ack: Ack) -> list[SessionEffect]:
        if self._unsettled.pop(sequence, None) is None:
            return []
        self._refused.pop(sequence, None)
        return [Settled(sequence, ack), *self._renew()]

    def refused(self, tag: ProducerTag) -> list[SessionEffect]:
        """Note that the head refused the content of this batch. The refusal becomes final behind a fence."""
        is_present = tag.epoch == self._grant.epoch and self.phase in (Phase.READY, Phase.RENEWING)
        if not is_present or tag.sequence not in self._unsettled or tag.sequence <= self._taken:
            return []
        self._refused[tag.sequence] = tag.epoch
        return self._renew()

    def retry(self) -> list[SessionEffect]:
        """Repeat the present step after a while without an answer. The repetition does nothing twice."""
        match self.phase:
            case Phase.OPENING:
                return self.start()
            case Phase.FENCING:
                return [self._fence()]
            case Phase.READY:
                return self._resend()
            case Phase.SETTLING:
                assert self._question is not None
                return [self._question]
            case Phase.MOVING | Phase.RENEWING:
                assert self._wish is not None
                return [AskMetadata(self._wish)]
            case Phase.FENCED | Phase.GONE:
                return []

    # Moving.

    def stream_closed(self, stream: LogStreamId, stream_epoch: Epoch) -> list[SessionEffect]:
        """Ask what became of the batches, since the catalog says that the session's stream is sealed and stays so."""
        if stream != self.stream or self.phase not in (Phase.READY, Phase.FENCING, Phase.SETTLING):
            return []
        self.phase, self._question = Phase.SETTLING, AskFate(stream, stream_epoch)
        return [self._question]

    def stream_reopened(self, stream: LogStreamId) -> list[SessionEffect]:
        """Stay in the stream, which the catalog shows open again before the session asked to leave it. The batches
        there are recognised."""
        if stream != self.stream or self.phase is not Phase.SETTLING:
            return []
        return self._stay()

    def fate_known(self, fate: Fate) -> list[SessionEffect]:
        """Settle the batches that are in the log of the sealed stream, and ask for another stream. All other sequences
        will never be in the sealed one."""
        if self.phase is not Phase.SETTLING or AskFate(fate.stream, fate.stream_epoch) != self._question:
            return []
        if any(known.epoch > self._grant.epoch for known in fate.batches):
            # The same numbers may mean another session's batches by now.
            self.phase = Phase.FENCED
            return []
        effects: list[SessionEffect] = []
        for known in fate.batches:
            if known.kind is not BatchKind.FENCE and self._is_ours(known):
                if known.glsn is None:
                    raise ProtocolViolation(f"sealed log stream {fate.stream} has an uncommitted batch {known}")
                effects += self.acked(known.sequence, Ack(known.glsn, known.first_llsn, fate.stream, known.count))
        last_sequence = max(fate.last_sequence, self._base())
        self.phase = Phase.MOVING
        self._wish = MoveProducerRequest(
            self.producer, self.session, self._grant.epoch, fate.stream_epoch, last_sequence
        )
        return [*effects, AskMetadata(self._wish)]

    def move_refused(self, request: MoveProducerRequest) -> list[SessionEffect]:
        """Stay in the stream: it is open again, or its epoch went on, so this move will never happen."""
        if self.phase is not Phase.MOVING or request != self._wish:
            return []
        return self._stay()

    def fenced(self, refused: ProducerTag | MoveProducerRequest | RenewProducerRequest) -> None:
        """End the session because a server refused this batch or request for a newer holder of the name.

        While the session moves, the stream that it leaves may refuse a batch because of the session's own next epoch.
        Then only the metadata repository knows.
        """
        is_asked = self.phase in (Phase.MOVING, Phase.RENEWING)
        if isinstance(refused, ProducerTag):
            is_over = refused.epoch == self._grant.epoch and not is_asked
        else:
            is_over = refused == self._wish and is_asked
        if is_over:
            self.phase = Phase.FENCED

    def topic_deleted(self) -> None:
        """End the session because its topic is no longer in the catalog."""
        if not self.is_over:
            self.phase = Phase.GONE

    # Helpers.

    def _stay(self) -> list[SessionEffect]:
        self.phase = Phase.FENCING
        return [self._fence()]

    def _renew(self) -> list[SessionEffect]:
        """Ask for the fence that settles what was refused. Batches that the last fence counted are settled before. Each
        fence takes a place in what a replica remembers, so a batch must not wait for many of them."""
        if self.phase is not Phase.READY or not self._refused or min(self._unsettled) <= self._taken:
            return []
        self.phase = Phase.RENEWING
        self._wish = RenewProducerRequest(self.producer, self.session, self._grant.epoch)
        return [AskMetadata(self._wish)]

    def _withdraw(self, fence: ProducerEpoch) -> list[SessionEffect]:
        """Withdraw the batches that were refused before this fence and not counted by it, and all batches with later
        numbers. Attempts under the fence's own epoch may still be taken, so their fate is not known yet."""
        refused = frozenset(sequence for sequence, epoch in self._refused.items() if epoch < fence)
        self._refused = {sequence: epoch for sequence, epoch in self._refused.items() if sequence not in refused}
        first = min((sequence for sequence in refused if sequence > self._taken), default=None)
        if first is None:
            return []
        withdrawn = tuple(sequence for sequence in self._unsettled if sequence >= first)
        for sequence in withdrawn:
            del self._unsettled[sequence]
        self.last_sequence = Sequence(first - 1)
        return [Withdrawn(withdrawn, refused.intersection(withdrawn))]

    def _is_ours(self, known: Remembered) -> bool:
        batch = self._unsettled.get(known.sequence)
        return batch is not None and known.epoch >= self._first_epoch and batch.checksum == known.checksum

    def _distance(self) -> int:
        """Return the distance between the last number and the oldest unsettled batch. A replica remembers only a
        limited number of batches."""
        return self.last_sequence - min(self._unsettled, default=self.last_sequence)

    def _base(self) -> Sequence:
        """Return the last sequence before the first unsettled one; older ones may lie in earlier streams."""
        if self._unsettled:
            return Sequence(min(self._unsettled) - 1)
        return max(self.last_sequence, self._grant.last_sequence)

    def _resend(self) -> list[SessionEffect]:
        return [self._send(sequence, batch) for sequence, batch in self._unsettled.items()]

    def _send(self, sequence: Sequence, batch: Batch) -> SendBatch:
        tag = ProducerTag(self.producer, self._grant.epoch, sequence)
        return SendBatch(self.stream, structs.replace(batch, producer=tag))

    def _fence(self) -> SendBatch:
        tag = ProducerTag(self.producer, self._grant.epoch, self._grant.last_sequence)
        zero = EventTime(0)
        return SendBatch(self.stream, Batch(1, b"", 0, zero, zero, kind=BatchKind.FENCE, producer=tag))
