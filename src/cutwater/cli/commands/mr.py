"""``cutwater mr``: nodes of the metadata repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from cutwater.cli.framework.command import command, noun
from cutwater.cli.framework.exit_codes import Settings
from cutwater.cli.framework.listen_limits import ListenLimits
from cutwater.cli.framework.logs import LogOptions
from cutwater.cli.framework.security import ServerSecurity
from cutwater.metadata.start import MetadataServing, MetadataStartOptions, run_metadata_node
from cutwater.types import ClusterId, MetadataNodeId

app = noun("The metadata repository: orders the log and keeps the catalog.")

_REPAIR = "Repair"


@command(app)
def start(
    cluster_id: Annotated[int, typer.Option(min=1, envvar="CUTWATER_CLUSTER_ID", help="Number of the cluster.")],
    node_id: Annotated[
        int, typer.Option("--id", min=1, envvar="CUTWATER_MR_ID", help="Number of this node among those on the store.")
    ],
    store: Annotated[
        str,
        typer.Option(
            envvar="CUTWATER_STORE",
            metavar="sqlite:PATH|etcd://HOST:PORT,…/PREFIX",
            help="Where decisions are kept: SQLite for one node, etcd for several.",
        ),
    ],
    listen: Annotated[
        str, typer.Option(envvar="CUTWATER_LISTEN", metavar="HOST:PORT", help="Where to listen; port 0 chooses one.")
    ] = "127.0.0.1:7001",
    advertise: Annotated[
        str | None,
        typer.Option(
            envvar="CUTWATER_ADVERTISE",
            metavar="HOST:PORT",
            help="The address for other processes, if it is not the one of --listen.",
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="CUTWATER_KEY_FILE",
            metavar="PATH",
            help="The private key of this node, made if it is missing; by default beside the SQLite file, or in the "
            "user's state directory.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(envvar="CUTWATER_METRICS", metavar="HOST:PORT", help="Where Prometheus can read metrics."),
    ] = None,
    node_dead_after: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds of silence after which a storage node is dead.", rich_help_panel=_REPAIR),
    ] = 2.0,
    replace_node_after: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds after which others take a dead node's place.", rich_help_panel=_REPAIR),
    ] = 60.0,
    replace_stream_after: Annotated[
        float,
        typer.Option(
            min=0.1, help="Seconds after which a log stream that cannot be opened is replaced.", rich_help_panel=_REPAIR
        ),
    ] = 10.0,
    min_replication: Annotated[
        int,
        typer.Option(min=1, help="A log stream with fewer complete copies stays sealed.", rich_help_panel=_REPAIR),
    ] = 1,
    snapshot_every: Annotated[
        int, typer.Option(min=16, help="Decisions after which the store gets a snapshot and forgets them.")
    ] = 1_024,
    retention_every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between checks of topics that have a retention.")
    ] = 10.0,
    staged_expire_after: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which rows that were staged and not published expire.")
    ] = 3_600.0,
    *,
    security: ServerSecurity,
    limits: ListenLimits,
    logs: LogOptions,
) -> None:
    """Run a node of the metadata repository until SIGTERM or SIGINT. Prints one line when it serves."""
    logs.configure()
    options = MetadataStartOptions(
        ClusterId(cluster_id),
        MetadataNodeId(node_id),
        listen,
        store,
        advertise,
        security.insecure,
        security.tls(),
        metrics,
        node_dead_after,
        replace_node_after,
        replace_stream_after,
        min_replication,
        snapshot_every,
        retention_every,
        staged_expire_after,
        listener=limits.options(),
        key_file=key_file,
    )
    run_metadata_node(options, _announce)


def _announce(serving: MetadataServing) -> None:
    if Settings.is_json:
        print(msgspec.json.encode(serving).decode(), flush=True)
        return
    metrics = f", metrics at {serving.metrics}" if serving.metrics is not None else ""
    print(
        f"metadata node {serving.node} of cluster {serving.cluster} serves at {serving.address} on {serving.store}"
        f"{metrics}",
        flush=True,
    )
