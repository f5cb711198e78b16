"""A whole simulated cluster, from set-up through faults to the final inspection."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from msgspec import Struct

from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.request_handling import catalog
from cutwater.core.requests import AddNodeRequest, Created, CreateTopicRequest, UnsealRequest
from cutwater.errors import Damaged
from cutwater.testing.checkers.guarantees import Evidence, ReplicaDump, check_all
from cutwater.testing.checkers.record import SimOutcome
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.simulator import rollback
from cutwater.testing.simulator.clients import (
    Appender,
    CursorKeeper,
    Operator,
    Reader,
    SimClient,
    SimProducer,
    Subscriber,
)
from cutwater.testing.simulator.nemesis import Nemesis
from cutwater.testing.simulator.options import Options
from cutwater.testing.simulator.servers.disk import is_intact
from cutwater.testing.simulator.servers.metadata_node import SimMetadataNode
from cutwater.testing.simulator.servers.storage_node import SimStorageNode
from cutwater.testing.simulator.servers.store import SimulatedStore
from cutwater.testing.simulator.sinks import Sink
from cutwater.testing.simulator.world import Process, World
from cutwater.types import (
    GLSN,
    LLSN,
    MILLISECOND,
    SECOND,
    CommitContext,
    LogStreamId,
    MetadataNodeId,
    ReplicaState,
    StorageNodeId,
)

SETUP_US = 3 * SECOND
RECOVERY_US = 6 * SECOND
"""After the faults end, appends succeed and replicas converge within this time."""
CALLS_END_US = 700 * MILLISECOND
"""Longer than any call of a client, so that nothing is in flight any more."""
HISTORY_RANGES_MAX = 150


class Result(Struct, frozen=True):
    """The outcome of one simulation: statistics, and the violation if there was one."""

    seed: int
    options: Options
    trace_hash: str
    events: int
    violation: str | None
    guarantee: str | None
    appends: dict[str, int]
    high_watermark: GLSN
    cuts: int
    leaders: int
    seals: int


class SimCluster:
    topic = "t"
    second_topic = "u"
    """Created at the beginning too, if there are sinks: they publish to both topics."""

    def __init__(self, seed: int, options: Options) -> None:
        self.options = options
        self.world = World(seed, options)
        self.record = self.world.record
        self.store = SimulatedStore(self.world)
        self.world.stored_high_watermark = lambda: self.store.high_watermark
        self.storage_nodes: list[SimStorageNode] = []
        for _ in range(options.storage_nodes):
            self.add_storage_node(start=False)
        self.metadata_nodes = [
            SimMetadataNode(self.world, MetadataNodeId(i + 1), self.store) for i in range(options.metadata_nodes)
        ]
        self.clients: list[SimClient] = []
        self.producers: list[SimProducer] = []
        self.sinks: list[Sink] = []
        self.topics = (self.topic, self.second_topic) if options.sinks else (self.topic,)
        self.operator = Operator(self.world)
        self.nemesis = Nemesis(self)
        self.world.on_death = self.nemesis.revive
        self._created: set[str] = set()

    def add_storage_node(self, *, start: bool = True) -> SimStorageNode:
        number = StorageNodeId(len(self.storage_nodes) + 1)
        node = SimStorageNode(self.world, number)
        self.storage_nodes.append(node)
        if start:
            node.start()
        return node

    def add_producer(self, name: str, topic: str = topic) -> None:
        producer = SimProducer(self.world, name, topic)
        self.producers.append(producer)
        self.clients.append(producer)
        producer.start()

    def add_sink(self, name: str) -> None:
        sink = Sink(self.world, name, self.topics)
        self.sinks.append(sink)
        self.clients.append(sink)
        sink.start()

    def leader(self) -> OrderLayer | None:
        """Return the order layer that leads according to the store."""
        for node in self.metadata_nodes:
            if node.alive and node.order is not None and node.order.leader_epoch == self.store.leader_epoch:
                return node.order
        return None

    # Phases.

    def run(self) -> None:
        self._set_up()
        self._start_clients()
        self.nemesis.start()
        self.world.run_until(self.world.now + self.options.duration_us)
        self.nemesis.stop()
        if self.options.roll_back_store and not rollback.run(self):
            return
        self._recover()
        self._inspect()

    def _set_up(self) -> None:
        servers: list[Process] = [*self.metadata_nodes, *self.storage_nodes, self.operator]
        self.world.healing = True
        for process in servers:
            process.start()
        for node in self.storage_nodes:
            self.operator.insist(AddNodeRequest(node.node))
        for topic in self.topics:
            self.world.after(200 * MILLISECOND, self._create_topic, topic)
        if not self.world.run_until(self.world.now + SETUP_US, self._is_open):
            raise Violation("15 liveness", f"a new cluster does not open its streams: {self._explain()}")
        self.world.healing = False

    def _create_topic(self, topic: str) -> None:
        def created(outcome: Any) -> None:
            if isinstance(outcome, Created):
                self._created.add(topic)
            else:
                self.world.after(50 * MILLISECOND, self._create_topic, topic)

        streams = self.options.streams if topic == self.topic else 2
        request = CreateTopicRequest(topic, streams, self.options.replication)
        self.operator.insist(request, created)

    def _is_open(self) -> bool:
        leader = self.leader()
        if leader is None or len(self._created) < len(self.topics):
            return False
        return all(stream.is_open for stream in leader.state.streams.values())

    def _start_clients(self) -> None:
        options = self.options
        self.clients += [Appender(self.world) for _ in range(options.appenders)]
        self.clients += [Subscriber(self.world) for _ in range(options.subscribers)]
        if options.roll_back_store:
            self.clients.append(CursorKeeper(self.world))
        self.clients.append(Reader(self.world))
        for client in self.clients:
            client.start()
        for i in range(options.producers):
            self.add_producer(f"p{i + 1}")
        for i in range(options.sinks):
            self.add_sink(f"s{i + 1}" if i else "")

    def _recover(self) -> None:
        """15: after the faults end, appends succeed within seconds; 14: replicas converge."""
        healed = self.world.now
        appends = self.record.appends

        def appended() -> bool:
            return any(op.outcome is SimOutcome.OK and op.invoked >= healed for op in appends[-200:])

        self._release_streams()
        if not self.world.run_until(healed + RECOVERY_US, appended):
            raise Violation("15 liveness", f"no append succeeded after the faults ended: {self._explain()}")
        if not self.world.run_until(self.world.now + RECOVERY_US, self._all_is_used):
            raise Violation("15 liveness", f"running appenders do not know of open log streams: {self._unused()}")
        for client in self.clients:
            client.stopping = True
        self.world.run_until(self.world.now + CALLS_END_US)
        if not self.world.run_until(self.world.now + RECOVERY_US, self._has_converged):
            raise Violation("14 converge", f"the cluster does not come to rest: {self._explain()}")
        self._scrub()

    def _all_is_used(self) -> bool:
        return not self.world.events % 20 and not self._unused()

    def _unused(self) -> list[tuple[int, LogStreamId]]:
        """Return the appenders that do not know that a log stream is open in its current epoch."""
        leader = self.leader()
        if leader is None:
            return [(0, LogStreamId(0))]
        streams = [(stream.stream, stream.epoch) for stream in leader.state.streams.values() if stream.is_open]
        unused = []
        for client in self.clients:
            if isinstance(client, Appender):
                known = {(info.stream, info.epoch) for info in client.catalog.streams if info.is_open}
                unused += [(client.number, stream) for stream, epoch in streams if (stream, epoch) not in known]
        return unused

    def _release_streams(self) -> None:
        """Unseal what operators sealed."""
        leader = self.leader()
        for stream in leader.state.streams.values() if leader else ():
            if stream.held and not stream.final:
                self.operator.request(UnsealRequest(stream.stream))
        self.world.after(100 * MILLISECOND, self._release_streams)

    def _has_converged(self) -> bool:
        if self.world.events % 20:
            return False
        leader = self.leader()
        return leader is not None and self._unrest(leader) is None

    def _unrest(self, leader: OrderLayer) -> str | None:
        """Return the first condition of the final state that does not hold yet, or None."""
        state = leader.state
        nodes = {node.node: node for node in self.storage_nodes}
        for stream in state.streams.values():
            if stream.final:
                for node in stream.replicas:
                    replica = nodes[node].replicas.get(stream.stream)
                    if replica is None or replica.state is not ReplicaState.SEALED:
                        return f"the finished log stream {stream.stream} on storage node {node} is not complete"
                continue
            if not stream.is_open or set(stream.members) != set(stream.replicas):
                return f"log stream {stream.stream}: {leader.explanations.get(stream.stream)} {stream}"
            for node in stream.members:
                replica = nodes[node].replicas.get(stream.stream)
                if replica is None or replica.state is not ReplicaState.RUNNING:
                    return f"log stream {stream.stream} on storage node {node} does not run"
                if not replica.durable_committed_end == replica.written_end == stream.committed_end:
                    return f"log stream {stream.stream} on storage node {node} is not at {stream.committed_end}"
        for producer in self.producers:
            if producer.session.unsettled and not producer.session.is_over:
                return f"producer {producer.number} has unsettled batches in {producer.session.phase}"
        for run in state.runs.publishing:
            return f"batch {run.batch} of run {run.run} is not published: {run.unpublished}"
        for holder in self.storage_nodes:
            if holder.staging.parts:
                return f"storage node {holder.node} still has {holder.staging.parts}"
        kept = sum(len(history) for history in state.histories.values())
        if kept > sum(1 for stream in state.streams.values() if stream.final):
            return f"the commit history still has {kept} ranges"
        last = max((stream.last_glsn for stream in state.streams.values()), default=GLSN(0))
        for number, seen in self.record.subscribers.items():
            if seen.through < last:
                return f"subscriber {number} stands at {seen.through} of {last}"
        for node_id in state.nodes:
            left = [stream for stream in nodes[node_id].disks if state.was_deleted(stream)]
            if left:
                return f"storage node {node_id} still holds {left} of deleted topics"
        return None

    def _explain(self) -> str:
        leader = self.leader()
        if leader is None:
            return "no metadata node leads"
        if leader.halted is not None:
            return str(leader.halted)
        return self._unrest(leader) or f"{leader.explanations}"

    def _scrub(self) -> None:
        """13: damage is repaired from a peer. Every node verifies what it holds, as ``verify`` does."""

        def damaged() -> list[tuple[SimStorageNode, LogStreamId, LLSN]]:
            found = []
            for node in self.storage_nodes:
                for stream, disk in node.disks.items():
                    if node.node in self._replicas(stream):
                        replica = node.replicas[stream]
                        disk.drop_before(replica.hard_state.trimmed_before, replica.durable_committed_end)
                        found += [(node, stream, llsn) for llsn in disk.damaged()]
            return found

        for _ in range(20):
            bad = damaged()
            if not bad:
                return
            for node, stream, llsn in bad:
                node.fetch_copy(stream, llsn)
            self.world.run_until(self.world.now + 50 * MILLISECOND)
        raise Violation("13 damage", f"not repaired: {[(n.node, s, llsn) for n, s, llsn in damaged()]}")

    def _replicas(self, stream: LogStreamId) -> tuple[StorageNodeId, ...]:
        leader = self.leader()
        info = leader.state.streams.get(stream) if leader is not None else None
        return info.replicas if info is not None else ()

    # Inspection.

    def _inspect(self) -> None:
        leader = self.leader()
        assert leader is not None
        state = leader.state
        for metadata_node in self.metadata_nodes:
            if metadata_node.history_max > HISTORY_RANGES_MAX:
                raise Violation("16 bounded", f"{metadata_node.history_max} ranges were kept")
        dumps: dict[LogStreamId, list[ReplicaDump]] = {}
        for stream in state.streams.values():
            nodes = [self.storage_nodes[node - 1] for node in stream.replicas]
            dumps[stream.stream] = [self._dump(node, stream.stream) for node in nodes]
        applied: dict[LogStreamId, list[CommitContext]] = {}
        for node in self.storage_nodes:
            for lsid, contexts in node.applied.items():
                applied.setdefault(lsid, []).extend(contexts)
        for op in self.record.appends:
            if op.outcome is SimOutcome.PENDING:
                op.outcome = SimOutcome.UNKNOWN
        last = max((info.last_glsn for info in catalog(state).streams), default=GLSN(0))
        check_all(Evidence(self.store.decisions, self.record, dumps, applied, self.world.written, last))

    def _dump(self, node: SimStorageNode, stream: LogStreamId) -> ReplicaDump:
        disk, replica = node.disks[stream], node.replicas[stream]
        committed = replica.durable_committed_end
        return ReplicaDump(
            node.node,
            disk.first_llsn,
            committed,
            # All entries that are not trimmed were found intact.
            tuple(entry for entry in disk.entries if entry.last_llsn <= committed and is_intact(entry)),
            tuple(disk.contexts),
        )


def _judge(error: Exception) -> tuple[str, str]:
    """Return the violation, and the guarantee that it violates."""
    if isinstance(error, AssertionError):
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"assertion: {error} at {Path(last.filename).name}:{last.lineno} {last.line}", "assertion"
    if isinstance(error, Damaged):
        # Code that expects damage handles it. Anywhere else there must not be any.
        return f"damage: {error}", "13 damage"
    return f"crash: {type(error).__name__}: {error}", "crash"


def simulate(seed: int, options: Options, log: list[str] | None = None) -> Result:
    """Run one cluster to its end. Any exception other than a ``Violation`` counts as one: the core must not crash."""
    cluster = SimCluster(seed, options)
    cluster.world.log = log
    violation = guarantee = None
    try:
        cluster.run()
    except Violation as error:
        violation, guarantee = str(error), error.guarantee
    except Exception as error:
        if log is not None:
            raise
        violation, guarantee = _judge(error)
    outcomes = {outcome.value: 0 for outcome in SimOutcome}
    for op in cluster.record.appends:
        outcomes[op.outcome.value] += 1
    decisions = cluster.store.decisions
    return Result(
        seed,
        options,
        cluster.world.trace_hash(),
        cluster.world.events,
        violation,
        guarantee,
        outcomes,
        cluster.store.high_watermark,
        sum(1 for decision in decisions if type(decision).__name__ == "Cut"),
        cluster.store.leader_epoch,
        sum(1 for decision in decisions if type(decision).__name__ == "Seal"),
    )
