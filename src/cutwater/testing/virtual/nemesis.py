"""Injects faults into a running simulated cluster, and heals them all at the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING, Any

from cutwater.testing.stores.etcd_model import EtcdFaults
from cutwater.testing.virtual.machines import SimDisk, SimMachine
from cutwater.testing.virtual.rot import DiskRot
from cutwater.testing.virtual.workload import VirtualProducer
from cutwater.types import StorageNodeId

if TYPE_CHECKING:
    from cutwater.testing.virtual.simulation import ShippedSimulation

PAUSE_SECONDS_MAX = 2.0
RESTART_SECONDS_MAX = 1.5
PARTITION_SECONDS_MAX = 2.0
CUT_OFF_SECONDS_MAX = 4.0
LAG_SECONDS_MAX = 0.5
RIVALS_MAX = 6
THROTTLED_BYTES_PER_SECOND = 20_000.0


class VirtualNemesis:
    """Every kind of fault has a task of its own, in no process."""

    def __init__(self, world: ShippedSimulation, random: Random) -> None:
        self._world, self._random = world, random
        self._cluster, self._network = world.cluster, world.cluster.network
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False
        self._struck: Counter[str] = Counter()
        self._rot = DiskRot(self._cluster, world.options, random) if world.options.min_replication > 1 else None

    @property
    def struck(self) -> dict[str, int]:
        """How often each fault struck."""
        struck = Counter(self._struck)
        for machine in self._cluster.machines:
            for (fault, operation), times in machine.disk.faults.struck.items():
                struck[f"{fault} in {operation}"] += times
        if self._world.jobs is not None:
            struck.update(self._world.jobs.notes.struck)
        return dict(sorted(struck.items()))

    @property
    def rotting(self) -> SimMachine | None:
        """The storage node whose disk rots."""
        return self._rot.machine if self._rot is not None else None

    def start(self) -> None:
        options = self._world.options
        self._network.set_delay(options.delay_max)
        self._network.tears, self._network.lost_answers = options.tears, options.lost_connects
        store = self._cluster.store
        store.delay_seconds_max = options.store_delay_max
        store.lost_answers, store.failures = options.store_lost_answers, options.store_failures
        etcd = store.etcd
        if etcd is not None and options.etcd_faults:
            share = options.etcd_faults
            etcd.faults = EtcdFaults(share, share, share, share, share, share, share, share)
        self._every(options.etcd_every if etcd is not None else 0.0, self._disturb_etcd)
        for machine in self._cluster.machines:
            for rule in options.disk_rules():
                machine.disk.faults.add(rule)
            if options.drift:
                machine.set_rate(self._random.uniform(1 - options.drift, 1 + options.drift))
        self._every(options.kill_every, self._kill)
        self._every(options.power_every, self._cut_power)
        self._every(options.power_all_every, self._cut_all_power)
        self._every(options.kill_in_write_every, self._kill_in_write)
        self._every(options.pause_every, self._pause)
        self._every(options.restart_every, self._restart)
        self._every(options.roll_every, self._restart_all)
        self._every(options.clock_jump_every, self._jump_clock)
        self._every(options.partition_every, self._partition)
        self._every(options.reset_every, self._reset)
        self._every(options.half_open_every, self._half_open)
        self._every(options.throttle_every, self._throttle)
        self._every(options.lag_every, self._lag)
        self._every(options.cut_off_every, self._cut_off)
        self._every(options.reopen_producer_every, self._reopen_producer)
        self._every(options.kill_client_every, self._kill_client)
        if self._rot is not None:
            self._rot.start()
            self._every(options.rot_every, self._rot.strike)
            self._every(options.flip_every, self._rot.flip)
        if options.disk_loss:
            self._tasks.append(self._world.loop.create_task(self._lose_disk(options.disk_loss)))

    def stop(self) -> None:
        """End all faults: what is down starts again."""
        self._is_over = True
        self._say("all faults end")
        for task in self._tasks:
            task.cancel()
        self._network.set_delay(0.001)
        self._network.heal_all()
        self._cluster.store.calm()
        if self._world.jobs is not None:
            self._world.jobs.heal()
        for machine in self._cluster.machines:
            machine.disk.faults.clear()
            machine.disk.die_at = None
            machine.resume()
            if machine in self._cluster.metadata and self._cluster.store.is_near and machine.is_running:
                # After an error of the disk the database of SQLite waits for an operator who starts it again.
                machine.kill()
            if not machine.is_running:
                machine.start()
        for client in self._world.clients:
            if client.process is not None and client.process.is_dead:
                client.start()

    def revive(self, machine: SimMachine) -> None:
        """Start a machine again whose process has ended by itself."""
        self._later(self._random.uniform(0.05, 0.5), self._start, machine)

    def retire(self, machine: SimMachine) -> None:
        """Switch off a machine for good, because its storage node was removed."""
        machine.is_retired = True
        if machine.is_running:
            machine.kill()

    def _start(self, machine: SimMachine) -> None:
        if not machine.is_running:
            machine.start()

    def _say(self, what: str) -> None:
        self._world.loop.trace.say(self._world.loop.now, what)

    def _every(self, mean: float, fault: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def again_and_again() -> None:
            while True:
                await asyncio.sleep(self._random.expovariate(1 / mean))
                self._struck[fault.__name__.strip("_").replace("_", " ")] += 1
                await fault()

        if mean:
            self._tasks.append(self._world.loop.create_task(again_and_again()))

    def _later(self, seconds: float, act: Callable[..., object], *args: object) -> None:
        self._world.loop.call_later(seconds, act, *args)

    def _running(self) -> SimMachine | None:
        running = [machine for machine in self._cluster.machines if machine.is_running and not machine.is_paused]
        return self._random.choice(running) if running else None

    # Processes.

    def _down_seconds(self) -> float:
        return self._random.uniform(0.01, self._world.options.down_seconds_max)

    async def _kill(self) -> None:
        machine = self._running()
        if machine is not None:
            machine.kill()
            self._later(self._down_seconds(), self._start, machine)

    async def _kill_in_write(self) -> None:
        machine = self._running()
        if machine is not None:
            machine.kill_soon(self._random.randint(1, 30))

    async def _cut_power(self) -> None:
        machine = self._running()
        if machine is not None:
            machine.cut_power()
            self._later(self._down_seconds(), self._start, machine)

    async def _cut_all_power(self) -> None:
        for machine in self._cluster.nodes:
            if machine.is_running:
                machine.cut_power()
                self._later(self._down_seconds(), self._start, machine)

    async def _pause(self) -> None:
        machine = self._running()
        if machine is not None:
            machine.pause()
            self._later(self._random.uniform(0.0, PAUSE_SECONDS_MAX), machine.resume)

    async def _restart(self) -> None:
        machine = self._running()
        if machine is not None:
            machine.stop()

    async def _restart_all(self) -> None:
        """Stop and start all machines, each when the one before serves again, or does not for a while."""
        for machine in list(self._cluster.machines):
            if not machine.is_running or machine.is_paused:
                continue
            starts = machine.starts
            machine.stop()
            deadline = self._world.loop.now + RESTART_SECONDS_MAX
            while (machine.starts == starts or machine.server is None) and self._world.loop.now < deadline:
                await asyncio.sleep(0.02)

    async def _jump_clock(self) -> None:
        machine = self._random.choice(self._cluster.machines)
        machine.jump_clock(self._random.choice((-3600.0, -1.0, -0.01, 0.01, 1.0, 3600.0)))

    async def _kill_client(self) -> None:
        client = self._random.choice(self._world.clients)
        if client.process is not None and not client.process.is_dead:
            self._say(f"client {client.name} is killed")
            client.kill()
            self._later(self._down_seconds(), self._start_client, client)

    async def _reopen_producer(self) -> None:
        """Let another client take over the name of a producer, which goes on unaware."""
        producers = [client for client in self._world.clients if isinstance(client, VirtualProducer)]
        if producers and len(producers) < self._world.options.producers + RIVALS_MAX:
            name = self._random.choice(producers).name
            self._say(f"another client takes over {name}")
            self._world.begin_client(VirtualProducer(self._world, name, f"127.0.2.{90 + len(producers)}"))

    def _start_client(self, client: Any) -> None:
        if client.process.is_dead:
            client.start()

    # Disks.

    async def _lose_disk(self, how: str) -> None:
        """Let one storage node lose what it stored, when other nodes hold all of it."""
        seconds = self._world.options.seconds
        await asyncio.sleep(self._random.uniform(0.0, seconds / 2))
        machine = self._machine_that_loses(how)
        while machine.is_paused:
            await asyncio.sleep(0.01)
        before = machine.disk.copy()
        await asyncio.sleep(self._random.uniform(0.0, seconds / 2))
        node = StorageNodeId(self._cluster.nodes.index(machine) + 1)
        if machine.is_retired or not self._is_spare(node) or (how == "empty" and not self._is_replaceable()):
            return
        if machine.is_running:
            machine.kill()
        if how == "old":
            machine.replace_disk(before, "gets its disk back as it was")
        elif how == "empty":
            machine.replace_disk(SimDisk(machine.random, machine.disk.clock), "has lost its disk")
            machine.is_retired = True
        elif how == "state":
            self._lose_state(machine)
        else:
            self._lose_replica(machine)
        self._later(self._down_seconds(), self._start, machine)

    def _machine_that_loses(self, how: str) -> SimMachine:
        nodes = [machine for machine in self._cluster.nodes if not machine.is_retired]
        if self._rot is None:
            return self._random.choice(nodes)
        if how == "state":
            # All records stay, and may be the only copy of what another disk lost.
            return self._random.choice([machine for machine in nodes if machine is not self._rot.machine])
        # Where a disk rots, the others have the only copy of what it lost.
        return self._rot.machine

    def _is_spare(self, node: StorageNodeId) -> bool:
        """Whether every log stream of this node has another member, which then holds every committed record, and every
        part that may still be published has another holder."""
        leader = self._cluster.leader()
        if leader is None:
            return False
        own = [stream for stream in leader.state.streams.values() if node in stream.replicas]
        parts = [part for sink in self._world.sinks for part in sink.staged]
        parts += [part for run in leader.state.runs for group in run.groups for part in group.parts]
        is_staged_elsewhere = all(set(part.holders) - {node} for part in parts)
        return is_staged_elsewhere and all(stream.is_open and set(stream.members) - {node} for stream in own)

    def _is_replaceable(self) -> bool:
        """Whether enough storage nodes are left if one is lost."""
        leader = self._cluster.leader()
        nodes = (
            []
            if leader is None
            else [node for node in leader.state.nodes if not self._cluster.nodes[node - 1].is_retired]
        )
        return len(nodes) > self._world.options.replication

    def _lose_replica(self, machine: SimMachine) -> None:
        files = [path for path in machine.disk.paths() if path.parent.name.startswith("lsid=")]
        if files:
            lost = self._random.choice(files).parent
            self._say(f"{machine.name} loses {lost}")
            for path in files:
                if path.parent == lost:
                    machine.disk.unlink(path)
            machine.disk.remove_dir(lost)
            machine.disk.sync_dir(lost.parent)

    def _lose_state(self, machine: SimMachine) -> None:
        files = [path for path in machine.disk.paths() if path.name == "state" and path.parent.name.startswith("lsid=")]
        if files:
            lost = self._random.choice(files)
            self._say(f"{machine.name} loses {lost}")
            machine.disk.unlink(lost)
            machine.disk.sync_dir(lost.parent)

    # The store.

    async def _disturb_etcd(self) -> None:
        etcd = self._cluster.store.etcd
        assert etcd is not None
        member = self._random.choice(etcd.members)
        match self._random.randrange(3):
            case 0:
                etcd.change_leader()
            case 1 if member.is_up:
                etcd.kill(member)
                self._later(self._down_seconds(), lambda: None if member.is_up else etcd.start(member))
            case 2 if not member.is_cut_off:
                etcd.cut_off(member)
                self._later(self._down_seconds(), etcd.rejoin, member)

    # Network.

    def _hosts(self) -> list[str]:
        agents = [] if self._world.jobs is None else [machine.host for machine in self._world.jobs.machines]
        servers = [machine.host for machine in self._cluster.machines]
        return servers + [client.host for client in self._world.clients] + agents

    async def _partition(self) -> None:
        """Cut some hosts off from the others, both ways or one."""
        hosts = list(dict.fromkeys(self._hosts()))
        apart = self._random.sample(hosts, self._random.randint(1, max(1, len(hosts) // 2)))
        pairs = [(one, other) for one in apart for other in hosts if other not in apart]
        if not (self._world.options.one_way and self._random.random() < 0.5):
            pairs += [(other, one) for one, other in pairs]
        self._say(f"{', '.join(apart)} are cut off: {len(pairs)} lines")
        for pair in pairs:
            self._network.cut(*pair)
        self._later(self._random.uniform(0.0, PARTITION_SECONDS_MAX), self._heal, pairs)

    def _heal(self, pairs: list[tuple[str, str]]) -> None:
        self._say(f"{len(pairs)} lines are healed")
        for pair in pairs:
            self._network.heal(*pair)

    async def _cut_off(self) -> None:
        """Cut the lines between one storage node and all metadata nodes; clients reach both."""
        machine = self._random.choice(self._cluster.nodes)
        pairs = [(machine.host, other.host) for other in self._cluster.metadata]
        pairs += [(other, one) for one, other in pairs]
        self._say(f"{machine.name} is cut off from all metadata nodes")
        for pair in pairs:
            self._network.cut(*pair)
        self._later(self._random.uniform(0.0, CUT_OFF_SECONDS_MAX), self._heal, pairs)

    async def _reset(self) -> None:
        self._break(both=True)

    async def _half_open(self) -> None:
        self._break(both=False)

    def _break(self, *, both: bool) -> None:
        ends = list(self._network.transports)
        if ends:
            end = self._random.choice(ends)
            self._say(f"{end.address} loses its connection to {end.peer.address}{'' if both else ', which stays open'}")
            self._network.break_connection(end, both=both)

    async def _throttle(self) -> None:
        one, other = self._random.sample(self._hosts(), 2)
        line = self._network.line(one, other)
        self._say(f"{one} is slow to {other}")
        line.bytes_per_second = THROTTLED_BYTES_PER_SECOND

        def heal() -> None:
            line.bytes_per_second = None

        self._later(self._random.uniform(0.0, PARTITION_SECONDS_MAX), heal)

    async def _lag(self) -> None:
        one = self._random.choice(self._cluster.machines).host
        other = self._random.choice([host for host in self._hosts() if host != one])
        one, other = self._random.choice(((one, other), (other, one)))
        line = self._network.line(one, other)
        self._say(f"{one} is far from {other}")
        line.delay_seconds_max = LAG_SECONDS_MAX

        def heal() -> None:
            line.delay_seconds_max = self._network.delay_seconds_max

        self._later(self._random.uniform(0.0, PARTITION_SECONDS_MAX), heal)
