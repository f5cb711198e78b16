"""``cutwater stream``: log streams."""

from __future__ import annotations

from typing import Annotated

import typer

from cutwater.admin.telling import tell_stream
from cutwater.cli.exits import ends_well
from cutwater.cli.options import DebugOption, Output, OutputOption
from cutwater.cli.servers import DirOption, ServersOption, TimeoutOption, with_admin
from cutwater.cli.tables import show
from cutwater.types import LogStreamId, StorageNodeId

app = typer.Typer(help="Log streams: the shards of the log.", no_args_is_help=True)

StreamArgument = Annotated[int, typer.Argument(metavar="STREAM", min=1, help="Number of the log stream.")]
NodeOption = Annotated[int, typer.Option(min=1, help="Number of a storage node.")]


@app.command()
@ends_well
def describe(
    stream: StreamArgument,
    servers: ServersOption = None,
    directory: DirOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """How a log stream is: why, since when, what is missing and what happens next."""
    found = with_admin(servers, directory, timeout, lambda admin: admin.stream(LogStreamId(stream)))
    show(output, found, "\n".join(tell_stream(found)))


@app.command()
@ends_well
def create(
    topic: Annotated[str, typer.Argument(help="Name of the topic.")],
    servers: ServersOption = None,
    directory: DirOption = None,
    timeout: TimeoutOption = 30.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Give a topic one more log stream."""
    stream = with_admin(servers, directory, timeout, lambda admin: admin.add_stream(topic))
    show(output, {"stream": stream}, f"log stream {stream} takes appends")


@app.command()
@ends_well
def seal(
    stream: StreamArgument,
    servers: ServersOption = None,
    directory: DirOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Stop appends to a log stream until it is unsealed."""
    sealed = with_admin(servers, directory, timeout, lambda admin: admin.seal(LogStreamId(stream)))
    show(output, sealed, f"log stream {stream} is sealed in epoch {sealed.epoch} at LLSN {sealed.llsn}")


@app.command()
@ends_well
def finalize(
    stream: StreamArgument,
    servers: ServersOption = None,
    directory: DirOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Stop appends to a log stream for good. Another one is opened in its place."""
    sealed = with_admin(servers, directory, timeout, lambda admin: admin.finalize(LogStreamId(stream)))
    show(output, sealed, f"log stream {stream} is sealed for good in epoch {sealed.epoch} at LLSN {sealed.llsn}")


@app.command()
@ends_well
def unseal(
    stream: StreamArgument,
    servers: ServersOption = None,
    directory: DirOption = None,
    timeout: TimeoutOption = 30.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Let a log stream that was sealed take appends again."""
    with_admin(servers, directory, timeout, lambda admin: admin.unseal(LogStreamId(stream)))
    show(output, {"stream": stream}, f"log stream {stream} takes appends")


@app.command()
@ends_well
def sync(
    stream: StreamArgument,
    node: NodeOption,
    servers: ServersOption = None,
    directory: DirOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Let a replica that is not complete learn from a peer now."""
    with_admin(servers, directory, timeout, lambda admin: admin.sync(LogStreamId(stream), StorageNodeId(node)))
    show(output, {"stream": stream, "node": node}, f"storage node {node} learns log stream {stream}")


@app.command()
@ends_well
def replace(
    stream: StreamArgument,
    old: NodeOption,
    new: NodeOption,
    servers: ServersOption = None,
    directory: DirOption = None,
    timeout: TimeoutOption = 10.0,
    output: OutputOption = Output.TEXT,
    debug: DebugOption = False,
) -> None:
    """Let another storage node hold a sealed log stream instead of one that does now."""
    with_admin(
        servers,
        directory,
        timeout,
        lambda admin: admin.replace_replica(LogStreamId(stream), StorageNodeId(old), StorageNodeId(new)),
    )
    show(output, {"stream": stream, "old": old, "new": new}, f"storage node {new} takes the place of {old}")
