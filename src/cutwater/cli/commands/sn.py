"""``cutwater sn``: runs and manages storage nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cutwater.admin.operations import StorageNodeStatus, describe_storage_node
from cutwater.cli.framework.command import command, noun
from cutwater.cli.framework.exit_codes import leave_at_once
from cutwater.cli.framework.security import Security
from cutwater.cli.framework.server_options import (
    AdvertiseOption,
    ClusterIdOption,
    ListenOption,
    MetricsOption,
    ServerOptions,
    announce,
)
from cutwater.cli.framework.target import ClusterTarget, TimeoutOption
from cutwater.cli.io.output import show, table
from cutwater.core.text import counted
from cutwater.storagenode.publish.part_store import ASK_SECONDS, STAGED_BYTES_MAX
from cutwater.storagenode.repair.scrubbing import ScrubOptions
from cutwater.storagenode.start import STOP_SECONDS, NodeServing, NodeStartOptions, run_storage_node
from cutwater.types import ClusterId, StorageNodeId

if TYPE_CHECKING:
    from rich.console import RenderableType

app = noun("Storage nodes: processes that hold replicas of log streams.")

volume_app = noun("Volumes of a storage node that runs.")
app.add_typer(volume_app, name="volume")

MIB = 1024 * 1024


@command(app)
def start(
    cluster_id: ClusterIdOption,
    node_id: Annotated[
        int, typer.Option("--id", min=1, envvar="CUTWATER_SN_ID", help="Number of the storage node in the cluster.")
    ],
    volumes: Annotated[
        list[Path], typer.Option(envvar="CUTWATER_VOLUMES", help="An existing directory for data. Repeatable.")
    ],
    metadata: Annotated[
        str,
        typer.Option(envvar="CUTWATER_METADATA", metavar="HOST:PORT,…", help="Where the metadata repository listens."),
    ],
    listen: ListenOption = "127.0.0.1:7101",
    advertise: AdvertiseOption = None,
    error_if_exists: Annotated[
        bool, typer.Option("--error-if-exists", help="Do not start if this node has data already.")
    ] = False,
    reserve_mib: Annotated[
        int,
        typer.Option(
            min=0, envvar="CUTWATER_RESERVE_MIB", help="With less room on a volume than this, appends are refused."
        ),
    ] = 64,
    staged_max_mib: Annotated[
        int,
        typer.Option(
            min=1, envvar="CUTWATER_STAGED_MAX_MIB", help="The most that is staged here and not yet published."
        ),
    ] = STAGED_BYTES_MAX // MIB,
    staged_ask_every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between requests for the staged rows that are no longer needed.")
    ] = ASK_SECONDS,
    scrub_mib_per_second: Annotated[
        float,
        typer.Option(
            min=0.0,
            envvar="CUTWATER_SCRUB_MIB_PER_SECOND",
            help="How fast all data is read in the background and its checksums are verified; 0 turns it off.",
        ),
    ] = ScrubOptions().bytes_per_second / MIB,
    metrics: MetricsOption = None,
    stop_seconds: Annotated[
        float, typer.Option(min=0.1, envvar="CUTWATER_STOP_SECONDS", help="How long stopping may take.")
    ] = STOP_SECONDS,
    forget_volume: Annotated[
        list[Path] | None,
        typer.Option(help="A permanently lost volume that was added while the node ran. Repeatable."),
    ] = None,
    forget_metadata_keys: Annotated[
        bool,
        typer.Option(
            "--forget-metadata-keys",
            help="All metadata nodes were replaced: trust those that answer now at --metadata.",
        ),
    ] = False,
    *,
    server: ServerOptions,
) -> None:
    """Run a storage node until SIGTERM or SIGINT. Prints one line when it serves; logs go to standard error."""
    server.configure_logs()
    options = NodeStartOptions(
        ClusterId(cluster_id),
        StorageNodeId(node_id),
        tuple(volumes),
        listen,
        tuple(address.strip() for address in metadata.split(",") if address.strip()),
        advertise or "",
        error_if_exists,
        server.insecure,
        server.tls(),
        metrics,
        reserve_mib * MIB,
        stop_seconds,
        tuple(forget_volume or ()),
        staged_max_mib * MIB,
        staged_ask_every,
        scrub_bytes_per_second=round(scrub_mib_per_second * MIB),
        listener=server.listener(),
        forget_metadata_keys=forget_metadata_keys,
    )
    run_storage_node(options, _announce, leave_at_once)


def _announce(serving: NodeServing) -> None:
    damaged = f" ({serving.unreadable} of them cannot be opened)" if serving.unreadable else ""
    metrics = f", metrics at {serving.metrics}" if serving.metrics is not None else ""
    announce(
        serving,
        f"storage node {serving.node} of cluster {serving.cluster} serves at {serving.address} with "
        f"{counted(serving.replicas, 'replica')}{damaged}, opened in {serving.opened_ms} ms{metrics}",
    )


@command(app)
def add(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the storage node listens.")],
    log: ClusterTarget,
) -> None:
    """Add a running storage node to the cluster. Returns when it may be used."""
    node = log.administer(lambda admin: admin.add_storage_node(address))
    show({"node": node}, f"storage node {node} at {address} belongs to the cluster")


@command(app)
def remove(
    node_id: Annotated[int, typer.Argument(metavar="NODE", min=1, help="Number of the storage node.")],
    log: ClusterTarget,
) -> None:
    """Remove a storage node from the cluster. Refused while it has replicas that are needed. Its data stays."""
    log.administer(lambda admin: admin.remove_storage_node(StorageNodeId(node_id)))
    show({"node": node_id}, f"storage node {node_id} has left the cluster")


@command(app)
def describe(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the storage node listens.")],
    timeout: TimeoutOption = 10.0,
    *,
    security: Security,
) -> None:
    """Show what a storage node says of itself, whether or not it belongs to a cluster."""
    timeout_ms = round(timeout * 1_000)
    found = asyncio.run(describe_storage_node(address, timeout_ms=timeout_ms, access=security.access()))
    belongs = "belongs to it" if found.cluster_key is not None else "was not added to it yet"
    title = f"storage node {found.node} of cluster {found.cluster}, which {belongs}; version {found.version}"
    show(found, _volumes(found, title))


def _volumes(found: StorageNodeStatus, title: str) -> RenderableType:
    rows = [(room.path, room.total_bytes, room.free_bytes) for room in found.volumes]
    return table(["volume", "bytes", "free"], rows, title)


VolumeArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="A directory on the machine of the storage node, as an absolute path.")
]
NodeOption = Annotated[int, typer.Option("--node", min=1, help="Number of the storage node.")]


@command(volume_app, "add")
def add_volume(path: VolumeArgument, node: NodeOption, log: ClusterTarget) -> None:
    """Let a running storage node use one more directory. It remembers that, until --volumes names it at a start."""
    found = log.administer(lambda admin: admin.add_volume(StorageNodeId(node), path))
    show(found, _volumes(found, f"storage node {node} uses {path} from now on, also when it is started again"))


@command(volume_app, "remove")
def remove_volume(path: VolumeArgument, node: NodeOption, log: ClusterTarget) -> None:
    """Remove a volume from a running storage node. Refused while the volume holds any data."""
    found = log.administer(lambda admin: admin.remove_volume(StorageNodeId(node), path))
    title = f"storage node {node} does not use {path} any more; if --volumes names it at the next start, it does again"
    show(found, _volumes(found, title))
