"""Turns access control on: the first administrator, its token, and the mode; for a local cluster with certificates."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable
from pathlib import Path

from msgspec import Struct, structs

from cutwater.admin import local_cluster
from cutwater.admin.access_calls import AccessCalls
from cutwater.admin.cluster_certificates import ADMIN_TOKEN, OWNER, authority_file, node_access, token_id_in
from cutwater.admin.proven_admin import proven_admin, read_server_key
from cutwater.client.cluster.credentials import Access
from cutwater.client.cluster.log_directory import CLUSTER_FILE, METADATA
from cutwater.client.cluster.metadata_client import parse_servers
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.rights import CLUSTER, Right
from cutwater.core.internal_topics import AUDIT, PROGRAMS
from cutwater.errors import AlreadyExists, InvalidArgument, Refused, Unavailable
from cutwater.runtime import system
from cutwater.runtime.local_files import MachineFiles
from cutwater.wire.identity.server_keys import ServerKey


class SecuredCluster(Struct, frozen=True):
    """A cluster with access control. ``token_file`` has the token of the administrator; ``token_id`` is its id.
    ``authority`` is the file of the authority that clients trust, if it was made here."""

    servers: str
    mode: AccessMode
    principal: str
    token_id: str
    token_file: str
    authority: str = ""
    unconfirmed: tuple[str, ...] = ()


def secure_local(directory: Path, *, mode: AccessMode, principal: str = OWNER) -> SecuredCluster:
    """Give a local cluster certificates, restart it with them if it has none yet, and turn access control on."""
    cluster = local_cluster.load(directory)
    token_file = directory / ADMIN_TOKEN
    if not cluster.has_tls:
        if cluster.running():
            # What forbids it is found before the restart.
            asyncio.run(_kept_token(_ways_in(directory, cluster), token_file, principal))
        local_cluster.stop(directory)
        cluster = local_cluster.load(directory)
        cluster.has_tls = True
        cluster.save(directory)
        cluster = local_cluster.start(directory)
    found = asyncio.run(_secure(_ways_in(directory, cluster), mode, principal, token_file))
    return structs.replace(found, authority=str(authority_file(directory)))


def secure_elsewhere(
    servers: str,
    key_file: Path,
    tls: ssl.SSLContext | None,
    token_file: Path,
    *,
    mode: AccessMode,
    principal: str = OWNER,
) -> SecuredCluster:
    """Turn access control on in a cluster whose servers were started by hand, on the machine of a metadata node."""
    return asyncio.run(_secure(_WaysIn(servers, read_server_key(key_file), tls), mode, principal, token_file))


def local_mode(directory: Path) -> AccessMode:
    """Return the mode of a local cluster that runs. Its owner needs no rights for that."""

    async def ask() -> AccessMode:
        return (await (await local_control(directory)).who_am_i()).mode

    return asyncio.run(ask())


async def local_control(directory: Path) -> AccessCalls:
    """Return calls about access control that are made with the key of a metadata node of a local cluster. While access
    control is on, they may change nothing."""
    return await _ways_in(directory, local_cluster.load(directory)).control()


class _WaysIn(Struct, frozen=True):
    """Where a cluster is, and what proves that the caller is on the machine of a metadata node."""

    servers: str
    key: ServerKey
    tls: ssl.SSLContext | None

    def control(self) -> Awaitable[AccessCalls]:
        return proven_admin(parse_servers(self.servers), self.key, self.tls)


def _ways_in(directory: Path, cluster: local_cluster.LocalCluster) -> _WaysIn:
    if cluster.starting is not None or not cluster.running():
        raise Unavailable(f"the cluster does not run, or its start did not end: {local_cluster.again(directory)}")
    member = cluster.metadata[0]
    key = read_server_key(directory / (f"mr{member.id}.key" if cluster.etcd else f"{METADATA}.key"))
    return _WaysIn(cluster.servers, key, node_access(directory, member.id).tls if cluster.has_tls else None)


async def _secure(ways: _WaysIn, mode: AccessMode, principal: str, token_file: Path) -> SecuredCluster:
    """Make the administrator and its token, save the token, and then set the mode. In this order, an interruption
    leaves access control off, and the command can be run again."""
    identifier = await _kept_token(ways, token_file, principal)
    control = await ways.control()
    await control.allow(principal, (str(Right.CLUSTER_ADMIN),), str(CLUSTER))
    if not identifier:
        created = await control.create_token(principal)
        save_token(token_file, created.token)
        identifier = created.id
    changed = await control.set_mode(mode)
    return SecuredCluster(ways.servers, mode, principal, identifier, str(token_file), unconfirmed=changed.unconfirmed)


async def _kept_token(ways: _WaysIn, token_file: Path, principal: str) -> str:
    """Return the id of the token that an interrupted run has made and saved; empty if there is none. Raises if access
    control is on, if users have topics that the cluster needs, or if the file has something else."""
    control = await ways.control()
    now = await control.who_am_i()
    if now.mode is not AccessMode.OFF:
        raise Refused(
            f"access control is on already ({now.mode}): an administrator changes the mode with `cutwater cluster "
            "access`. If no administrator has a token any more, `cutwater mr recover-admin` makes one"
        )
    await check_names(ways.servers, Access(ways.tls))
    if token_file.is_file():
        identifier = token_id_in(token_file)
        # While access control is off, only a caller with the key of a metadata node can have made it.
        if any(found.id == identifier and not found.scopes for found in await control.tokens(principal)):
            return identifier
    check_new(token_file)
    return ""


async def check_names(servers: str, access: Access) -> None:
    """Refuse, before anything is changed, a cluster with topics of users under names that it needs for itself."""
    found = await local_cluster.reserved_names(local_cluster.LocalCluster(servers, [], []), access)
    taken = [f"topic {name!r}: {way}" for name, way in found if name in (AUDIT.name, PROGRAMS.name)]
    if taken:
        raise Refused(
            "with access control, the cluster needs topics with reserved names that users took with an earlier "
            f"version. Nothing was changed. {'. '.join(taken)}"
        )


def check_no_stale_token(directory: Path) -> None:
    """Refuse a directory without a cluster that has the token of an earlier one."""
    if directory.is_dir() and not (directory / CLUSTER_FILE).exists():
        check_new(directory / ADMIN_TOKEN)


def check_new(path: Path) -> None:
    """Refuse a file that exists: it may hold a token that is still needed."""
    if path.exists() or path.is_symlink():
        raise AlreadyExists(f"{path} exists already, and may hold a token that is needed: move it away, or remove it")
    if not path.parent.is_dir():
        raise InvalidArgument(f"{path.parent} is no directory: make it, or name a file elsewhere")


def save_token(path: Path, token: str) -> None:
    """Write a token into a new file that only its owner can read, all of it or nothing. It is durable on return."""
    check_new(path)
    whole = path.with_name(f".{path.name}.{system.token_hex(4)}")
    try:
        try:
            system.made(MachineFiles).create_secret(whole, f"{token}\n".encode("ascii"), is_lasting=True)
            # Unlike a renaming, this replaces no file that was made meanwhile.
            os.link(whole, path)
        finally:
            whole.unlink(missing_ok=True)
        system.made(MachineFiles).sync_dir(path.parent)
    except FileExistsError:
        check_new(path)
        raise
    except OSError as error:
        raise InvalidArgument(
            f"the token cannot be kept in {path}: {error.strerror or error}; name a file that can be written"
        ) from error
