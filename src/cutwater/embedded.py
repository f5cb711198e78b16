"""The embedded log: a metadata repository and one storage node inside the caller's process, on loopback.

::

    <path>/lock              held by the process that opened the log, as long as it has it open
    <path>/holder.json       which process that is, where it listens, and the secret that it demands
    <path>/holder.lock       which Spark applications it is held open for, if any (``spark.session.log_holder``)
    <path>/metadata.sqlite   decisions and catalog
    <path>/volume/           records

Only processes that can read ``holder.json`` can connect: directory and file are for their owner (ADR 0037).

The servers are the same as in a cluster, and so are the files and all guarantees except replication. They share an
event loop with the client of the process that opened the log, and need no sockets among each other. The loop runs in a
thread of its own (``open``), or is the caller's (``AsyncClient.open``). Other processes that open the same path connect
to the one that opened it first.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cutwater.client.async_client import AsyncClient
from cutwater.client.client import Client
from cutwater.client.cluster.credentials import ANYONE, Access
from cutwater.client.cluster.holder_file import HOLDER_FILE, Holder, read_holder, url_of
from cutwater.client.cluster.log_directory import (
    CLUSTER_FILE,
    FILES_OF_LOG,
    METADATA,
    VOLUME,
    check_has_order,
    check_may_hold,
    check_no_address,
    holds_half_a_cluster,
)
from cutwater.client.cluster.metadata_client import Repository
from cutwater.client.convert.encoding import Compression, Limits, check_compression
from cutwater.client.loop_thread import EXECUTOR_THREADS_MAX, LoopThread
from cutwater.core.order.options import OrderOptions
from cutwater.core.requests import AddNodeRequest, DescribeRequest, Description
from cutwater.errors import (
    AlreadyExists,
    CutwaterError,
    Damaged,
    DeadlineExceeded,
    InvalidArgument,
    OrderLayerLostMemory,
    Unavailable,
)
from cutwater.metadata.server import MetadataOptions, MetadataServer
from cutwater.metadata.stores.open_store import open_store, sqlite_key_file
from cutwater.protocol.errors import Unauthenticated
from cutwater.runtime import system
from cutwater.runtime.deadlines import TIMEOUT_SECONDS, Deadline
from cutwater.runtime.local_files import MachineFiles, make_directory, make_if_missing, write_secret
from cutwater.runtime.threads import in_thread
from cutwater.storage.files import Lock, OsFiles
from cutwater.storage.volume import NodeVolumes
from cutwater.storagenode.server import NodeOptions, StorageNodeServer
from cutwater.types import SECOND, ClusterId, Incarnation, LogStreamId, MetadataNodeId, StorageNodeId
from cutwater.wire.identity.auth import ANONYMOUS, Credentials, PeerIdentity
from cutwater.wire.identity.handshake import Endpoint
from cutwater.wire.identity.server_keys import ServerKey, load_or_make

CLUSTER = ClusterId(1)
NODE = StorageNodeId(1)
METADATA_NODE = MetadataNodeId(1)
LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.01
STUCK_SECONDS = 1.0
"""A log stream that stays closed because of damage for this long is reported as damaged."""
END_POLL_SECONDS = 0.001
STOP_MS_MAX = 5_000
TOKEN_BYTES = 32
ORDER = OrderOptions(node_dead_after_us=10 * SECOND)
"""A longer limit than in a cluster: both servers share one event loop, and the caller's program may delay it."""


def _authenticate(secret: str, credentials: Credentials) -> PeerIdentity:
    """Accept a peer that shows the secret of this opening of the log. The comparison takes the same time for any
    secret."""
    if not hmac.compare_digest(secret.encode(), credentials.token.encode()):
        raise Unauthenticated(
            "an embedded log lets in only processes that can read its directory, where the secret is: open it by "
            "its path, with cutwater.open(PATH), --path PATH, or the option path of Spark, and not by its address"
        )
    return ANONYMOUS


class EmbeddedLog:
    """The servers, on the event loop that runs ``start``. They hold the lock of ``path``. ``may_wait``: the event loop
    may wait for the disk while that is quick, because no other task on it has a deadline to keep (ADR 0028, 0032).
    ``may_be_damaged``: serve even if a log stream is so damaged that it takes no appends.

    The servers have threads of their own: all threads of the event loop may be busy with the caller's work, and that
    work may wait for the log."""

    def __init__(self, path: Path, lock: Lock, *, may_wait: bool = False, may_be_damaged: bool = False) -> None:
        self._path, self._lock, self._may_wait = path, lock, may_wait
        self._may_be_damaged = may_be_damaged
        self._threads = system.executor(EXECUTOR_THREADS_MAX, "cutwater log")
        self._is_told = False
        """Whether ``holder.json`` tells other processes where it listens."""
        self._metadata: MetadataServer | None = None
        self._node: StorageNodeServer | None = None
        self._volumes: NodeVolumes | None = None

    async def start(self, deadline: Deadline) -> str:
        """Start the servers, and return the address when the log takes appends."""
        key = await in_thread(self._threads, lambda: load_or_make([sqlite_key_file(self._path / METADATA)]))
        # Nothing may fail between this and the server, which closes the store.
        store = await open_store(f"sqlite:{self._path / METADATA}", cluster=CLUSTER, may_wait=self._may_wait)
        token = system.token_hex(TOKEN_BYTES)
        authenticate = partial(_authenticate, token)
        options = MetadataOptions(
            CLUSTER, METADATA_NODE, LOOPBACK, order=ORDER, is_nearby=True, key=key, authenticate=authenticate
        )
        self._metadata = MetadataServer(options, store, threads=self._threads)
        await self._metadata.start()
        volumes, incarnation, node_key = await in_thread(self._threads, lambda: self._open_volumes(key))
        address = self._metadata.address
        repository = Repository(Endpoint(CLUSTER, "client"), (address,))
        try:
            node_options = NodeOptions(
                LOOPBACK, 0, (address,), is_nearby=True, may_wait_for_disk=self._may_wait, authenticate=authenticate
            )
            self._node = StorageNodeServer(
                node_options, volumes, threads=self._threads, incarnation=incarnation, key=node_key
            )
            # Added before it starts, so that it need not wait to be known.
            paths = tuple(str(volume) for volume in volumes.volumes)
            node = AddNodeRequest(NODE, "", volumes.identity.node_key, paths, self._node.public_key, renews=True)
            await self._metadata.adopt(node, deadline.at)
            await self._node.start()
            await self._until_open(repository, deadline)
        finally:
            repository.close()
        keys = (key.public, node_key.public)
        pid = system.process_id()
        holder = Holder(pid, url_of(address, self._path), system.started_at(pid), token, keys)
        self._is_told = True
        await in_thread(self._threads, lambda: self._write_holder(holder))
        return holder.servers

    def _write_holder(self, holder: Holder) -> None:
        try:
            write_secret(self._path / HOLDER_FILE, msgspec.json.encode(holder))
        except OSError as error:
            raise _unusable(self._path, error) from error

    def _open_volumes(self, metadata_key: ServerKey) -> tuple[NodeVolumes, Incarnation, ServerKey]:
        """Open the volumes; runs in a thread. They are stored in the object, so that they are released even if the
        caller has stopped waiting. The metadata node is in this process, so its key is trusted, even if it is new
        because the file was removed.
        """
        volume = self._path / VOLUME
        make_directory(volume)
        self._volumes = NodeVolumes([volume], CLUSTER, NODE)
        self._volumes.believe_only({METADATA_NODE: metadata_key.public})
        return self._volumes, self._volumes.next_incarnation(), load_or_make(self._volumes.server_key_files)

    def _remove_holder(self) -> None:
        with suppress(OSError):
            system.made(MachineFiles).unlink(self._path / HOLDER_FILE)

    async def stop(self) -> None:
        """Stop the servers. The locks are released only when nothing here can write any more; if that is not certain,
        this process keeps them until this is tried again, or until it ends."""
        loop = asyncio.get_running_loop()
        seconds = STOP_MS_MAX / 1_000
        if self._is_told:
            self._is_told = False
            await asyncio.wait({loop.run_in_executor(self._threads, self._remove_holder)}, timeout=seconds)
        if self._node is not None and await self._node.stop(timeout_ms=STOP_MS_MAX):
            self._node = None
        if self._metadata is not None:
            await self._metadata.stop(timeout_ms=STOP_MS_MAX)
            self._metadata = None
        if self._node is None:
            self._threads.shutdown(wait=False)
        deadline = loop.time() + seconds
        while self._node is not None or not self._threads.has_ended:
            if self._node is not None or loop.time() >= deadline:
                raise DeadlineExceeded(
                    f"{self._path} could not be closed within {seconds:g} s, as something is still being written or "
                    "read there: it stays locked until it can be closed, or this process ends. What was acknowledged "
                    "is in it. Call close() once more to try again"
                )
            await asyncio.sleep(END_POLL_SECONDS)
        if self._volumes is not None:
            self._volumes.release()
        self._lock.release()

    async def _until_open(self, repository: Repository, deadline: Deadline) -> None:
        """Wait until existing log streams are open again."""
        assert self._node is not None
        stuck_since: float | None = None
        while True:
            if self._node.fatal.done():
                raise self._node.fatal.result()
            description = await repository.ask(DescribeRequest(), Description, timeout_ms=deadline.left_ms())
            if description.halted:
                raise OrderLayerLostMemory(description.halted)
            closed = [s.stream for s in description.streams if not (s.is_open or s.final or s.held)]
            stuck = {stream: why for stream, why in self._node.stuck.items() if stream in closed}
            stuck_since = (stuck_since or deadline.now) if stuck else None
            # A trim that was decided before the process ended may still remove the damaged records.
            is_stuck = stuck_since is not None and deadline.now >= min(stuck_since + STUCK_SECONDS, deadline.at)
            if is_stuck and not self._may_be_damaged:
                raise Damaged(self._damage_in_words(stuck, description))
            excused = stuck.keys() if self._may_be_damaged else set()
            if all(node.is_alive for node in description.nodes) and excused == set(closed):
                return
            if deadline.is_over:
                raise Unavailable(f"{self._path} was opened, but log streams {closed} do not take appends yet")
            await asyncio.sleep(POLL_SECONDS)

    def _damage_in_words(self, stuck: dict[LogStreamId, str], description: Description) -> str:
        topics = {stream.stream: stream.topic for stream in description.streams}
        found = "; ".join(f"log stream {stream} of topic {topics[stream]!r}: {why}" for stream, why in stuck.items())
        return (
            f"{self._path} is damaged, and an embedded log has no other copy. {found}. `cutwater verify --path "
            f"{self._path}` reads everything and names what is damaged. Restore the damaged file from a backup, or "
            f"give up all records of the topic: `cutwater topic delete {topics[next(iter(stuck))]} --path {self._path}`"
        )


def open(
    path: str | os.PathLike[str],
    *,
    exclusive: bool = False,
    timeout: float = TIMEOUT_SECONDS,
    compression: Compression | None = None,
    limits: Limits | None = None,
) -> Client:
    """Open the log in a directory, which is created if it does not exist; closing the client closes the log. A
    directory with other files, and without a log, is refused.

    If another process has the log open, this one connects to it, and can use the log until that process closes it; with
    ``exclusive``, an error names that process instead. ``timeout`` and the rest are as for ``cutwater.connect``.
    """
    # Threads that wait for this loop keep their own deadlines.
    return _on_a_loop(
        open_on_this_loop(
            path, exclusive=exclusive, timeout=timeout, compression=compression, limits=limits, may_wait=True
        )
    )


def open_to_administer(path: Path, timeout: float) -> Client:
    """Open a log for commands that read it or delete from it, even if it is damaged. Otherwise as ``open``."""
    return _on_a_loop(open_on_this_loop(path, timeout=timeout, may_wait=True, may_be_damaged=True))


def _on_a_loop(opening: Coroutine[Any, Any, AsyncClient]) -> Client:
    loop = LoopThread("cutwater log")
    try:
        return Client(loop, loop.run(opening))
    except BaseException:
        loop.close()
        raise


async def open_on_this_loop(
    path: str | os.PathLike[str],
    *,
    exclusive: bool = False,
    timeout: float,
    compression: Compression | None = None,
    limits: Limits | None = None,
    may_wait: bool = False,
    may_be_damaged: bool = False,
) -> AsyncClient:
    """See ``AsyncClient.open``, and ``EmbeddedLog`` for ``may_wait`` and ``may_be_damaged``. By default it does not
    wait for the disk: other tasks on the loop have deadlines to keep."""
    deadline = Deadline(timeout)
    check_compression(compression)
    system.occupy_standard_descriptors()
    directory = _directory(path)
    connect = partial(AsyncClient._connect, timeout=timeout, compression=compression, limits=limits)
    while (lock := _locked(directory)) is None:
        holder = read_holder(directory)
        if exclusive:
            raise AlreadyExists(
                f"{directory} is open in process {holder.pid if holder else '(starting)'}: close it there first, "
                "or leave out exclusive= to connect to it"
            )
        if holder is not None:
            with suppress(CutwaterError):
                end = partial(_end_of, directory, holder)
                access = Access(token=holder.token, end=end, server_keys=holder.server_keys)
                return await connect(holder.servers, access)
        if deadline.is_over:
            raise Unavailable(_no_answer(directory, holder))
        await asyncio.sleep(POLL_SECONDS)
    log = EmbeddedLog(directory, lock, may_wait=may_wait, may_be_damaged=may_be_damaged)
    try:
        client = await connect(await log.start(deadline), ANYONE)
    except BaseException:
        await log.stop()
        raise
    client._on_close = log.stop
    return client


def _end_of(directory: Path, holder: Holder) -> str:
    """Return why the connected process no longer answers; empty if that is not certain."""
    # Closing the log removes the file, but a killed process leaves it.
    if read_holder(directory) == holder and holder.lives():
        return ""
    return (
        f"this client was connected to process {holder.pid}, which had {directory} open and has closed it, or ended: "
        f"make another one with cutwater.open({str(directory)!r}). What was acknowledged is in the log"
    )


def _no_answer(directory: Path, holder: Holder | None) -> str:
    if holder is not None and holder.pid == system.process_id():
        return (
            f"{directory} was opened by this process before, on an event loop that does not run any more, or is busy: "
            "close the client that has it open, before its loop ends"
        )
    return f"{directory} is open in another process, which does not answer: see {directory}/lock"


def _directory(given: object) -> Path:
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise InvalidArgument(f"a log is in a directory: give its path, such as './data', not {given!r}")
    path, files = Path(given), system.made(MachineFiles)
    check_no_address(path)
    try:
        make_if_missing(path)
        if files.exists(path / CLUSTER_FILE):
            raise InvalidArgument(
                f"{path} holds a local cluster: connect to it, `cutwater cluster status --dir {path}` says where"
            )
        if holds_half_a_cluster(path):
            raise InvalidArgument(
                f"{path} holds a local cluster that has never come to run, and no embedded log: `cutwater cluster "
                f"start --dir {path}` starts it; for an embedded log, name another directory"
            )
        check_has_order(path)
        check_may_hold(path, "log", FILES_OF_LOG, METADATA)
        files.close_to_others(path)
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot hold a log ({error.strerror}): name a directory that may be written"
        ) from error
    return path


def _locked(directory: Path) -> Lock | None:
    """Return the lock, or None if another process has it. Removes what an earlier holder left behind."""
    lock: Lock | None = None
    try:
        lock = system.made(OsFiles).lock(directory / "lock")
        if lock is not None:
            system.made(MachineFiles).unlink(directory / HOLDER_FILE)
    except OSError as error:
        if lock is not None:
            lock.release()
        raise _unusable(directory, error) from error
    return lock


def _unusable(directory: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(
        f"{directory} cannot be used ({error.strerror}): check its permissions, and that there is room"
    )
