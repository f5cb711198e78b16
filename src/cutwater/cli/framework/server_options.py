"""Options of the commands that run a server, ``cutwater sn start`` and ``cutwater mr start``: where it listens, TLS,
limits of connections, and logs on standard error.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import structlog
import typer

from cutwater.cli.framework.command import Bundle
from cutwater.cli.framework.exit_codes import Settings
from cutwater.cli.framework.security import TlsAuthorityOption, TlsCertificateOption, TlsKeyOption, security_option
from cutwater.errors import InvalidArgument
from cutwater.runtime.redaction import without_secrets
from cutwater.wire.identity.certificate_files import TlsFiles
from cutwater.wire.identity.tls import TOKEN_FILE_UNTIL, Tls, load_tls, read_tokens
from cutwater.wire.options import ListenerOptions

_log = logging.getLogger(__name__)

_LIMITS = ListenerOptions()

ClusterIdOption = Annotated[int, typer.Option(min=1, envvar="CUTWATER_CLUSTER_ID", help="Number of the cluster.")]
ListenOption = Annotated[
    str, typer.Option(envvar="CUTWATER_LISTEN", metavar="HOST:PORT", help="Where to listen; port 0 chooses one.")
]
AdvertiseOption = Annotated[
    str | None,
    typer.Option(
        envvar="CUTWATER_ADVERTISE",
        metavar="HOST:PORT",
        help="The address for other processes, if it is not the one of --listen.",
    ),
]
MetricsOption = Annotated[
    str | None, typer.Option(envvar="CUTWATER_METRICS", metavar="HOST:PORT", help="Where Prometheus can read metrics.")
]

LogFormatOption = Annotated[
    Literal["text", "json"], typer.Option(envvar="CUTWATER_LOG_FORMAT", help="How logs on standard error look.")
]
LogLevelOption = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(envvar="CUTWATER_LOG_LEVEL", help="The least important logs to show."),
]


def _limit(name: str, least: int, text: str) -> Any:
    return typer.Option(min=least, envvar=f"CUTWATER_{name}", help=text, rich_help_panel="Connections")


@dataclass(frozen=True)
class ServerOptions(Bundle):
    """TLS, how many connections the server takes and how long a handshake may last (ADR 0037), and logs."""

    insecure: Annotated[
        bool,
        security_option("--insecure", envvar="CUTWATER_INSECURE", help="Listen beyond this machine without TLS."),
    ] = False
    tls_certificate: TlsCertificateOption = None
    tls_key: TlsKeyOption = None
    tls_ca: TlsAuthorityOption = None
    tls_client_ca: Annotated[
        Path | None,
        security_option(
            envvar="CUTWATER_TLS_CLIENT_CA",
            help="Certificates of the clients' authority; --tls-ca is the servers' own then.",
        ),
    ] = None
    tokens: Annotated[
        Path | None,
        security_option(
            envvar="CUTWATER_TOKENS",
            help="A file with a NAME and a TOKEN in each line: clients that show one need no certificate. Supported "
            f"until {TOKEN_FILE_UNTIL}; see `cutwater token import`.",
        ),
    ] = None
    connections_max: Annotated[int, _limit("CONNECTIONS_MAX", 1, "Connections of clients, after the handshake.")] = (
        _LIMITS.connections_max
    )
    connections_per_address_max: Annotated[
        int,
        _limit(
            "CONNECTIONS_PER_ADDRESS_MAX",
            1,
            "Connections from one address; beyond this it must leave --other-connections-reserved free.",
        ),
    ] = _LIMITS.connections_per_address_max
    other_connections_reserved: Annotated[
        int, _limit("OTHER_CONNECTIONS_RESERVED", 0, "Connections kept for addresses that have few.")
    ] = _LIMITS.other_connections_reserved
    server_connections_reserved: Annotated[
        int, _limit("SERVER_CONNECTIONS_RESERVED", 0, "Further connections, kept for servers of the cluster.")
    ] = _LIMITS.server_connections_reserved
    handshakes_max: Annotated[
        int,
        _limit("HANDSHAKES_MAX", 1, "Connections before the end of their handshake. One more replaces the oldest."),
    ] = _LIMITS.handshakes_max
    handshakes_per_address_max: Annotated[
        int, _limit("HANDSHAKES_PER_ADDRESS_MAX", 1, "Connections from one address before the end of their handshake.")
    ] = _LIMITS.handshakes_per_address_max
    handshake_ms_max: Annotated[
        int, _limit("HANDSHAKE_MS_MAX", 1, "Milliseconds that a handshake may take, TLS included.")
    ] = _LIMITS.handshake_ms_max
    log_format: LogFormatOption = "text"
    log_level: LogLevelOption = "info"

    def tls(self) -> Tls | None:
        if self.tls_certificate is None and self.tls_key is None and self.tls_ca is None:
            if self.tls_client_ca is not None:
                raise InvalidArgument("--tls-client-ca needs --tls-certificate, --tls-key and --tls-ca")
            if self.tokens is not None:
                raise InvalidArgument(
                    "--tokens needs TLS: give --tls-certificate, --tls-key and --tls-ca, too. Servers know each other "
                    "by their certificates, and a token must not travel in the clear"
                )
            return None
        if self.tls_certificate is None or self.tls_key is None or self.tls_ca is None:
            raise InvalidArgument("TLS needs all of --tls-certificate, --tls-key and --tls-ca")
        files = TlsFiles(self.tls_certificate, self.tls_key, self.tls_ca, self.tls_client_ca)
        if self.tokens is None:
            return load_tls(files)
        tokens = read_tokens(self.tokens)
        _log.warning(
            "--tokens %s: files of tokens are supported until %s, and their %s tokens do not count where access "
            "control is enforced: `cutwater cluster secure --permissive`, and then `cutwater token import` with this "
            "file, make tokens of the cluster instead (docs/access.md)",
            *(self.tokens, TOKEN_FILE_UNTIL, len(tokens)),
        )
        return load_tls(files, tokens)

    def listener(self) -> ListenerOptions:
        names = ListenerOptions.__struct_fields__
        return ListenerOptions(**{name: getattr(self, name) for name in names if hasattr(self, name)})

    def configure_logs(self) -> None:
        configure_logs(self.log_format, self.log_level)


class _WithoutSecrets(structlog.stdlib.ProcessorFormatter):
    """Hides tokens that callers give where something else is expected: errors repeat what was given."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(str(super().format(record)))


def configure_logs(log_format: str, log_level: str) -> None:
    """Make logs structured; the servers use the standard library's logging."""
    common: list[structlog.typing.Processor] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    if log_format == "json":
        common.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer()
    formatter = _WithoutSecrets(
        foreign_pre_chain=common,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)


def announce(serving: msgspec.Struct, text: str) -> None:
    """Print the line that says that a server serves."""
    print(msgspec.json.encode(serving).decode() if Settings.is_json else text, flush=True)
