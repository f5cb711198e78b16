"""Runs a cluster of real processes on this machine: storage nodes, metadata nodes, and etcd for several metadata nodes.

Agents of the same machine may belong to it: ``local_agents`` starts them, and they stop with it.

Everything lies under one directory; ``cluster.json`` there says which processes belong to it and where they listen::

    {"servers": "cutwater://…", "metadata": [{"id", "pid", "address"}], "storage_nodes": [{"id", "pid", "address"}]}

The file exists before the first process, and each process is noted as soon as it is started. So the next start, and
stop, find the processes that a killed start leaves behind. A server that has not been noted yet ends by itself when it
cannot report to the starting process that it serves. Only etcd would stay, because it reports to no process.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct, field

from cutwater.admin import local_etcd
from cutwater.admin.cluster_certificates import make_certificates, owner_access, server_flags
from cutwater.admin.damage import find_damage
from cutwater.admin.free_ports import free_addresses
from cutwater.admin.operations import Admin
from cutwater.admin.status_text import why_dead
from cutwater.client.cluster.credentials import ANYONE, Access
from cutwater.client.cluster.log_directory import (
    CLUSTER_FILE,
    FILES_OF_CLUSTER,
    check_may_hold,
    holds_half_a_cluster,
    holds_log,
    other_files,
)
from cutwater.client.cluster.metadata_client import SCHEME, parse_servers
from cutwater.core.internal_topics import way_out
from cutwater.core.text import listed
from cutwater.errors import AlreadyExists, CutwaterError, InvalidArgument, NotFound, PermissionDenied, Unavailable
from cutwater.protocol.access import METADATA_NODE, STORAGE_NODE
from cutwater.protocol.errors import Unauthenticated
from cutwater.runtime import processes
from cutwater.runtime.deadlines import Deadline
from cutwater.runtime.local_files import make_directory
from cutwater.runtime.permissions import close_to_others, write_file
from cutwater.types import NodeState
from cutwater.wire.identity.server_certificates import ServerName

STOP_SECONDS = 10.0
AGENT_STOP_SECONDS = 40.0
"""How long agents may take to stop, with all their jobs."""
CLUSTER_ID = 1
ADD_SECONDS_MAX = 30.0


class ClusterMember(Struct):
    """A server process. ``flags``: additional ones for this process alone. ``started``: when it started, because pids
    are reused."""

    id: int
    pid: int
    address: str
    started: int = 0
    flags: list[str] = field(default_factory=list)


class Starter(Struct):
    """The process that starts a cluster. ``pid``: 0 if it has given up."""

    pid: int = 0
    started: int = 0


class LocalCluster(Struct):
    """The content of ``cluster.json``."""

    servers: str
    metadata: list[ClusterMember]
    storage_nodes: list[ClusterMember]
    etcd: list[local_etcd.EtcdMember] = field(default_factory=list)
    replication: int = 1
    options: dict[str, list[str]] = field(default_factory=dict)
    """The program, and additional flags by kind of process, so that each process is restarted as it was."""
    starting: Starter | None = None
    """The process that starts the cluster, or began to and did not finish; None if the cluster has been started."""
    has_tls: bool = False
    """Whether its servers have certificates of the authorities in its directory."""
    agents: list[ClusterMember] = field(default_factory=list)
    """Agents that run jobs for it. They have no address."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return parse_servers(self.servers)

    @property
    def nodes(self) -> list[ClusterMember]:
        return [*self.metadata, *self.storage_nodes]

    def processes(self) -> list[ClusterMember | local_etcd.EtcdMember]:
        return [*self.agents, *self.storage_nodes, *self.metadata, *self.etcd]

    def groups(self) -> list[tuple[str, Sequence[ClusterMember | local_etcd.EtcdMember]]]:
        """Return the processes by kind, in the order in which they are stopped."""
        return [
            ("agent", self.agents),
            ("storage node", self.storage_nodes),
            ("metadata node", self.metadata),
            ("etcd member", self.etcd),
        ]

    def running(self) -> list[int]:
        """Return the pids of the processes that run."""
        return [member.pid for member in self.processes() if is_up(member)]

    def save(self, directory: Path) -> None:
        data = msgspec.json.format(msgspec.json.encode(self), indent=2)
        temporary = directory / f"{CLUSTER_FILE}.new"
        write_file(temporary, data + b"\n")
        temporary.replace(directory / CLUSTER_FILE)


def load(directory: Path, *, may_start: bool = True) -> LocalCluster:
    """Read the description of a cluster. ``may_start``: if there is none, the error says how to start one."""
    path = directory / CLUSTER_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=LocalCluster)
    except FileNotFoundError:
        raise NotFound(_nothing_in(directory, may_start)) from None
    except (msgspec.MsgspecError, OSError) as error:
        raise InvalidArgument(f"{path} is not the description of a local cluster: {error}") from error


def _nothing_in(directory: Path, may_start: bool) -> str:
    if holds_log(directory):
        return _has_log(directory)
    is_half = holds_half_a_cluster(directory)
    told = f"there is no local cluster in {directory}"
    if is_half:
        told = f"the local cluster in {directory} has never come to run"
    if not may_start or (directory.exists() and other_files(directory, FILES_OF_CLUSTER)):
        return told
    return f"{told}: `cutwater cluster start --dir {directory}` starts {'it' if is_half else 'one there'}"


def _has_log(directory: Path) -> str:
    return (
        f"{directory} holds an embedded log, and no local cluster: commands about records and topics take --path "
        f"{directory}, and `cutwater doctor --path {directory}` says how it is"
    )


def again(directory: Path | None) -> str:
    """Return what to do if a process of a local cluster does not run."""
    return f"`cutwater cluster restart --dir {directory}` starts it again"


def start(
    directory: Path,
    *,
    storage_nodes: int | None = None,
    replication: int | None = None,
    metadata: int | None = None,
    metadata_flags: tuple[str, ...] = (),
    storage_flags: tuple[str, ...] = (),
    program: tuple[str, ...] = ("-m", "cutwater.cli"),
    has_tls: bool = False,
) -> LocalCluster:
    """Start a cluster, new or with existing data, and return when it can take appends. Omitted arguments keep their
    earlier values; a new cluster gets three storage nodes, three copies and one metadata node. If this fails, no
    process stays behind. Processes of an earlier start that was killed are ended first. ``program``: what Python
    runs. ``has_tls``: a new cluster gets certificates; an existing one has them or not, as it was."""
    before = _earlier(directory)
    if before is None:
        options = {"metadata": list(metadata_flags), "storage": list(storage_flags), "program": list(program)}
        cluster = _new(3 if storage_nodes is None else storage_nodes, replication, metadata or 1, options)
        cluster.has_tls = has_tls
    else:
        cluster = before
        _check_stands_still(directory, cluster)
        _refuse_other(directory, cluster, storage_nodes, replication, metadata)
    try:
        _claim(directory, cluster, before)
        try:
            _stop_all(cluster, STOP_SECONDS)
            if cluster.has_tls:
                make_certificates(directory, [server_name(cluster, node) for node in cluster.nodes])
            local_etcd.start_etcd(directory / "etcd", cluster.etcd, on_start=lambda: cluster.save(directory))
            for node, process in _start_nodes(directory, cluster, cluster.nodes):
                node.address = process.served()
            try:
                asyncio.run(_join(cluster, access_of(directory, cluster)))
            except (PermissionDenied, Unauthenticated):
                if before is None:
                    raise
                # Access control is on, and no administrator's token that holds is here. All servers serve, and the
                # storage nodes were added before it was turned on.
            cluster.starting = None
            cluster.save(directory)
        except BaseException:
            _give_up(directory, cluster, is_new=before is None)
            raise
    except OSError as error:
        what = f"{directory} cannot hold a cluster: {error}"
        raise InvalidArgument(f"{what}; name a directory that may be written") from error
    return cluster


def _claim(directory: Path, cluster: LocalCluster, before: LocalCluster | None) -> None:
    """Note that this process starts the cluster. Of several processes that read the same description, only one
    succeeds."""
    if not directory.is_dir():
        make_directory(directory)
    if holds_log(directory):
        raise InvalidArgument(f"{_has_log(directory)}; for a cluster, name another directory")
    check_may_hold(directory, "local cluster", FILES_OF_CLUSTER, CLUSTER_FILE)
    close_to_others(directory)
    # A lock on the directory itself leaves nothing behind.
    lock = os.open(directory, os.O_RDONLY)
    try:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _earlier(directory) == before:
                cluster.starting = Starter(os.getpid(), processes.started_at(os.getpid()))
                cluster.save(directory)
                return
    finally:
        os.close(lock)
    raise AlreadyExists(
        f"the cluster in {directory} is being started by another process, too: wait until that has done so"
    )


def _check_stands_still(directory: Path, cluster: LocalCluster) -> None:
    """Refuse a cluster that runs or is being started. Processes left by an unfinished start do not count: they will be
    ended."""
    if cluster.starting is None and cluster.running():
        raise AlreadyExists(
            f"the cluster in {directory} runs already: `cutwater cluster stop --dir {directory}` ends it"
        )
    if cluster.starting is not None and is_up(cluster.starting):
        raise AlreadyExists(
            f"the cluster in {directory} is being started by process {cluster.starting.pid}: wait until it has done "
            "so, or end that process and start again"
        )


def _give_up(directory: Path, cluster: LocalCluster, *, is_new: bool) -> None:
    """End what was started. A cluster that has never run leaves no description, so the directory can be used for
    another."""
    processes.stop(cluster.running(), 1.0)
    cluster.starting = Starter()
    with suppress(OSError):
        if is_new:
            (directory / CLUSTER_FILE).unlink(missing_ok=True)
        else:
            cluster.save(directory)


def _new(storage_nodes: int, replication: int | None, metadata: int, options: dict[str, list[str]]) -> LocalCluster:
    replication = min(3, storage_nodes) if replication is None else replication
    _check(storage_nodes, replication, metadata)
    if metadata > 1:
        local_etcd.check_installed()
    addresses = free_addresses(metadata + storage_nodes)
    cluster = LocalCluster(
        "",
        [ClusterMember(i + 1, 0, address) for i, address in enumerate(addresses[:metadata])],
        [ClusterMember(i + 1, 0, address) for i, address in enumerate(addresses[metadata:])],
        local_etcd.new_members(metadata) if metadata > 1 else [],
        replication,
        options,
    )
    cluster.servers = SCHEME + ",".join(member.address for member in cluster.metadata)
    return cluster


def check_same(directory: Path, storage_nodes: int | None, replication: int | None, metadata: int | None) -> None:
    """Refuse other numbers than those of the cluster that is there."""
    _refuse_other(directory, load(directory), storage_nodes, replication, metadata)


def _refuse_other(
    directory: Path, cluster: LocalCluster, storage_nodes: int | None, replication: int | None, metadata: int | None
) -> None:
    there = (len(cluster.storage_nodes), cluster.replication, len(cluster.metadata))
    asked = tuple(
        old if new is None else new for old, new in zip(there, (storage_nodes, replication, metadata), strict=True)
    )
    if asked != there:
        raise InvalidArgument(
            f"the cluster in {directory} has {there[0]} storage nodes, replication {there[1]} and {there[2]} metadata "
            "nodes: leave these options out, or start another cluster in another directory"
        )


def _check(storage_nodes: int, replication: int, metadata: int) -> None:
    if not 1 <= storage_nodes <= 64:
        raise InvalidArgument(f"a local cluster has 1 to 64 storage nodes, not {storage_nodes}")
    if not 1 <= replication <= storage_nodes:
        raise InvalidArgument(f"replication {replication} needs as many storage nodes, and there are {storage_nodes}")
    if metadata not in (1, 3, 5):
        raise InvalidArgument(f"the metadata repository has 1 node, on SQLite, or 3 or 5, on etcd; not {metadata}")


def _earlier(directory: Path) -> LocalCluster | None:
    return load(directory) if (directory / CLUSTER_FILE).exists() else None


def is_up(member: ClusterMember | local_etcd.EtcdMember | Starter) -> bool:
    """Return whether this very process runs, and not another one that got its pid since."""
    return processes.is_running(member.pid, member.started)


def _start_nodes(
    directory: Path, cluster: LocalCluster, nodes: Iterable[ClusterMember]
) -> list[tuple[ClusterMember, processes.Starting]]:
    """Start these nodes, and note each at once, without waiting until they serve."""
    starting = []
    for node in nodes:
        starting.append((node, _start_process(directory, cluster, node)))
        cluster.save(directory)
    return starting


def start_again(directory: Path, cluster: LocalCluster, member: ClusterMember) -> None:
    """Start a metadata node or a storage node again, at its earlier address."""
    _start_process(directory, cluster, member).served()


def _start_process(directory: Path, cluster: LocalCluster, member: ClusterMember) -> processes.Starting:
    common = ["start", "--cluster-id", str(CLUSTER_ID), "--id", str(member.id), "--listen", member.address]
    if member in cluster.metadata:
        kind, own = "metadata", directory / f"mr{member.id}"
        arguments = ["mr", *common, "--store", f"sqlite:{directory / 'metadata.sqlite'}"]
        if cluster.etcd:
            store = "etcd://" + ",".join(etcd.address for etcd in cluster.etcd) + "/cutwater"
            arguments = ["mr", *common, "--store", store, "--key-file", f"{own}.key"]
    else:
        kind, own = "storage", directory / f"sn{member.id}"
        make_directory(own)
        arguments = ["sn", *common, "--volumes", str(own), "--metadata", ",".join(cluster.addresses)]
    if cluster.has_tls:
        arguments += server_flags(directory, server_name(cluster, member))
    command = [sys.executable, *cluster.options["program"], *arguments, *cluster.options[kind], *member.flags]
    process = processes.Starting(command, Path(f"{own}.log"))
    member.pid, member.started = process.pid, processes.started_at(process.pid)
    return process


def server_name(cluster: LocalCluster, member: ClusterMember) -> ServerName:
    return ServerName(CLUSTER_ID, METADATA_NODE if member in cluster.metadata else STORAGE_NODE, member.id)


def access_of(directory: Path, cluster: LocalCluster, token: str = "") -> Access:
    """Return how commands on this machine reach the cluster. Without certificates, it accepts every client. With them,
    the owner's lie in its directory, and so does the token of the first administrator, unless ``token`` is given."""
    return owner_access(directory, token) if cluster.has_tls else Access(None, token)


async def _join(cluster: LocalCluster, access: Access) -> None:
    """Add all storage nodes that do not belong to the cluster yet, and wait until all are alive."""
    async with Admin(cluster.addresses, timeout_ms=30_000, access=access) as admin:
        await asyncio.gather(*(_add(admin, member.address) for member in cluster.storage_nodes))
        await _until_open(admin)


async def _add(admin: Admin, address: str) -> None:
    """Add a storage node. One that enforces access control answers when it has heard from the leader."""
    deadline = Deadline(ADD_SECONDS_MAX)
    while True:
        try:
            await admin.add_storage_node(address)
            return
        except Unavailable:
            if deadline.is_over:
                raise
        await asyncio.sleep(0.1)


async def _until_open(admin: Admin) -> None:
    """Wait until the log streams that the cluster had before are open again."""
    for _ in range(600):
        description = await admin.describe()
        if all(stream.is_open or stream.final or stream.held for stream in description.streams):
            return
        await asyncio.sleep(0.05)
    closed = {stream.stream: stream.next_step for stream in description.streams if not stream.is_open}
    raise Unavailable(f"the cluster runs, but these log streams do not take appends: {closed}")


class Stopped(Struct):
    """The pids of processes that ran, and of those among them that had to be killed."""

    stopped: list[int] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)


def stop(directory: Path, *, timeout: float = STOP_SECONDS) -> Stopped:
    """Stop all processes of the cluster: agents first, which give their jobs back, then storage nodes, so that
    everything is on disk."""
    cluster = load(directory, may_start=False)
    done = _stop_all(cluster, timeout)
    cluster.save(directory)
    return done


def _stop_all(cluster: LocalCluster, timeout: float) -> Stopped:
    done = Stopped()
    for kind, group in cluster.groups():
        running = [member.pid for member in group if is_up(member)]
        done.stopped += running
        done.killed += processes.stop(running, max(timeout, AGENT_STOP_SECONDS) if kind == "agent" else timeout)
    for member in cluster.processes():
        member.pid = 0
    return done


def restart_dead(directory: Path) -> list[str]:
    """Start the processes that do not run, and return what was started. If the last start did not finish, that is
    everything."""
    cluster = load(directory)
    if cluster.starting is not None:
        return [f"{kind} {_number(member)}" for kind, group in start(directory).groups() for member in group]
    started = []
    for etcd in cluster.etcd:
        if not is_up(etcd):
            local_etcd.start_member(directory / "etcd", etcd, cluster.etcd)
            cluster.save(directory)
            started.append(etcd.name)
    down = [node for node in cluster.nodes if not is_up(node)]
    if down and cluster.has_tls:
        make_certificates(directory, [server_name(cluster, node) for node in down])
    for node, process in _start_nodes(directory, cluster, down):
        process.served()
        started.append(f"{'metadata' if node in cluster.metadata else 'storage'} node {node.id}")
    return started


async def health(cluster: LocalCluster, directory: Path | None = None, access: Access = ANYONE) -> list[str]:
    """Return what is wrong, in words; empty if all is well. ``directory``: that of a local cluster."""
    if directory is not None and not cluster.running():
        return [f"no process of the cluster runs: {again(directory)}"]
    down = [(kind, m) for kind, group in cluster.groups() for m in group if not is_up(m)]
    found = [f"{kind} {_number(m)} does not run (it was process {m.pid}): {again(directory)}" for kind, m in down]
    try:
        async with Admin(cluster.addresses, timeout_ms=3_000, access=access) as admin:
            description, metadata = await admin.describe(), await admin.metadata_nodes()
            damaged = await find_damage(description, timeout_ms=3_000, access=access)
    except CutwaterError as error:
        return [*found, f"the metadata repository does not answer: {error.message}"]
    if description.halted:
        found.append(description.halted)
    if description.unheard:
        streams = listed(description.unheard)
        found.append(
            f"the leader answers no client yet: no replica of log stream{'s' if len(description.unheard) > 1 else ''} "
            f"{streams} has reported since it began; start the storage nodes that hold them, or wait until they are "
            "sealed without them"
        )
    told = {member.address for _, member in down}
    found += [f"the metadata node at {m.address}: {m.trouble}" for m in metadata if m.trouble and m.address not in told]
    for node in description.nodes:
        if not node.is_alive:
            found.append(f"storage node {node.node} at {node.address} {why_dead(node)}")
        elif node.state is NodeState.READ_ONLY:
            found.append(f"storage node {node.node} at {node.address} has no room left: make some on its volumes")
    for stream in description.streams:
        copies = f"{len(stream.members)} of {max(stream.wanted, len(stream.replicas))} copies"
        what = f"log stream {stream.stream} of topic {stream.topic!r}"
        if not stream.is_open and not stream.final and not stream.held:
            found.append(f"{what} takes no appends: {stream.reason}. Next: {stream.next_step or 'it is looked after'}")
        elif not stream.final and len(stream.members) < max(stream.wanted, len(stream.replicas)):
            found.append(f"{what} has {copies}: {stream.next_step}")
    for damage in damaged:
        where = f"log stream {damage.stream} on storage node {damage.node}"
        found += [f"{where}: {line}" for line in damage.lines]
    return found


async def is_view_limited(cluster: LocalCluster, access: Access = ANYONE) -> bool:
    """Return whether the principal may see only a part of the cluster; False if nobody answers."""
    try:
        async with Admin(cluster.addresses, timeout_ms=3_000, access=access) as admin:
            return bool((await admin.describe()).is_limited)
    except CutwaterError:
        return False


async def reserved_names(cluster: LocalCluster, access: Access = ANYONE) -> list[tuple[str, str]]:
    """Return the topics of users whose names are reserved by now, each with the way out; none if nobody answers."""
    try:
        async with Admin(cluster.addresses, timeout_ms=3_000, access=access) as admin:
            catalog = await admin.catalog()
    except CutwaterError:
        return []
    found = sorted((topic for topic in catalog.topics if topic.is_reserved), key=lambda topic: topic.name)
    return [(topic.name, way_out(topic.name, is_typed=bool(topic.schemas))) for topic in found]


def _number(member: ClusterMember | local_etcd.EtcdMember) -> str:
    return member.name if isinstance(member, local_etcd.EtcdMember) else str(member.id)
