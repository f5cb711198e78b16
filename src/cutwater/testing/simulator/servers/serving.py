"""Serves from the disks of a simulated storage node: records to readers, and missing data to peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutwater.core.messages import SyncBegin, SyncEnd, SyncEntries, SyncFailed, SyncRequest
from cutwater.core.read.commit_index import context_of_llsn, first_llsn_at_or_after
from cutwater.core.read.merge_reader import CommittedBatch, ReadAnswer
from cutwater.core.replica.replica import Replica
from cutwater.core.replica.sync_ranges import Extent, missing_entries, plan_sync
from cutwater.errors import CutwaterError, Damaged, Trimmed, Unavailable
from cutwater.format.errors import DamagedEntries
from cutwater.testing.simulator.protocol import CopyCall, CopyReturn, ReadCall, SyncStart
from cutwater.testing.simulator.servers.disk import is_intact
from cutwater.testing.simulator.servers.segment_disk import Disk
from cutwater.testing.simulator.world import Address
from cutwater.types import GLSN, LLSN, Entry, LogStreamId, ReplicaState

if TYPE_CHECKING:
    from cutwater.testing.simulator.servers.storage_node import SimStorageNode

SYNC_ENTRIES_MAX = 16


class SimServing:
    """Serves one node. Holds no state itself."""

    def __init__(self, node: SimStorageNode) -> None:
        self._node = node

    def read(self, call: ReadCall) -> ReadAnswer:
        replica, disk = self._node.replica_of(call.stream), self._node.disks[call.stream]
        if not replica.trusted or replica.state is ReplicaState.LEARNING:
            raise Unavailable(f"storage node {self._node.node} is still learning log stream {call.stream}")
        if call.from_glsn < replica.hard_state.trimmed_before:
            raise Trimmed(call.from_glsn, replica.hard_state.trimmed_before)
        runs: list[CommittedBatch] = []
        llsn = first_llsn_at_or_after(disk.contexts, call.from_glsn)
        for entry in disk.entries_from(llsn) if llsn is not None else ():
            if len(runs) == call.runs_max or entry.last_llsn > self._readable_end(replica):
                break
            if not is_intact(entry):
                self._node.fetch_copies(call.stream, entry.first_llsn, entry.last_llsn)
                if not runs:
                    raise Damaged(f"log stream {call.stream} at LLSN {entry.first_llsn} fails its checksum here")
                break
            runs.append(self._run_of(call.stream, entry))
            llsn = LLSN(entry.last_llsn + 1)
        more = llsn is not None and llsn <= min(replica.committed_end, disk.end)
        through = replica.complete_through
        if more:
            through = min(through, runs[-1].last_glsn) if runs else GLSN(0)
        return ReadAnswer(call.stream, tuple(runs), through, replica.revision)

    def _run_of(self, stream: LogStreamId, entry: Entry) -> CommittedBatch:
        context = context_of_llsn(self._node.disks[stream].contexts, entry.first_llsn)
        assert context is not None
        return CommittedBatch(stream, entry.first_llsn, context.glsn_of(entry.first_llsn), context.time, entry.batch)

    def _readable_end(self, replica: Replica) -> LLSN:
        """Return the last LLSN that may be served: only committed records are."""
        return replica.committed_end

    def sync(self, target: Address, request: SyncRequest) -> None:
        stream, attempt = request.stream, request.attempt
        try:
            replica, disk = self._node.replica_of(stream), self._node.disks[stream]
            if not replica.trusted or replica.state is ReplicaState.LEARNING:
                raise Unavailable(f"storage node {self._node.node} is itself learning log stream {stream}")
            plan = plan_sync(replica.extent, request.extent)
            parts = self._parts_to_copy(stream, attempt, disk, plan.copy) if not plan.copy.empty else []
            running = disk.running_before(plan.copy.first)
        except DamagedEntries as error:
            # The entry before those to copy is needed for the event time reached there.
            self._node.fetch_copies(stream, error.first_llsn, error.last_llsn)
            self._node.send(target, SyncFailed(stream, attempt, error.message))
            return
        except CutwaterError as error:
            self._node.send(target, SyncFailed(stream, attempt, error.message))
            return
        base = context_of_llsn(disk.contexts, LLSN(plan.copy.first - 1))
        base_glsn = base.high_watermark if base else replica.hard_state.base_glsn
        self._node.send(target, SyncStart(SyncBegin(stream, attempt, plan, base_glsn), running))
        for part in parts:
            self._node.send(target, part)
        first = plan.restart_at or LLSN(request.extent.end + 1)
        contexts = tuple(c for c in disk.contexts if c.last_llsn >= first - 1 and c.last_llsn <= replica.committed_end)
        dedup = replica.dedup.checkpoint(replica.committed_end)
        self._node.send(target, SyncEnd(stream, attempt, contexts, dedup, replica.hard_state.trimmed_before))

    def _parts_to_copy(self, stream: LogStreamId, attempt: int, disk: Disk, copy: Extent) -> list[SyncEntries]:
        """Return the entries to copy. Unreadable ones are named instead: the learner may have kept them."""
        parts: list[SyncEntries] = []
        entries: list[Entry] = []
        for entry in disk.entries_from(copy.first):
            if entry.last_llsn > copy.end:
                break
            if len(entries) == SYNC_ENTRIES_MAX:
                parts.append(SyncEntries(stream, attempt, tuple(entries)))
                entries = []
            if is_intact(entry):
                entries.append(entry)
                continue
            self._node.fetch_copies(stream, entry.first_llsn, entry.last_llsn)
            missing = missing_entries(list(disk.contexts), entry.first_llsn, entry.last_llsn)
            parts.append(SyncEntries(stream, attempt, tuple(entries), missing))
            entries = []
        return [*parts, SyncEntries(stream, attempt, tuple(entries))]

    def copy(self, source: Address, call: CopyCall) -> None:
        replica, disk = self._node.replica_of(call.stream), self._node.disks[call.stream]
        entry = next(disk.entries_from(call.llsn), None)
        if entry is not None and entry.last_llsn <= replica.committed_end and is_intact(entry):
            self._node.send(source, CopyReturn(call.stream, entry, disk.running_before(entry.first_llsn)))
