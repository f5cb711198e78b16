"""The nemesis: injects faults as the options say until it is told to stop; then it ends all faults."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from cutwater.core import requests as r
from cutwater.core.messages import Replicate, SealReplica
from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.state import LogStream
from cutwater.format.checksum import crc32c
from cutwater.testing.checkers.record import TrimOp
from cutwater.testing.simulator.proofs import FORGER
from cutwater.testing.simulator.protocol import Relay, ReportMessage
from cutwater.testing.simulator.servers.disk import is_intact
from cutwater.testing.simulator.servers.storage_node import SimStorageNode
from cutwater.testing.simulator.world import Address, Process
from cutwater.types import (
    GLSN,
    LLSN,
    MILLISECOND,
    Batch,
    Entry,
    EventTime,
    Incarnation,
    LeaderEpoch,
    LogStreamId,
    NodeState,
    ReplicaState,
    Report,
    StorageNodeId,
    UncommitReport,
)

if TYPE_CHECKING:
    from cutwater.testing.simulator.cluster import SimCluster


class Nemesis:
    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.rng = Random(f"nemesis/{self.world.seed}")
        self.stopped = False
        self._topics = 0
        self.bad_disk = StorageNodeId(self.rng.randint(1, cluster.options.storage_nodes))
        self.forgetful = StorageNodeId(self.bad_disk % cluster.options.storage_nodes + 1)
        """A different node than the one with the bad disk."""

    def start(self) -> None:
        options = self.cluster.options
        for every_us, strike in (
            (options.partition_every_us, self._partition),
            (options.crash_storage_every_us, self._crash_storage),
            (options.crash_metadata_every_us, self._crash_metadata),
            (options.crash_all_storage_every_us, self._crash_all_storage),
            (options.pause_every_us, self._pause),
            (options.bit_flip_every_us, self._flip_bit),
            (options.disk_full_every_us, self._fill_disk),
            (options.lost_state_every_us, self._lose_state),
            (options.clock_jump_every_us, self._jump_clock),
            (options.seal_every_us, self._seal),
            (options.finalize_every_us, self._finalize),
            (options.replace_every_us, self._replace),
            (options.trim_every_us, self._trim),
            (options.add_stream_every_us, self._add_stream),
            (options.nodes_come_and_go_every_us, self._nodes_come_and_go),
            (options.reopen_producer_every_us, self._reopen_producer),
            (options.topics_come_and_go_every_us, self._topics_come_and_go),
            (options.crash_sink_every_us, self._crash_sink),
            (options.forge_every_us, self._forge),
        ):
            if every_us:
                self._again(every_us, strike)

    def stop(self) -> None:
        """End all faults: the network heals, disks have space, processes run again, clocks continue from there."""
        self.stopped = True
        self.world.healing = True
        self.world.blocked.clear()
        for process in list(self.world.processes.values()):
            if isinstance(process, SimStorageNode):
                process.disk_full = False
            process.resume()
            if not process.alive and process.address[0] != "client":
                process.start()
        for stream in self.cluster.operator.catalog.streams:
            if not stream.is_open and not stream.final:
                self.cluster.operator.insist(r.UnsealRequest(stream.stream))

    def _again(self, every_us: int, strike: Callable[[], None]) -> None:
        def now() -> None:
            if not self.stopped:
                strike()
                self._again(every_us, strike)

        self.world.after(int(every_us * (0.3 + 1.4 * self.rng.random())), now)

    def _later(self, low_ms: int, high_ms: int, what: Callable[[], None]) -> None:
        def now() -> None:
            if not self.stopped:
                what()

        self.world.after(self.rng.randint(low_ms, high_ms) * MILLISECOND, now)

    # The network.

    def _partition(self) -> None:
        servers = [address for address in self.world.processes if address[0] != "client"]
        one = self.rng.choice(servers)
        others = [address for address in servers if address != one]
        if self.rng.random() < 0.5:
            others = [self.rng.choice(others)]
        one_way = self.cluster.options.asymmetric_partitions and self.rng.random() < 0.5
        times = self.rng.randint(2, 5) if self.cluster.options.flapping_partitions else 1
        self._cut(one, others, one_way, times)

    def _cut(self, one: Address, others: list[Address], one_way: bool, times: int) -> None:
        pairs = [(one, other) for other in others]
        if not one_way:
            pairs += [(other, one) for other in others]
        self.world.blocked.update(pairs)
        self.world.trace("partition", one, others, one_way)

        def mend() -> None:
            self.world.blocked.difference_update(pairs)
            if times > 1:
                self._later(10, 60, lambda: self._cut(one, others, one_way, times - 1))

        longest = 400 if times == 1 else 60
        self._later(10, longest, mend)

    # Processes.

    def _crash_storage(self) -> None:
        self._crash(self.rng.choice(self.cluster.storage_nodes))

    def _crash_metadata(self) -> None:
        self._crash(self.rng.choice(self.cluster.metadata_nodes))

    def _crash_all_storage(self) -> None:
        for node in self.cluster.storage_nodes:
            self._crash(node)

    def _crash(self, process: Process) -> None:
        process.kill()
        self._later(20, 500, lambda: None if process.alive else process.start())

    def revive(self, process: Process) -> None:
        """Restart a process that died by itself, also after all faults have ended."""
        delay = self.rng.randint(20, 300) * MILLISECOND
        self.world.after(delay, lambda: None if process.alive else process.start())

    def _pause(self) -> None:
        servers: list[Process] = [*self.cluster.storage_nodes, *self.cluster.metadata_nodes]
        process = self.rng.choice(servers)
        process.pause()
        self._later(50, 600, process.resume)

    # Disks and clocks.

    def _flip_bit(self) -> None:
        """Flip a bit on the one bad disk of the cluster, and only where another disk has the entry too, committed."""
        node = self.cluster.storage_nodes[self.bad_disk - 1]
        candidates = [stream for stream, disk in node.disks.items() if node.alive and disk.entries_synced]
        if not candidates:
            return
        stream = self.rng.choice(candidates)
        disk = node.disks[stream]
        entry = disk.entries[self.rng.randrange(disk.entries_synced)]
        for other in self.cluster.storage_nodes:
            copy = other.disks.get(stream) if other is not node and other.alive else None
            if copy is None:
                continue
            i = copy.index_of(entry.first_llsn)
            committed = entry.last_llsn <= copy.synced_committed_end()
            if committed and i < copy.entries_synced and copy.entries[i] == entry and is_intact(entry):
                disk.damage(entry.first_llsn)
                self.world.trace("bit flip", node.node, stream, entry.first_llsn)
                return

    def _lose_state(self) -> None:
        """Kill a node and lose one of its hard states. This happens only where another member has everything that is
        committed and does not need the data here: otherwise data would be lost by definition."""
        node, leader = self.cluster.storage_nodes[self.forgetful - 1], self.cluster.leader()
        if not node.alive or leader is None:
            return
        sound = []
        for stream in leader.state.streams.values():
            disk, replica = node.disks.get(stream.stream), node.replicas.get(stream.stream)
            others = [n for n in stream.members if n != node.node and self._runs(n, stream)]
            if disk is not None and disk.hard_state is not None and replica is not None and replica.trusted and others:
                sound.append(stream.stream)
        if sound:
            lsid = self.rng.choice(sound)
            self._crash(node)
            node.disks[lsid].lose_hard_state()
            self.world.trace("hard state lost", node.node, lsid)

    def _runs(self, node: StorageNodeId, stream: LogStream) -> bool:
        other = self.cluster.storage_nodes[node - 1]
        replica = other.replicas.get(stream.stream) if other.alive else None
        return replica is not None and replica.trusted and replica.durable_end >= stream.committed_end

    def _fill_disk(self) -> None:
        node = self.rng.choice(self.cluster.storage_nodes)
        node.disk_full = True
        self.world.trace("disk full", node.node)

        def free() -> None:
            node.disk_full = False

        self._later(50, 400, free)

    def _jump_clock(self) -> None:
        node = self.rng.choice(self.cluster.metadata_nodes)
        node.clock_offset += self.rng.choice((-1, 1)) * self.rng.choice((10, 1_000, 60_000)) * MILLISECOND

    # Operations.

    def _some_stream(self) -> LogStreamId | None:
        streams = [info.stream for info in self.cluster.operator.catalog.streams if not info.final]
        self.cluster.operator.refresh()
        return self.rng.choice(streams) if streams else None

    def _seal(self) -> None:
        stream = self._some_stream()
        if stream is not None:
            self.cluster.operator.request(r.SealRequest(stream))
            self._later(30, 300, lambda: self.cluster.operator.insist(r.UnsealRequest(stream)))

    def _finalize(self) -> None:
        """Seal a stream permanently; another stream takes its place."""
        stream = self._some_stream()
        if stream is not None:
            operator = self.cluster.operator

            def added(outcome: object) -> None:
                if isinstance(outcome, r.Created):
                    operator.request(r.SealRequest(stream, final=True))

            operator.request(r.AddStreamRequest(self.cluster.topic), added)

    def _replace(self) -> None:
        stream = self._some_stream()
        info = self.cluster.operator.stream(stream) if stream is not None else None
        if info is None:
            return
        old = self.rng.choice(info.replicas)
        spare = [node.node for node in self.cluster.storage_nodes if node.node not in info.replicas]
        if not spare:
            return
        new = self.rng.choice(spare)
        operator = self.cluster.operator
        operator.request(r.SealRequest(info.stream))
        self._later(30, 100, lambda: operator.request(r.ReplaceRequest(info.stream, old, new)))
        self._later(110, 300, lambda: operator.insist(r.UnsealRequest(info.stream)))

    def _trim(self) -> None:
        operator = self.cluster.operator
        before = GLSN(int(operator.catalog.high_watermark * self.rng.random() * 0.7) + 1)
        topic = self.rng.choice([topic.name for topic in operator.catalog.topics] or [self.cluster.topic])

        def trimmed(outcome: object) -> None:
            if outcome is not None and not isinstance(outcome, Exception):
                self.cluster.record.trims.append(TrimOp(before, topic))

        operator.refresh()
        operator.request(r.TrimRequest(topic, before), trimmed)

    def _add_stream(self) -> None:
        """Add a stream, or change the number of streams; surplus ones are sealed permanently."""
        if self.rng.random() < 0.3:
            self.cluster.operator.request(r.ChangeTopicRequest(self.cluster.topic, streams=self.rng.randint(1, 4)))
        elif len(self.cluster.operator.catalog.streams) < 8:
            self.cluster.operator.request(r.AddStreamRequest(self.cluster.topic))

    def _nodes_come_and_go(self) -> None:
        """Add a new node, or try to remove one; the order layer refuses removals that would lose data."""
        operator = self.cluster.operator
        if len(self.cluster.storage_nodes) < 6 and self.rng.random() < 0.5:
            node = self.cluster.add_storage_node()
            operator.insist(r.AddNodeRequest(node.node))
        else:
            operator.request(r.RemoveNodeRequest(self.rng.choice(self.cluster.storage_nodes).node))

    def _reopen_producer(self) -> None:
        """Open a producer's name a second time while the old holder continues unaware."""
        if self.cluster.producers and len(self.cluster.producers) < 6:
            old = self.rng.choice(self.cluster.producers).session
            self.cluster.add_producer(old.producer, old.topic)

    def _crash_sink(self) -> None:
        """Kill a driver; it comes back with its checkpoint, or not at all. Or start its query again with a new
        checkpoint while the old one continues unaware."""
        if not self.cluster.sinks:
            return
        sink = self.rng.choice(self.cluster.sinks)
        if self.rng.random() < 0.3 and len(self.cluster.sinks) < 6:
            self.cluster.add_sink(sink.name)
            return
        sink.kill()
        if self.rng.random() < 0.9:
            self._later(10, 200, lambda: None if sink.alive else sink.start())

    def _topics_come_and_go(self) -> None:
        """Create and delete topics besides those that always exist."""
        operator, options = self.cluster.operator, self.cluster.options
        others = [topic.name for topic in operator.catalog.topics if topic.name not in self.cluster.topics]
        operator.refresh()
        if len(others) > 1 or (others and self.rng.random() < 0.5):
            operator.request(r.DeleteTopicRequest(self.rng.choice(others)))
            return
        self._topics += 1
        name = f"{self.cluster.topic}{self._topics}"

        def created(outcome: object) -> None:
            if isinstance(outcome, r.Created) and len(self.cluster.producers) < 6:
                self.cluster.add_producer(f"producer of {name}", name)

        operator.request(r.CreateTopicRequest(name, self.rng.randint(1, 2), options.replication), created)

    # A client sends messages that only servers may send.

    def _forge(self) -> None:
        leader = self.cluster.leader()
        if leader is None or not leader.state.nodes:
            return
        self.rng.choice((self._forge_reports, self._forge_leader_epoch, self._forge_entry, self._forge_order))(leader)

    def _forger(self, number: int) -> Address:
        """Return the address of a forger in the name of a storage node: with a key of its own, or without any."""
        return FORGER, number if self.rng.random() < 0.5 else 0

    def _say_to_metadata(self, node: StorageNodeId, report: Report) -> None:
        target: Address = ("mr", self.rng.randint(1, self.cluster.options.metadata_nodes))
        message = ReportMessage(report)
        forged = Relay(("mr", 0), message) if self.rng.random() < 0.3 else message
        self.world.send(self._forger(node), target, forged)

    def _forge_leader_epoch(self, leader: OrderLayer) -> None:
        node = self.rng.choice(sorted(leader.state.nodes))
        epoch = LeaderEpoch(leader.leader_epoch + 5)
        self._say_to_metadata(node, Report(node, Incarnation(1_000_000), 1, epoch, NodeState.READY, ()))

    def _forge_reports(self, leader: OrderLayer) -> None:
        """Let all members of a stream seem to have records that never existed."""
        for stream in [stream for stream in leader.state.streams.values() if stream.is_open][:1]:
            for node in stream.members:
                ur = UncommitReport(
                    stream.stream,
                    stream.epoch,
                    ReplicaState.RUNNING,
                    leader.state.high_watermark,
                    LLSN(stream.committed_end + 1),
                    3,
                )
                epoch = leader.leader_epoch
                self._say_to_metadata(node, Report(node, Incarnation(1_000_000), 1, epoch, NodeState.READY, (ur,)))

    def _forge_entry(self, leader: OrderLayer) -> None:
        node = self.rng.choice(self.cluster.storage_nodes)
        for lsid, replica in list(node.replicas.items())[:1]:
            body = b"forged"
            batch = Batch(1, body, crc32c(body), EventTime(1), EventTime(1))
            entry = Entry(LLSN(replica.written_end + 1), replica.hard_state.epoch, batch)
            others = [other.node for other in self.cluster.storage_nodes if other is not node]
            self.world.send(self._forger(self.rng.choice(others)), node.address, Replicate(lsid, entry))

    def _forge_order(self, leader: OrderLayer) -> None:
        """Send a seal that was never decided, from a leader that does not exist."""
        for stream in [stream for stream in leader.state.streams.values() if stream.is_open][:1]:
            epoch = LeaderEpoch(leader.leader_epoch + 5)
            for node in stream.members:
                seal = SealReplica(stream.stream, epoch, stream.epoch, stream.committed_end)
                self.world.send(self._forger(node), ("sn", node), seal)
