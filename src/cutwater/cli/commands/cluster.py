"""``cutwater cluster``: runs a local cluster of real processes, and shows the state of any cluster."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import msgspec
import typer

from cutwater.admin import local_cluster
from cutwater.admin.access_calls import parse_mode
from cutwater.admin.cluster_security import (
    SecuredCluster,
    check_no_stale_token,
    local_mode,
    secure_elsewhere,
    secure_local,
)
from cutwater.admin.local_agents import agent_name, start_agents
from cutwater.admin.operations import MetadataStatus
from cutwater.admin.status_text import node_state, stream_row, time_of
from cutwater.cli.commands.token import unconfirmed
from cutwater.cli.framework.command import command, noun
from cutwater.cli.framework.exit_codes import UNHEALTHY, Settings
from cutwater.cli.framework.target import ClusterTarget, ReplicationOption
from cutwater.cli.io.output import LIMITED_VIEW, show, table
from cutwater.client.cluster.log_directory import CLUSTER_FILE
from cutwater.core.text import counted
from cutwater.errors import InvalidArgument

app = noun("Start and stop a local cluster; look at any cluster.")

certificates_app = noun("Certificates of a local cluster: shown, and renewed while it runs.")
app.add_typer(certificates_app, name="certificates")

RequiredDir = Annotated[
    Path, typer.Option("--dir", envvar="CUTWATER_DIR", help="Where everything of the cluster lies.")
]


@command(app)
def start(
    directory: RequiredDir,
    storage_nodes: Annotated[int | None, typer.Option(help="How many storage nodes; three for a new cluster.")] = None,
    replication: ReplicationOption = None,
    metadata: Annotated[
        int | None, typer.Option(help="Metadata nodes: 1 on SQLite, for a new cluster, or 3 or 5 on etcd.")
    ] = None,
    secure: Annotated[
        bool,
        typer.Option("--secure", help="With certificates and access control (enforced), as `cluster secure` does."),
    ] = False,
    agents: Annotated[
        int | None,
        typer.Option(min=0, help="How many agents, which run jobs; also for a cluster that runs already."),
    ] = None,
) -> None:
    """Start a cluster on this machine, new or with existing data. Returns when it takes appends."""
    where = directory.absolute()
    if agents is not None and _serves(where):
        local_cluster.check_same(where, storage_nodes, replication, metadata)
        _show_agents(where, agents)
        return
    if secure:
        check_no_stale_token(where)
    cluster = local_cluster.start(
        where,
        storage_nodes=storage_nodes,
        replication=replication,
        metadata=metadata,
        has_tls=secure,
    )
    told = _started(cluster, directory)
    shown: SecuredCluster | local_cluster.LocalCluster = cluster
    if secure:
        mode = local_mode(where)
        if mode == parse_mode("off"):
            shown = secure_local(where, mode=parse_mode("enforced"))
            told += f"\n{_secured(shown, directory)}"
        else:
            told += f"\naccess control is {mode}"
    if start_agents(where, agents):
        told += f"\n{_tell_agents(where)}"
        shown = local_cluster.load(where) if shown is cluster else shown
    show(shown, told)


def _serves(directory: Path) -> bool:
    """Return whether there is a cluster of which a server runs, and no start is in progress."""
    if not (directory / CLUSTER_FILE).exists():
        return False
    cluster = local_cluster.load(directory)
    return cluster.starting is None and any(map(local_cluster.is_up, cluster.nodes))


def _show_agents(directory: Path, agents: int) -> None:
    started = start_agents(directory, agents)
    told = f"started {counted(len(started), 'agent')}" if started else "nothing was started"
    show(local_cluster.load(directory), f"the cluster runs already; {told}\n{_tell_agents(directory)}")


def _tell_agents(directory: Path) -> str:
    found = local_cluster.load(directory).agents
    return (
        f"{counted(len(found), 'agent')} run{'' if len(found) > 1 else 's'} jobs: {', '.join(map(agent_name, found))}"
    )


def _started(cluster: local_cluster.LocalCluster, directory: Path) -> str:
    store = "etcd" if len(cluster.metadata) > 1 else "SQLite"
    return (
        f"{counted(len(cluster.storage_nodes), 'storage node')} and {counted(len(cluster.metadata), 'metadata node')} "
        f"on {store} run; replication {cluster.replication}\n"
        f"servers: {cluster.servers}\nstop it with: cutwater cluster stop --dir {directory}"
    )


@command(app)
def secure(
    permissive: Annotated[
        bool, typer.Option("--permissive", help="Deny nothing yet, and record what would be denied.")
    ] = False,
    principal: Annotated[str, typer.Option(metavar="NAME", help="The first administrator.")] = "admin",
    key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --servers: the private key of a metadata node, on its machine, which proves that this command "
            "may do this.",
        ),
    ] = None,
    save: Annotated[
        Path, typer.Option(metavar="FILE", help="With --servers: the new file (0600) for the administrator's token.")
    ] = Path("admin.token"),
    *,
    log: ClusterTarget,
) -> None:
    """Turn access control on, and make the first administrator and its token.

    A local cluster (--dir) also gets certificates of private authorities, and is restarted with them. For another
    cluster, run this on the machine of a metadata node, with --servers and --key-file; its servers have TLS already.
    """
    mode = parse_mode("permissive" if permissive else "enforced")
    if log.local is not None:
        if key_file is not None:
            raise InvalidArgument("--key-file is for --servers: the keys of a local cluster lie in its directory")
        found = secure_local(log.local, mode=mode, principal=principal)
        start_agents(log.local)
        show(found, _secured(found, log.directory or log.local))
        return
    servers = str(log.place)
    if key_file is None:
        raise InvalidArgument(
            "--key-file is missing: name the private key of a metadata node, on that node's own machine. Being able to "
            "connect to the cluster is no proof that access control may be turned on"
        )
    tls = log.security.access().tls
    found = secure_elsewhere(servers, key_file, tls, save, mode=mode, principal=principal)
    where = f"{log.as_option} --token-file {shlex.quote(str(save))}"
    if log.security.tls_ca is not None:
        where += f" --tls-ca {shlex.quote(str(log.security.tls_ca))}"
    told = f"access control is {found.mode}; the token of {found.principal} is in {found.token_file}"
    if tls is None:
        told += "\nthis machine is used without TLS: before others connect, start the servers with certificates"
    show(found, f"{told}{unconfirmed(found.unconfirmed)}\nnext:\n{_next(where)}")


def _secured(found: SecuredCluster, directory: Path) -> str:
    where = f"--dir {shlex.quote(str(directory))}"
    return (
        f"access control is {found.mode}; servers and clients use TLS\n"
        f"the token of the administrator {found.principal} is in {found.token_file}: commands with {where} use it, "
        "unless they are given another one\n"
        f"other clients trust the authority in {found.authority}{unconfirmed(found.unconfirmed)}\nnext:\n{_next(where)}"
    )


def _next(where: str) -> str:
    return (
        f"  cutwater token create orders-app --save orders-app.token {where}\n"
        f"  cutwater acl allow orders-app append,create topic:orders {where}"
    )


@command(app)
def access(
    mode: Annotated[
        str, typer.Argument(metavar="[off|permissive|enforced]", help="The mode from now on; left out, it is shown.")
    ] = "",
    *,
    log: ClusterTarget,
) -> None:
    """Show or change the mode of access control.

    off: every client may do everything. permissive: the same, but what the rules would deny is recorded. enforced: the
    rules hold. `cutwater cluster secure` turns it on for the first time.
    """
    if mode:
        wanted = parse_mode(mode)
        changed = log.administer(lambda admin: admin.control.set_mode(wanted))
        told = {"mode": wanted, "unconfirmed": changed.unconfirmed}
        back = ""
        if wanted == parse_mode("off"):
            key = "" if log.local is not None else " --key-file FILE"
            back = (
                f"\n`cutwater cluster secure {log.as_option}{key}` turns it on again, on the machine of a metadata "
                "node; rules and tokens stay"
            )
        show(told, f"access control is {wanted}{unconfirmed(changed.unconfirmed)}{back}")
        return
    found = log.administer(lambda admin: admin.control.who_am_i())
    show({"mode": found.mode}, f"access control is {found.mode}")


@command(app)
def stop(directory: RequiredDir) -> None:
    """Stop all processes of a local cluster. Its data stays. Exit code 0 even if none was running."""
    done = local_cluster.stop(directory.absolute())
    told = f"stopped {counted(len(done.stopped), 'process')}" if done.stopped else "nothing was running"
    if done.killed:
        told += f"; {len(done.killed)} did not end in time and were killed"
    show(done, told)


@command(app)
def restart(directory: RequiredDir) -> None:
    """Start the processes of a local cluster that do not run."""
    started = local_cluster.restart_dead(directory.absolute())
    started += [agent_name(agent) for agent in start_agents(directory.absolute())]
    show({"started": started}, "\n".join(f"started {name}" for name in started) or "everything runs")


@command(app)
def status(log: ClusterTarget) -> None:
    """Show metadata nodes, storage nodes and log streams, as the leader sees them."""
    found, metadata = log.administer(lambda admin: admin.status())
    local = local_cluster.load(log.local) if log.local is not None else None
    if Settings.is_json:
        nodes = [
            msgspec.to_builtins(node) | {"state_name": None if node.state is None else node.state.name}
            for node in found.nodes
        ]
        show(msgspec.to_builtins(found) | {"nodes": nodes, "metadata": msgspec.to_builtins(metadata)}, "")
        return
    title = (
        f"cluster {found.cluster}: GLSN {found.high_watermark} at {time_of(found.cut_time)} UTC, "
        f"leader epoch {found.leader_epoch}"
    )
    if found.halted:
        title += f"\n{found.halted}"
    if found.is_limited:
        title += f"\n{LIMITED_VIEW}"
    show(None, title)
    show(None, table(["metadata node", "address", "pid", "state"], _metadata_rows(metadata, local)))
    columns = ["storage node", "address", "pid", "state", "replicas", "volumes"]
    pids = {member.id: _pid(member) for member in local.storage_nodes} if local is not None else {}
    rows = [(n.node, n.address, pids.get(n.node), node_state(n), n.replicas, n.volumes) for n in found.nodes]
    show(None, table(columns, rows))
    columns = ["log stream", "topic", "state", "epoch", "copies on", "missing", "positions"]
    show(None, table(columns, map(stream_row, found.streams)))


def _metadata_rows(
    found: Iterable[MetadataStatus], local: local_cluster.LocalCluster | None
) -> Iterator[tuple[object, ...]]:
    members = {member.address: member for member in local.metadata} if local is not None else {}
    for node in found:
        member = members.get(node.address)
        number = member.id if member is not None else node.node
        state = "does not answer" if node.node is None else "leads" if node.leads else "follows"
        yield number, node.address, _pid(member) if member is not None else None, state


def _pid(member: local_cluster.ClusterMember) -> str:
    return str(member.pid) if local_cluster.is_up(member) else "does not run"


@command(app)
def health(log: ClusterTarget) -> None:
    """Check whether all is well with a cluster: exit code 0 if so, 3 if not."""
    url, place = log.place, log.local
    cluster = local_cluster.load(place) if place is not None else local_cluster.LocalCluster(str(url), [], [])
    wrong = asyncio.run(local_cluster.health(cluster, place, log.access()))
    reserved = asyncio.run(local_cluster.reserved_names(cluster, log.access()))
    is_limited = not wrong and asyncio.run(local_cluster.is_view_limited(cluster, log.access()))
    notes = [LIMITED_VIEW] if is_limited else []
    notes += [f"note: the name of topic {name!r} is reserved now, and it stays usable; {way}" for name, way in reserved]
    told = {"healthy": not wrong, "wrong": wrong, "notes": notes}
    well = "nothing is wrong with what is shown to you" if is_limited else "all is well"
    show(told, "\n".join([*(wrong or [well]), *notes]))
    if wrong:
        raise typer.Exit(UNHEALTHY)


@command(app)
def events(
    after: Annotated[int, typer.Option(help="Only those after this decision.")] = 0,
    *,
    log: ClusterTarget,
) -> None:
    """Show recent decisions, when and why they were made; the newest last."""
    found = log.administer(lambda admin: admin.events(after))
    rows = [(e.index, time_of(e.time), e.what, e.reason or "-") for e in found.events]
    show(found, table(["decision", "time (UTC)", "what", "why"], rows))
    if found.is_limited and not Settings.is_json:
        show(None, LIMITED_VIEW)


@command(certificates_app, "list")
def list_certificates(directory: RequiredDir) -> None:
    """Show the certificates of a local cluster, and when they expire."""
    found = _renewal().list_certificates(directory.absolute())
    rows = [(one.name, time_of(round(one.until * 1_000_000)), one.file) for one in found]
    show(found, table(["certificate", "expires (UTC)", "file"], rows))


@command(certificates_app)
def renew(
    directory: RequiredDir,
    authority: Annotated[
        Literal["begin", "finish"] | None,
        typer.Option(
            help="begin: make new authorities, which servers trust beside the old ones. finish: when clients trust "
            "them, too, use and trust only the new ones."
        ),
    ] = None,
) -> None:
    """Give all servers of a local cluster and its owner new certificates, while it runs.

    Returns when the servers use them. Open connections go on. Clients elsewhere need the authority's new file between
    `--authority begin` and `--authority finish`.
    """
    where, renewal = directory.absolute(), _renewal()
    steps = {None: renewal.renew, "begin": renewal.begin_authority, "finish": renewal.finish_authority}
    done = steps[authority](where)
    told = f"{counted(len(done.servers), 'server')} use{'' if len(done.servers) > 1 else 's'} a new certificate"
    if done.stopped:
        told += f"; {', '.join(done.stopped)}: not running, and a new certificate is there for the next start"
    if authority == "begin":
        told += (
            "\nservers trust the old and the new authorities. Now give clients elsewhere the file "
            f"{done.authority}, and then:\n"
            f"  cutwater cluster certificates renew --authority finish --dir {shlex.quote(str(directory))}"
        )
    if authority == "finish":
        told += f"\nonly the new authorities are trusted; clients trust {done.authority}"
    show(done, told)


def _renewal() -> ModuleType:
    # Loads a large library, which other commands do not need.
    return import_module("cutwater.admin.certificate_renewal")
