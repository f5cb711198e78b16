"""One term of one leader: connects the pure order layer with the store, the clock and the channels to storage nodes.

One store write is in flight at a time. If its outcome is unknown, the same write is submitted again until it is
known: the store recognizes it. If the store says that another node leads, the term is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec import structs

from cutwater.core.access.access_decisions import AccessDecision
from cutwater.core.access.access_rules import AccessRules
from cutwater.core.order.decisions import Cut
from cutwater.core.order.events import (
    Alarm,
    Asked,
    Compact,
    GroupOutcomeArrived,
    NodeGone,
    NodeUnreachable,
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
from cutwater.core.order.origin import RequestOrigin
from cutwater.core.order.state import OrderState, Snapshot
from cutwater.core.requests import Answer, Request
from cutwater.errors import CutwaterError, Damaged, Fenced, NotLeader, ProtocolViolation, Unavailable
from cutwater.metadata.audit_writer import AuditWriter
from cutwater.metadata.counters import MetadataCounters
from cutwater.metadata.internal.program_keeper import ProgramKeeper
from cutwater.metadata.node_channels import Ways
from cutwater.metadata.retention import Connect
from cutwater.metadata.stores.store_interface import MetadataStore
from cutwater.protocol.storage_api import Addresses
from cutwater.runtime import system
from cutwater.types import SECOND, DecisionIndex, Instant, LeaderEpoch, Revision, StorageNodeId

_log = logging.getLogger(__name__)

WAKE_SECONDS = 0.05
PROBE_SECONDS = 0.2
STORE_RETRY_SECONDS_MIN = 0.01
STORE_RETRY_SECONDS_MAX = 0.5

NodeEvent = ReportArrived | PeerComplaint | GroupOutcomeArrived
"""What storage nodes tell the leader."""


def instant() -> Instant:
    return Instant(round(system.monotonic() * 1_000_000), system.wall_time_ns() // 1_000)


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
        connect: Connect,
        on_access: Callable[[AccessRules], None] = lambda rules: None,
    ) -> None:
        self.epoch = epoch
        self._on_access = on_access
        """Called with the rules of access control when a change of them is stored."""
        self._now = instant()
        """When the last event was taken in."""
        self.layer = OrderLayer(epoch, state, self._now, options)
        self._store, self._ways, self._counters, self._connect = store, ways, counters, connect
        self._stored_index = state.index
        self._access_told = state.access.revision
        self.audit = AuditWriter(state, lambda: self._stored_index, connect, self.decide)
        self.programs = ProgramKeeper(state, connect, self.decide)
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = self._loop.create_future()
        self._waiting: dict[int, asyncio.Future[Answer | CutwaterError]] = {}
        """Outcomes of requests, as values even if they are errors: the caller may be gone, and an exception would go
        unretrieved."""
        self._next_request = 0
        self._is_turn_due = False
        self._writing: asyncio.Task[None] | None = None
        self._writing_since: float | None = None
        self._trimming: asyncio.Task[None] | None = None
        self._probing: dict[StorageNodeId, asyncio.Task[None]] = {}
        self._probe_seconds_max = options.node_dead_after_us / SECOND
        self._alarm = self._loop.call_later(WAKE_SECONDS, self._wake)

    def works(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return what has to go on while this node leads."""
        return self.audit.write_for_ever(), self.programs.keep_for_ever()

    @property
    def store_delay(self) -> float:
        """How long the write in flight has been waiting for the store."""
        return 0.0 if self._writing_since is None else self._loop.time() - self._writing_since

    async def end(self, reason: str) -> None:
        """End the term. Nothing more is decided; callers that wait are told that the outcome is unknown."""
        self.finish(reason)
        self._alarm.cancel()
        tasks = [task for task in (self._writing, self._trimming, *self._probing.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Events.

    async def decide(
        self, request: Request, origin: RequestOrigin | None = None, judged_at: Revision | None = None
    ) -> Answer:
        """Decide a request, for this caller, that was judged by this revision of the access rules. Raises an error if
        the term ends first, and ``RightsChanged`` if rights were taken away since."""
        self._counters.requests += 1
        if self.over.done():
            raise NotLeader("the leader changed: ask again")
        waiting: asyncio.Future[Answer | CutwaterError] = self._loop.create_future()
        self._next_request += 1
        self._waiting[self._next_request] = waiting
        self.feed(Asked(self._next_request, request, origin, judged_at))
        either: set[asyncio.Future[Any]] = {waiting, self.over}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise Unavailable("the leader changed: it may or may not have been done")
        outcome = waiting.result()
        if isinstance(outcome, CutwaterError):
            raise outcome
        return outcome

    def feed(self, event: OrderEvent) -> None:
        self._take(event)
        for effect in self._effects_of_turn():
            self._carry_out(effect)

    def hear(self, event: NodeEvent) -> None:
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
        self.finish(why)

    def _wake(self) -> None:
        self._alarm = self._loop.call_later(WAKE_SECONDS, self._wake)
        self.feed(Wake())

    def finish(self, reason: str) -> None:
        if not self.over.done():
            self.over.set_result(reason)

    # Storage nodes that may be dead.

    def probe(self, node: StorageNodeId) -> None:
        if node not in self._probing:
            self._probing[node] = self._loop.create_task(self._probe(node))

    async def _probe(self, node: StorageNodeId) -> None:
        """Find out whether a storage node is dead. A refused connection proves that no process listens there, so no
        client can append there. Any other failure proves nothing by itself; but if the node does not answer for as long
        as a silent node takes to count as dead, it is excluded, even if it reports."""
        give_up = self._loop.time() + self._probe_seconds_max
        try:
            while not self.over.done():
                known = self.layer.state.nodes.get(node)
                if known is None or not known.address:
                    return
                try:
                    (await self._connect(node, known.address)).abort()
                    return
                except CutwaterError as error:
                    if isinstance(error.__cause__, ConnectionRefusedError):
                        _log.info("no process listens at the address of storage node %s", node)
                        self.feed(NodeGone(node))
                        return
                if self._loop.time() >= give_up:
                    _log.warning("storage node %s cannot be reached at %s", node, known.address)
                    self.feed(NodeUnreachable(node))
                    return
                await asyncio.sleep(PROBE_SECONDS)
        except Exception as error:
            self._give_up(f"a bug: {error!r}")
        finally:
            del self._probing[node]

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
                waiting = self._waiting.pop(effect.request_id, None)
                if waiting is not None:
                    waiting.set_result(effect.outcome)
            case Compact():
                if self._trimming is None or self._trimming.done():
                    self._trimming = self._loop.create_task(self._trim(effect.snapshot))
            case Alarm():
                self._counters.alarms += 1
                _log.error("leader epoch %s: %s", self.epoch, effect.error)
            case StepDown():
                self.finish(effect.reason)

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
                    self.finish(f"the store cannot take decision {write.after + 1}: {error.message}")
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
        self._stored_index = DecisionIndex(write.after + len(write.decisions))
        for decision in write.decisions:
            if not isinstance(decision, Cut):
                self.publish_addresses()
                self._publish_access(write)
                break
        self.feed(Stored(self._stored_index))
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

    def _publish_access(self, write: Store) -> None:
        """Tell the rules of access control if they have changed. The end of an assignment ends tokens, too."""
        access = self.layer.state.access
        if access.revision != self._access_told or any(isinstance(one, AccessDecision) for one in write.decisions):
            self._access_told = access.revision
            self._on_access(access.snapshot())

    async def _trim(self, snapshot: Snapshot) -> None:
        try:
            await self._store.trim(self.epoch, snapshot)
        except CutwaterError as error:
            # The next trim includes what was not trimmed now.
            _log.warning("the store could not be trimmed to decision %s: %s", snapshot.index, error)
