"""``cutwater stream``: shows and manages log streams."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from cutwater.admin.status_text import tell_stream
from cutwater.cli.framework.command import command, noun
from cutwater.cli.framework.target import ClusterTarget
from cutwater.cli.io.output import show
from cutwater.types import LogStreamId, StorageNodeId

app = noun("Log streams: the shards of the log.")

StreamArgument = Annotated[int, typer.Argument(metavar="STREAM", min=1, help="Number of the log stream.")]
NodeOption = Annotated[int, typer.Option(min=1, help="Number of a storage node.")]


@command(app)
def describe(stream: StreamArgument, log: ClusterTarget) -> None:
    """Show the state of a log stream: why and since when, what is missing and what happens next."""
    found, damage = log.administer(lambda admin: admin.stream_with_damage(LogStreamId(stream)))
    lines = [*tell_stream(found), *(f"  damage:  storage node {d.node}: {line}" for d in damage for line in d.lines)]
    show(msgspec.to_builtins(found) | {"damage": msgspec.to_builtins(damage)}, "\n".join(lines))


@command(app, timeout=30.0)
def create(topic: Annotated[str, typer.Argument(help="Name of the topic.")], log: ClusterTarget) -> None:
    """Add a log stream to a topic."""
    stream = log.administer(lambda admin: admin.add_stream(topic))
    show({"stream": stream}, f"log stream {stream} takes appends")


@command(app)
def seal(stream: StreamArgument, log: ClusterTarget) -> None:
    """Stop appends to a log stream until it is unsealed."""
    sealed = log.administer(lambda admin: admin.seal(LogStreamId(stream)))
    show(sealed, f"log stream {stream} is sealed in epoch {sealed.epoch} at LLSN {sealed.llsn}")


@command(app)
def finalize(stream: StreamArgument, log: ClusterTarget) -> None:
    """Stop appends to a log stream permanently. Another one is opened in its place."""
    sealed = log.administer(lambda admin: admin.finalize(LogStreamId(stream)))
    show(sealed, f"log stream {stream} is sealed for good in epoch {sealed.epoch} at LLSN {sealed.llsn}")


@command(app, timeout=30.0)
def unseal(stream: StreamArgument, log: ClusterTarget) -> None:
    """Let a sealed log stream take appends again."""
    log.administer(lambda admin: admin.unseal(LogStreamId(stream)))
    show({"stream": stream}, f"log stream {stream} takes appends")


@command(app)
def sync(stream: StreamArgument, node: NodeOption, log: ClusterTarget) -> None:
    """Let an incomplete replica learn from a peer now."""
    log.administer(lambda admin: admin.sync(LogStreamId(stream), StorageNodeId(node)))
    show({"stream": stream, "node": node}, f"storage node {node} learns log stream {stream}")


@command(app)
def replace(stream: StreamArgument, old: NodeOption, new: NodeOption, log: ClusterTarget) -> None:
    """Move a replica of a sealed log stream from one storage node to another. A complete replica stays until the new
    one is complete too."""
    log.administer(lambda admin: admin.replace_replica(LogStreamId(stream), StorageNodeId(old), StorageNodeId(new)))
    show({"stream": stream, "old": old, "new": new}, f"storage node {new} takes the place of {old}")
