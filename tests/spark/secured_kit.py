"""A local cluster with TLS and access control, of real processes, and principals with as few rights as possible."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cutwater
from cutwater.admin import local_cluster
from cutwater.admin.cluster_certificates import authority_file, owner_access
from cutwater.admin.cluster_security import save_token, secure_local
from cutwater.admin.operations import Admin
from cutwater.client.cluster.metadata_client import parse_servers
from cutwater.core.access.access_decisions import AccessMode
from cutwater.runtime import processes


class SecuredCluster:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.servers = local_cluster.load(directory).servers
        self.ca = authority_file(directory)

    def allow(self, principal: str, *grants: tuple[str, str]) -> None:
        """Allow pairs of rights, with commas, and a resource. Returns when all servers act by them."""

        async def change() -> None:
            async with self._admin() as admin:
                for rights, resource in grants:
                    answer = await admin.control.allow(principal, rights.split(","), resource)
                    assert answer.unconfirmed == ()

        asyncio.run(change())

    def remove(self, principal: str, rights: str, resource: str) -> None:
        async def change() -> None:
            async with self._admin() as admin:
                answer = await admin.control.remove(principal, resource, rights.split(","))
                assert answer.unconfirmed == ()

        asyncio.run(change())

    def token(self, principal: str) -> Path:
        """Make a token for a principal, and return the file that has it."""

        async def make() -> str:
            async with self._admin() as admin:
                return (await admin.control.create_token(principal)).token

        path = self.directory.with_name(f"{principal}.token")
        save_token(path, asyncio.run(make()))
        return path

    def _admin(self) -> Admin:
        return Admin(parse_servers(self.servers), access=owner_access(self.directory))

    def owner(self) -> cutwater.Client:
        """Connect as the administrator, who also may read and write every topic."""
        access = owner_access(self.directory)
        return cutwater.connect(self.servers, tls=access.tls, token=access.token)

    def options(self, token: Path) -> dict[str, str]:
        return {"servers": self.servers, "tls.ca": str(self.ca), "token.file": str(token)}


@contextmanager
def secured_cluster(directory: Path) -> Iterator[SecuredCluster]:
    """Start it with one storage node, which makes tests quicker."""
    cluster = local_cluster.start(directory, storage_nodes=1, metadata=1, has_tls=True)
    try:
        secure_local(directory, mode=AccessMode.ENFORCED)
        yield SecuredCluster(directory)
    finally:
        members = local_cluster.load(directory).processes() if (directory / "cluster.json").exists() else []
        processes.stop([member.pid for member in members or cluster.processes() if member.pid], 5.0)


def secret_in(token: Path) -> str:
    found = re.fullmatch(r"cwt_[0-9a-f]+_([0-9a-f]{64})\n?", token.read_text())
    assert found is not None
    return found[1]
