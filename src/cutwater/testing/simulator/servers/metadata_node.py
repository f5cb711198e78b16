"""A simulated metadata node: follower or leader, driving the order layer of the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cutwater.core.messages import GroupOutcome
from cutwater.core.order import events as e
from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.options import OrderOptions
from cutwater.core.order.state import OrderState
from cutwater.errors import CutwaterError, NotLeader, OrderLayerLostMemory, ProtocolViolation
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.simulator import protocol as p
from cutwater.testing.simulator.servers.storage_node import SimStorageNode
from cutwater.testing.simulator.servers.store import SimulatedStore
from cutwater.testing.simulator.world import Address, Process, World
from cutwater.types import MILLISECOND, DecisionIndex, Instant, LeaderEpoch, MetadataNodeId, StorageNodeId

WAKE_EVERY_US = 25 * MILLISECOND
HEARTBEAT_EVERY_US = 30 * MILLISECOND
ELECTION_AFTER_US = 120 * MILLISECOND
STORE_RETRY_US = 60 * MILLISECOND
RELAY_FRESH_US = 300 * MILLISECOND
SHARED_TURN_US = MILLISECOND // 2
"""How long the leader may collect events before its turn."""

WAIT_US_MAX = 5 * MILLISECOND
"""Maximum delay of messages that may wait."""

ORDER_OPTIONS = OrderOptions(
    node_dead_after_us=250 * MILLISECOND,
    reopen_patience_us=60 * MILLISECOND,
    retry_us_min=80 * MILLISECOND,
    retry_us_max=640 * MILLISECOND,
    tick_us_min=100 * MILLISECOND,
    tick_us_max=800 * MILLISECOND,
    compact_every_decisions=16,
    replace_node_after_us=600 * MILLISECOND,
    replace_stream_after_us=400 * MILLISECOND,
    publish_again_us=40 * MILLISECOND,
    publish_wait_us=200 * MILLISECOND,
    first_reports_wait_us=200 * MILLISECOND,
    staged_expire_after_us=500 * MILLISECOND,
)
"""As in a real cluster, only much faster, so that much happens in a few simulated seconds."""


class SimMetadataNode(Process):
    """A metadata node. Everything here is volatile: durable data is in the store."""

    def __init__(self, world: World, node: MetadataNodeId, store: SimulatedStore) -> None:
        super().__init__(world, ("mr", node))
        self.node, self.store = node, store
        self.clock_offset = 0
        self.history_max = 0
        self.races_lost = 0
        """How often another node took over first."""
        self._reset()

    def _reset(self) -> None:
        self.order: OrderLayer | None = None
        self._leader: tuple[LeaderEpoch, MetadataNodeId] = (LeaderEpoch(0), self.node)
        self._leader_heard = self.world.now
        self._callers: dict[int, tuple[Address, int]] = {}
        self._next_request = 0
        self._via: dict[StorageNodeId, dict[MetadataNodeId, int]] = {}
        self._write: e.Store | None = None
        self._is_turn_due = False
        self._waiting: dict[StorageNodeId, list[e.Send]] = {}

    def instant(self) -> Instant:
        return Instant(self.world.now, self.world.now + 1_700_000_000_000_000 + self.clock_offset)

    # Life.

    def on_start(self) -> None:
        self._reset()
        self.after(WAKE_EVERY_US, self._wake)
        self.after(self._election_delay() if self.lives > 1 or self.node > 1 else 0, self._elect)

    def _election_delay(self) -> int:
        return ELECTION_AFTER_US + int(self.world.rng.random() * ELECTION_AFTER_US)

    def _wake(self) -> None:
        self.after(WAKE_EVERY_US, self._wake)
        self._feed(e.Wake())

    def _elect(self) -> None:
        """Take over when the leader has been silent for a while. Other nodes may do the same between reading the leader
        and taking over."""
        is_silent = self.world.now - self._leader_heard >= ELECTION_AFTER_US or self.store.leader_epoch == 0
        if self.order is None and is_silent:
            delay = int(self.world.rng.random() * self.world.options.store_us_max)
            self.after(delay, self._acquire, self.store.leader_epoch)
        self.after(self._election_delay(), self._elect)

    def _acquire(self, seen: LeaderEpoch) -> None:
        loaded = self.store.acquire(self.node, seen)
        if loaded is None:
            self.races_lost += 1
        else:
            self._lead(loaded.leader_epoch, OrderState(loaded.snapshot, loaded.decisions))

    def _lead(self, epoch: LeaderEpoch, state: OrderState) -> None:
        self._write = None
        self._leader = (epoch, self.node)
        self.order = OrderLayer(epoch, state, self.instant(), ORDER_OPTIONS)
        self._heartbeat(epoch)

    def _heartbeat(self, epoch: LeaderEpoch) -> None:
        if self.order is None or self.order.leader_epoch != epoch:
            return
        for other in range(1, self.world.options.metadata_nodes + 1):
            if other != self.node:
                self.send(("mr", other), p.SimHeartbeat(epoch, self.node))
        self.after(HEARTBEAT_EVERY_US, self._heartbeat, epoch)

    # Messages.

    def on_message(self, source: Address, message: Any) -> None:
        match message:
            case p.SimHeartbeat():
                if message.leader_epoch >= self._leader[0]:
                    self._leader = (message.leader_epoch, message.leader)
                    self._leader_heard = self.world.now
            case p.ReportMessage() | p.ComplaintMessage() | GroupOutcome():
                self._from_storage(source, self.node, message)
            case p.Relay():
                if message.target[0] == "sn":
                    self.send(message.target, message.message)
                else:
                    self._from_storage(message.target, MetadataNodeId(source[1]), message.message)
            case p.SimCall():
                self._call(source, message)

    def _from_storage(
        self, source: Address, via: MetadataNodeId, message: p.ReportMessage | p.ComplaintMessage | GroupOutcome
    ) -> None:
        """Handle a message of a storage node. A follower relays it; the leader takes it and remembers the way back."""
        if self.order is None:
            leader = self._leader[1]
            if via == self.node and leader != self.node:
                self.send(("mr", leader), p.Relay(("mr", 0), message))
            return
        if isinstance(message, p.ReportMessage):
            self._via.setdefault(message.report.storage_node_id, {})[via] = self.world.now
            self._hear(e.ReportArrived(message.report))
        elif isinstance(message, GroupOutcome):
            self._hear(e.GroupOutcomeArrived(message))
        else:
            self._hear(e.PeerComplaint(message.stream, message.complainer, message.peer))

    def _call(self, source: Address, call: p.SimCall) -> None:
        if self.order is None:
            self.send(source, p.Return(call.call_id, NotLeader(f"metadata node {self._leader[1]} leads")))
            return
        self._next_request += 1
        self._callers[self._next_request] = (source, call.call_id)
        self._feed(e.Asked(self._next_request, call.body))

    # The order layer.

    def _hear(self, event: e.OrderEvent) -> None:
        """Take an event. Events that arrive close together share a turn, as in a real leader."""
        self._take(event)
        if not self._is_turn_due:
            self._is_turn_due = True
            self.after(int(self.world.rng.random() * SHARED_TURN_US), self._shared_turn)

    def _shared_turn(self) -> None:
        self._is_turn_due = False
        self._turn()

    def _turn(self) -> None:
        self._drive(lambda order: order.turn(self.instant()))

    def _take(self, event: e.OrderEvent) -> None:
        self._drive(lambda order: order.take(event, self.instant()))

    def _feed(self, event: e.OrderEvent) -> None:
        """Take an event and have a turn, as a real leader does."""
        self._take(event)
        self._turn()
        if self.order is not None and isinstance(event, e.Wake):
            self._check_history(self.order.state)

    def _drive(self, step: Callable[[OrderLayer], Sequence[e.OrderEffect]]) -> None:
        if self.order is None:
            return
        try:
            effects = step(self.order)
        except ProtocolViolation as error:
            raise Violation("12 one cut sequence", str(error)) from error
        except CutwaterError as error:
            self.world.trace("refused", self.address, error.code)
            return
        for effect in effects:
            self._carry_out(effect)
        if self.order is not None:
            kept = sum(len(history) for history in self.order.state.histories.values())
            self.history_max = max(self.history_max, kept)

    def _check_history(self, state: OrderState) -> None:
        """Check that a range of an open stream is kept until every member has it on disk."""
        for lsid, stream in state.streams.items():
            contexts = state.histories[lsid].contexts()
            forgotten_end = contexts[0].first_llsn - 1 if contexts else stream.committed_end
            for node in stream.members if stream.is_open else ():
                process = self.world.processes.get(("sn", node))
                disk = process.disks.get(lsid) if isinstance(process, SimStorageNode) else None
                if disk is None or disk.hard_state is None or disk.hard_state.learning:
                    continue
                applied_end = max(disk.synced_committed_end(), disk.hard_state.base_llsn)
                if applied_end < forgotten_end:
                    raise Violation(
                        "14 converge",
                        f"commits of log stream {lsid} to {forgotten_end} were forgotten before "
                        f"storage node {node} had them, it has {applied_end}",
                    )

    def _carry_out(self, effect: e.OrderEffect) -> None:
        match effect:
            case e.Store():
                self._write = effect
                self._submit(effect)
            case e.Send():
                waiting = self._waiting.setdefault(effect.node, [])
                waiting.append(effect)
                if not effect.may_wait:
                    self._send_waiting(effect.node)
                elif len(waiting) == 1:
                    self.after(int(self.world.rng.random() * WAIT_US_MAX), self._send_waiting, effect.node)
            case e.Reply():
                source, call_id = self._callers.pop(effect.request_id, (None, 0))
                if source is not None:
                    self.send(source, p.Return(call_id, effect.outcome))
            case e.Compact():
                if self.order is not None:
                    self.store.compact(self.order.leader_epoch, effect.snapshot)
            case e.Alarm():
                self.world.trace("alarm", self.address, effect.error.code)
                if self.store.is_rolled_back and isinstance(effect.error, OrderLayerLostMemory):
                    return
                # A healthy cluster never gets here, regardless of faults.
                raise Violation("13 damage", f"alarm: {effect.error}")
            case e.StepDown():
                self.world.trace("step down", self.address)
                self.order = None
                self._leader_heard = self.world.now

    def _submit(self, write: e.Store) -> None:
        """Write, and repeat the write if no answer comes: the store recognizes a repeated one."""
        if self._write is not write or self.order is None or self.order.leader_epoch != write.leader_epoch:
            return
        life = self.lives
        self.store.append(write, lambda index: self.run(life, self._stored, (write, index)))
        self.after(STORE_RETRY_US, self._submit, write)

    def _stored(self, write: e.Store, index: DecisionIndex | None) -> None:
        if self._write is not write or self.order is None or self.order.leader_epoch != write.leader_epoch:
            return
        self._write = None
        self._feed(e.StoreRefused("another leader writes") if index is None else e.Stored(index))

    def _send_waiting(self, node: StorageNodeId) -> None:
        """Send all waiting messages in order, including one that may not wait."""
        for effect in self._waiting.pop(node, []):
            self._send_to_storage(effect)

    def _send_to_storage(self, effect: e.Send) -> None:
        """Send along the ways on which the node's last reports came: directly, or through followers."""
        ways = self._via.get(effect.node, {})
        fresh = [via for via, at in ways.items() if self.world.now - at < RELAY_FRESH_US]
        target: Address = ("sn", effect.node)
        for via in fresh or [self.node]:
            if via == self.node:
                self.send(target, effect.message)
            else:
                self.send(("mr", via), p.Relay(target, effect.message))
