"""``cutwater agent start``: runs the agent of this machine."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cutwater.admin import local_cluster
from cutwater.admin.cluster_certificates import ADMIN_TOKEN, OWNER, authority_file, certificate_place
from cutwater.cli.framework.command import command, under
from cutwater.cli.framework.server_options import LogFormatOption, LogLevelOption, announce, configure_logs
from cutwater.cli.framework.target import ClusterTarget
from cutwater.cli.framework.values import parse_pairs, parse_size
from cutwater.core.text import counted

if TYPE_CHECKING:
    from cutwater.agent.agent_options import AgentServing

_jobs, _roots, _limits, _packages = under("Jobs"), under("Roots"), under("Limits"), under("Packages")


@dataclass(frozen=True)
class AgentTarget(ClusterTarget):
    """The cluster whose jobs an agent runs."""

    left_out = frozenset({"path", "timeout"})


def add_to(app: typer.Typer) -> None:
    command(app)(start)


def start(
    name: Annotated[
        str, typer.Option(envvar="CUTWATER_AGENT_NAME", help="Name of the agent in the cluster, such as the machine's.")
    ],
    slots: Annotated[int, _jobs(min=1, help="Number of slots: a job takes one, or as many as it says.")] = 1,
    label: Annotated[
        list[str] | None, _jobs(metavar="KEY=VALUE", help="A label that jobs may ask for. Repeatable.")
    ] = None,
    master: Annotated[
        list[str] | None,
        _jobs(
            metavar="MASTER",
            help="A master of Spark that jobs may name: local, spark://HOST:PORT, yarn, k8s://…. Repeatable; the first "
            "is the default. If none is given: local.",
        ),
    ] = None,
    shared_user: Annotated[
        bool,
        _jobs("--shared-user", help="Run jobs of several owners as one system user. They can read each other's files."),
    ] = False,
    job_users: Annotated[
        list[str] | None,
        _jobs(metavar="USER", help="A system user for one job at a time. Repeatable; the agent has to run as root."),
    ] = None,
    job_env: Annotated[
        list[str] | None,
        _jobs(metavar="VARIABLE", help="A variable of this process that jobs get, too. Repeatable. Others stay here."),
    ] = None,
    drain_seconds: Annotated[
        float, _jobs(min=0.1, help="How long jobs may take to stop when the agent is asked to end.")
    ] = 60.0,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Where the agent keeps its files. If it is not given: below ~/.local/state/cutwater."),
    ] = None,
    checkpoint_root: Annotated[
        list[str] | None,
        _roots(
            metavar="NAME=PLACE[,shared]",
            help="A place for checkpoints that jobs name: a directory, or a URL such as hdfs://…. shared: agents with "
            "this name reach the same files. Repeatable. If none is given: default, in the work directory.",
        ),
    ] = None,
    savepoint_root: Annotated[
        list[str] | None, _roots(metavar="NAME=PLACE[,shared]", help="The same for savepoints.")
    ] = None,
    memory_per_slot: Annotated[
        str | None, _limits(metavar="SIZE", help="The most memory that a job may use for each of its slots: 4g.")
    ] = None,
    cpus_per_slot: Annotated[
        float, _limits(min=0.0, help="The most processors that a job may use for each of its slots.")
    ] = 0.0,
    nice: Annotated[int, _limits(min=0, max=19, help="How much the processes of jobs give way to others.")] = 0,
    index_url: Annotated[
        str,
        _packages(
            metavar="URL",
            help="The index of packages that jobs need. With a password in it, set it in the environment.",
        ),
    ] = "",
    find_links: Annotated[
        str, _packages(metavar="DIR", help="A directory with wheels, in addition to the index, or instead of it.")
    ] = "",
    log_format: LogFormatOption = "text",
    log_level: LogLevelOption = "info",
    *,
    cluster: AgentTarget,
) -> None:
    """Run the jobs that the cluster gives to this machine, until SIGTERM or SIGINT.

    Prints one line when it has registered; logs go to standard error. It listens nowhere.

    When it is asked to end, its jobs stop and go on at other agents; a second signal kills them. One agent per machine.
    """
    configure_logs(log_format, log_level)
    # Only this command needs what runs jobs.
    from cutwater.agent.agent_options import LOCAL, AgentStartOptions  # noqa: PLC0415
    from cutwater.agent.processes.limits import SlotLimits  # noqa: PLC0415
    from cutwater.agent.roots import parse_root  # noqa: PLC0415
    from cutwater.agent.start import run_agent  # noqa: PLC0415
    from cutwater.programs.environments import PackageSource  # noqa: PLC0415

    memory = 0 if memory_per_slot is None else parse_size("--memory-per-slot", memory_per_slot)
    options = AgentStartOptions(
        name,
        str(cluster.place),
        _token(cluster),
        cluster.access().tls,
        _tls_files(cluster),
        slots,
        parse_pairs("--label", label or ()),
        tuple(parse_root("--checkpoint-root", text) for text in checkpoint_root or ()),
        tuple(parse_root("--savepoint-root", text) for text in savepoint_root or ()),
        tuple(master or (LOCAL,)),
        work_dir,
        shared_user,
        tuple(job_users or ()),
        SlotLimits(memory, cpus_per_slot),
        nice,
        PackageSource(index_url, find_links),
        tuple(job_env or ()),
        drain_seconds,
        platform.node(),
    )
    run_agent(options, _announce)


def _announce(serving: AgentServing) -> None:
    announce(serving, f"agent {serving.agent!r} runs with {counted(serving.slots, 'slot')}, as process {serving.pid}")


def _token(cluster: AgentTarget) -> str | Path:
    given = cluster.security.token_or_file()
    if given or cluster.local is None:
        return given
    kept = cluster.local / ADMIN_TOKEN
    return kept if kept.exists() else ""


def _tls_files(cluster: AgentTarget) -> tuple[str, str, str]:
    if cluster.local is not None:
        if not local_cluster.load(cluster.local).has_tls:
            return "", "", ""
        ca = authority_file(cluster.local)
        certificate, key = certificate_place(ca.parent, OWNER)
        return str(ca), str(certificate), str(key)
    security = cluster.security
    given = (security.tls_ca, security.tls_certificate, security.tls_key)
    ca_file, certificate_file, key_file = ("" if path is None else str(path.absolute()) for path in given)
    return ca_file, certificate_file, key_file
