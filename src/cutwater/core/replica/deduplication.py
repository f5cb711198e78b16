"""Producer deduplication: the state of a replica that keeps ``(producer, sequence)`` in the log at most once.

The state is a pure function of the entries of one log stream and of their commits, so it is the same on every replica
and any of them may become head. It

1. covers uncommitted entries too: a retry that overtakes its own commit finds the first attempt and waits with it;
2. is truncated together with the tail of the log: a batch that a seal removed may be sent again;
3. is checkpointed, outlives trim and travels with sync, because retries may arrive after their entries are gone;
4. fences: an epoch of a producer begins with a committed *fence* in the stream. After the fence, nothing of an older
   epoch enters, so the last sequence that the fence reports is final;
5. knows which producers left. Opening a producer and moving it to another stream both raise its epoch, so an epoch
   belongs to one stream. A stream that a producer has left refuses every epoch below the one with which the producer
   went on elsewhere.

Groups, which have no producer, are remembered in the same way: see ``core/publish/groups.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec import Struct, structs

from cutwater.core.publish.groups import GroupMemory, RememberedGroup
from cutwater.errors import ProducerFenced, SequenceExpired, SequenceGap, SequenceReused
from cutwater.types import (
    GLSN,
    LLSN,
    Batch,
    BatchKind,
    CommitContext,
    Entry,
    ProducerEpoch,
    ProducerId,
    ProducerTag,
    Sequence,
)

WINDOW_BATCHES_MAX = 256
"""Number of committed batches remembered for each producer. A session never reaches back further than half of it."""


class Remembered(Struct, frozen=True, array_like=True):
    """One batch of a producer as it lies in the log; ``glsn`` is None until the batch is committed."""

    sequence: Sequence
    epoch: ProducerEpoch
    kind: BatchKind
    first_llsn: LLSN
    count: int
    checksum: int
    glsn: GLSN | None

    @property
    def last_llsn(self) -> LLSN:
        return LLSN(self.first_llsn + self.count - 1)


class Departure(Struct, frozen=True):
    """A producer was moved from this stream to another one, where it went on with this epoch. Older epochs are over."""

    producer: ProducerId
    epoch: ProducerEpoch


class ProducerWindow(Struct, frozen=True, array_like=True):
    """One producer in a checkpoint: last epoch and sequence of the forgotten batches, and the remembered batches."""

    producer: ProducerId
    base_epoch: ProducerEpoch
    base_sequence: Sequence
    batches: tuple[Remembered, ...]


class DedupCheckpoint(Struct, frozen=True, array_like=True):
    """Deduplication state of the committed prefix that ends at ``upto``. There may be many producers with many batches,
    so it is encoded without field names."""

    upto: LLSN
    producers: tuple[ProducerWindow, ...]
    groups: tuple[RememberedGroup, ...] = ()


class _Window:
    __slots__ = ("base_epoch", "base_sequence", "batches", "committed")

    def __init__(self) -> None:
        self.base_epoch = ProducerEpoch(0)
        self.base_sequence = Sequence(0)
        self.batches: deque[Remembered] = deque()
        self.committed = 0
        """Number of batches, from the oldest on, that are committed."""

    @property
    def epoch(self) -> ProducerEpoch:
        return self.batches[-1].epoch if self.batches else self.base_epoch

    @property
    def last_sequence(self) -> Sequence:
        return self.batches[-1].sequence if self.batches else self.base_sequence


class Deduplicator:
    """The producers and groups of one log stream."""

    def __init__(self, checkpoint: DedupCheckpoint | None = None) -> None:
        self._windows: dict[ProducerId, _Window] = {}
        self._uncommitted: deque[ProducerId] = deque()
        """Producers of the uncommitted tagged entries, in LLSN order."""
        self._departed: dict[ProducerId, ProducerEpoch] = {}
        self.groups = GroupMemory(checkpoint.groups if checkpoint else ())
        for saved in checkpoint.producers if checkpoint else ():
            window = _Window()
            window.base_epoch, window.base_sequence = saved.base_epoch, saved.base_sequence
            window.batches.extend(saved.batches)
            window.committed = len(saved.batches)
            self._windows[saved.producer] = window

    def depart(self, departures: Iterable[Departure]) -> None:
        """Set the producers that were moved away from the stream before it was opened. The list is complete."""
        self._departed = {departure.producer: departure.epoch for departure in departures}

    def fate(self, producer: ProducerId) -> tuple[Sequence, tuple[Remembered, ...]]:
        """Return the producer's last sequence here, and its batches that are still remembered."""
        window = self._windows.get(producer)
        return (window.last_sequence, tuple(window.batches)) if window else (Sequence(0), ())

    def find(self, tag: ProducerTag, kind: BatchKind, checksum: int) -> Remembered | None:
        """Return the earlier arrival of this batch, or None if it is the next new one. Raise if it is neither."""
        window = self._windows.get(tag.producer) or _Window()
        epoch = max(window.epoch, self._departed.get(tag.producer, ProducerEpoch(0)))
        if tag.epoch < epoch:
            raise ProducerFenced(
                f"producer {tag.producer!r} has gone on with epoch {epoch}, this is of epoch {tag.epoch}: stop using it"
            )
        if kind is BatchKind.FENCE:
            return next((b for b in window.batches if b.kind is kind and b.epoch == tag.epoch), None)
        if tag.epoch > window.epoch:
            raise SequenceGap(
                f"producer {tag.producer!r} has not opened epoch {tag.epoch} in this log stream: open it first",
                expected=Sequence(window.last_sequence + 1),
            )
        return self._find_batch(window, tag, kind, checksum)

    def _find_batch(self, window: _Window, tag: ProducerTag, kind: BatchKind, checksum: int) -> Remembered | None:
        last = window.last_sequence
        if tag.sequence == last + 1:
            return None
        if tag.sequence > last + 1:
            raise SequenceGap(
                f"producer {tag.producer!r} sent sequence {tag.sequence}, but {last + 1} is next: send that one first",
                expected=Sequence(last + 1),
            )
        for batch in reversed(window.batches):
            if batch.sequence == tag.sequence and batch.kind is not BatchKind.FENCE:
                if batch.checksum != checksum or batch.kind is not kind:
                    raise SequenceReused(
                        f"producer {tag.producer!r} sent sequence {tag.sequence} again with other bytes: "
                        "use a new sequence for new data"
                    )
                return batch
        raise SequenceExpired(
            f"producer {tag.producer!r} repeated sequence {tag.sequence}, older than the last {WINDOW_BATCHES_MAX} "
            "batches: whether it is in the log can no longer be told from here, read the log"
        )

    def has(self, batch: Batch) -> bool:
        """Whether this very batch is remembered and committed, so that no repetition of it gets another place."""
        tag = batch.producer
        window = self._windows.get(tag.producer) if tag is not None else None
        if tag is None or window is None:
            return False
        return any(
            (known.sequence, known.kind, known.checksum) == (tag.sequence, batch.kind, batch.checksum)
            for known in window.batches
            if known.glsn is not None
        )

    def record(self, entry: Entry) -> Sequence:
        """Record an entry that got its place in the stream. The caller passes every entry, in LLSN order. Return the
        producer's last sequence at this place, or 0 if the entry has no producer."""
        batch = entry.batch
        if batch.group is not None:
            self.groups.record(entry)
        tag = batch.producer
        if tag is None:
            return Sequence(0)
        window = self._windows.get(tag.producer)
        if window is None:
            window = self._windows[tag.producer] = _Window()
        sequence = tag.sequence
        if batch.kind is BatchKind.FENCE:
            # A fence uses no sequence. It continues where this stream, or the producer's previous one, left off.
            sequence = max(sequence, window.last_sequence)
        window.batches.append(
            Remembered(sequence, tag.epoch, batch.kind, entry.first_llsn, batch.count, batch.checksum, None)
        )
        self._uncommitted.append(tag.producer)
        return sequence

    def commit(self, context: CommitContext) -> list[RememberedGroup]:
        """Give GLSNs to everything up to the end of this commit. Return the groups that it commits."""
        while self._uncommitted:
            window = self._windows[self._uncommitted[0]]
            batch = window.batches[window.committed]
            if batch.first_llsn > context.last_llsn:
                break
            self._uncommitted.popleft()
            window.batches[window.committed] = structs.replace(batch, glsn=context.glsn_of(batch.first_llsn))
            window.committed += 1
            self._forget_oldest(window)
        return self.groups.commit(context)

    def _forget_oldest(self, window: _Window) -> None:
        """Forget the oldest batches, by the number of committed batches alone, so that all replicas forget the same."""
        while window.committed > WINDOW_BATCHES_MAX:
            oldest = window.batches.popleft()
            window.committed -= 1
            window.base_epoch, window.base_sequence = oldest.epoch, oldest.sequence

    def truncate(self, end: LLSN) -> None:
        """Forget the entries above ``end``, which were removed. They were never committed."""
        self.groups.truncate(end)
        for window in self._windows.values():
            while window.batches and window.batches[-1].first_llsn > end:
                assert window.batches[-1].glsn is None
                window.batches.pop()
        self._uncommitted = deque(
            producer
            for _, producer in sorted(
                (batch.first_llsn, producer)
                for producer, window in self._windows.items()
                for batch in window.batches
                if batch.glsn is None
            )
        )

    def checkpoint(self, upto: LLSN) -> DedupCheckpoint:
        """Return the state of the committed prefix that ends at ``upto``."""
        producers = []
        for producer, window in sorted(self._windows.items()):
            committed = tuple(b for b in window.batches if b.glsn is not None and b.last_llsn <= upto)
            if committed or window.base_sequence or window.base_epoch:
                producers.append(ProducerWindow(producer, window.base_epoch, window.base_sequence, committed))
        return DedupCheckpoint(upto, tuple(producers), self.groups.checkpoint(upto))
