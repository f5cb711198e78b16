"""A node of the metadata repository as a process: from its options to its end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from msgspec import Struct

from cutwater.core.order_options import OrderOptions
from cutwater.metadata.open_store import open_store
from cutwater.metadata.server import MetadataOptions, MetadataServer
from cutwater.types import SECOND, ClusterId, MetadataNodeId
from cutwater.wire.addresses import parse_address
from cutwater.wire.exposure import check_listen
from cutwater.wire.loops import run, settle_in
from cutwater.wire.tls import Tls

_log = logging.getLogger(__name__)


class StartOptions(Struct, frozen=True):
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
    staged_expire_after_seconds: float = 3_600.0

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


class Serving(Struct, frozen=True):
    """What there is to say when the node serves."""

    cluster: ClusterId
    node: MetadataNodeId
    address: str
    store: str
    metrics: str | None


def run_metadata_node(options: StartOptions, on_serving: Callable[[Serving], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises what keeps the node from serving."""
    run(_serve(options, on_serving))


async def _serve(options: StartOptions, on_serving: Callable[[Serving], None]) -> None:
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
    )
    server = MetadataServer(server_options, store)
    exporter = None
    try:
        await server.start()
        if options.metrics is not None:
            # Only nodes with metrics need the library.
            from cutwater.metadata.metrics import MetadataCollector  # noqa: PLC0415
            from cutwater.wire.metrics_http import MetricsExporter  # noqa: PLC0415

            exporter = MetricsExporter(MetadataCollector(server), *parse_address(options.metrics))
        settle_in()
        where = None if exporter is None else exporter.address
        on_serving(Serving(options.cluster, options.node, server.address, options.store, where))
        server.failed.add_done_callback(lambda failed: asked.set())
        await asked.wait()
        _log.info("stopping: %s", server.failed.result().message if server.failed.done() else "asked to")
    finally:
        if exporter is not None:
            await asyncio.to_thread(exporter.close)
        await server.stop()
    if server.failed.done():
        raise server.failed.result()
