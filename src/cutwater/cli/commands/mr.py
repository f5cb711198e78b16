"""``cutwater mr``: nodes of the metadata repository."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cutwater.admin.access_calls import hash_of_token, id_of_token, new_token
from cutwater.admin.cluster_security import check_new, save_token
from cutwater.cli.framework.command import command, noun, under
from cutwater.cli.framework.server_options import (
    AdvertiseOption,
    ClusterIdOption,
    ListenOption,
    MetricsOption,
    ServerOptions,
    announce,
)
from cutwater.cli.io.output import show
from cutwater.errors import CutwaterError
from cutwater.metadata.admin_recovery import recover_admin
from cutwater.metadata.start import MetadataServing, MetadataStartOptions, run_metadata_node
from cutwater.types import ClusterId, MetadataNodeId

app = noun("The metadata repository: orders the log and keeps the catalog.")

_repair = under("Repair")


StoreOption = Annotated[
    str,
    typer.Option(
        envvar="CUTWATER_STORE",
        metavar="sqlite:PATH|etcd://HOST:PORT,…/PREFIX",
        help="Where decisions are kept: SQLite for one node, etcd for several.",
    ),
]


@command(app)
def start(
    cluster_id: ClusterIdOption,
    node_id: Annotated[
        int, typer.Option("--id", min=1, envvar="CUTWATER_MR_ID", help="Number of this node among those on the store.")
    ],
    store: StoreOption,
    listen: ListenOption = "127.0.0.1:7001",
    advertise: AdvertiseOption = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="CUTWATER_KEY_FILE",
            metavar="PATH",
            help="The private key of this node, made if it is missing; by default beside the SQLite file, or in the "
            "user's state directory.",
        ),
    ] = None,
    metrics: MetricsOption = None,
    node_dead_after: Annotated[
        float, _repair(min=0.1, help="Seconds of silence after which a storage node is dead.")
    ] = 2.0,
    replace_node_after: Annotated[
        float, _repair(min=0.1, help="Seconds after which others take a dead node's place.")
    ] = 60.0,
    replace_stream_after: Annotated[
        float, _repair(min=0.1, help="Seconds after which a log stream that cannot be opened is replaced.")
    ] = 10.0,
    min_replication: Annotated[int, _repair(min=1, help="A log stream with fewer complete copies stays sealed.")] = 1,
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
    server: ServerOptions,
) -> None:
    """Run a node of the metadata repository until SIGTERM or SIGINT. Prints one line when it serves."""
    server.configure_logs()
    options = MetadataStartOptions(
        ClusterId(cluster_id),
        MetadataNodeId(node_id),
        listen,
        store,
        advertise,
        server.insecure,
        server.tls(),
        metrics,
        node_dead_after,
        replace_node_after,
        replace_stream_after,
        min_replication,
        snapshot_every,
        retention_every,
        staged_expire_after,
        listener=server.listener(),
        key_file=key_file,
    )
    run_metadata_node(options, _announce)


@command(app, "recover-admin")
def recover(
    store: StoreOption,
    cluster_id: ClusterIdOption = 1,
    principal: Annotated[str, typer.Option(metavar="NAME", help="The principal that becomes administrator.")] = "admin",
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Put the token into this new file (0600) instead of printing it."),
    ] = None,
) -> None:
    """Make an administrator and its token with direct access to the store, when no administrator has one any more.

    The metadata nodes may run or not. The leader is interrupted for a moment. The audit shows this as done by
    _recovery.
    """
    if save is not None:
        check_new(save)
    token = new_token()
    made = asyncio.run(recover_admin(store, ClusterId(cluster_id), principal, id_of_token(token), hash_of_token(token)))
    if save is not None:
        try:
            save_token(save, token)
        except CutwaterError as error:
            error.message += f". The token was made, and nobody has it now: `cutwater token revoke {made.token_id}`"
            raise
    told = {"id": made.token_id, "principal": made.principal, "mode": made.mode}
    told |= {"file": str(save)} if save is not None else {"token": token}
    where = f"is in {save}" if save is not None else f"is shown only now, so keep it:\n{token}"
    lead = f"{made.principal} is an administrator; access control is {made.mode}"
    if made.is_running:
        lead += "\nmetadata nodes that run take this in within a second or two"
    show(told, f"{lead}\ntoken {made.token_id} {where}")


def _announce(serving: MetadataServing) -> None:
    metrics = f", metrics at {serving.metrics}" if serving.metrics is not None else ""
    announce(
        serving,
        f"metadata node {serving.node} of cluster {serving.cluster} serves at {serving.address} on {serving.store}"
        f"{metrics}",
    )
