"""One run of a cluster of shipped servers and clients, from its founding through faults to the final inspection."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random

from msgspec import Struct

from cutwater.admin.operations import Admin
from cutwater.core.order.decisions import Cut, Seal
from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.options import OrderOptions
from cutwater.core.replica.replica import Replica
from cutwater.errors import CutwaterError, Damaged
from cutwater.testing.checkers.access import ACCESS
from cutwater.testing.checkers.guarantees import check_all
from cutwater.testing.checkers.record import SimOutcome
from cutwater.testing.checkers.violation import Violation
from cutwater.testing.virtual import history as h
from cutwater.testing.virtual.access_workload import AccessAdmin, AccessWorld
from cutwater.testing.virtual.careful_clients import CarefulAppender, CarefulReader, PromptSubscriber
from cutwater.testing.virtual.client_checks import check_clients
from cutwater.testing.virtual.cluster import ClusterShape, VirtualCluster
from cutwater.testing.virtual.embedded_log import EmbeddedCluster, VirtualRival
from cutwater.testing.virtual.event_time import VirtualDeclarer, WatermarkReader
from cutwater.testing.virtual.evidence import EvidenceRoom
from cutwater.testing.virtual.history import ClientHistory
from cutwater.testing.virtual.hostile_clients import Forger
from cutwater.testing.virtual.jobs.job_world import SETTLE_SECONDS, JobWorld
from cutwater.testing.virtual.loop import Stuck, VirtualLoop
from cutwater.testing.virtual.machines import SimMachine
from cutwater.testing.virtual.nemesis import VirtualNemesis
from cutwater.testing.virtual.operations import (
    ReplicationChanger,
    TopicChanger,
    VirtualOperator,
    VirtualSealer,
    VirtualTrimmer,
)
from cutwater.testing.virtual.options import ShippedOptions
from cutwater.testing.virtual.publishers import WORKERS_PER_SINK, StagingWorker, VirtualSink
from cutwater.testing.virtual.readers import VirtualReader
from cutwater.testing.virtual.rollback import roll_back
from cutwater.testing.virtual.rot import ScrubWatch, VerifyWatch
from cutwater.testing.virtual.scanners import VirtualScanner
from cutwater.testing.virtual.system import run_simulated
from cutwater.testing.virtual.trace import Trace
from cutwater.testing.virtual.watchdog import Watchdog
from cutwater.testing.virtual.workload import (
    EVENT_TIME_START_US,
    PLAIN,
    TYPED,
    VirtualAppender,
    VirtualClient,
    VirtualProducer,
    VirtualSubscriber,
)
from cutwater.types import GLSN, SECOND, LogStreamId, ReplicaState, StorageNodeId

APPEND_AGAIN_SECONDS = 60.0
"""After the faults end, appends succeed within this time."""
REPLACED_SECONDS = OrderOptions().replace_node_after_us / SECOND
"""A node that does not come back is replaced after this time by the leader's clock. Until then a producer may have to
wait, which must learn the fate of what it sent to a log stream of that node."""
CONVERGE_SECONDS = 120.0
"""After the clients have stopped, replicas converge and subscribers get everything within this time."""
AHEAD_SHARE = 2.0
"""How far event times are ahead at most, as a share of the limit, if there is one."""
BACKUP_AT = 0.6
"""The part of the time with faults after which the store is copied, for clusters that get an old copy back."""
LOOK_SECONDS = 0.1
CREATE_SECONDS = 30.0
QUERIES_MAX = 2
"""Sinks have so many names; more sinks take them over."""
VERIFY_SECONDS = 0.5
"""An operator waits so long before verifying again."""
LATE_SECONDS = 3.0
"""After this time subscribers have also got the records of appends with an unknown outcome."""


class ShippedResult(Struct, frozen=True):
    """The outcome of one run: statistics, and the violation if there was one."""

    seed: int
    options: ShippedOptions
    trace_hash: str
    events: int
    violation: str | None
    guarantee: str | None
    appends: dict[str, int]
    high_watermark: int
    cuts: int
    leaders: int
    seals: int
    seconds: float
    """Virtual time at the end."""
    struck: dict[str, int] = {}
    """How often each fault struck."""
    operations: dict[str, int] = {}
    """How often each operation of clients succeeded."""


class ShippedSimulation:
    def __init__(self, seed: int, options: ShippedOptions, loop: VirtualLoop) -> None:
        self.options, self.loop = options, loop
        self.random = Random(f"simulation/{seed}")
        self.history = ClientHistory(lambda: self.cluster.store.high_watermark)
        self.cluster = self._new_cluster()
        self.refused: dict[str, int] = {}
        """Number of refused appends by the code of the error."""
        self.violations = self.history.violations
        """What clients and the watchdog found by themselves."""
        self.is_healed = False
        """Whether all faults have ended. Operators stop then, and other clients later."""
        self.is_stopping = False
        self.clients: list[VirtualClient] = []
        self.readers: list[VirtualSubscriber] = []
        self.sinks: list[VirtualSink] = []
        self.removed = 0
        """Number of storage nodes that operators have removed."""
        self.nemesis = VirtualNemesis(self, Random(self.random.getrandbits(64)))
        self.watchdog = Watchdog(self)
        self.access = AccessWorld(self) if self.options.access else None
        self.jobs = JobWorld(self, seed) if self.options.jobs else None
        for machine in self.cluster.machines:
            self.watch(machine)
        if isinstance(self.cluster, EmbeddedCluster):
            self.cluster.host.programs = self.clients

    def _new_cluster(self) -> VirtualCluster:
        options, random = self.options, Random(self.random.getrandbits(64))
        if options.embedded:
            return EmbeddedCluster(self.loop, random, self.history.violations, may_hang=bool(options.hung_syncs))
        shape = ClusterShape(
            options.storage_nodes,
            options.metadata_nodes,
            options.segment_bytes,
            options.may_wait_for_disk,
            options.store,
            options.scrub_every,
            options.min_replication,
            options.is_hasty,
            options.tells_changes,
            options.access_lease,
            options.agent_lease,
        )
        return VirtualCluster(self.loop, shape, random)

    def begin(self, machine: SimMachine) -> None:
        """Start a machine for a new storage node."""
        self.watch(machine)
        if not machine.is_running:
            machine.start()

    def watch(self, machine: SimMachine) -> None:
        """Start a machine again when its process has ended by itself."""
        machine.on_end = partial(self.nemesis.revive, machine)

    def note(self, what: str) -> None:
        self.loop.trace.say(self.loop.now, what)

    @property
    def nodes_needed(self) -> int:
        """How many storage nodes have to stay, with one for a disk that may be lost."""
        return self.options.replication + (self.options.disk_loss == "empty")

    def event_time(self) -> int:
        """An event time near the true time, in no strict order."""
        ahead = self.options.event_time_ahead * AHEAD_SHARE
        return EVENT_TIME_START_US + int((self.loop.now + self.random.uniform(-0.05, ahead)) * 1e6)

    # Phases.

    async def run(self) -> None:
        await self.cluster.found()
        await self._create_topics()
        if self.access is not None:
            await self.access.found()
        self._start_clients()
        self.nemesis.start()
        watching = self.loop.create_task(self.watchdog.watch())
        backup_at = self.options.seconds * BACKUP_AT
        await asyncio.sleep(backup_at)
        backup = self.cluster.store.copy()
        await asyncio.sleep(self.options.seconds - backup_at)
        self.nemesis.stop()
        self.is_healed = True
        if self.options.roll_back_store and not await roll_back(self, backup):
            return
        await self._recover()
        if isinstance(self.cluster, EmbeddedCluster):
            await self._open_after_a_power_cut(self.cluster)
        watching.cancel()
        self._inspect()

    async def _create_topics(self) -> None:
        process = self.cluster.new_process("creator", "127.0.3.2")

        async def create() -> None:
            log = await self.cluster.connect(CREATE_SECONDS)
            options = self.options
            ahead = timedelta(seconds=options.event_time_ahead) if options.event_time_ahead else None
            await log.create_topic(
                PLAIN, streams=options.streams, replication=options.replication, event_time_ahead_max=ahead
            )
            if options.typed_topic:
                await log.create_topic(TYPED, schema=h.TYPED, event_time="at", replication=options.replication)
            await log.close()

        await self.loop.spawn(process, create())

    def _start_clients(self) -> None:
        options = self.options
        topics = (PLAIN, TYPED) if options.typed_topic else (PLAIN,)
        for i in range(options.appenders):
            self._add(VirtualAppender(self, f"appender{i}", f"127.0.2.{i + 1}", topics[i % len(topics)]))
        for i in range(options.producers):
            self._add(VirtualProducer(self, f"producer{i}", f"127.0.2.{i + 11}"))
        for i in range(options.subscribers):
            reader = VirtualSubscriber(self, f"subscriber{i}", f"127.0.2.{i + 21}", topics[i % len(topics)])
            self.readers.append(reader)
            self._add(reader)
        self._add(VirtualReader(self, "reader", "127.0.2.31"))
        if options.trim_every:
            self._add(VirtualTrimmer(self, "trimmer", "127.0.2.32"))
        if options.change_topics_every:
            self._add(TopicChanger(self, "changer", "127.0.2.33"))
        if options.change_replication_every:
            self._add(ReplicationChanger(self, "replicator", "127.0.2.44"))
        if options.operate_every:
            self._add(VirtualOperator(self, "operator", "127.0.2.34"))
        if options.seal_every:
            self._add(VirtualSealer(self, "sealer", "127.0.2.39"))
        if options.forge_every:
            self._add(Forger(self, "forger", "127.0.2.38"))
        if options.careful:
            self._add(CarefulAppender(self, "careful appender", "127.0.2.35"))
            self._add(CarefulReader(self, "careful reader", "127.0.2.36"))
        if options.prompt_seconds:
            self._add(PromptSubscriber(self, "prompt subscriber", "127.0.2.37"))
        if options.declare_every:
            self._add(VirtualDeclarer(self, "declarer", "127.0.2.38"))
            for i in range(2):
                self._add(WatermarkReader(self, f"clock reader{i}", f"127.0.2.{i + 39}"))
        if options.scans_every:
            for i, topic in enumerate(topics):
                self._add(VirtualScanner(self, f"scanner{i}", f"127.0.2.{i + 61}", topic))
        if options.rivals_every:
            self._add(VirtualRival(self, "rival", "127.0.2.44"))
        for i in range(options.sinks):
            self._add_sink(i)
        if self.access is not None:
            self._add(AccessAdmin(self, self.access, "administrator", "127.0.3.6"))
            for user in (*self.access.users, *self.access.flooders()):
                self._add(user)
        if self.jobs is not None:
            self.jobs.start()
            for job_user in self.jobs.users:
                self._add(job_user)
        for client in self.clients:
            client.start()

    def begin_client(self, client: VirtualClient) -> None:
        """Start one more client."""
        self._add(client)
        client.start()

    def _add_sink(self, number: int) -> None:
        delay = self.random.uniform(0.0, self.options.seconds / 2) if number >= QUERIES_MAX else 0.0
        query = f"query{number % QUERIES_MAX}"
        sink = VirtualSink(self, f"sink{number}", f"127.0.2.{number + 45}", query, delay)
        self.sinks.append(sink)
        self._add(sink)
        for i in range(WORKERS_PER_SINK):
            worker = StagingWorker(self, f"worker{number}.{i}", f"127.0.2.{51 + number * WORKERS_PER_SINK + i}")
            sink.workers.append(worker)
            self._add(worker)

    def _add(self, client: VirtualClient) -> None:
        self.clients.append(client)

    async def _recover(self) -> None:
        """15: after the faults end, appends succeed within seconds; 14: replicas converge; 7: subscribers go on."""
        healed = self.loop.callbacks

        def appended() -> str | None:
            done = [op for op in self.history.appends if op.outcome is SimOutcome.OK and op.invoked >= healed]
            if not done:
                return "no append succeeded after the faults ended"
            idle = {f"producer{i}" for i in range(self.options.producers)}.difference(op.producer for op in done)
            if idle:
                return f"nothing of {min(idle)} succeeded after the faults ended"
            unused = self._open_streams().difference(op.ack.stream for op in done if op.ack is not None)
            return f"no append used log stream {min(unused)} after the faults ended" if unused else None

        releasing = self.loop.create_task(self._release_held())
        lost = REPLACED_SECONDS / (1 - self.options.drift) if self.options.disk_loss == "empty" else 0.0
        await self._until(appended, APPEND_AGAIN_SECONDS + lost, "15 liveness")
        if self.jobs is not None:
            await self._until(self.jobs.unsettled, SETTLE_SECONDS, "job liveness")
            self.jobs.freeze()
        self.is_stopping = True
        await self._until(self._unrest, CONVERGE_SECONDS, "14 converge")
        if self.options.min_replication > 1:
            await self._mend()
        await self._until(self._unread, CONVERGE_SECONDS, "7 subscribe")
        # Later records and decisions may exist whose clients heard nothing, because they were killed.
        await asyncio.sleep(LATE_SECONDS)
        await self._until(self._unfinished, CONVERGE_SECONDS, "15 liveness")
        await self._until(self._unrest, CONVERGE_SECONDS, "14 converge")
        if self.access is not None:
            await self._until(self.access.unrest, CONVERGE_SECONDS, ACCESS)
            # Servers tell the last denials.
            await asyncio.sleep(LATE_SECONDS)
            await self.access.read_audit()
            await self._until(self._unrest, CONVERGE_SECONDS, "14 converge")
        releasing.cancel()

    async def _open_after_a_power_cut(self, cluster: EmbeddedCluster) -> None:
        """3: the log is there again after a last power cut, with everything in it."""
        cluster.host.cut_power()
        cluster.host.start()
        await self._until(self._unrest, CONVERGE_SECONDS, "14 converge")

    def _open_streams(self) -> set[LogStreamId]:
        """Return the log streams that appenders have to use."""
        leader = self.cluster.leader()
        if leader is None or not self.options.appenders:
            return set()
        topic = next(topic.topic for topic in leader.state.topics.values() if topic.name == PLAIN)
        return {stream.stream for stream in leader.state.streams.values() if stream.is_open and stream.topic == topic}

    async def _mend(self) -> None:
        """13: all damage is found and repaired, by scrubs or by an operator who verifies the log."""
        if self.options.scrub_every:
            await self._until(ScrubWatch(self.cluster).problem, CONVERGE_SECONDS, "13 damage")
        else:
            watch = VerifyWatch(self.cluster)
            verifying = self.loop.create_task(watch.verify_until_clean(lambda: asyncio.sleep(VERIFY_SECONDS)))
            await self._until(watch.problem, CONVERGE_SECONDS, "13 damage")
            verifying.cancel()
        # A replica that was repaired may have been opened again.
        await self._until(self._unrest, CONVERGE_SECONDS, "14 converge")

    async def _until(self, problem: Callable[[], str | None], seconds: float, guarantee: str) -> None:
        deadline, before = self.loop.now + seconds, None
        while (what := problem()) is not None:
            if what != before:
                self.note(f"waiting: {what}")
                before = what
            if self.loop.now > deadline:
                raise Violation(guarantee, f"{what}: {self._explain()}")
            await asyncio.sleep(LOOK_SECONDS)
            self._check_complaints()

    def _check_complaints(self) -> None:
        if self.violations:
            raise self.violations[0]
        self.watchdog.check_alarms()
        if self.loop.complaints:
            # An assertion of the shipped code is a check, too.
            is_assertion = "AssertionError(" in self.loop.complaints[0]
            raise Violation("assertion" if is_assertion else "crash", self.loop.complaints[0])

    def _explain(self) -> str:
        leader = self.cluster.leader()
        if leader is None:
            return "no metadata node leads"
        return str(leader.halted) if leader.halted is not None else f"{leader.explanations}"

    def _unrest(self) -> str | None:
        """Return the first condition of the final state that does not hold yet, or None."""
        leader = self.cluster.leader()
        if leader is None:
            return "no metadata node leads"
        for op in self.history.appends:
            if op.outcome is SimOutcome.PENDING:
                return f"append {op.payload} has no outcome"
        for sink in self.sinks:
            if not sink.is_done:
                return f"{sink.name} has published nothing after the faults ended"
        for run in leader.state.runs.publishing:
            return f"batch {run.batch} of run {run.run} is decided and not published"
        return self._unrest_of(leader)

    def _unrest_of(self, leader: OrderLayer) -> str | None:
        nodes = [node for node in leader.state.nodes if not self.cluster.nodes[node - 1].is_retired]
        for stream in leader.state.streams.values():
            # A retired node that was to take the place of another one keeps its place, if there is no other node.
            replicas = [node for node in stream.replicas if not self.cluster.nodes[node - 1].is_retired]
            if stream.final:
                for node in replicas:
                    if self._state(node, stream.stream) is not ReplicaState.SEALED:
                        return f"the finished log stream {stream.stream} on storage node {node} is not complete"
                continue
            wanted = leader.state.wanted(stream.topic)
            if len(stream.members) > wanted:
                return f"log stream {stream.stream} has more than {wanted} copies: {stream}"
            # Operators may ask for more copies than there are nodes, but they leave as many as were asked for at first.
            possible = min(wanted, max(self.options.replication, len(nodes)))
            if not stream.is_open or set(stream.members) != set(replicas) or len(replicas) < possible:
                return f"log stream {stream.stream} lacks replicas: {stream}"
            for node in stream.members:
                replica = self.replica(node, stream.stream)
                if replica is None or replica.state is not ReplicaState.RUNNING:
                    return f"log stream {stream.stream} on storage node {node} does not run"
                if not replica.durable_committed_end == replica.written_end == stream.committed_end:
                    return f"log stream {stream.stream} on storage node {node} is not at {stream.committed_end}"
        return None

    def replica(self, node: StorageNodeId, stream: LogStreamId) -> Replica | None:
        server = self.cluster.node_server(node)
        driver = server.node.replicas.get(stream) if server is not None else None
        return driver.replica if driver is not None else None

    def _state(self, node: StorageNodeId, stream: LogStreamId) -> ReplicaState | None:
        replica = self.replica(node, stream)
        return replica.state if replica is not None else None

    async def _release_held(self) -> None:
        """Unseal what operators sealed and did not unseal, because they were killed or refused."""
        while True:
            leader = self.cluster.leader()
            held = [s.stream for s in leader.state.streams.values() if s.held and not s.final] if leader else []
            for stream in held:
                with suppress(CutwaterError):
                    await self.cluster.operate(partial(Admin.unseal, stream=stream), attempts=1)
            await asyncio.sleep(1.0)

    def _unread(self) -> str | None:
        for reader in self.readers:
            last = max(self.history.last_acknowledged(reader.topic), self.cluster.last_published(reader.topic))
            if last >= reader.next_glsn:
                return f"{reader.name} stands at {reader.next_glsn}, and {last} was acknowledged or published"
        return None

    def _unfinished(self) -> str | None:
        """A client that has not finished may still change the cluster."""
        return next(
            (f"{client.name} has not finished" for client in self.clients if client.has_end and not client.is_done),
            None,
        )

    # Inspection.

    def _inspect(self) -> None:
        leader = self.cluster.leader()
        assert leader is not None
        self.watchdog.check_rest(leader)
        state = leader.state
        for client in self.clients:
            client.kill()
        if self.jobs is not None:
            self.jobs.shut_down(state.jobs)
        self.cluster.shut_down()
        self._check_complaints()
        inspector = self.cluster.new_process("inspector", "127.0.3.3")
        room = EvidenceRoom(self.cluster, self.history, state)
        log = check_all(inspector.context.run(room.collect, self.readers))
        check_clients(log, self.cluster.store.history, self.history)
        if self.access is not None:
            self.access.check()
        if self.jobs is not None:
            self.jobs.check()


def simulate_shipped(seed: int, options: ShippedOptions, lines: list[str] | None = None) -> ShippedResult:
    """Run one cluster to its end. Any exception other than a ``Violation`` counts as one. ``lines`` gets the events."""
    return run_simulated(lambda loop: _simulate(seed, options, loop, lines), Random(f"loop/{seed}"), Trace(lines))


def _simulate(seed: int, options: ShippedOptions, loop: VirtualLoop, lines: list[str] | None) -> ShippedResult:
    violation = guarantee = None
    world = ShippedSimulation(seed, options, loop)
    try:
        loop.run_until_complete(world.run())
    except Violation as error:
        violation, guarantee = str(error), error.guarantee
    except Exception as error:
        if lines is not None:
            lines.append(traceback.format_exc())
        violation, guarantee = _judge(error)
    return _result(seed, world, violation, guarantee)


def _judge(error: Exception) -> tuple[str, str]:
    """Return the violation, and the guarantee that it violates."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno} {last.line}"
    if isinstance(error, Stuck):
        return f"stuck: {error}", "15 liveness"
    if isinstance(error, Damaged):
        # Code that expects damage handles it. Anywhere else there must not be any.
        return f"damage: {error}", "13 damage"
    return f"crash: {type(error).__name__}: {error} at {where}", "crash"


def _result(seed: int, world: ShippedSimulation, violation: str | None, guarantee: str | None) -> ShippedResult:
    outcomes = {outcome.value: 0 for outcome in SimOutcome}
    for op in world.history.appends:
        outcomes[op.outcome.value] += 1
    cuts = [decision for decision in world.cluster.store.history if isinstance(decision, Cut)]
    return ShippedResult(
        seed,
        world.options,
        world.loop.trace.hash,
        world.loop.callbacks,
        violation,
        guarantee,
        outcomes,
        cuts[-1].high_watermark if cuts else GLSN(0),
        len(cuts),
        world.cluster.store.epoch,
        sum(isinstance(decision, Seal) for decision in world.cluster.store.history),
        world.loop.now,
        world.nemesis.struck,
        _operations(world),
    )


def _operations(world: ShippedSimulation) -> dict[str, int]:
    history = world.history
    found = Counter("append" if op.producer is None else "produce" for op in history.appends if op.ack is not None)
    found["subscribe"] = sum(len(reader.records) for reader in world.readers)
    found["read"], found["tail"] = len(history.reads), len(history.tails)
    found["cursor"] = len(history.cursors)
    found["remove node"] = world.removed
    found["declare"] = sum(len(call.acks) for call in history.declared.values())
    found["watermark"] = len(history.watermarks)
    found["scan"] = len(history.scans)
    found["stage"], found["publish"] = len(history.staged), len(history.published)
    found.update(world.cluster.counts)
    if world.jobs is not None:
        found.update(world.jobs.notes.counts)
    return {name: count for name, count in found.items() if count}
