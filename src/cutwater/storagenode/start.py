"""Runs a storage node as a process, from its options to its end.

Errors are found before the node serves, where possible, and reported with the flag to change.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from cutwater.errors import CutwaterError, InvalidArgument, Unavailable
from cutwater.protocol.access import STORAGE_NODE
from cutwater.runtime import system
from cutwater.runtime.event_loop import allow_descriptors, run, settle_in
from cutwater.storage.volume import NodeVolumes
from cutwater.storagenode.disk_space import RESERVE_BYTES
from cutwater.storagenode.publish.part_store import ASK_SECONDS, STAGED_BYTES_MAX
from cutwater.storagenode.repair.scrubbing import ScrubOptions
from cutwater.storagenode.server import NodeOptions, StorageNodeServer
from cutwater.types import ClusterId, StorageNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.identity.server_certificates import ServerName
from cutwater.wire.identity.tls import Tls
from cutwater.wire.identity.tls_watch import watching
from cutwater.wire.listen.listen_checks import check_listen, parse_flag
from cutwater.wire.options import ListenerOptions

_log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopTimedOut(Unavailable):
    """Not everything could be closed because a disk hangs. Everything acknowledged is on disk nevertheless."""

    code = "stop_timed_out"


class NodeStartOptions(Struct, frozen=True):
    cluster: ClusterId
    node: StorageNodeId
    volumes: tuple[Path, ...]
    listen: str
    metadata: tuple[str, ...]
    advertise: str = ""
    error_if_exists: bool = False
    insecure: bool = False
    tls: Tls | None = None
    metrics: str | None = None
    reserve_bytes: int = RESERVE_BYTES
    stop_seconds: float = STOP_SECONDS
    forget_volumes: tuple[Path, ...] = ()
    staged_bytes_max: int = STAGED_BYTES_MAX
    staged_ask_seconds: float = ASK_SECONDS
    scrub_bytes_per_second: int = ScrubOptions().bytes_per_second
    listener: ListenerOptions = ListenerOptions()
    forget_metadata_keys: bool = False


class NodeServing(Struct, frozen=True):
    """What a node announces when it begins to serve."""

    cluster: ClusterId
    node: StorageNodeId
    address: str
    incarnation: int
    replicas: int
    unreadable: int
    opened_ms: int
    metrics: str | None


def run_storage_node(
    options: NodeStartOptions, on_serving: Callable[[NodeServing], None], on_hang: Callable[[CutwaterError], None]
) -> None:
    """Serve until SIGTERM or SIGINT, then stop cleanly. Raises the error that keeps the node from serving. ``on_hang``
    is called in another thread if the node cannot even be stopped."""
    allow_descriptors()
    run(_serve(_checked(options), options, on_serving, on_hang))


def _checked(options: NodeStartOptions) -> NodeOptions:
    if not options.metadata:
        raise InvalidArgument("a storage node needs a metadata repository: give one with --metadata HOST:PORT")
    for address in options.metadata:
        if parse_flag("--metadata", address)[1] == 0:
            raise InvalidArgument(f"--metadata {address}: no server listens on port 0")
    has_tls = options.tls is not None
    host, port = check_listen(
        options.listen, options.advertise, options.metrics, has_tls=has_tls, insecure=options.insecure
    )
    return NodeOptions(
        host,
        port,
        options.metadata,
        options.advertise,
        options.tls,
        options.insecure,
        options.reserve_bytes,
        staged_bytes_max=options.staged_bytes_max,
        staged_ask_seconds=options.staged_ask_seconds,
        scrub=ScrubOptions(options.scrub_bytes_per_second),
        may_wait_for_disk=True,
        listener=options.listener,
    )


async def _serve(
    node_options: NodeOptions,
    options: NodeStartOptions,
    on_serving: Callable[[NodeServing], None],
    on_hang: Callable[[CutwaterError], None],
) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        _watchdog(options, on_hang)
        loop.call_soon_threadsafe(asked.set)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, asked.set)
    _hear_signals(stop)
    started = system.monotonic()
    volumes = NodeVolumes(
        options.volumes,
        options.cluster,
        options.node,
        error_if_exists=options.error_if_exists,
        forget=options.forget_volumes,
        forget_metadata_keys=options.forget_metadata_keys,
    )
    try:
        async with watching(options.tls, ServerName(options.cluster, STORAGE_NODE, options.node)):
            server = StorageNodeServer(node_options, volumes)
            await server.start()
            opened_ms = round((system.monotonic() - started) * 1_000)
            await _serve_until(
                asked, server, options, lambda metrics: on_serving(_serving(server, opened_ms, metrics)), on_hang
            )
    finally:
        volumes.release()


def _hear_signals(stop: Callable[[], None]) -> None:
    """Wait for signals in a thread, because the event loop may be waiting for a disk. The loop handles signals that the
    system delivers to threads started earlier."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def hear() -> None:
        signal.sigwait(STOP_SIGNALS)
        stop()

    threading.Thread(target=hear, name="signals", daemon=True).start()


def _watchdog(options: NodeStartOptions, on_hang: Callable[[CutwaterError], None]) -> StopTimedOut:
    """Limit the time that the node has to stop from now on; return the error for the case that it does not."""
    hang = StopTimedOut(f"storage node {options.node} could not be stopped within {options.stop_seconds} s")
    watchdog = threading.Timer(options.stop_seconds + 2.0, on_hang, [hang])
    watchdog.daemon = True
    watchdog.start()
    return hang


def _serving(server: StorageNodeServer, opened_ms: int, metrics: str | None) -> NodeServing:
    identity, node = server.volumes.identity, server.node
    return NodeServing(
        identity.cluster,
        identity.node,
        server.address,
        node.incarnation,
        len(node.replicas) + len(node.unreadable),
        len(node.unreadable),
        opened_ms,
        metrics,
    )


async def _serve_until(
    asked: asyncio.Event,
    server: StorageNodeServer,
    options: NodeStartOptions,
    on_serving: Callable[[str | None], None],
    on_hang: Callable[[CutwaterError], None],
) -> None:
    exporter = None
    try:
        if options.metrics is not None:
            # Only nodes with metrics need the library.
            from cutwater.storagenode.metrics import NodeCollector  # noqa: PLC0415
            from cutwater.wire.listen.metrics_http import MetricsExporter  # noqa: PLC0415

            exporter = MetricsExporter(NodeCollector(server), *parse_address(options.metrics))
        settle_in()
        on_serving(exporter.address if exporter is not None else None)
        server.fatal.add_done_callback(lambda fatal: asked.set())
        await asked.wait()
        _log.info("stopping: %s", server.fatal.result().message if server.fatal.done() else "asked to")
    finally:
        hang = _watchdog(options, on_hang)
        if exporter is not None:
            await asyncio.to_thread(exporter.close)
        if not await server.stop(timeout_ms=round(options.stop_seconds * 1_000)):
            raise hang
    if server.fatal.done():
        raise server.fatal.result()
    _log.info("stopped")
