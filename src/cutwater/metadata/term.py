"""One term of one leader: connects the pure order layer with the store, the clock and the channels to storage nodes.

One store write is in flight at a time. If its outcome is unknown, the same write is submitted again until it is
known: the store recognizes it. If the store says that another node leads, the term is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from msgspec import structs

from cutwater.core.order.decisions import Cut
from cutwater.core.order.events import (
    Alarm,
    Asked,
    Compact,
    GroupOutcomeArrived,
    OrderEffect,
    OrderEvent,
    PeerComplaint,
    Reply,
    ReportArrived,
    Send,
    StepDown,
    Store,
    Stored,
    StoreRefused,
    Wake,
)
from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.state import OrderState, Snapshot
from cutwater.core.requests import Answer, Request
from cutwater.errors import CutwaterError, Damaged, Fenced, ProtocolViolation, Unavailable
from cutwater.metadata.counters import MetadataCounters
from cutwater.metadata.node_channels import Ways
from cutwater.metadata.stores.store_interface import MetadataStore
from cutwater.protocol.storage_api import Addresses
from cutwater.types import DecisionIndex, Instant, LeaderEpoch

_log = logging.getLogger(__name__)

WAKE_SECONDS = 0.05
STORE_RETRY_SECONDS_MIN = 0.01
STORE_RETRY_SECONDS_MAX = 0.5

Outcome = Callable[[Answer | CutwaterError], None]


def instant() -> Instant:
    return Instant(time.monotonic_ns() // 1_000, time.time_ns() // 1_000)


class Term:
    """One term of one leader. ``over`` is done when the term ends, with the reason."""

    def __init__(
        self,
        epoch: LeaderEpoch,
        state: OrderState,
        store: MetadataStore,
        ways: Ways,
        options: OrderOptions,
        counters: MetadataCounters,
    ) -> None:
        self.epoch = epoch
        self._now = instant()
        """When the last event was taken in."""
        self.layer = OrderLayer(epoch, state, self._now, options)
        self._store, self._ways, self._counters = store, ways, counters
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = self._loop.create_future()
        self._waiting: dict[int, Outcome] = {}
        self._next_request = 0
        self._is_turn_due = False
        self._writing: asyncio.Task[None] | None = None
        self._writing_since: float | None = None
        self._trimming: asyncio.Task[None] | None = None
        self._alarm = self._loop.call_later(WAKE_SECONDS, self._wake)

    @property
    def store_delay(self) -> float:
        """How long the write in flight has been waiting for the store."""
        return 0.0 if self._writing_since is None else self._loop.time() - self._writing_since

    async def end(self, reason: str) -> None:
        """End the term. Nothing more is decided; callers that wait are told that the outcome is unknown."""
        if not self.over.done():
            self.over.set_result(reason)
        self._alarm.cancel()
        tasks = [task for task in (self._writing, self._trimming) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        waiting, self._waiting = self._waiting, {}
        for outcome in waiting.values():
            outcome(Unavailable(f"the leader's term ended ({reason}): it may or may not have been done"))

    # Events.

    def ask(self, request: Request, outcome: Outcome) -> None:
        self._next_request += 1
        self._waiting[self._next_request] = outcome
        self.feed(Asked(self._next_request, request))

    def feed(self, event: OrderEvent) -> None:
        self._take(event)
        for effect in self._effects_of_turn():
            self._carry_out(effect)

    def hear(self, event: ReportArrived | PeerComplaint | GroupOutcomeArrived) -> None:
        """Take in a message of a storage node. The leader's turn comes after all messages that have arrived by now, so
        one cut covers many reports."""
        self._counters.reports += 1
        self._take(event)
        if not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_turn_due = False
        if not self.layer.has_news:
            return
        for effect in self._effects_of_turn():
            if isinstance(effect, Store):
                self._begin_write(effect)
            else:
                self._carry_out(effect)

    def _take(self, event: OrderEvent) -> None:
        """Take in an event and carry out the effects that must precede the leader's turn."""
        if self.over.done():
            return
        self._now = instant()
        try:
            effects = self.layer.take(event, self._now)
        except Exception as error:
            self._note_error(error)
            return
        for effect in effects:
            self._carry_out(effect)

    def _effects_of_turn(self) -> Sequence[OrderEffect]:
        if self.over.done():
            return ()
        try:
            return self.layer.turn(self._now)
        except Exception as error:
            self._note_error(error)
            return ()

    def _note_error(self, error: Exception) -> None:
        """Handle an error of the order layer: a refusal is counted, anything else ends the term."""
        if isinstance(error, ProtocolViolation):
            self._give_up(error.message)
        elif isinstance(error, CutwaterError):
            _log.debug("leader epoch %s refuses: %s", self.epoch, error)
            self._counters.refused += 1
        else:
            self._give_up(f"a bug: {error!r}")

    def _give_up(self, why: str) -> None:
        """End the term: its state may hold decisions that were never stored. The next leader loads what is stored."""
        _log.exception("leader epoch %s gives up", self.epoch)
        self._finish(why)

    def _wake(self) -> None:
        self._alarm = self._loop.call_later(WAKE_SECONDS, self._wake)
        self.feed(Wake())

    def resign(self, reason: str) -> None:
        """End the term because another node is known to lead."""
        self._finish(reason)

    def _finish(self, reason: str) -> None:
        if not self.over.done():
            self.over.set_result(reason)

    # Effects.

    def _carry_out(self, effect: OrderEffect) -> None:
        match effect:
            case Send():
                self._ways.send(effect.node, effect.message, may_wait=effect.may_wait)
            case Store():
                # Not at once, to avoid recursion: one write may lead to the next.
                self._writing_since = self._loop.time()
                self._loop.call_soon(self._begin_write, effect)
            case Reply():
                outcome = self._waiting.pop(effect.request_id, None)
                if outcome is not None:
                    outcome(effect.outcome)
            case Compact():
                if self._trimming is None or self._trimming.done():
                    self._trimming = self._loop.create_task(self._trim(effect.snapshot))
            case Alarm():
                self._counters.alarms += 1
                _log.error("leader epoch %s: %s", self.epoch, effect.error)
            case StepDown():
                self._finish(effect.reason)

    def _begin_write(self, write: Store) -> None:
        """Write through ``begin_append`` if the store supports it. Otherwise, or after an error, use ``_write``."""
        self._writing_since = begun = self._loop.time()

        def told(error: Exception | None) -> None:
            if self.over.done():
                return
            if error is None:
                self._is_stored(write, self._loop.time() - begun)
            else:
                self._writing = self._loop.create_task(self._write(write))

        if self.over.done():
            return
        if not self._store.begin_append(write.leader_epoch, write.after, write.decisions, told):
            self._writing = self._loop.create_task(self._write(write))

    async def _write(self, write: Store) -> None:
        retry = STORE_RETRY_SECONDS_MIN
        while True:
            begun = self._loop.time()
            try:
                await self._store.append(write.leader_epoch, write.after, write.decisions)
            except Fenced as error:
                self._counters.fenced += 1
                _log.warning("the store refuses decision %s of leader epoch %s: %s", write.after + 1, self.epoch, error)
                self.feed(StoreRefused(error.message))
                return
            except CutwaterError as error:
                if not error.retriable or isinstance(error, Damaged):
                    self._finish(f"the store cannot take decision {write.after + 1}: {error.message}")
                    return
                _log.warning("the store did not take decision %s, trying again: %s", write.after + 1, error)
                await asyncio.sleep(retry)
                retry = min(retry * 2, STORE_RETRY_SECONDS_MAX)
                continue
            except Exception as error:
                self._give_up(f"a bug: {error!r}")
                return
            break
        self._is_stored(write, self._loop.time() - begun)

    def _is_stored(self, write: Store, seconds: float) -> None:
        self._writing_since = None
        for decision in write.decisions:
            if not isinstance(decision, Cut):
                self.publish_addresses()
                break
        self.feed(Stored(DecisionIndex(write.after + len(write.decisions))))
        self._counters.stored(seconds, write.decisions)

    def publish_addresses(self) -> None:
        """Tell storage nodes the addresses and keys of their peers. All of the state is stored by now."""
        state, before = self.layer.state, self._ways.servers
        nodes = state.nodes.values()
        now = Addresses(
            {node.node: node.address for node in nodes if node.address},
            {node.node: node.server_key for node in nodes if node.server_key},
            before.metadata_keys,
            before.revision,
        )
        if now != before:
            self._ways.learn(structs.replace(now, revision=state.revision))

    async def _trim(self, snapshot: Snapshot) -> None:
        try:
            await self._store.trim(self.epoch, snapshot)
        except CutwaterError as error:
            # The next trim includes what was not trimmed now.
            _log.warning("the store could not be trimmed to decision %s: %s", snapshot.index, error)
