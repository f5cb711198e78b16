"""Turns access control on: the first administrator, its token, and the mode; for a local cluster with certificates."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path

from msgspec import Struct, structs

from cutwater.admin import local_cluster
from cutwater.admin.cluster_certificates import ADMIN_TOKEN, OWNER, authority_file, node_access
from cutwater.admin.proven_admin import proven_admin, read_server_key
from cutwater.client.cluster.log_directory import METADATA
from cutwater.client.cluster.metadata_client import parse_servers
from cutwater.core.access.access_decisions import AccessMode
from cutwater.core.access.rights import CLUSTER, Right
from cutwater.errors import AlreadyExists, InvalidArgument, Refused, Unavailable
from cutwater.runtime.permissions import SECRET_MODE
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
    check_new(token_file)
    if not cluster.has_tls:
        local_cluster.stop(directory)
        cluster = local_cluster.load(directory)
        cluster.has_tls = True
        cluster.save(directory)
        cluster = local_cluster.start(directory)
    if not cluster.running():
        raise Unavailable(f"no process of the cluster runs: {local_cluster.again(directory)}")
    member = cluster.metadata[0]
    key = read_server_key(directory / (f"mr{member.id}.key" if cluster.etcd else f"{METADATA}.key"))
    tls = node_access(directory, member.id).tls
    found = asyncio.run(_secure(cluster.servers, key, tls, mode, principal, token_file))
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
    check_new(token_file)
    return asyncio.run(_secure(servers, read_server_key(key_file), tls, mode, principal, token_file))


async def _secure(
    servers: str, key: ServerKey, tls: ssl.SSLContext | None, mode: AccessMode, principal: str, token_file: Path
) -> SecuredCluster:
    """Make the administrator and its token, save the token, and then set the mode. In this order, an interruption
    leaves access control off, and the command can be run again."""
    control = await proven_admin(parse_servers(servers), key, tls)
    now = await control.who_am_i()
    if now.mode is not AccessMode.OFF:
        raise Refused(
            f"access control is on already ({now.mode}): an administrator changes the mode with `cutwater cluster "
            "access`. If no administrator has a token any more, `cutwater mr recover-admin` makes one"
        )
    await control.allow(principal, (str(Right.CLUSTER_ADMIN),), str(CLUSTER))
    created = await control.create_token(principal)
    save_token(token_file, created.token)
    changed = await control.set_mode(mode)
    return SecuredCluster(servers, mode, principal, created.id, str(token_file), unconfirmed=changed.unconfirmed)


def is_secured(directory: Path) -> bool:
    """Whether a local cluster has the token of an administrator in its directory."""
    return (directory / ADMIN_TOKEN).exists()


def check_new(path: Path) -> None:
    """Refuse a file that exists: it may hold a token that is still needed."""
    if path.exists() or path.is_symlink():
        raise AlreadyExists(f"{path} exists already, and may hold a token that is needed: move it away, or remove it")
    if not path.parent.is_dir():
        raise InvalidArgument(f"{path.parent} is no directory: make it, or name a file elsewhere")


def save_token(path: Path, token: str) -> None:
    """Write a token into a new file that only its owner can read. It is durable on return."""
    check_new(path)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, SECRET_MODE)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(f"{token}\n")
            file.flush()
            os.fsync(descriptor)
    except FileExistsError:
        check_new(path)
        raise
    except OSError as error:
        raise InvalidArgument(
            f"the token cannot be kept in {path}: {error.strerror or error}; name a file that can be written"
        ) from error
