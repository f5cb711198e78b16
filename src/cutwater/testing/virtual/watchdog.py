"""Looks at the running servers of a simulated cluster from outside, and finds what no client could notice yet: an
alarm, a leader that believes too much, a replica that keeps too much, a commit that the leader forgot too early, a
history that is never forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from cutwater.core.order.leader import OrderLayer
from cutwater.core.order.state import LogStream
from cutwater.core.replica.replica import Replica
from cutwater.errors import ImpossibleReport
from cutwater.testing.checkers.violation import Violation
from cutwater.types import LLSN, ReplicaState, StorageNodeId, UncommitReport

if TYPE_CHECKING:
    from cutwater.testing.virtual.simulation import ShippedSimulation

RANGES_AT_REST_MAX = 2
"""How many ranges of commits of one log stream a leader still remembers when every replica has all of them."""


class Watchdog:
    def __init__(self, world: ShippedSimulation) -> None:
        self._world = world

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            leader = self._world.cluster.leader()
            if leader is not None:
                self._look_at(leader)
            await asyncio.sleep(self._world.options.look_every)

    def check_alarms(self) -> None:
        """Raise the first alarm of a server, unless a disk was lost or is rotten: no other fault justifies one."""
        alarms = self._world.loop.alarms
        options = self._world.options
        if alarms and not options.loses:
            guarantee = "13 damage" if isinstance(alarms[0], ImpossibleReport) else "12 one cut sequence"
            raise Violation(guarantee, f"alarm: {alarms[0]}")

    def check_rest(self, leader: OrderLayer) -> None:
        """Check that a leader whose cluster is at rest has forgotten what all replicas have."""
        for stream, history in leader.state.histories.items():
            if len(history) > RANGES_AT_REST_MAX:
                what = f"the leader remembers {len(history)} ranges of commits of log stream {stream}, and all is done"
                raise Violation("16 bounded", what)

    def _look_at(self, leader: OrderLayer) -> None:
        for stream in leader.state.streams.values():
            if stream.is_open:
                contexts = leader.state.histories[stream.stream].contexts()
                self._check_kept(stream, LLSN(contexts[0].first_llsn - 1) if contexts else stream.committed_end)
                self._check_belief(stream, leader._book.of_stream(stream.stream))
                self._check_excluded(stream)

    def _check_kept(self, stream: LogStream, forgotten_end: LLSN) -> None:
        """Commits of an open log stream are kept until every member has them on disk."""
        for node, replica in self._running(stream):
            if replica.durable_committed_end < forgotten_end:
                self._found(
                    "14 converge",
                    f"commits of log stream {stream.stream} to {forgotten_end} were forgotten before storage node "
                    f"{node} had them, it has {replica.durable_committed_end}",
                )

    def _check_belief(self, stream: LogStream, reports: Mapping[StorageNodeId, UncommitReport]) -> None:
        """Of no member of an open log stream the leader believes more than that member has on disk."""
        for node, replica in self._running(stream):
            ur = reports.get(node)
            if ur is not None and ur.durable_end > replica.durable_end:
                self._found(
                    "3 durable",
                    f"the leader believes that storage node {node} has log stream {stream.stream} on disk to "
                    f"{ur.durable_end}, as it was in epoch {ur.epoch}; in epoch {stream.epoch} it has it to "
                    f"{replica.durable_end}",
                )

    def _check_excluded(self, stream: LogStream) -> None:
        """A replica that is no member of the present epoch, and knows it, keeps only what is committed."""
        for node in stream.replicas:
            replica = self._world.replica(node, stream.stream)
            if node in stream.members or replica is None or replica.hard_state.epoch != stream.epoch:
                continue
            is_learning = replica.state is ReplicaState.LEARNING or replica.learner is not None
            if replica.trusted and not is_learning and replica.written_end > replica.committed_end:
                self._found(
                    "11 sealed",
                    f"storage node {node} was left out of epoch {stream.epoch} of log stream {stream.stream}, and has "
                    f"entries to {replica.written_end}, of which only those to {replica.committed_end} are committed",
                )

    def _running(self, stream: LogStream) -> Iterator[tuple[StorageNodeId, Replica]]:
        """Yield the members whose replicas run in the present epoch."""
        for node in stream.members:
            replica = self._world.replica(node, stream.stream)
            if replica is None or replica.state is not ReplicaState.RUNNING:
                continue
            if replica.hard_state.epoch == stream.epoch:
                yield node, replica

    def _found(self, guarantee: str, what: str) -> None:
        self._world.violations.append(Violation(guarantee, what))
