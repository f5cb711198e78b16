"""Decisions for stores to keep: a history that the order layer would accept, made from a seed; and appends as a leader
makes them."""

from __future__ import annotations

import asyncio
from random import Random

from cutwater.core.order import decisions as d
from cutwater.core.order.cut import StreamCommit
from cutwater.core.order.state import OrderState
from cutwater.metadata.stores.store_interface import MetadataStore
from cutwater.types import (
    GLSN,
    LLSN,
    CommitContext,
    CutTime,
    DecisionIndex,
    Epoch,
    LeaderEpoch,
    LogStreamId,
    MetadataNodeId,
    StorageNodeId,
    TopicId,
)

NODES = tuple(StorageNodeId(n) for n in (1, 2, 3))
STREAM = LogStreamId(1)
ONE, TWO = MetadataNodeId(1), MetadataNodeId(2)
HERE, THERE = "host-1:9000", "host-2:9000"
START = DecisionIndex(0)


class History:
    """Makes decisions that follow one another; ``state`` is their fold."""

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(seed)
        self.state = OrderState()
        self.made: list[d.Decision] = []

    def next(self, count: int = 1) -> tuple[d.Decision, ...]:
        return tuple(self._next() for _ in range(count))

    def _next(self) -> d.Decision:
        opening: list[d.Decision] = [
            *(d.AddNode(node) for node in NODES),
            d.CreateTopic(TopicId(1), "orders", 3),
            d.CreateStream(STREAM, TopicId(1), NODES, GLSN(0), CutTime(1)),
            d.Unseal(STREAM, Epoch(1), LLSN(0), NODES),
        ]
        at = len(self.made)
        decision = opening[at] if at < len(opening) else self._cut() if self.random.random() < 0.7 else self._cursor()
        self.state.apply(decision)
        self.made.append(decision)
        return decision

    def _cut(self) -> d.Cut:
        state, stream = self.state, self.state.streams[STREAM]
        before, time = state.high_watermark, CutTime(state.cut_time + self.random.randint(1, 1_000))
        count = self.random.choice((0, 1, 1, 5, 100))
        end = GLSN(before + (count or 1))
        context = CommitContext(Epoch(1), LLSN(stream.committed_end + 1), GLSN(before + 1), count, end, before, time)
        return d.Cut(end, before, time, state.revision, (StreamCommit(STREAM, context),) if count else ())

    def _cursor(self) -> d.CommitCursor:
        return d.CommitCursor(f"reader-{self.random.randint(1, 9)}", self.state.high_watermark)


def cursors(count: int, bytes_each: int, random: Random) -> tuple[d.Decision, ...]:
    """Decisions that take so much room and cannot be compressed to much less."""
    return tuple(d.CommitCursor(random.randbytes(bytes_each // 2).hex(), GLSN(n)) for n in range(count))


class Begun:
    """An append that was begun. ``is_begun`` is what ``begin_append`` returned, ``told`` what it reported."""

    def __init__(
        self, store: MetadataStore, epoch: LeaderEpoch, after: DecisionIndex, decisions: tuple[d.Decision, ...]
    ) -> None:
        self.store, self.epoch, self.after, self.decisions = store, epoch, after, decisions
        self.told: list[Exception | None] = []
        self._is_told = asyncio.Event()
        self.is_begun = store.begin_append(epoch, after, decisions, self._tell)

    def _tell(self, outcome: Exception | None) -> None:
        self.told.append(outcome)
        self._is_told.set()

    async def outcome(self) -> Exception | None:
        """What was reported, once. Only for an append that was begun."""
        assert self.is_begun
        await asyncio.wait_for(self._is_told.wait(), 10)
        (told,) = self.told
        return told

    async def finish(self) -> None:
        """Go on as a leader does: unless it is reported as stored, call ``append``, which succeeds or raises."""
        if not self.is_begun or await self.outcome() is not None:
            await self.store.append(self.epoch, self.after, self.decisions)
