"""``cutwater sn``: storage nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from cutwater.admin.operations import StorageNodeStatus, describe_storage_node
from cutwater.cli.exits import ends_well, leave_at_once
from cutwater.cli.logs import configure
from cutwater.cli.options import (
    DebugOption,
    LogFormat,
    LogFormatOption,
    LogLevel,
    LogLevelOption,
    Output,
    OutputOption,
)
from cutwater.cli.security import (
    InsecureOption,
    TlsAuthorityOption,
    TlsCertificateOption,
    TlsKeyOption,
    client_tls,
    tls_files,
)
from cutwater.cli.servers import DirOption, ServersOption, TimeoutOption, with_admin
from cutwater.cli.tables import show, table
from cutwater.client.access import Access
from cutwater.storagenode.staging import ASK_SECONDS, STAGED_BYTES_MAX
from cutwater.storagenode.start import STOP_SECONDS, Serving, StartOptions, run_storage_node
from cutwater.types import ClusterId, StorageNodeId

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(help="Storage nodes: processes that hold replicas of log streams.", no_args_is_help=True)

volume_app = typer.Typer(help="Volumes of a storage node that runs.", no_args_is_help=True)
app.add_typer(volume_app, name="volume")

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
    insecure: InsecureOption = False,
    tls_certificate: TlsCertificateOption = None,
    tls_key: TlsKeyOption = None,
    tls_ca: TlsAuthorityOption = None,
    reserve_mib: Annotated[
        int,
        typer.Option(
            min=0, envvar="CUTWATER_RESERVE_MIB", help="With less room on a volume than this, appends are refused."
        ),
    ] = 64,
    staged_max_mib: Annotated[
        int,
        typer.Option(
            min=1, envvar="CUTWATER_STAGED_MAX_MIB", help="More than this is not staged here before it is published."
        ),
    ] = STAGED_BYTES_MAX // MIB,
    staged_ask_every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between questions which staged rows are no longer needed.")
    ] = ASK_SECONDS,
    metrics: Annotated[
        str | None,
        typer.Option(envvar="CUTWATER_METRICS", metavar="HOST:PORT", help="Where Prometheus can read metrics."),
    ] = None,
    stop_seconds: Annotated[
        float, typer.Option(min=0.1, envvar="CUTWATER_STOP_SECONDS", help="How long stopping may take.")
    ] = STOP_SECONDS,
    log_format: LogFormatOption = LogFormat.TEXT,
    log_level: LogLevelOption = LogLevel.INFO,
    forget_volume: Annotated[
        list[Path] | None,
        typer.Option(help="A volume that the node got while it ran and that is lost for good. Repeatable."),
    ] = None,
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
        tls_files(tls_certificate, tls_key, tls_ca),
        metrics,
        reserve_mib * MIB,
        stop_seconds,
        tuple(forget_volume or ()),
        staged_max_mib * MIB,
        staged_ask_every,
    )
    run_storage_node(options, lambda serving: _announce(serving, output), leave_at_once)


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


@app.command()
@ends_well
def add(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the storage node listens.")],
    servers: ServersOption = None,
    directory: DirOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Let a storage node that runs belong to the cluster. Returns when it may be used."""
    node = with_admin(servers, directory, timeout, lambda admin: admin.add_storage_node(address))
    show(output, {"node": node}, f"storage node {node} at {address} belongs to the cluster")


@app.command()
@ends_well
def remove(
    node_id: Annotated[int, typer.Argument(metavar="NODE", min=1, help="Number of the storage node.")],
    servers: ServersOption = None,
    directory: DirOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Let a storage node leave the cluster. Refused while it has replicas that are needed. Its data stays."""
    with_admin(servers, directory, timeout, lambda admin: admin.remove_storage_node(StorageNodeId(node_id)))
    show(output, {"node": node_id}, f"storage node {node_id} has left the cluster")


@app.command()
@ends_well
def describe(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the storage node listens.")],
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """What a storage node says of itself, whether or not it belongs to a cluster."""
    access = Access(client_tls())
    found = asyncio.run(describe_storage_node(address, timeout_ms=round(timeout * 1_000), access=access))
    belongs = "belongs to it" if found.cluster_key is not None else "was not added to it yet"
    title = f"storage node {found.node} of cluster {found.cluster}, which {belongs}; version {found.version}"
    show(output, found, _volumes(found, title))


def _volumes(found: StorageNodeStatus, title: str) -> Table:
    rows = [(room.path, room.total_bytes, room.free_bytes) for room in found.volumes]
    return table(["volume", "bytes", "free"], rows, title)


VolumeArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A directory on the machine of the storage node, from / on.")
]
NodeOption = Annotated[int, typer.Option("--node", min=1, help="Number of the storage node.")]


@volume_app.command("add")
@ends_well
def add_volume(
    path: VolumeArgument,
    node: NodeOption,
    servers: ServersOption = None,
    directory: DirOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Let a storage node that runs use one more directory. It remembers that, until --volumes names it at a start."""
    found = with_admin(servers, directory, timeout, lambda admin: admin.add_volume(StorageNodeId(node), path))
    show(output, found, _volumes(found, f"storage node {node} uses {path} from now on, also when it is started again"))


@volume_app.command("remove")
@ends_well
def remove_volume(
    path: VolumeArgument,
    node: NodeOption,
    servers: ServersOption = None,
    directory: DirOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Let a storage node that runs do without a volume. Refused while anything lies there."""
    found = with_admin(servers, directory, timeout, lambda admin: admin.remove_volume(StorageNodeId(node), path))
    title = f"storage node {node} does not use {path} any more; if --volumes names it at the next start, it does again"
    show(output, found, _volumes(found, title))
