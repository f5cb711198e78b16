"""Staged parts of a simulated storage node: kept on its disk, published and dropped when the leader says so."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct

from cutwater.core.messages import PublishGroup
from cutwater.core.replica.events import GroupEntry, GroupFailed
from cutwater.core.replica.replica import Replica
from cutwater.core.requests import StagedAnswer, StagedBatch, StagedRequest
from cutwater.errors import CutwaterError, ReadOnly, Unavailable
from cutwater.testing.simulator.protocol import FetchCall, FetchReturn, Return, SimCall, StageCall
from cutwater.testing.simulator.world import Address
from cutwater.types import MILLISECOND, Batch

if TYPE_CHECKING:
    from cutwater.testing.simulator.servers.storage_node import SimStorageNode

ASK_EVERY_US = 120 * MILLISECOND
FETCH_AGAIN_US = 15 * MILLISECOND
FETCH_PATIENCE_US = 120 * MILLISECOND
FEED_PAUSE_US_MAX = 1_500


class SimStagedPart(Struct, frozen=True):
    call: StageCall
    since: int

    @property
    def batch(self) -> StagedBatch:
        return StagedBatch(self.call.run, self.call.batch, self.call.generation)


class _Feed(Struct):
    """One group on its way into one replica."""

    group: PublishGroup
    replica: Replica
    give_up_at: int
    batches: deque[Batch] | None = None
    taken: int = 0


class SimPartStore:
    """The staged parts of one node. ``parts`` is on disk and outlives the process."""

    def __init__(self, node: SimStorageNode) -> None:
        self._node, self._world = node, node.world
        self.parts: dict[str, SimStagedPart] = {}
        self._fetched: dict[str, tuple[Batch, ...]] = {}

    def start(self) -> None:
        self._fetched = {}
        self._node.after(ASK_EVERY_US, self._ask)

    # Staging.

    def stage(self, source: Address, call_id: int, call: StageCall) -> None:
        """Stage a part. The answer is sent once the part is on disk; before that, the part does not exist."""
        if self._node.disk_full:
            raise ReadOnly(f"storage node {self._node.node} has no room left")
        delay = 50 + int(self._world.rng.random() * self._world.options.fsync_us_max)
        self._node.after(delay, self._staged, source, call_id, call)

    def _staged(self, source: Address, call_id: int, call: StageCall) -> None:
        outcome: object = Unavailable("input/output error")
        if not self._fails():
            self.parts.setdefault(call.part, SimStagedPart(call, self._world.now))
            outcome = True
        self._node.send(source, Return(call_id, outcome))

    def _fails(self) -> bool:
        return self._world.chance(self._world.options.fsync_failure)

    # Publishing.

    def feed(self, group: PublishGroup, replica: Replica) -> None:
        self._step(_Feed(group, replica, self._world.now + FETCH_PATIENCE_US))

    def _step(self, feed: _Feed) -> None:
        """Hand over one entry, or try again to get missing parts."""
        if feed.batches is None and not self._collect(feed):
            if self._world.now < feed.give_up_at:
                self._node.after(FETCH_AGAIN_US, self._step, feed)
            else:
                self._hand_over(feed, GroupFailed(feed.group.tag, "a part of it cannot be had"))
            return
        assert feed.batches is not None
        if feed.taken and self._fails():
            self._hand_over(feed, GroupFailed(feed.group.tag, "a part of it cannot be read"))
            return
        batch = feed.batches.popleft()
        feed.taken += 1
        goes_on = self._hand_over(feed, GroupEntry(feed.group.tag, batch, last=not feed.batches))
        if goes_on and feed.batches:
            self._node.after(int(self._world.rng.random() * FEED_PAUSE_US_MAX), self._step, feed)

    def _hand_over(self, feed: _Feed, event: GroupEntry | GroupFailed) -> bool:
        """Hand an event to the replica; return whether it was accepted. If not, the group is no longer wanted."""
        stream = feed.group.stream
        if self._node.replicas.get(stream) is not feed.replica:
            return False
        try:
            effects = feed.replica.handle(event)
        except CutwaterError as error:
            self._world.trace("refused", self._node.node, stream, error.code)
            return False
        self._node.carry_out(stream, feed.replica, effects)
        return True

    def _collect(self, feed: _Feed) -> bool:
        """Collect all parts from this node's disk or from other holders; return whether all are here."""
        batches: deque[Batch] = deque()
        missing = False
        for part in feed.group.parts:
            own = self.parts.get(part.part)
            found = own.call.batches if own is not None else self._fetched.get(part.part)
            if found is None:
                missing = True
                for holder in part.holders:
                    if holder != self._node.node:
                        self._node.send(("sn", holder), SimCall(0, FetchCall(part.part)))
            else:
                batches.extend(found)
        if not missing:
            feed.batches = batches
        return not missing

    def serve(self, source: Address, call: FetchCall) -> None:
        part = self.parts.get(call.part)
        if part is not None:
            self._node.send(source, FetchReturn(call.part, part.call.batches))

    def fetched(self, answer: FetchReturn) -> None:
        self._fetched[answer.part] = answer.batches

    # Expiry.

    def _ask(self) -> None:
        """Ask which parts may be dropped. Any metadata node may be asked; one that does not lead says so."""
        self._node.after(ASK_EVERY_US, self._ask)
        ages: dict[StagedBatch, int] = {}
        for part in self.parts.values():
            ages[part.batch] = max(ages.get(part.batch, 0), self._world.now - part.since)
        if ages:
            batches = tuple(StagedBatch(b.run, b.batch, b.generation, age) for b, age in ages.items())
            target = ("mr", self._world.rng.randint(1, self._world.options.metadata_nodes))
            self._node.send(target, SimCall(0, StagedRequest(self._node.node, batches)))

    def answered(self, answer: StagedAnswer) -> None:
        gone = {(batch.run, batch.batch, batch.generation) for batch in answer.drop}
        self.parts = {
            name: part
            for name, part in self.parts.items()
            if (part.batch.run, part.batch.batch, part.batch.generation) not in gone
        }
