"""``cutwater``: the root of the command line.

A command is imported when it is used. The version, help and completions load no command, and a command loads only what
it needs itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.completion import get_completion_inspect_parameters

from cutwater import __version__
from cutwater.cli.framework import config_file
from cutwater.cli.framework.command import Command, CommandGroup, DebugOption, asks_for_json, usage_told
from cutwater.cli.framework.exit_codes import Settings, output_told, show
from cutwater.errors import CutwaterError

VARIABLES = "CUTWATER"
"""Prefix of environment variables; an option without a variable of its own gets one named after command and option."""
_RECORDS, _PIPELINES, _CLUSTER, _ACCESS, _MACHINE = "Records", "Pipelines", "Cluster", "Access", "This machine"


class CommandEntry(NamedTuple):
    """A command of the root: its module, and its text in the list of commands."""

    module: str
    help: str
    panel: str


ENTRIES: dict[str, CommandEntry] = {
    "append": CommandEntry("append", "Append records: lines or JSON from standard input, or files.", _RECORDS),
    "subscribe": CommandEntry("subscribe", "Print the records of topics, in the order of the log.", _RECORDS),
    "read": CommandEntry("positions", "Print the record at a position.", _RECORDS),
    "tail": CommandEntry("positions", "Print the highest GLSN that is given out.", _RECORDS),
    "find": CommandEntry("positions", "Print the first GLSN that was committed at or after a time.", _RECORDS),
    "cursor": CommandEntry("positions", "Cursors: how far consumers have come, kept in the cluster.", _RECORDS),
    "topic": CommandEntry("topic", "Topics: names for sets of log streams.", _RECORDS),
    "pipeline": CommandEntry("pipeline", "Pipelines: programs over the log that run on Spark.", _PIPELINES),
    "job": CommandEntry("job", "Jobs: pipelines that the cluster keeps running on its agents.", _PIPELINES),
    "savepoint": CommandEntry("savepoint", "Savepoints: the state of pipelines in files.", _PIPELINES),
    "cluster": CommandEntry("cluster", "Start and stop a local cluster; look at any cluster.", _CLUSTER),
    "stream": CommandEntry("stream", "Log streams: the shards of the log.", _CLUSTER),
    "run": CommandEntry("run", "Runs: what publishes batches exactly once.", _CLUSTER),
    "sn": CommandEntry("sn", "Storage nodes: processes that hold replicas of log streams.", _CLUSTER),
    "mr": CommandEntry("mr", "The metadata repository: orders the log and keeps the catalog.", _CLUSTER),
    "agent": CommandEntry("job_agents", "Agents: processes that run jobs, one per machine.", _CLUSTER),
    "audit": CommandEntry("audit", "The audit: changes, and denied calls.", _CLUSTER),
    "service": CommandEntry("service", "The REST service: the cluster over HTTP.", _CLUSTER),
    "verify": CommandEntry("checks", "Let every storage node check the checksums of all its data.", _CLUSTER),
    "token": CommandEntry("token", "Tokens: how clients prove for which principal they act.", _ACCESS),
    "acl": CommandEntry("access", "Rules: which principals and groups may do what.", _ACCESS),
    "group": CommandEntry("access", "Groups: principals that share rules and quotas.", _ACCESS),
    "principal": CommandEntry("access", "Principals: the names for which clients act.", _ACCESS),
    "quota": CommandEntry("quota", "Quotas: what principals and groups may use of the whole cluster.", _ACCESS),
    "whoami": CommandEntry("access", "Say for which principal this command acts.", _ACCESS),
    "doctor": CommandEntry("checks", "Check whether this machine, and a cluster, are fit for Cutwater.", _MACHINE),
    "bench": CommandEntry(
        "bench", "Measure how fast a cluster or an embedded log takes and delivers records.", _MACHINE
    ),
    "config": CommandEntry("config", "Show what is configured, and where.", _MACHINE),
    "completion": CommandEntry("completion", "Print a script that lets a shell complete commands.", _MACHINE),
}


def load(name: str) -> Any:
    """Return the command itself, with its options; for a noun, with its subcommands."""
    group = typer.main.get_group(import_module(f"cutwater.cli.commands.{ENTRIES[name].module}").app)
    # A module is about one noun, or has several commands of the root.
    return group.commands.get(name, group)


class Root(CommandGroup):
    """Lists commands by their ``ENTRIES``, and loads the one that is run."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, entry in ENTRIES.items():
            self.add_command(Command(name, help=entry.help, rich_help_panel=entry.panel))

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        Settings.is_json = asks_for_json(args)
        with usage_told():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with usage_told():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, None, rest
        command = load(name)
        try:
            files = config_file.read(frozenset(ENTRIES))
            ctx.default_map = {name: config_file.default_map(files, command, (name,))}
        except CutwaterError as error:
            if not ctx.resilient_parsing:
                raise typer.Exit(show(error)) from None
        return name, command, rest


app = typer.Typer(
    name="cutwater",
    cls=Root,
    help="One totally ordered, replicated log. Every option can also be set in the environment, as CUTWATER_*, or in "
    "cutwater.toml. The command line takes precedence, then the environment.",
    context_settings={"auto_envvar_prefix": VARIABLES},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"cutwater {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: DebugOption = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    # Typer completes words for shells that it has registered. It registers them when its own options for completion are
    # made, which this command line does not have.
    get_completion_inspect_parameters()
    with output_told():
        app(prog_name="cutwater")
