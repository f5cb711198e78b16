"""``cutwater cluster``: a local cluster of real processes, and how a cluster is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cutwater.admin import local_cluster
from cutwater.cli.commands import command, noun
from cutwater.cli.exits import UNHEALTHY, Settings
from cutwater.cli.servers import Cluster
from cutwater.cli.tables import show, table, time_of

app = noun("Start and stop a local cluster; look at any cluster.")

RequiredDir = Annotated[
    Path, typer.Option("--dir", envvar="CUTWATER_DIR", help="Where everything of the cluster lies.")
]


@command(app)
def start(
    directory: RequiredDir,
    storage_nodes: Annotated[int | None, typer.Option(help="How many storage nodes; three for a new cluster.")] = None,
    replication: Annotated[
        int | None, typer.Option(help="Copies of every record; three, or as many as there are nodes, if not said.")
    ] = None,
    metadata: Annotated[
        int | None, typer.Option(help="Metadata nodes: 1 on SQLite, for a new cluster, or 3 or 5 on etcd.")
    ] = None,
) -> None:
    """Start a cluster on this machine, new or with the data that is there. Returns when it takes appends."""
    cluster = local_cluster.start(
        directory.absolute(), storage_nodes=storage_nodes, replication=replication, metadata=metadata
    )
    told = (
        f"{len(cluster.storage_nodes)} storage nodes and {len(cluster.metadata)} metadata node"
        f"{'s on etcd' if len(cluster.metadata) > 1 else ' on SQLite'} run; replication {cluster.replication}\n"
        f"servers: {cluster.servers}\nstop it with: cutwater cluster stop --dir {directory}"
    )
    show(cluster, told)


@command(app)
def stop(directory: RequiredDir) -> None:
    """Stop all processes of a local cluster. Its data stays."""
    killed = local_cluster.stop(directory.absolute())
    late = f"; {len(killed)} did not end in time and were killed" if killed else ""
    show({"killed": killed}, f"stopped{late}")


@command(app)
def restart(directory: RequiredDir) -> None:
    """Start again whatever of a local cluster does not run."""
    started = local_cluster.restart_dead(directory.absolute())
    show({"started": started}, "\n".join(f"started {name}" for name in started) or "everything runs")


@command(app)
def status(log: Cluster) -> None:
    """Storage nodes and log streams, as the leader sees them."""
    description = log.administer(lambda admin: admin.describe())
    show(
        description,
        table(
            ["storage node", "address", "alive", "state", "replicas", "volumes"],
            [
                (n.node, n.address, n.is_alive, n.state.name if n.state is not None else None, n.replicas, n.volumes)
                for n in description.nodes
            ],
            title=f"cluster {description.cluster}: GLSN {description.high_watermark} at "
            f"{time_of(description.cut_time)} UTC, leader epoch {description.leader_epoch}",
        ),
    )
    if not Settings.is_json:
        show(
            None,
            table(
                ["log stream", "topic", "state", "epoch", "members", "missing", "records"],
                [
                    (
                        s.stream,
                        s.topic,
                        _state(s.is_open, s.final, s.held),
                        s.epoch,
                        s.members,
                        s.missing,
                        s.committed_end,
                    )
                    for s in description.streams
                ],
            ),
        )


def _state(is_open: bool, final: bool, held: bool) -> str:
    if is_open:
        return "open"
    return "sealed for good" if final else "sealed by an operator" if held else "sealed"


@command(app)
def health(directory: RequiredDir) -> None:
    """Whether all is well with a local cluster: exit code 0 if so, 3 if not."""
    place = directory.absolute()
    wrong = asyncio.run(local_cluster.health(local_cluster.load(place), place))
    show({"healthy": not wrong, "wrong": wrong}, "\n".join(wrong) or "all is well")
    if wrong:
        raise typer.Exit(UNHEALTHY)


@command(app)
def events(
    after: Annotated[int, typer.Option(help="Only those after this decision.")] = 0,
    *,
    log: Cluster,
) -> None:
    """What was decided lately, and why; the newest last."""
    found = log.administer(lambda admin: admin.events(after))
    rows = [(e.index, time_of(e.time), e.what, e.reason or "-") for e in found.events]
    show(found, table(["decision", "after the cut of (UTC)", "what", "why"], rows))
