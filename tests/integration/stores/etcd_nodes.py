"""Metadata nodes that compete for one store on the model of etcd, while everything fails: from a seed.

Each node does with the store what a metadata node does: it takes over, loads, appends, repeats what it does not know
the outcome of, trims and dies. The judge sees every write that etcd executes and every answer that a node gets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from random import Random

from cutwater.core.order.decisions import CommitCursor, Decision
from cutwater.core.order.state import OrderState, Snapshot
from cutwater.errors import CutwaterError, LeaderFenced, Unavailable
from cutwater.metadata.stores.encoding import decode_batch, decode_leader
from cutwater.metadata.stores.etcd_store import EtcdStore, Keys
from cutwater.metadata.stores.store_interface import NO_LEADER, LeaderInfo, LoadedState
from cutwater.testing.stores.etcd_model import EtcdFaults, EtcdModel
from cutwater.testing.virtual.loop import new_loop
from cutwater.testing.virtual.trace import Trace
from cutwater.types import GLSN, ClusterId, LeaderEpoch, MetadataNodeId
from tests.integration.stores.sqlite_faults import StoreViolation

CLUSTER = ClusterId(7)
NODES = 3
RUN_SECONDS = 40.0
TIMEOUTS_MS = (30, 300, 3_000)
CALM_TIMEOUT_MS = 60_000


class Judge:
    """What is stored in truth, and what each node may therefore be told."""

    def __init__(self, model: EtcdModel) -> None:
        self.keys = Keys(model.address.prefix, CLUSTER)
        self.leader = NO_LEADER
        self.history: list[str] = []
        """The names of all decisions that were ever stored, in order."""
        self.confirmed = 0
        """How many of them some node was told to be stored, or was given by a load."""
        self.confirmed_epoch = 0
        self.leaders: set[int] = set()
        """Epochs in which some node was told to lead."""
        self.violations: list[str] = []
        model.data.changed.append(self.written)

    def written(self, revision: int, changes: Mapping[bytes, bytes | None]) -> None:
        """Hear of a write when etcd executes it. No caller would see an error; the end of the run looks for it."""
        with suppress(StoreViolation):
            if record := changes.get(self.keys.leader):
                leader = decode_leader(record, "leader")
                self.require(leader.epoch == self.leader.epoch + 1, f"{leader} follows {self.leader}")
                self.leader = leader
            for key, data in changes.items():
                if key.startswith(self.keys.decisions) and data is not None:
                    batch = decode_batch(data, key.decode())
                    self.require(batch.epoch == self.leader.epoch, f"{batch} is stored while {self.leader} leads")
                    self.require(batch.first == len(self.history) + 1, f"{batch} follows decision {len(self.history)}")
                    self.history += [name_of(decision) for decision in batch.decisions]

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)
            raise StoreViolation(what)

    def leads(self, epoch: int) -> None:
        self.require(epoch not in self.leaders, f"two nodes were told to lead in epoch {epoch}")
        self.leaders.add(epoch)
        self.saw_epoch(epoch, 0)

    def saw_epoch(self, epoch: int, at_least: int) -> None:
        self.require(at_least <= epoch <= self.leader.epoch, f"epoch {epoch} was read after epoch {at_least}")
        self.confirmed_epoch = max(self.confirmed_epoch, epoch)

    def stored(self, after: int, names: list[str]) -> None:
        end = after + len(names)
        self.require(
            self.history[after:end] == names, f"{names} was confirmed, but {self.history[after:end]} is stored"
        )
        self.confirmed = max(self.confirmed, end)

    def loaded(self, state: LoadedState, at_least: int) -> None:
        cursors = state.snapshot.cursors
        names = sorted(cursors, key=cursors.__getitem__) if state.snapshot != Snapshot() else []
        names += [name_of(decision) for decision in state.decisions]
        self.require(len(names) >= at_least, f"{len(names)} decisions were loaded after {at_least} were confirmed")
        self.stored(0, names)


class Node:
    """One metadata node. ``decisions`` are those that it believes to be stored."""

    def __init__(self, number: int, cluster: CompetingNodes) -> None:
        self.number, self.cluster = MetadataNodeId(number), cluster
        self.random, self.judge = Random(cluster.random.getrandbits(64)), cluster.judge
        self.store: EtcdStore
        self.state = OrderState()
        self.epoch = LeaderEpoch(0)
        self.given_up: set[int] = set()
        """Epochs after which it once tried to take over, without an answer; that may still happen."""

    async def live(self) -> None:
        while True:
            self.store = self.cluster.model.store(CLUSTER)
            try:
                for _ in range(self.random.randint(1, 6)):
                    await self._term()
            except Unavailable:
                self._note("gives up")
            finally:
                await self.store.close()

    async def _term(self) -> None:
        known = self.judge.confirmed_epoch
        found = await self.store.leader(timeout_ms=self._timeout())
        self.judge.saw_epoch(found.epoch, known)
        await asyncio.sleep(self.random.uniform(0.0, 3.0))
        if self.random.random() < 0.5 or not await self._lead(found):
            return
        known = self.judge.confirmed
        loaded = await self.store.load(timeout_ms=self._timeout())
        self.judge.loaded(loaded, known)
        if loaded.leader.epoch != self.epoch:
            return
        self.state = OrderState(loaded.snapshot)
        for decision in loaded.decisions:
            self.state.apply(decision)
        self._note(f"leads in epoch {self.epoch} after decision {self.state.index}")
        for _ in range(self.random.randint(0, 20)):
            if not await self._append():
                return
            if self.random.random() < 0.15:
                await self._trim()
            await asyncio.sleep(self.random.choice((0.0, 0.0, 0.01, 1.0)))

    async def _lead(self, found: LeaderInfo) -> bool:
        seen = found.epoch
        try:
            self.epoch = await self.store.acquire(self.number, f"node-{self.number}", seen, timeout_ms=self._timeout())
        except LeaderFenced:
            others = self.judge.leader.epoch > seen and (
                self.judge.leader != LeaderInfo(LeaderEpoch(seen + 1), self.number, f"node-{self.number}")
                or seen in self.given_up
            )
            self.judge.require(others, f"node {self.number} was told that it does not lead after epoch {seen}")
            return False
        except Unavailable:
            self.given_up.add(seen)
            raise
        self.judge.leads(self.epoch)
        return True

    async def _append(self) -> bool:
        after = self.state.index
        decisions: list[Decision] = []
        for index in range(after + 1, after + 1 + self.random.choice((1, 1, 3))):
            decisions.append(CommitCursor(f"{self.epoch}.{self.number}.{index}", GLSN(index)))
        while True:
            try:
                await self.store.append(self.epoch, after, tuple(decisions), timeout_ms=self._timeout())
                break
            except LeaderFenced as error:
                led_on = self.judge.leader.epoch == self.epoch
                self.judge.require(not led_on, f"node {self.number} leads, and was told: {error}")
                self._note(f"is fenced in epoch {self.epoch}")
                return False
            except Unavailable:
                if self.random.random() < 0.1:
                    raise
                await asyncio.sleep(0.01)
        self.judge.stored(after, [name_of(decision) for decision in decisions])
        for decision in decisions:
            self.state.apply(decision)
        return True

    async def _trim(self) -> None:
        try:
            await self.store.trim(self.epoch, self.state.snapshot(), timeout_ms=self._timeout())
            self._note(f"trims to {self.state.index}")
        except LeaderFenced:
            self.judge.require(self.judge.leader.epoch != self.epoch, f"node {self.number} leads and cannot trim")
        except Unavailable:
            pass

    def _timeout(self) -> int:
        return self.random.choice(TIMEOUTS_MS)

    def _note(self, text: str) -> None:
        self.cluster.note(f"node {self.number} {text}")


class CompetingNodes:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.timeline: list[str] = []

    async def run(self) -> None:
        self.model = model = EtcdModel(Random(self.random.getrandbits(64)), faults=self._some_faults())
        model.trace = self.note
        self.judge = Judge(model)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(Node(number, self).live()) for number in range(1, NODES + 1)]
            tasks.append(group.create_task(self._disturb()))
            await asyncio.sleep(RUN_SECONDS)
            for task in tasks:
                task.cancel()
        await self._settle()
        self.judge.require(not self.judge.violations, str(self.judge.violations[:1]))

    async def _settle(self) -> None:
        """Heal everything: now the store must answer, and hold everything that was confirmed."""
        model, model.faults = self.model, EtcdFaults()
        model.go_on()
        for member in model.members:
            model.rejoin(member)
            if not member.is_up:
                model.start(member)
        await asyncio.sleep(20.0)
        store = model.store(CLUSTER)
        self.judge.loaded(await store.load(timeout_ms=CALM_TIMEOUT_MS), self.judge.confirmed)
        await store.close()
        await model.close()
        self.judge.require(self.judge.confirmed > 0, "nothing was ever stored")

    def _some_faults(self) -> EtcdFaults:
        names = ("refused", "lost", "answer_lost", "reset", "disturbed", "late", "busy", "compacted")
        some = self.random.sample(names, self.random.randint(1, 4))
        return EtcdFaults(**{name: self.random.choice((0.02, 0.1)) for name in some}, delay_seconds_max=0.01)

    async def _disturb(self) -> None:
        model = self.model
        while True:
            await asyncio.sleep(self.random.uniform(1.0, 10.0))
            member = self.random.choice(model.members)
            heal: Callable[[], object]
            match self.random.choice(("kill", "cut off", "stop", "leader")):
                case "kill" if member.is_up:
                    model.kill(member)
                    heal = partial(model.start, member)
                case "cut off":
                    model.cut_off(member)
                    heal = partial(model.rejoin, member)
                case "stop":
                    model.stop()
                    heal = model.go_on
                case _:
                    model.change_leader()
                    continue
            await asyncio.sleep(self.random.uniform(0.1, 5.0))
            heal()

    def note(self, text: str) -> None:
        self.timeline.append(f"{asyncio.get_running_loop().time():9.3f} {text}")


def name_of(decision: Decision) -> str:
    assert isinstance(decision, CommitCursor)
    return decision.cursor


def run_nodes(seed: int) -> CompetingNodes:
    """Run one seed. A violation, and any error that a store should not have raised, tells how to have it again."""
    nodes = CompetingNodes(seed)
    try:
        new_loop(Random(seed), Trace()).run_until_complete(nodes.run())
    except BaseException as error:
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if not isinstance(cause, AssertionError | CutwaterError):
            raise
        timeline = "\n".join(nodes.timeline[-60:])
        raise StoreViolation(
            f"{type(cause).__name__}: {cause}\n{timeline}\nto have this again: STORE_SEED={seed} python -m pytest "
            "tests/integration/stores/test_store_faults.py"
        ) from error
    return nodes
