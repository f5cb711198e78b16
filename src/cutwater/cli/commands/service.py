"""``cutwater service``: runs the REST service."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cutwater.admin import local_cluster
from cutwater.admin.cluster_certificates import authority_file
from cutwater.cli.framework.command import Bundle, command, noun, under
from cutwater.cli.framework.security import TlsAuthorityOption
from cutwater.cli.framework.server_options import (
    LogFormatOption,
    LogLevelOption,
    MetricsOption,
    announce,
    configure_logs,
)
from cutwater.client.cluster.metadata_client import parse_servers
from cutwater.errors import InvalidArgument
from cutwater.service.options import HttpLimits, ServiceServing, ServiceStartOptions
from cutwater.wire.identity.tls import client_tls

app = noun("The REST service: the cluster over HTTP.")

http_option = under("HTTP")
_LIMITS = HttpLimits()


@dataclass(frozen=True)
class ServedCluster(Bundle):
    """The cluster behind the service, and how it is reached. The service shows no certificate: only its token, beside
    those of its callers."""

    servers: Annotated[
        str | None,
        typer.Option(envvar="CUTWATER_SERVERS", metavar="cutwater://HOST:PORT,…", help="Where the cluster listens."),
    ] = None
    directory: Annotated[
        Path | None, typer.Option("--dir", envvar="CUTWATER_DIR", help="The directory of a local cluster.")
    ] = None
    tls_ca: TlsAuthorityOption = None
    own_token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="CUTWATER_SERVICE_TOKEN_FILE",
            metavar="FILE",
            rich_help_panel="Security",
            help="A file with the token of the service itself (0600), by which the audit names it. It needs no rights.",
        ),
    ] = None

    def reached(self) -> tuple[tuple[str, ...], ssl.SSLContext | None]:
        """Return the addresses of the cluster, and how its servers are verified."""
        if (self.servers is None) == (self.directory is None):
            raise InvalidArgument("which cluster? Say either --servers cutwater://HOST:PORT or --dir DIR")
        tls = None if self.tls_ca is None else client_tls(self.tls_ca)
        if self.directory is None:
            assert self.servers is not None
            return parse_servers(self.servers), tls
        cluster = local_cluster.load(self.directory)
        if cluster.has_tls and tls is None:
            tls = client_tls(authority_file(self.directory))
        return cluster.addresses, tls


@command(app)
def start(
    cluster: ServedCluster,
    listen: Annotated[
        str,
        http_option(envvar="CUTWATER_SERVICE_LISTEN", metavar="HOST:PORT", help="Where to listen; port 0 chooses one."),
    ] = "127.0.0.1:8300",
    http_certificate: Annotated[
        Path | None, http_option(envvar="CUTWATER_HTTP_CERTIFICATE", help="A certificate to show to HTTP clients.")
    ] = None,
    http_key: Annotated[
        Path | None, http_option(envvar="CUTWATER_HTTP_KEY", help="Its private key, which others cannot read.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        http_option(help="A further name by which requests may name the service. Repeatable."),
    ] = None,
    allow_submit: Annotated[
        bool,
        http_option(
            "--allow-submit",
            help="Let callers upload programs, submit and change jobs, and drain agents, as far as their rights go.",
        ),
    ] = False,
    connections_max: Annotated[
        int, http_option(min=1, help="Connections of HTTP clients at a time.")
    ] = _LIMITS.connections_max,
    stop_seconds: Annotated[
        int, http_option(min=1, help="How long requests in progress may go on when the service is to end.")
    ] = _LIMITS.stop_seconds,
    metrics: MetricsOption = None,
    log_format: LogFormatOption = "text",
    log_level: LogLevelOption = "info",
) -> None:
    """Run the REST service until SIGTERM or SIGINT. Prints one line when it serves; logs go to standard error.

    It answers questions about the cluster, its records and its jobs. With --allow-submit it also takes programs, and
    submits and changes jobs. Callers show tokens of the cluster, and have their own rights only; browsers exchange a
    token for a session. /v1/openapi.json describes all of it. Any number of services may run for one cluster."""
    configure_logs(log_format, log_level)
    addresses, tls = cluster.reached()
    options = ServiceStartOptions(
        listen,
        addresses,
        tls,
        cluster.own_token_file,
        http_certificate,
        http_key,
        tuple(allow_host or ()),
        allow_submit,
        metrics,
        HttpLimits(connections_max, stop_seconds=stop_seconds),
    )
    try:
        # Only this command needs the packages of the service.
        from cutwater.service.start import run_service  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise InvalidArgument(
            f"the service needs the package {error.name}, which is not installed: pip install 'cutwater[service]'"
        ) from error
    run_service(options, _announce)


def _announce(serving: ServiceServing) -> None:
    metrics = f", metrics at {serving.metrics}" if serving.metrics is not None else ""
    announce(serving, f"the service serves at {serving.url}{metrics}")
