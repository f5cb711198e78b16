"""Runs the service as a process, from its options to its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cutwater.client.cluster.credentials import FollowedToken
from cutwater.errors import InvalidArgument
from cutwater.protocol.errors import CannotListen
from cutwater.runtime.event_loop import allow_descriptors, run, settle_in
from cutwater.service.app import RestService, ServiceEntry, ServiceSettings
from cutwater.service.gateway import Gateway, GatewayOptions
from cutwater.service.http.http_server import HttpListener, listening
from cutwater.service.http.request_guard import allowed_hosts
from cutwater.service.openapi import encode_document
from cutwater.service.options import ServiceServing, ServiceStartOptions
from cutwater.service.service_counters import ServiceCollector
from cutwater.service.table import ROUTES
from cutwater.wire.addresses import format_address, is_loopback, parse_address
from cutwater.wire.identity.tls import listener_tls
from cutwater.wire.listen.listen_checks import check_metrics, parse_flag
from cutwater.wire.listen.metrics_http import MetricsExporter

_log = logging.getLogger(__name__)


def run_service(options: ServiceStartOptions, on_serving: Callable[[ServiceServing], None]) -> None:
    """Serve until SIGTERM or SIGINT, then answer what is in progress and stop."""
    allow_descriptors()
    run(_serve(options, on_serving))


async def _serve(options: ServiceStartOptions, on_serving: Callable[[ServiceServing], None]) -> None:
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    async with serving_service(options) as (serving, _):
        settle_in()
        on_serving(serving)
        await asked.wait()
        _log.info("stopping: asked to")
    _log.info("stopped")


@asynccontextmanager
async def serving_service(options: ServiceStartOptions) -> AsyncIterator[tuple[ServiceServing, RestService]]:
    """Serve during this context."""
    host, port, tls = _checked(options)
    own = None if options.token_file is None else FollowedToken(options.token_file.absolute())
    if own is not None:
        # A file that cannot be used is found now, not with the first request.
        own.read()
    gateway = Gateway(GatewayOptions(options.addresses, options.cluster_tls, own, not is_loopback(host)))
    settings = ServiceSettings(allowed_hosts(host, options.allow_hosts), options.allow_submit, tls is not None)
    service = RestService(settings, gateway, ROUTES)
    service.document = encode_document(ROUTES)
    try:
        sockets = await listening(host, port)
    except OSError as error:
        raise CannotListen(
            f"cannot listen on {options.listen}: {error}: stop the process that uses it, or choose another address"
        ) from error
    port = sockets[0].getsockname()[1]
    listener = HttpListener(ServiceEntry(service), sockets, service.counters, limits=options.limits, tls=tls)
    exporter = None
    try:
        if options.metrics is not None:
            collector = ServiceCollector(
                service.counters,
                lambda: {
                    "connections": listener.connections.count,
                    "cluster_clients": gateway.clients,
                    "streams": service.streams.taken,
                    "uploads": service.uploads.taken,
                },
            )
            exporter = MetricsExporter(collector, *parse_address(options.metrics))
        gateway.start()
        await listener.start()
        scheme = "http" if tls is None else "https"
        url = f"{scheme}://{format_address(host or '0.0.0.0', port)}"
        yield ServiceServing(url, exporter.address if exporter is not None else None), service
    finally:
        service.stopping.set()
        await listener.stop()
        await gateway.close()
        if exporter is not None:
            await asyncio.to_thread(exporter.close)


def _checked(options: ServiceStartOptions) -> tuple[str, int, ssl.SSLContext | None]:
    host, port = parse_flag("--listen", options.listen)
    if (options.certificate is None) != (options.key is None):
        raise InvalidArgument("--http-certificate and --http-key belong together: give both, or neither")
    tls = None
    if options.certificate is not None and options.key is not None:
        tls = listener_tls(options.certificate, options.key)
    elif not is_loopback(host):
        raise InvalidArgument(
            f"--listen {host} can be reached from other machines, and tokens would travel there in the clear: give "
            "--http-certificate and --http-key, or use 127.0.0.1"
        )
    if not options.addresses:
        raise InvalidArgument("a service needs a cluster: give --servers cutwater://HOST:PORT")
    if options.metrics is not None:
        check_metrics(options.metrics, insecure=False)
    return host, port, tls
