"""A disk that rots: bits on it change, blocks become unreadable, reads return wrong bytes, writes go astray.

Only the disk of one storage node of a cluster rots, and records are acknowledged only when two nodes have them
(``min_replication``). So an intact copy of everything is left, and the cluster has to find and use it: readers never
get wrong bytes, and at the end all replicas are whole again.

A write that goes astray stays in its file, and so does a wrong read: an entry does not name its log stream, so one of
another replica, from the same place of a file, would look right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from cutwater.admin.operations import Admin
from cutwater.admin.verification import Verification, verify
from cutwater.errors import CutwaterError
from cutwater.storage.format import HEADER_BYTES
from cutwater.storage.replica.segment_log import SUFFIX as ENTRIES
from cutwater.storagenode.server import StorageNodeServer
from cutwater.testing.disk_faults import DiskFault, DiskFaultRule
from cutwater.testing.virtual.cluster import VirtualCluster
from cutwater.testing.virtual.machines import SimMachine
from cutwater.types import LogStreamId, StorageNodeId

if TYPE_CHECKING:
    from cutwater.testing.virtual.options import ShippedOptions

VERIFY_MS_MAX = 10_000
PASSES_MIN = 2
"""The first of them may have begun before the damage was done."""
FLIPS_MAX = 64
BEGINNING_BYTES = 8_192
"""Header and index of a small segment, and more than the header of a file of commits."""
_ENTRIES = "*.entries"
_STREAM = re.compile(r"/lsid=(\d+)/")
WRONG_READS = (DiskFault.FLIPPED_READ, DiskFault.STALE_READ, DiskFault.MISDIRECTED_READ, DiskFault.READ_ERROR)


class DiskRot:
    """Chooses the storage node whose disk rots, and what is struck there."""

    def __init__(self, cluster: VirtualCluster, options: ShippedOptions, random: Random) -> None:
        self._cluster, self._options, self._random = cluster, options, random
        self.machine = random.choice(cluster.nodes)
        self._node = StorageNodeId(cluster.nodes.index(self.machine) + 1)

    def start(self) -> None:
        """Let reads and writes of entries go wrong."""
        disk, options = self.machine.disk, self._options
        disk.strays = 0.0
        rules = [DiskFaultRule(fault, options.wrong_reads, _ENTRIES) for fault in WRONG_READS]
        rules.append(DiskFaultRule(DiskFault.MISDIRECTED_WRITE, options.stray_writes, _ENTRIES))
        for rule in rules:
            if rule.probability:
                disk.faults.add(rule)

    async def strike(self) -> None:
        """Damage what lies on the disk: a bit, several bits of a sector, or a whole block."""
        disk, random = self.machine.disk, self._random
        paths = [path for path in disk.paths() if path.name == "node" or _stream_of(path) is not None]
        if self.machine.is_retired or not paths:
            return
        path = random.choice(paths)
        size, first = len(disk.content(path)), self._first_spare(path, paths)
        if first is None or first >= size:
            return
        at = random.randrange(first, size)
        if not first and random.random() < 0.2:
            self._say(f"the block of {path} at {at} becomes unreadable")
            disk.spoil(path, at)
            return
        bits = random.choice((1, 1, 2, FLIPS_MAX))
        self._say(f"{bits} bits of {path} change from {at} on")
        for offset in range(at, min(at + bits, size)):
            disk.flip(path, offset, random.randrange(8))

    def _first_spare(self, path: Path, paths: list[Path]) -> int | None:
        """Return where the part of a file begins that may be damaged, or None if another node does not have all of it.

        Without the beginning of the newest file of a kind, what is written to it later could not be found. Until their
        commits are on the disks of other nodes, records that are written later have only this copy of them.
        """
        stream = _stream_of(path)
        if stream is None:
            return 0
        if not is_held_elsewhere(self._cluster, stream, self._node):
            return None
        is_newest = path == max(other for other in paths if (other.parent, other.suffix) == (path.parent, path.suffix))
        return BEGINNING_BYTES if path.suffix and is_newest else 0

    async def flip(self) -> None:
        """Change one bit of an entry that was committed long ago. Nothing else is hurt, so there is no alarm."""
        disk, random = self.machine.disk, self._random
        found = sorted(path for path in disk.paths() if path.suffix == ENTRIES and "/lsid=" in str(path))
        old = [path for path, later in zip(found, found[2:], strict=False) if path.parent == later.parent]
        if self.machine.is_retired or not old:
            return
        path = random.choice(old)
        if self._first_spare(path, found) is None:
            return
        at = random.randrange(HEADER_BYTES, max(HEADER_BYTES + 1, len(disk.content(path))))
        self._say(f"a bit of {path} changes at {at}")
        disk.flip(path, at, random.randrange(8))

    def _say(self, what: str) -> None:
        self._cluster.loop.trace.say(self._cluster.loop.now, f"{self.machine.name}: {what}")


def _stream_of(path: Path) -> LogStreamId | None:
    match = _STREAM.search(str(path))
    return LogStreamId(int(match[1])) if match is not None else None


def is_held_elsewhere(cluster: VirtualCluster, stream: LogStreamId, node: StorageNodeId) -> bool:
    """Whether the disk of another node has all records of a log stream that are committed now, and their commits."""
    leader = cluster.leader()
    info = leader.state.streams.get(stream) if leader is not None else None
    if info is None:
        return False
    servers = [cluster.node_server(other) for other in info.replicas if other != node]
    drivers = [server.node.replicas.get(stream) for server in servers if server is not None]
    replicas = [driver.replica for driver in drivers if driver is not None]
    return any(one.trusted and one.durable_committed_end >= info.committed_end for one in replicas)


class ScrubWatch:
    """Waits until every storage node of the cluster has scrubbed everything, found nothing, and knows of no damage."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self._cluster = cluster
        self._begun: dict[str, tuple[object, int, int]] = {}

    def problem(self) -> str | None:
        leader = self._cluster.leader()
        if leader is None:
            return "no metadata node leads"
        # A node that was removed keeps what it has, and no other node repairs it.
        nodes = [machine for number, machine in enumerate(self._cluster.nodes, 1) if number in leader.state.nodes]
        found = [self._problem_of(machine) for machine in nodes if not machine.is_retired]
        return next((problem for problem in found if problem is not None), None)

    def _problem_of(self, machine: SimMachine) -> str | None:
        server: StorageNodeServer | None = machine.server
        if server is None:
            return f"{machine.name} does not run"
        progress = server.scrubber.progress
        begun = self._begun.get(machine.name)
        if begun is None or begun[0] is not server or begun[2] != progress.findings:
            self._begun[machine.name] = server, progress.passes, progress.findings
            return f"{machine.name} scrubs"
        if server.damage:
            return f"{machine.name} knows of damage: {server.damage[0]}"
        return None if progress.passes >= begun[1] + PASSES_MIN else f"{machine.name} scrubs"


class VerifyWatch:
    """Verifies the cluster again and again, as operators do, until nothing is found."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self._cluster = cluster
        self._found = "nothing was verified yet"

    def problem(self) -> str | None:
        return self._found or None

    async def verify_until_clean(self, pause: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while self._found:
            self._found = await self._verify()
            await pause()

    async def _verify(self) -> str:
        async def check(admin: Admin) -> Verification:
            return await verify(await admin.describe(), timeout_ms=VERIFY_MS_MAX, access=admin.access)

        try:
            checked = await self._cluster.operate(check, attempts=1)
        except CutwaterError as error:
            return error.message
        retired = {number for number, machine in enumerate(self._cluster.nodes, 1) if machine.is_retired}
        return next((str(finding) for finding in checked.findings if finding.node not in retired), "")
