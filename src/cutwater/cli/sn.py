"""``cutwater sn``: storage nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cutwater.cli.exits import ends_well, leave_at_once
from cutwater.cli.logs import LogFormat, LogLevel, configure
from cutwater.cli.options import DebugOption, LogFormatOption, LogLevelOption, Output, OutputOption
from cutwater.errors import InvalidArgument
from cutwater.storagenode.start import STOP_SECONDS, Serving, StartOptions, TlsFiles, run_storage_node
from cutwater.types import ClusterId, StorageNodeId

app = typer.Typer(help="Storage nodes: processes that hold replicas of log streams.", no_args_is_help=True)

MIB = 1024 * 1024
_SERVING, _SECURITY, _DISK = "Serving", "Security", "Disk"


@app.callback()
def nodes() -> None:
    """Storage nodes: processes that hold replicas of log streams."""


@app.command()
@ends_well
def start(
    cluster_id: Annotated[int, typer.Option(min=1, envvar="CUTWATER_CLUSTER_ID", help="Number of the cluster.")],
    node_id: Annotated[
        int, typer.Option("--id", min=1, envvar="CUTWATER_SN_ID", help="Number of the storage node in the cluster.")
    ],
    volumes: Annotated[
        list[Path], typer.Option(envvar="CUTWATER_VOLUMES", help="A directory for data, which exists. Repeatable.")
    ],
    metadata: Annotated[
        str,
        typer.Option(envvar="CUTWATER_METADATA", metavar="HOST:PORT,…", help="Where the metadata repository listens."),
    ],
    listen: Annotated[
        str, typer.Option(envvar="CUTWATER_LISTEN", metavar="HOST:PORT", help="Where to listen; port 0 chooses one.")
    ] = "127.0.0.1:7101",
    advertise: Annotated[
        str,
        typer.Option(
            envvar="CUTWATER_ADVERTISE",
            metavar="HOST:PORT",
            help="Where others reach this node, if not where it listens.",
        ),
    ] = "",
    error_if_exists: Annotated[
        bool, typer.Option("--error-if-exists", help="Do not start if this node has data already.")
    ] = False,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            envvar="CUTWATER_INSECURE",
            help="Listen beyond this machine without TLS.",
            rich_help_panel=_SECURITY,
        ),
    ] = False,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(envvar="CUTWATER_TLS_CERTIFICATE", help="This node's certificate.", rich_help_panel=_SECURITY),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="CUTWATER_TLS_KEY", help="Its private key.", rich_help_panel=_SECURITY)
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(envvar="CUTWATER_TLS_CA", help="Whose certificates are believed.", rich_help_panel=_SECURITY),
    ] = None,
    reserve_mib: Annotated[
        int,
        typer.Option(
            min=0, envvar="CUTWATER_RESERVE_MIB", help="With less room on a volume than this, appends are refused."
        ),
    ] = 64,
    metrics: Annotated[
        str | None,
        typer.Option(envvar="CUTWATER_METRICS", metavar="HOST:PORT", help="Where Prometheus can read metrics."),
    ] = None,
    stop_seconds: Annotated[
        float, typer.Option(min=0.1, envvar="CUTWATER_STOP_SECONDS", help="How long stopping may take.")
    ] = STOP_SECONDS,
    log_format: LogFormatOption = LogFormat.TEXT,
    log_level: LogLevelOption = LogLevel.INFO,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Run a storage node until SIGTERM or SIGINT. Prints one line when it serves; logs go to standard error."""
    configure(log_format, log_level)
    options = StartOptions(
        ClusterId(cluster_id),
        StorageNodeId(node_id),
        tuple(volumes),
        listen,
        tuple(address.strip() for address in metadata.split(",") if address.strip()),
        advertise,
        error_if_exists,
        insecure,
        _tls(tls_certificate, tls_key, tls_ca),
        metrics,
        reserve_mib * MIB,
        stop_seconds,
    )
    run_storage_node(options, lambda serving: _announce(serving, output), leave_at_once)


def _tls(certificate: Path | None, key: Path | None, authority: Path | None) -> TlsFiles | None:
    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None or authority is None:
        raise InvalidArgument("TLS needs all of --tls-certificate, --tls-key and --tls-ca")
    return TlsFiles(certificate, key, authority)


def _announce(serving: Serving, output: Output) -> None:
    if output is Output.JSON:
        print(msgspec.json.encode(serving).decode(), flush=True)
        return
    damaged = f" ({serving.unreadable} of them cannot be opened)" if serving.unreadable else ""
    metrics = f", metrics at {serving.metrics}" if serving.metrics is not None else ""
    print(
        f"storage node {serving.node} of cluster {serving.cluster} serves at {serving.address} with "
        f"{serving.replicas} replicas{damaged}, opened in {serving.opened_ms} ms{metrics}",
        flush=True,
    )
