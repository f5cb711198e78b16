"""Runs a node of the metadata repository as a process, from its options to its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from cutwater.core.order.options import OrderOptions
from cutwater.errors import InvalidArgument
from cutwater.metadata.server import MetadataOptions, MetadataServer
from cutwater.metadata.stores.open_store import open_store, sqlite_key_file
from cutwater.protocol.access import METADATA_NODE
from cutwater.runtime.event_loop import allow_descriptors, run, settle_in
from cutwater.types import SECOND, ClusterId, MetadataNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.identity.server_certificates import ServerName
from cutwater.wire.identity.server_keys import load_or_make
from cutwater.wire.identity.tls import Tls
from cutwater.wire.identity.tls_watch import watching
from cutwater.wire.listen.listen_checks import check_listen
from cutwater.wire.options import ListenerOptions

_log = logging.getLogger(__name__)


class MetadataStartOptions(Struct, frozen=True):
    cluster: ClusterId
    node: MetadataNodeId
    listen: str
    store: str
    advertise: str | None = None
    insecure: bool = False
    tls: Tls | None = None
    metrics: str | None = None
    node_dead_after_seconds: float = 2.0
    replace_node_after_seconds: float = 60.0
    replace_stream_after_seconds: float = 10.0
    min_replication: int = 1
    snapshot_every_decisions: int = 1_024
    retention_seconds: float = 10.0
    access_lease_seconds: float = 10.0
    staged_expire_after_seconds: float = 3_600.0
    listener: ListenerOptions = ListenerOptions()
    key_file: Path | None = None

    @property
    def order(self) -> OrderOptions:
        return OrderOptions(
            node_dead_after_us=round(self.node_dead_after_seconds * SECOND),
            replace_node_after_us=round(self.replace_node_after_seconds * SECOND),
            replace_stream_after_us=round(self.replace_stream_after_seconds * SECOND),
            min_replication=self.min_replication,
            compact_every_decisions=self.snapshot_every_decisions,
            staged_expire_after_us=round(self.staged_expire_after_seconds * SECOND),
        )


def default_key_file(store: str, cluster: ClusterId, node: MetadataNodeId) -> Path | None:
    """Return the default path of a metadata node's private key: beside a local database, or in the user's state
    directory if the store is remote. Returns None if the store is not durable either."""
    scheme, _, rest = store.partition(":")
    if scheme == "sqlite":
        return sqlite_key_file(Path(rest))
    if scheme != "etcd":
        return None
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(state) / "cutwater" / f"cid={cluster}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(
            f"the private key of this metadata node cannot be kept in {path}: {error.strerror}: name another place "
            "with --key-file"
        ) from error
    return path / f"mrid={node}.key"


class MetadataServing(Struct, frozen=True):
    """What a node announces when it begins to serve."""

    cluster: ClusterId
    node: MetadataNodeId
    address: str
    store: str
    metrics: str | None


def run_metadata_node(options: MetadataStartOptions, on_serving: Callable[[MetadataServing], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises the error that keeps the node from serving."""
    allow_descriptors()
    run(_watched(options, on_serving))


async def _watched(options: MetadataStartOptions, on_serving: Callable[[MetadataServing], None]) -> None:
    async with watching(options.tls, ServerName(options.cluster, METADATA_NODE, options.node)):
        await _serve(options, on_serving)


async def _serve(options: MetadataStartOptions, on_serving: Callable[[MetadataServing], None]) -> None:
    host, port = check_listen(
        options.listen,
        options.advertise or "",
        options.metrics,
        has_tls=options.tls is not None,
        insecure=options.insecure,
    )
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    key_file = options.key_file or default_key_file(options.store, options.cluster, options.node)
    key = await asyncio.to_thread(load_or_make, [key_file]) if key_file is not None else None
    store = await open_store(options.store, cluster=options.cluster, may_wait=True)
    server_options = MetadataOptions(
        options.cluster,
        options.node,
        host,
        port,
        options.advertise,
        options.insecure,
        options.tls,
        options.order,
        retention_seconds=options.retention_seconds,
        access_lease_seconds=options.access_lease_seconds,
        listener=options.listener,
        key=key,
        spool=key_file.with_name(f"{key_file.name}.denials") if key_file is not None else None,
    )
    server = MetadataServer(server_options, store)
    exporter = None
    try:
        await server.start()
        if options.metrics is not None:
            # Only nodes with metrics need the library.
            from cutwater.metadata.metrics import MetadataCollector  # noqa: PLC0415
            from cutwater.wire.listen.metrics_http import MetricsExporter  # noqa: PLC0415

            exporter = MetricsExporter(MetadataCollector(server), *parse_address(options.metrics))
        settle_in()
        where = None if exporter is None else exporter.address
        on_serving(MetadataServing(options.cluster, options.node, server.address, options.store, where))
        server.failed.add_done_callback(lambda failed: asked.set())
        await asked.wait()
        _log.info("stopping: %s", server.failed.result().message if server.failed.done() else "asked to")
    finally:
        if exporter is not None:
            await asyncio.to_thread(exporter.close)
        await server.stop()
    if server.failed.done():
        raise server.failed.result()
